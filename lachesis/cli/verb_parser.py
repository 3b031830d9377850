"""The command line of a verb, with a help that begins with examples and names each flag once."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

NO_ENVIRONMENT = "error: name an environment: `lachesis envs` lists some"
ENVIRONMENT = "env.py, env.py:Class, package.module:Class, SCHEME:NAME (docs/bring.md), or a name of `lachesis envs`"
"""What ENV may be, in all helps."""
MODEL = "name of the model on its server; or embedded (a small one, on this machine), reference, or a GGUF file"
OF_ENVIRONMENT = "default: embedded, unless the environment sets another"
"""Without `--model`."""


class VerbParser(argparse.ArgumentParser):
    """The parser of a verb. Its help is: usage in one line, examples, what the verb does, arguments.

    Args:
        description: a docstring; a first "`lachesis VERB ...`: " is left out, since the usage says it.
        allow_abbrev: off, since a flag can be written in two ways.
        usage: default: the arguments without a flag and the flags that are required, then "[options]".
    """

    def __init__(self, *, description: str | None = None, usage: str | None = None, **kwargs: Any):
        kwargs.setdefault("formatter_class", OnceFormatter)
        kwargs.setdefault("allow_abbrev", False)
        self._rare: dict[str, str | None] = {}
        """Helps of flags that only `--help-all` shows, by name."""
        super().__init__(description=_without_title(description or ""), usage=usage, **kwargs)

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        """The same argument; a flag with "_" may be written with "-" too, as help shows it.

        Args:
            rare: only `--help-all` shows it; or the help that `--help-all` shows.
            old: further names that no help shows.
        """
        rare, old = kwargs.pop("rare", False), kwargs.pop("old", ())
        if rare and not self._rare:
            super().add_argument("--help-all", action=_HelpAll, help="show this help with the flags that few need")
            shown = self._optionals._group_actions
            shown.insert(1, shown.pop())  # beside --help
        dashes = [(name if name[:2] != "--" else name.replace("_", "-"), name) for name in (*old, *names)]
        action = super().add_argument(*dict.fromkeys(name for pair in dashes for name in pair), **kwargs)
        action.shown = [name for name in action.option_strings if name not in old]  # type: ignore[attr-defined]
        if rare:
            self._rare[action.dest] = rare if isinstance(rare, str) else action.help
            action.help = action.help if isinstance(rare, str) else argparse.SUPPRESS
        return action

    def add_subparsers(self, **kwargs: Any) -> Any:
        """The same; helps say SUBCOMMAND, and list them below."""
        return super().add_subparsers(**{"metavar": "SUBCOMMAND", **kwargs})

    def format_usage(self) -> str:
        return f"usage: {self.usage % {'prog': self.prog} if self.usage else f'{self.prog} {self._synopsis()}'}\n"

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return f"{self.format_usage()}\n{examples_of(self.prog)}{formatter.format_help()}"

    def error(self, message: str) -> NoReturn:
        """In our words, with an example where something is missing."""
        from lachesis.settings.flag_errors import in_our_words

        if message == "the following arguments are required: ENV":
            self.print_help()
            self.exit(2, f"{NO_ENVIRONMENT}\n")
        verbs = [*next((each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction)), ())]
        said = in_our_words(message, self)
        if "arguments are required" in message:
            examples = examples_of(self.prog).splitlines()[1:2]
            example = f"; for example: {re.split(' {3,}', examples[0].strip())[0]}" if examples else ""
            said = f"name one of {', '.join(verbs)}" if verbs else f"{said}{example}"
        self.print_usage(sys.stderr)
        self.exit(2, f"error: {said}\n")

    def _synopsis(self) -> str:
        formatter = self._get_formatter()
        words = []
        for action in self._actions:
            value = formatter._format_args(action, value_name(action))
            if not action.option_strings:
                words.append(value)
            elif action.required:
                words.append(f"{action.option_strings[-1]} {value}")
        return " ".join([*words, "[options]"])


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=kwargs["help"])

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, VerbParser)
        for action in parser._actions:
            action.help = parser._rare.get(action.dest, action.help)
        parser.print_help()
        parser.exit()


class OnceFormatter(argparse.HelpFormatter):
    """Writes the value of a flag once, after its names; of two names that differ in "_" and "-", the first one.

    Paragraphs are filled; those that are indented stay as they are."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        shown = getattr(action, "shown", action.option_strings)
        names = {name.replace("_", "-"): name for name in reversed(shown)}
        value = "" if action.nargs == 0 else f" {self._format_args(action, value_name(action))}"
        return ", ".join(reversed(names.values())) + value

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if action.choices and action.metavar is None:  # not {a,b}
            return lambda size: ("|".join(map(str, action.choices or ())),) * size
        return super()._metavar_formatter(action, default_metavar)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [part.rstrip() for part in re.split(r"\n\s*\n", text.strip("\n"))]
        return "\n\n".join(part if part[:1] == " " else textwrap.fill(part, width) for part in parts)


def value_name(action: argparse.Action) -> str:
    """What stands for the value of an argument: the name that it has, or a short one by its type."""
    if isinstance(action.metavar, str):
        return action.metavar
    kinds: dict[Any, str] = {int: "N", count: "N", float: "X", Path: "PATH"}
    kind = action.type.func if isinstance(action.type, partial) else action.type
    return kinds.get(kind) or action.dest.rpartition(".")[2].upper().rpartition("_")[2]


def count(text: str, least: int = 1) -> int:
    """A number of things, as the `type` of an argument."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


def examples_of(prog: str) -> str:
    """The examples of a verb, by its `prog`, as its help shows them."""
    from lachesis.cli.examples import EXAMPLES  # a run has no use for them

    lines = EXAMPLES.get(prog.removeprefix("lachesis").removesuffix(" ENV").strip(), "").strip().splitlines()
    beside = all(len(line) <= 78 for line in lines)
    shown = (line if beside else _folded(line) for line in lines)
    return "".join(["examples:\n", *(f"  {line}\n" for line in shown), "\n"]) if lines else ""


def _folded(line: str) -> str:
    """An example in 80 columns: what it is for on a line of its own, and a long command in two."""
    command, *said = re.split(r"\s{2,}", line, maxsplit=1)
    at = command.rfind(" --", 0, 76) if len(command) > 78 else -1
    command = command if at < 0 else f"{command[:at]} \\\n     {command[at:]}"
    return "\n      ".join([command, *said])


def _without_title(text: str) -> str:
    text = re.sub(r"^`lachesis [^`]*`[^:.]*: ", "", text)
    return text[:1].upper() + text[1:]
