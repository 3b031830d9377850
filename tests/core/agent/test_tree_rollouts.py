"""Rollouts that branch: every leaf has its own files, and every sampled token is in one rollout."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import Cost, TokenCount
from lachesis.loop.rollout import BeforeFork, Rollout
from lachesis.loop.trees import scored_first
from lachesis.runs.failures import UnusableSettings
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message, ToolCall
from lachesis_messages.records.jsonl import read_lines
from lachesis_messages.records.tree_places import TreePlace
from lachesis_testing.fake_server import FakeServer
from lachesis_testing.fake_server.completions import Ask
from lachesis_tokens.endpoint.agent_program import AgentProgramEnv
from lachesis_tokens.samples.cross_checks import contradictions
from lachesis_tokens.samples.verification import verify_records
from tests.support.small_envs import SortWords, make, process, sorts
from tests.support.training_runs import environment, played, with_tokens, written


class Letters(HermesAgentBaseEnv):
    """The agent writes a letter a turn into a file; the reward checks that they are those of its own conversation."""

    name = "letters"
    toolsets = ("terminal", "todo")

    async def setup(self) -> None:
        self.items = itertools.count()

    async def get_next_item(self) -> Any:
        return next(self.items)

    def format_prompt(self, item: Any) -> str:
        return f"Write letters ({item})."

    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        await ctx.write_file("log", "")

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        said = [json.loads(call.arguments)["command"][5] for call in result.ok_calls if call.name == "terminal"]
        assert (await ctx.read_file("log")).split() == said
        assert sum(count.count for count in result.tool_counts.values()) == len(result.ok_calls)
        return len(set(said)) / 10


class AnyLength(Letters):
    """The same without the check, for calls that fail and turns that are removed."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(len(result.messages))


class Writer:
    """Writes random letters for `turns` turns, other ones each time that it is asked."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns
        self.letters = random.Random(0)

    def __call__(self, ask: Ask) -> str:
        if ask.turn >= self.turns:
            return "Done."
        letter = self.letters.choice("abcdefghijklmnopqrstuvwxyz")
        command = f"echo {letter} >> log; cat log"
        return f"<tool_call>\n{json.dumps({'name': 'terminal', 'arguments': {'command': command}})}\n</tool_call>"


async def trees(folder: Path, policy: Any = None, env: Any = Letters, **settings: Any) -> list[dict[str, Any]]:
    return await played(env, folder, policy or Writer(), **{"group_size": 8, "tree_at": "turns:2,3", **settings})


async def test_a_tree_has_leaves_of_their_own_and_shares_what_came_before(tmp_path: Path) -> None:
    found = await trees(tmp_path)
    assert [each["reward"] is not None for each in found] == [True] * 8, found[0]["traceback"]
    assert sorted(each["tree"]["path"] for each in found) == [
        f"{root}.{first}.{second}" for root in range(2) for first in range(2) for second in range(2)
    ]
    assert {tuple(each["tree"]["weights"]) for each in found} == {(4, 2, 1)}
    assert {tuple(each["tree"]["turns"]) for each in found} == {(0, 1, 2)}
    (group,) = read_lines(tmp_path / "groups.jsonl")
    said = {}
    for rollout, messages in zip(group["rollouts"], group["messages"], strict=True):
        said[rollout["tree"]["path"]] = [each["content"] for each in messages if each["role"] == "tool"]
    for one, other in itertools.combinations(said, 2):
        common = next((at for at in range(3) if one.split(".")[at] != other.split(".")[at]), 3)
        assert said[one][:common] == said[other][:common], (one, other)
    assert len({each[-1] for each in said.values()}) > 4  # what follows a fork differs
    totals = verify_records([group])
    assert totals.ok, totals.problems
    assert totals.delivered == totals.sampled == sum(each["completion_tokens"] for each in found)
    spans = Counter(span["completion_id"] for sample in group["samples"] for span in sample["spans"])
    assert set(spans.values()) == {1}
    assert len(spans) == 2 * (1 + 2 + 4 + 4)
    assert list(contradictions(group, [])) == []
    for name, value, problem in (
        ("path", "0.0.1", "another one ends"),
        ("path", "0", "2 weights|3 weights"),
        ("turns", [0, 2, 2], "begin at the turns"),
        ("weights", [8, 2, 1], "different things of part"),
        (None, None, "7 of 8 rollouts"),
    ):
        forged = copy.deepcopy(group)
        if name is None:
            del forged["rollouts"][0]["tree"]
        else:
            forged["rollouts"][0]["tree"][name] = value
        assert re.search(problem, str(list(contradictions(forged, [])))), (name, value)


async def test_where_branches_end_early_more_trees_make_up_for_their_leaves(tmp_path: Path) -> None:
    class Quitter(Writer):
        def __call__(self, ask: Ask) -> str:
            return "Enough." if ask.turn == 1 and self.letters.random() < 0.7 else super().__call__(ask)

    found = await trees(tmp_path, Quitter(), total_steps=4)
    for at in range(0, 32, 8):
        places = [each["tree"] for each in found[at : at + 8]]
        assert len({place["path"] for place in places}) == 8
        roots = {place["path"].split(".")[0]: place for place in places}
        assert sum(place["weights"][0] for place in roots.values() if not place["wave"]) == 8
        assert [roots[root]["wave"] for root in sorted(roots)] == sorted(place["wave"] for place in roots.values())
    assert {each["tree"]["wave"] for each in found} > {0}
    assert verify_records(read_lines(tmp_path / "groups.jsonl")).ok


async def test_the_table_says_how_many_tokens_branches_shared(tmp_path: Path) -> None:
    async with FakeServer(Writer()) as model:
        env = environment(Letters, tmp_path, with_tokens(model, tmp_path), group_size=8, tree_at="turns:2,3")
        result = await env.process_manager()
    found = {each["tree"]["path"]: each for each in written(tmp_path)}
    for path, each in found.items():
        first, way = (found[begin]["completions"]["tokens"] for begin in (path[:2] + "0.0", path[:4] + "0"))
        turns = {"0.0": 0, "1.0": 1, "0.1": 2, "1.1": 2}[path[2:]]
        shared = sum([first[0], way[1 - int(path[2])]][:turns])
        assert each.get("inherited_tokens") == (shared or None), path
        assert len(each["completions"]["tokens"]) == 4 - turns
    shared = sum(each.get("inherited_tokens", 0) for each in found.values())
    sampled = sum(each["completion_tokens"] for each in found.values())
    said = f"6 rollouts off another one: {shared} tokens shared, {sampled} sampled"
    assert dict(result.rows())["branched"] == said


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rule", "begins"),
    [
        ("turns:3", {0, 2}),
        ("tokens:1", {0, 1, 2, 3}),
        ("tokens:100000", {0}),
        ("surprise:0.000001", {0, 1, 2, 3}),
        ("surprise:1000", {0}),
        ("tool_failures", {0, 2}),
    ],
)
async def test_a_rollout_forks_where_the_setting_says(tmp_path: Path, rule: str, begins: set[int]) -> None:
    class Fails(Writer):
        def __call__(self, ask: Ask) -> str:
            said = super().__call__(ask)
            return said.replace('"terminal"', '"terminol"') if ask.turn == 1 else said

    found = await trees(tmp_path, Fails(), AnyLength, group_size=16, tree_at=rule, tree_leaves=8)
    assert {turn for each in found for turn in each["tree"]["turns"]} == begins
    assert verify_records(read_lines(tmp_path / "groups.jsonl")).ok


async def test_an_environment_says_itself_where_its_rollouts_fork(tmp_path: Path) -> None:
    class Own(Letters):
        tree_leaves = 3

        async def branch_at(self, item: Any, history: Any) -> int:
            with pytest.raises(TypeError):
                history.append({"role": "user", "content": "no"})
            return 3 if history[-1]["content"].split()[0] < "n" else 1

    found = await trees(tmp_path, None, Own, group_size=6, tree_at=None)
    widths = {each["tree"]["path"] for each in found}
    assert len(widths) == 6


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"group_size": 4}, "holds one tree of 4"),
        ({"tree_at": "turns:1"}, "names no turns"),
        ({"tree_at": "turns:3,2"}, "names no turns"),
        ({"tree_at": "tokens:0.5"}, "names no turns"),
        ({"tree_at": "tool_failures:2"}, "names no turns"),
        ({"tree_at": "often"}, "names no turns"),
        ({"tree_at": "tokens:9"}, "set tree_leaves"),
        ({"credit": "turn"}, "credit turn has no effect on trees"),
    ],
)
def test_a_setting_that_makes_no_trees_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HermesAgentEnvConfig(**{"group_size": 8, "tree_at": "turns:2,3", **settings})


@pytest.mark.slow
async def test_what_cannot_branch_is_refused_by_name(tmp_path: Path) -> None:
    class Session(Letters):
        @asynccontextmanager
        async def session(self, item: Any) -> AsyncIterator[None]:
            yield

    class Program(AgentProgramEnv, Letters):
        command = "true"

    class OwnLoop(Letters):
        async def play_rollout(self, item: Any, item_key: str, index: int, tools: Any, **_: Any) -> Rollout:
            result = await HermesAgentLoop(self.server.for_rollout(), []).run(self.initial_messages(item))
            return Rollout(f"r{index}", item_key, index, result.outcome, result.reason, 1.0, result)

    class Scripted(Letters):
        def reference_policy(self) -> Any:
            return lambda messages, tools: Message("assistant", "", (ToolCall("", "todo", "{}"),))

    class Unbounded(Letters):
        def branch_at(self, item: Any, history: Any) -> int:
            return 2

    with pytest.raises(UnusableSettings, match="session"):
        await trees(tmp_path / "session", None, Session)
    with pytest.raises(UnusableSettings, match="set tree_leaves"):
        await trees(tmp_path / "unbounded", None, Unbounded, tree_at=None)
    with pytest.raises(UnusableSettings, match="counts tokens"):
        await make(Scripted, None, tmp_path, group_size=8, tree_at="tokens:9", tree_leaves=4).process_manager()
    with pytest.raises(UnusableSettings, match="logprobs"):
        await process(SortWords, tmp_path, sorts, group_size=8, tree_at="surprise:1", tree_leaves=4)
    with pytest.raises(UnusableSettings, match="cannot branch"):
        await played(Program, tmp_path / "program", Writer(), group_size=8, tree_at="turns:2")
    with pytest.raises(UnusableSettings, match="play_rollout is the environment's own"):
        await trees(tmp_path / "own", None, OwnLoop)
    assert "tree" not in (await trees(tmp_path / "one", group_size=1, tree_at="turns:2", tree_credit="leaves"))[0]


async def test_a_fork_is_left_out_where_something_runs_and_the_record_says_so(tmp_path: Path) -> None:
    class Runs(Writer):
        def __call__(self, ask: Ask) -> str:
            said = super().__call__(ask)
            return said.replace("cat log", "cat log; sleep 1000 &") if ask.turn == 0 else said

    found = await trees(tmp_path, Runs())
    assert {each["tree"]["path"].count(".") for each in found} == {0}
    could = [each["tree"] for each in found if each["tree"]["weights"][0] > 1]
    assert len(could) >= 2
    assert all(place["not_forked"][0][0] == 1 and "sleep" in place["not_forked"][0][1] for place in could)


async def test_the_branches_of_a_tree_have_one_name_for_routers(tmp_path: Path) -> None:
    async with FakeServer(Writer()) as model:
        settings = {"group_size": 8, "tree_at": "turns:2,3"}
        await environment(Letters, tmp_path, with_tokens(model, tmp_path), **settings).process_manager()
        names = Counter(seen.headers["X-Session-ID"] for seen in model.requests if "X-Session-ID" in seen.headers)
    assert sorted(names.values()) == [1 + 2 + 4 + 4] * 2


class Long(Writer):
    """The same with long answers of the tool."""

    def __call__(self, ask: Ask) -> str:
        return super().__call__(ask).replace("cat log", "cat log; seq 60")


async def test_a_branch_whose_context_is_full_samples_nothing_and_lacks_no_sample(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"group_size": 4, "tree_at": "turns:3", "max_token_length": 1900}
    found = await trees(tmp_path, Long(9), AnyLength, fake={"context_length": 1900}, **shape)
    sampled = {each["tree"]["path"]: each["completion_tokens"] for each in found}
    assert sampled["0.1"] == sampled["1.1"] == 0 < min(sampled["0.0"], sampled["1.0"])
    assert {each["outcome"] for each in found} == {"context_exhausted"}
    totals = verify_records(read_lines(tmp_path / "groups.jsonl"))
    assert totals.ok, totals.problems


async def test_turns_that_compression_removed_still_count(tmp_path: Path) -> None:
    settings = {
        "compress_context_at": 1800,
        "compress_context_keep": 2,
        "compress_context_with": "extractive",
        "max_agent_turns": 11,
    }
    found = await trees(tmp_path, Long(9), AnyLength, group_size=4, tree_at="turns:9", **settings)
    assert any(edit["error"] is None and edit["turn"] < 8 for each in found for edit in each["context_edits"])
    assert sorted(each["tree"]["path"] for each in found) == ["0.0", "0.1", "1.0", "1.1"]
    assert verify_records(read_lines(tmp_path / "groups.jsonl")).ok


class SomeScored(Letters):
    """A part of the rollouts has no score."""

    left_out: frozenset[int] = frozenset()

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
        reward = await super().compute_reward(item, result, ctx)
        said = [json.loads(call.arguments)["command"][5] for call in result.ok_calls if call.name == "terminal"]
        return None if sum(map(ord, said)) % 3 in self.left_out else reward


SHAPES: list[dict[str, Any]] = [
    {"tree_at": "turns:2,3", "tree_width": 3, "tree_leaves": 6},
    {"tree_at": "turns:2,3"},
    {"tree_at": "turns:3", "tree_width": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_the_turns_before_a_fork_are_in_a_sample_as_long_as_any_way_has_a_score(
    tmp_path: Path, seed: int
) -> None:
    class Leaving(SomeScored):
        left_out = frozenset({0, 1}) if seed % 2 else frozenset({0})

    class Quitter(Writer):
        """Some ways of the first fork end before the second one, so the ways of a fork are of several shapes."""

        def __call__(self, ask: Ask) -> str:
            return "Enough." if ask.turn == 1 and self.letters.random() < 0.4 else super().__call__(ask)

    writer = Quitter() if seed > 2 else Writer()
    writer.letters = random.Random(seed)
    async with FakeServer(writer) as model:
        env = environment(
            Leaving, tmp_path, with_tokens(model, tmp_path), group_size=12, total_steps=3, **SHAPES[seed % 3]
        )
        await env.process_manager()
    groups = list(read_lines(tmp_path / "groups.jsonl"))
    assert groups
    assert (every := verify_records(groups)).ok, every.problems
    moved = 0
    for group in groups:
        totals = verify_records([group])
        assert list(contradictions(group, [])) == []
        rollouts = group["rollouts"]
        assert len({each["rollout_id"] for each in rollouts}) == len(rollouts) == 12
        assert len({each["tree"]["path"] for each in rollouts}) == 12
        for each in rollouts:
            place = TreePlace.from_record(each["tree"])
            before = place.turns[place.first_own]
            assert place.completions == tuple(max(0, turn - before) for turn in place.turns), "each turn is one"
            assert ("inherited_tokens" in each) == (before > 0)
            assert each["turns"] - before == len(each["completions"]["tokens"])
        spans = Counter(span["completion_id"] for sample in group["samples"] for span in sample["spans"])
        assert set(spans.values()) == {1}
        scored = {each["rollout_id"]: each for each in rollouts if each["reward"] is not None}
        moved += sum("inherited_tokens" not in each for each in scored.values())
        ends: dict[tuple[int, ...], str] = {}
        for sample in group["samples"]:
            for span in sample["spans"]:
                ends.setdefault(tuple(sample["tokens"][: span["end"]]), span["completion_id"])
        for each in scored.values():
            whole = [s for s in group["samples"] if s["rollout_id"] == each["rollout_id"]]
            (longest,) = whole
            trained = sum(tuple(longest["tokens"][:at]) in ends for at in range(1, len(longest["tokens"]) + 1))
            assert trained == each["turns"], "each turn on the path of a score is in a sample"
        assert totals.delivered == sum(each["completion_tokens"] for each in scored.values())
        assert totals.sampled == sum(each["completion_tokens"] for each in rollouts), "none counts twice"
    assert moved


def test_ways_of_several_shapes_change_places() -> None:
    root = TreePlace("0", (0,), (4.0,), 0)
    first, second = (root.child(at, 2, 1, 1) for at in range(2))
    before = BeforeFork(MessageHistory([{"role": "user", "content": "Write."}]), Cost(TokenCount(), 0, 0, 0, 0, 0))
    rollouts = [
        Rollout(
            f"r{at}",
            "item",
            at,
            Outcome.COMPLETED,
            "",
            reward,
            None,
            tree=place,
            forks=[before] * (len(place.ways) - 1),
        )
        for at, (place, reward) in enumerate(
            [(first.child(0, 2, 2, 2), None), (first.child(1, 2, 2, 2), None), (second, 1.0)]
        )
    ]
    found = [(each.rollout_id, each.tree.path) for each in scored_first(rollouts) if each.tree]
    assert found == [("r0", "0.1.0"), ("r1", "0.1.1"), ("r2", "0.0")]
