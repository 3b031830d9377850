"""JSON lines that survive a crash and several writers.

After any `kill -9` a file holds whole lines and at most one torn tail, and the next writer moves that tail out of the
way (to `<name>.torn`) before it writes.

A line is written by one `write` on a descriptor in append mode, under an exclusive lock (`flock`), so that processes of
one machine can share a file. Writing blocks: call it in a thread where an event loop runs.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lachesis.errors import LachesisError

StrPath = str | os.PathLike[str]

_CHUNK = 1 << 16
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class JsonlError(LachesisError):
    """A JSONL file that cannot be read or written: names the file, the reason and, where there is one, a next step."""

    def __init__(self, path: StrPath, reason: str, *, line: int | None = None) -> None:
        self.path = Path(path)
        self.line = line
        self.reason = reason
        super().__init__(f"{self.path}{'' if line is None else f', line {line}'}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self).__new__, (type(self), *self.args), self.__dict__)


class JsonlWriter:
    """Appends objects to a file, one a line. Safe to share between threads, and between processes by path.

    Missing folders are created. With `fsync`, `write` returns when the line is on the disk. Raises JsonlError.
    """

    def __init__(self, path: StrPath, *, fsync: bool = False) -> None:
        self.path = Path(path)
        self._fsync = fsync
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._pid = 0
        with self._lock:
            fd = self._open()
            with self._exclusive(fd):
                self._mend(fd)

    def write(self, obj: Any) -> None:
        """Appends one line, whole or not at all."""
        line = self._encode(obj)
        with self._lock:
            fd = self._open()
            with self._exclusive(fd):
                self._mend(fd)  # another writer may have died since: this costs two system calls
                start = os.fstat(fd).st_size
                try:
                    _write_all(fd, line)
                    if self._fsync:
                        os.fsync(fd)
                except OSError as error:
                    with suppress(OSError):  # the next writer mends what stays
                        os.ftruncate(fd, start)
                    raise self._error("cannot write", error) from error

    def close(self) -> None:
        """Closes the file; a later `write` opens it again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, obj: Any) -> bytes:
        try:
            # Piece by piece: `json.dumps` does a whole group in one go, in which no other thread of the process runs.
            text = "".join(_ENCODER.iterencode(obj))
        except (TypeError, ValueError) as error:
            raise JsonlError(self.path, f"the object cannot become JSON: {error}") from error
        # Half a surrogate pair has no UTF-8; its backslash form is what JSON calls it.
        return text.encode("utf-8", "backslashreplace") + b"\n"

    def _open(self) -> int:
        # A lock belongs to the open file: a child process that inherited ours would not be kept out by it.
        if self._fd is None or self._pid != os.getpid():
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                if self._fsync and not os.fstat(self._fd).st_size:
                    sync_folder(self.path.parent)  # a file that is on the disk, and in no folder there, is lost
            except OSError as error:
                raise self._error("cannot open for writing", error) from error
            self._pid = os.getpid()
        return self._fd

    @contextmanager
    def _exclusive(self, fd: int) -> Iterator[None]:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            reason = f"cannot be locked ({error.strerror or error}); choose a folder on a file system that has flock"
            raise JsonlError(self.path, reason) from error
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def _mend(self, fd: int) -> None:
        """Leaves the file empty or with a newline at its end."""
        size = os.fstat(fd).st_size
        if not size or os.pread(fd, 1, size - 1) == b"\n":
            return
        try:
            tail = _tail(fd, size)
            if _is_whole(tail):  # written by hand, say: only the newline is missing
                _write_all(fd, b"\n")
                return
            torn = os.open(f"{self.path}.torn", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _write_all(torn, tail + b"\n")
                os.fsync(torn)
            finally:
                os.close(torn)
            os.ftruncate(fd, size - len(tail))
        except OSError as error:
            raise self._error(f"cannot move its torn last line to {self.path.name}.torn", error) from error

    def _error(self, what: str, error: OSError) -> JsonlError:
        return JsonlError(
            self.path,
            f"{what} ({error.strerror or error}); choose a folder that this user can write to and that has space left",
        )


def append_line(path: StrPath, obj: Any, *, fsync: bool = False) -> None:
    """Appends one object. For many, a `JsonlWriter` keeps the file open."""
    with JsonlWriter(path, fsync=fsync) as writer:
        writer.write(obj)


def read_lines(path: StrPath, *, torn_tail: bool = False) -> Iterator[Any]:
    """The objects of a file, one at a time; blank lines are skipped.

    Raises JsonlError, with the line's number, at a line that is not JSON. With `torn_tail` a broken last line without a
    newline, as a crash or a writer at work leaves it, ends the file instead.
    """
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    # Not orjson: it turns integers over 64 bits into floats and refuses lone surrogates.
                    value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except (ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        raise JsonlError(path, f"not JSON: {error}", line=number) from error
                    if torn_tail:
                        return
                    reason = "the last line is torn; pass torn_tail=True to read what is before it"
                    raise JsonlError(path, reason, line=number) from error
                yield value
    except OSError as error:
        raise JsonlError(path, f"cannot be read ({error.strerror or error})") from error


def sync_folder(path: StrPath) -> None:
    """When this returns, the names of the files in it are on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what some network file systems say who have nothing to do here
            raise
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    """One `write` as a rule; more where the system takes only a part (a nearly full disk, over 2 GiB)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _tail(fd: int, size: int) -> bytes:
    """What stands after the last newline."""
    tail = b""
    while size and b"\n" not in tail:
        start = max(0, size - _CHUNK)
        tail = os.pread(fd, size - start, start) + tail
        size = start
    return tail.rpartition(b"\n")[2]


def _is_whole(tail: bytes) -> bool:
    try:
        return isinstance(json.loads(tail.decode()), (dict, list))
    except (ValueError, RecursionError):
        return False
