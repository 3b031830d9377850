"""Which tool failed how often, and why: from the records of rollouts, or while they are played."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

VARYING = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+(?:\.\d+)?")
"""What differs between two failures with the same cause: ids, ports, times."""
_DIFFERS = re.compile(rf"""('[^']*'|"[^"]*"|/[^:;,]*|…|{VARYING.pattern})""")
"""The same with what a model named: paths, arguments."""
MOST_KINDS = 200
"""Reasons of a tool that are told apart; a model can make up any number of them."""
MOST_REASONS = 3
_LENGTH = 120
_COMPARED = 40
_Kind = tuple[str, ...]
"""The parts of an error that do not differ."""


@dataclass(slots=True)
class ToolFailures:
    """Counts them."""

    calls: Counter[str] = field(default_factory=Counter)
    """By tool: all its calls."""
    failed: Counter[str] = field(default_factory=Counter)
    """By tool, the calls that failed."""
    _reasons: dict[str, Counter[_Kind]] = field(default_factory=dict)
    _said: dict[tuple[str, _Kind], list[str]] = field(default_factory=dict)
    """By tool and reason: its text in parts, every second one with what differs, or "…" where it did."""

    def add(self, stats: Mapping[str, Mapping[str, int]], errors: Iterable[tuple[str, str]]) -> None:
        """A rollout: its `tool_stats`, and the tool and the error of each call that failed."""
        for tool, counts in stats.items():
            self.calls[tool] += counts.get("count", 0)
            self.failed[tool] += counts.get("failure", 0)
        for tool, error in errors:
            self._add_reason(tool, shortened(error), 1)

    def _add_reason(self, tool: str, said: str, count: int) -> None:
        reasons = self._reasons.setdefault(tool, Counter())
        parts = _DIFFERS.split(said)
        kind = tuple(parts[::2])
        if kind not in reasons and len(reasons) >= MOST_KINDS:
            parts, kind = ["another reason"], ("another reason",)
        reasons[kind] += count
        known = self._said.setdefault((tool, kind), parts)
        known[1::2] = (old if old == new else "…" for old, new in zip(known[1::2], parts[1::2], strict=True))

    def add_record(self, rollout: Mapping[str, Any]) -> None:
        """The same from a record of a groups file."""
        errors = ((each.get("tool", ""), each.get("error") or "") for each in rollout.get("tool_errors") or ())
        self.add(rollout.get("tool_stats") or {}, errors)

    def to_rows(self) -> Iterator[tuple[str, int, int, list[tuple[str, int]]]]:
        """Each tool that was called: its name, its calls, its failures, and the reasons with counts."""
        for tool, calls in self.calls.items():
            reasons = self._reasons.get(tool, Counter())
            yield tool, calls, self.failed[tool], [("".join(self._said[tool, kind]), reasons[kind]) for kind in reasons]

    def add_rows(self, rows: Iterable[tuple[str, int, int, list[tuple[str, int]]]]) -> None:
        """The result of `to_rows`."""
        for tool, calls, failed, reasons in rows:
            self.calls[tool] += calls
            self.failed[tool] += failed
            for said, count in reasons:
                self._add_reason(tool, said, count)

    def __bool__(self) -> bool:
        return any(self.failed.values())

    def __iter__(self) -> Iterator[tuple[str, int, int, list[tuple[str, int]]]]:
        """Each tool that failed: its name, its failures, its calls, and the reasons with counts; the most first."""
        for tool, calls, failed, reasons in sorted(self.to_rows(), key=lambda row: -row[2]):
            if failed:
                yield tool, failed, calls, sorted(_merged(reasons), key=lambda reason: -reason[1])

    def lines(self) -> Iterator[str]:
        """A line for each tool that failed, with its most frequent reasons."""
        for tool, failed, calls, reasons in self:
            said = [f"{count} x {why}" for why, count in reasons[:MOST_REASONS]]
            left = sum(count for _, count in reasons[MOST_REASONS:])
            more = [f"{left} x other reasons"] if left else []
            yield f"{tool} {failed} of {calls}: {'; '.join([*said, *more])}".removesuffix(": ")


def shortened(error: str) -> str:
    """An error in one short line that any terminal takes."""
    text = " ".join("".join(char if char.isprintable() else " " for char in error[: 4 * _LENGTH]).split())
    return text if len(text) <= _LENGTH else text[: _LENGTH - 1] + "…"


def _merged(reasons: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same with "…" for a word in which `MOST_REASONS` of them or more differ, and in nothing else: the name of
    what a model asked for need not be in quotes."""
    left = [(said.split(), count) for said, count in reasons]
    while True:
        differ: Counter[tuple[Any, ...]] = Counter()
        for words, _ in left[:_COMPARED]:
            differ.update((at, *words[:at], "…", *words[at + 1 :]) for at, word in enumerate(words) if word != "…")
        (_, *words), most = max(differ.items(), key=lambda each: each[1], default=((0,), 0))
        if most < MOST_REASONS or len(words) < 4:
            return [(" ".join(words), count) for words, count in left]
        kinds: dict[bool, list[tuple[list[str], int]]] = {True: [], False: []}
        for said, count in left:
            same = len(said) == len(words) and all(one in ("…", other) for one, other in zip(words, said, strict=True))
            kinds[same].append((said, count))
        left = [(words, sum(count for _, count in kinds[True])), *kinds[False]]
