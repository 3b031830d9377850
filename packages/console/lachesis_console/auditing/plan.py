"""Which policies play which items, and in which order."""

from __future__ import annotations

import asyncio
import hashlib
import json
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
from lachesis_console.auditing.forms import ANY_ORDER, Form, form_of, shifted
from lachesis_console.auditing.playing import NoSolution, Stage
from lachesis_console.auditing.records import AuditPlay
from lachesis_console.auditing.repeating import (
    MANY,
    changed_calls,
    cycles,
    deletions,
    emptied_tables,
    further_calls,
    over_limit,
    repeated,
    submission,
    submitted,
    wrong_submissions,
)
from lachesis_console.auditing.sandbox_plays import (
    AFTER_THE_REFERENCE,
    CHANGED,
    DESTROYING,
    RELAID,
    SOLVING,
    search,
    with_named,
)
from lachesis_messages.messages import Message, ToolCall

FEW = 2
"""Items that odd plays and cheats are tried on."""
READ = re.compile(r"ctx\.read_(?:file|bytes)\('([\w./-]+)'\)")
FURTHER = 8.0
"""Seconds in which the reference policy plays further items."""
FORMS = 4
"""Items whose answers are changed."""
SEARCHED = 4
"""Characters of an answer that the files of a sandbox are searched for."""
EXACT_LAYOUT = re.compile(r"indent|sorted|exactly|one line|compact|pretty", re.IGNORECASE)
"""Prompts that ask for one layout of a file."""
DRAWN = 3
"""Times that a changed file is judged again."""
GUESSES = 10
"""Answers of other items that are said before the right one."""
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
            await self._forms()
            await self._repeating()
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
                facts.left_out.append(f"the reference policy: {error}; so whether full marks are possible is unknown")
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
            others = [each for each in range(item + 1, item + count) if each % count in solved]
            for other in (each % count for each in others):
                if solved[other].turns != solved[item].turns if item in solved else False:
                    await self._play(item, "another item's solution", policies.replay(solved[other].turns))
                    break
        for item in range(count):
            listed = _listed(item, texts)
            await self._play(item, "all candidates at once", policies.answer(listed))
            await self._play(item, "echo of the prompt", policies.echo)
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
            solved = self._solved(item)
            prompt = next((play.prompt for play in self.stage.plays if play.item == item), "")
            for name, command in {**policies.CHEATS, **DESTROYING, **SOLVING}.items():
                await self._play(item, name, policies.cheat(with_named(command, prompt)))
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

    def _solved(self, item: int) -> AuditPlay | None:
        """The first play of the reference policy, if it was scored above 0."""
        found = (play for play in self.stage.plays if (play.policy, play.item) == ("reference", item) and play.turns)
        return next((play for play in found if (play.reward or 0.0) > 0), None)

    async def _forms(self) -> None:
        """The reference's answer without its wrapping, and wrong answers in the right form."""
        forms: dict[int, Form] = {}
        for item in range(len(self.stage.items)):
            solved = self._solved(item)
            if solved is None:
                continue
            if solved.turns[-1]["calls"] or not solved.turns[-1]["text"]:
                if item < FEW:
                    await self._states(item)
                continue
            if (form := form_of(solved.turns[-1]["text"], self.stage.items[item])) is not None:
                forms[item] = form
        for item, form in [*forms.items()][:FORMS]:
            solved = self._solved(item)
            control = policies.ending(self.stage.reference(), policies.GARBAGE)
            earned = await self._play(item, "reference, but garbage at the end", control)
            if solved is None or earned == solved.reward:
                await self._states(item)  # what it says is not read
                continue
            others = list(dict.fromkeys(each.core for each in forms.values() if each.core != form.core))
            plays = {
                **(form.bare() if form.unnamed(self._told(item)) else {}),
                **form.wrong(self._told(item)),
                **form.equal(self._told(item)),
                **(form.reordered() if ANY_ORDER.search(self._told(item)) else {}),
            }
            if len(others) >= 2:
                plays["several answers in one"] = form.listed(others)
            for name, text in plays.items():
                if text != form.before + form.core + form.after:
                    await self._play(item, name, policies.ending(self.stage.reference(), text))
            await self._without_state(item, form, solved)
        for item in [*range(len(self.stage.items))][:FEW]:
            await self._beyond_limits(item, forms.get(item))

    async def _without_state(self, item: int, form: Form, solved: AuditPlay) -> None:
        """What the question is about is deleted, and then there is nothing."""
        tools = self.stage.facts.tools[item]
        deleting = emptied_tables(solved.turns, tools, self._told(item)) or deletions(
            solved.turns, tools, solved.prompt
        )
        for said, text in form.of_nothing().items() if deleting else ():
            turns = [*(deleting or ()), {"text": text, "calls": []}]
            await self._play(item, f"cheat: the state is deleted, and the answer is {said}", policies.replay(turns))

    async def _beyond_limits(self, item: int, form: Form | None) -> None:
        """More calls or guesses than the texts allow, and wrong answers before the right one."""
        if (solved := self._solved(item)) is None:
            return
        wrong = dict(form.wrong()).get("wrong: other letters and digits", "") if form is not None else ""
        has_user = self.stage.env.follow_up is not None
        if (limit := over_limit(solved.turns, self._told(item), wrong if has_user else "")) is not None:
            more, turns = limit
            await self._play(item, f"over the limit: {more} before the solution", policies.replay(turns))
        if has_user and form is not None and wrong:
            learner = policies.learner(
                Message("assistant", wrong),
                form.alike,
                lambda core: Message("assistant", f"{form.before}{core}{form.after}"),
            )
            await self._play(item, "learner: says what it reads after a wrong answer", learner)
        if (found := submission(solved.turns)) is not None:
            await self._play(item, "learner: submits what it reads after a wrong answer", _submitting(*found[1:]))
        if has_user and len(solved.turns) == 1 and not solved.called and wrong:
            ends = [each.turns[-1]["text"] for each in self.stage.plays if each.policy == "reference" and each.turns]
            others = [text for text in dict.fromkeys(ends) if text != solved.turns[0]["text"]][:GUESSES]
            said = [{"text": text, "calls": []} for text in (*others, wrong)]
            await self._play(
                item, "guesses: wrong answers before the right one", policies.replay([*said, *solved.turns])
            )

    async def _states(self, item: int) -> None:
        """The reference's calls with wrong arguments, or without one of them, where the state is what scores."""
        if (solved := self._solved(item)) is None or not solved.called:
            return
        facts = self.stage.facts
        if facts.has_shell and facts.has_walls and not re.search(r"\bgit\b|\brm\b|> ?/dev", json.dumps(solved.turns)):
            for name, command in AFTER_THE_REFERENCE.items():
                turn = {"text": "", "calls": [{"name": "terminal", "arguments": json.dumps({"command": command})}]}
                await self._play(item, name, policies.replay([*solved.turns[:-1], turn, solved.turns[-1]]))
            await self._changed_files(item, solved)
        changed = {**wrong_submissions(solved.turns, self._told(item)), **changed_calls(solved.turns)}
        for name, turns in changed.items():
            await self._play(item, name, policies.replay(turns, then=solved.turns[-1]["text"] or "Done."))
        others = [
            turn for each in self.stage.plays if each.policy == "reference" and each.item != item for turn in each.turns
        ]
        # What is written into files of a sandbox is written again by the reference's own calls.
        if not self.stage.facts.has_shell and (more := further_calls(solved.turns, others)) is not None:
            await self._play(item, "more: the calls of other items too", policies.replay(more))
        if (deleting := deletions(solved.turns, self.stage.facts.tools[item], solved.prompt)) is not None:
            await self._play(item, "destroy: by the tools that delete", policies.replay(deleting))

    async def _changed_files(self, item: int, solved: AuditPlay) -> None:
        """The reference's files with a digit more, several times as a check may be drawn, and in another layout."""
        named = f"{solved.prompt} {' '.join(call['arguments'] for turn in solved.turns for call in turn['calls'])}"

        def then(command: str) -> Policy:
            arguments = json.dumps({"command": with_named(command, named)})
            turn = {"text": "", "calls": [{"name": "terminal", "arguments": arguments}]}
            return policies.replay([*solved.turns[:-1], turn, solved.turns[-1]])

        for block in ("first", *["again"] * DRAWN):
            await self._play(
                item, "changed: the last value of the reference's files is another one", then(CHANGED), block
            )
        if not EXACT_LAYOUT.search(solved.prompt):
            await self._play(item, "equal: its JSON files in another layout", then(RELAID))

    def _told(self, item: int) -> str:
        solved = self._solved(item)
        return f"{solved.told}\n{solved.prompt}" if solved is not None else ""

    async def _repeating(self) -> None:
        """Steps of the reference, repeated: on the first item that it solves by steps."""
        stage = self.stage
        for item in range(0 if stage.facts.has_shell else len(stage.items)):  # commands pay nothing
            if (solved := self._solved(item)) is not None and len(solved.turns) > 1:
                break
        else:
            return
        tools = stage.facts.tools[item]
        best = solved.reward or 0.0
        for name, first, cycle in cycles(solved.turns, tools):

            def played(count: int, first: int = first, cycle: Sequence[Any] = cycle) -> Policy:
                return policies.replay(repeated(solved.turns, first, cycle, count), then="")

            many = await self._play(item, f"repeat: {name}", played(MANY))
            if many is not None and many >= best - 1e-9:
                for count in (0, 1, 2):
                    await self._play(item, f"repeat {count}: {name}", played(count))


def _submitting(call: Mapping[str, Any], key: str) -> Policy:
    """Submits something wrong, and then what it read."""
    right = str(json.loads(call["arguments"])[key])

    def said(core: str) -> Message | None:
        made = submitted(call, key, core)
        if made is None:
            return None
        return Message("assistant", tool_calls=(ToolCall("", made["name"], made["arguments"]),))

    return policies.learner(said(shifted(right)) or policies.nothing((), None), Form("", right, "", "").alike, said)


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
