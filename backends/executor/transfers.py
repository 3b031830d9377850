"""Transfers: files and folders that are moved part by part, one request a part."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import select
import signal
import time
from typing import TYPE_CHECKING

from .files import Upload, open_regular
from .folders import pack, unpack
from .framing import CHUNK, failure
from .kernel import F_SETPIPE_SZ, FILES, PR_SET_PDEATHSIG, close_all, libc
from .processes import send_signal

if TYPE_CHECKING:
    from .services import Services

STALL = 30.0
"""Seconds without progress after which the process that packs or unpacks a folder is killed."""


class OpenTransfer:
    """A file or a folder that is open for transfer."""

    has_files = True

    def __init__(self, services: Services, path: str, most: float = math.inf) -> None:
        """`most` bounds the members of a folder that is packed."""
        self.loop, self.session = services.loop, services.session

    def pull(self, request: int) -> None:
        raise OSError(errno.EBADF, "this transfer cannot be pulled")

    def push(self, request: int, data: bytes) -> None:
        raise OSError(errno.EBADF, "this transfer cannot be pushed")

    def commit(self, request: int) -> None:
        raise OSError(errno.EBADF, "this transfer cannot be committed")

    def drop(self) -> None:
        raise NotImplementedError


class FileReader(OpenTransfer):
    def __init__(self, services: Services, path: str, most: float = math.inf) -> None:
        super().__init__(services, path)
        self.file = open(open_regular(path), "rb", buffering=0)

    def pull(self, request: int) -> None:
        data = b""
        while len(data) < CHUNK:
            part = self.file.read(CHUNK - len(data))  # files of /proc return a page at a time
            data += part
            if not part:
                break
        self.session.send({"id": request, "end": not part}, data)

    def drop(self) -> None:
        self.file.close()


class FileWriter(OpenTransfer):
    def __init__(self, services: Services, path: str, most: float = math.inf, mode: int | None = None) -> None:
        super().__init__(services, path)
        self.upload = Upload(path, mode)
        self.done = False

    def push(self, request: int, data: bytes) -> None:
        self.upload.feed(data)
        self.session.send({"id": request})

    def commit(self, request: int) -> None:
        self.upload.close(keep=True)
        self.done = True
        self.session.send({"id": request})

    def drop(self) -> None:
        if not self.done:
            self.upload.close(keep=False)


class FolderTransfer(OpenTransfer):
    """A folder that a forked child packs or unpacks through a pipe."""

    packing = False

    def __init__(self, services: Services, path: str, most: float = math.inf) -> None:
        super().__init__(services, path)
        self.waiting: list[tuple[int, memoryview | None]] = []
        """Requests without an answer, and what is left of the data of each."""
        self.report = open(os.memfd_create("report"), "r+b", buffering=0)
        self.exit_code: int | None = None
        self.result: OSError | None = None
        self.progress = time.monotonic()
        self.watching = False
        ends = os.pipe()
        self.pipe, theirs = ends if self.packing else reversed(ends)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.pipe, F_SETPIPE_SZ, 1 << 20)
        os.set_blocking(self.pipe, False)
        try:
            self.pid = services.shells.fork()
        except OSError:
            close_all([*ends])
            raise
        if self.pid == 0:
            self.be_child(theirs, path, most)
        os.close(theirs)
        services.shells.children[self.pid] = self.on_exit

    def be_child(self, pipe: int, path: str, most: float) -> None:
        """Never returns. The child stays undumpable: its memory is a copy of the executor's."""
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(pipe, 0)
            os.dup2(self.report.fileno(), 1)
            os.closerange(3, min(FILES[1], 1 << 16))
            if self.packing:
                with os.fdopen(0, "wb", CHUNK) as file:
                    pack(path, file, most)
            else:
                with os.fdopen(0, "rb", CHUNK) as file:
                    unpack(file, path)
            os._exit(0)
        except BaseException as error:
            if not isinstance(error, BrokenPipeError):  # the transfer was dropped
                os.write(1, json.dumps(failure(0, error)).encode())
        finally:
            os._exit(1)

    def on_exit(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.conclude()

    def error(self) -> OSError:
        """Why the child failed."""
        if self.result is not None:
            return self.result
        report = os.pread(self.report.fileno(), 1 << 16, 0)
        try:
            reported = json.loads(report.decode())["error"]
        except ValueError:
            return OSError(errno.EIO, "the process that moves the folder was killed (exit code %s)" % self.exit_code)
        return OSError(reported["errno"] or errno.EIO, reported["message"], reported.get("path"))

    def conclude(self) -> None:
        """Answer what waits, once the child has ended and all that it wrote is read."""
        if self.exit_code is None or (self.packing and self.pipe >= 0):
            return
        self.close_pipe()
        waiting, self.waiting = self.waiting, []
        done = {"end": True} if self.packing else {}
        for request, data in waiting:
            failed = self.exit_code or data is not None
            self.session.send(failure(request, self.error()) if failed else dict(done, id=request))

    def wait(self, request: int, data: bytes | None) -> None:
        self.waiting.append((request, None if data is None else memoryview(data)))
        self.on_progress()

    def on_progress(self) -> None:
        self.progress = time.monotonic()
        if self.waiting and not self.watching:
            self.watching = True
            self.loop.after(STALL, self.on_stall)

    def on_stall(self) -> None:
        """Fail the transfer, not the sandbox, when a process inside has stopped the child."""
        self.watching = False
        if self.exit_code is not None or not self.waiting:
            return
        left = self.progress + STALL - time.monotonic()
        if left > 0:
            self.watching = True
            self.loop.after(left, self.on_stall)
        else:
            self.result = OSError(errno.ETIMEDOUT, "the process that moves the folder makes no progress")
            send_signal(self.pid, signal.SIGKILL)

    def close_pipe(self) -> None:
        if self.pipe >= 0:
            self.loop.unwatch(self.pipe)
            os.close(self.pipe)
            self.pipe = -1

    def drop(self) -> None:
        self.close_pipe()
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGKILL)


class FolderPacker(FolderTransfer):
    packing = True

    def pull(self, request: int) -> None:
        self.wait(request, None)
        if self.pipe >= 0:
            self.loop.watch(self.pipe, select.EPOLLIN, self.on_readable)
        else:
            self.conclude()

    def on_readable(self, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if data:
            self.session.send({"id": self.waiting.pop(0)[0], "end": False}, data)
            self.on_progress()
            if not self.waiting:
                self.loop.unwatch(fd)
        else:
            self.close_pipe()
            self.conclude()


class FolderUnpacker(FolderTransfer):
    def push(self, request: int, data: bytes) -> None:
        self.wait(request, data)
        self.on_writable(self.pipe)

    def commit(self, request: int) -> None:
        self.wait(request, None)
        self.on_writable(self.pipe)

    def on_writable(self, fd: int) -> None:
        try:
            while self.waiting and self.pipe >= 0:
                request, data = self.waiting[0]
                if data is None:  # the end
                    self.close_pipe()
                elif data:
                    self.waiting[0] = (request, data[os.write(fd, data) :])
                    self.progress = time.monotonic()
                else:
                    del self.waiting[0]
                    self.session.send({"id": request})
        except BlockingIOError:
            self.loop.watch(fd, select.EPOLLOUT, self.on_writable)
            return
        except BrokenPipeError:  # it has failed, and reports why at its end
            self.close_pipe()
        if self.pipe >= 0:
            self.loop.unwatch(self.pipe)
        self.conclude()
