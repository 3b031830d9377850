"""Items that cannot be played: their rollouts keep failing in the same way, while those of other items are answered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

ALIKE: Final = 16
"""Failures in a row, all alike, after which an item is left out as broken."""
_VARYING: Final = re.compile(r"\S*\d\S*")
"""Words of a reason that differ from attempt to attempt: names of sandboxes, addresses, times."""


@dataclass(slots=True)
class _Row:
    reason: str
    count: int = 0
    answers: int = 0
    """Attempts at other items that had been answered half-way through."""


class BrokenItems:
    """Counts the failures of one run. What fails for every item is the server, the sandboxes or a setting."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._answers = 0

    def answered(self, item_key: str) -> None:
        """An attempt ended by the agent's doing."""
        self._answers += 1
        self._rows.pop(item_of(item_key), None)

    def failed(self, item_key: str, reason: str) -> bool:
        """Note a failed attempt. Returns whether the item is broken."""
        alike = _VARYING.sub("#", reason)[:300]
        item = item_of(item_key)
        row = self._rows.get(item)
        if row is None or row.reason != alike:
            row = self._rows[item] = _Row(alike)
        row.count += 1
        if row.count <= ALIKE // 2:
            row.answers = self._answers
        if row.count < ALIKE or not self._answers:
            return False
        # An outage meets others as well: then none of them is answered meanwhile, and they fail alike.
        alone = all(other is row or other.reason != alike for other in self._rows.values())
        return alone or self._answers > row.answers


def item_of(item_key: str) -> str:
    """The same for further groups of an item, and for the item played again in a later round of the data."""
    return item_key.rpartition("-")[0] or item_key
