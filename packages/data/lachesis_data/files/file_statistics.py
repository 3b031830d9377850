"""Figures of a file of trajectories, added up entry by entry in memory that does not grow with it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lachesis_data.files.formats import format_of
from lachesis_messages.messages import REASONING_KEYS, thought, without_reasoning_parts

NAMES = 1000
"""Distinct names that a count keeps; all further ones are counted together."""
OTHERS = "(others)"
SPREADS = ("turns_per_entry", "characters_per_entry", "reward")
_CALL = re.compile(r'<tool_call>\s*\{"name": ?"((?:[^"\\]|\\.)*)"')
_ANY_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
UNREADABLE = "(unreadable)"
_ROLES = {"human": "user", "gpt": "assistant"}


class Spread:
    """Mean, extremes and percentiles of numbers; percentiles are within 5 % of the number."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.least = math.inf
        self.most = -math.inf
        self._buckets: Counter[str] = Counter()
        """Numbers with two digits."""

    def add(self, value: float) -> None:
        self.count += 1
        self.sum += value
        self.least, self.most = min(self.least, value), max(self.most, value)
        self._buckets[f"{value:.1e}"] += 1

    def percentile(self, share: float) -> float:
        """The value at a share of the numbers, from 0 to 1."""
        left = math.ceil(share * self.count)
        for value, times in sorted((float(digits), times) for digits, times in self._buckets.items()):
            left -= times
            if left <= 0:
                return min(max(value, self.least), self.most)
        return self.most

    def to_json(self) -> dict[str, float] | None:
        if not self.count:
            return None
        middle, high = self.percentile(0.5), self.percentile(0.9)
        found = {"mean": self.sum / self.count, "min": self.least, "p50": middle, "p90": high, "max": self.most}
        return {"count": self.count, **found}


class FileStatistics:
    """Counts over entries of any format."""

    def __init__(self) -> None:
        self.entries = self.answers = self.answers_with_reasoning = 0
        self.entries_without_reasoning = self.entries_with_calls = 0
        self.completed: Counter[str] = Counter()
        names = ("format", "turns", "tool_calls", "outcome", "model", "environment", "toolsets")
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        self.spreads = {name: Spread() for name in SPREADS}

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
            self.spreads["reward"].add(float(reward))
        turns = calls = size = answers = thoughts = 0
        for turn in _turns(entry):
            role, text, names, thought = _figures(turn)
            turns += 1
            size += text
            calls += len(names)
            answers += role == "assistant"
            thoughts += thought
            self._count("turns", role)
            for name in names:
                self._count("tool_calls", name)
        self.answers += answers
        self.answers_with_reasoning += thoughts
        self.entries_without_reasoning += bool(turns and not thoughts)
        self.entries_with_calls += bool(calls)
        if turns:
            self.spreads["turns_per_entry"].add(turns)
            self.spreads["characters_per_entry"].add(size)

    def to_json(self) -> dict[str, Any]:
        """All figures, by name."""
        return {
            "entries": self.entries,
            **{name.replace(" ", "_"): self.completed[name] for name in ("completed", "not completed")},
            "answers": self.answers,
            "answers_with_reasoning": self.answers_with_reasoning,
            "entries_without_reasoning": self.entries_without_reasoning,
            "entries_with_calls": self.entries_with_calls,
            **{name: spread.to_json() for name, spread in self.spreads.items()},
            **{name: dict(count.most_common()) for name, count in self.counts.items()},
        }

    def _count(self, what: str, name: str) -> None:
        count = self.counts[what]
        count[name if name in count or len(count) < NAMES else OTHERS] += 1


def _turns(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("conversations", "messages", "prompt", "completion", "chosen"):
        if isinstance(entry.get(key), list):
            yield from (turn for turn in entry[key] if isinstance(turn, Mapping))


def _called(text: str) -> list[str]:
    """The names of the calls in a turn of the model."""
    names: list[str] = _CALL.findall(text)
    if len(names) < text.count("<tool_call>"):  # other writers do not begin with the name
        names = [_name(body) for body in _ANY_CALL.findall(text)]
    return names


def _name(body: str) -> str:
    try:
        return str(json.loads(body)["name"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return UNREADABLE


def _figures(turn: Mapping[str, Any]) -> tuple[str, int, list[str], bool]:
    """Role, characters, names of called tools, and whether it has reasoning."""
    role = turn.get("from", turn.get("role"))
    role = _ROLES.get(role, role) if isinstance(role, str) else "unknown"
    text = turn.get("value", turn.get("content"))
    text = text if isinstance(text, str) else "" if text is None else str(text)
    if role != "assistant":
        return role, len(text), [], False
    in_text = text.startswith("<think>") and not text[7:].lstrip().startswith("</think>")
    if "value" in turn:
        return role, len(text), _called(text), in_text
    parts = turn["content"] if isinstance(turn.get("content"), list) else []
    thoughts = [thought(turn.get(key)) for key in REASONING_KEYS] + [without_reasoning_parts(parts)[1] or ""]
    thoughts = list(filter(str.strip, thoughts))
    size, names = len(text) + sum(map(len, thoughts)), []
    for call in turn["tool_calls"] if isinstance(turn.get("tool_calls"), list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            names.append(str(function.get("name")))
            size += len(str(function.get("arguments", "")))
    return role, size, names, in_text or bool(thoughts)
