"""Sandboxes by Apptainer or Singularity: images of high-performance computing, without a daemon and without privileges.

No instance is started: the sandbox is one `exec` whose program is the executor, PID 1 of a new namespace. It lives as
long as its stream, and so no longer than its owner.

Apptainer always runs as a plain user, also for root: started by real root, it sets neither a limit for written data nor
a user namespace. All files are written to one tmpfs of bounded size.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backends.base import (
    Availability,
    BackendError,
    BackendUnavailable,
    Profile,
    SandboxInfo,
    SandboxSpec,
    check_profile,
    disk_in_memory,
    hardened_spec,
    reject_fields,
)
from backends.failures import typed_failures
from backends.host import cgroups, hardened, records
from backends.host.bubblewrap import WORKDIR, home
from backends.host.folders import cached
from backends.host.machine import environment
from backends.host.plan import Disk, Plan
from backends.host.runtime import RUNTIME, portable_runtime, runtime_command
from backends.host.sandboxes import HostSandbox, HostSandboxes
from backends.host.spawn_server import CAP_SYS_ADMIN, holds, kernel_files
from backends.limits import countable
from backends.tasks import in_own_thread

from .images import Images, Progress

_DISK = 1 << 30
_MEBIBYTE = 1 << 20
_INSTALL = "install apptainer (https://apptainer.org/docs/admin/main/installation.html), or set `binary` to it"
_VERSION = re.compile(r"(?:apptainer|singularity(?:-ce|-pro)?) version \S+")
# Replaces the installation's file, which may mount folders of the host.
_CONFIGURATION = """\
allow setuid = no
allow pid ns = yes
allow user ns = yes
allow ipc ns = yes
allow uts ns = yes
config passwd = no
config group = no
config resolv_conf = {resolv_conf}
mount proc = yes
mount sys = no
mount dev = minimal
mount devpts = yes
mount home = no
mount tmp = yes
mount hostfs = no
mount slave = yes
user bind control = yes
enable fusemount = no
enable overlay = yes
enable underlay = yes
sessiondir max size = {size}
memory fs type = tmpfs
root default capabilities = no
systemd cgroups = no
"""
_OF_INIT = ("autogroup", "clear_refs", "coredump_filter", "oom_adj", "oom_score_adj", "sched", "timerslack_ns")
"""Files of a process in /proc that others of the same user can write to."""
_ENVIRONMENT_PROBE = "import json, os; print(json.dumps(dict(os.environ)))"
_HOME = home()
_OWN_VARIABLES = re.compile(r"(?:APPTAINER|SINGULARITY)|(?:PS1|PROMPT_COMMAND|PWD|OLDPWD|SHLVL|_|HOME|LC_CTYPE)\Z")


@dataclass(frozen=True, slots=True)
class Installation:
    """An Apptainer or Singularity that works."""

    path: str
    version: str
    configurable: bool = True
    """Whether it accepts our configuration. One with setuid programs accepts it only from root."""


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
            reason, _, step = str(error).partition(". Next step: ")
            return Availability(False, reason, step or "see the message")
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
        image = await in_own_thread(lambda: self._images.folder([*_as_plain_user(), self._found().path], reference))
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
            disk = disk_in_memory(spec) // _MEBIBYTE * _MEBIBYTE
        runtime, own = portable_runtime(), None
        if os.geteuid() == 0:  # see `Bubblewrap.disk_of`; other users would need a namespace more
            mount = records.folder(id) / "files" / "mount"
            mount.mkdir(parents=True)
            own = Disk(str(mount), _MEBIBYTE, overlays=[(str(runtime), "runtime")])
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
            output = _run(command(installation, image, inner, disk_bytes=None, network=False), f"the image {image}")
            found: dict[str, str] = json.loads(output)
            self._environments[image] = {
                name: value for name, value in found.items() if not _OWN_VARIABLES.match(name) and value
            }
        return self._environments[image]


def find(binary: str | None = None) -> tuple[Installation | None, Availability]:
    """The first installation that works: `binary` alone if it is given, otherwise those on PATH. Blocks."""
    on_path = [shutil.which(name) for name in ("apptainer", "singularity")]
    candidates = [binary] if binary is not None else [path for path in on_path if path is not None]
    failure = ""
    for candidate in candidates:
        try:
            done = subprocess.run([candidate, "--version"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            failure = failure or f"{candidate}: {error}"
            continue
        version = _VERSION.search(done.stdout)
        if version is None:  # there is a game of that name
            first = (done.stdout or done.stderr).strip().partition("\n")[0]
            failure = failure or f"{candidate} is not Apptainer; it prints {first[:100]!r}"
            continue
        for configurable in (True, False):
            installation = Installation(candidate, version[0], configurable)
            problem = _try(installation)
            if problem is None:
                weaker = "" if configurable else ", size of disks as set by its administrator"
                return installation, Availability(True, f"{version[0]} ({candidate}){weaker}")
            failure = failure or f"{candidate} ({version[0]}) does not work: {problem}"
    if not candidates:
        return None, Availability(False, "neither apptainer nor singularity is on PATH", _INSTALL)
    return None, Availability(False, failure, _fix(failure))


def _try(installation: Installation) -> str | None:
    """Run a sandbox in an empty root. Returns the reason of a failure."""
    with tempfile.TemporaryDirectory(prefix="lachesis-") as image:
        Path(image).chmod(0o755)
        inner = [f"{RUNTIME}/bin/bash", "--norc", "--noprofile", "-c", ":"]
        try:
            _run(command(installation, Path(image), inner, disk_bytes=None, network=False), installation.path)
        except BackendError as error:
            return str(error)
    return None


def _fix(failure: str) -> str:
    if "namespace" in failure or "ermitted" in failure or "uid_map" in failure:
        return (
            "let this user make user namespaces: sudo sysctl kernel.unprivileged_userns_clone=1 (Debian), "
            "user.max_user_namespaces=15000, or the profile of AppArmor that Apptainer's package has (Ubuntu)"
        )
    return _INSTALL


def command(
    installation: Installation,
    image: Path,
    inner: Sequence[str],
    *,
    disk_bytes: int | None,
    network: bool,
    own_ipc: bool = True,
    runtime: Path | None = None,
) -> list[str]:
    """The command line that runs `inner` as PID 1 of a new sandbox made from the folder `image`. Blocks.

    Without `own_ipc` it keeps the IPC namespace in which it is started. `runtime` is where the portable runtime is,
    unless it is in the cache.

    Raises:
        BackendUnavailable: `disk_bytes` cannot be enforced.
    """
    arguments = [*_as_plain_user(), installation.path, "--silent", "--nocolor"]
    if installation.configurable:
        arguments += ["--config", str(_configuration(_DISK if disk_bytes is None else disk_bytes, network))]
    elif disk_bytes is not None:
        raise BackendUnavailable(
            f"disk_bytes cannot be enforced: {installation.path} has setuid programs and accepts no "
            "configuration but root's. Next step: use an installation without them, or leave disk_bytes out"
        )
    arguments += ["exec", "--contain", "--pid", "--cleanenv", "--no-eval", "--no-init", "--writable-tmpfs", "--no-home"]
    arguments += ["--ipc"] if own_ipc else []
    arguments += ["--no-mount", "sys,hostfs,bind-paths", "--hostname", "sandbox", "--pwd", "/"]
    arguments += [] if network else ["--net", "--network", "none"]
    for folder in ["/dev/shm", *([] if _is_ours(image / _HOME.lstrip("/")) else [_HOME])]:
        arguments += ["--scratch", folder]
    for source, target in [(str(runtime or portable_runtime()), RUNTIME), *_hidden_proc()]:
        arguments += ["--mount", f'type=bind,"src={source}",dst={target},ro']
    return [*arguments, str(image), *inner]


def _as_plain_user() -> list[str]:
    """For root, a user namespace in which it is another user, who must be known on this machine."""
    if os.geteuid() != 0:
        return []
    unshare = shutil.which("unshare", path=os.environ.get("PATH", "") + ":/usr/bin:/bin")
    if unshare is None:
        raise BackendUnavailable("root needs the program `unshare` here. Next step: install util-linux")
    return [unshare, "--user", f"--map-user={_uid()}", f"--map-group={_uid()}", "--"]


def _uid() -> int:
    """The agent's user id inside."""
    if os.geteuid() != 0:
        return os.geteuid()
    try:
        return pwd.getpwuid(1000).pw_uid
    except KeyError:
        return 65534


def _is_ours(folder: Path) -> bool:
    try:
        return folder.is_dir() and folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _configuration(disk_bytes: int, network: bool) -> Path:
    size = disk_bytes // _MEBIBYTE
    if size == 0:
        raise BackendUnavailable(
            f"disk_bytes of {disk_bytes} cannot be enforced: Apptainer counts in MiB. Next step: set it to {_MEBIBYTE} "
            "or more"
        )
    text = _CONFIGURATION.format(size=size, resolv_conf="yes" if network else "no")

    def write(folder: Path) -> None:
        (folder / "apptainer.conf").write_text(text)

    return cached(f"singularity-{hashlib.sha256(text.encode()).hexdigest()[:20]}", write) / "apptainer.conf"


def _hidden_proc() -> list[tuple[str, str]]:
    """Mounts over files in /proc that kernel uid 0 may write to even without capabilities.

    The executor's settings are among them: with a raised oom_score_adj, the kernel would kill it and not a command.
    """
    mounts: list[tuple[str, str]] = []
    if os.geteuid() == 0:
        mounts += kernel_files()
        own = [f"/proc/1/{task}{name}" for name in _OF_INIT for task in ("", "task/1/")]
        mounts += [(os.devnull, place) for place in own if Path(place).exists()]
    return mounts


async def _name_user(sandbox: HostSandbox) -> None:
    """Name the agent's user and group if the image has no names for their numbers."""
    uid = _uid()
    for path, line in (
        ("/etc/passwd", f"agent:x:{uid}:{uid}:agent:{_HOME}:/bin/sh\n"),
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


def _run(argv: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(
            argv, env={}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{what} cannot be run: {error}") from error
    if done.returncode != 0:
        reason = done.stderr.strip().replace("\n", "; ") or f"exit code {done.returncode}"
        raise BackendError(f"{what} cannot be run: {reason}")
    return done.stdout
