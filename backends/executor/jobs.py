"""Running commands: a shell, the pipes that it writes to, and its result."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING

from .framing import CHUNK, failure, log_error
from .ipc import remove_ipc
from .kernel import REPORT_FD, close_all, unread
from .output import Capped
from .processes import kill_tree, send_signal
from .shell import encode_environment, shell_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from .framing import Header
    from .loop import Timer
    from .services import Services

FORKING = 2.0
"""Seconds for which starting a shell is retried when the limit of processes or memory is reached."""
GRACE = 0.05
"""Seconds that the pipes of an ended shell may stay open before the result is sent without their end."""
REPORT = 1 << 22
"""Bytes of a shell's report that are read, from its end: the last report counts."""
TAKING = 0.2
"""Seconds after which a prewarmed shell that has not taken its command is replaced."""


class Job:
    """A shell and the pipes that it writes to. It finishes after its exit and the end of its output, or GRACE."""

    def __init__(self, services: Services, command: str) -> None:
        self.loop, self.session, self.shells = services.loop, services.session, services.shells
        self.command = command
        self.pid = 0
        self.abandoned = False  # do not start it any more
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

    def spawn(
        self,
        fds: list[int],
        arguments: list[bytes],
        cwd: str | None,
        env: list[bytes],
        inherited: dict[int, int],
        end: float | None = None,
    ) -> None:
        """Start the shell with `fds` as its 0, 1 and 2, and close them here. Tried until `end`; default: for a while.

        A failure before bash runs looks like one of bash: a message in the output, and exit code 1 or 126.
        """
        end = end or time.monotonic() + FORKING
        try:
            pid = -1 if self.abandoned else self.shells.start_shell(arguments, fds, cwd, env, inherited)
        except OSError as error:  # the limit of processes or memory: others may end soon
            if time.monotonic() < end:
                # Not a function in here that names itself: it would keep `env` until a garbage collection.
                self.loop.after(0.02, lambda: self.spawn(fds, arguments, cwd, env, inherited, end))
                return
            os.write(fds[2], b"bash: fork: " + os.fsencode(error.strerror or "failed") + b"\n")
            self.loop.after(0.0, lambda: self.on_exit(126))
        else:
            if pid < 0:
                self.loop.after(0.0, lambda: self.on_exit(137))
            else:
                self.adopt(pid)
        close_all(fds)

    def adopt(self, pid: int) -> None:
        """Take over a running shell."""
        self.pid = pid
        self.shells.children[pid] = self.on_exit
        if pid in self.shells.reused:
            self.shells.reused.pop(pid)()

    def drain(self, fd: int, sink: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.sinks[fd] = sink
        self.loop.watch(fd, select.EPOLLIN, self.on_output)

    def on_output(self, fd: int, limit: int = CHUNK) -> int:
        try:
            data = os.read(fd, limit)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: the other end of a terminal is closed
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
        """Read what the ended shell has left in the pipes. Its children may keep them open for ever."""
        self.exit_code = exit_code
        if exit_code == 137:  # killed: by us, or for its memory, of which it may have left some in such objects
            remove_ipc(orphans=True)
        for fd in list(self.sinks):
            if fd == self.terminal:  # FIONREAD does not count what a terminal still processes
                for _ in range(64):
                    if not self.on_output(fd):
                        break
                continue
            waiting = unread(fd)
            while waiting > 0:
                waiting -= self.on_output(fd, waiting) or waiting
            if fd in self.sinks:
                self.on_output(fd, 1)  # finds the end, if it is there
        if self.sinks:
            self.loop.after(GRACE, self.finish)
        else:
            self.finish()

    def kill(self) -> None:
        """Kill the shell with everything that it started. Stop it first, so that its script does not go on."""
        self.abandoned = True
        if self.pid <= 0 or (self.exit_code is not None and os.path.exists("/proc/%d" % self.pid)):
            return  # the number was reused, which the kernel does only when nothing is left of the session
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGSTOP)
        kill_tree(self.pid)
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Undo the construction of a job that could not be started."""
        self.finished = True
        self.timer[2] = None
        self.close_pipes()

    def close_pipes(self) -> None:
        for fd in self.sinks:
            self.loop.unwatch(fd)
            os.close(fd)
        self.sinks = {}

    def finish(self) -> None:
        raise NotImplementedError


def discard(_: bytes) -> None:
    """Read the output of children that outlive their command: they would block or die of SIGPIPE otherwise."""


class Exec(Job):
    """A command of `exec`."""

    def __init__(self, services: Services, request: Header, stdin: bytes, on_end: Callable[[int], None]) -> None:
        """`on_end` is called with the number of the request before it is answered."""
        super().__init__(services, request["command"])
        self.waiting, self.spills, self.on_end = services.waiting, services.spills, on_end
        self.request = request["id"]
        self.timed_out = False
        self.report = -1
        self.waited_before = -1.0
        self.cwd, self.env = request.get("cwd"), request.get("env") or {}
        self.fresh = request.get("fresh", False)
        self.sets_aside = False
        self.waited: float | None = None
        if self.fresh:
            self.cwd = self.cwd or self.shells.state.workdir
        self.begin = time.monotonic()
        plain = self.cwd is None and not self.env and not request.get("stdin")
        self.prewarmed = services.prewarmed.take(self.command) if plain else None  # it has its command now
        self.stdout, self.stderr = (Capped(request["max_output"], services.spills.new) for _ in range(2))
        self.before = dict(self.shells.fresh_environment() if self.fresh else self.shells.state.env, **self.env)
        self.timer = self.loop.after(min(request["timeout"], services.wall_time), self.on_timeout)
        if self.prewarmed is None:
            self.start_new_shell(stdin if request.get("stdin") else None)
            if self.fresh and not self.finished:
                self.waited_before = self.waiting.begin()
            return
        self.report = self.prewarmed.report
        self.drain(self.prewarmed.stdout, self.stdout.feed)
        self.drain(self.prewarmed.stderr, self.stderr.feed)
        self.adopt(self.prewarmed.pid)
        self.loop.after(TAKING, self.on_taking)

    def start_new_shell(self, stdin: bytes | None) -> None:
        """Start a new shell. Raises `OSError`, or an error about the request, and leaves nothing open."""
        fds: list[int] = []
        try:
            bash = self.shells.own_bash if self.fresh else None
            if self.fresh and self.shells.preload is not None:
                self.sets_aside = self.shells.preload.begin(self.command)
            arguments = shell_arguments(bash or self.shells.bash, self.command, stateful=True)
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
        self.spawn(fds, arguments, self.cwd, env, {REPORT_FD: self.report})

    def close_pipes(self) -> None:
        super().close_pipes()
        self.end_fresh()
        if self.report >= 0:
            os.close(self.report)
            self.report = -1

    def end_fresh(self) -> None:
        if self.sets_aside and self.shells.preload is not None:
            self.sets_aside = False
            self.shells.preload.end()

    def end_watch(self) -> None:
        if self.waited_before >= 0.0:
            self.waiting.end()
            self.waited = self.waiting.total - self.waited_before if self.waiting.is_known else None
            self.waited_before = -1.0

    def on_taking(self) -> None:
        if self.prewarmed is not None and not self.abandoned and not self.prewarmed.has_begun():
            send_signal(self.pid, signal.SIGKILL)  # a process inside has stopped it

    def on_exit(self, exit_code: int) -> None:
        shell, self.prewarmed = self.prewarmed, None
        if shell is None or self.abandoned or shell.has_begun():
            super().on_exit(exit_code)
            return
        self.close_pipes()
        self.pid = 0
        try:
            self.start_new_shell(None)
        except Exception as error:
            self.on_end(self.request)
            self.session.send(failure(self.request, error))

    def on_timeout(self) -> None:
        if self.exit_code is None and not self.finished:
            self.timed_out = True
            self.waiting.look()
            self.end_watch()
            self.kill()
            self.loop.after(0.2, self.finish)  # answer in time even if it is stuck in the kernel

    def finish(self) -> None:
        if self.finished:
            return
        self.finished = True
        self.timer[2] = None
        self.end_fresh()
        self.end_watch()
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
            rejected: list[str] = []
            try:
                rejected = self.shells.state.commit(report, self.before, self.cwd, self.env)
            except Exception as error:  # the command can write anything into the report
                log_error(error)
            for name in rejected:
                self.stderr.feed(b"bash: export: %s: too large to carry over to the next command\n" % os.fsencode(name))
        stdout, stderr = self.stdout.result(), self.stderr.result()
        self.on_end(self.request)
        execution = "e%d" % self.request
        if self.stdout.total > len(stdout) or self.stderr.total > len(stderr):
            self.spills.keep(execution, {"stdout": self.stdout, "stderr": self.stderr})
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
                "waited": self.waited,
                "waited_in_all": self.waiting.total if self.waiting.is_known else None,
            },
            stdout + stderr,
        )
