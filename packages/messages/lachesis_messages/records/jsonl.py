"""JSON Lines files that survive crashes and concurrent writers.

After any `kill -9` a file holds whole lines and at most one torn line at its end. The next writer moves that line to
`<name>.torn` before it writes.

A line is one `write` on a descriptor in append mode under an exclusive lock (`flock`), so that processes of one machine
can share a file. Writing blocks: with an event loop, call it in a thread.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import orjson

from backends.errors import ExitCode, LachesisError, cannot_read, os_error_hint

StrPath = str | os.PathLike[str]

_CHUNK = 1 << 16
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_SCALARS = frozenset({int, float, bool, type(None)})
_NUMERIC = frozenset({int, float})
_OUTER = 3
"""Levels of a value that are written item by item: those of a group, down to a message or a list of tokens."""
_NUMBERS, _OBJECTS = 4096, 64
"""Items of a list that are written at once, of text or numbers, and of objects."""


def _reject(constant: str) -> Any:
    raise ValueError(f"holds {constant}, which is not JSON")


_PLACE = re.compile(r": line 1 column (\d+) \(char \d+\)")
_FINITE = json.JSONDecoder(parse_constant=_reject).decode
_DIGITS = bytes(48 if 48 <= byte < 58 else byte for byte in range(256))
_ZEROS, _LONG = re.compile(b"0*"), b"0" * 19
"""Digits, each written as 0, that may be an integer of more than 64 bits."""


class JsonlError(LachesisError):
    """A JSONL file cannot be read or written. The message names the file, the reason and, if any, the next step."""

    def __init__(self, path: StrPath, reason: str, *, line: int | None = None) -> None:
        self.path = Path(path)
        self.line = line
        self.reason = reason = at_column(reason)
        if line is not None:  # its content is wrong
            self.exit_code = ExitCode.SETTINGS
        super().__init__(f"{self.path}{'' if line is None else f', line {line}'}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self).__new__, (type(self), *self.args), self.__dict__)


class WrongContent(JsonlError):
    """The file is of another format: another file is the remedy."""

    exit_code = ExitCode.SETTINGS


def at_column(problem: object) -> str:
    """What a JSON reader says of a line, which it counts as the first one."""
    return _PLACE.sub(r" at column \1", str(problem))


class NoSuchFile(JsonlError):
    """There is no such file: another name is the remedy."""

    exit_code = ExitCode.SETTINGS

    def __init__(self, path: StrPath, error: OSError) -> None:
        super().__init__(path, reason := cannot_read(path, error))
        self.args = (reason,)


def unreadable(path: StrPath, error: OSError) -> JsonlError:
    """The error of a file that cannot be opened or read."""
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return NoSuchFile(path, error)
    return JsonlError(path, f"cannot be read ({error.strerror or error})")


class NotReplaced(JsonlError):
    """A file could not be written; the one of its name that was there before is still there."""


class JsonlWriter:
    """Appends objects to a file, one per line. Threads may share a writer, processes may share a file.

    Missing folders are created. With `fsync`, `write` returns when the line is on disk. Raises JsonlError.
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
                self._move_torn_tail(fd)

    def write(self, obj: Any) -> None:
        """Appends one object, whole or not at all."""
        self.write_line(self.encode(obj))

    def write_all(self, objects: Iterable[Any]) -> None:
        """Appends objects at once. After a crash, the last ones may be missing."""
        if lines := b"".join(map(self.encode, objects)):
            self.write_line(lines)

    def write_line(self, line: bytes) -> None:
        """Appends an encoded object, which ends with a newline, whole or not at all."""
        with self._lock:
            fd = self._open()
            with self._exclusive(fd):
                self._move_torn_tail(fd)  # another writer may have crashed; costs two system calls
                start = (file := os.fstat(fd)).st_size
                if not file.st_nlink:
                    raise JsonlError(self.path, "the file was deleted while it was written; start again")
                try:
                    _write_all(fd, line)
                    if self._fsync:
                        os.fsync(fd)
                except OSError as error:
                    with suppress(OSError):  # else the next writer moves it
                        os.ftruncate(fd, start)
                    raise self._error("cannot write", error) from error

    def close(self) -> None:
        """Closes the file; a later `write` opens it again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def encode(self, obj: Any) -> bytes:
        """The line that `write` appends. Raises JsonlError."""
        return encode_line(self.path, obj)

    def _open(self) -> int:
        # A lock belongs to the open file: a forked child would share it.
        if self._fd is None or self._pid != os.getpid():
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                if self._fsync and not os.fstat(self._fd).st_size:
                    sync_folder(self.path.parent)  # a new file is lost while its folder is not on disk
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

    def _move_torn_tail(self, fd: int) -> None:
        """Afterwards the file is empty or ends with a newline."""
        size = os.fstat(fd).st_size
        if not size or os.pread(fd, 1, size - 1) == b"\n":
            return
        try:
            tail = _tail(fd, size)
            if _is_whole(tail):  # only the newline is missing, for example after an edit by hand
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
        step = os_error_hint(error) or "choose a folder that this user can write to and that has space left"
        return JsonlError(self.path, f"{what} ({error.strerror or error}); {step}")


def encode_line(path: StrPath, obj: Any) -> bytes:
    """An object as a line of `path`, with its newline. Raises JsonlError."""
    try:
        return b"".join(_json_pieces(obj)) + b"\n"
    except (TypeError, ValueError) as error:
        raise JsonlError(path, f"the object cannot become JSON: {error}") from error


def append_line(path: StrPath, obj: Any, *, fsync: bool = False) -> None:
    """Appends one object. For many, a `JsonlWriter` keeps the file open."""
    with JsonlWriter(path, fsync=fsync) as writer:
        writer.write(obj)


@contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """A temporary path next to `path`. The file written there replaces `path` when it is complete and on disk; after an
    exception it is removed, and `path` is unchanged. Raises NotReplaced."""
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise NotReplaced(path, "is not a regular file; choose another output file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except JsonlError as error:
        if error.path != temporary:
            raise
        raise NotReplaced(path, error.reason) from error
    except OSError as error:
        raise NotReplaced(path, f"cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_lines(
    path: StrPath, *, torn_tail: bool = False, finite: bool = False, field: str | None = None
) -> Iterator[Any]:
    """The objects of a file, one at a time; blank lines are skipped. With `field`, only its value of each object, None
    where it is missing: where it stands after all long fields, the line is not parsed before it.

    Raises JsonlError, with the number of the line, at a line that is not JSON. With `torn_tail`, an incomplete last
    line, as a crashed or running writer leaves it, ends the file instead. With `finite`, NaN and infinities, which
    `json` reads, are errors too.
    """
    parse = partial(read_line, read=_FINITE if finite else json.loads)
    if field is not None:
        parse = partial(_field, name=field, key=json_text(field) + b": ", parse=parse)
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    value = parse(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
                except (ValueError, RecursionError) as error:
                    if line.endswith(b"\n"):
                        raise JsonlError(path, f"not JSON: {error}", line=number) from error
                    if torn_tail:
                        return
                    reason = "the last line is torn: its writer was killed or still writes; torn_tail=True skips it"
                    raise JsonlError(path, reason, line=number) from error
                yield value
    except OSError as error:
        raise unreadable(path, error) from error


def read_line(line: bytes, read: Callable[[str], Any] = json.loads) -> Any:
    """The value of a line, by `read` where orjson reads another one or none: it turns integers of more than 64 bits
    into floats, and rejects halves of surrogate pairs, NaN and infinities."""
    if not _has_long_integer(line.translate(_DIGITS)):
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(line)
    return read(line.decode())


def _field(line: bytes, name: str, key: bytes, parse: Callable[[bytes], Any]) -> Any:
    # The quotes of a string's text stand behind backslashes, so this is a key; and the end of the line is an object of
    # its own only if the key is one of the outermost object, for otherwise it closes more than it opens.
    at = line.rfind(key)
    if at > 0 and len(line) - at < _CHUNK:
        with suppress(ValueError):
            return parse(b"{" + line[at:])[name]
    value = parse(line)
    return value.get(name) if isinstance(value, dict) else None


def _has_long_integer(digits: bytes) -> bool:
    at = digits.find(_LONG)
    while at >= 0:
        if digits[at - 1 : at] != b".":
            return True
        end = _ZEROS.match(digits, at)  # of a fraction
        at = digits.find(_LONG, end.end() if end else len(digits))
    return False


def has_torn_tail(path: StrPath) -> bool:
    """Whether the last line is incomplete: `read_lines` with `torn_tail` leaves it out. False for no readable file, and
    for a file that is one JSON array."""
    try:
        with Path(path).open("rb") as file:
            if is_array(file):
                return False
            size = os.fstat(file.fileno()).st_size
            if not size or os.pread(file.fileno(), 1, size - 1) == b"\n":
                return False
            return not _is_whole(_tail(file.fileno(), size))
    except OSError:
        return False


def is_array(file: IO[bytes]) -> bool:
    """Whether a file, which is at its start and stays there, begins a JSON array: `array_items` reads it."""
    start = file.read(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return start.startswith(b"[")


def sync_folder(path: StrPath) -> None:
    """Flush the file names of a folder to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have nothing to flush
            raise
    finally:
        os.close(fd)


def _json_pieces(value: Any) -> list[bytes]:
    """The text of `json.dumps`, in pieces: an encoder in C holds the interpreter until it has written its whole value,
    which may be a group of some megabytes. `iterencode` has pieces of a few bytes, at 5 times the cost, and leaves
    cycles for the garbage collector.

    A piece is a value, or a part of a list, below the outer `_OUTER` levels; short values that follow each other in a
    dict are one piece.
    """
    pieces: list[bytes] = []
    _write_value(value, pieces, 0)
    return pieces


def _write_value(value: Any, pieces: list[bytes], depth: int) -> None:
    outer, before = depth < _OUTER, b"["
    if isinstance(value, (list, tuple)) and value and (outer or len(value) > _NUMBERS or type(value[-1]) in _NUMERIC):
        nested = isinstance(value[0], (dict, list, tuple))
        size = 1 if nested and outer else _OBJECTS if nested else _NUMBERS
        for start in range(0, len(value), size):
            pieces.append(before)
            if nested and outer:
                _write_value(value[start], pieces, depth + 1)
            else:
                part = value[start : start + size]
                pieces.append(_numbers(part) or json_text(part)[1:-1])
            before = b", "
        pieces.append(b"]")
    elif outer and isinstance(value, dict) and value and all(type(key) is str for key in value):
        before, short = b"{", {}
        for key, inner in value.items():
            kind = type(inner)
            if kind in _SCALARS or (len(inner) < _NUMBERS if kind is str else not inner and kind in (list, dict)):
                short[key] = inner
                continue
            if short:
                pieces.append(before + json_text(short)[1:-1])
                before, short = b", ", {}
            pieces.append(before + json_text(key) + b": ")
            _write_value(inner, pieces, depth + 1)
            before = b", "
        pieces.append(before + json_text(short)[1:] if short else b"}")
    else:
        pieces.append(json_text(value))


def _numbers(values: Sequence[Any]) -> bytes:
    """The items of a list of numbers, which orjson writes many times as fast; empty where something else is in it."""
    try:
        written = orjson.dumps(values)[1:-1]
    except TypeError:  # over 64 bits, or no JSON
        return b""
    # NaN is null there, and an error here.
    return b"" if written.translate(None, b"0123456789+-.eE,") else written.replace(b",", b", ")


def json_text(value: Any) -> bytes:
    """JSON with Python's default spacing. Raises TypeError or ValueError."""
    # Half of a surrogate pair has no UTF-8; its backslash form is its JSON escape.
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def _write_all(fd: int, data: bytes) -> None:
    """Usually one `write`; more where the system takes only a part (a nearly full disk, over 2 GiB)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _tail(fd: int, size: int) -> bytes:
    """The bytes after the last newline."""
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
