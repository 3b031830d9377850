"""The command line of a verb, with a help that begins with examples and names each flag once."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from difflib import get_close_matches
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
        super().__init__(description=_without_title(description or ""), usage=usage, **kwargs)

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        """The same argument; a flag with "_" may be written with "-" too, as help shows it."""
        dashes = [(name if name[:2] != "--" else name.replace("_", "-"), name) for name in names]
        return super().add_argument(*dict.fromkeys(name for pair in dashes for name in pair), **kwargs)

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
        """In words, with the flag or the choice that is near an unknown one."""
        message = re.sub("invalid int value:", "expected a whole number, got", message)
        message = re.sub("invalid float value:", "expected a number, got", message)
        known = [name for action in self._actions for name in action.option_strings]
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            unknown, known = choice[1], re.findall(r"[\w.-]+", choice[2])
        else:
            unknown = next(iter(re.findall(r"unrecognized arguments: (-[^\s=]*)", message)), "")
        near = get_close_matches(unknown, known, n=1) if unknown else []
        verbs = [*next((each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction)), ())]
        if message == "the following arguments are required: ENV":
            self.print_help()
            self.exit(2, f"{NO_ENVIRONMENT}\n")
        if "arguments are required" in message and verbs:
            message = f"name one of {', '.join(verbs)}"
        self.print_usage(sys.stderr)
        self.exit(2, f"error: {message}{f'; did you mean {near[0]}?' if near else ''}\n")

    def _synopsis(self) -> str:
        formatter = self._get_formatter()
        words = []
        for action in self._actions:
            value = formatter._format_args(action, action.metavar or action.dest.upper())  # type: ignore[arg-type]
            if not action.option_strings:
                words.append(value)
            elif action.required:
                words.append(f"{action.option_strings[-1]} {value}")
        return " ".join([*words, "[options]"])


class OnceFormatter(argparse.HelpFormatter):
    """Writes the value of a flag once, after its names; of two names that differ in "_" and "-", the first one.

    Paragraphs are filled; those that are indented stay as they are."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = {name.replace("_", "-"): name for name in reversed(action.option_strings)}
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.rpartition('.')[2].upper())}"
        return ", ".join(reversed(names.values())) + value

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [part.rstrip() for part in re.split(r"\n\s*\n", text.strip("\n"))]
        return "\n\n".join(part if part[:1] == " " else textwrap.fill(part, width) for part in parts)


def count(text: str, least: int = 1) -> int:
    """A number of things, as the `type` of an argument."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} up, got {text!r}")
    return int(text)


def examples_of(prog: str) -> str:
    """The examples of a verb, by its `prog`, as its help shows them."""
    from lachesis.cli.examples import EXAMPLES  # a run has no use for them

    lines = EXAMPLES.get(prog.removeprefix("lachesis").removesuffix(" ENV").strip(), "").strip().splitlines()
    return "".join(["examples:\n", *(f"  {_folded(line)}\n" for line in lines), "\n"]) if lines else ""


def _folded(line: str) -> str:
    """An example in 80 columns: what it is for on a line of its own, or the command in two."""
    if len(line) <= 78:
        return line
    command, *said = re.split(r"\s{2,}", line, maxsplit=1)
    at = command.rfind(" --", 0, 76) if len(command) > 78 else -1
    command = command if at < 0 else f"{command[:at]} \\\n     {command[at:]}"
    return "\n      ".join([command, *said])


def _without_title(text: str) -> str:
    text = re.sub(r"^`lachesis [^`]*`[^:.]*: ", "", text)
    return text[:1].upper() + text[1:]
