"""Commands at work: a shell, the pipes it writes to, and what becomes of its result."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING

from .kernel import REPORT_FD, close_all, unread
from .output import Capped
from .processes import kill_tree, send_signal
from .shell import encode_environment, shell_arguments
from .wire import CHUNK, complain, failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from .executor import Executor
    from .loop import Timer
    from .wire import Header

GRACE = 0.05
"""Seconds that a finished shell's pipes may stay open before its result is sent without their end."""
REPORT = 1 << 22
"""Bytes of a shell's report that are looked at, from its end: what was written last counts."""
TAKING = 0.2
"""Seconds after which a shell that waits for a command, and has not taken it, is replaced."""


class Job:
    """A shell and the pipes that it writes to. It is finished after its exit and the end of its output, or GRACE."""

    def __init__(self, executor: Executor, command: str) -> None:
        self.executor = executor
        self.loop, self.session, self.shells = executor.loop, executor.session, executor.shells
        self.command = command
        self.pid = 0
        self.abandoned = False  # it is not to be started any more
        self.terminal = -1
        self.exit_code: int | None = None
        self.finished = False
        self.timer: Timer = [0.0, 0, None]
        self.sinks: dict[int, Callable[[bytes], None]] = {}

    def pipe(self, sink: Callable[[bytes], None]) -> int:
        """A new pipe that is drained into `sink`; returns the end to write to."""
        read_end, write_end = os.pipe()
        try:
            self.drain(read_end, sink)
        except OSError:
            os.close(write_end)
            raise
        return write_end

    def adopt(self, pid: int) -> None:
        """It runs, under this number."""
        self.pid = pid
        self.shells.children[pid] = self.on_exit
        for other in self.executor.processes.values():
            if other.pid == pid and other is not self:  # the number came round again: the ended one has lost its name
                other.pid = -1

    def drain(self, fd: int, sink: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.sinks[fd] = sink
        self.loop.watch(fd, select.EPOLLIN, self.on_output)

    def on_output(self, fd: int, limit: int = CHUNK) -> int:
        try:
            data = os.read(fd, limit)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: nobody holds the other end of a terminal any more
            data = b""
        if data:
            self.sinks[fd](data)
            return len(data)
        self.loop.unwatch(fd)
        os.close(fd)
        del self.sinks[fd]
        if self.exit_code is not None and not self.sinks:
            self.finish()
        return 0

    def on_exit(self, exit_code: int) -> None:
        """The shell has ended: all that it wrote is in the pipes now; a child of it may hold them open for ever."""
        self.exit_code = exit_code
        for fd in list(self.sinks):
            if fd == self.terminal:  # what is on its way through one is not counted
                for _ in range(64):
                    if not self.on_output(fd):
                        break
                continue
            waiting = unread(fd)
            while waiting > 0:
                waiting -= self.on_output(fd, waiting) or waiting
            if fd in self.sinks:
                self.on_output(fd, 1)  # sees the end, if it is there
        if self.sinks:
            self.loop.after(GRACE, self.finish)
        else:
            self.finish()

    def kill(self) -> None:
        """Kill the shell with everything that it started. It is stopped first, lest it carries on with its script."""
        self.abandoned = True
        if self.pid <= 0 or (self.exit_code is not None and os.path.exists("/proc/%d" % self.pid)):
            return  # by now its number is somebody else's, which it cannot be while anything is left of its session
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGSTOP)
        kill_tree(self.pid)
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """It could not be started: leave nothing behind."""
        self.finished = True
        self.timer[2] = None
        for fd in self.sinks:
            self.loop.unwatch(fd)
            os.close(fd)
        self.sinks = {}

    def finish(self) -> None:
        raise NotImplementedError


def discard(_: bytes) -> None:
    """Children that outlive their command keep writing: it is read, or they would block or die of SIGPIPE."""


class Exec(Job):
    """A command whose result somebody waits for."""

    def __init__(self, executor: Executor, request: Header, stdin: bytes) -> None:
        super().__init__(executor, request["command"])
        self.request = request["id"]
        self.timed_out = False
        self.report = -1
        self.cwd, self.env = request.get("cwd"), request.get("env") or {}
        self.fresh = request.get("fresh", False)
        if self.fresh:
            self.cwd = self.cwd or self.shells.state.workdir
        self.begin = time.monotonic()
        alike = self.cwd is None and not self.env and not request.get("stdin")
        self.spare = executor.spares.take(self.command) if alike else None  # it is at work from here on
        self.stdout, self.stderr = (Capped(request["max_output"], executor.new_spill) for _ in range(2))
        self.before = dict(self.shells.state.first if self.fresh else self.shells.state.env, **self.env)
        self.timer = self.loop.after(min(request["timeout"], executor.wall_time), self.on_timeout)
        if self.spare is None:
            self.begin_anew(stdin if request.get("stdin") else None)
            return
        self.report = self.spare.report
        self.drain(self.spare.stdout, self.stdout.feed)
        self.drain(self.spare.stderr, self.stderr.feed)
        self.adopt(self.spare.pid)
        self.loop.after(TAKING, self.on_taking)

    def begin_anew(self, stdin: bytes | None) -> None:
        """Start a shell for it. Raises, with nothing left behind, what is wrong with the request, or `OSError`."""
        fds: list[int] = []
        try:
            arguments = shell_arguments(self.shells.bash, self.command, stateful=True)
            env = encode_environment(self.before)
            fds.append(os.dup(self.shells.null) if stdin is None else os.memfd_create("stdin"))
            if stdin is not None:
                with open(os.dup(fds[0]), "wb") as file:
                    file.write(stdin)
                os.lseek(fds[0], 0, os.SEEK_SET)
            self.report = os.memfd_create("report")
            fds += [self.pipe(self.stdout.feed)]
            fds += [self.pipe(self.stderr.feed)]
        except BaseException:
            close_all(fds)
            self.release()
            raise
        self.shells.spawn(self, fds, arguments, self.cwd, env, {REPORT_FD: self.report})

    def release(self) -> None:
        super().release()
        if self.report >= 0:
            os.close(self.report)
            self.report = -1

    def on_taking(self) -> None:
        if self.spare is not None and not self.abandoned and not self.spare.has_begun():
            send_signal(self.pid, signal.SIGKILL)  # somebody inside has stopped it

    def on_exit(self, exit_code: int) -> None:
        spare, self.spare = self.spare, None
        if spare is None or self.abandoned or spare.has_begun():
            super().on_exit(exit_code)
            return
        for fd in self.sinks:
            self.loop.unwatch(fd)
            os.close(fd)
        self.sinks = {}
        os.close(self.report)
        self.report = -1
        self.pid = 0
        try:
            self.begin_anew(None)
        except Exception as error:
            self.executor.execs.pop(self.request, None)
            self.session.send(failure(self.request, error))

    def on_timeout(self) -> None:
        if self.exit_code is None and not self.finished:
            self.timed_out = True
            self.kill()
            self.loop.after(0.2, self.finish)  # were it stuck in the kernel, the answer would still be in time

    def finish(self) -> None:
        if self.finished:
            return
        self.finished = True
        self.timer[2] = None
        duration = time.monotonic() - self.begin
        for fd in self.sinks:
            self.sinks[fd] = discard
        size = os.fstat(self.report).st_size
        skipped = max(0, size - REPORT)
        report = os.pread(self.report, min(size, REPORT), skipped)
        os.close(self.report)
        if skipped:
            report = report.partition(b"\0")[2]
            if not self.fresh:
                self.stderr.feed(b"bash: export: too much to carry anything over to the next command\n")
        if not self.timed_out and not self.fresh:
            refused: list[str] = []
            try:
                refused = self.shells.state.commit(report, self.before, self.cwd, self.env)
            except Exception as error:  # the report is what the command wrote there, whatever that may be
                complain(error)
            for name in refused:
                self.stderr.feed(b"bash: export: %s: too large to carry over to the next command\n" % os.fsencode(name))
        stdout, stderr = self.stdout.result(), self.stderr.result()
        self.executor.execs.pop(self.request, None)
        execution = "e%d" % self.request
        if self.stdout.total > len(stdout) or self.stderr.total > len(stderr):
            self.executor.keep(execution, {"stdout": self.stdout, "stderr": self.stderr})
        self.session.send(
            {
                "id": self.request,
                "execution": execution,
                "exit_code": 124 if self.timed_out else self.exit_code,
                "timed_out": self.timed_out,
                "stdout": len(stdout),
                "stdout_elided": self.stdout.total - len(stdout),
                "stderr_elided": self.stderr.total - len(stderr),
                "duration": duration,
            },
            stdout + stderr,
        )
        self.loop.after(0.0, self.executor.prepare)  # while whoever has the answer looks at it
