"""Conclusions from the stock rollout API's answers about groups that were posted to it.

The stock API has no idempotency key and no name for its process. Everything here follows from three of its answers: the
step and the length of its queue (`/status-env`), the group that it received last (`/latest_example`), and the step at
which a trainer registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from lachesis_train.outbox_state import Entry, KnownApi
from lachesis_train.rollout_api import EnvStatus, Latest


class PostResult(Enum):
    """The result of a POST whose answer is missing."""

    ARRIVED = "arrived"
    """The API holds the group, or held it."""
    ABSENT = "absent"
    """The API never took it."""
    UNKNOWN = "unknown"
    """Both are possible."""


def most_held(known: KnownApi, status: EnvStatus) -> int:
    """The most sequences of ours that the API can hold. It reports whole groups, rounded down."""
    return status.self_queue_size * known.largest + known.largest - 1 + known.buffer


def was_restarted(known: KnownApi, status: EnvStatus, latest: Latest, *, held: int, in_doubt: Entry | None) -> bool:
    """Whether these answers can only come from another process than the one that `known` describes.

    Args:
        held: our sequences that the known process held when last seen.
        in_doubt: the group that may have arrived since.
    """
    if status.current_step < known.step:
        return True
    if status.current_step == known.step and most_held(known, status) < held:
        return True  # without a batch, nothing leaves the queue
    most = held + (in_doubt.sequences if in_doubt is not None else 0)
    if status.self_queue_size * known.env.group_size > most:
        return True  # it holds more than we ever posted: another environment has our number
    if not _even(known, in_doubt):
        return False  # the API does not always report the last group
    if latest.empty:
        return known.last_group_id is not None
    ours = {known.last_group_id, in_doubt.group_id if in_doubt is not None else None}
    return latest.env_id == known.env_id and latest.group_id not in ours


def result_of_post(in_doubt: Entry, known: KnownApi, status: EnvStatus, latest: Latest, *, held: int) -> PostResult:
    """Whether the group in doubt arrived at the process that `known` describes. `held` as above."""
    if latest.group_id == in_doubt.group_id:
        return PostResult.ARRIVED
    if not _even(known, in_doubt):
        return PostResult.UNKNOWN
    if latest.empty or latest.env_id == known.env_id:
        return PostResult.ABSENT
    if status.current_step == known.step:  # nothing has left the queue since
        queued = status.self_queue_size * known.env.group_size
        if queued == held:
            return PostResult.ABSENT
        if queued == held + in_doubt.sequences:
            return PostResult.ARRIVED
    return PostResult.UNKNOWN


def taken_unseen(lost: Sequence[Entry], known: KnownApi, starting_step: int) -> int:
    """How many of the `lost` groups, oldest first, the trainer took after the last look at the API that died.

    A trainer that registers again at its own step reveals it by the difference; a trainer that registers at 0 does not.
    A difference that needs more groups than there were counts something else.
    """
    taken = (starting_step - known.step) * known.batch_size
    if not known.alone or taken <= 0 or taken > sum(entry.sequences for entry in lost):
        return 0
    count = 0
    while taken > 0:
        taken -= lost[count].sequences
        count += 1
    return count


def _even(known: KnownApi, in_doubt: Entry | None) -> bool:
    """Whether all groups have the registered size, so that the API holds none back and its unit does not change."""
    size = known.env.group_size
    return known.largest == size and not known.buffer and (in_doubt is None or in_doubt.sequences == size)
