"""The command `lachesis`: one verb a module, imported when it is called.

Packages add verbs by entry points in the group `lachesis.verbs`: a name, and a function that takes the arguments and
gives the exit code.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NoReturn

from backends.errors import ExitCode, LachesisError
from backends.plugins import Registry
from lachesis.cli.verb_parser import VerbParser, examples_of

GROUPS = {
    "begin": {
        "doctor": "what works on this machine, and how to install the rest",
        "demo": "run a few problems with a small model, on the CPU",
        "envs": "the installed environments",
        "new": "write a new environment and its test",
        "check": "find mistakes in an environment, without a model",
        "audit": "try to cheat the reward; find leaks and wrong answers that pass",
        "chat": "talk to a model in an environment, or be the agent",
    },
    "run": {
        "eval": "measure a model in an environment, or compare two runs",
        "process": "run an environment, and write training data",
        "serve": "run an environment for a trainer",
        "batch": "run a file of prompts into ShareGPT files",
        "play": "run an environment of Atropos, unmodified",
    },
    "look": {
        "view": "show the runs of a folder in a browser",
        "report": "rewrite the HTML report of a run",
        "export": "write a run in another format, or a trained model",
        "trajectories": "count, check, convert and deduplicate trajectories",
        "compress": "fit long trajectories into a budget of tokens",
        "verify": "check that a file has exactly the sampled tokens",
    },
    "train": {
        "train": "train a model, as one command",
        "api": "the rollout API between environments and a trainer",
        "engine": "train and sample a model on this machine",
        "policy": "serve the weights of a training run",
    },
    "more": {
        "fake-server": "a model server without a model, for tests",
        "images": "build images of Dockerfiles without an engine",
        "pool": "run sandboxes on many machines",
        "sandboxes": "list, remove and attack sandboxes",
        "tasks": "build, convert and verify task folders",
    },
}
VERBS = {verb: text for verbs in GROUPS.values() for verb, text in verbs.items()}
SUBCOMMANDS = {
    **dict.fromkeys(("compare", "regrade"), "eval"),
    **dict.fromkeys(("convert", "dedup", "show", "stats", "validate"), "trajectories"),
    **dict.fromkeys(("build", "prune"), "images"),
    **dict.fromkeys(("attack", "reap"), "sandboxes"),
    **dict.fromkeys(("up", "worker"), "pool"),
    "merge": "batch",
}
"""The verb of a second word, for who writes that first."""
ALIASES = {"evaluate": "eval"}
"""Other names; an environment's own command has this one."""
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


def program() -> NoReturn:
    """The program `lachesis`."""
    from lachesis.runs.ending import end_with

    end_with(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever started it
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    parser = VerbParser(prog="lachesis", usage="lachesis [-h] [--version] VERB ...")
    parser.format_help = _help  # type: ignore[method-assign]
    version = f"lachesis {importlib.metadata.version('lachesis-core')}"  # the umbrella may not be installed
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("verb", nargs="?", help=argparse.SUPPRESS)
    # Each verb parses its arguments itself, so only its modules are imported.
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if parsed.verb == "help" and parsed.rest:
        parsed.verb, parsed.rest = parsed.rest[0], [*parsed.rest[1:], "--help"]
    parsed.verb = ALIASES.get(parsed.verb, parsed.verb)
    if parsed.verb in (None, "help"):
        parser.print_help(sys.stderr)
        return ExitCode.SETTINGS
    if parsed.verb not in VERBS and parsed.verb not in REGISTRY.names():
        near = get_close_matches(parsed.verb, VERBS, n=1)
        near = [f"`lachesis {SUBCOMMANDS[parsed.verb]} {parsed.verb}`"] if parsed.verb in SUBCOMMANDS else near
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


def _help() -> str:
    """In one screen: examples, then a line for each verb."""
    width = max(map(len, VERBS)) + 2
    lines = ["usage: lachesis [-h] [--version] VERB [options]", "", examples_of("lachesis").rstrip(), ""]
    others = {verb: "" for verb in REGISTRY.names() if verb not in VERBS and " " not in verb}
    for title, verbs in {**GROUPS, **({"of other packages": others} if others else {})}.items():
        lines.append(f"{title}:")
        for verb, text in verbs.items():
            if (package := PACKAGES.get(verb)) and not _is_installed(package):
                text += f" (pip install {package})"
            lines.append(f"  {verb:<{width}}{text}".rstrip())
    return "\n".join([*lines, "", "`lachesis VERB --help` has the flags of each.", ""])


def port_number(text: str) -> int:
    """The value of `--port`."""
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)
