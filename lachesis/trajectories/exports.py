"""Exports: the groups of a finished run, written in another format.

An export takes one group record, the object that `process` writes as a line of `groups.jsonl`, and yields the lines of
its format. A line names the rollouts that it holds, so that every rollout is either in a line or counted as left out.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial, update_wrapper
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

from backends.errors import ExitCode, LachesisError
from backends.plugins import Registry
from lachesis.trajectories.digests import copies_of
from lachesis.trajectories.frozen import thaw
from lachesis.trajectories.jsonl import JsonlWriter, NotReplaced, StrPath, read_lines, replacing

GroupRecord: TypeAlias = Mapping[str, Any]
RolloutRecord: TypeAlias = Mapping[str, Any]

BRANCHES_OMITTED = "branches_omitted"
"""The model sampled answers that are not in the line: those before a compaction or an edit."""
NOT_SAMPLED = "answers_not_sampled"
"""The line has answers that the model did not sample there, and a trainer of the format cannot tell."""


@dataclass(frozen=True, slots=True)
class ExportLine:
    """One line of the output."""

    content: Mapping[str, Any]
    """A JSON object."""
    rollout_ids: tuple[str, ...]
    """The rollouts whose data it holds."""
    warnings: tuple[str, ...] = ()
    """Kinds of changes that the format forced on the data. The totals count them."""

    def __post_init__(self) -> None:
        if not isinstance(self.content, dict | Mapping):
            raise TypeError(f"ExportLine: content is a JSON object, not {_shown(self.content)}")
        for name in ("rollout_ids", "warnings"):
            if not _is_texts(given := getattr(self, name)):
                hint = f"; write ({given!r},)" if isinstance(given, str) else ""
                raise TypeError(f"ExportLine: {name} is a tuple of texts, not {_shown(given)}{hint}")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A rollout that is in no line."""

    rollout_id: str
    reason: str
    """A few words that many rollouts share: the totals count by reason."""

    def __post_init__(self) -> None:
        if not _is_texts((self.rollout_id, self.reason)):
            raise TypeError(f"LeftOut: takes a rollout_id and a reason, not {_shown((self.rollout_id, self.reason))}")


Export: TypeAlias = Callable[[GroupRecord], Iterable[ExportLine | LeftOut]]

EXPORTS: Registry[Callable[..., Any]] = Registry(
    "export",
    "lachesis.exports",
    {
        "hermes": "lachesis.trajectories.builtin_exports:trajectory",
        "sharegpt-tools": "lachesis.trajectories.builtin_exports:dataset",
        "batch": "lachesis.trajectories.builtin_exports:Batch",
        "openai": "lachesis.trajectories.chat_exports:openai",
        "trl": "lachesis.trajectories.chat_exports:trl",
        "dpo": "lachesis.trajectories.chat_exports:Preferences",
        "parquet": "lachesis.trajectories.parquet:parquet",
        "samples": "lachesis.trajectories.builtin_exports:token_samples",
        "atif": "lachesis.trajectories.atif:atif",
        "inspect": "lachesis.trajectories.inspect_logs:InspectLog",
        "trajectory": "lachesis.trajectories.builtin_exports:trajectory",  # the earlier name of hermes
        "dataset": "lachesis.trajectories.builtin_exports:dataset",  # and of sharegpt-tools
    },
)
"""A plug-in is an `Export`, which may have further keyword arguments (its options), or a class whose instances are
exports and whose constructor takes the options. An instance receives the groups of a file in their order."""


class ExportError(LachesisError):
    """An export fails, its input is not a groups file, or its output cannot be written."""


class ExportOptionsError(ExportError):
    """An export cannot be called as the arguments say."""

    exit_code = ExitCode.SETTINGS


@dataclass(slots=True)
class ExportTotals:
    """Counts over a whole export."""

    groups: int = 0
    rollouts: int = 0
    lines: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> rollouts that are in no line."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Kind -> lines."""


def load_export(name: str, options: Mapping[str, Any] | None = None) -> Export:
    """The export `name`: a registered name, an entry point, or `package.module:attribute`.

    Raises:
        UnknownPlugin: there is none.
        ImportError: its module cannot be imported.
        ExportOptionsError: it does not take these options, or an option has a value of another type than its
            annotation or, without one, its default.
    """
    plugin = EXPORTS.load(name)
    given = checked_options(f"export {name!r}", plugin, options, 0 if isinstance(plugin, type) else 1)
    if not isinstance(plugin, type):
        return update_wrapper(partial(plugin, **given), plugin)  # its attributes say how it is called
    try:
        made: Export = plugin(**given)
    except LachesisError:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise ExportOptionsError(f"export {name!r} rejects its options: {error}") from None
    except Exception as error:
        raise EXPORTS.broken(name, error) from error
    if not callable(made):
        raise ExportOptionsError(f"export {name!r}: an object of {plugin.__name__} cannot be called with a group")
    return made


def checked_options(
    what: str, plugin: Callable[..., Any], options: Mapping[str, Any] | None, positional: int
) -> dict[str, Any]:
    """The options of a call of `plugin` as their types say: pydantic converts what it can, a text to a path.

    `what` is its name in errors; `positional` is how many arguments come before the options. Raises ExportOptionsError.
    """
    given = dict(options or {})
    signature = inspect.signature(plugin)
    try:
        signature.bind(*[{}] * positional, **given)
    except TypeError as error:
        shown = f" with the options {given}" if given else ""
        known = list(signature.parameters)[positional:]
        near = [match for option in given if option not in known for match in get_close_matches(str(option), known, 1)]
        hint = f"; did you mean {near[0]!r}?" if near else f"; its options are: {', '.join(known) or 'none'}"
        raise ExportOptionsError(f"{what} cannot be called{shown}: {error}{hint}") from None
    if not given:
        return given
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        hints = get_type_hints(plugin.__init__ if isinstance(plugin, type) else plugin)  # type: ignore[misc]
    except Exception:  # names that are imported for type checkers only, or an object without annotations
        hints = {}
    checked = dict(given)
    for option, value in given.items():
        if isinstance(value, float) and not isfinite(value):
            raise ExportOptionsError(f"{what}: option {option}: {value} is not a number")
        parameter = signature.parameters.get(option)
        if parameter is None:  # it is one of **kwargs
            continue
        default = type(parameter.default)
        expected = hints.get(option, default if default in _CHECKED_DEFAULTS else Any)
        try:
            checked[option] = TypeAdapter(expected).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]
            place = "".join(f"[{part!r}]" for part in problem["loc"] if isinstance(part, int))
            raise ExportOptionsError(
                f"{what}: option {option}{place}: {problem['msg']} (got {problem['input']!r})"
            ) from None
        except (PydanticUserError, TypeError):  # a type that pydantic does not know
            continue
    return checked


_CHECKED_DEFAULTS = (bool, int, float, str, list, tuple, dict)
"""Types of defaults that say what an option without an annotation takes."""


def read_groups(path: StrPath, *, again: bool = False) -> Iterator[dict[str, Any]]:
    """The group records of a file, without an incomplete last line, as a killed run leaves it.

    Raises JsonlError where a line is not JSON, ExportError where it is not a group, or has a rollout of an earlier one
    and `again` does not allow it. Memory grows by the id of each rollout.
    """
    known: dict[str, int] = {}
    for number, group in enumerate(read_lines(path, torn_tail=True, finite=True), 1):
        if not isinstance(group, dict) or not isinstance(group.get("rollouts"), list):
            raise ExportError(f"{path}: record {number} is not a group; name a groups.jsonl written by `process`")
        ids = [rollout.get("rollout_id") if isinstance(rollout, dict) else None for rollout in group["rollouts"]]
        if not all(isinstance(rollout_id, str) for rollout_id in ids):
            raise ExportError(f"{path}: record {number} is not a group: a rollout has no rollout_id")
        if twice := [rollout_id for rollout_id, times in Counter(ids).items() if times > 1]:
            raise ExportError(f"{path}: record {number} has more than one rollout {twice[0]!r}")
        if earlier := next((known[rollout_id] for rollout_id in ids if rollout_id in known), None):
            raise ExportError(
                f"{path}: record {number} has a rollout of record {earlier} again; remove one of the two lines"
            )
        if not again:
            known.update((str(rollout_id), number) for rollout_id in ids)
        yield group


def read_items(path: StrPath) -> Iterator[dict[str, Any]]:
    """The groups of a file; the samples of an item of `batch` and `evaluate`, which have a group for each, are one.

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
    """Whether the conversation was written anew, so that its messages lack answers that were acted upon."""
    return any(dropped.get("edit") for dropped in rollout.get("discarded") or ())


def is_complete(rollout: RolloutRecord, messages: Sequence[Mapping[str, Any]]) -> bool:
    """An agent program need not send the results of its last calls; anywhere else they are missing."""
    return bool(rollout["completed"]) and (
        "program" in rollout or not any(each.get("tool_calls") for each in messages[-1:])
    )


def rollout_samples(group: GroupRecord, rollout: RolloutRecord) -> list[dict[str, Any]]:
    """The token samples of one of the group's rollouts; none in Phase 1 and for a rollout without a reward.

    Each is a shallow copy: its keys may be changed, its lists of tokens are the record's own.
    """
    return [dict(sample) for sample in group["samples"] if sample["rollout_id"] == rollout["rollout_id"]]


def export_group(
    export: Export, group: GroupRecord, totals: ExportTotals, *, min_reward: float | None = None
) -> Iterator[ExportLine]:
    """The lines of one group; `totals` grows with them.

    With `min_reward`, a line has at least one rollout with this reward, as the better one of a pair.
    A rollout that the export neither writes nor leaves out is counted as left out.
    """
    missing = {rollout["rollout_id"]: "not mentioned by the export" for rollout in group["rollouts"]}
    known = frozenset(missing)
    good = {
        rollout["rollout_id"]
        for rollout in group["rollouts"]
        if min_reward is None or (rollout["reward"] is not None and rollout["reward"] >= min_reward)
    }
    totals.groups += 1
    totals.rollouts += len(known)
    given = export(group)
    if isinstance(given, str | Mapping | ExportLine | LeftOut) or not isinstance(given, Iterable):
        raise TypeError(f"an export yields ExportLine and LeftOut objects; it returns {_shown(given)}")
    for found in given:
        if not isinstance(found, ExportLine | LeftOut):
            raise TypeError(f"an export yields ExportLine and LeftOut objects; it yields {_shown(found)}")
        ids = found.rollout_ids if isinstance(found, ExportLine) else (found.rollout_id,)
        if not ids or not known.issuperset(ids):
            raise ValueError(f"a line must name rollouts of its group; it names {ids!r}")
        if isinstance(found, LeftOut):
            if found.rollout_id in missing:
                missing[found.rollout_id] = found.reason
            continue
        if good.isdisjoint(ids):
            missing.update((rollout_id, f"reward below {min_reward:g}") for rollout_id in ids if rollout_id in missing)
            continue
        for rollout_id in ids:
            missing.pop(rollout_id, None)
        totals.lines += 1
        totals.warnings.update(set(found.warnings))
        yield found
    totals.left_out.update(missing.values())


def write_export(
    export: Export, groups: Iterable[GroupRecord], path: StrPath, *, min_reward: float | None = None
) -> ExportTotals:
    """Write the lines of all groups to `path`, replacing what is there, or leave `path` as it is.

    `min_reward` is that of `export_group`.

    An export that is no JSON Lines has a method `open(path)`: its writer, a context manager with `write`, which
    may raise OSError or JsonlError.

    Raises:
        ExportError: the export fails on a group, or the file cannot be written.
        JsonlError: `groups` reads a file that cannot be read.
    """
    totals = ExportTotals()
    open_writer: Callable[[Path], AbstractContextManager[Any]] = getattr(export, "open", JsonlWriter)
    try:
        with replacing(path) as temporary, open_writer(temporary) as writer:
            for group in groups:
                try:
                    lines = list(export_group(export, group, totals, min_reward=min_reward))
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    raise ExportError(f"the export fails on {_named(group, totals)}: {reason}") from error
                for line in lines:
                    writer.write(line.content)
    except NotReplaced as error:
        where = f" ({_named(group, totals)})" if totals.groups else ""
        raise ExportError(f"{error}{where}") from error.__cause__
    return totals


def _is_texts(given: Any) -> bool:
    return isinstance(given, tuple | list | set | frozenset) and all(isinstance(text, str) for text in given)


def _shown(value: Any) -> str:
    text = repr(value)
    return "None" if value is None else f"a {type(value).__name__}: {text if len(text) <= 80 else text[:77] + '...'}"


def _named(group: GroupRecord, totals: ExportTotals) -> str:
    return f"group {totals.groups} of the file, item_key {group.get('item_key')!r}"
