"""`lachesis verify FILE...`: check that sample files hold exactly the sampled tokens, each once.

The files are JSON Lines of samples, or of groups that hold `samples`; a folder stands for its groups.jsonl or
samples.jsonl. Exit code 0 means that nothing is wrong, 1 that something is (also a line that is not JSON), 2 that there
is nothing to verify: a file is missing, or holds no samples. "old" in place of "ok" means that some lines come from an
older version, which wrote no digests of scores and messages.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from backends.errors import ExitCode, SettingsError
from backends.text import counted, escaped
from lachesis.cli.verb_parser import VerbParser
from lachesis.runs.prose import print_table
from lachesis.runs.run_folder import require_run
from lachesis_messages.records.jsonl import at_column
from lachesis_tokens.samples.verification import NO_SAMPLES, RecordVerifier, Totals

_STYLES = {"ok": "green", "old": "yellow", "none": "yellow", "WRONG": "red"}
_UNCERTIFIED = "their tokens are certified, and scores, messages and other fields are not"
ROWS = ("sampled", "delivered", "duplicated", "wrong_prefix", "undelivered", "unchecked", "lost")


def main(argv: Sequence[str] | None = None) -> int:
    """Print totals and the first problems; 1 where anything is wrong, otherwise 2 where there is nothing to verify."""
    parser = VerbParser(prog="lachesis verify", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON Lines of samples or of groups")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--problems", type=int, default=10, metavar="N", help="problems to show for each file (default: 10)"
    )
    arguments = parser.parse_args(argv)
    files = [_in_folder(path) if path.is_dir() else path for path in arguments.files]
    for path, file in zip(arguments.files, files, strict=True):
        require_run(path)
        if not file.exists():
            raise SettingsError(f"neither groups.jsonl nor samples.jsonl is in {path}; name the folder of a run")
    found = {str(path): verify_file(path, max_problems=max(0, arguments.problems)) for path in files}
    ok = all(totals.ok for totals in found.values())
    console = Console(emoji=False)
    if arguments.json:
        files = [{"path": path, "ok": totals.ok, **dataclasses.asdict(totals)} for path, totals in found.items()]
        console.out(json.dumps({"ok": ok, "files": files}), highlight=False)
    else:
        _show(console, found)
    return ExitCode(0 if ok else 2 if all(totals.ok or totals.empty for totals in found.values()) else 1)


def _in_folder(folder: Path) -> Path:
    """The file of groups that `process`, or else `eval`, wrote there."""
    evaluated = folder / "samples.jsonl"
    return evaluated if evaluated.exists() and not (folder / "groups.jsonl").exists() else folder / "groups.jsonl"


def verify_file(path: Path, *, max_problems: int = 20) -> Totals:
    """Totals of one file, read line by line. A line that is not JSON, or unreadable, is a problem and no exception."""
    verifier = RecordVerifier(max_problems=max_problems)
    number: int | None = None

    def no_json(constant: str) -> float:
        verifier.reject(f"holds {constant}, which is not JSON", number)
        return float(constant)

    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    record = _parse(line, no_json)
                except (ValueError, RecursionError) as error:
                    torn = "" if line.endswith(b"\n") else " (the last line has no newline: torn or half written)"
                    verifier.reject(f"not JSON: {at_column(error)}{torn}", number)
                    continue
                verifier.feed(record, number)
    except OSError as error:
        where = "" if number is None else f" after line {number}"
        verifier.reject(f"the file cannot be read{where}: {error.strerror or error}", number)
    return verifier.totals()


def _parse(line: bytes, constant: Callable[[str], float]) -> Any:
    """The value. `constant` gives those of NaN and infinities."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line, parse_constant=constant)  # slower, but accepts lone surrogates and NaN


def _show(console: Console, found: Mapping[str, Totals]) -> None:
    for path, totals in found.items():
        if totals.empty:
            _say(console, f"none  {path}: there is nothing to verify", style=_STYLES["none"])
            _say(console, f"{path}: {NO_SAMPLES if Path(path).stat().st_size else 'it is empty'}")
            continue
        status = "WRONG" if not totals.ok else "old" if totals.without_digest else "ok"
        of = f"{counted(totals.samples, 'sample')} of {counted(totals.rollouts, 'rollout')}"
        _say(console, f"{status:<6}{path}: {of}, {totals.rejected:,} rejected", style=_STYLES[status])
        if totals.without_digest:
            without = counted(totals.without_digest, "line")
            _say(console, f"{path}: {without} without a digest, as older versions wrote them: {_UNCERTIFIED}")
        if totals.sampled:
            print_table(console, _table(totals))
        for problem in totals.problems:
            line = "" if problem.line is None else f", line {problem.line}"
            rollout = f"rollout {problem.rollout_id}: " if problem.rollout_id else ""
            _say(console, f"{path}{line}: {rollout}{problem.reason}")
        hidden = totals.problem_count - len(totals.problems)
        if hidden:
            _say(console, f"{path}: {counted(hidden, 'problem')} more (--problems N shows more)")


def _table(totals: Totals) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "tokens", "share"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in ROWS:
        tokens = getattr(totals, row)
        table.add_row(row.replace("_", " "), f"{tokens:,}", f"{tokens / totals.sampled:.2%}")
    return table


def _say(console: Console, text: str, style: str | None = None) -> None:
    """One line of output. Not in a table: text that is folded at the edge of a cell cannot be copied."""
    console.print(escaped(text), style=style, markup=False, highlight=False, soft_wrap=True)
