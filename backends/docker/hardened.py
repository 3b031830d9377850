"""What keeps containers in, and the profile `hardened`: a kernel of its own, remapped users, no root inside."""

from __future__ import annotations

import re
from dataclasses import replace

from backends.host.bubblewrap import WORKDIR
from backends.host.hardened import require_nothing
from backends.spec import SandboxSpec, hardened_spec

from .client import EngineInfo
from .container import Image, Options, is_root

UNPRIVILEGED = "1000:1000"
"""The user in images whose user is root."""
DISK = 256 << 20
"""`disk_bytes` where a spec leaves it open. There may be four such folders in memory."""
_OWN_KERNEL = re.compile(r"runsc|gvisor|kata", re.IGNORECASE)
_INSTALL = "install gVisor (https://gvisor.dev) or Kata as a runtime of the engine"
_REMAP = "set userns-remap in the engine's daemon.json, or use a rootless engine"


def has_own_kernel(runtime: str | None) -> bool:
    """Whether an OCI runtime is gVisor or Kata, by its name."""
    return bool(_OWN_KERNEL.search(runtime or ""))


def hardened(options: Options, facts: EngineInfo) -> Options:
    """`options` with a runtime that has a kernel of its own.

    Raises:
        BackendUnavailable: a part of the profile is not available.
    """
    lacking = []
    found = [name for name in facts.runtimes if has_own_kernel(name)]
    runtime = options.runtime or next(iter(found), None)
    if runtime not in found:
        named = "" if runtime is None else f", and {runtime!r} is not one"
        lacking.append((f"it has no runtime with a kernel of its own{named}", _INSTALL))
    if not facts.userns:
        lacking.append(("user 0 inside is user 0 outside", _REMAP))
    if options.user is not None and is_root(options.user):
        lacking.append((f"the option user is {options.user!r}", "leave user out"))
    if options.capabilities:
        lacking.append(("the option capabilities keeps some", "leave capabilities out"))
    require_nothing(f"{facts.product} {facts.version}", lacking)
    return replace(options, runtime=runtime)


def in_image(spec: SandboxSpec, options: Options, image: Image) -> tuple[SandboxSpec, Options]:
    """Both without root inside, with every limit, and with a working directory that a limit can hold for."""
    if options.user is None and is_root(image.user):
        options = replace(options, user=UNPRIVILEGED)
    return hardened_spec(spec, disk_bytes=DISK, workdir=image.workdir or WORKDIR), options


def isolation(options: Options, facts: EngineInfo) -> str:
    """`Availability.isolation`."""
    own = "own files, processes, IPC and network"
    kept = f"the capabilities {', '.join(options.capabilities)}" if options.capabilities else "no capabilities"
    users = "remapped users" if facts.userns else "the machine's users"
    calls = "filtered system calls" + ("" if facts.seccomp in ("", "unconfined") else ", by the engine as well")
    kernel = f"the kernel of {options.runtime}" if has_own_kernel(options.runtime) else "the machine's kernel"
    return f"container: {own}; {calls}; {kept}; {users}; {kernel}"


def better(options: Options, facts: EngineInfo) -> list[str]:
    """`Availability.better`."""
    found = []
    if not has_own_kernel(options.runtime):
        runtime = next(filter(has_own_kernel, facts.runtimes), None)
        found.append(f"for a kernel of its own: {f'the option runtime: {runtime}' if runtime else _INSTALL}")
    if not facts.userns:
        found.append(f"user 0 inside is user 0 outside: {_REMAP}")
    return found
