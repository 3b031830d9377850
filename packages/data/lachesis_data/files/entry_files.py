"""Files of trajectories, entry by entry: reading, conversion, duplicates. Memory does not grow with a file.

An output is complete or is not written (`jsonl.replacing`).
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self, TypeAlias

from lachesis_data.exports.parquet import ParquetWriter, raw_rows
from lachesis_data.files.foreign import NULLS_REMOVED, unpadded
from lachesis_data.files.formats import Converter
from lachesis_messages.errors import MessageError
from lachesis_messages.markup import READ_UNIQUE
from lachesis_messages.records.export_lines import Unsuitable, reason_of
from lachesis_messages.records.json_arrays import array_items
from lachesis_messages.records.jsonl import (
    JsonlError,
    StrPath,
    WrongContent,
    is_array,
    json_text,
    replacing,
    unreadable,
)
from lachesis_messages.records.sharegpt import PARTS_OMITTED

Same: TypeAlias = Literal["conversation", "prompt"]

_ANSWERS = ("gpt", "assistant")
_CALL_ID = re.compile(r'(<tool_response>\s*\{)"tool_call_id": ?"[^"]*", ?')
_OMITTED = re.compile(rb"\[(?:image_url|input_image|input_audio|audio_url|video_url|input_file)\]")
"""What stands in a text for a part that is none: formats without `parts_omitted` have only this."""
_GZIP = b"\x1f\x8b"


class EntryLine(NamedTuple):
    """An entry, its place, and its text; a row of a Parquet file and an item of an array have none."""

    path: Path
    number: int
    entry: Any
    raw: bytes
    changes: tuple[str, ...] = ()
    """Kinds of changes that reading made: see `unpadded`."""


@dataclass(slots=True)
class Rewritten:
    """The counts of entries of some files, by result."""

    read: int = 0
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> entries."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Kind of change -> entries."""
    not_compared: int = 0
    """Entries that may differ in images which they lack."""


OnRead: TypeAlias = Callable[[int], object]
"""Called with the number of bytes that were read since the last call."""
OnBad: TypeAlias = Callable[[JsonlError], object]
"""Called with the problem of a line, which is then left out."""


def read_entries(
    paths: Iterable[StrPath], *, bad: OnBad | None = None, torn_tail: bool = False, on_read: OnRead | None = None
) -> Iterator[EntryLine]:
    """The entries of JSON Lines and Parquet files and of JSON arrays, one at a time; blank lines are skipped.

    Rows that were in a columnar file are read by `unpadded`.

    Raises JsonlError, which names file and line, for a line that is not a JSON object with each of its keys once, or
    calls `bad` with it. With `torn_tail`, an incomplete last line ends its file. A file that cannot be read is always
    an error.
    """
    for path in map(Path, paths):
        if path.suffix == ".parquet":
            for number, row in enumerate(raw_rows(path), 1):
                yield _line(path, number, row)
            if on_read is not None:
                on_read(path.stat().st_size)
            continue
        try:
            with path.open("rb") as file:
                if is_array(file):
                    yield from _items(path, file, bad)
                    if on_read is not None:
                        on_read(path.stat().st_size)
                    continue
                for number, raw in enumerate(file, 1):
                    if on_read is not None:
                        on_read(len(raw))
                    if not raw.strip():
                        continue
                    if number == 1 and raw.startswith(_GZIP):
                        raise WrongContent(path, "is compressed; decompress it with gunzip")
                    try:
                        entry = READ_UNIQUE(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
                        if not isinstance(entry, dict):
                            raise ValueError(f"{type(entry).__name__}, not an object")
                    except (ValueError, RecursionError) as error:
                        if torn_tail and not raw.endswith(b"\n"):
                            break
                        problem = JsonlError(path, f"not an entry: {error}", line=number)
                        if bad is None:
                            raise problem from error
                        bad(problem)
                        continue
                    yield _line(path, number, entry, raw)
        except OSError as error:
            raise unreadable(path, error) from error


def _items(path: Path, file: IO[bytes], bad: OnBad | None) -> Iterator[EntryLine]:
    """The entries of an array. What cannot be read ends it."""
    try:
        for number, entry in array_items(path, file):
            if isinstance(entry, dict):
                yield _line(path, number, entry)
            else:
                problem = JsonlError(path, f"not an entry: {type(entry).__name__}, not an object", line=number)
                if bad is None:
                    raise problem
                bad(problem)
    except JsonlError as error:
        if bad is None:
            raise
        bad(error)


def _line(path: Path, number: int, entry: Any, raw: bytes = b"") -> EntryLine:
    plain, removed = unpadded(entry)
    return EntryLine(path, number, plain, raw, (NULLS_REMOVED,) if removed else ())


def convert_entries(lines: Iterable[EntryLine], out: StrPath, converter: Converter, *, skip: bool = False) -> Rewritten:
    """Write each conversation in the format of the converter.

    Raises:
        JsonlError: a line cannot be read, or the output cannot be written. An entry that the format cannot hold is one
            too, which names file and line, unless `skip` leaves it out.
    """
    totals = Rewritten()
    open_writer = ParquetWriter if converter.to == "parquet" else _LineFile
    with replacing(out) as temporary, open_writer(temporary) as writer:
        for line in lines:
            totals.read += 1
            warnings = set(line.changes)
            try:
                content = converter.convert(line.entry, warnings)
            except (Unsuitable, MessageError) as error:
                if not skip:
                    raise JsonlError(line.path, str(error), line=line.number) from error
                totals.left_out[reason_of(error)] += 1
                continue
            writer.write(content)
            totals.written += 1
            totals.warnings.update(warnings)
    return totals


def deduplicate(lines: Iterable[EntryLine], out: StrPath, *, by: Same = "conversation") -> Rewritten:
    """Write each entry whose conversation, or prompt, no entry before it has. Lines are copied as they are.

    An entry that lacks images, or other parts that are no text, is no duplicate: it may differ from another in these.
    What was seen is in a temporary database on the disk (SQLite's, in $SQLITE_TMPDIR or /var/tmp).
    Raises JsonlError.
    """
    totals = Rewritten()
    seen = sqlite3.connect("", isolation_level=None)
    try:
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "temp_store=FILE", "cache_size=-32000"):
            seen.execute(f"PRAGMA {pragma}")
        seen.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        seen.execute("BEGIN")
        with replacing(out) as temporary, _LineFile(temporary) as writer:
            for line in lines:
                totals.read += 1
                lacks_parts = _lacks_parts(line)
                totals.not_compared += lacks_parts
                try:
                    key = digest(line.entry, by)
                    added = lacks_parts or seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount
                except Unsuitable as error:
                    raise JsonlError(line.path, str(error), line=line.number) from error
                except sqlite3.Error as error:
                    raise JsonlError(out, f"the database of what was seen cannot be written ({error})") from error
                if added:
                    writer.copy(line)
                    totals.written += 1
                else:
                    totals.left_out[f"the same {by} as an earlier entry"] += 1
    finally:
        seen.close()
    return totals


def _lacks_parts(line: EntryLine) -> bool:
    return bool(line.entry.get(PARTS_OMITTED)) or _OMITTED.search(line.raw or json_text(line.entry)) is not None


def digest(entry: Mapping[str, Any], by: Same) -> bytes:
    """16 bytes of the tools and the conversation of an entry without the ids of calls, which differ where nothing else
    does; or of the tools and the prompt: what is before the first answer. Examples (`weight` 0), and an answer with
    which the entry begins, are part of the prompt. Raises Unsuitable."""
    lists = (entry[key] for key in ("conversations", "messages", "prompt") if isinstance(entry.get(key), list))
    turns = next(lists, None)
    if turns is None:
        raise Unsuitable("it has no conversation")
    column = turns is entry.get("prompt")
    for key in ("completion", "chosen", "rejected") if column and not (by == "prompt" and turns) else ():
        if isinstance(entry.get(key), list):
            # The places of two answers to a prompt count; a prompt and its completion are one conversation.
            turns = [*turns, *([] if key == "completion" else [{"role": key}]), *entry[key]]
    if not all(isinstance(turn, dict) for turn in turns):
        raise Unsuitable("it has no conversation")
    hashed = blake2b(digest_size=16)
    if tools := entry.get("tools"):
        hashed.update(json.dumps(tools, sort_keys=True).encode())
    for number, turn in enumerate(turns):
        role, value = turn.get("from", turn.get("role")), turn.get("value")
        if by == "prompt" and number and not column and role in _ANSWERS and turn.get("weight") != 0:
            break
        if not isinstance(value, str):
            value = json.dumps(_without_ids(turn), ensure_ascii=False, sort_keys=True)
        elif role == "tool":
            value = _CALL_ID.sub(r"\1", value)
        for part in (str(role), value):
            data = part.encode("utf-8", "surrogatepass")
            hashed.update(len(data).to_bytes(8, "big") + data)
    return hashed.digest()


def _without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in ("tool_call_id", "role")}
    if isinstance(calls := kept.get("tool_calls"), list):
        kept["tool_calls"] = [{**call, "id": None} if isinstance(call, dict) else call for call in calls]
    return kept


class _LineFile:
    """A JSON Lines file that nobody else writes or reads yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=1 << 20)

    def write(self, obj: Any) -> None:
        try:
            self._file.write(json_text(obj) + b"\n")
        except (TypeError, ValueError, RecursionError) as error:
            raise JsonlError(self._path, f"the entry cannot become JSON: {error}") from error

    def copy(self, line: EntryLine) -> None:
        """Write the line as it is."""
        if line.raw:
            self._file.write(line.raw.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n") + b"\n")
        else:
            self.write(line.entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()
