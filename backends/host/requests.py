"""What the owner asks of a machine, near or far, and what it makes of the answer."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence

from backends.errors import BackendError, BackendUnavailable, SandboxExhausted, SandboxLost
from backends.executor.kernel import STARVED
from backends.sandbox import ExecutorSandbox
from backends.spec import SandboxSpec, disk_in_memory

from .plan import Request


def request_of(spec: SandboxSpec, *, walled: bool, file_systems: int = 1, mounts: Sequence[str] = ()) -> Request:
    """The machine's part of `spec`.

    Args:
        file_systems: how many file systems in memory it will have.
        mounts: see `Request.mounts`; without isolation they can be read in any case.

    Raises:
        BackendUnavailable: isolation is off, and the spec has a field that needs it.
    """
    for name in () if walled else ("image", "root", "disk_bytes"):
        if getattr(spec, name):
            raise BackendUnavailable(
                f"{name} cannot be honoured without isolation: commands use the machine's own file system. Next step: "
                f"leave {name} out, or use isolation 'bubblewrap' (`sandbox: bubblewrap`)"
            )
    size = disk_in_memory(spec, file_systems=file_systems) if walled else 1
    limits = (spec.cpus, spec.memory_bytes, spec.pids)
    return Request(walled, size, spec.image, spec.workdir, spec.root, spec.network, *limits, tuple(mounts))


@contextlib.contextmanager
def explained(spec: SandboxSpec) -> Iterator[None]:
    """Name the next step where the kernel refuses an image."""
    try:
        yield
    except BackendError as error:
        if spec.image is not None and "overlay mount" in str(error):
            step = "use an image folder of your own, without other file systems mounted below it; or run as root"
            raise BackendUnavailable(f"{error}. Next step: {step}") from error
        raise


async def write_inside(sandbox: ExecutorSandbox, files: Mapping[str, bytes]) -> None:
    """Write `Plan.written`."""
    for path, data in files.items():
        with contextlib.suppress(OSError):  # the image may have a link in its place
            await sandbox.write_bytes(path, data)


def executor_death(code: int | None, last_words: str, starved: bool) -> SandboxLost:
    """The error that describes the end of an executor, a `SandboxExhausted` if the memory limit was its end.

    Args:
        code: its exit code, negative for a signal.
        last_words: the end of its standard error.
        starved: whether the kernel has killed processes of the sandbox at the memory limit.
    """
    if code is None:
        how = "it cannot be killed"
    elif code >= 0:
        how = f"exit code {code}"
    else:
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # real-time: no name
    text = f"its executor died ({how})" + (f": {last_words}" if last_words else "")
    if not starved:
        return SandboxLost(text)
    text += ", after the kernel had killed processes for want of memory (memory_bytes)"
    killed = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the latter where bubblewrap reports it
    return SandboxExhausted(text) if code in (*killed, STARVED) else SandboxLost(text)
