"""`lachesis eval|process|serve ENV`: short flags for what everybody sets; all other settings keep their names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from backends.errors import SettingsError
from lachesis.cli.verb_parser import ENVIRONMENT, MODEL, NO_ENVIRONMENT, OF_ENVIRONMENT, VerbParser

Verb = Literal["eval", "process", "serve"]

_COMMANDS: Final = {"eval": "evaluate", "process": "process", "serve": "serve"}
_DESCRIPTION: Final = {
    "eval": "Measure a model: its score with an interval, and every rollout to read.",
    "process": "Run groups of rollouts, and write them down as training data.",
    "serve": "Run groups of rollouts for a trainer that runs already. It gets them, with their exact tokens, from its "
    "rollout API (`lachesis api`, at --env.rollout_server_url). `lachesis train` starts all three. With --as STANDARD, "
    "serve the environment to clients of another standard instead, such as openenv.",
}
PLAIN: Final = ("--config", "--slurm", "--testing", "--save-trajectories", "--save_trajectories")
"""Flags of every setting's parser that have no section."""
_EPILOG: Final = """\
Every other setting has its own flag, --env.NAME VALUE or --openai.NAME VALUE, or a line in --config FILE;
`lachesis {verb} ENV --help-all` lists them, with the environment's own, and the defaults that it sets.
"""


def main(
    verb: Verb, argv: Sequence[str] | None = None, *, run: Any = None, prepare: Callable[[Any], None] | None = None
) -> int:
    """Play; the exit code. `run`: see `command_line.main`. `prepare` is called with the environment's class."""
    arguments = list(argv or ())
    parser, settings = _parser(verb)
    if not arguments or {"-h", "--help"} & {*arguments}:
        parser.print_help()
        if not arguments:
            print(NO_ENVIRONMENT, file=sys.stderr)
        return 0 if arguments else 2
    target, *rest = arguments
    if target.startswith("-"):
        raise SettingsError(f"lachesis {verb}: name the environment first, before {target}; `lachesis envs` lists some")
    if sys.stderr.isatty():  # a file may be one of Atropos, whose import takes seconds
        print(f"{target}: {verb}", file=sys.stderr)
    from lachesis.cli.environment_classes import environment_class
    from lachesis.runs import command_line

    env_cls, command, prog = environment_class(target), _COMMANDS[verb], f"lachesis {verb} {target}"
    if prepare is not None:
        prepare(env_cls)
    if "--help-all" in rest:
        return command_line.main(env_cls, [command, "--help"], prog=prog)
    given, rest = parser.parse_known_args(arguments)
    del given.ENV
    names = {text.partition("=")[0] for text in rest}
    _reject_misspelt(parser, names)
    flags = []
    for setting, value in vars(given).items():
        if f"--{setting}" in names:
            raise SettingsError(f"--{setting} is given twice: it is {settings[setting]} here; keep one of the two")
        flags.append(f"--{setting}={value}")
    short = {setting: flag for setting, flag in settings.items() if setting in vars(given)}
    return command_line.main(env_cls, [command, *rest, *flags], prog=prog, run=run, short=short)


def _reject_misspelt(parser: argparse.ArgumentParser, given: Iterable[str]) -> None:
    """An unknown flag that is near a short one; the others are flags of settings, or nearly so."""
    from lachesis.settings.flags import close_names

    own = {name.lstrip("-"): action for action in parser._actions for name in action.option_strings}
    by_setting = {action.dest.rpartition(".")[2].replace("_", "-"): action for action in own.values()}
    by_word = {word: action for setting, action in by_setting.items() for word in setting.split("-")}
    known = {**by_word, **by_setting, **own}
    for flag in given:
        name = flag.lstrip("-").replace("_", "-")
        if flag.startswith("--") and "." not in flag and flag not in PLAIN and (near := close_names(name, known)):
            action = known[near[0]]
            meant = f"{action.option_strings[-1]} ({str(action.help).partition(' (default')[0]})"
            parser.error(f"unknown flag {flag}; did you mean {meant}?")


DEFAULTS = {
    "env.eval_items": 50,
    "env.total_steps": 1000,
    "env.eval_samples": 1,
    "env.group_size": 4,
    "env.max_eval_workers": 16,
    "env.eval_temperature": 0,
    "env.agent_temperature": 1,
    "env.max_token_length": 2048,
    "env.max_agent_turns": 30,
}
"""Of the settings that have a short flag, where the environment sets no other. Their module would take longer to import
than a help may take."""


def add_agent_flags(add: Callable[..., None], *, temperature: str) -> None:
    """The short flags of what an agent may do. `add` gets a setting, the name of its value, a help, and the flags."""
    add(temperature, "T", "sampling temperature", "-T", "--temperature", read=float)
    add("env.max_token_length", "N", "limit of tokens in one answer", "-t", "--max-tokens", read=int)
    add("env.max_agent_turns", "N", "limit of turns in a rollout", "--max-turns", read=int)
    toolsets = "toolsets and tools that the agent has"
    add("env.enabled_toolsets", "A,B", toolsets, "--toolsets", read=lambda text: f"[{text}]")
    add("env.terminal_backend", "NAME", "where sandboxes run: local, docker, ...", "--backend")


def _parser(verb: Verb) -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """The parser, and by the name of a setting the flag for it."""
    parser = VerbParser(
        prog=f"lachesis {verb} ENV",
        usage=f"lachesis {verb} ENV [options]",  # which the prog of an error has too
        description=_DESCRIPTION[verb],
        epilog=_EPILOG.format(verb=verb),
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("ENV", help=ENVIRONMENT)
    flags: dict[str, str] = {}

    def add(setting: str, metavar: str, text: str, *names: str, read: Any = str) -> None:
        if setting in DEFAULTS and (verb, setting) != ("serve", "env.total_steps"):  # it ends with the trainer
            text += f" (default: {DEFAULTS[setting]})"
        parser.add_argument(*names, dest=setting, metavar=metavar, help=text, type=read)
        flags[setting] = names[0]

    evaluates = verb == "eval"
    number, counted = {
        "eval": ("env.eval_items", "items to run"),
        "process": ("env.total_steps", "items to run, one group of rollouts each"),
        "serve": ("env.total_steps", "stop at this step of the trainer (default: when it ends)"),
    }[verb]
    add("openai.model_name", "MODEL", f"{MODEL} ({OF_ENVIRONMENT})", "-m", "--model")
    add("openai.base_url", "URL", "URL of the OpenAI-compatible server", "-b", "--base-url")
    add("openai.api_key", "KEY", "API key of the server", "-k", "--api-key")
    if verb == "serve":  # it runs as many items as the trainer asks for; `-n` was this flag
        add(number, "N", counted, "--steps", read=int)
        parser.add_argument("-n", dest=number, type=int, help=argparse.SUPPRESS)
    else:
        add(number, "N", counted, "-n", "--items", read=int)
    add("env.eval_samples" if evaluates else "env.group_size", "N", "rollouts per item", "-r", "--rollouts", read=int)
    workers = "env.max_eval_workers" if evaluates else "env.max_num_workers"
    at_once = "rollouts at once" if evaluates else "groups at once (default: 8 for each server)"
    add(workers, "N", at_once, "-c", "--concurrency", read=int)
    add_agent_flags(add, temperature="env.eval_temperature" if evaluates else "env.agent_temperature")
    if evaluates:
        add("env.data_dir_to_save_evals", "FOLDER", "folder for the results", "-o", "--output")
    elif verb == "process":
        groups = "env.data_path_to_save_groups"
        add(
            groups,
            "FOLDER",
            "folder for the results",
            "-o",
            "--output",
            read=lambda text: Path(text, "groups.jsonl"),
        )
    return parser, flags
