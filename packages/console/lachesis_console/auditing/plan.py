"""Which policies play which items, and in which order."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from backends.tasks import run_all
from lachesis.runs.reference_policy import Policy
from lachesis_console.auditing import policies
from lachesis_console.auditing.forms import form_of
from lachesis_console.auditing.playing import NoSolution, Stage
from lachesis_console.auditing.sandbox_plays import DESTROYING, SOLVING, search, with_named
from lachesis_console.auditing.solution_plays import FEW, SolutionPlays
from lachesis_messages.messages import Message

READ = re.compile(r"ctx\.read_(?:file|bytes)\('([\w./-]+)'\)")
FURTHER = 8.0
"""Seconds in which the reference policy plays further items."""
SEARCHED = 4
"""Characters of an answer that the files of a sandbox are searched for."""
ENOUGH = 3
"""Items without a reward after which a constant answer is given up."""
WAITING = 5.0
"""Seconds that an idle rollout waits for the one beside it to end."""
SLOW = 3
"""Rollouts that took too long, after which nothing more is played."""


class AuditOverTime(Exception):
    """The audit has used its time, or the environment hangs."""


class AuditPlan:
    """The rollouts of an audit. What it cannot play is written into the facts of the stage.

    Args:
        until: when it ends, by `time.monotonic`.
    """

    def __init__(self, stage: Stage, until: float = float("inf")) -> None:
        self.stage, self.until = stage, until
        self.solutions = SolutionPlays(stage, self._play)

    async def quick(self) -> None:
        """Those of `lachesis check`, all items at once."""
        items = range(len(self.stage.items))
        await run_all([self._reference(item, block) for item in items for block in ("first", "again")])
        if self.stage.plays and all(play.reward is None for play in self.stage.plays):
            return  # no other policy would be scored
        for name, scripted in (("nothing", policies.nothing), ("random", policies.random_policy)):
            await run_all([self._play(item, name, scripted) for item in items])

    async def first_start(self, block: Path) -> None:
        """Each policy on each item, in the order of how much depends on it.

        Args:
            block: while this file exists, the network is refused to the environment.
        """
        stage, count = self.stage, len(self.stage.items)
        with suppress(AuditOverTime):
            await self._beginning()
            played = [play.turns for play in stage.plays if (play.policy, play.item) == ("reference", 0)]
            if played and all(turns == played[0] for turns in played):
                await self._play(0, "reference", policies.replay(played[0], then=""), "fast")
            await self._cheats()  # first: with sandboxes, the time may not be enough for all
            await self._all("nothing", policies.nothing, "later")
            await self._answers()
            await self.solutions.forms()
            await self.solutions.repeating()
            for seed in range(2):
                for item in range(count):
                    await self._play(item, f"random {seed + 1}", self._random(item, seed))
            for name, scripted in policies.noises().items():
                for item in range(min(FEW, count)):
                    await self._play(item, name, scripted)
            for item in range(min(FEW, count)) if stage.facts.has_turns else ():
                await self._play(item, "a call without effect in every turn", policies.never_ends)
            for item in range(count) if stage.facts.has_turns else ():
                every = policies.every_tool(item * policies.TOOLS_OF_A_ROLLOUT, _mark("every tool", item))
                await self._play(item, "every tool", every)
            main, name = self._main(0)
            if stage.facts.has_reference:
                await self._play(0, "reference", policies.slowly(stage.reference()), "slow")
            block.touch()
            try:
                await self._play(0, name, main, "no network")
            finally:
                block.unlink(missing_ok=True)
        with suppress(AuditOverTime):
            await stage.scan()
            until = time.monotonic() + FURTHER
            for item in range(count, len(stage.items)) if stage.facts.has_reference else ():
                if time.monotonic() < until:
                    await self._play(item, "reference", None, "further")

    async def second_start(self) -> None:
        """The beginning once more, then other orders, and rollouts side by side."""
        count = len(self.stage.items)
        with suppress(AuditOverTime):
            await self._beginning("fresh")
            for item in reversed(range(count)):
                main, name = self._main(item)
                await self._play(item, name, main, "reversed")
            for item in range(min(count, 4)):
                ended = asyncio.Event()
                other = (item + 1) % count
                (main, name), (others, others_name) = self._main(item), self._main(other)
                await asyncio.gather(
                    self._play(item, name, main, "interleaved", then=ended),
                    self._play(item, "nothing", _waiting(ended), "interleaved"),
                    self._play(other, others_name, others, "interleaved"),
                )

    async def _beginning(self, block: str = "first") -> None:
        again = "again" if block == "first" else "fresh again"
        await self._all("nothing", policies.nothing, block)
        for item in range(len(self.stage.items)):
            await self._reference(item, block)
            await self._reference(item, again)
        if not self.stage.facts.has_reference:
            for item in range(len(self.stage.items)):
                await self._play(item, "random", self._random(item), block)
                await self._play(item, "random", self._random(item), again)

    def _main(self, item: int) -> tuple[Policy | None, str]:
        """What is compared with itself: the reference policy, or a random one."""
        return (None, "reference") if self.stage.facts.has_reference else (self._random(item), "random")

    def _random(self, item: int, seed: int = 0) -> Policy:
        return partial(policies.random_policy, mark=_mark(f"random {seed}", item), seed=seed)

    async def _play(
        self, item: int, policy: str, scripted: Policy | None, block: str = "first", then: asyncio.Event | None = None
    ) -> float | None:
        if time.monotonic() > self.until:
            self._leave_out(f"{policy} on item {item} and what comes after it: the time of the audit was over")
            raise AuditOverTime
        if sum(play.kind == "too_slow" for play in self.stage.plays) >= SLOW:
            self._leave_out(f"{policy} on item {item} and what comes after it: {SLOW} rollouts took too long")
            raise AuditOverTime
        try:
            return (await self.stage.play(item, policy, scripted, block)).reward
        finally:
            if then is not None:
                then.set()

    def _leave_out(self, what: str) -> None:
        if not self.stage.facts.left_out or not self.stage.facts.left_out[-1].endswith(what.partition(": ")[2]):
            self.stage.facts.left_out.append(what)

    async def _all(self, policy: str, scripted: Policy, block: str = "first") -> None:
        for item in range(len(self.stage.items)):
            await self._play(item, policy, scripted, block)

    async def _reference(self, item: int, block: str) -> None:
        facts = self.stage.facts
        if facts.has_reference is False:
            return
        try:
            await self._play(item, "reference", None, block)
            facts.has_reference = True
        except NoSolution as error:
            if facts.has_reference is None:
                facts.has_reference = False
                facts.left_out.append(f"the reference policy: {error}; so full marks may be impossible")
            else:
                self._leave_out(f"the reference policy on item {item}: {error}")

    async def _answers(self) -> None:
        """Answers that cannot be right for all items."""
        count = len(self.stage.items)
        solved = {
            play.item: play
            for play in self.stage.plays
            if (play.policy, play.block) == ("reference", "first") and play.turns
        }
        texts = {item: play.turns[-1]["text"] for item, play in solved.items()}
        for item in range(count):
            others = [each % count for each in range(item + 1, item + count) if each % count in solved]
            # Two questions may have one answer: those with other words come first, where the words are the answer.
            for other in sorted(others, key=lambda other: texts[other] == texts.get(item)):
                if solved[other].turns != solved[item].turns if item in solved else False:
                    await self._play(item, "another item's solution", policies.replay(solved[other].turns))
                    break
        for item in range(count):
            listed = _listed(item, texts)
            await self._play(item, "all candidates at once", policies.answer(listed))
            await self._play(item, "echo of the prompt", policies.echo)
            await self._play(item, "echo of the end of the prompt", policies.echo_of_the_end)
            if not solved and (known := self.stage.facts.answers[item]):
                await self._play(item, "the item's own answer", policies.answer(_in_formats(known)))
        for length in (1, 60, 1000):
            await self._all(f"garbage of {length * len(policies.GARBAGE.split())} words", _garbage(length))
        for name, text in policies.ANSWERS.items():
            earned = 0.0
            for item in range(count):
                earned = max(earned, await self._play(item, f"answer: {name}", policies.answer(text)) or 0.0)
                if item + 1 == ENOUGH and earned <= 0:
                    break

    async def _cheats(self) -> None:
        facts = self.stage.facts
        if facts.has_shell and not facts.has_walls:
            facts.left_out.append("the cheats with commands: commands run on this machine itself (sandbox: none)")
            return
        if not facts.has_shell:
            return
        for item in range(min(FEW, len(self.stage.items))):
            solved = self.solutions.solved(item)
            prompt = next((play.prompt for play in self.stage.plays if play.item == item), "")
            for name, command in {**policies.CHEATS, **DESTROYING, **SOLVING}.items():
                # One that looks for a solution changes files; a number in what git says of it would be chance.
                cheat = policies.cheat(with_named(command, prompt), repeats=name not in SOLVING)
                await self._play(item, name, cheat)
            read = {
                look[0] for play in self.stage.plays if play.item == item for look in READ.findall(" ".join(play.looks))
            }
            for text in ("1", "PASS", '{"score": 1, "passed": true}') if read else ():
                files = "; ".join(
                    f"printf '%s\\n' {shlex.quote(text)} > {shlex.quote(path)}" for path in sorted(read)[:5]
                )
                await self._play(item, f"cheat: {text} in the files that the reward reads", policies.cheat(files))
            form = form_of(solved.turns[-1]["text"]) if solved is not None else None
            answer = facts.answers[item] or (form.core if form is not None else "")
            if len(answer) >= SEARCHED:
                await self._play(item, "search of the sandbox", policies.cheat(search(answer)))


def _mark(policy: str, item: int) -> str:
    return f"mark-{hashlib.sha256(f'{policy} {item}'.encode()).hexdigest()[:10]}"


def _garbage(length: int) -> Policy:
    return policies.answer(" ".join([policies.GARBAGE] * length))


def _in_formats(answer: str) -> str:
    return f"The answer is {answer}.\n#### {answer}\n\\boxed{{{answer}}}\n<answer>{answer}</answer>"


def _listed(item: int, texts: Mapping[int, str]) -> str:
    """The answers of all items, this one's in the middle; without them, every likely short answer."""
    own = texts.get(item)
    others: Sequence[str] = list(dict.fromkeys(text for text in texts.values() if text and text != own))
    if own is None or len(others) < 2:
        return policies.CANDIDATES
    half = len(others) // 2
    return "\n".join([*others[:half], own, *others[half:]])


def _waiting(ended: asyncio.Event) -> Any:
    """Does nothing, after another rollout has ended."""

    async def policy(messages: Sequence[Mapping[str, Any]], tools: Any) -> Message:
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), WAITING)
        return policies.nothing(messages, tools)

    return policy
