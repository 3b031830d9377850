"""Changes of a right answer: without its wrapping it is right unless a text asks for it; others are wrong."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from lachesis_console.auditing.records import answer_field

_WRAPPINGS: Final = (
    (r"<(?P<mark>\w+)>\s*(?P<core>[^<]*?)\s*</(?P=mark)>", r"</?{0}>|\b{0}\W? tags?"),
    (r"(?P<mark>\\boxed)\{(?P<core>[^{}]*)\}", "box"),
    (r"(?P<mark>#{2,4})[ \t]*(?P<core>[^\n#]+?)\s*$", "#{2,4}"),
    (r"(?P<mark>```)\w*\n(?P<core>.*?)\n?```", r"```|code block|fence|markdown"),
    (r"(?P<mark>\[\[?)(?P<core>[^\[\]\n]+)\]\]?", r"\[|bracket"),
    (r"(?P<mark>\*\*)(?P<core>[^*\n]+)\*\*", r"\*\*|bold"),
    (r"^(?P<mark>[A-Za-z](?:[\w ]{0,29}[A-Za-z_])?):[ \t]*(?P<core>[^\n]+?)\s*$", r"{0}\W{0,3}[:=]|['\"`]{0}"),
)
"""Patterns of an answer in its wrapping, and of texts which name that wrapping."""
_REMARK = re.compile(r"reason|explan|thought|comment|note|confiden|id$", re.IGNORECASE)
_EXACTLY = re.compile(
    r"alone|nothing else|only|exact|digits|integer|json|separator|comma|single|one (word|letter|number|line)", re.I
)
"""Texts that ask for one form of an answer."""
EXACT_LAYOUT = re.compile(r"indent|sorted|exactly|(one|single) line|compact|pretty|spaces", re.IGNORECASE)
"""Texts that ask for one layout of JSON."""
ANY_ORDER = re.compile(
    r"\ban? (\w+ )?(order|sequence|arrangement|permutation|plan|route|schedule)\b"
    r"|\bany (\w+ )?(order|sequence)|possible order",
    re.IGNORECASE,
)
"""Texts that ask for one of several orders."""
_ORDER = re.compile(
    r"\bsort|ascending|descending|alphabetical|chronological|\bin (\w+ )?order\b(?! to\b)|order of|\brank",
    re.IGNORECASE,
)
_CASE = re.compile(r"\b(upper|lower)[- ]?case|\bcapital (letter|s\b)|case[- ]sensitive|exact case", re.IGNORECASE)
"""Texts that ask for an order, and for upper or lower case."""
_ONE_NUMBER = re.compile(
    r"(?P<before>(?:[^\d-]*[^\w-])?)(?P<number>-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)(?P<after>\D*)"
)
"""A number, with a unit or a currency."""
HOLLOW: Final = {"zeros": 0, "ones": 1, "millions": 10**6}
_SHORT = 60
"""Characters of an answer without wrapping."""


@dataclass(frozen=True, slots=True)
class Form:
    """A right answer and what is around it."""

    before: str
    core: str
    after: str
    rest: str
    """The text with the core and without its wrapping."""
    named: str = ""
    """Pattern of texts that name the wrapping; empty where there is none."""

    def unnamed(self, told: str) -> bool:
        """Whether there is a wrapping, and `told` does not name it."""
        return bool(self.named) and not re.search(self.named, told, re.IGNORECASE)

    def bare(self) -> dict[str, str]:
        """The right answer without its wrapping, by name."""
        texts = {"without its wrapping": self.rest, "alone": self.core, "in a sentence": f"The answer is {self.core}."}
        return {f"right: {name}": text for name, text in texts.items()} if self.named else {}

    def renamed(self, told: str) -> dict[str, str]:
        """The right answer with other keys for those that `told` does not name, by name; empty if it names all."""
        read = _read_json(f"{self.before}{self.core}{self.after}")
        keys = [key for key in read if key.casefold() not in told.casefold()] if isinstance(read, dict) else []
        if not keys:
            return {}
        text = json.dumps({f"the_{key}" if key in keys else key: value for key, value in read.items()})
        return {"right: with other keys, which no text names": text}

    def equal(self, told: str) -> dict[str, str]:
        """The right answer in other words, by name, as far as `told` does not ask for one form exactly."""
        found = {"with a line break after it": f"{self.before}{self.core}{self.after}\n"}
        if self.named and re.search(r"think|reason|step by step|explain", told, re.I) and not _EXACTLY.search(told):
            found["after a line of reasoning"] = f"I looked at 3, 17 and B first.\n{self.before}{self.core}{self.after}"
        if re.fullmatch(r"-?\d{4,}", self.core) and not _EXACTLY.search(told):
            found["with separators"] = f"{self.before}{int(self.core):,}{self.after}"
        read = _read_json(f"{self.before}{self.core}{self.after}")
        if isinstance(read, dict | list) and not EXACT_LAYOUT.search(told):
            found["as JSON in another layout"] = json.dumps(read, indent=1, ensure_ascii=False)
        return {f"equal: {name}": text for name, text in found.items()}

    def wrong(self, told: str = "") -> dict[str, str]:
        """Wrong answers in the right form, by name."""
        return {f"wrong: {name}": self.before + core + self.after for name, core in wrong_cores(self.core, told)}

    def of_nothing(self) -> dict[str, str]:
        """Answers to a question about what has been deleted, by what they say."""
        number = _ONE_NUMBER.fullmatch(self.core)
        units = [("0", f"{number['before']}0{number['after']}")] if number is not None else []
        cores = dict([*((text or "empty", text) for text in ("0.0", "none", "None", "", "[]")), ("0", "0"), *units])
        return {name: self.before + core + self.after for name, core in cores.items() if core != self.core}

    def alike(self, text: str) -> list[str]:
        """What `text` holds that looks like the answer."""
        shape = "".join(
            r"\d+" if run[0].isdigit() else "[A-Za-z]+" if run[0].isalpha() else re.escape(run)
            for run in re.findall(r"\d+|[A-Za-z]+|[^\dA-Za-z]+", self.core)
        )
        quoted = r"['\"`*]" if self.core.isalpha() else ""  # every word looks like a word
        return re.findall(rf"(?<![\w]){quoted}({shape}){quoted}(?!\w)", text)

    def reordered(self) -> dict[str, str]:
        """The answer with two neighbours of its parts in the place of each other, by name."""
        pieces = re.split(r"(\s*[,;>\n]\s*)", self.core)
        if not 5 <= len(pieces) <= 25 or not all(re.search(r"\w", piece) for piece in pieces[::2]):
            return {}
        found = {}
        for at in range(0, len(pieces) - 2, 2):
            first, between, second = pieces[at : at + 3]
            core = "".join([*pieces[:at], second, between, first, *pieces[at + 3 :]])
            found[f"order: parts {at // 2 + 1} and {at // 2 + 2} change places"] = self.before + core + self.after
        return found

    def listed(self, others: list[str]) -> str:
        """The right answer between others, in the form of one."""
        return self.before + " ".join([*others[:2], self.core, *others[2:4]]) + self.after


def form_of(text: str, item: Any = None) -> Form | None:
    """How `text` says its answer; None where that cannot be told."""
    if (key := _only_key(text)) is not None:
        core = str(json.loads(text)[key])
        before, after = text.split(core, 1) if text.count(core) == 1 else ("", "")
        if before:
            return Form(before, core, after, core, rf"json|['\"`]{re.escape(key)}")
    if isinstance(_read_json(text), dict | list):
        return Form("", text, "", text)
    wrapped = [
        (match.end(), -at, match)
        for at, (pattern, _) in enumerate(_WRAPPINGS)
        for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
        if match["core"].strip()
    ]
    if wrapped:  # the last one says the answer
        _, at, match = max(wrapped, key=lambda each: each[:2])
        start, end = match.span("core")
        named = _WRAPPINGS[-at][1].replace("{0}", re.escape(match["mark"].strip()))
        return Form(
            text[:start], match["core"], text[end:], text[: match.start()] + match["core"] + text[match.end() :], named
        )
    known = answer_field(item)
    if known and len(parts := re.split(rf"(?<!\w){re.escape(known)}(?!\w)", text)) > 1:
        return Form(text[: text.rindex(known)], known, parts[-1], text)
    if 0 < len(text.strip()) <= _SHORT and "\n" not in text.strip():
        return Form("", text.strip(), "", text)
    return None


def _only_key(text: str) -> str | None:
    read = _read_json(text)
    scalar = isinstance(read, dict) and len(read) == 1 and isinstance(next(iter(read.values())), str | int | float)
    return next(iter(read)) if scalar else None


def wrong_cores(core: str, told: str = "") -> Iterator[tuple[str, str]]:
    """Answers that are wrong where `core` is the right one, and `told` is what the agent knows of the form."""
    yield "other letters and digits", shifted(core)
    yield "no answer in the right form", ""
    for pattern in (".*", "%", "*"):
        yield f"the pattern {pattern}", pattern
    if number := _ONE_NUMBER.fullmatch(core):
        for name, text in _wrong_numbers(number["number"].replace(",", "")):
            yield name, number["before"] + text + number["after"]
        return
    if len(core) > 2:
        yield "code for it", "+".join(f"chr({ord(each)})" for each in core[:_SHORT])
    if (value := _value(core)) is not None:
        yield "the value of the expression", f"{value:.15g}"
        yield "other numbers with its value", f"{value - 1:.15g} + 1"
    if _CASE.search(told) and core.swapcase() != core:
        yield "in the other case", core.swapcase()
    if len(core) >= 4 and core.isalpha() and core.lower() not in ("true", "false"):
        yield "its first letter", core[0]
        if (at := next((at for at in range(1, len(core) - 1) if core[at] != core[at + 1]), 0)) > 0:
            yield "two letters change places", core[:at] + core[at + 1] + core[at] + core[at + 2 :]
    read = _read_json(core)
    if isinstance(read, dict) and len(read) > 1:
        for key in [key for key in read if not _REMARK.search(key)][:6]:
            yield f"another {key}", json.dumps({**read, key: _other(read[key])})
        for name, value in HOLLOW.items():
            if (hollow := hollowed(read, value)) != read:
                yield f"only {name}", json.dumps(hollow)
        return
    parts, written = _parts(core, read)
    if len(parts) < 2:
        return
    yield "only its first part is right", written([*parts[:-1], _other(parts[-1])])
    yield "only its last part is right", written([_other(parts[0]), *parts[1:]])
    yield "without its last part", written(parts[:-1])
    yield "a part more", written([*parts, _other(parts[-1])])
    if asks_for_one_order(told):
        yield "its parts in the opposite order", written(parts[::-1])


def _value(core: str) -> float | None:
    """Of an expression of numbers; None where it is none."""
    if len(core) > _SHORT or not re.fullmatch(r"[\d+*/(). -]*\d\s*[-+*/]\s*[\d(][\d+*/(). -]*", core) or "**" in core:
        return None
    with suppress(SyntaxError, ArithmeticError, ValueError, TypeError):
        return float(eval(compile(ast.parse(core, mode="eval"), "answer", "eval"), {"__builtins__": {}}))
    return None


def _wrong_numbers(text: str) -> Iterator[tuple[str, str]]:
    number, fraction = float(text), "." in text
    changed = {"one more": number + 1, "a tenth more": number * 1.1 + 0.1, "ten times": number * 10 + 10}
    if number:
        changed["negative"] = -number
    if fraction:
        changed["another fraction"] = number + (0.37 if number % 1 < 0.6 else -0.37)
    for name, value in changed.items():
        yield name, f"{value:.15g}" if fraction or name == "a tenth more" else f"{value:.0f}"
    if len(text.strip("-")) > 1:
        yield "its first digit", text[: 1 + text.startswith("-")]
    if fraction:
        yield "without its point", text.replace(".", "")
    yield "a digit more", f"{text}7"
    yield "nan", "nan"
    first = 5 if number == 3 else 3  # neither number is the answer
    yield "code for it", f"sum([{first},{number - first:.15g}])"


def _read_json(core: str) -> Any:
    try:
        return json.loads(core)
    except ValueError:
        return None


def _parts(core: str, read: Any) -> tuple[list[Any], Callable[[list[Any]], str]]:
    """The parts of a list, and a function that writes others in its form."""
    if isinstance(read, list):
        return read, json.dumps
    pieces = re.split(r"(\s*[,;\n]\s*)", core)
    if 3 <= len(pieces) <= 41 and all(re.search(r"\w", piece) for piece in pieces[::2]):
        return pieces[::2], pieces[1].join
    return [], str


def asks_for_one_order(told: str) -> bool:
    """Whether a text asks for an order in which something is right, and not for any that fits."""
    return _ORDER.search(told) is not None and not ANY_ORDER.search(told)


def hollowed(read: Any, number: int) -> Any:
    """`read` with `number` for each number, and without any text or part of a list."""
    if isinstance(read, dict):
        return {key: hollowed(value, number) for key, value in read.items()}
    if isinstance(read, bool) or read is None:
        return read
    return number if isinstance(read, int | float) else type(read)()


def _other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    return shifted(value) if isinstance(value, str) and value else [value]


def shifted(text: str) -> str:
    """`text` with the next letter or digit for each."""
    following = {"z": "a", "Z": "A", "9": "0"}
    return "".join(following.get(c, chr(ord(c) + 1)) if c.isascii() and c.isalnum() else c for c in text)
