"""Shells that were started ahead of the commands that they will run."""

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

SPARES, SPARE_COMMAND = 2, 16_384
"""Shells that are started ahead, and the bytes of a command up to which they are used (they read slowly)."""

_AHEAD = (
    "builtin read -r -u %d __command || builtin exit; exec %d<&-; "
    "IFS= builtin read -r -d '' -u %d __command; exec %d<&-; "
    'SECONDS=0; builtin printf "\\0" >&%d || builtin exit; eval "builtin unset -v __command; $__command"'
) % (GO_FD, GO_FD, COMMAND_FD, COMMAND_FD, REPORT_FD)
_PLAIN = re.compile(r"[\t\n -~\u00a1-\ud7ff]*\Z")
_ODD = frozenset(
    ["BASH_COMPAT", "BASH_ENV", "BASH_XTRACEFD", "BASHOPTS", "ENV", "POSIXLY_CORRECT", "SHELLOPTS", "TMOUT"]
)
"""Variables that make a difference to when a shell is started."""


class Spare:
    """A shell that was started ahead, with the folder and the variables that the next command is to have.

    Starting one takes longer than most commands do. Earlier commands may have left processes that can open what it has
    in /proc/PID/fd: not its end of a socket, though, and to no avail a file that is sealed. (They could still write to
    its memory, as to any shell's: who must not be deceived ends them first.)
    """

    def __init__(self, spares: Spares) -> None:
        self.spares = spares
        self.shells = shells = spares.shells
        state = shells.state
        self.version = state.version
        self.folder = self.identify(state.cwd)
        self.fds: list[int] = []
        theirs = [os.dup(shells.null)]
        try:
            self.stdout, self.stderr = self.pipe(theirs), self.pipe(theirs)
            self.report, self.command = self.file("report"), self.file("command")
            fcntl.fcntl(self.report, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK)  # what has begun cannot seem not to have
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
        """Whether it lives, is not stopped, and would do what one that is started now would do."""
        state = self.shells.state
        ended_or_stopped = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        try:
            if os.waitid(os.P_PID, self.pid, ended_or_stopped) is not None:
                return False
            return self.version == state.version and self.folder == self.identify(state.cwd)
        except OSError:
            return False

    def run(self, command: str) -> bool:
        """Give it its command. Its report and its outputs are the caller's then; False when it is not to be trusted.

        What others have written for it goes, unless they let it run that: then it has begun, or is about to read more
        than there is.
        """
        encoded = os.fsencode(command)
        try:
            os.ftruncate(self.command, 0)
            os.pwrite(self.command, encoded, 0)
            fcntl.fcntl(self.command, F_ADD_SEALS, F_SEAL_ALL)
            if os.pread(self.command, len(encoded) + 1, 0) != encoded or self.has_begun() or self.has_spoken():
                return False
            os.write(self.go, b"\n")
        except OSError:  # it is dead, or others hold on to its command
            return False
        os.close(self.command)
        os.close(self.go)
        self.fds = []
        return True

    def has_spoken(self) -> bool:
        return any(unread(fd) for fd in (self.stdout, self.stderr))

    def has_begun(self) -> bool:
        """Whether it has written its first byte; one that is dead and has not, has not run the command."""
        return os.fstat(self.report).st_size > 0

    def discard(self) -> None:
        send_signal(self.pid, signal.SIGKILL)
        self.close([])

    def on_exit(self, _: int) -> None:
        """It was killed: by its own end, or by somebody inside."""
        self.close([])
        self.spares.forget(self)


class Spares:
    """Those that wait, the oldest first."""

    def __init__(self, shells: Shells) -> None:
        self.shells = shells
        self.waiting: list[Spare] = []

    def prepare(self) -> bool:
        """Start one, if there are to be more. Whether one was started."""
        if not _ODD.isdisjoint(self.shells.state.env):
            return False
        for spare in [spare for spare in self.waiting if spare.version != self.shells.state.version]:
            self.waiting.remove(spare)
            spare.discard()
        if len(self.waiting) >= SPARES:
            return False
        try:
            self.waiting.append(Spare(self))
        except OSError:
            return False
        return True

    def take(self, command: str) -> Spare | None:
        """One that is at work on `command` from here on, if there is one and it may be trusted with it."""
        while self.waiting and len(command) <= SPARE_COMMAND and _PLAIN.match(command):
            spare = self.waiting.pop(0)
            if spare.is_usable() and spare.run(command):
                return spare
            spare.discard()
        return None

    def forget(self, spare: Spare) -> None:
        if spare in self.waiting:
            self.waiting.remove(spare)

    def discard(self) -> None:
        for spare in self.waiting:
            spare.discard()
        self.waiting = []
