"""Prewarmed shells: they wait for a command, because starting a shell takes longer than most commands."""

from __future__ import annotations

import _socket
import fcntl
import os
import re
import signal
from typing import TYPE_CHECKING

from .kernel import COMMAND_FD, F_ADD_SEALS, F_SEAL_ALL, F_SEAL_SEAL, F_SEAL_SHRINK, GO_FD, REPORT_FD, unread
from .processes import send_signal
from .shell import STATEFUL, encode_environment, shell_call

if TYPE_CHECKING:
    from .shells import Shells

PREWARMED, PREWARMED_COMMAND = 2, 16_384
"""How many shells wait, and the longest command for them in bytes: bash reads it slowly."""

_AHEAD = (
    "builtin read -r -u %d __command || builtin exit; exec %d<&-; "
    "IFS= builtin read -r -d '' -u %d __command; exec %d<&-; "
    'SECONDS=0; builtin printf "\\0" >&%d || builtin exit; eval "builtin unset -v __command; $__command"'
) % (GO_FD, GO_FD, COMMAND_FD, COMMAND_FD, REPORT_FD)
_PLAIN = re.compile(r"[\t\n -~\u00a1-\ud7ff]*\Z")
_ODD = frozenset(
    ["BASH_COMPAT", "BASH_ENV", "BASH_XTRACEFD", "BASHOPTS", "ENV", "POSIXLY_CORRECT", "SHELLOPTS", "TMOUT"]
)
"""Variables that act while a shell starts."""


class PrewarmedShell:
    """A shell with the folder and the variables of the next command.

    Earlier commands may have left processes that open its descriptors in /proc/PID/fd. They cannot open sockets there,
    and cannot change sealed files. They could write to its memory, as to that of any shell: a reward that must not be
    deceived ends them first.
    """

    def __init__(self, pool: PrewarmedShells) -> None:
        self.pool = pool
        self.shells = shells = pool.shells
        state = shells.state
        self.version = state.version
        self.folder = self.identify(state.cwd)
        self.fds: list[int] = []
        theirs = [os.dup(shells.null)]
        try:
            self.stdout, self.stderr = self.pipe(theirs), self.pipe(theirs)
            self.report, self.command = self.file("report"), self.file("command")
            fcntl.fcntl(self.report, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK)  # nobody can hide its beginning
            go, ours = _socket.socketpair()
            theirs.append(go.detach())
            self.go = ours.detach()
            self.fds.append(self.go)
            os.set_blocking(self.go, False)
            arguments = [*shell_call(shells.bash), os.fsencode(STATEFUL.replace("RUN", _AHEAD)), b"bash"]
            inherited = {REPORT_FD: self.report, GO_FD: theirs[3], COMMAND_FD: self.command}
            self.pid = shells.start_shell(arguments, theirs[:3], None, encode_environment(state.env), inherited)
        except BaseException:
            self.close(theirs)
            raise
        self.close(theirs, keep=True)
        shells.children[self.pid] = self.on_exit

    def file(self, name: str) -> int:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fds.append(fd)
        return fd

    def pipe(self, theirs: list[int]) -> int:
        read_end, write_end = os.pipe()
        self.fds.append(read_end)
        theirs.append(write_end)
        return read_end

    @staticmethod
    def identify(folder: str) -> tuple[int, int]:
        status = os.stat(folder)
        return status.st_dev, status.st_ino

    def close(self, others: list[int], keep: bool = False) -> None:
        for fd in others if keep else [*others, *self.fds]:
            os.close(fd)
        self.fds = self.fds if keep else []

    def is_usable(self) -> bool:
        """Whether it lives, is not stopped, and has the folder and the variables of the next command."""
        state = self.shells.state
        ended_or_stopped = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        try:
            if os.waitid(os.P_PID, self.pid, ended_or_stopped) is not None:
                return False
            return self.version == state.version and self.folder == self.identify(state.cwd)
        except OSError:
            return False

    def run(self, command: str) -> bool:
        """Hand over a command. On success the caller owns its report and outputs; False when it was tampered with.

        A command that another process has written for it is overwritten. If the shell runs that already, it has begun,
        or its command is longer than it should be.
        """
        encoded = os.fsencode(command)
        try:
            os.ftruncate(self.command, 0)
            os.pwrite(self.command, encoded, 0)
            fcntl.fcntl(self.command, F_ADD_SEALS, F_SEAL_ALL)
            if os.pread(self.command, len(encoded) + 1, 0) != encoded or self.has_begun() or self.has_spoken():
                return False
            os.write(self.go, b"\n")
        except OSError:  # it is dead, or another process has mapped its command
            return False
        os.close(self.command)
        os.close(self.go)
        self.fds = []
        return True

    def has_spoken(self) -> bool:
        return any(unread(fd) for fd in (self.stdout, self.stderr))

    def has_begun(self) -> bool:
        """Whether it has written its first byte. A dead shell that has not did not run the command."""
        return os.fstat(self.report).st_size > 0

    def discard(self) -> None:
        send_signal(self.pid, signal.SIGKILL)
        self.pool.ending.add(self.pid)
        self.close([])

    def on_exit(self, _: int) -> None:
        """It ended, or a process inside has killed it."""
        self.pool.ending.discard(self.pid)
        self.close([])
        self.pool.forget(self)


class PrewarmedShells:
    """The shells that wait, the oldest first."""

    def __init__(self, shells: Shells) -> None:
        self.shells = shells
        self.waiting: list[PrewarmedShell] = []
        self.ending: set[int] = set()
        """The process ids of those that were killed."""

    def prepare(self) -> bool:
        """Start one if too few wait. Returns whether one was started."""
        if not _ODD.isdisjoint(self.shells.state.env):
            return False
        for shell in [shell for shell in self.waiting if shell.version != self.shells.state.version]:
            self.waiting.remove(shell)
            shell.discard()
        if len(self.waiting) >= PREWARMED:
            return False
        try:
            self.waiting.append(PrewarmedShell(self))
        except OSError:
            return False
        return True

    def take(self, command: str) -> PrewarmedShell | None:
        """A waiting shell that now runs `command`, None if no usable one is left."""
        while self.waiting and len(command) <= PREWARMED_COMMAND and _PLAIN.match(command):
            shell = self.waiting.pop(0)
            if shell.is_usable() and shell.run(command):
                return shell
            shell.discard()
        return None

    def numbers(self) -> set[int]:
        """The process ids of all, those included that are being ended."""
        return {*self.ending, *(shell.pid for shell in self.waiting)}

    def forget(self, shell: PrewarmedShell) -> None:
        if shell in self.waiting:
            self.waiting.remove(shell)

    def discard(self) -> None:
        for shell in self.waiting:
            shell.discard()
        self.waiting = []
