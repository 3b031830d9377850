"""The ids of a prompt on their way to a server: as the JSON text that goes out, and as numbers only where one asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trajectories import TokenPrefix


class PromptIds(Sequence[int]):
    """Token ids with their JSON text. A prompt of a rollout is long, and every turn sends all of it: as text it is made
    of the texts of its pieces, and takes a twentieth of the memory of a list of numbers."""

    __slots__ = ("_ids", "json", "length")

    def __init__(self, ids: Sequence[int] | TokenPrefix) -> None:
        prefix = ids if isinstance(ids, TokenPrefix) else TokenPrefix(ids)
        self.json = prefix.to_json()
        self.length = prefix.length
        self._ids: list[int] | TokenPrefix = prefix

    @property
    def ids(self) -> list[int]:
        """As numbers; made when first asked for."""
        if isinstance(self._ids, TokenPrefix):
            self._ids = self._ids.ids
        return self._ids

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == self.length and list(other) == self.ids

    __hash__ = None  # type: ignore[assignment]
