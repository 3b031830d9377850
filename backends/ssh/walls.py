"""What the far machine of an ssh connection is made of, and the walls around a sandbox there.

Sent over ssh together with `proc_walls.py` and `remote.py`, its only user: standard library, Python 3.8 or later.
`bubblewrap.py` does the same for the machine that it runs on.
"""

# ruff: noqa: PTH102, PTH106, PTH110, PTH112, PTH114, PTH115, PTH118, PTH123, UP022, UP031
# (pathlib would add to the start-up time; Python 3.8 has no newer spellings)
from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from backends.proc_walls import bubblewrap_proc

if TYPE_CHECKING:  # on Python 3.8 these could not be evaluated
    from collections.abc import Iterable
    from typing import Any

    Message = dict[str, Any]

PREFIX = "lachesis-"
SUFFIX = ".ssh"
"""Tells our cgroups from those that other backends make on the same machine."""
WORKDIR, HOME, UID = "/workspace", "/home/agent", "1000"
SHM_BYTES = 64 << 20
# Only what programs need in order to start and to check certificates. What root starts can read what only root can:
# a whole folder (/etc/ssl has private keys) is not bound lightly.
ETC = [
    "alternatives",
    "ca-certificates.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "timezone",
]


class Refused(Exception):
    """A field of the spec that this machine cannot honour: (field, reason, next step)."""


# --- what this machine has -------------------------------------------------------------------------------------------


def interpreter() -> str:
    """The running Python without its virtual environment: the one that is bound into sandboxes."""
    path = os.path.join(sys.base_prefix, "bin", "python%d.%d" % sys.version_info[:2])
    return path if os.path.exists(path) else os.path.realpath(sys.executable)


PIDS = 2048
"""Processes of a sandbox where none are asked for, on machines that can enforce it."""


def hierarchies() -> dict[str, tuple[int, str]]:
    """`{controller: (version, folder)}` of the cgroup controllers that are mounted."""
    found: dict[str, tuple[int, str]] = {}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            folder, (kind, _, options) = left.split()[4], right.split()[:3]
            if kind == "cgroup":
                found.update({name: (1, folder) for name in options.split(",") if name in ("cpu", "memory", "pids")})
            elif kind == "cgroup2":
                with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.controllers")) as controllers:
                    for name in controllers.read().split():
                        found.setdefault(name, (2, folder))
    return found


def settings(limits: Message) -> list[tuple[str, str, list[tuple[int, str, str, bool]]]]:
    """`[(field, controller, [(cgroup version, file, value, whether it may be missing)])]` for the limits asked for."""
    wanted = []
    cpus, memory, pids = limits.get("cpus"), limits.get("memory_bytes"), limits.get("pids")
    if cpus is not None:
        quota = str(max(1000, int(cpus * 100000)))
        files = [(1, "cpu.cfs_period_us", "100000", False), (1, "cpu.cfs_quota_us", quota, False)]
        wanted.append(("cpus", "cpu", [*files, (2, "cpu.max", quota + " 100000", False)]))
    if memory is not None:
        files = [
            (1, "memory.limit_in_bytes", str(memory), False),
            (1, "memory.memsw.limit_in_bytes", str(memory), True),
        ]
        files += [(2, "memory.max", str(memory), False), (2, "memory.swap.max", "0", True)]
        wanted.append(("memory_bytes", "memory", files))
    if pids is not None:
        wanted.append(("pids", "pids", [(1, "pids.max", str(pids), False), (2, "pids.max", str(pids), False)]))
    return wanted


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def make_groups(id: str, limits: Message) -> list[str]:
    """Make the cgroups of `id` that enforce `limits`; returns their folders, removes them again when one fails."""
    groups: list[str] = []
    available = hierarchies()
    for field, controller, files in settings(limits):
        try:
            if controller not in available:
                raise OSError(errno.ENOENT, "no cgroup hierarchy has the controller %r" % controller)
            version, mount = available[controller]
            group = os.path.join(mount, id + SUFFIX)
            if version == 2:
                with open(os.path.join(mount, "cgroup.subtree_control")) as enabled:
                    missing = controller not in enabled.read().split()
                if missing:
                    write(os.path.join(mount, "cgroup.subtree_control"), "+" + controller)
            if group not in groups:
                os.mkdir(group)
                groups.append(group)
            for for_version, name, value, optional in files:
                if for_version == version:
                    with contextlib.suppress(FileNotFoundError) if optional else contextlib.nullcontext():
                        write(os.path.join(group, name), value)
        except OSError as error:
            remove_groups(groups)
            fix = "log in as a user who may write cgroups (root), or leave %s out" % field
            raise Refused(field, str(error), fix) from None
    return groups


def remove_groups(groups: Iterable[str]) -> None:
    """A group can be removed once its last process is reaped, which may be a moment later."""
    end = time.monotonic() + 3.0
    for group in groups:
        while True:
            try:
                os.rmdir(group)
            except OSError as error:
                if error.errno == errno.EBUSY and time.monotonic() < end:
                    time.sleep(0.002)
                    continue
            break


def groups_of(id: str) -> list[str]:
    groups = {os.path.join(mount, id + SUFFIX) for _, mount in hierarchies().values()}
    return sorted(group for group in groups if os.path.isdir(group))


def counts_processes_per_namespace() -> bool:
    """Whether RLIMIT_NPROC counts those of one user namespace (Linux 5.14 and later, never for root)."""
    release = os.uname().release.split(".")
    return os.geteuid() != 0 and (int(release[0]), int(release[1].partition("-")[0])) >= (5, 14)


def enforceable() -> dict[str, str]:
    """`{field: why it cannot be enforced, empty when it can}`, found out by trying."""
    verdict = {}
    for field, value in (("cpus", 1), ("memory_bytes", 1 << 30), ("pids", 100)):
        try:
            remove_groups(make_groups("%sprobe-%d" % (PREFIX, os.getpid()), {field: value}))
            verdict[field] = ""
        except Refused as refusal:
            verdict[field] = refusal.args[1]
    if counts_processes_per_namespace():
        verdict["pids"] = ""
    return verdict


# --- walls -----------------------------------------------------------------------------------------------------------


def memory_file(name: str, content: bytes) -> int:
    fd = os.memfd_create(name)  # inheritable once the child says so
    with open(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def system_folders() -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            arguments += ["--ro-bind", name, name]
    if not sys.base_prefix.startswith("/usr"):
        arguments += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    return arguments


def walls(plan: Message, files: dict[str, int], inner: list[str]) -> list[str]:
    """The command line that runs `inner` as PID 1 of a walled sandbox; `files` maps inside paths to descriptors."""
    size = str(plan["disk_bytes"])
    arguments = [plan["bwrap"], "--unshare-user", "--uid", UID, "--gid", UID]
    arguments += ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += [] if plan["network"] else ["--unshare-net"]
    arguments += ["--disable-userns"] if plan["disable_userns"] else []
    arguments += ["--hostname", "sandbox", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--as-pid-1"]
    arguments += system_folders()
    for name in [*ETC, "resolv.conf"] if plan["network"] else ETC:
        arguments += ["--ro-bind-try", "/etc/" + name, "/etc/" + name]
    for inside, fd in files.items():
        arguments += ["--perms", "0444", "--file", str(fd), inside]
    arguments += bubblewrap_proc()
    arguments += ["--dev", "/dev", "--perms", "1777", "--size", str(min(SHM_BYTES, plan["disk_bytes"]))]
    arguments += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    if not any((plan["workdir"] + "/").startswith(folder + "/") for folder in ("/", WORKDIR, HOME, "/tmp", "/dev/shm")):
        arguments += ["--perms", "0755", "--size", size, "--tmpfs", plan["workdir"]]  # below it, others may be mounted
    for folder, mode in ((WORKDIR, "0755"), (HOME, "0755"), ("/tmp", "1777")):
        arguments += ["--perms", mode, "--size", size, "--tmpfs", folder]
    arguments += ["--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
    return [*arguments, "--chdir", "/", "--remount-ro", "/", "--", *inner]


def try_walls(bwrap: str) -> tuple[bool, str]:
    """Run a whole walled sandbox: (whether further user namespaces can be forbidden inside, what went wrong)."""
    failures = []
    for disable_userns in (True, False):
        plan = {"bwrap": bwrap, "network": False, "disable_userns": disable_userns, "disk_bytes": 1 << 20}
        command = walls({**plan, "workdir": WORKDIR}, {}, [interpreter(), "-I", "-S", "-c", ""])
        try:
            done = subprocess.run(
                command, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return False, str(error)
        if done.returncode == 0:
            return disable_userns, ""
        failures.append(done.stderr.decode(errors="replace").strip() or "exit code %d" % done.returncode)
    return False, failures[0].replace("\n", "; ")
