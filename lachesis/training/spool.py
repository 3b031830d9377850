"""Write-ahead log of groups on their way to a trainer: what was appended here survives `kill -9` at any instant.

A folder of its own holds

* `000000.jsonl`, `000001.jsonl`, ...: the groups, one a line, each on the disk before it is posted; a file whose groups
  are all settled is deleted, unless they are to be kept;
* `marks.jsonl`: what became of them (`lachesis.training.spool_state`);
* `manifest.json` and `lock`: the settings that the groups were made with, and a guard against a second process.

Memory holds a few numbers a group, never its content. All methods belong to the event loop; what blocks runs in a
thread of the spool's own, in order, and to its end also when the caller is cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import orjson

from backends.tasks import finish
from lachesis.run_folder import RunFolderError, changes, take_lock, write_manifest
from lachesis.training.rollout_api import EnvDescription, compress, encode_group, encode_json
from lachesis.training.spool_state import (
    ACCEPTED,
    BACK,
    DISCONNECTED,
    LEFT_OUT,
    POSTING,
    REFUSED,
    REGISTERED,
    SEEN,
    Entry,
    SpoolState,
)
from lachesis.trajectories import JsonlError, JsonlWriter, read_lines

T = TypeVar("T")

SEGMENT_BYTES = 256 << 20
"""Size from which on a new file is begun."""

_HEADER_BYTES = 1 << 16
_PAYLOAD = b',"payload":'
_READ = 1 << 18


class SpoolError(Exception):
    """The spool cannot be written or read; names the file, the reason and the next step."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the payload of a group lies."""

    segment: int
    offset: int
    size: int


class Spool:
    """One run's spool.

    Args:
        folder: made when missing.
        settings: what decides the content of groups; a second start must have the same.
        keep_delivered: keep the files of groups that are delivered.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        keep_delivered: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.folder = folder
        self.state = SpoolState()
        self._settings = orjson.loads(orjson.dumps(dict(settings), default=str, option=orjson.OPT_SORT_KEYS))
        self._keep = keep_delivered
        self._segment_bytes = segment_bytes
        self._places: dict[int, _Place] = {}
        self._live: Counter[int] = Counter()
        self._next_seq = 0
        self._segment = 0
        self._file: AppendFile | None = None
        self._marks: AppendFile | None = None
        self._lock: IO[str] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spool")

    async def open(self) -> None:
        """Take the folder and read what earlier starts left.

        Raises:
            RunFolderError: not writable, in use by another run, or made with other settings.
            SpoolError: a file in it is damaged.
        """
        await finish(self._in_thread(self._open))

    async def close(self) -> None:
        await finish(self._in_thread(self._close))
        self._thread.shutdown()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the spool's thread, behind what it does already."""
        return await finish(self._in_thread(function, *args))

    async def append(
        self,
        payload: Mapping[str, Any],
        *,
        key: str,
        tokens: int,
        undelivered: int = 0,
        step: int = 0,
        record: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Write a group down; when this returns it will be delivered, whatever happens to this process.

        Args:
            payload: in Atropos' shape, without `env_id`.
            tokens: trained tokens in it.
            undelivered: sampled tokens of its rollouts that are not in it.
            step: the trainer's step when the group was begun.
            record: further fields of the line, e.g. the samples with their spans; they are not sent.

        Raises:
            GroupError: no trainer could use it; nothing was written.
            SpoolError: the disk does not take it.
        """
        entry = Entry(
            seq=self._next_seq,
            group_id=os.urandom(16).hex(),
            key=key,
            sequences=len(payload.get("tokens") or ()),
            tokens=tokens,
            undelivered=undelivered,
            step=step,
        )
        self._next_seq += 1
        return await finish(self._append(entry, payload, record or {}))

    async def body(self, entry: Entry, env_id: int) -> bytes:
        """The gzipped request that posts a group as environment `env_id`."""
        place = self._places[entry.seq]

        def read() -> bytes:
            return compress(self._payload(place, b'{"env_id":%d,' % env_id))

        return await asyncio.to_thread(read)

    async def payload(self, entry: Entry) -> bytes:
        """The group as it was appended, as JSON."""
        place = self._places[entry.seq]
        return await asyncio.to_thread(lambda: b"".join(self._payload(place, b"{")))

    # What became of groups; each is on the disk when it returns, `seen` excepted (a later one repeats it).

    async def registered(
        self,
        env_id: int,
        env: EnvDescription,
        *,
        batch_size: int,
        step: int,
        num_steps: int,
        restarted: bool,
        taken: int,
    ) -> None:
        """The API has taken the environment in.

        Args:
            restarted: its memory is new, so that the groups it had accepted have to be posted again,
            taken: but for so many, the oldest, which a trainer got before.
        """
        await self._mark(
            do=REGISTERED,
            env_id=env_id,
            env=asdict(env),
            batch_size=batch_size,
            step=step,
            num_steps=num_steps,
            restarted=restarted,
            taken=taken,
        )

    async def disconnected(self) -> None:
        await self._mark(do=DISCONNECTED)

    async def posting(self, entry: Entry, *, env_id: int, step: int, alone: bool) -> None:
        """The group is about to be posted: from now on it is in doubt. `alone`: there is no other environment."""
        await self._mark(do=POSTING, entry=entry.to_record(), env_id=env_id, step=step, alone=alone)

    async def accepted(self, *, buffer: int = 0) -> None:
        """The group in doubt is in the API's memory."""
        await self._mark(do=ACCEPTED, buffer=buffer)

    async def back(self, *, unsure: bool = False) -> None:
        """The group in doubt did not arrive, or nobody can tell (`unsure`): it waits again, in front."""
        await self._mark(do=BACK, unsure=unsure)

    async def refused(self, reason: str) -> None:
        """The group in doubt will never be taken."""
        await self._mark(do=REFUSED, reason=reason)

    async def left_out(self, key: str, reason: str, tokens: int) -> None:
        """A group that was never appended: its item is dealt with, its `tokens` sampled tokens are not delivered."""
        await self._mark(do=LEFT_OUT, key=key, reason=reason, tokens=tokens)

    async def seen(self, env_id: int, *, step: int, sequences: int) -> None:
        """The API is at `step` and holds at most `sequences` sequences that were posted as `env_id`."""
        known = self.state.known
        if (known is None or step <= known.step) and self.state.in_api[env_id] <= sequences:
            return
        await self._mark(do=SEEN, env_id=env_id, step=step, sequences=sequences, flush=False)

    # Files.

    async def _mark(self, *, flush: bool = True, **event: Any) -> None:
        await finish(self._write_mark(event, flush))

    async def _write_mark(self, event: dict[str, Any], flush: bool) -> None:
        marks = _opened(self._marks)
        await self._in_thread(marks.append, orjson.dumps(event) + b"\n", flush)
        await self._forget(self.state.apply(event))

    async def _append(self, entry: Entry, payload: Mapping[str, Any], record: Mapping[str, Any]) -> Entry:
        self._places[entry.seq] = await self._in_thread(self._write_group, entry, payload, record)
        self.state.add(entry)
        return entry

    def _write_group(self, entry: Entry, payload: Mapping[str, Any], record: Mapping[str, Any]) -> _Place:
        overrides = {**(payload.get("group_overrides") or {}), "group_id": entry.group_id}
        pieces = encode_group({**payload, "group_overrides": overrides})
        size = sum(map(len, pieces))
        header = orjson.dumps({**entry.to_record(), "size": size})[:-1] + _PAYLOAD
        extra = [piece for name, value in record.items() for piece in _field(name, value)]
        file = _opened(self._file)
        if file.size >= self._segment_bytes:
            following = AppendFile(self._path(self._segment + 1))  # where that fails, the old one stays in use
            file.close()
            self._segment += 1
            self._file = file = following
            self._delete_if_settled(self._segment - 1)
        start = file.append(b"".join([header, *pieces, *extra, b"}\n"]), True)
        self._live[self._segment] += 1
        return _Place(self._segment, start + len(header), size)

    async def _forget(self, settled: Sequence[Entry]) -> None:
        if segments := [self._places.pop(entry.seq).segment for entry in settled]:
            await self._in_thread(self._settle, segments)

    def _settle(self, segments: Sequence[int]) -> None:
        # Counted in the thread that writes: what it has just written is not known to the loop yet, and is alive.
        for segment in segments:
            self._live[segment] -= 1
            self._delete_if_settled(segment)

    def _delete_if_settled(self, segment: int) -> None:
        if not self._live[segment] and segment != self._segment and not self._keep:
            with suppress(OSError):  # the next start tries again
                self._path(segment).unlink()

    def _payload(self, place: _Place, start: bytes) -> Iterator[bytes]:
        """`start` instead of the payload's opening brace, then the rest of it, in pieces."""
        yield start
        path = self._path(place.segment)
        try:
            with path.open("rb") as file:
                file.seek(place.offset + 1)
                left = place.size - 1
                while left:
                    piece = file.read(min(_READ, left))
                    if not piece:
                        raise SpoolError(f"{path} is shorter than it was; it has been changed by somebody else")
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise SpoolError(f"{path} cannot be read: {error.strerror or error}") from error

    def _open(self) -> None:
        taken = f"another run uses {self.folder}; wait for it or choose another path"
        self._lock = take_lock(self.folder / "lock", taken=taken)
        try:
            self._compare_settings()
            self._read()
        except BaseException:
            self._close()
            raise

    def _compare_settings(self) -> None:
        manifest = self.folder / "manifest.json"
        if not manifest.exists():
            write_manifest(manifest, self._settings)
            return
        try:
            changed = changes(orjson.loads(manifest.read_bytes()), self._settings)
        except (OSError, ValueError, AttributeError) as error:
            raise RunFolderError(f"{manifest} cannot be read ({error}); choose another path") from error
        if changed:
            raise RunFolderError(
                f"the groups in {self.folder} were made with other settings ({changed}); start with the same ones to "
                "deliver the rest of them, or choose another path (env.spool_path)"
            )

    def _read(self) -> None:
        """Groups from the files, then their fates from the marks, in the order in which both happened."""
        segments = sorted(int(path.stem) for path in self.folder.glob("[0-9]*.jsonl"))
        # The last group may be torn; opening the file for writing moves that tail away.
        self._segment = segments[-1] if segments else 0
        self._file = AppendFile(self._path(self._segment))
        for segment in segments:
            for entry, place in _entries(self._path(segment), segment):
                self._places[entry.seq] = place
                self._live[segment] += 1
                self.state.add(entry)
        path = self.folder / "marks.jsonl"
        self._marks = AppendFile(path)
        posted = -1
        settled: list[Entry] = []
        for event in read_lines(path):
            settled += self.state.apply(event)
            posted = max(posted, event["entry"]["seq"] if event["do"] == POSTING else -1)
        self._next_seq = max(posted, *self._places, -1) + 1
        for entry in settled:
            if entry.seq in self._places:
                self._live[self._places.pop(entry.seq).segment] -= 1
        state = self.state
        for entry in (*state.waiting, *state.lost_by_restart()):
            if entry.seq not in self._places:
                raise SpoolError(
                    f"group {entry.seq} of {self.folder} is not delivered, and its file is gone; put the file back, or "
                    "choose another folder to go on without it"
                )
        if not self._keep:
            for segment in segments[:-1]:
                if not self._live[segment]:
                    self._path(segment).unlink(missing_ok=True)

    def _close(self) -> None:
        for file in (self._file, self._marks, self._lock):
            if file is not None:
                file.close()
        self._file = self._marks = self._lock = None

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:06}.jsonl"

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


class AppendFile:
    """A JSONL file that is only appended to; blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with JsonlWriter(path, fsync=True):  # moves a torn last line away, and keeps the file's name
                pass
        except JsonlError as error:
            raise SpoolError(f"{error}, then start again: what was written stays") from error
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise self._error(error) from error

    def append(self, line: bytes, flush: bool) -> int:
        """Write a line, whole or not at all; where it begins."""
        start, view = self.size, memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            if flush:
                os.fdatasync(self._fd)
        except OSError as error:
            with suppress(OSError):  # the next start mends what stays
                os.ftruncate(self._fd, start)
            raise self._error(error) from error
        self.size = start + len(line)
        return start

    def close(self) -> None:
        """Closed once only: by the second time the number may be that of another file, or of a socket."""
        number, self._fd = self._fd, -1
        if number >= 0:
            os.close(number)

    def _error(self, error: OSError) -> SpoolError:
        return SpoolError(
            f"{self.path} cannot be written: {error.strerror or error}; make room or choose another folder, "
            "then start again: what was written stays"
        )


def _entries(path: Path, segment: int) -> Iterator[tuple[Entry, _Place]]:
    """The groups of a file without their contents: reads a header a group."""
    with path.open("rb") as file:
        start = 0
        number = 0
        while head := _head(file, start):
            number += 1
            header, found, _ = head.partition(_PAYLOAD)
            try:
                if not found:
                    raise ValueError("no group")
                record = orjson.loads(header + b"}")
                place = _Place(segment, start + len(header) + len(_PAYLOAD), int(record["size"]))
                yield Entry.from_record(record), place
            except (ValueError, KeyError, TypeError) as error:
                raise SpoolError(
                    f"{path}, line {number}: not a spooled group ({error}); move the file away to go on without it"
                ) from error
            start = _next_line(file, place.offset + place.size)


def _head(file: IO[bytes], start: int) -> bytes:
    file.seek(start)
    return file.read(_HEADER_BYTES)


def _next_line(file: IO[bytes], start: int) -> int:
    """Where the line after the one that holds position `start` begins."""
    file.seek(start)
    while piece := file.read(_READ):
        if (end := piece.find(b"\n")) >= 0:
            return start + end + 1
        start += len(piece)
    return start


def _field(name: str, value: Any) -> Iterator[bytes]:
    """One more field of a line; a list in pieces, since orjson holds the GIL while it works."""
    yield b"," + orjson.dumps(name) + b":"
    if not isinstance(value, list | tuple):
        yield encode_json(value)
        return
    yield b"["
    for at, entry in enumerate(value):
        yield (b"," if at else b"") + encode_json(entry)
    yield b"]"


def _opened(file: AppendFile | None) -> AppendFile:
    if file is None:
        raise RuntimeError("the spool is not open; use it between open() and close()")
    return file
