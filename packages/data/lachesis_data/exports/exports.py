"""Exports: the groups of a finished run, written in another format.

An export takes one group record, the object that `process` writes as a line of `groups.jsonl`, and yields the lines of
its format. A line names the rollouts that it holds, so that every rollout is either in a line or counted as left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from difflib import get_close_matches
from functools import partial, update_wrapper
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

from backends.errors import ExitCode, LachesisError
from backends.plugins import Registry
from lachesis_messages.records.digests import copies_of
from lachesis_messages.records.export_lines import ExportLine, ExportTotals, LeftOutRollout, _shown
from lachesis_messages.records.groups import ExportError, GroupRecord
from lachesis_messages.records.jsonl import JsonlWriter, NotReplaced, StrPath, replacing

Export: TypeAlias = Callable[[GroupRecord], Iterable[ExportLine | LeftOutRollout]]

EXPORTS: Registry[Callable[..., Any]] = Registry(
    "export",
    "lachesis.exports",
    {
        "hermes": "lachesis_messages.records.export_lines:trajectory",
        "sharegpt-tools": "lachesis_data.exports.builtin_exports:dataset",
        "batch": "lachesis_data.exports.builtin_exports:BatchExport",
        "openai": "lachesis_data.exports.chat_exports:openai",
        "trl": "lachesis_data.exports.chat_exports:trl",
        "dpo": "lachesis_data.exports.chat_exports:Preferences",
        "parquet": "lachesis_data.exports.parquet:parquet",
        "samples": "lachesis_data.exports.builtin_exports:token_samples",
        "atif": "lachesis_data.exports.atif:atif",
        "inspect": "lachesis_data.exports.inspect_logs:InspectLog",
        "trajectory": "lachesis_messages.records.export_lines:trajectory",  # the earlier name of hermes
        "dataset": "lachesis_data.exports.builtin_exports:dataset",  # and of sharegpt-tools
    },
)
"""A plug-in is an `Export`, which may have further keyword arguments (its options), or a class whose instances are
exports and whose constructor takes the options. An instance receives the groups of a file in their order."""


class ExportOptionsError(ExportError):
    """An export cannot be called as the arguments say."""

    exit_code = ExitCode.SETTINGS


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
    if len(good) < len(known) and any("tree" in rollout for rollout in group["rollouts"]):
        from lachesis_tokens.samples.handing_over import without_rollouts  # few groups have trees

        group = copies_of(group)({**group, "samples": without_rollouts(group, known - good)})
    given = export(group)
    if isinstance(given, str | Mapping | ExportLine | LeftOutRollout) or not isinstance(given, Iterable):
        raise TypeError(f"an export yields ExportLine and LeftOutRollout objects; it returns {_shown(given)}")
    for found in given:
        if not isinstance(found, ExportLine | LeftOutRollout):
            raise TypeError(f"an export yields ExportLine and LeftOutRollout objects; it yields {_shown(found)}")
        ids = found.rollout_ids if isinstance(found, ExportLine) else (found.rollout_id,)
        if not ids or not known.issuperset(ids):
            raise ValueError(f"a line must name rollouts of its group; it names {ids!r}")
        if isinstance(found, LeftOutRollout):
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
    """Write the lines of all groups to `path`, replacing an existing file, or leave `path` unchanged.

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


def _named(group: GroupRecord, totals: ExportTotals) -> str:
    return f"group {totals.groups} of the file, item_key {group.get('item_key')!r}"
