"""The tables of a folder of runs: an SQLite file that follows the files of groups as they grow.

The files stay the truth. The tables say where each group's line is, and what its rollouts are sorted and searched by.
They are outside of the folder, and may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from backends.errors import SettingsError, cannot_read
from backends.host.folders import user_cache
from lachesis.figures.item_keys import whole_and_part
from lachesis_messages.errors import MISSHAPEN
from lachesis_view.files import (
    UNFINISHED,
    has_grown,
    kind_of,
    known_state,
    manifest_of,
    mark_of,
    run_name,
    state_of,
)
from lachesis_view.names import LINES
from lachesis_view.notes import NAME as NOTES
from lachesis_view.notes import folder_of, rows_of
from lachesis_view.rows import as_count, as_name, as_time, parsed, rollout_row, searched_text, storable
from lachesis_view.trained import as_group

VERSION = 15
"""Of the tables."""
APPLICATION = 0x4C616368
"""In the header of an SQLite file: it is an index of the viewer, and may be rebuilt."""
BATCH = 4 << 20
"""Bytes of a file after which what was read of it becomes visible."""
_TABLES = """
CREATE TABLE IF NOT EXISTS files (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT UNIQUE, run TEXT, kind TEXT,
  inode INTEGER, size INTEGER, changed INTEGER, at INTEGER, lines INTEGER, unread INTEGER DEFAULT 0, mark BLOB);
CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, environment TEXT, model TEXT, evaluation INTEGER,
  settings TEXT, planned INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS groups (run TEXT, number INTEGER, file INTEGER, start INTEGER, length INTEGER, key TEXT,
  PRIMARY KEY (run, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS groups_of_file ON groups (file);
CREATE INDEX IF NOT EXISTS groups_of_item ON groups (run, key);
CREATE TABLE IF NOT EXISTS rollouts (id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER, run TEXT, number INTEGER,
  n INTEGER, item TEXT, title TEXT, reward REAL, outcome TEXT, cause TEXT, turns INTEGER, calls INTEGER, errors INTEGER,
  tokens INTEGER, seconds REAL, metrics TEXT, tools TEXT, why TEXT,
  rollout_id TEXT, time REAL);
CREATE INDEX IF NOT EXISTS rollouts_of_run ON rollouts (run, number, n);
CREATE INDEX IF NOT EXISTS rollouts_of_item ON rollouts (run, item, reward);
CREATE INDEX IF NOT EXISTS rollouts_of_file ON rollouts (file);
CREATE INDEX IF NOT EXISTS rollouts_by_time ON rollouts (time);
CREATE TABLE IF NOT EXISTS steps (file INTEGER, run TEXT, step INTEGER, time REAL, line TEXT);
CREATE INDEX IF NOT EXISTS steps_of_run ON steps (run, step);
CREATE TABLE IF NOT EXISTS notes (folder TEXT, run TEXT, number INTEGER, n INTEGER, tag TEXT, note TEXT);
CREATE INDEX IF NOT EXISTS notes_of_run ON notes (run, number, n);
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5 (body, content='', tokenize="unicode61 tokenchars '_'");
"""
COLUMNS = (
    "run, number, n, item, title, reward, outcome, cause, turns, calls, errors, tokens, seconds, metrics, tools, why, "
    "rollout_id, time"
)


def cache_path(root: Path) -> Path:
    """Where the index of a folder is, unless a path is given."""
    name = hashlib.sha256(f"{VERSION}:{root.resolve()}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return user_cache() / "view" / f"{name}.sqlite"


class FollowedFiles:
    """The tables of what is in the files of `root`. Threads may share them: one calls `refresh` again and again.

    Two processes may have the same tables: the first one follows the files, the other only asks.

    Args:
        path: the SQLite file; it and its folder are created.

    Raises:
        SettingsError: `root` is not a folder, or `path` cannot be written.
    """

    def __init__(self, root: Path, path: Path | None = None) -> None:
        if not root.is_dir():
            wrong = f"{root} is not a folder" if root.exists() else cannot_read(root)
            raise SettingsError(f"{wrong}; name the folder that contains your runs, by default data/")
        self.root = root.resolve()
        self.path = path or cache_path(root)
        self.left = 0
        """Bytes that are not indexed yet, as of the last look at the folder."""
        self.unread = 0
        """Lines of the files that are not groups, and are left out, as of that look."""
        digest = hashlib.sha256(f"{VERSION}:{self.root}".encode("utf-8", "surrogateescape")).digest()
        self._of = int.from_bytes(digest[:4]) >> 1
        self._refreshing = threading.Lock()
        self._stopped = False
        self._seen: tuple[Any, ...] = ()
        self._opened: tuple[int, int] | None = None
        self._connections: list[sqlite3.Connection] = []
        self._others: dict[str, tuple[int, int, int]] = {}
        self._notes: dict[str, tuple[int, ...]] = {}
        """By folder: the state of its files and of its notes when these were read; empty where it has none."""
        self._lock: BinaryIO | None = None
        try:
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._open(anew=True)
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise SettingsError(
                f"the index {self.path} cannot be written ({error}); choose another place with --index"
            ) from error

    def _open(self, *, anew: bool = False) -> None:
        """Open the file, which is made where there is none; made `anew` also if it is of another folder or version."""
        self._local = threading.local()  # every thread connects again
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            self._lock.close()
        self._lock = self.path.with_suffix(".lock").open("ab")
        header = b""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            header = file.read(72)
        application, of = (int.from_bytes(header[at : at + 4]) for at in (68, 60))
        if header and application != APPLICATION:
            raise OSError("it is not an index of the viewer: delete it if nothing else needs it")
        if header and (anew or of != self._of):
            if self._follows():
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{self.path}{suffix}").unlink(missing_ok=True)
                header = b""
            elif of != self._of:
                raise OSError("another viewer uses it")
        if not header:  # in the file before there is a write-ahead log beside it
            self._database.executescript(f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {self._of}")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.executescript(_TABLES)
        self._notes.clear()
        self._opened = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        with suppress(OSError):
            status = self.path.stat()
            return status.st_dev, status.st_ino
        return None

    @property
    def _database(self) -> sqlite3.Connection:
        """The connection of this thread."""
        if not hasattr(self._local, "database"):
            database = sqlite3.connect(self.path, timeout=5, isolation_level=None, check_same_thread=False)
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA synchronous = OFF")  # it can be made again
            self._local.database = database
            self._connections.append(database)
        found: sqlite3.Connection = self._local.database
        return found

    def report(self, error: BaseException) -> None:
        """Take note of an error that asking ended with: the next `refresh` rebuilds a damaged file."""
        if _is_damage(error):
            self._opened = None

    def stop(self) -> None:
        """End a `refresh` of another thread soon."""
        self._stopped = True

    def close(self) -> None:
        """End a `refresh` of another thread, and wait for it. No other thread may ask now."""
        self.stop()
        with self._refreshing:  # SQLite crashes where a connection is closed that a thread still works with
            for connection in self._connections:
                connection.close()
            if self._lock is not None:
                self._lock.close()

    def refresh(self, changed: Callable[[], None] = lambda: None) -> bool:
        """Read what the files have more than before; whether there was anything. Blocks: call it in a thread.

        Args:
            changed: called whenever more can be seen.
        """
        with self._refreshing:
            if self._opened is None or self._opened != self._identity():  # a page found it damaged, or it was deleted
                self._open(anew=self._opened is None)
            try:
                any_change = self._look(changed)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._open(anew=True)
                any_change = self._look(changed)
            if any_change:
                changed()
            return any_change

    def _look(self, changed: Callable[[], None]) -> bool:
        any_change = self._refresh(changed) | self.read_notes() if self._follows() else self._has_seen_more()
        self.unread = self._database.execute("SELECT coalesce(sum(unread), 0) FROM files").fetchone()[0]
        return any_change

    def _follows(self) -> bool:
        """Whether this viewer follows the files: not where another one does."""
        assert self._lock is not None
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _has_seen_more(self) -> bool:
        seen = tuple(self._database.execute("SELECT total(at), max(id) FROM files").fetchone())
        before, self._seen = self._seen, seen
        return seen != before

    def _refresh(self, changed: Callable[[], None]) -> bool:
        known = {row["path"]: row for row in self._database.execute("SELECT * FROM files")}
        # What failed comes last: it is left out where another file has it with a score.
        found = sorted(self._files(known), key=lambda each: each[1] == "failed")
        any_change = False
        for name in known.keys() - {name for name, _, _ in found}:
            if name in known:
                self._forget(name, known)
            any_change = True

        def has_changed(name: str, status: os.stat_result) -> bool:
            return name not in known or known_state(known[name]) != state_of(status)

        self.left = sum(
            max(0, status.st_size - (known[name]["at"] if name in known else 0))
            for name, _, status in found
            if has_changed(name, status)
        )
        for name, kind, status in found:
            if has_changed(name, status):
                with suppress(OSError):  # it may be gone by now
                    any_change |= self._follow(name, kind, known, changed)
        return any_change

    def _files(self, known: Mapping[str, sqlite3.Row]) -> Iterator[tuple[str, str, os.stat_result]]:
        """The files of groups and of steps below the folder: relative path, kind, status."""
        root = str(self.root)
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            below = folder.removeprefix(root).removeprefix("/")
            for name in sorted(names):
                relative = f"{below}/{name}" if below else name
                if name.endswith(".jsonl") and not name.startswith(".") and relative.isprintable():
                    with suppress(OSError):
                        status = os.stat(f"{folder}/{name}")  # noqa: PTH116  # pathlib takes twice as long
                        state = state_of(status)
                        if not stat.S_ISREG(status.st_mode):  # a FIFO would keep all others waiting
                            continue
                        if self._others.get(relative) == state:
                            continue
                        row = known.get(relative)
                        if row is not None and known_state(row) == state:
                            kind = row["kind"]
                        else:
                            kind = kind_of(self.root / relative)
                        if kind:
                            yield relative, kind, status
                        else:
                            self._others[relative] = state

    def _follow(self, name: str, kind: str, known: dict[str, sqlite3.Row], changed: Callable[[], None]) -> bool:
        path, row = self.root / name, known.get(name)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            state = state_of(status)
            if row is not None and not has_grown(file, status, row):
                self._forget(name, known)
                row = None
            run = run_name(self.root, path) if row is None else row["run"]
            self._add_run(run, path)
            if row is None:
                cursor = self._database.execute(
                    "INSERT INTO files (path, run, kind, at, lines) VALUES (?, ?, ?, 0, 0)", (name, run, kind)
                )
                file_id, at, lines = cursor.lastrowid, 0, 0
            else:
                file_id, at, lines = row["id"], row["at"], row["lines"]
            assert file_id is not None
            before = at
            file.seek(at)
            more = True
            while more and not self._stopped:
                began, unread = at, 0
                with self._transaction():
                    more = False
                    for line in file:
                        try:
                            self._add(kind, file_id, run, lines, at, line, status.st_mtime)
                        except MISSHAPEN:
                            if not line.endswith(b"\n"):  # half-written; the rest comes later
                                break
                            unread += bool(line.strip())
                        at, lines = at + len(line), lines + line.endswith(b"\n")
                        if at - began >= BATCH:
                            # What is written meanwhile waits until other files had their turn.
                            more = at < status.st_size
                            break
                    self._database.execute(
                        "UPDATE files SET inode = ?, size = ?, changed = ?, at = ?, lines = ?, "
                        "unread = unread + ?, mark = ? WHERE id = ?",
                        # Until it is read to its end, it is not known as it is.
                        (*state[:2], UNFINISHED if more else state[2], at, lines, unread, mark_of(file, at), file_id),
                    )
                    file.seek(at)
                self.left = max(0, self.left - (at - began))
                self.unread += unread
                if more:
                    changed()
        return at > before or row is None

    def read_notes(self) -> bool:
        """Read the notes beside the files again where they, or the files, have changed; whether any had."""
        if not self._follows():
            return False
        any_change = False
        known = self._database.execute("SELECT path, id, at FROM files WHERE kind != 'steps' ORDER BY path")
        states: dict[Path, list[int]] = {}
        for path, *read in known:  # a file that was written over has another id
            states.setdefault(folder_of(Path(path)), []).extend(read)
        for folder, files in states.items():
            path = self.root / folder / NOTES
            status = path.stat() if path.is_file() else None
            state = (*files, status.st_size, status.st_mtime_ns) if status else ()
            name = "" if folder == Path() else folder.as_posix()
            if self._notes.get(name) != state:
                with self._transaction():
                    rows = rows_of(self._database, path, name) if status else []
                    self._database.execute("DELETE FROM notes WHERE folder = ?", (name,))
                    self._database.executemany("INSERT INTO notes VALUES (?, ?, ?, ?, ?, ?)", rows)
                any_change |= bool(state or self._notes.get(name))
                self._notes[name] = state
        return any_change

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _forget(self, name: str, known: dict[str, sqlite3.Row]) -> None:
        """Remove what is known of a file, and of what failed in its run: it may not have been finished by now.

        Texts stay in the tables: nothing finds them without their rollouts.
        """
        gone = [known.pop(name)]
        if gone[0]["kind"] == "groups":
            failed = [other for other, row in known.items() if (row["kind"], row["run"]) == ("failed", gone[0]["run"])]
            gone += [known.pop(other) for other in failed]
        with self._transaction():
            for row in gone:
                for table in ("rollouts", "groups", "steps"):
                    self._database.execute(f"DELETE FROM {table} WHERE file = ?", (row["id"],))
                self._database.execute("DELETE FROM files WHERE id = ?", (row["id"],))
            self._database.execute("DELETE FROM runs WHERE name NOT IN (SELECT run FROM files)")

    def _add_run(self, run: str, path: Path) -> None:
        self._database.execute(
            "INSERT INTO runs (name, settings, planned) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "settings = CASE WHEN excluded.settings = '{}' THEN settings ELSE excluded.settings END, "
            "planned = max(planned, excluded.planned)",
            (run, *manifest_of(path)),
        )

    def _add(self, kind: str, file: int, run: str, line_number: int, start: int, line: bytes, written: float) -> None:
        content = parsed(line)
        # What is of a wrong type fails here, before anything of the line is in the tables.
        if kind == "steps":
            time = as_time(content.get("timestamp") or 0)
            step = (file, run, as_count(content["step"]), time, storable(line.decode("utf-8", "replace")))
            self._database.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", step)
            return
        # Groups without a score have a file and a count of their own; here they count downwards from -1.
        number = -1 - line_number if kind == "failed" else line_number
        if kind == "trained":
            number = as_count(LINES * as_count(content["step"]) + line_number)
            time, content = written, as_group(content)
        else:
            time = as_time(datetime.fromisoformat(content["timestamp"]).timestamp())
        key, environment, model = (
            storable(content["item_key"]),
            as_name(content["environment"]),
            as_name(content["model"]),
        )
        item = key if kind == "trained" else whole_and_part(key)[0]
        rollouts: list[dict[str, Any]] = content["rollouts"] + []  # a list, or it fails
        rows = [
            (file, run, number, n, item, *rollout_row(content, rollout), time) for n, rollout in enumerate(rollouts)
        ]
        texts = [searched_text(content, rollout) for rollout in rollouts]
        finished = "SELECT 1 FROM groups WHERE run = ? AND key = ? AND number >= 0"
        if kind == "failed" and self._database.execute(finished, (run, key)).fetchone():
            return  # by a later start
        for table in ("rollouts", "groups"):  # what an earlier start made of it counts no more
            self._database.execute(
                f"DELETE FROM {table} WHERE run = ? AND number IN "
                "(SELECT number FROM groups WHERE run = ? AND key = ? AND number < 0)",
                (run, run, key),
            )
        # Two files may have the name of one run: the one that was read last counts.
        self._database.execute("DELETE FROM rollouts WHERE run = ? AND number = ?", (run, number))
        insert = f"INSERT INTO rollouts (file, {COLUMNS}) VALUES ({', '.join('?' * 19)})"
        for row, text in zip(rows, texts, strict=True):
            cursor = self._database.execute(insert, row)
            self._database.execute("INSERT INTO texts (rowid, body) VALUES (?, ?)", (cursor.lastrowid, text))
        self._database.execute(
            "INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?)", (run, number, file, start, len(line), key)
        )
        self._database.execute(
            "UPDATE runs SET environment = ?, model = ?, evaluation = ? WHERE name = ?",
            (environment, model, bool(content.get("evaluation")), run),
        )


def _is_damage(error: BaseException) -> bool:
    """Whether SQLite says that a file is not one of its databases, or not any more."""
    name: str = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
