"""An executor that somebody inside has replaced: whatever it sends, its owner gets a `BackendError` or an `OSError`, in
bounded time and memory, and nothing is written outside the folder of a download."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import json
import math
import os
import resource
import socket
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends import BackendError, SandboxExhausted, SandboxSpec
from backends.connection import Connection, asyncio_stream
from backends.executor.archive import FILE, FOLDER, LINK, Member, header
from backends.executor.framing import FRAME, encode
from backends.sandbox import ExecutorSandbox, initialise

HELLO = {"id": 0, "hello": 2, "pid": 1, "python": [3, 11, 0]}
HONEST: dict[str, dict[str, Any]] = {
    "init": {"python": None, "unfiltered": ""},
    "exec": {
        "execution": "e1",
        "exit_code": 0,
        "timed_out": False,
        "stdout": 0,
        "stdout_elided": 0,
        "stderr_elided": 0,
        "duration": 0.1,
    },
    "start": {"process": "p1"},
    "processes": {"processes": [["p1", "sleep 1"]]},
    "status": {"exit_code": None, "output_size": 0},
    "output": {"offset": 0, "exit_code": None},
    "stat": {"path": "/a", "mode": 0o100644, "size": 1},
    "pull": {"end": True},
    "listen": {"port": 1},
    "accept": {"refused": 0},
}
Answer = Callable[[dict[str, Any]], Iterator[bytes]]


def honest(request: dict[str, Any]) -> Iterator[bytes]:
    yield encode({"id": request["id"], **HONEST.get(request["op"], {})})


@contextlib.asynccontextmanager
async def fake(answer: Answer) -> AsyncIterator[ExecutorSandbox]:
    """A sandbox whose executor is honest until it is ready, and then sends what `answer` makes of each request."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=theirs)

    async def serve() -> None:
        writer.write(encode(HELLO))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                sizes = FRAME.unpack(await reader.readexactly(FRAME.size))
                request = json.loads(await reader.readexactly(sizes[0]))
                await reader.readexactly(sizes[1])
                if "id" in request:
                    for data in (honest if request["op"] == "init" else answer)(request):
                        writer.write(data)
                        await writer.drain()

    serving = asyncio.create_task(serve())
    connection = Connection(asyncio_stream(*await asyncio.open_unix_connection(sock=ours)))
    connection.ended.add_done_callback(
        lambda ended: connection.fail(f"it has ended: {ended.result()}")
    )  # as backends do
    await initialise(connection, SandboxSpec(), workdir="/", env={})
    try:
        yield ExecutorSandbox(connection, id="fake", workdir="/", python=None)
    finally:
        connection.fail("the test is over")
        serving.cancel()
        writer.close()
        await asyncio.wait([serving])


async def every_call(sandbox: ExecutorSandbox, folder: Path) -> list[BaseException | None]:
    """What each kind of request raises."""

    async def forward() -> None:
        async with sandbox.forward("127.0.0.1", 1):
            pass

    async def chunks() -> None:
        async for _ in sandbox.read_chunks("a"):
            pass

    process = await sandbox.start("sleep 1") if await raised(sandbox.start("sleep 1")) is None else None
    calls = [sandbox.exec("true", timeout=1), sandbox.processes(), sandbox.read_bytes("a"), sandbox.stat("a")]
    calls += [sandbox.write_bytes("a", b""), chunks(), forward(), sandbox.download_dir("a", folder / "to")]
    calls += [] if process is None else [process.status(), process.read(), process.kill()]
    return [await raised(call) for call in calls]


async def raised(call: Any) -> BaseException | None:
    try:
        async with asyncio.timeout(60):
            await call
    except Exception as error:
        return error
    return None


def is_typed(error: BaseException | None) -> bool:
    return error is None or (isinstance(error, BackendError | OSError) and not isinstance(error, TimeoutError))


ODD = [None, True, -1, 1.5, math.nan, math.inf, 10**400, "", "x", "\ud800", [], {}, [[1, 2]], {"errno": "x"}]


async def test_an_answer_of_any_shape_is_a_typed_error(tmp_path: Path) -> None:
    assert all(is_typed(error) for error in await each(honest, tmp_path))
    fields = sorted({name for fields in HONEST.values() for name in fields} | {"error"})
    for name, value in itertools.product(fields, ODD):

        def answer(request: dict[str, Any], name: str = name, value: object = value) -> Iterator[bytes]:
            yield encode({"id": request["id"], **HONEST.get(request["op"], {}), name: value})
            yield encode({"id": 0, "bye": value, "ack": value})

        errors = await each(answer, tmp_path)
        assert all(is_typed(error) for error in errors), (name, value, errors)
    for value in ODD:
        for inner in ("errno", "message", "path"):
            error = {"errno": 2, "message": "no", "path": "/a", inner: value}

            def failing(request: dict[str, Any], error: object = error) -> Iterator[bytes]:
                yield encode({"id": request["id"], "error": error})

            errors = await each(failing, tmp_path)
            assert all(is_typed(error) for error in errors), (inner, value, errors)


async def each(answer: Answer, folder: Path) -> list[BaseException | None]:
    async with fake(answer) as sandbox:
        return await every_call(sandbox, folder)


def frame(header: bytes, payload: bytes = b"", sizes: tuple[int, int] | None = None) -> bytes:
    return FRAME.pack(*(sizes or (len(header), len(payload)))) + header + payload


def flood(of: Callable[[int], bytes], size: int) -> Answer:
    def answer(request: dict[str, Any]) -> Iterator[bytes]:
        part = b"".join(of(request["id"]) for _ in range(1000))
        for _ in range(size // len(part) + 1):
            yield part

    return answer


STREAMS: dict[str, Answer] = {
    "a payload of 4 GiB": flood(lambda id: frame(b'{"id": %d}' % id, b"x" * (1 << 16), (9, 2**32 - 1)), 1 << 28),
    "a header of 4 GiB": flood(lambda id: b"\xff" * (1 << 16), 1 << 28),
    "an answer without end": flood(lambda id: encode({"id": id, "more": True}, b"x" * (1 << 16)), 1 << 30),
    "brackets": lambda request: iter([frame(b"[" * 100_000)]),
    "a list": lambda request: iter([frame(b"[1]")]),
    "no UTF-8": lambda request: iter([frame(b"\xff\xfe")]),
    "no id": lambda request: iter([frame(b"{}")]),
    "a long reason": lambda request: iter(
        [encode({"id": request["id"], "error": {"errno": 2, "message": "x" * 10**7}})]
    ),
    "a long goodbye": lambda request: iter([encode({"id": 0, "bye": "x" * 10**7}), b"\xff" * 8]),
    "zeros": lambda request: iter([bytes(1 << 20)]),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_hostile_stream_ends_the_sandbox_in_bounded_memory(name: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for error in await each(STREAMS[name], tmp_path):
        assert isinstance(error, BackendError | OSError) and len(str(error)) < 10_000, error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown < 600, f"{grown} MiB"  # twice what `read_bytes` may return


def packed(*members: Member | bytes) -> Answer:
    """A folder that is pulled as a tar archive of these."""
    data = b"".join(header(each) if isinstance(each, Member) else each for each in members) + bytes(1024)
    return pulled(data[begin : begin + (1 << 18)] for begin in range(0, len(data), 1 << 18))


def pulled(parts: Any) -> Answer:
    parts = iter(parts)

    def answer(request: dict[str, Any]) -> Iterator[bytes]:
        if request["op"] != "pull":
            return honest(request)
        part = next(parts, None)
        return iter([encode({"id": request["id"], "end": part is None}, part or b"")])

    return answer


async def download(answer: Answer, folder: Path, **bounds: int) -> BaseException | None:
    async with fake(answer) as sandbox:
        return await raised(sandbox.download_dir("a", folder / "in" / "to", **bounds))


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


async def test_each_member_makes_one_file_or_folder(tmp_path: Path) -> None:
    """`max_members` could not count more."""
    deep = [Member(FILE, f"{number}/" + "d/" * 200 + "f", 0, 0o644, 0) for number in range(100)]
    error = await download(packed(*deep, Member(FILE, "one", 0, 0o644, 0)), tmp_path, max_members=1000)
    assert isinstance(error, OSError) and error.errno == errno.EPERM and "did not come before" in str(error)
    assert everything(tmp_path) == {"in", "in/to", "in/to/one"}


def pax() -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(tarfile.TarInfo("\u00e9" * 5000))
        return file.getvalue()


def endless(*blocks: Member | bytes) -> Answer:
    data = b"".join(header(each) if isinstance(each, Member) else each for each in blocks)
    data *= (1 << 16) // len(data) + 1
    return pulled(itertools.repeat(data))


ARCHIVES: dict[str, Answer] = {
    "folders without end": endless(Member(FOLDER, "a", 0, 0o777, 0)),
    "files without end": endless(Member(FILE, "a", 0, 0o777, 0)),
    "a file without end": pulled(
        itertools.chain([header(Member(FILE, "a", 1 << 80, 0, 0))], itertools.repeat(b"x" * 1000))
    ),
    "a file that lies": pulled([header(Member(FILE, "a", 1 << 20, 0, 0)), b"x" * 1000]),
    "a file of less than nothing": packed(Member(FILE, "a", -5, 0, 0)),
    "a long name": packed(Member(FILE, "a" * 5000, 0, 0, 0)),
    "a name that is too long here": packed(Member(FILE, "a" * 300, 0, 0, 0)),
    "a deep name": packed(Member(FOLDER, "a/" * 300, 0, 0, 0)),
    "no name": packed(Member(LINK, "", 0, 0, 0, "a")),
    "a link without a target": packed(Member(LINK, "a", 0, 0, 0)),
    "an absolute name": packed(Member(FILE, "/etc/lachesis-hostile", 0, 0, 0)),
    "a way out": packed(Member(FILE, "../../../lachesis-hostile", 0, 0, 0)),
    "a link out": packed(Member(LINK, "a", 0, 0, 0, "../b"), Member(FILE, "a/b", 0, 0, 0)),
    "a link as a parent": packed(
        Member(FOLDER, "a", 0, 0, 0), Member(LINK, "l", 0, 0, 0, "a"), Member(FILE, "l/b", 0, 0, 0)
    ),
    "links in a circle": packed(
        Member(LINK, "a", 0, 0, 0, "b"), Member(LINK, "b", 0, 0, 0, "a"), Member(FOLDER, "a/c", 0, 0, 0)
    ),
    "a hard link": packed(Member(b"1", "a", 0, 0, 0, "/etc/passwd")),
    "a device": packed(Member(b"3", "a", 0, 0o666, 0)),
    "a FIFO": packed(Member(b"6", "a", 0, 0o666, 0)),
    "names without end": endless(header(Member(FILE, "n" * 200, 0, 0, 0))[:1024]),
    "another format": pulled([pax()]),
    "no archive": pulled([os.urandom(1 << 18)]),
    "nothing": pulled([]),
    "half a header": pulled([b"x" * 100]),
    "a time out of range": packed(Member(FILE, "a", 0, 0o4777, 1 << 70)),
    "bytes that are no text": packed(Member(FILE, "\udcff\n\x1b[2J", 0, 0, 0)),
}


@pytest.mark.parametrize("name", ARCHIVES)
async def test_a_hostile_archive_writes_nothing_outside_its_folder(name: str, tmp_path: Path) -> None:
    error = await download(ARCHIVES[name], tmp_path, max_bytes=1 << 22, max_members=2000)
    assert isinstance(error, OSError) or name in ("a time out of range", "bytes that are no text"), error
    assert str(error).isprintable() and len(str(error)) < 10_000
    found = everything(tmp_path)
    assert all(path.startswith("in/to") for path in found - {"in"}) and len(found) < 6, found
    assert not Path("/etc/lachesis-hostile").exists()
    for path in tmp_path.rglob("*"):
        assert path.is_symlink() or path.is_dir() or (path.is_file() and not path.stat().st_mode & 0o7000)


@pytest.mark.parametrize("number", [errno.ENFILE, errno.ENOSPC, errno.EIO, errno.EPERM, errno.ENOENT, errno.ENOSYS])
async def test_what_other_sandboxes_can_use_up_is_not_blamed_on_this_one(number: int) -> None:
    """ENOSPC: terminals, of which the kernel has 4096 for all sandboxes together."""

    def answer(request: dict[str, Any]) -> Iterator[bytes]:
        yield encode({"id": request["id"], "error": {"errno": number, "message": os.strerror(number), "path": None}})

    async with fake(answer) as sandbox:
        for call in (sandbox.exec("true", timeout=1), sandbox.start("true"), sandbox.open_pty("true")):
            error = await raised(call)
            assert isinstance(error, BackendError) and not isinstance(error, SandboxExhausted), error
