"""The message graph of a recorded rollout, laid out as a log: one row a message, one lane a branch.

A branch stands between the message that it left and the one that follows there, which is the order of sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LANE = 18
"""Pixels between lanes."""
ROW = 26
"""Pixels between rows; the style has the same."""


@dataclass(slots=True)
class Branch:
    """Messages that follow each other."""

    kind: str
    """`conversation`, `attempt`, `edit`, `branch` or `subagent`."""
    reason: str
    messages: Sequence[Mapping[str, Any]]
    turns: Sequence[int | None]
    calls: Mapping[str, Any]
    number: int
    """In the rollout; 0 is the conversation."""
    children: dict[int, list[Branch]] = field(default_factory=dict)
    """Those that leave after the message at this place, -1: before the first."""

    def anchor(self, place: int) -> str:
        turn = self.turns[place] if place < len(self.turns) else None
        return f"turn-{turn}" if turn is not None else f"message-{self.number}-{place}"


@dataclass(frozen=True, slots=True)
class GraphRow:
    """A message in the drawing, or the head of a branch."""

    lane: int
    branch: Branch
    place: int | None
    """None for the head."""


def branches_of(record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[Branch]:
    """The conversation of a rollout's record, then all others of it; each hangs on the one that it left."""
    found: list[Branch] = []
    _collect(record, messages, "conversation", "", found)
    return found


def _collect(
    record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], kind: str, reason: str, found: list[Branch]
) -> Branch:
    calls = record.get("calls") or {}
    turns = record.get("message_turns") or [None] * len(messages)
    root = Branch(kind, reason, messages, turns, calls, len(found))
    found.append(root)
    own = [root]
    for dropped in record.get("discarded") or ():
        kind = "attempt" if dropped.get("attempt") else "edit" if dropped.get("edit") else "branch"
        turns = dropped.get("message_turns") or [None] * len(dropped["messages"])
        own.append(Branch(kind, dropped["reason"], dropped["messages"], turns, calls, len(found)))
        found.append(own[-1])
    for dropped, branch in zip(record.get("discarded") or (), own[1:], strict=True):
        # Records of older versions say only after how many messages it left: so far as is known, the conversation's.
        at = min(dropped["at"], len(root.messages)) - 1
        number, place = dropped.get("after") or (-1, -1 if "after" in dropped else at)
        parent = own[number + 1] if -1 <= number < len(own) - 1 else root
        parent.children.setdefault(place, []).append(branch)
    for branch in own:
        for place, message in enumerate(branch.messages):
            if (chat := (calls.get(message.get("tool_call_id")) or {}).get("subagent")) is not None:
                name = f"sub-agent of {message.get('name') or 'a call'}"
                inner = _collect(chat, chat["messages"], "subagent", name, found)
                branch.children.setdefault(place, []).insert(0, inner)
    return root


def rows_of(root: Branch, lane: int = 0) -> Iterator[GraphRow]:
    """The rows of a branch and of those that hang on it."""
    for place in range(-1, len(root.messages)):
        if place >= 0:
            yield GraphRow(lane, root, place)
        for child in root.children.get(place, ()):
            yield GraphRow(lane + 1, child, None)
            yield from rows_of(child, lane + 1)


def drawing(rows: Sequence[GraphRow]) -> dict[str, Any]:
    """Size, lines and dots of the lanes next to the rows. Lines are (path, kind of branch)."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    left: dict[int, tuple[int, int]] = {}
    seen: dict[int, int] = {}
    for at, row in enumerate(rows):
        number = row.branch.number
        if number not in first:
            first[number] = at
            if row.lane:
                left[number] = (row.lane - 1, seen.get(row.lane - 1, 0))
        last[number] = at
        seen[row.lane] = at
    lanes = {row.branch.number: row for row in rows}
    lines = []
    for number, row in lanes.items():
        x, top, bottom = _x(row.lane), _y(first[number]), _y(last[number])
        start = f"M{x} {top}"
        if number in left:
            lane, at = left[number]
            start = f"M{_x(lane)} {_y(at)} C{_x(lane)} {top} {x} {_y(at)} {x} {top}"
        lines.append((f"{start} L{x} {bottom}", row.branch.kind))
    dots = [(_x(row.lane), _y(at)) for at, row in enumerate(rows)]
    width = _x(max((row.lane for row in rows), default=0)) + 12
    return {"width": width, "height": ROW * len(rows), "lines": lines, "dots": dots}


def _x(lane: int) -> int:
    return 12 + LANE * lane


def _y(row: int) -> int:
    return ROW * row + ROW // 2
