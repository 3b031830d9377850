"""The command `lachesis`: one verb a module, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from lachesis.errors import ExitCode

VERBS = {
    "api": "the rollout API: takes groups from environments, gives batches to a trainer, and loses none",
    "batch": "play a file of prompts into ShareGPT files, or merge the shards of such a run",
    "check": "find mistakes of an environment without a model",
    "compress": "fit long trajectories into a budget of tokens, with a summary instead of their middle turns",
    "demo": "play a few problems with the embedded model and the reference policy",
    "doctor": "show what works on this machine, and how to install what is missing",
    "engine": "train and sample a model on this machine, with the Tinker SDK as the client",
    "envs": "list the environments that come along",
    "eval": "measure a model in an environment; compare finished evaluations",
    "export": "write the groups of a finished run in another format",
    "fake-server": "serve completions without a model, for tests and load measurements",
    "images": "make images of Dockerfiles without an engine, list and remove their layers",
    "new": "write the file of a new environment, and its test",
    "play": "play an environment that was written for Atropos, unmodified",
    "policy": "serve the weights of a training run, for evaluations",
    "process": "play an environment, and write training data",
    "report": "write the HTML report of a groups file again",
    "sandboxes": "list the sandboxes of a backend, remove those that killed runs left, and attack them",
    "serve": "play an environment for a trainer",
    "tasks": "show and convert tasks in Harbor's folder format",
    "trajectories": "figures, checks, conversion and duplicates of files of trajectories",
    "train": "train a model: rollout API, trainer and environment as one command",
    "verify": "check that sample files hold exactly the sampled tokens, each once",
    "view": "show a folder of runs in a browser, while it grows",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code."""
    parser = argparse.ArgumentParser(prog="lachesis", description="Environments for tool-calling language models.")
    parser.add_argument("--version", action="version", version=f"lachesis {importlib.metadata.version('lachesis-rl')}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, help_text in VERBS.items():
        # Each verb parses its arguments itself, so only its modules are imported.
        verbs.add_parser(verb, help=help_text, add_help=False)
    arguments = list(sys.argv[1:] if argv is None else argv)
    parsed, rest = parser.parse_known_args(arguments)
    if "" not in sys.path:
        sys.path.append("")  # plug-ins of the user, `module:name`, may be in the current folder
    try:
        module = importlib.import_module(f"lachesis.cli.{parsed.verb.replace('-', '_')}")
        code: int = module.main(rest)
    except Exception as error:
        from lachesis.runs.command_line import report_error

        return report_error(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return ExitCode.STOPPED
    return code


def port_number(text: str) -> int:
    """The value of `--port`."""
    if not 0 <= (port := int(text)) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{port} is no port: 0 to 65535")
    return port
