"""Items drawn by what they teach: `item_sampling: difficulty`.

"Items with a signal" in docs/serving.md says how.

`draws.jsonl` holds each draw before its item is played and the rewards of each group before the group is in the outbox.
Reading it restores the state, so that a killed run goes on as if it had not been: draws without a group are played
again, and each later one depends on the seed, its number and this state only.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Final

from lachesis.figures.item_keys import ItemKeys, item_digest, or_none, plain
from lachesis.runs.failures import UnusableSettings
from lachesis_messages.records.jsonl import JsonlWriter, read_lines

FLOOR: Final = 0.02
"""The least signal that an item counts with; the greatest of rewards from 0 to 1 is 0.25."""
RETURN: Final = 8
"""Draws for each item of the pool after which an item comes back at the latest: it is then drawn for certain."""
REMEMBERED: Final = 4
"""Groups of an item that count: the policy changes."""
MOST: Final = 10_000
"""Items in the pool."""
PRIOR: Final = (0.0, 1.0)
"""Rewards of rollouts that nobody played, which count with those of the item."""
POOLS: Final = ("new", "unsolved", "hard", "medium", "easy", "solved")


@dataclass(slots=True)
class PooledItem:
    """An item that was drawn, and what came of it."""

    item: Any
    drawn: int = 0
    """Number of its last draw."""
    occurrence: int = 0
    """Of its last key."""
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Of its last groups, by key."""

    signal: float = pvariance(PRIOR)
    rate: float | None = None
    """The mean reward; None before the first."""

    def note(self, key: str, rewards: list[float]) -> None:
        """Those of a group, in place of earlier ones of the same group."""
        self.rewards[key] = rewards
        while len(self.rewards) > REMEMBERED:
            del self.rewards[next(iter(self.rewards))]
        found = list(itertools.chain(*self.rewards.values()))
        self.signal = max(FLOOR, pvariance([*PRIOR, *found])) if found else FLOOR
        self.rate = fmean(found) if found else None

    @property
    def pool(self) -> str:
        """By its rewards, as numbers from 0 to 1."""
        if self.rate is None:
            return "new"
        if not 0 < self.rate < 1:
            return "unsolved" if self.rate <= 0 else "solved"
        return "hard" if self.rate < 1 / 3 else "medium" if self.rate <= 2 / 3 else "easy"


class ItemPools(ItemKeys):
    """The items of one run, and their draws. All methods but `open` belong to the event loop.

    Args:
        next_item: the stream; items that it repeats do not enter twice.
        path: of `draws.jsonl`.
        new_share: probability of a new item while the stream has any.
        most: items in the pool. Another new one takes the place of the item with the least signal that is not played.
    """

    def __init__(
        self, next_item: Callable[[], Awaitable[Any]], path: Path, *, seed: int, new_share: float, most: int = MOST
    ) -> None:
        super().__init__()
        self.items: dict[str, PooledItem] = {}
        """By digest."""
        self._next_item, self._path, self._seed, self._new_share, self._most = next_item, path, seed, new_share, most
        self._known: set[str] = set()
        self._through = False
        """The stream has no more items that are new."""
        self._draws = 0
        self._open: dict[str, dict[str, Any]] = {}
        """Draws without a group, by key."""
        self._again: list[str] = []
        self._done: Collection[str] = ()
        self._key = ""
        self._writing = asyncio.Lock()

    def open(self, done: Collection[str]) -> None:
        """Restore the state. `done`: the keys of the groups that need not be played, also later ones."""
        self._done = done
        self._file = JsonlWriter(self._path, fsync=True)
        for line in read_lines(self._path):
            self._note(line)
        self._open = {key: line for key, line in self._open.items() if key not in done and _digest(key) in self.items}
        self._again = list(self._open)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    async def next_item(self) -> Any:
        """The item of the next draw; None when there is none. `key` has its key until the next call."""
        if self._again:
            self._key = self._again.pop(0)
        elif (line := await self._draw()) is None:
            return None
        else:
            await self._write(line)
            self._key = line["key"]
        return self.items[_digest(self._key)].item

    def key(self, item: Any) -> str:
        return self._key

    def about(self, key: str) -> dict[str, Any]:
        """How an item in flight was drawn, for the data of its group."""
        return {name: value for name, value in self._open[key].items() if name not in ("key", "item", "retired")}

    async def finished(self, key: str, rewards: Sequence[float | None]) -> None:
        """Note the rewards of a group that is about to be written, or left out."""
        await self._write({"key": key, "rewards": [float(reward) for reward in rewards if reward is not None]})
        self._open.pop(key, None)

    def counts(self) -> dict[str, int]:
        """Items by pool."""
        return dict(Counter(item.pool for item in self.items.values()))

    async def _draw(self) -> dict[str, Any] | None:
        chance = random.Random(f"{self._seed}:{self._draws}")
        new = chance.random() < self._new_share
        oldest = min(self.items, key=lambda digest: self.items[digest].drawn, default="")
        if oldest and self._draws - self.items[oldest].drawn >= (RETURN - 1) * len(self.items):
            return self._repeated(oldest, 1.0, overdue=True)
        if not self._through and (new or not self.items):
            if (line := await self._new()) is not None:
                return line
            await self._write({"through": True})
        if not self.items:
            return None
        signals = [item.signal for item in self.items.values()]
        (digest,) = chance.choices(list(self.items), signals)
        share = 1.0 if self._through else 1.0 - self._new_share
        return self._repeated(digest, share * self.items[digest].signal / sum(signals))

    async def _new(self) -> dict[str, Any] | None:
        """The draw of the next item that is not known; None if the stream only repeats, or ends."""
        for _ in range(2 * len(self._known) + 100):
            if (item := await or_none(self._next_item)) is None:
                return None
            if (digest := item_digest(item)) not in self._known:
                return self._of_new(digest, item)
            await asyncio.sleep(0)
        return None

    def _of_new(self, digest: str, item: Any) -> dict[str, Any]:
        same = False
        with suppress(ValueError):  # of an array
            same = bool(plain(item) == item)
        if not same:
            raise UnusableSettings(
                f"env.item_sampling difficulty keeps items over restarts, as JSON, and this one is something else: "
                f"{item!r:.200}; let get_next_item return dicts, lists, text and numbers, or set item_sampling uniform"
            )
        flying = {_digest(key) for key in self._open}
        idle = [each for each in self.items if each not in flying] if len(self.items) >= self._most else []
        retired = min(idle, key=lambda each: self.items[each].signal, default="")
        share = self._new_share if self.items else 1.0
        return {**self._line(digest, 0, share), "new": True, "item": item, "retired": retired}

    def _repeated(self, digest: str, probability: float, *, overdue: bool = False) -> dict[str, Any]:
        item = self.items[digest]
        line = self._line(digest, item.occurrence, probability)
        return {**line, "rate": item.rate, "pool": item.pool, "overdue": overdue}

    def _line(self, digest: str, occurrence: int, probability: float) -> dict[str, Any]:
        numbers = itertools.count(occurrence + 1)  # a start without pools may have played some
        key = next(key for number in numbers if (key := self._name(digest, number)) not in self._done)
        return {"draw": self._draws, "key": key, "probability": probability}

    async def _write(self, line: dict[str, Any]) -> None:
        async with self._writing:  # the state has the order of the file
            await asyncio.to_thread(self._file.write, line)
            self._note(line)

    def _note(self, line: dict[str, Any]) -> None:
        """What a line of the file says."""
        if "through" in line:
            self._through = True
            return
        digest = _digest(line["key"])
        if "draw" in line:
            if "new" in line:
                self.items.pop(line["retired"], None)
                self.items[digest] = PooledItem(line["item"])
                self._known.add(digest)
            self.items[digest].drawn = line["draw"]
            self.items[digest].occurrence = int(line["key"].rpartition("-")[2])
            self._draws = line["draw"] + 1
            self._open[line["key"]] = line
        elif digest in self.items:
            self.items[digest].note(line["key"], line["rewards"])


def _digest(key: str) -> str:
    """Of the item of a group."""
    return key.partition("-")[0]
