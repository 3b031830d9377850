"""Sandboxes by Apptainer or Singularity: images of high-performance computing, without a daemon and without privileges.

No instance is started: the sandbox is one `exec` whose program is the executor, PID 1 of a new namespace. It lives as
long as its stream, and so no longer than its owner.

Apptainer always runs as a plain user, also for root: started by real root, it sets neither a limit for written data nor
a user namespace. All files are written to one tmpfs of bounded size.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from backends.base import Availability
from backends.errors import BackendError, BackendUnavailable
from backends.failures import typed_failures
from backends.host import cgroups, hardened, records
from backends.host.bubblewrap import WORKDIR
from backends.host.kernel import CAP_SYS_ADMIN, holds
from backends.host.machine import environment
from backends.host.plan import Disk, Plan
from backends.host.runtime import portable_runtime, runtime_command
from backends.host.sandbox import HostSandbox
from backends.host.sandboxes import HostSandboxes
from backends.limits import countable
from backends.spec import Profile, SandboxInfo, SandboxSpec, check_profile, disk_in_memory, hardened_spec, reject_fields
from backends.tasks import in_own_thread

from .images import Images, Progress
from .installation import HOME, MEBIBYTE, Installation, as_plain_user, command, find, run, uid_inside

_ENVIRONMENT_PROBE = "import json, os; print(json.dumps(dict(os.environ)))"
_OWN_VARIABLES = re.compile(r"(?:APPTAINER|SINGULARITY)|(?:PS1|PROMPT_COMMAND|PWD|OLDPWD|SHLVL|_|HOME|LC_CTYPE)\Z")


class SingularityBackend:
    """Sandboxes from root folders, SIF files and images of registries, in about a tenth of a second each.

    Everything inside may be written to; the image stays as it is. Files of a root folder that belong to another user
    or group than the one that makes the sandbox can only be read.

    `cpus` (2), `memory_bytes` (2 GiB) and `pids` (2048) need cgroups that this process may write to; where it may not,
    there are no such defaults, which a warning says. `disk_bytes` is 1 GiB unless given, in memory; `memory_bytes`
    includes the files.
    """

    name = "singularity"

    def __init__(
        self,
        binary: str | os.PathLike[str] | None = None,
        *,
        image: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        profile: Profile = "standard",
    ) -> None:
        """
        Args:
            binary: the program; without it, `apptainer` or else `singularity` on PATH.
            image: the image of sandboxes whose spec names none.
            progress: called with each line of text while an image is pulled; without it, the lines are logged.
            profile: "hardened" needs an ordinary user, an installation without setuid programs, and cgroups for
                limits, and is an error where one is missing.
        """
        self._hardened = check_profile(profile)
        self._binary = None if binary is None else os.fspath(binary)
        self._image = None if image is None else os.fspath(image)
        self._images = Images(progress)
        self._host = HostSandboxes(self.name)
        self._lock = threading.Lock()  # held by worker threads only: it works for any number of event loops
        self._installation: Installation | None = None
        self._environments: dict[Path, dict[str, str]] = {}

    def __repr__(self) -> str:
        return f"SingularityBackend(binary={self._binary!r}, image={self._image!r})"

    async def check(self) -> Availability:
        return await self._host.in_thread(self._check)

    def _check(self) -> Availability:
        try:
            with self._lock:
                self._installation, availability = find(self._binary)
            if self._installation is None:
                return availability
            available = self._host.available()
            lacking = self._require(self._installation)
        except BackendError as error:
            return Availability.lacking(error)
        return replace(
            availability,
            isolation=hardened.isolation("Apptainer"),
            limits=f"{cgroups.describe(available)}; disk: a file system in memory",
            better=[*countable(), *hardened.advice(lacking)],
        )

    def _require(self, installation: Installation) -> list[tuple[str, str]]:
        """What this machine lacks for the profile `hardened`. Raises `BackendUnavailable` if that profile is set."""
        lacking = hardened.lacks(self._host.available())
        if not installation.configurable:
            lacking.append(("the size of disks is the administrator's", "use an installation without setuid programs"))
        if self._hardened:
            hardened.require_nothing("backend 'singularity'", lacking)
        return lacking

    def _found(self) -> Installation:
        with self._lock:
            if self._installation is None:
                self._installation, availability = find(self._binary)
                if self._installation is None:
                    raise BackendUnavailable(
                        f"backend 'singularity' cannot make sandboxes: {availability.detail}. "
                        f"Next step: {availability.fix}"
                    )
            return self._installation

    @typed_failures
    async def create(self, spec: SandboxSpec) -> HostSandbox:
        """See `Backend.create`. An image that is new here is pulled or unpacked first."""
        reject_fields("singularity", spec, "root")
        if self._hardened:
            spec = hardened_spec(spec)
            await self._host.in_thread(lambda: self._require(self._found()))
        reference = spec.image if spec.image is not None else self._image
        if reference is None:
            raise BackendUnavailable(
                "backend 'singularity' needs an image. Next step: set `image` to a root folder, a SIF file, or a "
                "reference like docker://debian:12"
            )
        image = await in_own_thread(lambda: self._images.folder([*as_plain_user(), self._found().path], reference))
        sandbox = await self._host.create(
            spec,
            lambda id, limited, arguments, _: self._plan(id, limited, image, arguments),
            detail=reference,
        )
        try:
            await _name_user(sandbox)
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def sandboxes(self) -> list[SandboxInfo]:
        return await self._host.sandboxes()

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. With `everyone`, an owner finds its sandbox lost."""
        return await self._host.reap(run_id=run_id, everyone=everyone)

    # In worker threads: everything below blocks.

    def _plan(self, id: str, spec: SandboxSpec, image: Path, arguments: Sequence[str]) -> Plan:
        installation = self._found()
        disk = spec.disk_bytes
        if disk is None and installation.configurable:
            disk = disk_in_memory(spec) // MEBIBYTE * MEBIBYTE
        runtime, own = portable_runtime(), None
        if os.geteuid() == 0:  # see `Bubblewrap.disk_of`; other users would need a namespace more
            mount = records.folder(id) / "files" / "mount"
            mount.mkdir(parents=True)
            own = Disk(str(mount), MEBIBYTE, overlays=[(str(runtime), "runtime")])
            runtime = mount / "runtime"
        return Plan(
            command(
                installation,
                image,
                runtime_command(*arguments),
                disk_bytes=disk,
                network=spec.network,
                own_ipc=not holds(CAP_SYS_ADMIN),  # else it is started in one with limits
                runtime=runtime,
            ),
            disk=own,
            workdir=spec.workdir or WORKDIR,
            env={**environment(image=True), "SHELL": "/bin/sh", **self._image_environment(installation, image)},
        )

    def _image_environment(self, installation: Installation, image: Path) -> dict[str, str]:
        """The variables of the image's start-up files, read once per image; a bare root folder has none."""
        if not (image / ".singularity.d" / "env").is_dir():
            return {}
        if image not in self._environments:
            inner = [*runtime_command()[:1], "-I", "-S", "-c", _ENVIRONMENT_PROBE]
            output = run(command(installation, image, inner, disk_bytes=None, network=False), f"the image {image}")
            found: dict[str, str] = json.loads(output)
            self._environments[image] = {
                name: value for name, value in found.items() if not _OWN_VARIABLES.match(name) and value
            }
        return self._environments[image]


async def _name_user(sandbox: HostSandbox) -> None:
    """Name the agent's user and group if the image has no names for their numbers."""
    uid = uid_inside()
    for path, line in (
        ("/etc/passwd", f"agent:x:{uid}:{uid}:agent:{HOME}:/bin/sh\n"),
        ("/etc/group", f"agent:x:{uid}:\n"),
    ):
        with contextlib.suppress(OSError):
            try:
                known = await sandbox.read_bytes(path)
            except FileNotFoundError:
                known = b""
            if not re.search(rb"^[^:\n]*:[^:\n]*:%d:" % uid, known, re.MULTILINE):
                newline = b"" if not known or known.endswith(b"\n") else b"\n"
                await sandbox.write_bytes(path, known + newline + line.encode())
