"""Figures of a file of trajectories, added up entry by entry in memory that does not grow with it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.trajectories.formats import format_of

NAMES = 1000
"""Distinct names that a count keeps; all further ones are counted together."""
OTHERS = "(others)"
_CALL = re.compile(r'<tool_call>\s*\{"name": ?"((?:[^"\\]|\\.)*)"')
_ROLES = {"human": "user", "gpt": "assistant"}


class Spread:
    """Mean, extremes and percentiles of numbers; percentiles are within 5 % of the number."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.least = math.inf
        self.most = -math.inf
        self._buckets: Counter[tuple[float, int]] = Counter()

    def add(self, value: float) -> None:
        self.count += 1
        self.sum += value
        self.least, self.most = min(self.least, value), max(self.most, value)
        if abs(value) < 100 and value == int(value):
            self._buckets[value, 0] += 1
        elif value:
            power = math.floor(math.log10(abs(value))) - 1
            self._buckets[round(value / 10.0**power, 0), power] += 1

    def percentile(self, share: float) -> float:
        """The value at a share of the numbers, from 0 to 1."""
        left = math.ceil(share * self.count)
        for value, times in sorted((digits * 10.0**power, times) for (digits, power), times in self._buckets.items()):
            left -= times
            if left <= 0:
                return min(max(value, self.least), self.most)
        return self.most

    def to_json(self) -> dict[str, float] | None:
        if not self.count:
            return None
        return {
            "count": self.count,
            "mean": self.sum / self.count,
            "min": self.least,
            "p50": self.percentile(0.5),
            "p90": self.percentile(0.9),
            "max": self.most,
        }


class FileStatistics:
    """Counts over entries of any format."""

    def __init__(self) -> None:
        self.entries = 0
        self.completed: Counter[str] = Counter()
        self.counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("format", "turns", "tool_calls", "outcome", "model", "environment", "toolsets")
        }
        self.answers = 0
        self.answers_with_reasoning = 0
        self.entries_without_reasoning = 0
        self.entries_with_calls = 0
        self.turns = Spread()
        self.characters = Spread()
        self.reward = Spread()

    def add(self, entry: Mapping[str, Any]) -> None:
        self.entries += 1
        self._count("format", format_of(entry) or "unknown")
        if isinstance(entry.get("completed"), bool):
            self.completed["completed" if entry["completed"] else "not completed"] += 1
        metadata = entry.get("metadata")
        facts = {**metadata, **entry} if isinstance(metadata, Mapping) else entry
        for name in ("outcome", "model", "environment"):
            if isinstance(facts.get(name), str):
                self._count(name, facts[name])
        for toolset in entry["toolsets_used"] if isinstance(entry.get("toolsets_used"), list) else ():
            self._count("toolsets", str(toolset))
        reward = facts.get("reward")
        if isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward):
            self.reward.add(float(reward))
        turns = calls = size = thoughts = 0
        for role, text, names, thought in _turns(entry):
            turns += 1
            size += text
            calls += len(names)
            self._count("turns", role)
            for name in names:
                self._count("tool_calls", name)
            if role == "assistant":
                self.answers += 1
                thoughts += thought
        self.answers_with_reasoning += thoughts
        self.entries_without_reasoning += bool(turns and not thoughts)
        self.entries_with_calls += bool(calls)
        if turns:
            self.turns.add(turns)
            self.characters.add(size)

    def to_json(self) -> dict[str, Any]:
        """All figures, by name."""
        return {
            "entries": self.entries,
            **{name.replace(" ", "_"): self.completed[name] for name in ("completed", "not completed")},
            "answers": self.answers,
            "answers_with_reasoning": self.answers_with_reasoning,
            "entries_without_reasoning": self.entries_without_reasoning,
            "entries_with_calls": self.entries_with_calls,
            "turns_per_entry": self.turns.to_json(),
            "characters_per_entry": self.characters.to_json(),
            "reward": self.reward.to_json(),
            **{name: dict(count.most_common()) for name, count in self.counts.items()},
        }

    def _count(self, what: str, name: str) -> None:
        count = self.counts[what]
        count[name if name in count or len(count) < NAMES else OTHERS] += 1


def _turns(entry: Mapping[str, Any]) -> Iterator[tuple[str, int, list[str], bool]]:
    """Role, characters, names of called tools, and whether it has reasoning, of each turn."""
    for key in ("conversations", "messages", "prompt", "completion", "chosen"):
        if isinstance(entry.get(key), list):
            for turn in entry[key]:
                if isinstance(turn, Mapping):
                    yield _turn(turn)


def _turn(turn: Mapping[str, Any]) -> tuple[str, int, list[str], bool]:
    role = turn.get("from", turn.get("role"))
    role = _ROLES.get(role, role) if isinstance(role, str) else "unknown"
    text = turn.get("value", turn.get("content"))
    text = text if isinstance(text, str) else "" if text is None else str(text)
    if role != "assistant":
        return role, len(text), [], False
    thought = text.startswith("<think>") and not text[7:].lstrip().startswith("</think>")
    names = _CALL.findall(text) if "value" in turn else []
    size = len(text)
    for call in turn["tool_calls"] if isinstance(turn.get("tool_calls"), list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            names.append(str(function.get("name")))
            size += len(str(function.get("arguments", "")))
    for key in ("reasoning", "reasoning_content", "thinking"):
        if isinstance(turn.get(key), str) and turn[key].strip():
            thought = True
            size += len(turn[key])
    return role, size, names, thought
