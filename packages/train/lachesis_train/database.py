"""An SQLite database that one process uses, in one thread, and that survives `kill -9` at any instant.

A commit is on the disk when it returns (`synchronous=FULL`), unless it says that it need not be. SQLite's lock on the
file keeps a second process out, and ends with the process that holds it. Large contents are kept in pieces, so that no
row comes near SQLite's limit and no piece takes long.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from backends.errors import LachesisError

T = TypeVar("T")

CONTENT_TABLE: Final = "CREATE TABLE chunks (id INTEGER PRIMARY KEY, data BLOB NOT NULL)"
FACTS_TABLE: Final = "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)"

_CHUNK = 1 << 20
"""Bytes of a content in one row, at least; less than twice as many."""
_MOST_CHUNKS = 1 << 20
_LOCK_SECONDS = 1.0
"""How long a start waits for the lock: a killed process needs a moment to end."""
_PRAGMAS = (
    "page_size = 16384",  # contents take megabytes: fewer pages for each
    "secure_delete = OFF",  # on in Debian's build: it writes zeros over each deleted content
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    "journal_size_limit = 67108864",
)
_DAMAGED = "restore it from a copy, or {another} to go on without the groups in it"
_NEXT_STEPS = {
    sqlite3.SQLITE_BUSY: "another run uses it, or its file system has no locks; wait for that run or {another}",
    sqlite3.SQLITE_FULL: "make room or {another}, then start again: what was written stays",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
}
_OTHERWISE = "check the disk and the permissions, or {another}, then start again: what was written stays"


class Database:
    """The file and its thread. Only `run` may be called from another thread, the event loop.

    Args:
        error: raised with the file, the reason and the next step.
        another: how to choose another file, as a part of that sentence.
        form: `user_version` of the file; another one is an error.
        tables: created in a new file, in addition to those of contents and facts.
        facts: of a new file.
    """

    def __init__(
        self,
        path: Path,
        *,
        error: type[LachesisError],
        another: str,
        form: int,
        tables: Iterable[str] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self._error = error
        self._another = another
        self._form = form
        self._tables = (*tables, CONTENT_TABLE, FACTS_TABLE, f"PRAGMA user_version = {form}")
        self._facts = dict(facts or {})
        self._connection: sqlite3.Connection | None = None
        self._flushes: bool | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=path.stem)

    def run(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call a function in the database's thread, after the calls that are already there."""
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def from_thread(self, function: Callable[..., T], *args: Any) -> T:
        """The same from a thread that waits for the result."""
        return self._thread.submit(function, *args).result()

    def end_thread(self) -> None:
        """After `close`."""
        self._thread.shutdown()

    def open(self) -> None:
        """Lock the file, made when it is missing."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(f"{self.path.parent} cannot be made ({error.strerror}); {self._another}") from error
        with self.errors(connect=True) as database:
            for pragma in _PRAGMAS:
                database.execute(f"PRAGMA {pragma}").fetchall()
        with self.transaction() as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                if database.execute("SELECT 1 FROM sqlite_master").fetchone():
                    raise self._error(f"{self.path} is a database of another program; {self._another}")
                for statement in self._tables:
                    database.execute(statement)
                for name, value in self._facts.items():
                    put_fact(database, name, value)
                return
            if version != self._form:
                raise self._error(
                    f"{self.path} has format {version}, but this version of Lachesis uses {self._form}; use the version"
                    f" that made it, or {self._another}"
                )
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise self._error(f"{self.path} is damaged ({found}); {self._next_step(sqlite3.SQLITE_CORRUPT)}")

    def close(self) -> None:
        """Let go of the file."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def transaction(self, *, flush: bool = True) -> Iterator[sqlite3.Connection]:
        """All of it or nothing; on the disk at the end, or, without `flush`, with the next commit."""
        with self.errors() as database:
            if flush is not self._flushes:
                database.execute(f"PRAGMA synchronous = {'FULL' if flush else 'NORMAL'}")
                self._flushes = flush
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # some errors have rolled back already
                    database.execute("ROLLBACK")
                raise

    @contextmanager
    def errors(self, *, connect: bool = False) -> Iterator[sqlite3.Connection]:
        """The connection, whose errors name the file and the next step."""
        try:
            if connect:
                self._connection = sqlite3.connect(self.path, timeout=_LOCK_SECONDS, isolation_level=None)
            if self._connection is None:
                raise RuntimeError(f"{self.path.name} is not open; use it between open() and close()")
            yield self._connection
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the lowest byte is the primary code
            raise self._error(f"{self.path}: {error}; {self._next_step(code)}") from error

    def chunk(self, owner: int, at: int) -> bytes | None:
        """Piece `at` of the content of row `owner`; None after the last.

        Raises:
            LachesisError: the content was deleted.
        """
        with self.errors() as database:
            row = database.execute("SELECT data FROM chunks WHERE id = ?", (owner * _MOST_CHUNKS + at,)).fetchone()
        if row is None and at == 0:
            raise self._error(f"{self.path}: the content of group {owner} is gone; {self._next_step(0)}")
        data: bytes | None = None if row is None else row[0]
        return data

    def facts(self) -> dict[str, Any]:
        """The facts that `put_fact` wrote, by name."""
        with self.errors() as database:
            rows = database.execute("SELECT name, value FROM facts").fetchall()
        try:
            return {name: orjson.loads(value) for name, value in rows}
        except orjson.JSONDecodeError as error:
            raise self._error(f"{self.path} is damaged; {self._next_step(sqlite3.SQLITE_CORRUPT)}") from error

    def _next_step(self, code: int) -> str:
        return _NEXT_STEPS.get(code, _OTHERWISE).format(another=self._another)


def put_fact(database: sqlite3.Connection, name: str, value: Any) -> None:
    """Keep a value as JSON under a name."""
    database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, orjson.dumps(value).decode()))


def put_content(database: sqlite3.Connection, owner: int, pieces: Iterable[bytes]) -> None:
    """Keep the content of row `owner`."""
    for at, chunk in enumerate(_chunks(pieces)):
        database.execute("INSERT INTO chunks VALUES (?, ?)", (owner * _MOST_CHUNKS + at, chunk))


def delete_content(database: sqlite3.Connection, owner: int) -> None:
    """The space is used again."""
    ids = (owner * _MOST_CHUNKS, (owner + 1) * _MOST_CHUNKS)
    database.execute("DELETE FROM chunks WHERE id >= ? AND id < ?", ids)


def _chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for part in (piece[at : at + _CHUNK] for piece in pieces for at in range(0, len(piece), _CHUNK)):
        held.append(part)
        size += len(part)
        if size >= _CHUNK:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)
