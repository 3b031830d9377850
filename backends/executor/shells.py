"""Starting shells and other child processes, and reporting their ends."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import termios
from typing import TYPE_CHECKING

from .kernel import COMMAND_FD, FILES, PF_FORKNOEXEC, PR_SET_CHILD_SUBREAPER, libc
from .preload import Preload
from .processes import send_signal
from .shell import ARGUMENT, ShellState
from .starter import Starter
from .system_calls import install

if TYPE_CHECKING:
    from collections.abc import Callable

    from .groups import CommandGroup
    from .loop import Loop

PTRACE_DETACH = 17
SETTLING = 0.2
"""Seconds after which a new process should have executed its program."""


class Shells:
    """Starts shells with the folder and the variables that earlier ones have left."""

    def __init__(
        self,
        loop: Loop,
        bash: str,
        oom: tuple[int, bytes] | None,
        group: CommandGroup | None = None,
        own_bash: str | None = None,
    ) -> None:
        self.loop = loop
        self.group = group
        self.bash = bash
        self.own_bash = own_bash
        """One that commands cannot replace, alone in its folder; None where there is none."""
        self.preload = Preload() if own_bash is not None else None  # without isolation, the file is the machine's
        self.oom = oom
        """An open /proc/self/oom_score_adj and its content; None: children write their own."""
        self.state = ShellState("/", {})
        self.null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # now, before commands can replace it
        self.starter: Starter | None = None
        with contextlib.suppress(OSError):
            self.starter = Starter(group)
        self.children: dict[int, Callable[[int], None]] = {}
        """Called with the exit code when the child of this number has ended."""
        self.reused: dict[int, Callable[[], None]] = {}
        """Called when the number, which is that of an ended background process, is given to another child."""

    def fresh_environment(self) -> dict[str, str]:
        """The variables before any command. `bash` is the one that commands cannot replace."""
        first = self.state.first
        if self.own_bash is None:
            return first
        return {**first, "PATH": os.path.dirname(self.own_bash) + ":" + first.get("PATH", os.defpath)}

    def given_state(self) -> bytes:
        """What `take_over` takes."""
        preload = self.preload.content if self.preload is not None else None
        kept = None if preload is None else preload.decode("latin-1")
        return json.dumps({"cwd": self.state.cwd, "env": self.state.env, "preload": kept}).encode()

    def take_over(self, given: bytes) -> None:
        """Go on with the folder and the variables of a checkpoint."""
        state = json.loads(given.decode())
        self.state.cwd, self.state.env = state["cwd"], dict(state["env"])
        self.state.version += 1
        if self.preload is not None:
            kept = state["preload"]
            self.preload.expect(None if kept is None else kept.encode("latin-1"))

    def forget(self) -> None:
        """The files are new, as before any command."""
        self.preload = Preload() if self.own_bash is not None else None

    def start_shell(
        self, arguments: list[bytes], fds: list[int], cwd: str | None, env: list[bytes], inherited: dict[int, int]
    ) -> int:
        """The process id of a new shell. Raises `OSError` at the limit of processes or memory."""
        moves = [(fd, target) for target, fd in [*enumerate(fds), *inherited.items()]]
        texts = b"".join((*arguments, *env))  # otherwise fork: its child reports what the kernel rejects
        simple = len(texts) < 1 << 20 and b"\0" not in texts and max(map(len, env), default=0) <= ARGUMENT
        if self.starter is not None and simple and self.enter(cwd):
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
            try:
                pid = self.starter.start(arguments, env, moves)
                self.loop.after(SETTLING, lambda: self.settle(pid))
                return pid
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
                os.chdir("/")
        pid = self.fork()
        if pid == 0:
            self.become_shell(arguments, moves, cwd, env)
        return pid

    def enter(self, cwd: str | None) -> bool:
        """Change to the folder in which a shell starts. False when `cwd` does not exist."""
        if cwd is not None:
            with contextlib.suppress(OSError, ValueError):
                os.chdir(os.path.join(self.state.workdir, cwd))
                return True
            return False
        for path in (self.state.cwd, self.state.workdir, "/"):
            with contextlib.suppress(OSError, ValueError):
                os.chdir(path)
                break
        return True

    def become_shell(
        self, arguments: list[bytes], moves: list[tuple[int, int]], cwd: str | None, env: list[bytes]
    ) -> None:
        """Do in a forked child what `Starter` does, and report why that fails. Never returns."""
        failed, what = 126, "bash"
        try:
            if self.group is not None:
                with contextlib.suppress(OSError):
                    self.group.join()
                if self.group.filter is not None:
                    install(self.group.filter)
            os.setsid()
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # its orphans become its children and can be found
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            above = [(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, COMMAND_FD + 1), target) for fd, target in moves]
            for fd, target in above:
                os.dup2(fd, target)
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
            with contextlib.suppress(OSError):
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if cwd is not None:
                failed, what = 1, "cd: " + cwd
                os.chdir(os.path.join(self.state.workdir, cwd))
                failed, what = 126, "bash"
            else:
                self.enter(None)
            os.execve(arguments[0], arguments, dict(text.split(b"=", 1) for text in env))
        except BaseException as error:
            reason = getattr(error, "strerror", None) or repr(error)
            os.write(2, os.fsencode("bash: %s: %s\n" % (what, reason)))
        finally:
            os._exit(failed)

    def fork(self) -> int:
        """Fork a child that the kernel kills before this process when memory runs out."""
        if self.oom is not None:
            os.pwrite(self.oom[0], b"1000", 0)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0 and self.oom is not None:
                os.pwrite(self.oom[0], self.oom[1], 0)
        if pid == 0 and self.oom is None:
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        return pid

    def settle(self, pid: int) -> None:
        """Check that a new process has executed its program; wake it if it was stopped before that.

        Until then it shares this process' memory, and with it every value written to its oom_score_adj.
        """
        if self.starter is not None and pid in self.starter.kept:
            with contextlib.suppress(OSError), open("/proc/%d/stat" % pid, "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[6]) & PF_FORKNOEXEC:
                    send_signal(pid, signal.SIGCONT)
                    self.loop.after(SETTLING, lambda: self.settle(pid))
                else:
                    del self.starter.kept[pid]
        if self.oom is not None:
            os.pwrite(self.oom[0], self.oom[1], 0)

    def reap(self) -> None:
        """Report all children that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):  # not the end: it has made this process its tracer (PTRACE_TRACEME)
                number = os.WSTOPSIG(status)
                libc.ptrace(PTRACE_DETACH, pid, None, ctypes.c_long(0 if number == signal.SIGTRAP else number))
                continue
            if self.starter is not None:
                self.starter.kept.pop(pid, None)
            on_exit = self.children.pop(pid, None)
            if on_exit is not None:  # None for an orphan that this process adopted
                on_exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
