"""Reads a Dockerfile, as https://docs.docker.com/reference/dockerfile/ describes it. What cannot be played is an error
that names the line; nothing is skipped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .errors import ImageError, refused

_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*$")
_COMMENT = re.compile(r"\s*#")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?\s*(['\"]?)[A-Za-z_]\w*\1")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)")
_VARIABLE = re.compile(r"[A-Za-z_]\w*|\d|[@*#]")
_LONGEST = 1 << 17
_ENGINE = "use a backend with an engine (docker), or "
_WITHOUT_EFFECT = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"})
"""Instructions that a sandbox ignores: it starts no program of the image, and publishes no port."""
INSTRUCTIONS = _WITHOUT_EFFECT | {
    *("ADD", "ARG", "COPY", "ENTRYPOINT", "ENV", "FROM", "HEALTHCHECK", "ONBUILD", "RUN", "SHELL", "USER", "VOLUME"),
    "WORKDIR",
}
_FLAGS: Mapping[str, frozenset[str]] = {
    "FROM": frozenset({"platform"}),
    "COPY": frozenset({"chown", "chmod"}),
    "ADD": frozenset({"chown", "chmod"}),
    "HEALTHCHECK": frozenset({"interval", "timeout", "start-period", "start-interval", "retries"}),
}


@dataclass(frozen=True)
class Instruction:
    """One instruction, before variables are replaced."""

    line: int
    name: str
    """In capital letters."""
    rest: str
    """What follows the name and the flags, with continuation lines joined."""
    where: str
    """`FILE:LINE: INSTRUCTION ...`, for messages."""
    flags: Mapping[str, str] = field(default_factory=dict)

    def refused(self, reason: str, step: str) -> ImageError:
        return refused(self.where, reason, step)

    def listed(self) -> list[str] | None:
        """The words of the JSON form; None in the other form."""
        if not self.rest.startswith("["):
            return None
        try:
            words = json.loads(self.rest)
        except (ValueError, RecursionError):
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None

    def words(self) -> list[str]:
        return self.listed() or self.rest.split()


@dataclass(frozen=True)
class Dockerfile:
    escape: str
    instructions: tuple[Instruction, ...]


def parse(text: str, name: str = "Dockerfile") -> Dockerfile:
    """The instructions of a Dockerfile with one stage.

    Raises:
        ImageError: it is not a Dockerfile, or needs something that the player does not support.
    """
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    escape, first = _directives(lines, name)
    ending = re.compile(re.escape(escape) + r"[ \t]*$")
    found: list[Instruction] = []
    number = first
    while number < len(lines):
        start, joined = number + 1, ""
        more = True
        while more and number < len(lines):
            line = lines[number]
            number += 1
            if _COMMENT.match(line) or (joined and not line.strip()):
                more = bool(joined)
                continue
            more = bool(ending.search(line))
            joined += ending.sub("", line) if more else line
        if joined.strip():
            found.append(_instruction(joined.strip(), start, name))
    return Dockerfile(escape, _one_stage(found, name))


def _directives(lines: list[str], name: str) -> tuple[str, int]:
    escape = "\\"
    seen: set[str] = set()
    for number, line in enumerate(lines):
        match = _DIRECTIVE.match(line.strip())
        if match is None or match[1].lower() in seen or match[1].lower() not in ("escape", "syntax", "check"):
            return escape, number
        key, value = match[1].lower(), match[2]
        seen.add(key)
        if key == "escape":
            if value not in ("\\", "`"):
                raise refused(f"{name}:{number + 1}: # escape={value}", "the escape is \\ or `", "correct it")
            escape = value
        elif key == "syntax" and not re.match(r"(docker\.io/)?docker/dockerfile(:1(\.\d+)*)?$", value):
            step = _ENGINE + "leave the directive out"
            raise refused(f"{name}:{number + 1}: # syntax={value}", "this frontend is not known here", step)
    return escape, len(lines)


def _instruction(text: str, line: int, file: str) -> Instruction:
    word, _, rest = text.partition(" ") if " " in text.replace("\t", " ") else (text, "", "")
    if "\t" in word:
        word, _, rest = text.partition("\t")
    name, rest = word.upper(), rest.strip()
    shown = "".join(char if char.isprintable() else "?" for char in f"{name} {rest}")
    where = f"{file}:{line}: {shown if len(shown) <= 80 else shown[:77] + '...'}"
    if name not in INSTRUCTIONS:
        raise refused(f"{file}:{line}: {word}", "there is no such instruction", "correct it")
    if not rest:
        raise refused(where, "it has no arguments", "complete it")
    flags: dict[str, str] = {}
    while name in ("FROM", "RUN", "COPY", "ADD", "HEALTHCHECK") and (match := _FLAG.match(rest)):
        if match[1] not in _FLAGS.get(name, ()):
            step = "write it without the flag"
            if name == "COPY" and match[1] == "from":
                step = _ENGINE + "build in one stage, and copy from the context"
            raise refused(where, f"--{match[1]} is not supported here", step)
        if match[2] is None:
            raise refused(where, f"--{match[1]} has no value", "complete it")
        flags[match[1]], rest = match[2], rest[match.end() :]
    if name in ("RUN", "COPY", "ADD") and _HEREDOC.search(rest):
        step = "write it as one command, or as a script in the context" if name == "RUN" else "copy a file"
        raise refused(where, "here-documents are not supported here", step)
    return Instruction(line, name, rest, where, flags)


def _one_stage(found: list[Instruction], name: str) -> tuple[Instruction, ...]:
    stages = [each for each in found if each.name == "FROM"]
    if not stages:
        raise refused(name, "it has no FROM", "begin it with one")
    if len(stages) > 1:
        raise stages[1].refused("only one stage is supported here", _ENGINE + "build in one stage")
    for each in found:
        if each.name == "FROM":
            break
        if each.name != "ARG":
            raise each.refused("only ARG may come before FROM", "put it after FROM")
    return tuple(found)


def expand(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """`text` with variables replaced, and with quotes and escapes removed. Variables that are not set are empty.

    Raises:
        ValueError: a quote or brace is not closed, a form of substitution is not supported, `${NAME:?}` is not set, or
            the result is longer than the kernel lets a variable be.
    """
    out: list[str] = []
    quote = ""
    at = 0
    while at < len(text):
        char = text[at]
        if quote == "'":
            if char == "'":
                quote = ""
            else:
                out.append(char)
            at += 1
        elif char == escape:
            following = text[at + 1 : at + 2]
            keep = bool(quote) and following not in ('"', "$", escape)
            out.append((char if keep else "") + following)
            at += 2
        elif char in "'\"" and (not quote or char == quote):
            quote = "" if quote else char
            at += 1
        elif char == "$":
            value, at = _substitution(text, at + 1, variables, escape)
            out.append(value)
        else:
            out.append(char)
            at += 1
    if quote:
        raise ValueError(f"the quote {quote} is not closed")
    expanded = "".join(out)
    if len(expanded) > _LONGEST:
        raise ValueError(f"a value of {len(expanded)} characters is too long: {_LONGEST} are the most")
    return expanded


def _substitution(text: str, at: int, variables: Mapping[str, str], escape: str) -> tuple[str, int]:
    """The value of what follows a `$`, and the position after it."""
    braced = text[at : at + 1] == "{"
    match = _VARIABLE.match(text, at + braced)
    if match is None:
        if braced:
            raise ValueError(f"{text[at - 1 :]!r} names no variable")
        return "$", at
    name, at = match[0], match.end()
    value = variables.get(name)
    if not braced:
        return value or "", at
    end = _closing(text, at, escape)
    form = re.match(r"(:?[-+?])(.*)$", text[at:end], re.DOTALL)
    if at == end:
        return value or "", end + 1
    if form is None:
        raise ValueError(f"${{{name}{text[at:end]}}} is not supported: only :-, :+, :?, -, + and ? are")
    known = value is not None and (value != "" or not form[1].startswith(":"))
    kind = form[1][-1]
    if kind == "?" and not known:
        raise ValueError(f"{name} is not set" + (f": {form[2]}" if form[2] else ""))
    if kind == "+":
        return expand(form[2], variables, escape) if known else "", end + 1
    return (value or "") if known else expand(form[2], variables, escape), end + 1


def _closing(text: str, at: int, escape: str) -> int:
    depth = 1
    while at < len(text):
        if text[at] == escape:
            at += 1
        elif text[at] == "{" and text[at - 1] == "$":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise ValueError("a brace is not closed")


def split(text: str, escape: str = "\\") -> list[str]:
    """Words of `NAME=VALUE` instructions: spaces in quotes and escaped ones do not end a word; quotes are kept."""
    words: list[str] = []
    word, quote, at = "", "", 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word += char
            at += 1
            char = text[at]
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char.isspace():
            words += [word] if word else []
            word, at = "", at + 1
            continue
        word += char
        at += 1
    if quote:
        raise ValueError(f"the quote {quote} is not closed")
    return [*words, word] if word else words


def pairs(instruction: Instruction, expanded: Callable[[str], str], escape: str) -> dict[str, str]:
    """The variables of an `ENV`: `NAME=VALUE ...`, or `NAME VALUE` of the rest of the line."""
    first, *rest = instruction.rest.split(None, 1)
    if "=" not in first:
        if not rest:
            raise instruction.refused(f"{first} has no value", f"write {first}=VALUE")
        return {expanded(first): expanded(rest[0])}
    found = {}
    for word in split(instruction.rest, escape):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise instruction.refused(f"{word!r} is not NAME=VALUE", "quote values with spaces")
        found[expanded(name)] = expanded(value)
    return found
