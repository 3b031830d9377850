"""Plays made of what the reference policy did: in other words, with wrong answers, with steps changed or repeated."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lachesis.runs.reference_policy import Policy
from lachesis_console.auditing import policies
from lachesis_console.auditing.forms import ANY_ORDER, EXACT_LAYOUT, HOLLOW, Form, asks_for_one_order, form_of, shifted
from lachesis_console.auditing.playing import Stage
from lachesis_console.auditing.records import AuditPlay
from lachesis_console.auditing.repeating import (
    MANY,
    changed_calls,
    cycles,
    deletions,
    emptied_tables,
    further_calls,
    guesses,
    negative_amounts,
    over_limit,
    repeated,
    submission,
    submitted,
    wrong_submissions,
)
from lachesis_console.auditing.sandbox_plays import (
    AFTER_THE_REFERENCE,
    BEFORE,
    CHANGED,
    EMPTIED,
    HOLLOWED,
    PRINTING,
    RELAID,
    REVERSED,
    WRITTEN,
    with_named,
)
from lachesis_messages.messages import Message, ToolCall

FEW = 2
"""Items that odd plays and cheats are tried on."""
FORMS = 4
"""Items whose answers are changed."""
DRAWN = 3
"""Times that a changed file is judged again."""
GUESSES = 10
"""Answers of other items that are said before the right one."""


class SolutionPlays:
    """Changes of the reference's plays of a stage.

    Args:
        play: plays an item by a policy, in a block; returns the reward.
    """

    def __init__(self, stage: Stage, play: Callable[..., Awaitable[float | None]]) -> None:
        self.stage, self._play = stage, play

    def solved(self, item: int) -> AuditPlay | None:
        """The first play of the reference policy, if it was scored above 0."""
        found = (play for play in self.stage.plays if (play.policy, play.item) == ("reference", item) and play.turns)
        return next((play for play in found if (play.reward or 0.0) > 0), None)

    async def forms(self) -> None:
        """The reference's answer without its wrapping, and wrong answers in the right form."""
        forms: dict[int, Form] = {}
        for item in range(len(self.stage.items)):
            solved = self.solved(item)
            if solved is None:
                continue
            if solved.turns[-1]["calls"] or not solved.turns[-1]["text"]:
                if item < FEW:
                    await self._states(item)
                continue
            if (form := form_of(solved.turns[-1]["text"], self.stage.items[item])) is not None:
                forms[item] = form
        for item, form in [*forms.items()][:FORMS]:
            solved = self.solved(item)
            control = policies.ending(self.stage.reference(), policies.GARBAGE)
            earned = await self._play(item, "reference, but garbage at the end", control)
            if solved is None or earned == solved.reward:
                await self._states(item)  # what it says is not read
                continue
            others = list(dict.fromkeys(each.core for each in forms.values() if each.core != form.core))
            plays = {
                **(form.bare() if form.unnamed(self._told(item)) else form.renamed(self._told(item))),
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
        if deleting is None and self.stage.facts.has_shell and self.stage.facts.has_walls:
            deleting = [_command(EMPTIED, solved.prompt)]
        for said, text in form.of_nothing().items() if deleting else ():
            turns = [*(deleting or ()), {"text": text, "calls": []}]
            await self._play(item, f"cheat: the state is deleted, and the answer is {said}", policies.replay(turns))

    async def _beyond_limits(self, item: int, form: Form | None) -> None:
        """More calls or guesses than the texts allow, and wrong answers before the right one."""
        if (solved := self.solved(item)) is None:
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
            plays = filter(None, map(self.solved, range(len(self.stage.items))))
            values = [str(json.loads(call["arguments"])[key]) for _, call, key in self._submissions(plays)]
            if (around := guesses(solved.turns, values)) is not None:
                await self._play(item, "guesses: wrong submissions around the right one", policies.replay(around))
        if has_user and len(solved.turns) == 1 and not solved.called and wrong:
            ends = [each.turns[-1]["text"] for each in self.stage.plays if each.policy == "reference" and each.turns]
            others = [text for text in dict.fromkeys(ends) if text != solved.turns[0]["text"]][:GUESSES]
            said = [{"text": text, "calls": []} for text in (*others, wrong)]
            await self._play(
                item, "guesses: wrong answers before the right one", policies.replay([*said, *solved.turns])
            )

    def _submissions(self, plays: Iterable[AuditPlay]) -> Iterator[tuple[int, Mapping[str, Any], str]]:
        return filter(None, (submission(play.turns) for play in plays))

    async def _states(self, item: int) -> None:
        """The reference's calls with wrong arguments, or without one of them, where the state is what scores."""
        if (solved := self.solved(item)) is None or not solved.called:
            return
        facts = self.stage.facts
        if facts.has_shell and facts.has_walls and not re.search(r"\bgit\b|\brm\b|> ?/dev", json.dumps(solved.turns)):
            for name, command in AFTER_THE_REFERENCE.items():
                turn = _command(command, solved.prompt)
                await self._play(item, name, policies.replay([*solved.turns[:-1], turn, solved.turns[-1]]))
            await self._changed_files(item, solved)
        changed = {**wrong_submissions(solved.turns, self._told(item)), **changed_calls(solved.turns)}
        for name, (before, negative) in negative_amounts(solved.turns).items():
            # What comes before it may have been enough.
            if (await self._play(item, f"without {name}", policies.replay(before)) or 0.0) < (solved.reward or 0.0):
                await self._play(item, f"cheat: {name}", policies.replay(negative))
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
        """The reference's files with a digit more, several times as a check may be drawn, in another layout, and with
        nothing in them; its programs with another content; what it writes when the files of the prompt are empty."""
        named = f"{solved.prompt} {' '.join(call['arguments'] for turn in solved.turns for call in turn['calls'])}"

        def between(first: str, last: str) -> Policy:
            before = [_command(first, solved.prompt)] if first else []
            return policies.replay([*before, *solved.turns[:-1], _command(last, named), solved.turns[-1]])

        for block in ("first", *["again"] * DRAWN):
            name = "changed: the last value of the reference's files is another one"
            await self._play(item, name, between("", CHANGED), block)
        if not EXACT_LAYOUT.search(solved.prompt):
            await self._play(item, "equal: its JSON files in another layout", between("", RELAID))
        if asks_for_one_order(solved.prompt):
            name = "reversed: the lines of the reference's files are in the opposite order"
            await self._play(item, name, between(BEFORE, REVERSED))
        for name, number in HOLLOW.items():
            hollowed = between(BEFORE, HOLLOWED.replace("VALUE", str(number)))
            await self._play(item, f"hollow: only {name} in the reference's files", hollowed)
        await self._play(item, "printing: its program prints what lies beside its input", between(BEFORE, PRINTING))
        for block in ("first", "again"):
            await self._play(item, "wrote: what the reference writes", between(BEFORE, WRITTEN), block)
        name = "emptied: the files of the prompt, before the reference begins"
        await self._play(item, name, between(EMPTIED, WRITTEN))

    def _told(self, item: int) -> str:
        solved = self.solved(item)
        return solved.words if solved is not None else ""

    async def repeating(self) -> None:
        """Steps of the reference, repeated: on the first item that it solves by steps."""
        stage = self.stage
        for item in range(0 if stage.facts.has_shell else len(stage.items)):  # commands pay nothing
            if (solved := self.solved(item)) is not None and len(solved.turns) > 1:
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


def _command(command: str, named: str) -> dict[str, Any]:
    arguments = json.dumps({"command": with_named(command, named)})
    return {"text": "", "calls": [{"name": "terminal", "arguments": arguments}]}


def _submitting(call: Mapping[str, Any], key: str) -> Policy:
    """Submits something wrong, and then what it read."""
    right = str(json.loads(call["arguments"])[key])

    def said(core: str) -> Message | None:
        made = submitted(call, key, core)
        if made is None:
            return None
        return Message("assistant", tool_calls=(ToolCall("", made["name"], made["arguments"]),))

    return policies.learner(said(shifted(right)) or policies.nothing((), None), Form("", right, "", "").alike, said)
