"""`lachesis trajectories`: inspect, validate, convert and deduplicate trajectory files."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from backends.errors import ExitCode, LachesisError, refuse_empty
from backends.text import counted
from lachesis.cli.verb_parser import VerbParser, count
from lachesis.loop.outcome import in_words
from lachesis.runs.prose import print_table
from lachesis.runs.run_folder import refuse_files_of_runs, require_run
from lachesis_data.files.entry_files import EntryLine, OnBad, Rewritten, convert_entries, deduplicate, read_entries
from lachesis_data.files.file_statistics import SPREADS, FileStatistics
from lachesis_data.files.formats import CONVERTIBLE, converter, format_of, read_chat
from lachesis_data.files.validation import VALIDATORS, validate_entry
from lachesis_data.verbs.export import options_of, print_counts, printable
from lachesis_messages.errors import MessageError
from lachesis_messages.records.entries import COMPLETED_FILE
from lachesis_messages.records.export_lines import Unsuitable
from lachesis_messages.records.jsonl import JsonlError, has_torn_tail

_FROM_0 = partial(count, least=0)


class TrajectoryFilesError(LachesisError):
    """The arguments do not fit together."""

    exit_code = ExitCode.SETTINGS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code."""
    parser = VerbParser(prog="lachesis trajectories", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="SUBCOMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], help_text: str) -> argparse.ArgumentParser:
        verb: argparse.ArgumentParser = verbs.add_parser(name, help=help_text, description=help_text)
        verb.set_defaults(run=run)
        several: dict[str, Any] = {} if name == "show" else {"nargs": "+"}
        verb.add_argument("files", type=_file, metavar="FILE", help="JSON Lines or .parquet", **several)
        return verb

    stats = add("stats", _stats, "counts of turns, tools, reasoning and rewards")
    stats.add_argument("--json", action="store_true", help="print JSON")
    validate = add("validate", _validate, "check every entry by the rules of its format; 1 if one breaks them")
    validate.add_argument(
        "--format", default="", choices=sorted(VALIDATORS), help="the format of all entries (default: as each looks)"
    )
    validate.add_argument("--show", type=_FROM_0, default=20, metavar="N", help="problems to print (default: 20)")
    show = add("show", _show, "print an entry as a conversation")
    which = show.add_mutually_exclusive_group()
    which.add_argument("--line", type=int, default=1, help="its line, or row, from 1 (default: 1)")
    which.add_argument("--id", help="its rollout_id or prompt_index")
    show.add_argument("--width", type=_FROM_0, default=2000, help="characters of a turn; 0: all (default: 2000)")
    convert = add("convert", _convert, "write the conversations in another format")
    convert.add_argument("--to", required=True, metavar="NAME", help=f"one of {', '.join(CONVERTIBLE)}")
    convert.add_argument("--options", default="{}", metavar="YAML", help="options of the format: '{reasoning: think}'")
    convert.add_argument(
        "--skip-invalid", action="store_true", help="skip and count entries that cannot be read or converted"
    )
    dedup = add("dedup", _dedup, "keep the first of several equal conversations")
    dedup.add_argument(
        "--by",
        choices=("conversation", "prompt"),
        default="conversation",
        help="what must match: all turns without the ids of calls, or those before the first answer",
    )
    for verb in (convert, dedup):
        verb.add_argument(
            "-o",
            "--output",
            old=["--out"],
            dest="out",
            required=True,
            type=Path,
            metavar="FILE",
            help="an existing file is replaced",
        )
    arguments = parser.parse_args(argv)
    for path in [arguments.files] if arguments.run == _show else arguments.files:
        require_run(path)
        if arguments.run in (_stats, _show, _validate):
            refuse_empty(path)
    code: int = arguments.run(arguments)
    return code


def _stats(arguments: argparse.Namespace) -> int:
    found, unreadable = FileStatistics(), Counter[str]()
    problems = list[JsonlError]()
    with _lines(arguments.files, bad=_counted(unreadable, problems.append)) as lines:
        for line in lines:
            found.add(line.entry)
    if not found.to_json()["entries"]:
        first = f"{problems[0]}; and " if problems else ""
        names = ", ".join(map(str, arguments.files))
        raise TrajectoryFilesError(f"{first}no line of {names} is a trajectory; name a file of them, or a run's folder")
    for problem in problems:
        _note(problem)
    figures = {**found.to_json(), "unreadable_lines": unreadable.total()}
    if arguments.json:
        print(json.dumps(figures))
    else:
        _print_figures(figures)
    return ExitCode.DONE


def _print_figures(figures: Mapping[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in figures.items():
        if value and name in SPREADS:
            numbers = {key: f"{each:.4g}" if abs(each) < 1000 else f"{each:,.0f}" for key, each in value.items()}
            text = "mean {mean}, median {p50}, 90th percentile {p90}, maximum {max}".format(**numbers)
        elif isinstance(value, dict):
            called = in_words if name.startswith("outcome") else str
            shown = [f"{printable(called(key))} {times:,}" for key, times in list(value.items())[:12]]
            text = ", ".join(shown + [f"{len(value) - 12} more"] * (len(value) > 12))
        else:
            text = "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
        if text:
            # A turn of a run is one of the model's; here each message is one.
            table.add_row(name.replace("_", " ").replace("turns", "messages", name.startswith("turns")), text)
    print_table(Console(emoji=False, soft_wrap=True, markup=False, highlight=False), table)


def _validate(arguments: argparse.Namespace) -> int:
    wrong = shown = 0
    valid: Counter[str] = Counter()

    def report(path: Path, line: int | None, problems: Sequence[str]) -> None:
        nonlocal shown, wrong
        wrong += 1
        for problem in problems[: max(0, arguments.show - shown)]:
            print(printable(f"{path}, line {line}: {problem}"))
        shown += len(problems)

    def bad(error: JsonlError) -> None:
        report(error.path, error.line, [error.reason])

    with _lines(arguments.files, bad=bad, torn_tail=False) as lines:
        for line in lines:
            if problems := validate_entry(line.entry, arguments.format):
                report(line.path, line.number, problems)
            else:
                valid[arguments.format or format_of(line.entry)] += 1
    if shown > arguments.show:
        print(f"... {counted(shown - arguments.show, 'problem')} more; --show N prints more")
    named = ", ".join(f"{times} {name}" for name, times in valid.most_common())
    found = f"{wrong + valid.total()} entries: {wrong} break the rules of their format"
    print(f"{found}; valid: {named}" if named else found)
    return int(bool(wrong) or not valid)


def _file(text: str) -> Path:
    """Of the folder of a run, its completed trajectories."""
    path = Path(text)
    return path / COMPLETED_FILE if (path / COMPLETED_FILE).is_file() else path


def _show(arguments: argparse.Namespace) -> int:
    def bad(error: JsonlError) -> None:
        if arguments.id is None and error.line == arguments.line:
            raise error

    with _lines([arguments.files], bad=bad) as lines:
        for line in lines:
            ids = (line.entry.get("rollout_id"), line.entry.get("prompt_index"))
            wanted = line.number == arguments.line if arguments.id is None else arguments.id in map(str, ids)
            if wanted:
                more = next(lines, None) is not None
                break
        else:
            what = f"line {arguments.line}" if arguments.id is None else f"id {arguments.id!r}"
            raise TrajectoryFilesError(f"{arguments.files}: no entry has {what}")
    console = Console(emoji=False, soft_wrap=True, markup=False, highlight=False)
    try:
        chat = read_chat(line.entry)
    except (Unsuitable, MessageError) as error:
        raise TrajectoryFilesError(f"{line.path}, line {line.number}: {error}") from None
    tools = ", ".join(str(tool.get("function", {}).get("name")) for tool in chat.tools)
    for name, value in {**chat.facts, "tools": tools}.items():
        console.print(printable(f"{name}: {in_words(str(value)) if name == 'outcome' else value}"), style="dim")
    for message in chat.messages:
        console.rule(message["role"], align="left")
        parts = [f"[reasoning] {message['reasoning']}"] if message.get("reasoning") else []
        content = message.get("content")
        parts += [content if isinstance(content, str) else json.dumps(content)] if content else []
        for call in message.get("tool_calls") or ():
            parts.append(f"[call] {call['function']['name']} {call['function']['arguments']}")
        text = printable("\n".join(parts))
        cut = len(text) - arguments.width if arguments.width else 0
        console.print(text if cut <= 0 else f"{text[: arguments.width]}\n... {cut} more characters (--width 0: all)")
    if more:
        print(f"line {line.number} of {line.path}; --line {line.number + 1} shows the next one", file=sys.stderr)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    to = converter(arguments.to, options_of(arguments.options))
    return _rewrite(arguments, lambda lines: convert_entries(lines, arguments.out, to, skip=arguments.skip_invalid))


def _dedup(arguments: argparse.Namespace) -> int:
    return _rewrite(arguments, lambda lines: deduplicate(lines, arguments.out, by=arguments.by))


def _rewrite(arguments: argparse.Namespace, write: Callable[[Iterator[EntryLine]], Rewritten]) -> int:
    for path in arguments.files:
        if path.exists() and arguments.out.exists() and path.samefile(arguments.out):
            raise TrajectoryFilesError(f"-o {arguments.out}: is one of the files that are read; choose another")
    refuse_files_of_runs(arguments.out)
    unreadable: Counter[str] = Counter()
    skip = getattr(arguments, "skip_invalid", False)
    with _lines(arguments.files, bad=_counted(unreadable) if skip else None) as lines:
        totals = write(lines)
    print(f"{totals.written} of {totals.read + unreadable.total()} entries: {arguments.out}")
    print_counts("left out", totals.left_out + unreadable)
    print_counts("changed", totals.warnings)
    if totals.not_compared:
        print(f"  kept: {totals.not_compared}, without their images, in which they may differ")
    return int(not totals.written and any(path.stat().st_size for path in arguments.files))


def _note(problem: JsonlError) -> None:
    print(printable(f"note: {problem}"), file=sys.stderr)


def _counted(unreadable: Counter[str], tell: Callable[[JsonlError], None] = _note) -> OnBad:
    """Counts unreadable lines, and tells of the first of them."""

    def bad(error: JsonlError) -> None:
        unreadable["not JSON"] += 1
        if unreadable.total() <= 5:
            tell(error)

    return bad


@contextmanager
def _lines(paths: Sequence[Path], *, bad: OnBad | None, torn_tail: bool = True) -> Iterator[Iterator[EntryLine]]:
    """The entries of the files, with a bar on a terminal. With `torn_tail`, an incomplete last line is a note."""
    for path in paths if torn_tail else ():
        if path.suffix != ".parquet" and has_torn_tail(path):
            print(f"note: {path}: its last line is incomplete and was skipped", file=sys.stderr)
    console = Console(emoji=False, stderr=True)
    if not console.is_terminal:
        yield read_entries(paths, bad=bad, torn_tail=torn_tail)
        return
    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = sum(path.stat().st_size for path in paths if path.is_file())
        task = progress.add_task("reading", total=total)
        read = 0

        def advance(size: int) -> None:
            nonlocal read
            read += size
            if read >= 1 << 18:
                progress.advance(task, read)
                read = 0

        yield read_entries(paths, bad=bad, torn_tail=torn_tail, on_read=advance)
