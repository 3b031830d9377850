"""What every sandbox technology offers: one Protocol for making sandboxes, one for using them, one set of errors.

Infrastructure that fails raises (`BackendError` and its children); what the command itself does, including running
out of time, is a result. A caller can therefore tell a broken sandbox from a wrong answer without reading texts.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from lachesis.errors import LachesisError

MAX_OUTPUT = 1_000_000
"""Bytes of stdout, and of stderr, that `Sandbox.exec` keeps unless told otherwise."""


class BackendError(LachesisError):
    """The sandbox technology failed. Never the fault of what ran inside."""


class BackendUnavailable(BackendError):
    """This machine cannot run the backend; the message says what is missing and how to get it."""


class SandboxLost(BackendError):
    """The sandbox is gone: it was closed, killed, or outlived its lifetime. The rollout has to start again."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend works on this machine, and if not, what to do about it."""

    ok: bool
    detail: str
    """One line: a version when it works, the reason when it does not."""
    fix: str = ""
    """One line: the next step, empty when it works."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a rollout asks for. A backend refuses a field that it cannot honour (`BackendUnavailable`); None is its own
    default, which its documentation names."""

    image: str | None = None
    """What the inside is made from, in the backend's own terms: an image name, a file, a root folder."""
    workdir: str | None = None
    """Absolute folder inside in which commands start and relative paths begin; made if missing."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set inside. Nothing of the host's environment is passed on."""
    network: bool = False
    """Whether it may use the network. Locally that is the host's own, its loopback and abstract sockets included."""
    cpus: float | None = None
    """Processor time that everything inside may use, in processors."""
    memory_bytes: int | None = None
    """Memory of everything inside. A command that needs more is killed: exit code 137, and the sandbox lives on."""
    pids: int | None = None
    """Processes and threads inside, those of the backend included."""
    disk_bytes: int | None = None
    """Size limit of what can be written. Where files are in memory, they count towards `memory_bytes`, too."""
    wall_time: float | None = None
    """Seconds that any one command may take, whatever `timeout` it was given; background processes likewise."""
    lifetime: float = 3600.0
    """Seconds after which the sandbox ends itself, whoever still holds it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """`run_id` and `task_id`, for listings and error messages."""

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes", "pids", "disk_bytes", "wall_time", "lifetime"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} has to be positive, not {value!r}")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ValueError(f"workdir has to be an absolute path, not {self.workdir!r}")


def disk_in_memory(spec: SandboxSpec, *, file_systems: int = 1) -> int:
    """Bytes of each of the file systems in memory that a sandbox gets, where its spec does not say.

    What is written there counts as memory, and no killed process gives it back: it is kept to half of `memory_bytes`,
    or filling the disk would cost the executor its life.

    Raises:
        BackendUnavailable: both are given, and one does not fit into the other.
    """
    if spec.disk_bytes is not None:
        if spec.memory_bytes is not None and file_systems * spec.disk_bytes >= spec.memory_bytes:
            raise BackendUnavailable(
                f"disk_bytes of {spec.disk_bytes} does not fit into memory_bytes of {spec.memory_bytes}: files are "
                f"kept in memory here, in up to {file_systems} places of that size. Next step: raise memory_bytes, "
                "or leave disk_bytes out"
            )
        return spec.disk_bytes
    most = 1 << 30
    return most if spec.memory_bytes is None else max(1 << 20, min(most, spec.memory_bytes // (2 * file_systems)))


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as the technology itself lists it, whoever made it, and whether or not that one still lives."""

    backend: str
    id: str
    """The name that the backend gave it before it was created: `lachesis-` and random characters."""
    run_id: str
    task_id: str
    owner: str
    """The process that made it; see `owner.py`."""
    orphan: bool
    """Whether the owner is known to be gone. One on another machine is not."""
    created: float
    """Unix time in seconds, 0 when unknown."""
    detail: str = ""
    """One line in the technology's own terms: a state, a process id, a folder."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did. A command that ran out of time is `timed_out`, with the output it had written until then."""

    exit_code: int
    """The shell's exit code; 128 + signal when a signal ended it; 124 when `timed_out`."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    stdout_elided: int = 0
    """Bytes cut out of stdout to keep it within `max_output`: they are missing after its first `max_output // 2`."""
    stderr_elided: int = 0
    duration: float = 0.0
    """Seconds of wall-clock time."""
    execution: str = ""
    """Names the execution: `Sandbox.read_output` finds the whole of a truncated output by it."""

    @property
    def truncated(self) -> bool:
        return bool(self.stdout_elided or self.stderr_elided)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A background process: `exit_code` is None while it runs."""

    exit_code: int | None
    output_size: int
    """Bytes of combined output written so far, whether or not they are still kept."""


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Bytes of a background process' combined stdout and stderr."""

    data: bytes
    offset: int
    """Position of the first byte of `data` in the whole output; later than asked for when older output was dropped."""
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
        """Output from `offset` on, at most `limit` bytes. Without any, waits `wait` seconds for output or the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to its standard input. Raises `ProcessLookupError` when the process has ended."""
        ...

    async def close_stdin(self) -> None: ...

    async def kill(self) -> None:
        """Kill it with everything it started, `setsid` children included. No error when it has ended already."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place. Paths are inside paths; relative ones start at `workdir`."""

    @property
    def id(self) -> str: ...

    @property
    def workdir(self) -> str: ...

    @property
    def python(self) -> str | None:
        """Path of a Python >= 3.8 inside, None where there is none."""
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

        With `fresh` it starts in `workdir` with the variables that the sandbox was made with, whatever earlier commands
        changed, and changes nothing for later ones: for a reward that must not run with the agent's PATH.

        When `timeout` seconds are over, everything that the command started is killed. A child that the command left
        in the background lives on and does not delay the result.

        Raises:
            SandboxLost: the sandbox is gone. Whether the command ran is unknown; it is never run twice.
        """
        ...

    async def read_output(
        self, result: ExecResult, stream: Literal["stdout", "stderr"] = "stdout", *, offset: int = 0, limit: int
    ) -> bytes:
        """Bytes of the whole output behind a truncated result, also those that were elided from it.

        Raises:
            FileNotFoundError: it is not kept any more: only that of the last few truncated results is.
        """
        ...

    async def start(self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Process:
        """Start `command` with bash in the background, with the same working directory and variables as `exec`."""
        ...

    async def processes(self) -> list[Process]:
        """Background processes in the order they were started, ended ones included."""
        ...

    async def stop_processes(self) -> None:
        """Kill everything that runs inside, whatever started it. The sandbox itself stays usable."""
        ...

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Raises `FileNotFoundError`, `IsADirectoryError` or `PermissionError` as the file system does."""
        ...

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Replace the file whole, making missing parent folders. Readers see the old file or the new one."""
        ...

    def read_chunks(self, path: str) -> AsyncIterator[bytes]:
        """The file's bytes from beginning to end, in constant memory at any size. Errors as `read_bytes`."""
        ...

    async def write_chunks(self, path: str, chunks: AsyncIterable[bytes]) -> None:
        """`write_bytes` in constant memory at any size: the file is replaced once all chunks have come."""
        ...

    async def upload_dir(self, local: str | os.PathLike[str], remote: str) -> None:
        """Copy what is below the folder `local` of this machine into the folder `remote`, made if missing.

        Contents, modes and symbolic links are kept, owners are not.
        """
        ...

    async def download_dir(self, remote: str, local: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        """Copy what is below the folder `remote` into the folder `local` of this machine, made if missing.

        Members that would land outside `local`, and devices, are refused.

        Raises:
            OSError: it cannot be read, or it holds more than `max_bytes` (what came before stays).
        """
        ...

    async def close(self) -> None:
        """End every process and remove every trace. May be called twice."""
        ...


@runtime_checkable
class SupportsSnapshot(Protocol):
    """A sandbox whose file system can be kept as an image."""

    async def snapshot(self) -> str:
        """Keep the file system as it is now; returns what to set `SandboxSpec.image` to for more of the same."""
        ...


@runtime_checkable
class SupportsPty(Protocol):
    """A sandbox that can give a program a terminal."""

    async def open_pty(
        self,
        command: str,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """`Sandbox.start` with a terminal as standard input, output and error. Its `close_stdin` types Ctrl-D."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A technology that makes sandboxes.

    A backend is a class with these methods. It is found by its registered name, by an entry point of the group
    `lachesis.backends`, or as `package.module:Class`. Its options are the parameters of its constructor: types and
    defaults are read from the signature, help from the `Args:` section of the constructor's docstring. Parameters that
    take callables, or types that the module imports under `TYPE_CHECKING` only, are for programs and are no options.

    `lachesis.testing.backend_suite` tests everything that these protocols promise.
    """

    @property
    def name(self) -> str: ...

    async def check(self) -> Availability:
        """Try it for real, cheaply. Never raises."""
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox that is ready for commands.

        Raises:
            BackendUnavailable: this machine cannot run it.
            BackendError: it failed this time; trying again may help.
        """
        ...

    async def sandboxes(self) -> list[SandboxInfo]:
        """Every sandbox of this project that the technology has, those of other processes and ended ones included.

        Raises:
            BackendUnavailable: the technology cannot be asked.
        """
        ...

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """Remove orphans, or with `everyone` living owners' sandboxes, too; with `run_id` only that run's.

        Returns those that are removed. May be called by any process at any time.
        """
        ...
