"""Notes and tags that people give to rollouts, in a file beside the run: the only file of a run that the viewer writes.

Each line has all that is said of one rollout, and the last one counts. A star is the tag `starred`.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backends.errors import LachesisError
from lachesis_messages.records.jsonl import JsonlWriter
from lachesis_messages.records.step_files import ROLLOUTS
from lachesis_view.rows import MISSHAPEN, as_count, as_name, parsed, storable

NAME = "notes.ndjson"
"""Beside `groups.jsonl`. What takes every `.jsonl` of a folder does not take it."""
SCHEMA = "lachesis.note/1"
STARRED = "starred"
MOST_TAGS, LONGEST = 20, 4000
"""Tags of a rollout, and characters of a note."""
LARGE = 16 << 20
_TAG = re.compile(r"[\w.+-]{1,40}")


class NoteError(LachesisError):
    """What was sent is no note."""


def folder_of(groups: Path) -> Path:
    """The folder with the notes about the groups of a file."""
    return groups.parent.parent if groups.parent.name == ROLLOUTS else groups.parent


def note_of(groups: Path, number: int, n: int, group: Mapping[str, Any], said: Any) -> dict[str, Any]:
    """The line about rollout `n` of a group, which `said` has `tags` and a `note` for. Raises NoteError."""
    tags, note = (said.get("tags"), said.get("note")) if isinstance(said, dict) else (None, None)
    if not isinstance(note, str) or not isinstance(tags, list) or len(note) > LONGEST or len(tags) > MOST_TAGS:
        raise NoteError(f"send a note of up to {LONGEST} characters, and up to {MOST_TAGS} tags")
    if wrong := [tag for tag in tags if not isinstance(tag, str) or not _TAG.fullmatch(tag)]:
        raise NoteError(f"{str(wrong[0])[:60]!r} is no tag: up to 40 letters, digits and - _ . +")
    return {
        "schema": SCHEMA,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "file": groups.relative_to(folder_of(groups)).as_posix(),
        "item_key": group["item_key"],
        "number": number,
        "rollout": n,
        "rollout_id": group["rollouts"][n]["rollout_id"],
        "tags": list(dict.fromkeys(tags)),
        "note": storable(note.strip()),
    }


def write_note(groups: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the notes beside a file. Raises JsonlError."""
    with JsonlWriter(folder_of(groups) / NAME, fsync=True) as file:
        file.write(line)


def rows_of(database: sqlite3.Connection, path: Path, folder: str) -> list[tuple[Any, ...]]:
    """The rows of a file of notes for the table: folder, run, number, n, tag, note; a note has the tag "".

    The groups that they are about are found by their number, or by their key where it is another group's by now.
    """
    last = {(line["file"], line["item_key"], line["number"], line["rollout"]): line for line in _lines(path)}
    rows: list[tuple[Any, ...]] = []
    for (file, key, number, n), line in last.items():
        found = database.execute(
            "SELECT groups.run, number FROM groups JOIN files ON files.id = file WHERE path = ? AND key = ? "
            "ORDER BY number != ? LIMIT 1",
            (f"{folder}/{file}" if folder else file, key, number),
        ).fetchone()
        if found is not None:
            rows += [(folder, *found, n, tag, "") for tag in line["tags"]]
            rows += [(folder, *found, n, "", line["note"])] if line["note"] else []
    return rows


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those of a file that are notes: people may edit it."""
    with suppress(OSError), path.open("rb") as file:
        for line in file.read(LARGE).splitlines():
            with suppress(*MISSHAPEN):
                content = parsed(line)
                yield {
                    "file": storable(content["file"]),
                    "item_key": storable(content["item_key"]),
                    "number": int(content["number"]),
                    "rollout": as_count(content["rollout"]),
                    "tags": [as_name(tag) for tag in content["tags"][:MOST_TAGS] if tag],
                    "note": storable(content["note"])[:LONGEST],
                }
