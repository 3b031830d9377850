"""From fork to exec: a new process becomes the program of a job, or the executor of a sandbox that bubblewrap makes.

It imports nothing that starts slowly. Its process has one thread: between fork and exec, anything may be done.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import sys

from .kernel import (
    CAP_SYS_ADMIN,
    CAP_SYS_RESOURCE,
    CLONE,
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_PARENT,
    IPC_LIMITS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    bind,
    check,
    cloned_mount,
    holds,
    is_real_root,
    kernel_files,
    libc,
    own_settings,
)

TYPE_CHECKING = False  # importing typing costs start-up time
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 15, 24, 38
JOINED = {"mnt": CLONE_NEWNS, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "net": 0x40000000}
"""The namespaces that bubblewrap makes and an executor enters, with their flags."""
NS_GET_USERNS = 0xB701
CAPABILITIES = 0x20080522
"""Version of the structures of capset(2)."""
RUNTIME = "/.lachesis"
"""The portable runtime's place inside: see `runtime.py`."""
OOM_SCORE = 500
"""When the machine's memory runs out, the kernel kills commands before the processes that make sandboxes."""
SHARERS = 4
"""The kernel counts inotify instances and watches of a user. No sandbox gets more than a quarter of them."""
SCRATCH = 200
"""Descriptors are first moved up here, so that none has a number that another one is to get."""
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
INSIDE = (min(FILES[0], FILES[1] * 7 // 8), FILES[1] * 7 // 8)
"""The limit of files of what is started. The kernel counts descriptors that are being passed by user, and refuses them
at the limit of who passes them: what runs inside must reach its own before its owner's."""
ROOT = os.geteuid() == 0
RESET = (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
OVERLAY = ",redirect_dir=on" if is_real_root() else ",userxattr"
"""Any user's overlay keeps its attributes as the user's own (Linux 5.11 and later). Folders of lower layers can then
not be renamed in one step (EXDEV), so root has the other kind."""
with open("/proc/self/stat") as _file:
    ARGUMENTS = [int(field) for field in _file.read().rpartition(")")[2].split()[45:47]]
    """Where the memory of this process has its command line, which others can read: begin and end."""


def make_disk(
    mount: str,
    size: int,
    folders: list[tuple[str, int]],
    overlays: list[tuple[str, str]],
    copied: list[tuple[str, str]],
    layers: Sequence[int] = (),
    users: int = -1,
) -> None:
    """Mount a `plan.Disk`, which only this process and its descendants see.

    Args:
        layers: sealed disks, the newest first. The new one shows what they hold, and takes the changes.
        users: the user namespace in which those were mounted; -1: a new one, where this user needs it.
    """
    uid, gid = os.geteuid(), os.getegid()
    if users >= 0:
        check(libc.setns(users, CLONE_NEWUSER), "entering the user namespace of disks")
        check(libc.unshare(CLONE_NEWNS), "making a mount namespace")
    elif libc.unshare(CLONE_NEWNS) != 0:
        check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "making a user namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "making mounts private")
    # Each file costs kernel memory beside its contents: their number is bounded as well.
    options = f"size={size},nr_inodes={max(4096, size >> 12)},mode=755"
    flags = MS_NOSUID | MS_NODEV
    check(libc.mount(b"tmpfs", os.fsencode(mount), b"tmpfs", flags, options.encode()), f"mounting {mount}")

    def make(name: str, mode: int) -> str:
        path = os.path.join(mount, name)
        if not (layers and os.path.isdir(path)):
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode)
        return path

    def overlay(changes: str, lower: str, name: str, below: Sequence[int], mode: int) -> None:
        under = [f"/proc/self/fd/{layer}/{changes}" for layer in below]
        upper = make(changes, mode)
        parts = {"upperdir": upper, "workdir": make("work-" + changes, 0o755)}
        options = ",".join([f"{key}={escaped(path)}" for key, path in parts.items()])
        options += ",lowerdir=" + ":".join([*under, *([escaped(lower)] if lower else [])]) + OVERLAY
        if below:
            like(under[0], upper)
        target = make(name, mode)
        long = "" if len(os.fsencode(options)) < 4096 else " (the path of TMPDIR is too long for it: set another)"
        check(
            libc.mount(b"overlay", os.fsencode(target), b"overlay", flags, os.fsencode(options)),
            f"overlay mount on {lower or 'a disk'}{long}",
        )

    if layers:  # over the folders of their own changes, which are then hidden
        for name in ("shm",) if any(name == "root" for _, name in overlays) else ("shm", "root"):
            overlay(name, "", name, layers, 0o1777)
        folders = []
    for name, mode in folders:
        make(name, mode)
    for number, (lower, name) in enumerate(overlays):
        mode = os.stat(lower).st_mode & 0o777 | 0o700
        overlay(f"upper{number}", lower, name, layers if name.startswith("root") else (), mode)
    empty = make("empty", 0o755)
    for source, name in copied:
        path = os.path.join(mount, name)
        if os.path.isdir(source):
            make(name, 0o755)
            options = f"lowerdir={escaped(source)}:{escaped(empty)}"
            done = libc.mount(b"overlay", os.fsencode(path), b"overlay", MS_RDONLY | flags, os.fsencode(options))
            check(done, f"overlay mount on {source}")
        elif os.path.exists(source):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(source, "rb") as original, open(path, "wb") as copy:
                copy.write(original.read())


def split(fds: list[int], *counts: int) -> list[list[int]]:
    """Take so many descriptors from the beginning of a list, for each count."""
    taken = []
    for count in counts:
        taken.append(fds[: int(count)])
        del fds[: int(count)]
    return taken


def kept_disk(mount: str, known: bool) -> list[int]:
    """Descriptors of the mounted disk, and of the user namespace in which it was mounted; unless that is `known`."""
    users = os.devnull if known else "/proc/self/ns/user"
    return [cloned_mount(mount), os.open(users, os.O_RDONLY | os.O_CLOEXEC)]


def send_disk(keeper: int, fds: list[int]) -> None:
    with socket.socket(fileno=keeper) as stream:
        socket.send_fds(stream, [b"disk"], fds)


def escaped(path: str) -> str:
    """As options of an overlay have it."""
    return re.sub(r"[\\:,]", r"\\\g<0>", path)


def like(model: str, folder: str) -> None:
    """Give a folder the mode and the times of another one."""
    facts = os.stat(model)
    os.chmod(folder, facts.st_mode & 0o7777)
    os.utime(folder, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def become(
    job: dict[str, Any],
    fds: list[int],
    parent: int,
    program: ModuleType | None = None,
    report: int = -1,
    move_root: Callable[..., None] | None = None,
) -> None:
    """In the child: turn into the program of a job. Never returns.

    Args:
        job: `argv`; `env` (empty if missing); `disk`, a `plan.Disk` or None; `groups`, the number of cgroups to join;
            `files`, the numbers of descriptors to pass on; `signal`, sent when the parent dies (SIGKILL if missing).
            With `prepared`, a `plan.Prepared`, `argv` is bubblewrap's, which makes the sandbox that `join` enters.
            The rest is described at `plan.job`.
        fds: standard input and output, standard error (which also gets the reason of a failure), `cgroup.procs` of the
            groups, layers, a user namespace, the socket that gets the disk, files.
        parent: the process that has forked this one.
        program: its `main` runs inside, of a prepared job; None only tries whether that is possible.
        report: gets the number of the process that runs it.
        move_root: `rooting.move_root`, for a job with layers.
    """
    what = "starting"
    try:
        if report >= 0:
            fds += [os.pidfd_open(parent), report]
        if (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < SCRATCH + len(fds):
            raise OSError(f"{limit} open files are too few for a sandbox; allow 256 or more (ulimit -n)")
        for place, fd in enumerate(fds):
            fds[place] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SCRATCH)
            os.close(fd)
        server, report = (fds.pop(-2), fds.pop()) if report >= 0 else (-1, -1)
        stream, errors, *others = fds
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, job.get("signal", signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.umask(0o022)
        what = "joining the cgroup"
        groups, layers, users, keeper = split(others, job["groups"], job["layers"], job["users"], job["keeps"])
        if job["moved"]:
            what = "moving its root"
            os.dup2(errors, 2)
            assert move_root is not None
            move_root(job, layers, (users or [-1])[0], keeper[0], others, groups)
            os._exit(0)
        for fd in groups:
            os.write(fd, b"0")
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
            # If this is privileged, commands cannot lower the score again. Otherwise it stays: the sandbox' init
            # process must never have a higher one than a command can choose for itself.
            if holds(CAP_SYS_RESOURCE):
                file.write(str(OOM_SCORE))
        if holds(CAP_SYS_ADMIN):
            what = "making an IPC namespace"
            check(libc.unshare(CLONE_NEWIPC), "unshare")
            with contextlib.suppress(OSError):  # in some containers nobody may write there
                for name, value in IPC_LIMITS.items():
                    with open("/proc/sys/" + name.replace(".", "/"), "w") as file:
                        file.write(value)
        what = "making its disk"
        if job["disk"] is not None:
            make_disk(**job["disk"], users=(users or [-1])[0])
        what = f"running {job['argv'][0]}"
        for target, fd in zip((0, 1, 2), (stream, stream, errors)):
            os.dup2(fd, target)
        for target, fd in zip(job["files"], others):
            os.dup2(fd, target)
        for number in RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir("/")
        resource.setrlimit(resource.RLIMIT_NOFILE, INSIDE)
        if report >= 0:
            what = "joining its sandbox"
            os._exit(join(job, program, server, report, layers, keeper, move_root))
        os.execve(job["argv"][0], job["argv"], job.get("env", {}))
    except BaseException as error:
        os.write(fds[1], f"{what}: {error}".encode())
    finally:
        os._exit(126)


def join(
    job: dict[str, Any],
    program: ModuleType | None,
    server: int,
    report: int,
    layers: list[int],
    keeper: list[int],
    move_root: Callable[..., None] | None,
) -> int:
    """Run a program as PID 1 of the sandbox that bubblewrap makes; returns the exit code of this process.

    The sandbox' command waits, so that its namespaces stay until they have been entered. PID 1 is a child of the
    server, with a PID namespace and a /proc of its own: the one that bubblewrap makes has a PID 1 already.

    Args:
        server: a descriptor of the server's process.
        layers: the sandbox gets a disk over them as its root, before anything runs in it.
        keeper: a socket that gets the disk, and the mount and IPC namespaces of the sandbox.
    """
    prepared = job["prepared"]
    with open("/proc/self/oom_score_adj", "rb") as file:
        score = file.read().strip()
    ours, theirs = socket.socketpair()
    facts, info = os.pipe()
    os.set_inheritable(info, True)
    argv = [job["argv"][0], "--info-fd", str(info), *job["argv"][1:]]
    moves = [(os.POSIX_SPAWN_DUP2, theirs.fileno(), number) for number in (0, 1)]
    bwrap = os.posix_spawn(argv[0], argv, {}, file_actions=moves)
    theirs.close()
    os.close(info)
    if not ours.recv(1):
        os.waitpid(bwrap, 0)
        return 126  # it has written why
    waiting = int(json.loads(os.read(facts, 4096))["child-pid"])
    inner, mounts, ipc = (os.open(f"/proc/{waiting}/ns/{name}", os.O_RDONLY) for name in ("user", "mnt", "ipc"))
    outer = fcntl.ioctl(mounts, NS_GET_USERNS)
    own_users = os.stat("/proc/self/ns/user").st_ino
    others = {name: os.readlink(f"/proc/{waiting}/ns/{name}") for name in JOINED}
    flags = sum(JOINED[name] for name, link in others.items() if link != os.readlink(f"/proc/self/ns/{name}"))
    handle = os.pidfd_open(waiting)
    if layers:
        assert move_root is not None
        move_root(job, layers, -1, keeper[0], [mounts, ipc])  # this process is in their user namespace already
    elif keeper:
        send_disk(keeper[0], [*kept_disk(job["disk"]["mount"], ROOT or job["users"]), mounts, ipc])
    check(libc.setns(outer, CLONE_NEWUSER), "entering the outer user namespace")
    check(libc.setns(handle, flags), "entering the namespaces")
    check(libc.unshare(CLONE_NEWPID), "making a PID namespace")
    pid = libc.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    check(min(pid, 0), "starting PID 1")
    if pid == 0:
        check(libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None), "mounting /proc")
        if os.fstat(outer).st_ino != own_users:  # else these are settings of the machine
            limit_watches()
        cover_proc(ROOT or prepared["root"])
        if os.fstat(inner).st_ino != os.fstat(outer).st_ino:
            check(libc.setns(inner, CLONE_NEWUSER), "entering the user namespace")
        give_up_privileges(prepared["processes"])
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # now, as the kernel forgets it when privileges change
        ended = select.poll()
        ended.register(server, select.POLLIN)
        if ended.poll(0):
            os._exit(1)
        begin = 3
        for kept in [*job["files"][: prepared["kept"]], FILES[1]]:
            os.closerange(begin, kept)
            begin = kept + 1
        if program is not None:
            vars(program)["OOM_SCORE"] = score
            start(program, prepared["arguments"])
        os._exit(0)
    ours.close()
    os.waitpid(bwrap, 0)
    os.write(report, str(pid).encode())
    return 0


def limit_watches() -> None:
    """Set limits of this user namespace, below those of the user, which all sandboxes of the user share."""
    for name in ("instances", "watches"):
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/sys/fs/inotify/max_user_{name}") as file:
                share = int(file.read()) // SHARERS
            with open(f"/proc/sys/user/max_inotify_{name}", "w") as file:
                file.write(str(share))


def cover_proc(own: bool) -> None:
    """Of what belongs to no process in this /proc, nothing can be changed, as outside; with `own`, neither PID 1's."""
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    for source, place in kernel_files():
        bind(source, place, flags)
    if not own:
        return
    for path in own_settings():
        bind(os.devnull, path, flags)
    task = b"/proc/1/task"
    check(libc.mount(b"tmpfs", task, b"tmpfs", MS_RDONLY | flags, b"size=4096,mode=555"), "covering /proc/1/task")


def give_up_privileges(processes: int | None) -> None:
    """What bubblewrap does before it runs a program: no capability is left, and none can be gained.

    Args:
        processes: RLIMIT_NPROC.
    """
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "dropping a capability")
    header = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    check(libc.capset(header, (ctypes.c_uint32 * 6)()), "dropping capabilities")  # the ambient ones go with these
    if processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def start(program: ModuleType, arguments: list[str]) -> None:
    """Run it as if it had been executed: with its own name and arguments, and the runtime's modules."""
    command = b"\0".join(os.fsencode(word) for word in [*arguments, ""])
    ctypes.memset(ARGUMENTS[0], 0, ARGUMENTS[1] - ARGUMENTS[0])
    ctypes.memmove(ARGUMENTS[0], command, min(len(command), ARGUMENTS[1] - ARGUMENTS[0] - 1))
    libc.prctl(PR_SET_NAME, b"python3", 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after exec: a program that is not cannot open its own files
    sys.argv = arguments
    library = f"{RUNTIME}/{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"
    sys.path[:] = [library, f"{library}/lib-dynload"]
    sys.path_importer_cache.clear()
    os.setsid()
    try:
        program.main()
        os._exit(0)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
