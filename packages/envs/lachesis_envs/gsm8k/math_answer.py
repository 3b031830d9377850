"""Whether a final answer is right: plain numbers are compared here, everything else by math-verify in a child process.

math-verify (sympy) can compute for ever on what a model writes, and its time limits work in a main thread only. In a
child it has one, and the event loop never waits for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import unicodedata
from asyncio.subprocess import DEVNULL, PIPE, Process
from fractions import Fraction
from pathlib import Path

from backends.with_parent import with_parent

log = logging.getLogger(__name__)

MAX_LENGTH = 300
"""Characters of an answer; a longer one is no final answer."""
CHECK_SECONDS = 5.0
START_SECONDS = 60.0
_CHILD = Path(__file__).with_name("math_child.py")

_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+)(?: ?/ ?\d+)?")
_SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d\d?")
_UNITS = re.compile(
    r"\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}|\\[%$]|[$€£%°]"
    r"|(?<=[\d}])\s*(?:dollars?|cents?|percent|degrees?|inch(?:es)?|feet|ft|miles?|met(?:er|re)s?|[ckm]?m|k?g|pounds?"
    r"|seconds?|minutes?|hours?|days?|weeks?|months?|years?)\.?$"
)
"""A text with digits is not a unit: `42\\text{ or 43}` is two answers."""
_NO_UNITS = re.compile(
    r"\\\w+\s*\{[^{}]*\b(?:or|and|not|no|half|thirds?|tenths?|negative|minus|least|most|below|squared|cubed|root|k|M)\b"
    r"[^{}]*\}"
)
"""Words that make something else of the number beside them."""
_MANY = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_OF_MANY = re.compile(rf"(\d)\s*(?:\\text\s*\{{\s*({'|'.join(_MANY)})\b|({'|'.join(_MANY)})\b)", re.IGNORECASE)
"""`2 dozen`, also as `2 \\text{ dozen eggs}`."""
_SPACES = re.compile(r"\\[ ,;!]|\s+")
_FRACTION = re.compile(r"([-+]?)(?:(\d+) ?)?\\[dt]?frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}|([-+]?)(\d+) (\d\d?) ?/ ?(\d+)")
"""With the whole number of a mixed one before it."""
_HALF = re.compile("[\u00bc-\u00be\u2150-\u215e]")
"""Fractions of one sign, such as \u00bd."""
_SEVERAL = re.compile(
    r"\\(?:vee|lor|wedge|land|cup|cap|pm|mp|neq?|leq?|geq?|lt|gt|l?dots|equiv|(?:R|r)ightarrow)(?![A-Za-z])"
    r"|\\\\|[<>;∨∪±≠≤≥]|\b(?:or|and|not)\b|\d\s*(?::\s*\d|_\{?\d|\0\s*\d|\\to(?![A-Za-z]))|=\s*$"
)
"""What makes several values of an answer, or something else than a value. NUL is a unit."""
_OF_UNKNOWN = re.compile(r"\s*(?:-|-?\d+ *(?=[A-Za-z])|(?=.*\^)|\\sqrt ?)\{?[A-Za-z]\}?(?: ?\^\{?\d+\}?)?\s*")
"""`2x`, `-x` or `x^2`, of which the value is not the answer."""
_ARITHMETIC = re.compile(r"(?:[\d\s.+*/^(){}-]|\\(?:cdot|times|div|[dt]?frac|sqrt)(?![A-Za-z]))+")
_TIME = re.compile(r"\d?\d:\d\d")
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
    if len(text) > MAX_LENGTH or _NO_UNITS.search(text):
        return None
    text = _tidied(text)
    if found := _OF_MANY.search(text):
        of_many = as_number(text[: found.end(1)] + "\\text{" * found[0].count("{") + text[found.end() :])
        return None if of_many is None else of_many * _MANY[(found[2] or found[3]).lower()]
    bare = _SPACES.sub(" ", _UNITS.sub("\0", text))  # digits around a unit are two numbers
    bare = re.sub(r"^[\0 ]*([-+]?)[\0 ]*|[\0 ]+$", r"\1", bare)
    if found := _FRACTION.fullmatch(bare):
        sign, whole, over, under = found.groups()[:4] if found[4] else found.groups()[4:]
        if not int(under):
            return None
        size = int(whole or 0) + Fraction(int(over), int(under))
        return -size if sign == "-" else size
    if _SCIENTIFIC.fullmatch(bare):
        return Fraction(bare)
    if not _PLAIN_NUMBER.fullmatch(bare) or re.search(r"/ ?0+$", bare):
        return None
    return Fraction(*map(Fraction, bare.replace(",", "").replace(" ", "").split("/")))


def without_separators(text: str) -> str:
    """The answer of a dataset: a number without thousands separators, anything else as it is."""
    return text.replace(",", "") if as_number(text) is not None else text


def _tidied(text: str) -> str:
    """A text as LaTeX writes it, without dollar signs around the whole."""
    text = re.sub(r"\\!\s*", "", text.replace("\u2212", "-").replace("{,}", ",")).strip().removesuffix("\\\\")
    text = _HALF.sub(
        lambda sign: r" \frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign[0]).split("\u2044")), text
    )
    if text.startswith("$") and text.find("$", 1) == len(text) - 1:
        text = text[1:-1]
    if whole := re.fullmatch(r"\\text ?\{([^{}]*\d[^{}]*)\}", text):
        text = whole[1]
    return re.sub("^\u2013(?=[ \\d])", "-", text.strip())


def _words(text: str) -> str | None:
    """Words that an answer is, to be compared as text: for math-verify they are products of letters."""
    bare = " ".join(re.sub(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", text).split()).removesuffix(
        "."
    )
    return bare.casefold() if _WORDS.fullmatch(bare) else None


def _sides(answer: str) -> list[str]:
    """Those of an equation, without approximations."""
    return re.split(r"\\approx(?![A-Za-z])|≈", answer)[0].split("=") if "=" in answer else [answer]


def _contradicts(answer: str, number: Fraction) -> bool:
    """Whether an answer says something else than this number, as well or instead."""
    if _NO_UNITS.search(answer) or _OF_MANY.search(answer) or answer.count("|") % 2:
        return True
    if _SEVERAL.search(_UNITS.sub("\0", answer.replace("\\$", ""))):
        return True
    *names, _ = sides = _sides(answer)
    if names and _OF_UNKNOWN.fullmatch(names[-1]):
        return True
    return any(side != number for side in map(as_number, sides) if side is not None)


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
        answer, truth = _tidied(answer), _tidied(truth)
        if "$" in answer.replace("\\$", ""):
            return False  # several, of which math-verify would take the last
        if (words := _words(truth)) is not None:
            return _words(answer) == words
        if _TIME.fullmatch(truth):
            return answer == truth
        if wanted is not None:
            if _contradicts(answer, wanted):
                return False
            for side in filter(_ARITHMETIC.fullmatch, _sides(answer)[:-1]):  # `3 \cdot 5 = 18`
                if not await self._asked(side, truth):
                    return False
        return await self._asked(answer, truth)

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
