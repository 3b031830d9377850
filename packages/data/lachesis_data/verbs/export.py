"""`lachesis export RUN --format NAME -o FILE`: write the groups of a finished run in another format."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from backends.errors import LachesisError
from backends.plugins import Registry, UnknownPlugin
from backends.text import counted
from lachesis.authors import place
from lachesis.cli import command
from lachesis.cli.verb_parser import VerbParser
from lachesis.runs.run_folder import refuse_files_of_runs, require_run, settings_of
from lachesis.tracebacks import explained
from lachesis_data.exports.exports import (
    EXPORTS,
    Export,
    ExportOptionsError,
    load_export,
    write_export,
)
from lachesis_messages.records.export_lines import ExportTotals
from lachesis_messages.records.groups import ExportError, GroupRecord, read_groups, read_items
from lachesis_messages.records.jsonl import has_torn_tail
from lachesis_tools import BUILTIN_TOOLS

JOB = "harbor"
FOLDERS: Registry[Callable[..., ExportTotals]] = Registry(
    "export", "lachesis.folder_exports", {}, package="lachesis-envs"
)
"""`harbor` is in the package lachesis-envs."""
"""The format that is a folder: the trajectories as `atif` writes them, with all that Harbor's viewer shows."""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print what it contains and what it leaves out; returns the exit code."""
    if "--run-dir" in (argv := sys.argv[1:] if argv is None else argv):
        return command("export weights")(argv)
    parser = VerbParser(
        prog="lachesis export",
        description=__doc__,
        epilog="With --run-dir it writes the trained model of a training run: `lachesis export --run-dir DIR --help`.",
    )
    parser.add_argument(
        "groups", type=Path, metavar="RUN", help="a groups file of `process`, `eval` or `batch`, or its folder"
    )
    names = ", ".join([*EXPORTS.names(), JOB])
    parser.add_argument(
        "--format", required=True, metavar="NAME", help=f"one of {names}, or your own export as package.module:name"
    )
    parser.add_argument(
        "-o",
        "--output",
        old=["--out"],
        dest="out",
        required=True,
        type=Path,
        metavar="FILE",
        help="JSON Lines, Parquet for parquet, NAME.eval for inspect; an existing file is replaced. "
        f"With {JOB} a new folder, jobs/NAME",
    )
    parser.add_argument(
        "--options", default="{}", metavar="YAML", help="options of the export: '{min_reward: 1.0}' (default: none)"
    )
    parser.add_argument(
        "--min-reward", type=float, metavar="X", help="leave out lines without a rollout of at least this reward"
    )
    arguments = parser.parse_args(argv)
    try:
        options = options_of(arguments.options)
        arguments.groups = _groups_file(arguments.groups)
        if arguments.out.exists() and arguments.groups.exists() and arguments.out.samefile(arguments.groups):
            raise ExportOptionsError(f"-o {arguments.out}: is the groups file itself; choose another file")
        refuse_files_of_runs(arguments.out)
        read: Callable[[Path], Iterator[GroupRecord]] = read_groups
        if arguments.min_reward is not None and not isfinite(arguments.min_reward):
            raise ExportOptionsError(f"--min-reward {arguments.min_reward}: is not a number")
        if arguments.format == JOB:
            if arguments.min_reward is not None:
                raise ExportOptionsError(f"--min-reward: {JOB} is a folder with every rollout; choose another --format")
            write = _job_writer(arguments.groups, options)
        else:
            export = _load(arguments.format, options)
            write = partial(write_export, export, min_reward=arguments.min_reward)
            read = read_items if getattr(export, "of_items", False) else read_groups
            read = _with_failures if getattr(export, "with_failures", False) else read
            _check_ending(arguments.out, getattr(export, "ending", ""))
            if hasattr(export, "all_tools"):
                export.all_tools = tuple(BUILTIN_TOOLS)
            if hasattr(export, "settings"):
                export.settings = settings_of(arguments.groups)
        if arguments.groups.name.endswith(".failed.jsonl"):
            read = _last_of_each
        require_run(arguments.groups)
        if has_torn_tail(arguments.groups):
            print(f"note: {arguments.groups}: its last line is incomplete and was skipped", file=sys.stderr)
        totals = write(read(arguments.groups), arguments.out)
    except (LachesisError, ImportError) as error:
        cause = error.__cause__ if isinstance(error, ExportError) else None
        if cause is not None and place(cause):  # the author of an export wants to see the line
            print(explained(cause), end="", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, LachesisError) else 1
    source = f"{counted(totals.rollouts, 'rollout')} of {counted(totals.groups, 'group')}"
    print(f"{counted(totals.lines, 'line')} from {source}: {arguments.out}")
    print_counts("left out", totals.left_out, "rollout")
    print_counts("changed", totals.warnings, "line")
    return int(not totals.lines)


def _groups_file(run: Path) -> Path:
    """The groups file of a folder, as named by the manifest next to it."""
    if not run.is_dir():
        return run
    named = {path: path.with_name(path.name.removesuffix(".run.json") + ".jsonl") for path in run.glob("*.run.json")}
    found = sorted(groups for groups in named.values() if groups.is_file())
    if len(found) != 1:
        which = f"has several: {', '.join(path.name for path in found)}" if found else "has none"
        raise ExportOptionsError(f"{run}: a folder must contain one groups file, and this one {which}; name the file")
    return found[0]


def _with_failures(groups: Path) -> Iterator[dict[str, Any]]:
    """The groups of a run, and those that no start has scored: of each, what its last start made of it."""
    done = set()
    for group in read_groups(groups):
        done.add(group["item_key"])
        yield group
    if (failed := groups.with_suffix(".failed.jsonl")).is_file():
        yield from (group for group in _last_of_each(failed) if group["item_key"] not in done)


def _last_of_each(failed: Path) -> Iterator[dict[str, Any]]:
    """Of each item in a file of groups without a score: what its last start made of it."""
    last = {group["item_key"]: at for at, group in enumerate(read_groups(failed, again=True))}
    yield from (group for at, group in enumerate(read_groups(failed, again=True)) if last[group["item_key"]] == at)


def _check_ending(out: Path, ending: str) -> None:
    if not out.name.endswith(ending):
        name = out.parent / f"{out.stem or 'NAME'}{ending}"
        raise ExportOptionsError(f"-o {out}: readers of this format find only files NAME{ending}; write -o {name}")


def _job_writer(groups: Path, options: dict[str, Any]) -> Callable[[Iterable[GroupRecord], Path], ExportTotals]:
    """What writes a folder for Harbor's viewer."""
    write_job = FOLDERS.load(JOB)
    trajectories = load_export("atif", options)
    return partial(write_job, data=groups.parent, settings=settings_of(groups), trajectories=trajectories)


def _load(name: str, options: dict[str, Any]) -> Export:
    try:
        return load_export(name, options)
    except UnknownPlugin as error:
        if name.isidentifier() and find_spec(name) is not None:
            raise UnknownPlugin(f"{error}. There is a module {name}: did you mean {name}:NAME?") from None
        raise UnknownPlugin(f"{error}; {JOB!r} writes a folder for Harbor's viewer") from None


def options_of(text: str) -> dict[str, Any]:
    """The value of `--options`. Raises ExportOptionsError."""
    try:
        options = yaml.safe_load(text) or {}
    except yaml.YAMLError:
        options = None
    if not isinstance(options, dict):
        raise ExportOptionsError(f"--options takes a YAML mapping such as '{{min_reward: 1.0}}', not {text!r}")
    return options


def print_counts(title: str, counts: Counter[str], unit: str = "") -> None:
    for name, count in counts.most_common():
        print(f"  {title}: {counted(count, unit) if unit else count}, {printable(name)}")


def printable(text: str) -> str:
    """Text without characters that control a terminal or turn it around."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
