"""The command `lachesis`: one verb a module, imported when it is called.

Packages add verbs by entry points in the group `lachesis.verbs`: a name, and a function that takes the arguments and
gives the exit code.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from backends.errors import ExitCode, LachesisError
from backends.plugins import Registry

GROUPS = {
    "begin": {
        "doctor": "show what works on this machine, and how to install what is missing",
        "demo": "play a few problems with the embedded model and the reference policy",
        "envs": "list the installed environments",
        "new": "write a new environment and its test",
        "check": "find mistakes in an environment without a model",
        "audit": "the same in depth: cheats, leaks, limits, wrong answers",
        "chat": "talk to a model in an environment, be the agent, go on from a recorded rollout",
    },
    "play": {
        "eval": "measure a model in an environment; compare finished evaluations",
        "process": "play an environment, and write training data",
        "serve": "play an environment for a trainer",
        "batch": "turn a file of prompts into ShareGPT files, or merge the shards of such a run",
        "play": "the same for an environment of Atropos, unmodified; without a verb it means process",
    },
    "look": {
        "view": "show a folder of runs in a browser, while it grows",
        "report": "write the HTML report of a groups file again",
        "export": "write the groups of a finished run in another format, or the model of a training run",
        "trajectories": "summarise, check, convert and deduplicate files of trajectories",
        "compress": "fit long trajectories into a token budget by summarising their middle turns",
        "verify": "check that sample files contain exactly the sampled tokens, each once",
    },
    "train": {
        "train": "train a model: rollout API, trainer and environment as one command",
        "api": "the rollout API: takes groups from environments, gives batches to a trainer, and loses none",
        "engine": "train and sample a model on this machine, with the Tinker SDK as the client",
        "policy": "serve the weights of a training run, for evaluations",
    },
    "more": {
        "fake-server": "serve completions without a model, for tests and load measurements",
        "images": "build images from Dockerfiles without an engine; list and remove their layers",
        "pool": "run sandboxes on many machines: workers that Slurm, Ray or ssh place",
        "sandboxes": "list sandboxes, remove what killed runs left behind, and attack their isolation",
        "tasks": "show and convert tasks in Harbor's folder format",
    },
}
VERBS = {verb: text for verbs in GROUPS.values() for verb, text in verbs.items()}
PACKAGES = {
    **dict.fromkeys(("audit", "chat", "check", "doctor", "images", "new", "sandboxes"), "lachesis-console"),
    **dict.fromkeys(("batch", "compress", "export", "trajectories"), "lachesis-data"),
    **dict.fromkeys(("demo", "envs", "eval regrade", "tasks"), "lachesis-envs"),
    **dict.fromkeys(("fake-server", "sandboxes attack"), "lachesis-testing"),
    **dict.fromkeys(("api", "engine", "export weights", "policy", "train"), "lachesis-train"),
    **dict.fromkeys(("eval compare", "report", "view"), "lachesis-view"),
    "play": "lachesis-compat",
    "pool": "lachesis-pools",
    "serve as": "lachesis-doors",
    "verify": "lachesis-tokens",
}
"""Of verbs that are not in this package."""
REGISTRY: Registry[Callable[[Sequence[str]], int]] = Registry(
    "verb",
    "lachesis.verbs",
    {verb: f"lachesis.cli.{verb.replace('-', '_')}:main" for verb in VERBS if verb not in PACKAGES},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code."""
    parser = argparse.ArgumentParser(
        prog="lachesis",
        usage="lachesis [-h] [--version] VERB ...",
        description="Environments for tool-calling language models.",
        epilog=f"{_listed()}\n\n`lachesis VERB --help` has the flags of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"lachesis {importlib.metadata.version('lachesis-core')}"  # the umbrella may not be installed
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("verb", nargs="?", help=argparse.SUPPRESS)
    # Each verb parses its arguments itself, so only its modules are imported.
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if parsed.verb is None:
        parser.print_help(sys.stderr)
        return ExitCode.SETTINGS
    if parsed.verb not in VERBS and parsed.verb not in REGISTRY.names():
        near = get_close_matches(parsed.verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(VERBS)}"
        parser.error(f"there is no verb {parsed.verb!r}; {hint}")
    if "" not in sys.path:
        sys.path.append("")  # plug-ins of the user, `module:name`, may be in the current folder
    try:
        return command(parsed.verb)(parsed.rest)
    except Exception as error:
        from lachesis.runs.command_line import report_error

        return report_error(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return ExitCode.STOPPED


def command(verb: str) -> Callable[[Sequence[str]], int]:
    """The function of a verb. Raises `LachesisError` where the package that has it is not installed."""
    if (package := PACKAGES.get(verb)) and not _is_installed(package):
        raise LachesisError(f"`lachesis {verb}` is in the package {package}. Next step: pip install {package}")
    return REGISTRY.load(verb)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def _listed() -> str:
    width = max(map(len, VERBS)) + 2
    lines = []
    others = {verb: "" for verb in REGISTRY.names() if verb not in VERBS and " " not in verb}
    for title, verbs in {**GROUPS, **({"of other packages": others} if others else {})}.items():
        lines.append(f"\n{title}:")
        for verb, text in verbs.items():
            if (package := PACKAGES.get(verb)) and not _is_installed(package):
                text += f" (pip install {package})"
            first, *more = textwrap.wrap(text, 78 - width) or [""]
            lines += [f"  {verb:<{width}}{first}", *(f"  {'':<{width}}{line}" for line in more)]
    return "\n".join(lines).strip()


def port_number(text: str) -> int:
    """The value of `--port`."""
    if not 0 <= (port := int(text)) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{port} is not a port: 0 to 65535")
    return port
