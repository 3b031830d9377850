"""Background processes, with their output and input."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import termios
from typing import TYPE_CHECKING

from .framing import failure
from .jobs import Job, discard
from .kernel import close_all
from .output import Ring
from .shell import encode_environment, shell_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from .framing import Header
    from .services import Services


class Background(Job):
    """A process of `start`. Its last output is kept in a ring buffer until the sandbox ends."""

    def __init__(self, services: Services, request: Header, on_end: Callable[[], None]) -> None:
        super().__init__(services, request["command"])
        self.on_end = on_end
        self.ring = Ring()
        self.waiting: dict[int, tuple[int, int]] = {}  # request id: (offset, limit)
        self.writing: list[tuple[int, memoryview, bool]] = []
        self.killed = 137
        self.stdin = -1
        self.timer = self.loop.after(services.wall_time, self.on_wall_time)
        fds: list[int] = []
        try:
            arguments = shell_arguments(self.shells.bash, self.command, stateful=False)
            env = encode_environment(dict(self.shells.state.env, **(request.get("env") or {})))
            if request.get("terminal"):
                rows, columns = request["terminal"]
                self.terminal, given = os.openpty()
                fds += [given, given, given]
                self.drain(self.terminal, self.on_data)
                self.stdin = os.dup(self.terminal)
                fcntl.ioctl(given, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            else:
                given, self.stdin = os.pipe()
                fds += [given]
                fds += [self.pipe(self.on_data)] * 2
            os.set_blocking(self.stdin, False)
        except BaseException:
            close_all(fds)
            self.release()
            self.close_stdin()
            raise
        self.spawn(fds, arguments, request.get("cwd"), env, {})

    def adopt(self, pid: int) -> None:
        super().adopt(pid)
        self.shells.reused[pid] = self.lose_number

    def lose_number(self) -> None:
        """The number is another process' now."""
        self.pid = -1

    def on_wall_time(self) -> None:
        if self.exit_code is None:
            self.killed = 124
            self.kill()

    def on_exit(self, exit_code: int) -> None:
        super().on_exit(self.killed if exit_code == 137 else exit_code)

    def on_data(self, data: bytes) -> None:
        self.ring.feed(data)
        self.answer_waiting()

    def answer_waiting(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for request, (offset, limit) in waiting.items():
            self.answer(request, offset, limit)

    def answer(self, request: int, offset: int, limit: int) -> None:
        offset, data = self.ring.read(offset, limit)
        self.session.send({"id": request, "offset": offset, "exit_code": self.shown_exit_code}, data)

    @property
    def shown_exit_code(self) -> int | None:
        """The exit code once the output is complete, so that a reader who sees it misses nothing."""
        return self.exit_code if self.finished else None

    def output(self, request: int, offset: int, wait: float, limit: int) -> None:
        if offset < self.ring.total or self.finished or wait <= 0:
            self.answer(request, offset, limit)
            return
        self.waiting[request] = (offset, limit)

        def enough() -> None:
            if request in self.waiting:
                self.answer(request, *self.waiting.pop(request))

        self.loop.after(wait, enough)

    def input(self, request: int, data: bytes, close: bool) -> None:
        if self.stdin < 0 or self.exit_code is not None:
            if not close:
                raise ProcessLookupError(errno.ESRCH, "the process has ended or its input is closed")
            self.session.send({"id": request})
            return
        if close and self.terminal >= 0:
            data, close = data + b"\x04", False
        self.writing.append((request, memoryview(data), close))
        self.on_writable(self.stdin)

    def on_writable(self, fd: int) -> None:
        try:
            while self.writing:
                request, data, close = self.writing[0]
                data = data[os.write(fd, data) :] if data else data
                self.writing[0] = (request, data, close)
                if data:
                    continue
                del self.writing[0]
                self.session.send({"id": request})
                if close:
                    self.close_stdin()
                    return
            self.loop.unwatch(fd)
        except BlockingIOError:
            self.loop.watch(fd, select.EPOLLOUT, self.on_writable)
        except OSError:
            self.close_stdin()

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            self.loop.unwatch(self.stdin)
            os.close(self.stdin)
            self.stdin = -1
        for request, _, close in self.writing:
            gone = ProcessLookupError(errno.ESRCH, "the process no longer reads its input")
            self.session.send({"id": request} if close else failure(request, gone))
        self.writing = []

    def finish(self) -> None:
        if not self.finished:
            self.finished = True
            self.timer[2] = None
            for fd in self.sinks:
                self.sinks[fd] = discard
            self.close_stdin()
            self.answer_waiting()
            self.on_end()
