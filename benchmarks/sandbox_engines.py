"""The backends that benchmarks measure, with private engines that end with the benchmark, and the processes of all of
them, which are descendants of one parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backends import Backend, BackendUnavailable, create_backend
from tests.support.docker_engine import FULL_IMAGE, docker_engine
from tests.support.root_images import full_root
from tests.support.singularity_engine import singularity_engine
from tests.support.ssh_engine import ssh_engine

VARIANTS = ("local-bubblewrap", "local-none", "docker", "singularity", "ssh", "modal")
ENDING = 10.0
"""How many seconds processes have to end after everything is closed."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    backend: Backend


@contextlib.asynccontextmanager
async def variants(names: Sequence[str]) -> AsyncIterator[list[Variant]]:
    """The backends that work here, in this order. Prints why others do not."""
    with contextlib.ExitStack() as stack:
        roots = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lachesis-bench-")))
        found = []
        for name in names:
            try:
                backend = _backend(name, roots, stack)
                availability = await backend.check()
                if not availability.ok:
                    raise BackendUnavailable(f"{availability.detail}; {availability.fix}")
            except (RuntimeError, BackendUnavailable) as error:
                print(f"{name} is skipped: {error}")
                continue
            found.append(Variant(name, backend))
        yield found


def _backend(name: str, roots: Path, stack: contextlib.ExitStack) -> Backend:
    if name == "docker":
        docker = stack.enter_context(docker_engine(roots, [FULL_IMAGE]))
        return create_backend("docker", **docker.options)
    if name == "singularity":
        return create_backend("singularity", **stack.enter_context(singularity_engine(roots)).options)
    if name == "ssh":
        return create_backend("ssh", **stack.enter_context(ssh_engine()).options)
    if name == "modal":
        return create_backend("modal", client=stack.enter_context(_modal_client(roots)))
    return create_backend("local", isolation=name.removeprefix("local-"))


@contextlib.contextmanager
def _modal_client(roots: Path) -> Iterator[Any]:
    """A client of the fake Modal server, which runs in a separate process to take no processor time from this one."""
    try:
        import modal
        from modal_proto import api_pb2
    except ModuleNotFoundError as error:
        raise RuntimeError(f"the package {error.name} is missing") from error
    folder = roots / "modal"
    folder.mkdir()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_modal, args=(theirs, folder, full_root(roots / "full")))
    process.start()
    theirs.close()
    try:
        if not ours.poll(60):
            raise RuntimeError("the fake Modal server does not start")
        url, credentials = ours.recv()

        async def connect() -> modal.Client:
            client = modal.Client(url, api_pb2.CLIENT_TYPE_CLIENT, credentials)
            await client.__aenter__()  # type: ignore[no-untyped-call]
            return client

        with ThreadPoolExecutor(1) as thread:  # a thread, so that the client belongs to no event loop but the SDK's
            client = thread.submit(lambda: asyncio.run(connect())).result()
            try:
                yield client
            finally:
                thread.submit(client.close).result()
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()


def _serve_modal(pipe: Connection, folder: Path, root: Path) -> None:
    from tests.support.modal_server import ModalServer

    with ModalServer(folder, root=root) as server:
        pipe.send((server.url, server.credentials))
        with contextlib.suppress(EOFError):
            pipe.recv()


def supervised(work: Callable[[], int]) -> int:
    """Do the work in a child of this process, which adopts every orphan of that child.

    Processes that remain are named and killed, and the exit code is then 1.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        return work()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child gets the signal as well
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    code = None
    while code is None:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
    end = time.monotonic() + ENDING
    while not _none_left():
        if time.monotonic() > end:
            left = below(os.getpid())
            names = ", ".join(sorted(_command(pid) for pid in left))
            print(f"{len(left)} processes remain, and are killed: {names}", file=sys.stderr)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return 1
        time.sleep(0.02)
    return code


def _none_left() -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
        return False
    return True


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80].strip()
    except OSError:
        return "?"


def below(ancestor: int) -> list[int]:
    """Process ids of all descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found, todo = [], [ancestor]
    while todo:
        born = children.get(todo.pop(), [])
        found += born
        todo += born
    return found


def memory_of_others() -> float:
    """MB of PSS of all descendants of `supervised` but this process: sandboxes, engines, helpers.

    Raises:
        PermissionError: only root may examine processes that are not dumpable.
    """
    total = 0
    for pid in below(os.getppid()):
        if pid != os.getpid():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1])
    return total / 1024
