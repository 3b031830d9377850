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
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}|\\[%$]|[$€£%°]")
"""A text with digits is not a unit: `42\\text{ or 43}` is two answers."""
_SPACES = re.compile(r"\\[ ,;!]|\s+")
_FRACTION = re.compile(r"([-+]?)(?:(\d+) ?)?\\[dt]?frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}")
"""With the whole number of a mixed one before it."""


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, braces balanced; None when there is none."""
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    start = at + len("\\boxed{")
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number in a text, without thousands separators."""
    found: list[str] = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def as_number(text: str) -> Fraction | None:
    """The number that a text is, currency and units aside; None when it is not just a number.

    A percent sign is a unit: GSM8K asks "what percentage" and answers 50, so `50%` is 50 and not a half. Commas and
    spaces count as thousands separators where they separate thousands, and nowhere else: `1,2` is not a number.
    """
    if len(text) > MAX_LENGTH:
        return None
    bare = _SPACES.sub(" ", _UNITS.sub("\0", text))  # digits around a unit are two numbers
    bare = re.sub(r"^[\0 ]*([-+]?)[\0 ]*|[\0 ]+$", r"\1", bare)
    if found := _FRACTION.fullmatch(bare):
        sign, whole, over, under = found.groups()
        return None if not int(under) else (int(whole or 0) + Fraction(int(over), int(under))) * (-1) ** (sign == "-")
    if not _PLAIN_NUMBER.fullmatch(bare) or re.search(r"/ ?0+$", bare):
        return None
    return Fraction(*map(Fraction, bare.replace(",", "").replace(" ", "").split("/")))


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
