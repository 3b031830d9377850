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
from lachesis_messages.errors import MISSHAPEN
from lachesis_messages.records.jsonl import JsonlWriter
from lachesis_messages.records.step_files import ROLLOUTS
from lachesis_view.rows import as_count, as_name, parsed, storable

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
    """The folder with the notes about the groups of a file, whose path begins at the folder of the index."""
    of_step = groups.parent.name == ROLLOUTS and groups.name.startswith("step_")
    return groups.parent.parent if of_step else groups.parent


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


def write_note(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the notes of a folder. Raises JsonlError."""
    with JsonlWriter(folder / NAME, fsync=True) as file:
        file.write(line)


def rows_of(database: sqlite3.Connection, path: Path, folder: str) -> list[tuple[Any, ...]]:
    """The rows of a file of notes for the table: folder, run, number, n, tag, note; a note has the tag "".

    A rollout is found by its id, also where its group has another number by now; by its number, where a line has no id.
    """
    names = ("file", "item_key", "rollout_id", "rollout", "number")
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in _lines(path):
        place = tuple(line[name] for name in names)
        last.pop(place, None)  # in the order of their last lines
        last[place] = line
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for (file, key, rollout_id, n, number), line in last.items():
        row = database.execute(
            "SELECT rollouts.run, rollouts.number, n FROM files JOIN groups ON groups.run = files.run "
            "AND groups.file = files.id AND key = ? JOIN rollouts ON rollouts.run = groups.run "
            "AND rollouts.number = groups.number AND iif(?, rollout_id = ?, n = ?) WHERE path = ? "
            "ORDER BY rollouts.number != ?, n != ? LIMIT 1",
            (key, bool(rollout_id), rollout_id, n, f"{folder}/{file}" if folder else file, number, n),
        ).fetchone()
        if row is not None:
            found[tuple(row)] = line
    of_tags = [(folder, *place, tag, "") for place, line in found.items() for tag in line["tags"]]
    return of_tags + [(folder, *place, "", line["note"]) for place, line in found.items() if line["note"]]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those of a file that are notes: people may edit it."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LARGE))  # the last ones count
        for line in file.read(LARGE).splitlines():
            with suppress(*MISSHAPEN):
                content = parsed(line)
                yield {
                    "file": storable(content["file"]),
                    "item_key": storable(content["item_key"]),
                    "number": as_count(abs(content["number"])) and content["number"],
                    "rollout_id": as_name(content.get("rollout_id") or ""),
                    "rollout": as_count(content["rollout"]),
                    "tags": [as_name(tag) for tag in content["tags"][:MOST_TAGS] if tag],
                    "note": storable(content["note"])[:LONGEST],
                }
