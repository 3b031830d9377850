"""Whether the advantages of trees are unbiased, and what a tree is worth beside plain groups at the same cost.

    python -m benchmarks.tree_estimates [--trees 10000] [--seed 0]

A task of at most four turns with two actions each, random rewards and a random policy of a table, whose values and
policy gradient are computed exactly. Its groups are played by the loop that plays every environment; the gradient is
the sum over turns of the advantage times the gradient of the log-probability, as a trainer computes it.

`worst z` is the largest distance of a component of the mean gradient from the exact one, in standard errors, and `p`
the probability of distances as large over all components (chi-squared). `cost` is turns times variance, relative to
plain groups: first of the whole gradient, then of its components by turn. Below 1, trees estimate better from as many
turns. The controls take the same rollouts with a baseline that has the part's own value, or without weights.
Fails if an estimate is off, or a control is not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig, Tool, ToolResult
from lachesis.loop.rollout import Rollout
from lachesis.settings.fork_rules import leaves_of
from lachesis.settings.server_settings import REFERENCE, ServerConfig
from lachesis_messages.messages import Message, ToolCall
from lachesis_messages.records.tree_places import TreePlace
from lachesis_tokens.samples.tree_credit import part_advantages

DEPTH = 4
State = tuple[int, ...]
Credit = Callable[[Sequence[TreePlace], Sequence[float]], list[list[float]]]
ACT = {"type": "object", "properties": {"action": {"type": "integer"}}, "required": ["action"]}


@dataclass(frozen=True)
class Task:
    """A tree of states; a state is the actions that led to it."""

    chance: Mapping[State, float]
    """Of action 1."""
    reward: Mapping[State, float]
    """The mean reward where the task ends."""

    @classmethod
    def draw(cls, seed: int) -> Task:
        drawn = random.Random(seed)
        chance, reward = {}, {}
        for length in range(DEPTH + 1):
            for state in itertools.product((0, 1), repeat=length):
                if any(state[:at] in reward for at in range(length)):
                    continue
                if length == DEPTH or (length and drawn.random() < 0.25):
                    reward[state] = 0.6 * drawn.random() + 0.4 * state[0]  # also the first turn matters
                else:
                    chance[state] = 0.2 + 0.6 * drawn.random()
        return cls(chance, reward)

    def value(self, state: State) -> float:
        if state in self.reward:
            return self.reward[state]
        return sum(self.probability(state, action) * self.value((*state, action)) for action in (0, 1))

    def probability(self, state: State, action: int) -> float:
        return self.chance[state] if action else 1 - self.chance[state]

    def reached(self, state: State) -> float:
        """The probability to come to a state."""
        return math.prod(self.probability(state[:at], action) for at, action in enumerate(state))

    def gradient(self) -> Any:
        """Of the expected reward by the logit of action 1 in each state."""
        return numpy.array(
            [
                self.reached(state) * p * (1 - p) * (self.value((*state, 1)) - self.value((*state, 0)))
                for state, p in self.chance.items()
            ]
        )


class TreeTask(HermesAgentBaseEnv):
    """The task, for the agent loop; every third state answers with an error, for forks at failures."""

    name = "tree-task"
    toolsets = ()
    task: Task
    dice: random.Random

    async def get_next_item(self) -> Any:
        return 0

    def format_prompt(self, item: Any) -> str:
        return "Act."

    def tools_for(self, item: Any) -> list[Tool]:
        async def act(arguments: Mapping[str, Any], session: Any) -> ToolResult:
            ended = arguments["ended"]
            return ToolResult("", "failed" if arguments["place"] % 3 == 0 else None, done=ended)

        return [Tool.from_schema("act", "Acts.", ACT, act)]

    def reference_policy(self) -> Any:
        def policy(messages: Sequence[Mapping[str, Any]], tools: Any) -> Message:
            state = actions(messages)
            action = int(self.dice.random() < self.task.chance[state])
            ended = (*state, action) in self.task.reward
            place = sum(bit << at for at, bit in enumerate((1, *state)))
            return Message(
                "assistant",
                "",
                (ToolCall("", "act", f'{{"action": {action}, "ended": {str(ended).lower()}, "place": {place}}}'),),
            )

        return policy

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        mean = self.task.reward[actions(result.messages)]
        return float(self.dice.random() < mean)


def actions(messages: Sequence[Mapping[str, Any]]) -> State:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return tuple(int(call["function"]["arguments"][11]) for call in calls)


def with_own_value(places: Sequence[TreePlace], scores: Sequence[float]) -> list[list[float]]:
    """The control: a part is compared with the mean of all ways from its fork, its own among them."""
    ways: dict[str, dict[str, float]] = {}
    for part, value in _values(places, scores).items():
        ways.setdefault(part.rpartition(".")[0], {})[part] = value
    found = []
    for place in places:
        siblings = [ways[part.rpartition(".")[0]] for part in place.parts]
        values = [each[part] - sum(each.values()) / len(each) for part, each in zip(place.parts, siblings, strict=True)]
        found.append([value * weight for value, weight in zip(values, place.weights, strict=True)])
    return found


def without_weights(places: Sequence[TreePlace], scores: Sequence[float]) -> list[list[float]]:
    """The control: all parts count alike, though the first ones stand for several rollouts."""
    return part_advantages([replace(place, weights=(1.0,) * len(place.weights)) for place in places], scores)


def _values(places: Sequence[TreePlace], scores: Sequence[float]) -> dict[str, float]:
    values = {place.path: score for place, score in zip(places, scores, strict=True)}
    for part in sorted({part for place in places for part in place.parts} - values.keys(), key=len, reverse=True):
        after = [value for name, value in values.items() if name.rpartition(".")[0] == part]
        values[part] = sum(after) / len(after)
    return values


@dataclass(frozen=True)
class Played:
    """A group: its places, scores, and for each rollout the states and actions of its own turns with their parts."""

    places: list[TreePlace]
    scores: list[float]
    turns: list[list[tuple[State, int, int]]]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Played:
        places, turns = [], []
        for rollout in rollouts:
            place, result = rollout.tree or TreePlace(str(rollout.index), (0,), (1.0,), 0), rollout.result
            assert result is not None and rollout.reward is not None, rollout.reason
            path = actions(result.messages)
            begin = len(path) - len(result.history.completions())
            turns.append([(path[:at], path[at], place.part_of(at - begin)) for at in range(begin, len(path))])
            places.append(place)
        return cls(places, [float(rollout.reward or 0.0) for rollout in rollouts], turns)

    @property
    def weight(self) -> float:
        """Of all its trees."""
        return sum({place.parts[0]: place.weights[0] for place in self.places}.values())

    def gradient(self, task: Task, credit: Credit) -> Any:
        found = dict.fromkeys(task.chance, 0.0)
        for turns, advantages in zip(self.turns, credit(self.places, self.scores), strict=True):
            for state, action, part in turns:
                found[state] += advantages[part] * (action - task.chance[state])
        return numpy.array(list(found.values()))


async def groups(task: Task, seed: int, count: int, **settings: Any) -> list[Played]:
    """Groups, played by the pipeline's own code."""
    config = HermesAgentEnvConfig(enabled_toolsets=[], max_num_workers=1, **settings)
    env = TreeTask(config, [ServerConfig(model_name=REFERENCE)])
    env.task, env.dice = task, random.Random(seed)
    found = []
    async with env.running():
        for number in range(count):
            (group,) = await env.play_item(0, f"item{number}", size=config.group_size)
            found.append(Played.of(group.rollouts))
    return found


def compared(task: Task, played: Sequence[Played], credit: Credit) -> tuple[float, float, Any]:
    """The worst z, the p-value of all components, and turns times variance for a rollout's weight: of all components,
    then by turn."""
    exact = task.gradient()
    found = numpy.array([group.gradient(task, credit) for group in played])
    off = found - numpy.array([[group.weight] for group in played]) * exact
    mean, errors = off.mean(0), off.std(0, ddof=1) / math.sqrt(len(played))
    z = mean / errors
    weight = numpy.mean([group.weight for group in played])
    turns = numpy.mean([sum(map(len, group.turns)) for group in played])
    costs = off.var(0) / weight**2 * turns
    depths = numpy.array([len(state) for state in task.chance])
    costs = numpy.array([costs.sum(), *(costs[depths == depth].sum() for depth in range(DEPTH))])
    return float(abs(z).max()), _chi_squared_tail(float((z**2).sum()), len(z)), costs


def _chi_squared_tail(value: float, degrees: int) -> float:
    """The probability of a larger value, by the normal approximation of its cube root (Wilson and Hilferty)."""
    mean, deviation = 1 - 2 / (9 * degrees), math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(((value / degrees) ** (1 / 3) - mean) / deviation / math.sqrt(2))


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """What is played, the plain groups first."""
    yield "plain groups of 8", {"group_size": 8}
    yield "turns:2,3,4, 2 trees of 8", {"group_size": 16, "tree_at": "turns:2,3,4"}
    yield "turns:2, 4 trees of 2", {"group_size": 8, "tree_at": "turns:2"}
    yield "turns:3, 3 ways, 3 trees", {"group_size": 9, "tree_at": "turns:3", "tree_width": 3}
    yield "turns:4, 4 ways, 2 trees", {"group_size": 8, "tree_at": "turns:4", "tree_width": 4}
    yield "tool_failures, 2 trees of 4", {"group_size": 8, "tree_at": "tool_failures", "tree_leaves": 4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=10_000, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    task, plain, wrong = Task.draw(given.seed), None, []
    print(f"{len(task.chance)} states, expected reward {task.value(()):.3f}")
    for name, settings in rows():
        config = HermesAgentEnvConfig(**settings)
        trees = config.group_size // (leaves_of(config, config.group_size) if config.tree_at else 1)
        played = asyncio.run(groups(task, given.seed + 1, math.ceil(given.trees / trees), **settings))
        credits: list[tuple[str, Credit, bool]] = [(name, part_advantages, True)]
        if config.tree_at:
            credits += [("  control: own value in the baseline", with_own_value, False)]
            credits += [("  control: without weights", without_weights, False)]
        for shown, credit, unbiased in credits:
            worst, p, cost = compared(task, played, credit)
            plain = cost if plain is None else plain
            relative = "  ".join(f"{each:.2f}" for each in cost / plain)
            print(f"{shown:38} worst z {worst:6.1f}   p {p:7.1e}" + (f"   cost {relative}" if unbiased else ""))
            if (p < 1e-3) == unbiased:
                wrong.append(shown.strip())
    print("as expected" if not wrong else f"NOT AS EXPECTED: {', '.join(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
