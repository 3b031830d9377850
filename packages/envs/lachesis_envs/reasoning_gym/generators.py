"""Problems and scores of reasoning-gym's generators, from a child process.

A problem is (generator, configuration, index): it is made again from these where it is scored, so that nothing of it
has to survive JSON.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.with_parent import with_parent
from lachesis.runs.dataset_rows import DatasetError, WrongDataset

PREFIX = "reasoning_gym:"
_CHILD = Path(__file__).with_name("child.py")
_PATIENCE = 600.0
"""Seconds after which a child that neither answers nor uses its CPU time counts as broken."""
_BY_THE_ANSWER = (-signal.SIGPROF, -signal.SIGSEGV)
"""How a child ends over an answer: out of CPU time, or of stack in a parser."""


class ScoringError(RuntimeError):
    """A scorer failed, whatever the answer was."""


class Generators:
    """The child process, started on first use, and again after an answer ended it."""

    def __init__(self) -> None:
        self.names: Sequence[str] = ()
        self._child: Process | None = None
        self._turn = asyncio.Lock()

    async def problem(self, generator: str, config: Mapping[str, Any], index: int) -> dict[str, str]:
        """`question`, `answer` and `category` of one problem.

        Raises:
            DatasetError: there is no such generator, it lacks a package, or it refuses its configuration.
        """
        found = await self._ask({"generator": generator, "config": config, "index": index})
        if found is None or "error" in found:
            why = "it takes too long" if found is None else found["error"]
            raise DatasetError(f"{PREFIX}{generator} cannot make problem {index} of {dict(config)}: {why}")
        return found

    async def score(self, generator: str, config: Mapping[str, Any], index: int, answer: str) -> float:
        """The score of an answer to a problem. One that takes too long to score has 0.

        Raises:
            ScoringError: the right answer cannot be scored either.
        """
        found = await self._ask({"generator": generator, "config": config, "index": index, "answer": answer})
        if found is None:
            return 0.0
        if "error" in found:
            raise ScoringError(f"{PREFIX}{generator}, problem {index}: {found['error']}")
        return float(found["score"])

    async def check(self, generator: str) -> None:
        """Raises DatasetError where there is no such generator."""
        async with self._turn:
            await self._start()
        if generator not in self.names:
            near = difflib.get_close_matches(generator, self.names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self.names)}"
            raise WrongDataset(f"reasoning-gym has no generator {generator!r}; {hint}")

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """None where the question ended the child."""
        async with self._turn:
            try:
                child = await self._start()
                assert child.stdin is not None
                child.stdin.write(json.dumps(question).encode() + b"\n")
                found = await self._answer(child)
            except BaseException:
                await self._close()  # its late answer would be read as the answer to the next question
                raise
            if found is None:
                code = await child.wait()
                if code not in _BY_THE_ANSWER:
                    raise ScoringError(f"the scorer of {PREFIX}{question['generator']} ended with exit code {code}")
        if found is not None and (name := found.get("missing")):
            raise DatasetError(
                f"{PREFIX}{question['generator']} needs the package {name}. Next step: pip install {name}"
            )
        return found

    async def _start(self) -> Process:
        if self._child is None or self._child.returncode is not None:
            # As a file, and with -P: no folder of the user can shadow what it imports.
            self._child = await asyncio.create_subprocess_exec(
                *with_parent(sys.executable, "-P", str(_CHILD)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                limit=1 << 26,
            )
            ready = await self._answer(self._child)
            if ready is None or "missing" in ready:
                await self._close()
                raise DatasetError(
                    f"the datasets {PREFIX}NAME need the package reasoning-gym. "
                    "Next step: pip install --no-deps reasoning-gym"
                )
            self.names = ready["names"]
        return self._child

    async def _answer(self, child: Process) -> dict[str, Any] | None:
        assert child.stdout is not None
        line = await asyncio.wait_for(child.stdout.readline(), _PATIENCE)
        found: dict[str, Any] | None = json.loads(line) if line else None
        return found

    async def close(self) -> None:
        """End the child."""
        async with self._turn:
            await self._close()

    async def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await asyncio.shield(child.wait())
