"""From fork to exec; and a small process that forks for a large one and ends with it, which `spawner.py` uses.

It is started as `python3 -I -S spawn_server.py SOCKET OWNER`: descriptors of a SOCK_SEQPACKET socket and of its owner's
process. A request is one message, the job (JSON, see `become`), with descriptors: the reply socket, then those of
`become`. The reply is `{"pid": ...}` with a descriptor of the new process, and later `{"exit": code}`,
negative for a signal; or `{"error": text}` if it cannot be started.

It imports nothing of the project and has one thread: between fork and exec, anything may be done.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import sys

TYPE_CHECKING = False  # importing typing costs start-up time
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
OOM_SCORE = 500
"""When the machine's memory runs out, the kernel kills commands before the processes that make sandboxes."""
IPC_LIMITS = {"kernel.shm_rmid_forced": "1", "kernel.msgmni": "64", "kernel.sem": "250 32000 32 128"}
"""Settings of an IPC namespace. System V objects belong to no process, so memory in them outlives those that are killed
for it. Shared memory that no process has attached is therefore removed; the rest takes 3 MiB at most."""
CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 21, 24
SCRATCH = 200
"""Descriptors are first moved up here, so that none has a number that another one is to get."""
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
INSIDE = (min(FILES[0], FILES[1] * 7 // 8), FILES[1] * 7 // 8)
"""The limit of files of what is started. The kernel counts descriptors that are being passed by user, and refuses them
at the limit of who passes them: what runs inside must reach its own before its owner's."""
RESET = (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
ESCAPED, BACKSLASHED = r"[\\:,]", r"\\\g<0>"
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def make_disk(mount: str, size: int, folders: list[tuple[str, int]], overlays: list[tuple[str, str]]) -> None:
    """Mount a `plan.Disk`, which only this process and its descendants see."""
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNS) != 0:
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
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
        return path

    for name, mode in folders:
        make(name, mode)
    for number, (lower, name) in enumerate(overlays):
        mode = os.stat(lower).st_mode & 0o777 | 0o700
        parts = {"lowerdir": lower, "upperdir": make(f"upper{number}", mode), "workdir": make(f"work{number}", 0o755)}
        # As for any user: attributes of the overlay are the user's own (Linux 5.11 and later).
        options = ",".join([f"{key}={re.sub(ESCAPED, BACKSLASHED, path)}" for key, path in parts.items()])
        options += ",userxattr"
        target = os.fsencode(make(name, mode))
        check(libc.mount(b"overlay", target, b"overlay", flags, os.fsencode(options)), f"overlay mount on {lower}")


def become(job: dict[str, Any], fds: list[int], parent: int) -> None:
    """In the child: turn into the program of a job. Never returns.

    Args:
        job: `argv`; `env` (empty if missing); `disk`, a `plan.Disk` or None; `groups`, the number of cgroups to join;
            `files`, the numbers of descriptors to pass on; `signal`, sent when the parent dies (SIGKILL if missing).
        fds: standard input and output, standard error (which also gets the reason of a failure), `cgroup.procs` of the
            groups, files.
        parent: the process that has forked this one.
    """
    what = "starting"
    try:
        for place, fd in enumerate(fds):
            fds[place] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SCRATCH)
            os.close(fd)
        stream, errors, *others = fds
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, job.get("signal", signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.umask(0o022)
        what = "joining the cgroup"
        for fd in others[: job["groups"]]:
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
            make_disk(**job["disk"])
        what = f"running {job['argv'][0]}"
        for target, fd in zip((0, 1, 2), (stream, stream, errors)):
            os.dup2(fd, target)
        for target, fd in zip(job["files"], others[job["groups"] :]):
            os.dup2(fd, target)
        for number in RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir("/")
        resource.setrlimit(resource.RLIMIT_NOFILE, INSIDE)
        os.execve(job["argv"][0], job["argv"], job.get("env", {}))
    except BaseException as error:
        os.write(fds[1], f"{what}: {error}".encode())
    finally:
        os._exit(126)


def holds(capability: int) -> bool:
    """Whether this process has a capability."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> capability & 1)
    return False


class SpawnServer:
    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.poll = select.poll()
        self.children: dict[int, tuple[int, socket.socket]] = {}
        """Descriptor of a child, which can be read once it has ended -> its number, and where its end is reported."""

    def serve(self) -> bool:
        """Answer one request. False when the owner has closed the socket."""
        message, fds, flags, _ = socket.recv_fds(self.requests, 1 << 18, 250)
        if not message:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)  # MSG_CMSG_CLOEXEC would not do: `recv_fds` ignores it
        if not fds:
            return True  # the table is full, also for the reply socket: the caller sees its end
        reply, pid, handle = socket.socket(fileno=fds[0]), 0, -1
        try:
            if flags & socket.MSG_CTRUNC:  # the table is full: this request fails, and what runs goes on
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            job, parent = json.loads(message), os.getpid()
            pid = os.fork()
            if pid == 0:
                become(job, fds[1:], parent)
            handle = os.pidfd_open(pid)
            self.children[handle] = pid, reply
            self.poll.register(handle, select.POLLIN)
            socket.send_fds(reply, [json.dumps({"pid": pid}).encode()], [handle])
        except (OSError, ValueError) as error:
            if pid > 0:  # the caller has gone, or there is no descriptor for the handle
                os.kill(pid, signal.SIGKILL)
                if handle < 0:
                    os.waitpid(pid, 0)
            with contextlib.suppress(OSError):
                reply.send(json.dumps({"error": str(error)}).encode())
        finally:
            for fd in fds[1:]:
                os.close(fd)
        return True

    def reap(self, handle: int) -> None:
        pid, reply = self.children.pop(handle)
        self.poll.unregister(handle)
        os.close(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError), reply:
            reply.send(json.dumps({"exit": code}).encode())


def main() -> None:
    with contextlib.suppress(ValueError, OSError):  # each that runs takes two
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
    server = SpawnServer(socket.socket(fileno=int(sys.argv[1])))
    owner = int(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would let the kernel forget how children end
    # The owner's end of the socket may live on in processes that it has forked, so its death is watched as well.
    for fd in (server.requests.fileno(), owner):
        os.set_inheritable(fd, False)
        server.poll.register(fd, select.POLLIN)
    gc.collect()
    gc.freeze()
    while True:
        ready = {fd for fd, _ in server.poll.poll()}
        for handle in ready & server.children.keys():
            server.reap(handle)
        if owner in ready or (server.requests.fileno() in ready and not server.serve()):
            return  # its children are killed with it


if __name__ == "__main__":
    main()
