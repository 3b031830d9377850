"""Advantages of the parts of trees, against a naive computation and exact expectations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.records.tree_places import TreePlace
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RolloutSamples,
    TrainingGroup,
    build_group,
    group_problems,
    samples_from_atropos,
)
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.tree_credit import part_advantages
from tests.support.token_trees import END, Tree

Nested = Any
"""A score, or the ways in which a part goes on."""
_scores = st.sampled_from([0.0, 0.5, 1.0, -0.25])
_nested = st.recursive(_scores, lambda below: st.lists(below, min_size=2, max_size=3), max_leaves=6)


def value(part: Nested) -> float:
    return part if isinstance(part, float) else sum(map(value, part)) / len(part)


def placed(trees: list[Nested], waves: list[int]) -> Iterator[tuple[TreePlace, float, list[float]]]:
    """The place and the score of each leaf, and the advantages that its parts have to have."""

    def below(
        part: Nested, place: TreePlace, advantages: list[float]
    ) -> Iterator[tuple[TreePlace, float, list[float]]]:
        if isinstance(part, float):
            yield place, part, advantages
            return
        for at, way in enumerate(part):
            child = place.child(at, len(part), len(place.turns), len(place.turns))
            others = [value(each) for number, each in enumerate(part) if number != at]
            yield from below(way, child, [*advantages, child.weights[-1] * (value(way) - sum(others) / len(others))])

    for root, tree in enumerate(trees):
        others = [value(each) for at, each in enumerate(trees) if at != root and waves[at] <= waves[root]]
        own = 8 * (value(tree) - sum(others) / len(others)) if others else 0.0
        yield from below(tree, TreePlace(str(root), (0,), (8.0,), waves[root]), [own])


@given(st.lists(_nested, min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_a_part_is_compared_with_the_other_ways_from_its_fork(trees: list[Nested], waves: list[int]) -> None:
    leaves = list(placed(trees, sorted(waves[: len(trees)])))
    found = part_advantages([place for place, _, _ in leaves], [score for _, score, _ in leaves])
    for mine, (_, _, wanted) in zip(found, leaves, strict=True):
        assert mine == pytest.approx(wanted, abs=1e-9)
    for place, _, _ in leaves:
        assert TreePlace.from_record(place.to_record()) == place
        assert place.part_of(0) == place.completions.count(0) - 1  # before it, others' parts
        assert place.part_of(99) == len(place.turns) - 1


@given(st.lists(_nested, min_size=1, max_size=4))
def test_with_credit_by_leaves_a_part_has_the_sum_of_its_rollouts(trees: list[Nested]) -> None:
    leaves = list(placed(trees, [0] * len(trees)))
    places, scores = [place for place, _, _ in leaves], [score for _, score, _ in leaves]
    mean = sum(scores) / len(scores)
    for place, advantages in zip(places, part_advantages(places, scores, "leaves"), strict=True):
        for part, advantage in zip(place.parts, advantages, strict=True):
            shares = [score - mean for other, score in zip(places, scores, strict=True) if part in other.parts]
            assert advantage == pytest.approx(sum(shares), abs=1e-9)


def test_equal_values_have_no_advantage_at_all() -> None:
    third = [0.1, 0.2, 0.3]
    leaves = list(placed([third, third], [0, 0]))
    found = part_advantages([place for place, _, _ in leaves], [score for _, score, _ in leaves])
    assert [each[0] for each in found] == [0.0] * 6


def test_the_gradient_is_exact_on_average_over_every_group_that_can_come() -> None:
    """Two trees; the first action forks in two or ends the rollout. All groups, with their probabilities."""
    first, second = 0.3, {0: 0.6, 1: 0.2}  # of action 1; after action 2 of the first turn nothing follows
    reward = {(0, 0): 0.1, (0, 1): 1.0, (1, 0): 0.7, (1, 1): 0.2, (2,): 0.4}
    start = {0: 0.5, 1: first, 2: 0.2}

    def trees() -> Iterator[tuple[float, list[tuple[int, ...]]]]:
        for action, chance in start.items():
            if action == 2:
                yield chance, [(2,)]
                continue
            for pair in itertools.product((0, 1), repeat=2):
                chances = [second[action] if each else 1 - second[action] for each in pair]
                yield chance * math.prod(chances), [(action, each) for each in pair]

    def of_second(action: int) -> float:
        return second[action] * reward[(action, 1)] + (1 - second[action]) * reward[(action, 0)]

    values = {0: of_second(0), 1: of_second(1), 2: reward[(2,)]}
    mean = sum(start[action] * values[action] for action in start)
    exact = {(action,): start[action] * (values[action] - mean) for action in start}  # by the logits
    for action in (0, 1):
        for last in (0, 1):
            p = second[action] if last else 1 - second[action]
            exact[(action, last)] = start[action] * p * (reward[(action, last)] - values[action])
    found = dict.fromkeys(exact, 0.0)
    for groups in itertools.product(list(trees()), repeat=2):
        chance = math.prod(each for each, _ in groups)
        places, scores, paths = [], [], []
        for root, (_, leaves) in enumerate(groups):
            trunk = TreePlace(str(root), (0,), (2.0,), 0)
            for at, path in enumerate(leaves):
                places.append(trunk if len(path) == 1 else trunk.child(at, 2, 1, 1))
                scores.append(reward[path])
                paths.append(path)
        seen = set()
        for place, path, advantages in zip(places, paths, part_advantages(places, scores), strict=True):
            for at, part in enumerate(place.parts):
                if part in seen:  # a shared part is trained once
                    continue
                seen.add(part)
                state, action = path[:at], path[at]
                chances = start if not state else {0: 1 - second[state[0]], 1: second[state[0]]}
                for other, p in chances.items():
                    found[(*state, other)] += chance * advantages[at] * ((other == action) - p)
    assert found == pytest.approx({name: 4 * each for name, each in exact.items()}, abs=1e-12)  # 4: the trees' weights


def test_each_token_that_a_trainer_gets_has_the_advantage_of_its_part() -> None:
    start, places = TokenPrefix([1, 2, 3]), [TreePlace("0", (0,), (2.0,), 0)]
    places = [*(places[0].child(at, 2, 1, 1) for at in range(2)), replace(places[0], path="1")]
    rollouts, trunk = [], Tree()
    shared = trunk.sample(start, [4, END])
    for at, (place, reward) in enumerate(zip(places, (1.0, 0.0, 0.25), strict=True)):
        tree = Tree()
        if at == 0:
            tree.recorded += trunk.recorded
        tree.sample(shared.extend([5]) if at < 2 else start, [6 + at, END])
        ids = [each.tokens.completion_id for each in (*trunk.recorded * (at < 2), *tree.recorded[-1:]) if each.tokens]
        rollouts.append(RolloutSamples(f"r{at}", reward, samples(tree, rollout_id=f"r{at}"), turn_ids=ids, tree=place))
    built = build_group(rollouts, GroupSettings(3))
    assert isinstance(built, TrainingGroup), built
    body = built.to_atropos()
    assert group_problems(body, samples_from_atropos(body)) == []
    assert body["advantages"] == [[0, 0, 0, 0.5, 0.5, 0, 1, 1], [0] * 6 + [-1, -1], [0, 0, 0, -0.5, -0.5]]
    assert [each["tree"]["path"] for each in body["overrides"]] == ["0.0", "0.1", "1"]
    assert body["group_overrides"]["group_size"] == 3


def test_what_is_no_turn_is_credited_to_the_part_in_which_it_was_sampled() -> None:
    """After the fork one way has an attempt that nobody could use, and the other one nothing but that."""
    start, trunk = TokenPrefix([1, 2, 3]), TreePlace("0", (0,), (2.0,), 0)
    first, second, whole = Tree(), Tree(), Tree()
    shared = first.sample(start, [4, END])
    for tree in (first, second):
        tree.sample(shared.extend([5]), [6, END])
    whole.sample(start, [7, END])
    places = [*(trunk.child(at, 2, 1, 1) for at in range(2)), replace(trunk, path="1")]
    turns = [[first.recorded[0].tokens.completion_id]] * 2 + [[whole.recorded[0].tokens.completion_id]]
    rollouts = [
        RolloutSamples(f"r{at}", reward, samples(tree, rollout_id=f"r{at}"), turn_ids=ids, tree=place)
        for at, (tree, reward, ids, place) in enumerate(
            zip((first, second, whole), (1.0, 0.0, 0.25), turns, places, strict=True)
        )
    ]
    built = build_group(rollouts, GroupSettings(3))
    assert isinstance(built, TrainingGroup), built
    assert built.to_atropos()["advantages"] == [[0, 0, 0, 0.5, 0.5, 0, 1, 1], [0] * 6 + [-1, -1], [0, 0, 0, -0.5, -0.5]]
