"""Which groups make up a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_MOST_GROUPS: Final = 2048
"""Groups that are looked at, the oldest ones, if one sequence of each does not make more than a batch."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The facts about a group that packing needs."""

    sequences: int
    env_id: int | None


def pack(
    groups: Sequence[Sized],
    batch_size: int,
    least: Mapping[int, int] | None = None,
    *,
    exact: bool = True,
    oldest_first: bool = False,
) -> list[int] | None:
    """The places of the groups of the next batch; None while there is none.

    Of all sets with the right number of sequences it is the one with the oldest groups; with `least`, one that fits if
    there is any. The oldest group is always in it without `least`, or with `oldest_first`; otherwise if `least` and the
    sizes leave room for it.

    Args:
        groups: the queue, the oldest first.
        batch_size: sequences.
        least: sequences of it that have to come from an environment, by env_id. There is no batch while its groups
            have fewer.
        exact: exactly `batch_size` sequences, with all of `least`. Otherwise as many as fit, which is right when no set
            fits exactly: first of `least`, then of the oldest others, or of those of `least` if that is the whole
            batch. A group of more than `batch_size` then is a batch by itself.
        oldest_first: the oldest group goes before `least`.
    """
    if sum(group.sequences for group in groups) < batch_size:
        return None
    before_least = oldest_first and any((least or {}).values())  # otherwise it is the first one anyway
    chosen = _oldest(groups, batch_size, least or {}, exact=exact, oldest_first=before_least)
    if not (exact and least):
        return chosen
    with_first = oldest_first or sum(least.values()) < batch_size or groups[0].env_id in least
    found: Counter[int | None] = Counter()
    for at in chosen or ():
        found[groups[at].env_id] += groups[at].sequences
    if chosen and not (with_first and chosen[0]) and all(found[each] >= least[each] for each in least):
        return chosen
    return _summed(groups, batch_size, least, first=[0] if with_first else []) or chosen


def _summed(groups: Sequence[Sized], room: int, least: Mapping[int, int], first: Sequence[int]) -> list[int] | None:
    """A batch that fits exactly and has `first`, if there is one at all: by the sums that each environment can have.

    Each environment of `least` has as little above that as possible, of its oldest groups.
    """
    missing, own = dict(least), dict[int | None, list[int]]({env_id: [] for env_id in (*least, None)})
    for at, group in enumerate(groups):
        env_id = group.env_id if group.env_id in least else None  # None: all others
        if at not in first:
            own[env_id].append(at)
            continue
        room -= group.sequences
        if env_id is not None:
            missing[env_id] -= group.sequences
    if room < 0:
        return None
    parts = []
    for env_id, places in own.items():
        sizes = [groups[at].sequences for at in places[: max(_MOST_GROUPS, room)]]
        share = max(0, missing[env_id]) if env_id is not None else 0
        parts.append((places, sizes, _sums(sizes, room)[0] >> share << share))
    after = [1]
    for _, _, possible in reversed(parts[1:]):
        after.append(_added(after[-1], possible) & (1 << room + 1) - 1)
    chosen = [*first]
    for places, sizes, possible in parts:
        others = after.pop()
        total = next((each for each in range(room + 1) if possible >> each & others >> room - each & 1), None)
        if total is None:
            return None
        room -= total
        # A group of nothing before them, for the first one is always taken.
        chosen += [places[at - 1] for at in _fill([0, *sizes], total, exact=True) or () if at]
    return sorted(chosen)


def _added(some: int, others: int) -> int:
    """The sums of a number of each: bit s of either says that there is s."""
    found = 0
    while some:
        lowest = some & -some
        found |= others * lowest
        some ^= lowest
    return found


def _oldest(
    groups: Sequence[Sized], batch_size: int, least: Mapping[int, int], *, exact: bool, oldest_first: bool
) -> list[int] | None:
    """A batch of the oldest groups of each environment of `least`, and of the oldest others."""
    chosen: set[int] = set()
    room = batch_size
    if oldest_first:
        chosen.add(0)
        room -= groups[0].sequences
        if room < 0:
            return None if exact else [0]
    for env_id, sequences in least.items():
        own = [(at, group.sequences) for at, group in enumerate(groups) if group.env_id == env_id]
        missing = sum(size for _, size in own) < sequences
        for at, size in own:
            if sequences > 0 and size > batch_size and not (exact or chosen):
                return [at]
            if at in chosen:
                sequences -= size
            elif sequences > 0 and size <= room:
                chosen.add(at)
                sequences -= size
                room -= size
        if sequences > 0 and room > 0 and (missing or exact):
            return None
    if exact and chosen and 0 not in chosen and 0 < room < groups[0].sequences:
        return None
    asked = {env_id for env_id, sequences in least.items() if sequences}
    # Where `least` is the whole batch, but for parts of sequences, one that it asks nothing of would stay ahead.
    any_other = exact or oldest_first or not chosen or sum(least.values()) + len(least) <= batch_size
    left = [
        at
        for at, group in enumerate(groups)
        if at not in chosen and (not chosen or group.sequences <= room) and (any_other or group.env_id in asked)
    ]
    left = left[: max(_MOST_GROUPS, room)]
    more = _fill([groups[at].sequences for at in left], room, exact=exact)
    if more is None:
        return None
    return sorted([*chosen, *(left[at] for at in more)])


def _fill(sizes: Sequence[int], room: int, *, exact: bool) -> list[int] | None:
    """The earliest sizes that add up to `room`, the first one among them; or as near to it from below as possible."""
    if not room:
        return []
    if not sizes:
        return None if exact else []
    if sizes[0] > room:
        return None if exact else [0]
    reachable = _sums(sizes[1:], room)
    rest = room - sizes[0]
    if not exact:
        rest = (reachable[0] & (1 << rest + 1) - 1).bit_length() - 1
    elif not reachable[0] >> rest & 1:
        return None
    chosen = [0]
    for at, size in enumerate(sizes[1:], 1):
        if size <= rest and reachable[at] >> rest - size & 1:
            chosen.append(at)
            rest -= size
    return chosen


def _sums(sizes: Sequence[int], room: int) -> list[int]:
    """Bit s of each: some of sizes[i:] add up to s, which is at most `room`."""
    mask = (1 << room + 1) - 1
    found = [1]
    for size in reversed(sizes):
        found.append((found[-1] | found[-1] << size) & mask)
    return found[::-1]
