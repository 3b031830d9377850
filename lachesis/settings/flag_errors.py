"""What argparse says of a wrong command line, in our words: the flag, what is wrong, what is allowed, an example."""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches

_NUMBERS = {"int": ("a whole number", 8), "float": ("a number", 0.5)}


def in_our_words(message: str, parser: argparse.ArgumentParser) -> str:
    """The message of an error of `parser`."""
    actions = {"/".join(action.option_strings) or _named(action): action for action in parser._actions}
    if found := re.match(r"the following arguments are required: (.*)", message):
        needed = [_named(actions[name]) if name in actions else name for name in found[1].split(", ")]
        *most, last = needed
        return f"{parser.prog} needs {', '.join(most)}{' and ' if most else ''}{last}"
    if found := re.match(r"one of the arguments (.*) is required", message):
        return f"{parser.prog} needs one of {', '.join(_without_doubles(found[1].split()))}"
    if found := re.match(r"unrecognized arguments: (\S+)", message):
        if not found[1].startswith("-"):
            return f"{found[1]!r} is an argument too many: {parser.prog} does not take it"
        unknown = found[1].partition("=")[0]
        known = [flag for action in actions.values() for flag in action.option_strings]
        near = get_close_matches(unknown, known, n=1)
        return f"unknown flag {unknown}; " + (f"did you mean {near[0]}?" if near else "--help lists the flags")
    name, colon, problem = message.removeprefix("argument ").partition(": ")
    if not message.startswith("argument ") or not colon:
        return message
    flag, action = ", ".join(_without_doubles(name.split("/"))), actions.get(name)
    if found := re.match(r"expected (?:(?:at least )?one|\d+) arguments?", problem):
        return f"{flag} needs a value" + (f": {_named(action)}" if action else "")
    if found := re.match(r"invalid (int|float) value: (.*)", problem):
        kind, example = _NUMBERS[found[1]]
        given = getattr(action, "default", None)
        such = given if isinstance(given, int | float) and given > 0 else example
        return f"{flag}: must be {kind}, such as {such} (got {found[2]})"
    if found := re.match(r"invalid choice: (.*) \(choose from (.*)\)", problem):
        choices = re.findall(r"[\w.:-]+", found[2])
        near = get_close_matches(found[1].strip("'"), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{flag}: must be {', '.join(choices[:-1])} or {choices[-1]} (got {found[1]}){hint}"
    if found := re.match(r"not allowed with argument (.*)", problem):
        other = _without_doubles(found[1].split("/"))[-1]
        return f"{flag} and {other} exclude each other; keep one of them"
    if found := re.match(r"ignored explicit argument (.*)", problem):
        return f"{flag} takes no value (got {found[1]})"
    if found := re.match(r"expected (.*), got (.*)", problem):
        return f"{flag}: must be {found[1]} (got {found[2]})"
    return f"{flag}: {problem}"


def _named(action: argparse.Action) -> str:
    """The flag, where it has one, and its value, as a help shows them."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.rpartition(".")[2].upper()
    return " ".join([*_without_doubles([*action.option_strings])[-1:], value])


def _without_doubles(names: list[str]) -> list[str]:
    """The names without those that differ from another one in "_" for "-"."""
    return [name for name in names if "_" not in name or name.replace("_", "-") not in names]
