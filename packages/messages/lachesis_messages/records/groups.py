"""Groups files: the records that runs write, read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from backends.errors import ExitCode, LachesisError
from lachesis_messages.frozen import thaw
from lachesis_messages.records.digests import copies_of
from lachesis_messages.records.jsonl import StrPath, read_lines

GroupRecord: TypeAlias = Mapping[str, Any]


RolloutRecord: TypeAlias = Mapping[str, Any]


def read_groups(path: StrPath, *, again: bool = False) -> Iterator[dict[str, Any]]:
    """The group records of a file, without an incomplete last line, as a killed run leaves it.

    Raises JsonlError where a line is not JSON, NotGroups where it is not a group, or has a rollout of an earlier one
    and `again` does not allow it. Memory grows by the id of each rollout.
    """
    known: dict[str, int] = {}
    for number, group in enumerate(read_lines(path, torn_tail=True, finite=True), 1):
        if not isinstance(group, dict) or not isinstance(group.get("rollouts"), list):
            raise NotGroups(f"{path}: record {number} is not a group; name a groups.jsonl written by `process`")
        ids = [rollout.get("rollout_id") if isinstance(rollout, dict) else None for rollout in group["rollouts"]]
        if not all(isinstance(rollout_id, str) for rollout_id in ids):
            raise NotGroups(f"{path}: record {number} is not a group: a rollout has no rollout_id")
        if twice := [rollout_id for rollout_id, times in Counter(ids).items() if times > 1]:
            raise NotGroups(f"{path}: record {number} has more than one rollout {twice[0]!r}")
        if earlier := next((known[rollout_id] for rollout_id in ids if rollout_id in known), None):
            raise NotGroups(
                f"{path}: record {number} has a rollout of record {earlier} again; remove one of the two lines"
            )
        if not again:
            known.update((str(rollout_id), number) for rollout_id in ids)
        yield group


def read_items(path: StrPath) -> Iterator[dict[str, Any]]:
    """The groups of a file; the samples of an item of `batch` and `eval`, which have a group for each, are one.

    Reads the file twice. Memory grows with the number of items, and holds those with samples that are still to come.
    """
    missing = Counter(map(_item_of, read_groups(path)))
    waiting: dict[Any, list[dict[str, Any]]] = {}
    for group in islice(read_groups(path), missing.total()):
        item = _item_of(group)
        if item is None:
            yield group
            continue
        waiting.setdefault(item, []).append(group)
        missing[item] -= 1
        if not missing[item]:
            yield _joined(waiting.pop(item))


def _item_of(group: GroupRecord) -> tuple[str, str] | None:
    """Run and item of a group with one of several samples, `KEY+1`, `KEY+2`; None for a group of `process`."""
    of_sample = "prompt_index" in group or group.get("evaluation")
    return (str(group.get("run")), group["item_key"].partition("+")[0]) if of_sample else None


def _joined(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rollouts: list[dict[str, Any]] = []
    scored = 0
    for group in groups:
        for rollout in group["rollouts"]:
            place = None if rollout["place"] is None else rollout["place"] + scored
            rollouts.append({**rollout, "place": place})
        scored += len(group["scores"])
    lists = {name: [each for group in groups for each in group[name]] for name in ("scores", "messages", "samples")}
    return copies_of(*groups)({**groups[0], **lists, "rollouts": rollouts})


def rollout_messages(group: GroupRecord, rollout: RolloutRecord) -> list[dict[str, Any]]:
    """The messages of one of the group's rollouts, as copies that may be edited, to any depth.

    Empty where the rollout failed before its first turn.
    """
    return [thaw(message) for message in stored_messages(group, rollout)]


def stored_messages(group: GroupRecord, rollout: RolloutRecord) -> list[dict[str, Any]]:
    """The record's own messages of a rollout, for code that only reads them."""
    place = rollout["place"]
    messages: list[dict[str, Any]] = rollout["messages"] if place is None else group["messages"][place]
    return messages


def message_turns(rollout: RolloutRecord, messages: Sequence[Any]) -> Sequence[int | None] | None:
    """For each message the number of its completion, or None; None for all where an older version wrote the record."""
    turns: Sequence[int | None] | None = rollout.get("message_turns")
    return turns if turns is not None and len(turns) == len(messages) else None


def not_sampled(rollout: RolloutRecord, messages: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Places of the assistant messages that the model did not sample there, as far as the record says."""
    turns = message_turns(rollout, messages)
    return frozenset(
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and turns and turns[place] is None
    )


def has_other_branches(rollout: RolloutRecord) -> bool:
    """Whether the conversation was rewritten, so that its messages lack answers that had consequences."""
    return any(dropped.get("edit") for dropped in rollout.get("discarded") or ())


def is_complete(rollout: RolloutRecord, messages: Sequence[Mapping[str, Any]]) -> bool:
    """An agent program need not send the results of its last calls; anywhere else they are missing."""
    return bool(rollout["completed"]) and (
        "program" in rollout or not any(each.get("tool_calls") for each in messages[-1:])
    )


def rollout_samples(group: GroupRecord, rollout: RolloutRecord) -> list[dict[str, Any]]:
    """The token samples of one of the group's rollouts; none in Phase 1 and for a rollout without a reward.

    Each is a shallow copy, with the data of all its images: its keys may be changed, its lists of tokens are the
    record's own.
    """
    from lachesis_messages.images import with_image_data

    return [each for each in with_image_data(group["samples"]) if each["rollout_id"] == rollout["rollout_id"]]


class ExportError(LachesisError):
    """An export fails, its input is not a groups file, or its output cannot be written."""


class NotGroups(ExportError):
    """A file is not one of groups: another file is the remedy."""

    exit_code = ExitCode.SETTINGS
