"""Which Apptainer or Singularity works on this machine, and its command line."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.base import Availability
from backends.errors import BackendError, BackendUnavailable
from backends.host.bubblewrap import home
from backends.host.folders import cached
from backends.host.kernel import kernel_files
from backends.host.layout import RUNTIME
from backends.host.runtime import portable_runtime

_DISK = 1 << 30
MEBIBYTE = 1 << 20
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
HOME = home()


@dataclass(frozen=True, slots=True)
class Installation:
    """An Apptainer or Singularity that works."""

    path: str
    version: str
    configurable: bool = True
    """Whether it accepts our configuration. One with setuid programs accepts it only from root."""


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
            run(command(installation, Path(image), inner, disk_bytes=None, network=False), installation.path)
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
    arguments = [*as_plain_user(), installation.path, "--silent", "--nocolor"]
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
    for folder in ["/dev/shm", *([] if _is_ours(image / HOME.lstrip("/")) else [HOME])]:
        arguments += ["--scratch", folder]
    for source, target in [(str(runtime or portable_runtime()), RUNTIME), *_hidden_proc()]:
        arguments += ["--mount", f'type=bind,"src={source}",dst={target},ro']
    return [*arguments, str(image), *inner]


def as_plain_user() -> list[str]:
    """For root, a user namespace in which it is another user, who must be known on this machine."""
    if os.geteuid() != 0:
        return []
    unshare = shutil.which("unshare", path=os.environ.get("PATH", "") + ":/usr/bin:/bin")
    if unshare is None:
        raise BackendUnavailable("root needs the program `unshare` here. Next step: install util-linux")
    return [unshare, "--user", f"--map-user={uid_inside()}", f"--map-group={uid_inside()}", "--"]


def uid_inside() -> int:
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
    size = disk_bytes // MEBIBYTE
    if size == 0:
        raise BackendUnavailable(
            f"disk_bytes of {disk_bytes} cannot be enforced: Apptainer counts in MiB. Next step: set it to {MEBIBYTE} "
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


def run(argv: Sequence[str], what: str) -> str:
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
