"""Simulated model servers, and the work of rollouts that they get."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from backends.errors import LachesisError, SettingsError
from lachesis_messages.records.jsonl import read_lines

Span = tuple[float, float]
"""The least and the greatest value of a uniform distribution."""


@dataclass(frozen=True, slots=True)
class SimulatedTurn:
    """A completion of `tokens` tokens, and `tools` seconds of tools and of the environment after it."""

    tokens: int
    tools: float


@dataclass(frozen=True)
class Workload:
    """What rollouts do. `recorded` groups, if there are any, take the place of the spans.

    `equal` is the share of groups without a signal, whose rewards are all the same.
    """

    turns: Span
    tokens: Span
    tools: Span
    equal: float = 0.0
    recorded: Sequence[Sequence[Sequence[SimulatedTurn]]] = ()
    record_bytes: float = 32.0
    """Of a sampled token on the disk: its id, mask and logprob as JSON take about 32."""

    def group(self, chance: Random, size: int) -> list[list[SimulatedTurn]]:
        """The turns of the rollouts of one item."""
        if self.recorded:
            return chance.choices(chance.choice(self.recorded), k=size)  # type: ignore[arg-type]
        return [self._rollout(chance) for _ in range(size)]

    def _rollout(self, chance: Random) -> list[SimulatedTurn]:
        turns, (low, high) = chance.randint(*map(int, self.turns)), map(int, self.tokens)
        return [SimulatedTurn(chance.randint(low, high), chance.uniform(*self.tools)) for _ in range(turns)]


def recorded_workload(path: Path) -> Workload:
    """The rollouts of a groups file of `lachesis process`.

    Raises:
        SettingsError: the file cannot be read, or has no rollout with turns.
    """
    groups, equal = [], 0
    try:
        for record in read_lines(path, torn_tail=True):
            played = [found for rollout in record["rollouts"] if (found := _recorded(rollout))]
            if played:
                groups.append(played)
                equal += len(set(record["scores"])) < 2
        size = path.stat().st_size
    except (LachesisError, OSError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"--like {path}: {reason}; name a groups.jsonl that `lachesis process` wrote") from error
    rollouts = [turns for played in groups for turns in played]
    tokens = [turn.tokens for turns in rollouts for turn in turns]
    if not sum(tokens):
        raise SettingsError(f"--like {path}: no rollout in it has sampled a token; name the file of another run")
    lengths = [len(turns) for turns in rollouts]
    return Workload(
        turns=(min(lengths), max(lengths)),
        tokens=(min(tokens), max(tokens)),
        tools=(0, 0),
        equal=equal / len(groups),
        recorded=groups,
        record_bytes=size / sum(tokens),
    )


def _recorded(rollout: dict[str, Any]) -> list[SimulatedTurn]:
    count = int(rollout["turns"])
    if not count:
        return []
    outside = rollout.get("seconds_in_tools", 0.0)  # `seconds_own` holds the time in the model as well
    each, more = divmod(int(rollout.get("completion_tokens", 0)), count)
    return [SimulatedTurn(each + (at < more), outside / count) for at in range(count)]


class Fleet:
    """Servers with `places` requests at once each. A request takes the latency, then its tokens at one speed: a decode
    step takes nearly the same time for few requests as for many.

    Args:
        speed: tokens a second of one request.
        latency: seconds to the first token.
    """

    def __init__(self, servers: int, *, places: int, speed: float, latency: Span, chance: Random) -> None:
        self._places = [asyncio.Semaphore(places) for _ in range(servers)]
        self._asked = [0] * servers
        self._speed, self._latency, self._chance = speed, latency, chance
        self._running, self._since, self._busy = 0, 0.0, 0.0
        self.tokens = 0
        """Of completions that ended."""

    async def complete(self, tokens: int) -> None:
        """One request, at the server that has the fewest."""
        at = self._asked.index(min(self._asked))
        self._asked[at] += 1
        try:
            async with self._places[at]:
                self._count(1)
                try:
                    await asyncio.sleep(self._chance.uniform(*self._latency) + tokens / self._speed)
                    self.tokens += tokens
                finally:
                    self._count(-1)
        finally:
            self._asked[at] -= 1

    def busy(self) -> float:
        """Seconds of all places with a request, up to now."""
        self._count(0)
        return self._busy

    def _count(self, more: int) -> None:
        now = asyncio.get_running_loop().time()
        self._busy += self._running * (now - self._since)
        self._running, self._since = self._running + more, now
