"""Whether a final answer is right: plain numbers are compared here, everything else by math-verify in a child process.

math-verify (sympy) can compute for ever on what a model writes, and its time limits work in a main thread only. In a
child it has one, and the event loop never waits for it. It also looks for a number in whatever it cannot read, and
takes the last member of a list or a chain. So where the right answer is one value, it is asked about one value only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import unicodedata
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from backends.with_parent import with_parent

log = logging.getLogger(__name__)

MAX_LENGTH = 300
"""Characters of an answer; a longer one is no final answer."""
CHECK_SECONDS = 5.0
START_SECONDS = 60.0
_CHILD = Path(__file__).with_name("math_child.py")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+"
_NUMBER = re.compile(rf"(?:(?<![\w)])[-+])?(?:{_DIGITS})")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+)(?: ?/ ?\d+)?")
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d\d?")
_FRACTION = re.compile(r"([-+]?)(?:(\d+) ?)?\\[dtc]?frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}|([-+]?)(\d+) (\d\d?) ?/ ?(\d+)")
"""With the whole number of a mixed one before it."""
_SPACES = re.compile(r"\\[ ,;!:]|~|\\q?quad(?![A-Za-z])|\s+")
_INVISIBLE = re.compile("[\u200b\u2060\ufeff]")
_ONE_SIGN_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_WRAPPED = re.compile(
    r"\$((?:[^$\\]|\\.)*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\\{([^{}]*)\\\}|\\text\{([^{}]*\d[^{}]*)\}", re.DOTALL
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf)|mbox|operatorname)\s*\{([^{}]*)\}(\^\{?[23]\}?)?"
)
_SIGNS = re.compile(r"\\[%$]|[$€£¢₹%°]|\^\s*\{?\\circ\}?")
_BARE_WORDS = re.compile(r"([^A-Za-z]*\d[^A-Za-z\\]*)\s([A-Za-z]{3,}(?:\s+[A-Za-z]{2,})*)\.?")
_MANY = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_NO_UNITS = re.compile(
    r"\b(?:or|not|no|nor|neither|never|but|except|without|wrong|minus|negative|plus|below|under|least|most|half|halves"
    r"|(?:third|four?th|fif?th|six?th|seventh|eighth|nin?th|tenth|(?:hundred|thousand)th)s|squared|cubed|factorial|twice"
    r"|double|triple|thrice|(?:hundred|thousand|million|billion|trillion|dozen)s|k|mil|mln|mn|bn|tn"
    r"|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty"
    r")\b|^\s*[MB]\s*$|(?<![A-Za-z])[-\u2013]|[<>≤≥±百千万萬亿億]"
)
"""Words that make something else of the number beside them."""
_TOKEN = re.compile(
    rf"(?P<number>{_DIGITS})|(?P<fraction>\\[dtc]?frac(?![A-Za-z]))|(?P<unit>\0|\\?%)|(?P<space>\s+)"
    r"|(?P<infix>[-+*/^×÷·]|\\(?:cdot|times|div)(?![A-Za-z]))|(?P<closing>[])}!]|\\(?:right|r(?:floor|ceil|vert))(?![A-Za-z]))"
    r"|(?P<opening>[(\[{√π]|\\log(?:_(?:\d|\{\d+\}))?(?![A-Za-z_])"
    r"|\\(?:[dt]?binom|sqrt|left|pi|ln|exp|sin|cos|tan|l(?:floor|ceil|vert))(?![A-Za-z]))"
)
_NAME = re.compile(
    r"(?:[A-Za-z\s\0]|\\(?:angle|triangle|Delta|alpha|beta|gamma|theta|lambda|mu|sigma|phi|omega)(?![A-Za-z])"
    r"|\\overline\{\w+\})*(?:_(?:\w|\{[\w\s,]*\})\s*)?'?\s*(?:\([\w\s,]*\))?\s*"
)
"""What stands to the left of `=`: `x`, `Total cost`, `a_{10}`, `f(3)`, or nothing. `2x = 18` is no answer."""
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ '-]+[^\W\d_]+)*")
_BRACES = re.compile(r"(\\boxed\s*)?\{|\}")


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, braces balanced, and of the outermost where boxes are in boxes; None when
    there is none, or the last has no end."""
    opened: list[list[int]] = []
    boxes: list[list[int]] = []  # where each begins, where its content begins, and where that ends
    for found in _BRACES.finditer(text):
        if found[0] != "}":
            opened.append([found.start(), found.end(), -1])
            if found[1]:
                boxes.append(opened[-1])
        elif opened:
            opened.pop()[2] = found.start()
    if not boxes or boxes[-1][2] < 0:
        return None
    at = next(place for place, box in enumerate(boxes) if box[2] >= boxes[-1][2])
    for (_, start, end), (inner, _, inner_end) in zip(boxes[at:], boxes[at + 1 :], strict=False):
        if text[start:inner].strip() or text[inner_end + 1 : end].strip():
            break
        at += 1  # a box with nothing but a box
    return text[boxes[at][1] : boxes[at][2]].strip()


def last_number(text: str) -> str | None:
    """The last number in a text, without thousands separators."""
    found: list[str] = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def as_number(text: str) -> Fraction | None:
    """The number that a text is, currency and units aside; None when it is not just a number.

    A percent sign is a unit: GSM8K asks "what percentage" and answers 50, so `50%` is 50 and not a half. Commas and
    spaces count as thousands separators where they separate thousands, and nowhere else: `1,2` is not a number.
    `2 \\text{ dozen}` is 24.
    """
    if len(text) > MAX_LENGTH:
        return None
    text = _tidied(text)
    if found := _BARE_WORDS.fullmatch(text):
        text = f"{found[1]}\\text{{{found[2]}}}"
    if (parts := _without_units(text)) is None:
        return None
    bare, times = parts
    bare = _SPACES.sub(" ", _SIGNS.sub("\0", bare))  # digits around a unit are two numbers
    bare = re.sub(r"^[\0 ]*([-+]?)[\0 ]*|[\0 ]+$", r"\1", bare)
    if found := _FRACTION.fullmatch(bare):
        sign, whole, over, under = found.groups()[:4] if found[4] else found.groups()[4:]
        if not int(under) or (whole and int(over) >= int(under) and not found[4]):
            return None
        value: Fraction = (int(whole or 0) + Fraction(int(over), int(under))) * (-1) ** (sign == "-") * times
        return value
    if _SCIENTIFIC.fullmatch(bare):
        return Fraction(bare) * times
    if not _PLAIN_NUMBER.fullmatch(bare) or re.search(r"/ ?0+$", bare):
        return None
    return Fraction(*map(Fraction, bare.replace(",", "").replace(" ", "").split("/"))) * times


def without_separators(text: str) -> str:
    """The answer of a dataset: a number without thousands separators, anything else as it is."""
    return text.replace(",", "") if as_number(text) is not None else text


def _tidied(text: str) -> str:
    """A text without what is to be seen in no print, nor signs around the whole."""
    text = " ".join(_INVISIBLE.sub("", text).split()).replace("\u2212", "-").replace("{,}", ",")
    text = re.sub(r"(\\[dtc]?frac) ?(\d) ?(\d)(?!\d)", r"\1{\2}{\3}", text)
    text = re.sub(r"(?<=\d)'(?=\d{3}(?!\d))", ",", text)
    text = _ONE_SIGN_FRACTION.sub(lambda sign: r" \frac{%s}{%s}" % _parts(sign[0]), text).strip()  # noqa: UP031
    while found := _WRAPPED.fullmatch(text):
        text = next(group for group in found.groups() if group is not None).strip()
    text = re.sub(r"\s*\\\\$", "", text)
    return re.sub("^\u2013(?=[ \\d])", "-", text)


def _parts(sign: str) -> tuple[str, ...]:
    """`1` and `2` of the sign ½."""
    return tuple(unicodedata.normalize("NFKC", sign).split("\u2044"))


def _without_units(text: str) -> tuple[str, int] | None:
    """A text with NUL for each unit, and how many it counts at a time; None where a word is no unit.

    A text with digits is not a unit: `42\\text{ or 43}` is two answers.
    """
    bare, at, times = "", 0, 1
    for found in _TEXT.finditer(text):
        bare, at = bare + text[at : found.start()], found.end()
        content, power = found[1], found[2] or ""
        if re.search(r"\d", content):
            bare += f" {content} {power}"
            continue
        first, *others = re.findall("[a-z]+", content.lower()) or [""]
        if _NO_UNITS.search(content) or _NO_UNITS.search(content.lower()) or not _MANY.keys().isdisjoint(others):
            return None
        if first in _MANY:
            if times != 1 or not re.search(r"\d", bare) or re.search(r"\d", text[at:]):
                return None
            times = _MANY[first]
        bare += "\0" if first else f"\0{power}"
    return bare + text[at:], times


def _one_value(text: str) -> str | None:
    """An expression of numbers for math-verify, without units; None where it may be several, or something else."""
    if (parts := _without_units(text)) is None or parts[1] != 1:
        return None
    bare = _SPACES.sub(" ", re.sub(r"\\\$|[€£¢₹]|\^\s*\{?\\circ\}?", "\0", parts[0])).strip("\0 ")
    bare = re.sub(r"\\(?:left|right) ?\|", "|", bare)
    at, last = 0, ""
    inner = bare[1:-1] if re.fullmatch(r"\|[^|]+\|", bare) else bare
    while at < len(inner):
        token = _TOKEN.match(inner, at)
        if token is None:
            return None
        at, kind = token.end(), token.lastgroup or ""
        if kind == "space" or (kind == "unit" and last not in ("number", "closing")):
            continue
        refused = {
            "unit": ("number", "fraction", "opening"),
            "number": ("number", "fraction"),
            "closing": () if re.search("frac|binom", inner) else ("number", "{"),
        }.get(last, ())
        if kind in refused or token[0] in refused:
            return None  # `17 18` are two
        last = kind
    return bare.replace("\0", " ") or None


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(_TEXT.sub(lambda found: "1" if re.search(r"\d", found[1]) else "\0", text)) is not None


def _words(text: str) -> str | None:
    """Words that an answer is, to be compared as text: for math-verify they are products of letters."""
    bare = " ".join(_TEXT.sub(r" \1 ", _tidied(text)).split()).removesuffix(".")
    return bare.casefold() if _WORDS.fullmatch(bare) else None


class MathVerifyMissing(RuntimeError):
    """math-verify cannot start on this machine."""


class MathVerifier:
    """math-verify in a child process that is started on first use, and again after it had to be killed."""

    def __init__(self) -> None:
        self._missing = False
        self._child: Process | None = None
        self._turn = asyncio.Lock()

    async def equal(self, answer: str, truth: str) -> bool:
        """Whether two answers are the same number or expression. One that takes too long to decide is not.

        Where math-verify cannot start, texts are compared, spaces aside; the log says so once.
        """
        given, wanted = as_number(answer), as_number(truth)
        if given is not None and wanted is not None:
            return given == wanted
        if " ".join(answer.split()) == " ".join(truth.split()):
            return True
        if not answer.strip() or len(answer) > MAX_LENGTH:
            return False
        if ":" in answer + truth:  # math-verify divides, but 10:30 is a time
            return _SPACES.sub("", answer) == _SPACES.sub("", truth)
        if (words := _words(truth)) is not None:
            return _words(answer) == words
        answer, truth = _tidied(answer), _tidied(truth)
        sides = re.sub(r"\\approx(?![A-Za-z])|≈", "=", answer).split("=")
        name, _, right = truth.partition("=")
        if right and _is_name(name) and "=" not in right:
            if name.strip() and sides[0].split() == name.split():
                sides[0] = ""
            if len(sides) == 1 or not sides[0].strip():  # `y = 4` is not `x = 4`
                truth = right.strip()
        if as_number(truth) is None and _one_value(truth) is None:
            return "$" not in answer.replace("\\$", "") and await self._asked(answer, truth)
        return await self._is_value(sides, truth)

    async def _is_value(self, sides: Sequence[str], truth: str) -> bool:
        """Whether the last of at most two sides of an equation is a value, and the other its name or equal."""
        *left, right = sides
        if len(left) > 1 or not right.strip():
            return False
        if left and not _is_name(left[0]) and not await self._is_value(left, truth):
            return False
        given, wanted = as_number(right), as_number(truth)
        if given is not None and wanted is not None:
            return given == wanted
        value = _one_value(right)
        return value is not None and await self._asked(
            value, truth if wanted is None or _NUMBER.fullmatch(truth) else str(wanted)
        )

    async def _asked(self, answer: str, truth: str) -> bool:
        async with self._turn:
            if not self._missing:
                try:
                    return await self._ask(answer, truth)
                except MathVerifyMissing as error:
                    self._missing = True
                    log.warning("%s: answers that are not numbers are compared as text", error)
        return _SPACES.sub("", answer) == _SPACES.sub("", truth)

    async def _ask(self, answer: str, truth: str) -> bool:
        try:
            child = await self._start()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(json.dumps({"answer": answer, "truth": truth}).encode() + b"\n")
            line = await asyncio.wait_for(child.stdout.readline(), CHECK_SECONDS)
        except (TimeoutError, ConnectionError):
            await self.close()
            return False
        except BaseException:
            await self.close()  # its late answer would be read as the answer to the next question
            raise
        if not line:
            await self.close()
            return False
        return json.loads(line) is True

    async def _start(self) -> Process:
        if self._child is None or self._child.returncode is not None:
            # Arithmetic in C notices no end of standard input: the kernel has to end it.
            # As a file and with -P: no folder of the user can shadow what it imports.
            self._child = await asyncio.create_subprocess_exec(
                *with_parent(sys.executable, "-P", str(_CHILD)), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
            assert self._child.stdout is not None
            try:
                ready = await asyncio.wait_for(self._child.stdout.readline(), START_SECONDS)
            except TimeoutError:
                ready = b""
            if not ready:
                await self.close()
                raise MathVerifyMissing(f"math-verify does not start; see what `{sys.executable} {_CHILD}` prints")
        return self._child

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await asyncio.shield(child.wait())
