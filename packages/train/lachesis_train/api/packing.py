"""Which groups make up a batch."""

from __future__ import annotations

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
    groups: Sequence[Sized], batch_size: int, least: Mapping[int, int] | None = None, *, exact: bool = True
) -> list[int] | None:
    """The places of the groups of the next batch; None while there is none.

    The oldest group is always in it, unless `least` asks for the whole batch, so none waits for ever. Of all sets with
    the right number of sequences it is the one with the oldest groups.

    Args:
        groups: the queue, the oldest first.
        batch_size: sequences.
        least: sequences of it that have to come from an environment, by env_id. There is no batch while its groups
            have fewer.
        exact: exactly `batch_size` sequences, with all of `least`. Otherwise as many as fit, which is right when no set
            fits exactly. A group of more than `batch_size` then is a batch by itself, and the oldest group goes before
            `least`.
    """
    if sum(group.sequences for group in groups) < batch_size:
        return None
    chosen: set[int] = set()
    room = batch_size
    for env_id, sequences in (least or {}).items():
        own = [(at, group.sequences) for at, group in enumerate(groups) if group.env_id == env_id]
        missing = sum(size for _, size in own) < sequences
        for at, size in own:
            if sequences > 0 and size <= room:
                chosen.add(at)
                sequences -= size
                room -= size
        if sequences > 0 and room > 0 and (missing or exact):
            return None
    if chosen and 0 not in chosen and 0 < room < groups[0].sequences:
        return None if exact else pack(groups, batch_size, exact=False)
    left = [at for at, group in enumerate(groups) if at not in chosen and (not chosen or group.sequences <= room)]
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
    # Bit s of reachable[i]: some of sizes[i:] add up to s.
    mask = (1 << room + 1) - 1
    reachable = [1]
    for size in reversed(sizes[1:]):
        reachable.append((reachable[-1] | reachable[-1] << size) & mask)
    reachable.reverse()
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
