"""What every sandbox technology offers: one Protocol for making sandboxes, one for using them, one set of errors.

Infrastructure that fails raises (`BackendError` and its children); what the command itself does, including running
out of time, is a result. A caller can therefore tell a broken sandbox from a wrong answer without reading texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

MAX_OUTPUT = 1_000_000
"""Bytes of stdout, and of stderr, that `Sandbox.exec` keeps unless told otherwise."""


class BackendError(Exception):
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
    """What a rollout asks for. Only what the backend enforces may be asked for: it refuses a field it cannot honour."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set inside. Nothing of the host's environment is passed on."""
    network: bool = False
    """Whether it may use the network. Locally that is the host's own, its loopback and abstract sockets included."""
    disk_bytes: int = 1 << 30
    """Size limit of the workspace and, separately, of /tmp and the home folder."""
    lifetime: float = 3600.0
    """Seconds after which the sandbox ends itself, whoever still holds it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """`run_id` and `task_id`, for listings and error messages."""


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
    ) -> ExecResult:
        """Run `command` with bash. `cd` and exported variables persist into the next `exec` without `cwd` and `env`.

        When `timeout` seconds are over, everything that the command started is killed. A child that the command left
        in the background lives on and does not delay the result.

        Raises:
            SandboxLost: the sandbox is gone. Whether the command ran is unknown; it is never run twice.
        """
        ...

    async def start(self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Process:
        """Start `command` with bash in the background, with the same working directory and variables as `exec`."""
        ...

    async def processes(self) -> list[Process]:
        """Background processes in the order they were started, ended ones included."""
        ...

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Raises `FileNotFoundError`, `IsADirectoryError` or `PermissionError` as the file system does."""
        ...

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Replace the file whole, making missing parent folders. Readers see the old file or the new one."""
        ...

    async def close(self) -> None:
        """End every process and remove every trace. May be called twice."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A technology that makes sandboxes."""

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
