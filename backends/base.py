"""The interface of every sandbox technology: a protocol for making sandboxes, and one for using them.

A failure of the infrastructure raises `BackendError` or a subclass. Whatever the command does is a result, including a
timeout. So callers tell a broken sandbox from a wrong answer by type.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from .spec import SandboxInfo, SandboxSpec

if TYPE_CHECKING:
    from .forwarding import Forward

T = TypeVar("T")

MAX_OUTPUT = 1_000_000
"""Bytes of stdout, and of stderr, that `Sandbox.exec` keeps by default."""
MAX_DOWNLOAD = 1 << 30
"""Bytes that `Sandbox.download_dir` copies by default."""
MAX_MEMBERS = 1 << 17
"""Files, folders and links that `Sandbox.download_dir` copies by default."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend works on this machine, and the next step if not."""

    ok: bool
    detail: str
    """One line: a version when it works, the reason when it does not."""
    fix: str = ""
    """One line: the next step, empty when it works."""
    isolation: str = ""
    """One line: what separates commands from the machine. Empty where the backend does not say."""
    limits: str = ""
    """One line: the limits that hold."""
    better: Sequence[str] = ()
    """What would make it safer, a line each, with the next step."""

    @classmethod
    def lacking(cls, error: Exception, step: str = "see the message") -> Availability:
        """It does not work, for the reason and with the next step that `error` names; else with `step`."""
        reason, _, fix = str(error).partition(". Next step: ")
        return cls(False, reason, fix or step)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command. After a timeout, `timed_out` is true and the output so far is kept."""

    exit_code: int
    """The shell's exit code; 128 + signal when a signal ended it; 124 when `timed_out`."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    stdout_elided: int = 0
    """Bytes of stdout left out to keep within `max_output`, after the first `max_output // 2` bytes."""
    stderr_elided: int = 0
    duration: float = 0.0
    """Seconds of wall-clock time."""
    execution: str = ""
    """Identifies the command, for `Sandbox.read_output`."""
    waited: float | None = None
    """Seconds of `duration` in which the command could have run, and others had the processors. What sleeps does not
    wait. None where that is not measured: by other backends, and without `fresh`."""

    @property
    def truncated(self) -> bool:
        return bool(self.stdout_elided or self.stderr_elided)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What exists at a path of a sandbox."""

    path: str
    """The absolute path without symbolic links, also where nothing is there."""
    mode: int | None
    """As `os.stat` gives it; None where nothing is there."""
    size: int
    """Bytes."""
    mtime: int | None = None
    """Seconds since 1970 of the last change of its contents."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A background process: `exit_code` is None while it runs."""

    exit_code: int | None
    output_size: int
    """Bytes of combined output written so far, including those no longer kept."""


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Bytes of a background process' combined stdout and stderr."""

    data: bytes
    offset: int
    """Position of the first byte of `data` in the whole output, after the requested one if that was dropped."""
    exit_code: int | None
    """None while the process runs. When set, `data` goes up to the end of the output (or `limit`)."""


@runtime_checkable
class Process(Protocol):
    """A background process of a sandbox. It lives until it ends, is killed, or the sandbox is closed."""

    @property
    def id(self) -> str: ...

    @property
    def command(self) -> str: ...

    async def status(self) -> ProcessStatus: ...

    async def read(self, offset: int = 0, *, wait: float = 0.0, limit: int = 65_536) -> OutputChunk:
        """Output from `offset` on, at most `limit` bytes. Waits up to `wait` seconds for output or the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to its standard input. Raises `ProcessLookupError` when the process has ended."""
        ...

    async def close_stdin(self) -> None: ...

    async def kill(self) -> None:
        """Kill it with everything that it started, including `setsid` children. No error if it has ended."""
        ...


class CallGuard(Protocol):
    """What a leased sandbox needs from its lease (`backends.lease.Lease`)."""

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of `call`. Raises `SandboxLost` when the lease is over, or ends before `call` does."""
        ...

    async def release(self) -> None: ...


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place. Paths are those inside; relative ones start at `workdir`."""

    @property
    def id(self) -> str: ...

    @property
    def workdir(self) -> str: ...

    @property
    def python(self) -> str | None:
        """Path of a Python >= 3.8 inside, or None."""
        ...

    @property
    def home(self) -> str:
        """The home folder (`HOME`) that it was made with, known without a call into the sandbox."""
        ...

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = MAX_OUTPUT,
        fresh: bool = False,
    ) -> ExecResult:
        """Run `command` with bash. `cd` and exported variables persist into the next `exec` without `cwd` and `env`.

        With `fresh` it starts in `workdir` with the initial variables of the sandbox, and changes nothing for later
        commands. Its bash is one that no command can have replaced, and first in PATH, where the backend can provide
        that. A reward uses this to run without the agent's PATH and shell.

        After `timeout` seconds, everything that the command started is killed. Children that a finished command left
        in the background live on and do not delay the result.

        Raises:
            SandboxLost: the sandbox is gone. The command may or may not have run; it never runs twice.
        """
        ...

    async def read_output(
        self, result: ExecResult, stream: Literal["stdout", "stderr"] = "stdout", *, offset: int = 0, limit: int
    ) -> bytes:
        """Bytes of the whole output of a truncated result, including those that were left out.

        Raises:
            FileNotFoundError: the output is no longer kept. Only the last few truncated outputs are.
        """
        ...

    async def start(self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Process:
        """Start `command` with bash in the background, with the same working directory and variables as `exec`."""
        ...

    async def processes(self) -> list[Process]:
        """Background processes in the order of their start, including ended ones."""
        ...

    async def stop_processes(self) -> None:
        """Kill everything that runs inside. The sandbox stays usable."""
        ...

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Read a file. Raises `FileNotFoundError`, `IsADirectoryError` or `PermissionError` as the file system does."""
        ...

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Replace a file atomically, and create missing parent folders.

        `mode` sets its permissions; None keeps the permissions of the file that is replaced.
        """
        ...

    async def stat(self, path: str) -> FileStatus:
        """What exists at `path`; links are followed. No program inside is involved. Raises `OSError`."""
        ...

    def read_chunks(self, path: str) -> AsyncIterator[bytes]:
        """The bytes of a file of any size, in constant memory. Raises as `read_bytes`."""
        ...

    async def write_chunks(self, path: str, chunks: AsyncIterable[bytes], *, mode: int | None = None) -> None:
        """`write_bytes` in constant memory at any size. The file is replaced after the last chunk."""
        ...

    async def upload_dir(
        self, local: str | os.PathLike[str], remote: str, *, modes: Mapping[str, int] | None = None
    ) -> None:
        """Copy the contents of the folder `local` of this machine into the folder `remote`, created if missing.

        Contents, modes and symbolic links are kept; owners are not. `modes` overrides the modes of this machine, by
        path below `local`; `.` is `remote` itself.
        """
        ...

    async def download_dir(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        max_bytes: int | None = MAX_DOWNLOAD,
        max_members: int | None = MAX_MEMBERS,
        modes: dict[str, int] | None = None,
    ) -> None:
        """Copy the contents of the folder `remote` into the folder `local` of this machine, created if missing.

        Members that would be written outside `local`, and devices, are rejected. Sparse files count, and are written,
        in full. With None, only the free space of the disk limits the copy: 512 MiB, or 5% of a smaller disk, always
        stay free.

        Modes are kept, but the owner of the copy can read its files and change its folders; setuid, setgid and sticky
        bits are left out. `modes` gets them as they were, by path below `remote`, but for setuid and setgid.

        Raises:
            OSError: the folder cannot be read. EFBIG: it exceeds `max_bytes`, `max_members`, 256 nested folders, or the
                free space. ENOSPC: this machine has no room for 1 GiB. The partial copy is removed.
        """
        ...

    def leased(self, lease: CallGuard) -> Sandbox:
        """The same sandbox for one lease: every call runs through `lease.run`, and `close` is `lease.release`.

        It has the optional powers of this one (`SupportsPty`, `SupportsForward`, `SupportsSnapshot`), and no others.
        """
        ...

    async def close(self) -> None:
        """End every process and remove all traces. May be called twice."""
        ...


@runtime_checkable
class SupportsSnapshot(Protocol):
    """A sandbox whose file system can be saved as an image."""

    async def snapshot(self) -> str:
        """Save the file system as an image; returns the `SandboxSpec.image` for more such sandboxes."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SandboxCheckpoint:
    """The files of a sandbox, and the folder and the variables of its shell, at one moment. Processes are not in it.

    What it takes is freed when nothing refers to it any more: neither this object nor a sandbox made from it.
    """

    sandbox: str
    """The id of the sandbox that it was made of."""
    cwd: str
    """The folder in which the next command would have begun."""
    left_out: tuple[str, ...]
    """The command lines of the processes that ran."""


@runtime_checkable
class SupportsCheckpoint(Protocol):
    """A sandbox that can be continued in several ways from one moment on.

    Calls that arrive meanwhile wait. Devices, locks, memory and connections are in no checkpoint.
    """

    async def checkpoint(self, *, running: Literal["error", "left out"] = "error") -> SandboxCheckpoint:
        """What is there now. Processes that run and are `left out` are stopped meanwhile.

        Raises:
            ProcessesRunning: something runs, also a command of `exec` or a transfer of files.
        """
        ...

    async def fork(
        self, checkpoint: SandboxCheckpoint | None = None, *, labels: Mapping[str, str] | None = None
    ) -> Sandbox:
        """Another sandbox with the same settings that goes on from `checkpoint`, or else from now. Neither sees what
        the other one does. It has its own limits, and a lifetime that begins now.

        Args:
            labels: in place of those of this sandbox.

        Raises:
            ProcessesRunning: as `checkpoint`, which can also be called first.
        """
        ...


@runtime_checkable
class SupportsRestore(SupportsCheckpoint, Protocol):
    """A sandbox that can itself go back to a checkpoint."""

    async def restore(self, checkpoint: SandboxCheckpoint) -> None:
        """End everything that runs, and go back to `checkpoint`, which may be that of another sandbox of this backend
        with the same settings."""
        ...


@runtime_checkable
class SupportsReset(SupportsRestore, Protocol):
    """A sandbox that can be used again by somebody else."""

    async def reset(self, base: SandboxCheckpoint, *, labels: Mapping[str, str] | None = None) -> None:
        """Make it what it was at `base`, for another user: no process, file, output or variable is left, which is
        verified. Its lifetime begins again.

        Raises:
            BackendError: something is left. Close it.
        """
        ...


@runtime_checkable
class SupportsWaited(Protocol):
    """A sandbox that measures for how long its commands wait for a processor."""

    async def waited(self) -> float | None:
        """The sum of `ExecResult.waited` of all `fresh` commands so far, including cancelled and running ones. For a
        sandbox that has ended, the last known value, or None."""
        ...


@runtime_checkable
class SupportsPty(Protocol):
    """A sandbox that can run a program in a terminal."""

    async def open_pty(
        self,
        command: str,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """`Sandbox.start` with a terminal as standard input, output and error. `close_stdin` sends Ctrl-D."""
        ...


@runtime_checkable
class SupportsForward(Protocol):
    """A sandbox whose programs can reach one address outside while it has no network."""

    def forward(self, host: str, port: int) -> AbstractAsyncContextManager[Forward]:
        """Let programs inside reach `host` and `port`, as seen from this process, until the block ends.

            async with sandbox.forward("127.0.0.1", 8000) as inside:
                await sandbox.exec(f"curl http://{inside.host}:{inside.port}/", timeout=10)

        Connections are carried byte for byte, also half-closed ones, with flow control; at most 256 at once. When the
        block ends, all of them are reset. Every program inside can connect: what listens must ask for a key. Where the
        sandbox shares the network of this machine, `inside` is the address itself.

        Raises:
            BackendUnavailable: others share the network of the sandbox and could use the way as well.
        """
        ...


@runtime_checkable
class SupportsClose(Protocol):
    """A backend that has started something of its own, which ends with its run."""

    async def close(self) -> None: ...


@runtime_checkable
class SupportsImagesOf(Protocol):
    """A backend whose sandboxes take the images of another one."""

    async def images_of(self) -> str:
        """The name of that backend. Raises `BackendUnavailable` if nobody knows it."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A technology that makes sandboxes.

    A backend is a class with these methods. It is found by its registered name, by an entry point of the group
    `lachesis.backends`, or as `package.module:Class`. Its options are the parameters of its constructor: types and
    defaults are read from the signature, help from the `Args:` section of the constructor's docstring. Parameters that
    take callables, or types that the module imports under `TYPE_CHECKING` only, are for programs and are no options.

    `lachesis_testing.backend_suite` tests everything that these protocols promise.
    """

    @property
    def name(self) -> str: ...

    async def check(self) -> Availability:
        """Whether it works, by a cheap trial. Never raises."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that is ready for commands.

        Raises:
            BackendUnavailable: this machine cannot run it, or not with this spec.
            BackendError: it failed this time; trying again may help.
        """
        ...

    async def sandboxes(self) -> list[SandboxInfo]:
        """Every sandbox of this project that the technology lists, including those of other processes and ended ones.

        Raises:
            BackendUnavailable: the technology does not answer.
        """
        ...

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """Remove orphans; with `everyone` also sandboxes of living owners; with `run_id` only sandboxes of that run.

        Returns the removed ones. Any process may call it at any time.
        """
        ...
