"""What a trainer gets of one rollout: tokens, and the advantage that they are trained with, for every setting.

    python benchmarks/trainer_gets.py [--no-peer]

A group of two rollouts is played against the fake model server. The first one has the retry, the edit, ... of its row
and reward 1 (0 where it gave up); the second one answers at once and has the other reward. The table is about the first
one. A cell lists the tokens that are sent and the advantage of each: those of the path on which the conversation ended,
of discarded attempts, and of other branches. Where trainers compute advantages themselves, from one score a sequence,
that is the score minus the mean. The last columns are `atroposlib` 0.4.0: the sequences that its ManagedServer makes of
the same conversation, and the last one, the usual choice where a group takes one sequence a rollout.

Exits with 1 if a token is sent twice, after another prefix, or not as it was sampled, or if a setting sends what it
should not.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fake_process import TOOLS, token_server
from benchmarks.token_ledger import Ledger, Sequenced
from benchmarks.token_turns import peer
from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.records.split_rollouts import DiscardedAttempts, SplitRollouts
from lachesis_messages.responses import ToolResponse
from lachesis_testing.fake_server import FakeServer, fake_tokenizer
from lachesis_testing.fake_server.policies import Scripted
from lachesis_tokens.samples.advantages import Advantage, rollout_advantages
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RolloutSamples,
    TrainingGroup,
    build_group,
)
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.server.token_server import TokenServer

MAX_TOKENS = 64
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "tide"}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "search", "arguments": {"query": "' + "tide " * 90
BROKEN = "<tool_call>\n{'name': search}\n</tool_call>"
SETTINGS: Sequence[tuple[SplitRollouts, DiscardedAttempts]] = (
    (SplitRollouts.FINAL, "none"),
    (SplitRollouts.LONGEST, "none"),
    (SplitRollouts.LONGEST, "rollout"),
    (SplitRollouts.ALL, "none"),
    (SplitRollouts.ALL, "rollout"),
    (SplitRollouts.ALL, -0.5),
)
LONG = "At noon, when the moon is high, " * 8
USER = {"role": "user", "content": "When is the tide high?"}


class Talk(Protocol):
    """One conversation with the model."""

    async def turn(self, n: int = 1) -> None:
        """A completion that stays, the first of `n`, and what the environment says to it."""
        ...

    async def attempt(self) -> None:
        """A completion that cannot be used: the next one is sampled in its place."""
        ...

    def edit(self) -> None:
        """The model's first answer is changed afterwards."""
        ...

    def compact(self) -> None:
        """A summary replaces all but the last message."""
        ...

    async def delegate(self, play: Play) -> None:
        """A tool call that a sub-agent answers."""
        ...


Play = Callable[[Talk], Awaitable[None]]


class Ours:
    """A message history over a token server."""

    def __init__(self, server: TokenServer) -> None:
        self.server = server
        self.managed = server.for_rollout()
        self.history = MessageHistory([USER])

    async def turn(self, n: int = 1) -> None:
        first = await self._ask(n)
        if calls := first.message.tool_calls:
            self.history.append(ToolResponse(Message("tool", "noon", tool_call_id=calls[0].id), "search"))
        else:
            self.history.append({"role": "user", "content": "And then?"})

    async def _ask(self, n: int = 1) -> Any:
        first, *others = await self.managed.chat_n(
            self.history, n, sampling=Sampling(max_tokens=MAX_TOKENS), tools=TOOLS
        )
        for other in others:
            self.history.branch(other, "another of n")
        self.history.append(first)
        return first

    async def attempt(self) -> None:
        await self._ask()
        self.history.rewind(len(self.history) - 1, "not usable", attempt=True)

    def edit(self) -> None:
        self.history[1]["content"] = "At ten."

    def compact(self) -> None:
        self.history[:-1] = [{"role": "user", "content": "So far: a question about tides."}]

    async def delegate(self, play: Play) -> None:
        asked = await self._ask()
        below = Ours(self.server)
        await play(below)
        said = Message("tool", "noon", tool_call_id=asked.message.tool_calls[0].id)
        self.history.append(ToolResponse(said, "search", chat=below.history))


class Theirs:
    """A list of messages over atroposlib's ManagedServer; one for the whole rollout, sub-agents included."""

    def __init__(self, managed: Any) -> None:
        self.managed = managed
        self.messages = [dict(USER)]

    async def turn(self, n: int = 1) -> None:
        await self._ask(n)
        self.messages.append({"role": "user", "content": "And then?"})

    async def _ask(self, n: int = 1) -> None:
        self.messages.append({"role": "assistant", "content": (await self._sample(n)).choices[0].message.content})

    async def _sample(self, n: int = 1) -> Any:
        return await self.managed.chat_completion(messages=self.messages, n=n, max_tokens=MAX_TOKENS, temperature=1.0)

    async def attempt(self) -> None:
        await self._sample()

    def edit(self) -> None:
        self.messages[1]["content"] = "At ten."

    def compact(self) -> None:
        self.messages[:-1] = [{"role": "user", "content": "So far: a question about tides."}]

    async def delegate(self, play: Play) -> None:
        await self._ask()
        await play(Theirs(self.managed))
        self.messages.append({"role": "user", "content": "noon"})


@dataclass(frozen=True, slots=True)
class Case:
    """What happens in the rollout, and what the model says."""

    name: str
    replies: Sequence[str]
    play: Play
    reward: float = 1.0
    faults: Mapping[str, Any] = field(default_factory=dict)


async def _plain(talk: Talk) -> None:
    await talk.turn()
    await talk.turn()


def _attempts(count: int, *, success: bool = True) -> Play:
    async def play(talk: Talk) -> None:
        await talk.turn()
        for _ in range(count):
            await talk.attempt()
        if success:
            await talk.turn()
            await talk.turn()

    return play


async def _edited(talk: Talk) -> None:
    await talk.turn()
    talk.edit()
    await talk.turn()


async def _compacted(talk: Talk) -> None:
    await talk.turn()
    await talk.turn()
    talk.compact()
    await talk.turn()


async def _delegating(talk: Talk) -> None:
    await talk.delegate(_plain)
    await talk.turn()


async def _of_three(talk: Talk) -> None:
    await talk.turn(3)
    await talk.turn()


CASES = (
    Case("no branch", (CALL, "At noon."), _plain),
    Case("a call that the limit cut off", (CALL, CUT, CALL, "At noon."), _attempts(1)),
    Case("three broken calls", (CALL, BROKEN, BROKEN, BROKEN, CALL, "At noon."), _attempts(3)),
    Case("three cut calls, then it gave up", (CALL, CUT, CUT, CUT), _attempts(3, success=False), reward=0.0),
    Case("an edited answer", ("At nine or so.", "At noon."), _edited),
    Case("a compaction", (CALL, "At noon, and again at midnight.", "At noon."), _compacted),
    Case("a sub-agent", (CALL, "I search. " * 5, "It is at noon.", "At noon."), _delegating),
    Case("the first of three answers", ("At noon or so.", "At noon."), _of_three),
    Case("aborted for new weights", (CALL, LONG, "No idea."), _plain, faults={"aborted": [1]}),
    # The partial completion is lost, and the request is sent again.
    Case("a connection that broke", (CALL, "At noon.", "At noon."), _plain, faults={"cut_body": [1]}),
)


@dataclass(slots=True)
class Row:
    """What was found for a case."""

    case: Case
    cells: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def fake_server(case: Case, ledger: Ledger, tokenizer: Any) -> FakeServer:
    replies = Scripted(*case.replies, "No idea.")
    return FakeServer(replies, vary=True, record=ledger.path, faults=case.faults, tokenizer=tokenizer)


async def ours(case: Case, folder: Path, tokenizer: Any, row: Row) -> None:
    ledger = Ledger(folder / f"{case.name}.jsonl")
    async with (
        fake_server(case, ledger, tokenizer) as fake,
        token_server(fake.settings(), "atropos", tokenizer=tokenizer) as server,
    ):
        first, second = Ours(server), Ours(server)
        await case.play(first)
        made = samples(first.history, rollout_id="first")
        sequences = [Sequenced(each.tokens, each.masks, each.logprobs) for each in made]
        tally = ledger.tally(sequences, server.prompts.end_of_turn)
        await second.turn()
    row.cells.append(f"{tally.sampled}" + (f", {tally.withheld} completion lost" if tally.withheld else ""))
    if tally.mismatches:
        row.wrong.append(f"all samples: {tally}")
    rollouts = [
        RolloutSamples("first", case.reward, made),
        RolloutSamples("second", 1 - case.reward, samples(second.history, rollout_id="second")),
    ]
    for split, attempts in SETTINGS:
        group = build_group(rollouts, GroupSettings(2, split, discarded_attempts=attempts))
        if not isinstance(group, TrainingGroup):
            raise RuntimeError(f"{case.name}: {group}")
        row.cells.append(cell(group))
        of_first = [sample for sample in group.samples if sample.rollout_id == "first"]
        if split is not SplitRollouts.ALL and len(of_first) != 1:
            row.wrong.append(f"{split} sends {len(of_first)} sequences")
        if split is SplitRollouts.FINAL and of_first[0].index:
            row.wrong.append("final sends another path than the one on which the conversation ended")
        if attempts == "none" and any(sample.discarded for sample in of_first):
            row.wrong.append(f"{split} sends a discarded attempt")


def cell(group: TrainingGroup) -> str:
    """`TOKENS x ADVANTAGE` of the first rollout, equal ones together, with a word before those beside the path."""
    values: Sequence[Advantage] = group.advantages or [value or 0.0 for value in rollout_advantages(group.scores)]
    found: dict[tuple[str, float], int] = {}
    for sample, value in zip(group.samples, values, strict=True):
        if sample.rollout_id == "first":
            assert isinstance(value, float)  # credit is by rollout
            part = "attempt " if sample.discarded else "branch " if sample.index else ""
            key = part, round(value, 2)
            found[key] = found.get(key, 0) + sample.trained
    return "; ".join(f"{part}{tokens} × {value:+.2f}" for (part, value), tokens in found.items())


async def theirs(case: Case, folder: Path, tokenizer: Any, row: Row) -> None:
    ledger = Ledger(folder / f"{case.name}, peer.jsonl")
    async with fake_server(case, ledger, tokenizer) as fake:
        managed = peer(fake.settings(), folder / "tokenizer")()
        try:
            await case.play(Theirs(managed))
        except Exception as error:
            row.cells += [type(error).__name__, ""]
            return
        nodes = [Sequenced(node.tokens, node.masked_tokens, node.logprobs) for node in managed.get_state()["nodes"]]
        tally = ledger.tally(nodes, (tokenizer.eos_token_id,))
    trained = [sum(mask != -100 for mask in node.masks) for node in nodes]
    more = {
        "of other ids than were sampled": tally.never_sampled,
        "after another prefix": tally.wrong_prefix,
        "twice": tally.duplicated,
    }
    found = [f"{' + '.join(map(str, trained))} of {tally.sampled}"]
    found += [f"{tokens} {how}" for how, tokens in more.items() if tokens]
    found += [f"doubled ends of turn: {tally.doubled_ends}"] if tally.doubled_ends else []
    row.cells += ["; ".join(found), f"{trained[-1]} × {case.reward - 0.5:+.2f}"]


async def measure(*, with_peer: bool) -> list[Row]:
    tokenizer = fake_tokenizer()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save_pretrained(str(folder / "tokenizer"))
        for case in CASES:
            row = Row(case)
            await ours(case, folder, tokenizer, row)
            if with_peer:
                await theirs(case, folder, tokenizer, row)
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-peer", action="store_true", help="skip atroposlib")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows = asyncio.run(measure(with_peer=not given.no_peer))
    titles = [f"`{split}`, `{attempts}`" for split, attempts in SETTINGS]
    titles += [] if given.no_peer else ["atroposlib, all nodes", "atroposlib, last node"]
    print("| the rollout has | sampled | " + " | ".join(titles) + " |")
    print("| --- | --- |" + " --- |" * len(titles))
    for row in rows:
        print(f"| {row.case.name} | " + " | ".join(row.cells) + " |")
    wrong = [f"{row.case.name}: {problem}" for row in rows for problem in row.wrong]
    print("\n".join(wrong) or "every token that is sent is one that was sampled, once, after its prefix")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
