"""Credit by turn: each token has the return from its turn on, compared with the same turn of its group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig, Tool, ToolResult
from lachesis.rewards.reward import Reward
from lachesis_messages.records.split_rollouts import SplitRollouts
from lachesis_messages.tokens import TokenPrefix
from lachesis_testing.fake_server import Ask, FakeServer, ToolUser
from lachesis_tokens.samples.decision import ANY_TRAINER, decide_for_training
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RejectedGroup,
    RejectReason,
    RolloutSamples,
    TrainingGroup,
    build_group,
    group_problems,
    samples_from_atropos,
)
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.turn_credit import turn_advantages, turns_of_spans
from lachesis_train.trainer.datums import prepare
from lachesis_train.trainer.settings import TrainingSettings
from tests.run import some
from tests.support.own_api import OwnApi, own_api
from tests.support.token_trees import END, UNTIMED, Tree, completion, trees
from tests.support.training_runs import CoinToss, serving, trained, with_tokens

__all__ = ["own_api"]

START = TokenPrefix([1, 2, 3])
_rewards = st.floats(-2, 2)


def in_float64(scores: Sequence[float], rewards: Sequence[Sequence[float]], discount: float) -> list[list[float]]:
    """The same by matrices: one row a rollout, nan where it has no such turn."""
    rows = [list(each) or [0.0] for each in rewards]
    width = max(map(len, rows))
    earned = np.full((len(rows), width), np.nan)
    for at, row in enumerate(rows):
        earned[at, : len(row)] = row
        earned[at, len(row) - 1] += scores[at] - np.sum(row)
    ahead = np.arange(width)[None, :] - np.arange(width)[:, None]  # [turn, later turn]
    weights = np.where(ahead >= 0, float(discount) ** np.maximum(ahead, 0), 0.0)
    returns = np.where(np.isnan(earned), np.nan, np.nan_to_num(earned) @ weights.T)
    shared = [turn for turn in range(width) if turn == 0 or np.isfinite(returns[:, turn]).sum() > 1]
    baseline = np.nanmean(returns[:, shared], axis=0)
    per_turn = np.array([baseline[max(i for i, turn in enumerate(shared) if turn <= t)] for t in range(width)])
    return [row[: len(rows[at])].tolist() for at, row in enumerate(returns - per_turn)]


@settings(UNTIMED, max_examples=some(100))
@given(st.lists(st.tuples(_rewards, st.lists(_rewards, max_size=5)), min_size=1, max_size=5), st.floats(0, 1))
def test_advantages_are_those_of_a_computation_by_matrices(
    group: list[tuple[float, list[float]]], discount: float
) -> None:
    scores, rewards = [score for score, _ in group], [each for _, each in group]
    found = turn_advantages(scores, rewards, discount)
    for mine, wanted in zip(found, in_float64(scores, rewards, discount), strict=True):
        assert mine == pytest.approx(wanted, abs=1e-9)
    whole = np.array(scores) - np.mean(scores)
    if discount == 1:
        assert [each[0] for each in found] == pytest.approx(whole.tolist(), abs=1e-9)


def test_a_turn_is_credited_with_what_came_after_it_and_not_before() -> None:
    found = turn_advantages([1.0, 1.0], [[1.0, 0.0], [0.0, 1.0]])
    assert found == [[0.0, -0.5], [0.0, 0.5]]
    # What the score has beyond the turns belongs to the last one; alone at its third turn, it has the second's mean.
    assert turn_advantages([1.0, 0.0], [[0.0, 0.0, 0.0], [0.0, 0.0]]) == [[0.5, 0.5, 0.5], [-0.5, -0.5]]
    assert turn_advantages([1.0, 0.0], [[0.0, 0.0, 0.0], []], 0.5) == [[0.125, 0.375, 0.875], [-0.125]]


def test_completions_that_are_no_turns_belong_to_the_turn_whose_reward_comes_next() -> None:
    tree = Tree()
    first = tree.sample(START, [4, END])
    tree.sample(TokenPrefix([8]), [5, END])  # a sub-agent of the first turn
    tree.recorded.append(completion(first.extend([5]), [6, END], purpose="summary"))
    tree.sample(first.extend([6]), [7] * 3)  # an attempt at the second turn
    tree.replaced = tree.recorded[-1:]
    tree.sample(first.extend([6]), [7, END])
    ids = [each.tokens.completion_id for each in tree.recorded if each.tokens is not None]
    found = turns_of_spans(samples(tree), [ids[0], ids[4]])
    assert [found[name] for name in ids] == [0, 0, 1, 1, 1]
    assert set(turns_of_spans(samples(tree), []).values()) == {0}


def test_what_prepared_a_turn_that_never_came_is_credited_with_nothing_that_was_earned_before() -> None:
    tree = Tree()
    first = tree.sample(START, [4, END])
    tree.sample(first.extend([5]), [6] * 3)  # an attempt at the second turn
    tree.replaced = tree.recorded[-1:]
    tree.sample(first.extend([5]), [7] * 3)  # the attempt with which the rollout gave up
    tree.path = [tree.recorded[0], tree.recorded[2]]
    ids = [each.tokens.completion_id for each in tree.recorded if each.tokens is not None]
    found = turns_of_spans(samples(tree), ids[:1], given_up=ids[2])
    assert [found[name] for name in ids] == [0, 1, 1]
    # The other rollout made a second turn, which earned nothing either: both were at the same point.
    assert turn_advantages([1.0, 0.0], [[1.0], [0.0, 0.0]], 1.0, [True, False]) == [[0.5, 0.0], [-0.5, 0.0]]
    assert turn_advantages([1.0, 1.0], [[1.0], [0.0, 1.0]], 1.0, [True, False]) == [[0.0, -0.5], [0.0, 0.5]]


def test_an_attempt_of_a_sub_agent_belongs_to_the_turn_in_which_it_was_made() -> None:
    tree = Tree()
    first = tree.sample(START, [4, END])
    tree.sample(TokenPrefix([8]), [5] * 3)  # an attempt of a sub-agent of the first turn
    tree.replaced = tree.recorded[-1:]
    tree.recorded.append(completion(TokenPrefix([8, 8]), [6, END], purpose="summary"))  # and its summary
    tree.sample(first.extend([6]), [7, END])
    ids = [each.tokens.completion_id for each in tree.recorded if each.tokens is not None]
    found = turns_of_spans(samples(tree), [ids[0], ids[3]], below=ids[1:3])
    assert [found[name] for name in ids] == [0, 0, 0, 1]


@st.composite
def rollouts(draw: st.DrawFn, at: int) -> RolloutSamples:
    tree = draw(trees(max_completions=6))
    tree.recorded = [each for each in tree.recorded if each.tokens is not None and each.tokens.prompt.length]
    tree.sample(START, [4, END])
    made = samples(tree, rollout_id=f"r{at}")
    every = list(dict.fromkeys(each.tokens.completion_id for each in tree.recorded if each.tokens is not None))
    numbers = draw(st.sets(st.integers(0, len(every) - 1))) if draw(st.booleans()) else range(len(every))
    turns = [every[number] for number in sorted(numbers)]
    rewards = draw(st.lists(_rewards, min_size=len(turns), max_size=len(turns)))
    given_rewards = rewards if draw(st.integers(0, 4)) else None
    return RolloutSamples(f"r{at}", draw(_rewards), made, turn_rewards=given_rewards, turn_ids=turns)


@settings(UNTIMED, max_examples=some(60))
@given(
    st.integers(2, 4).flatmap(lambda count: st.tuples(*map(rollouts, range(count)))),
    st.sampled_from(list(SplitRollouts)),
    st.sampled_from([1.0, 0.9, 0.0]),
)
def test_each_token_that_a_trainer_gets_has_the_advantage_of_its_turn(
    group: tuple[RolloutSamples, ...], split: SplitRollouts, discount: float
) -> None:
    shape = GroupSettings(len(group), split, turn_discount=discount, ensure_scores_are_not_same=False)
    built = build_group(group, shape)
    assert isinstance(built, TrainingGroup), built
    body = json.loads(json.dumps(built.to_atropos(1)))
    assert group_problems(body, samples_from_atropos(body)) == []
    rewards = [list(each.turn_rewards or ()) for each in group]
    wanted = in_float64([float(each.reward or 0.0) for each in group], rewards, discount)
    batch = prepare([body], TrainingSettings())
    if not batch.samples:
        return
    for row, sample in zip(batch.samples, built.samples, strict=True):
        at = int(sample.rollout_id[1:])
        turn_ids = list(group[at].turn_ids) if group[at].turn_rewards else []
        sampled = [span for each in group[at].samples for span in each.spans]
        tokens = []
        for span in sample.spans:
            before = {each.completion_id for each in sampled if each.turn <= span.turn}
            turn = max((turn_ids.index(each) for each in before if each in turn_ids), default=0)
            tokens += [wanted[at][turn]] * len(span)
        assert row.advantages.tolist() == pytest.approx(tokens, abs=1e-9)


def pair(first: Sequence[float], second: Sequence[float], **more: Any) -> list[RolloutSamples]:
    """Two rollouts of two turns with these rewards, and score 1."""
    found = []
    for name, rewards in (("a", first), ("b", second)):
        tree = Tree()
        end = tree.sample(START, [4, 4, END])
        tree.sample(end.extend([5, 6]), [7, END])
        ids = [each.tokens.completion_id for each in tree.recorded if each.tokens is not None]
        found.append(RolloutSamples(name, 1.0, samples(tree, rollout_id=name), turn_rewards=rewards, turn_ids=ids))
    return found


def test_rollouts_of_the_same_score_teach_where_they_earned_it_at_other_turns() -> None:
    built = build_group(pair([1, 0], [0, 1]), GroupSettings(2, turn_discount=1.0))
    assert isinstance(built, TrainingGroup)
    body = built.to_atropos()
    assert body["advantages"] == [[0.0] * 8 + [-0.5] * 2, [0.0] * 8 + [0.5] * 2]
    assert [each["lachesis"]["advantage"] for each in body["overrides"]] == [[0.0, -0.5], [0.0, 0.5]]
    for settings_ in (GroupSettings(2), GroupSettings(2, turn_discount=1.0)):
        equal = build_group(pair([1, 0], [1, 0]), settings_)
        assert isinstance(equal, RejectedGroup) and equal.reason is RejectReason.SAME_SCORES


def test_a_changed_advantage_is_noticed() -> None:
    built = build_group(pair([1, 0], [0, 1]), GroupSettings(2, turn_discount=1.0))
    assert isinstance(built, TrainingGroup)
    body = json.loads(json.dumps(built.to_atropos()))
    body["advantages"][0][3] = 1.0
    (problem,) = group_problems(body, samples_from_atropos(body))
    assert "digest" in problem
    changed = replace(built, advantages=([0.0, 0.25], [0.0, 0.5])).to_atropos()
    body = json.loads(json.dumps({**changed, "overrides": built.to_atropos()["overrides"]}))
    assert group_problems(body, samples_from_atropos(body))


class Guessing(CoinToss):
    """A reward for each turn, which differs from turn to turn."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
        value = await super().compute_reward(item, result, ctx)
        return Reward(value, turn_rewards=[(value + turn) % 1 - 0.5 for turn in range(result.turns_used)])


async def test_a_trainer_gets_the_advantages_of_the_turns_that_were_played(tmp_path: Path, own_api: OwnApi) -> None:
    async with own_api.wiped() as api, FakeServer(ToolUser()) as model:
        server = with_tokens(model, tmp_path)
        shape: dict[str, Any] = {"max_agent_turns": 3, "max_token_length": 120}
        plain = serving(tmp_path, api, server, credit="turn", turn_discount=0.5, **shape)
        env = Guessing(plain.config, plain.server_configs)
        env.console = plain.console
        trainer = await trained(env, api, groups=2, steps=1)
    turns = []
    for group in trainer.groups:
        rewards = [each["turn_rewards"] for each in group["overrides"]]
        wanted = in_float64(group["scores"], rewards, 0.5)
        assert group_problems(group, samples_from_atropos(group)) == []
        for sample, of_turns, tokens in zip(samples_from_atropos(group), wanted, group["advantages"], strict=True):
            assert len(sample.spans) == len(of_turns)
            for span, value in zip(sample.spans, of_turns, strict=True):
                assert tokens[span.start : span.end] == pytest.approx([value] * len(span))
            turns.append(len(of_turns))
    assert max(turns) > 1


LOOK = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


class Delegates(HermesAgentBaseEnv):
    """The first turn delegates, and earns 1 in every other rollout. The sub-agent compresses its context."""

    name = "delegates"
    toolsets = ("delegation",)

    async def get_next_item(self) -> str:
        return "the harbour"

    def format_prompt(self, item: str) -> str:
        return f"Find {item}."

    def tools_for(self, item: str) -> list[Tool]:
        async def look(arguments: Any, session: Any) -> ToolResult:
            return ToolResult("RESULT " + "word " * 120)

        return [Tool.from_schema("look", "Look.", LOOK, look)]

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> Reward:
        earned = float("Late" not in result.history.to_openai()[-1]["content"])
        return Reward(earned, turn_rewards=[earned] + [0.0] * (result.turns_used - 1))


def delegating(ask: Ask) -> str:
    def call(name: str, **arguments: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    if "Answer with the summary alone" in ask.prompt[-400:]:
        return "SUMMARY: looked a lot."
    if "SUBTASK" in ask.prompt and "Find the harbour" not in ask.prompt:
        return "Found." if "[CONTEXT SUMMARY]" in ask.prompt else call("look", query=f"{ask.prompt.count('RESULT')}")
    if ask.turn == 0:
        return call("delegate_task", goal="SUBTASK")
    return ask.rng().choice(["Done.", "Late."])


async def test_the_summary_of_a_sub_agent_is_credited_as_the_turn_that_asked_for_it(tmp_path: Path) -> None:
    async with FakeServer(delegating, vary=True) as model:
        config = HermesAgentEnvConfig(
            group_size=6,
            compress_context_at=900,
            compress_context_keep=1,
            split_rollouts="all",
            credit="turn",
            max_token_length=200,
        )
        env = Delegates(config, [with_tokens(model, tmp_path)])
        env.console.quiet = True
        async with env.running():
            (group,) = await env.play_item("the harbour", "k", size=6, rounds=1)
    found = decide_for_training(group, config, ANY_TRAINER).content
    assert found is not None and len(set(group.rewards)) == 2
    mean = sum(group.rewards) / 6
    reward = {rollout.rollout_id: rollout.reward for rollout in group.rollouts}
    certificates = [each["lachesis"] for each in found["overrides"]]
    sizes = Counter(dict.fromkeys(reward, 0))
    for each in certificates:
        sizes[each["rollout_id"]] += sum(span["end"] - span["start"] for span in each["spans"])
    summaries = 0
    for sample, of_tokens in zip(certificates, found["advantages"], strict=True):
        share = sum(span["end"] - span["start"] for span in sample["spans"]) / sizes[sample["rollout_id"]]
        for span in sample["spans"]:
            summaries += span["purpose"] == "summary"
            last = sample["index"] == 0 and span is sample["spans"][-1]
            wanted = 0.0 if last else reward[sample["rollout_id"]] - mean
            assert of_tokens[span["start"]] == pytest.approx(wanted * share), span
    assert summaries == 6
