"""A small process that starts others for a large one, and ends with it: the far half of `spawner.py`.

Started as `python3 -I -S spawn_server.py SOCKET OWNER`: descriptors of a SOCK_SEQPACKET socket and of its owner's
process. A request is one message with descriptors: of a file with the job (JSON), of the reply socket, of standard
input and output, of standard error, then those of cgroups to join and those to pass on. To the reply socket goes
`{"pid": ...}` with a descriptor of the new process, and later `{"exit": code}`, negative for a signal; if it cannot be
started, `{"error": text}`.

Standard library only, one thread: between fork and exec, anything may be done.
"""

# ruff: noqa: B905, PTH101, PTH103, PTH118, PTH123
# (pathlib would add to the start-up time)
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import sys

TYPE_CHECKING = False  # importing typing costs start-up time
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
OOM_SCORE = 500
"""When the machine's memory runs out, what runs in sandboxes goes before what makes them."""
SCRATCH = 200
"""Descriptors are moved up here, out of the way of the numbers that they are to get."""
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def make_disk(mount: str, size: int, folders: list[tuple[str, int]]) -> None:
    """Mount a tmpfs of bounded size at `mount`, which only this process and its descendants see."""
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNS) != 0:
        check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "making a user namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "making mounts private")
    # Each file costs kernel memory beside its contents: their number is bounded as well.
    options = f"size={size},nr_inodes={max(4096, size >> 12)},mode=755"
    check(
        libc.mount(b"tmpfs", os.fsencode(mount), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode()), f"mounting {mount}"
    )
    for name, mode in folders:
        path = os.path.join(mount, name)
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)


def become(job: dict[str, Any], fds: list[int], parent: int) -> None:
    """In the child: never returns."""
    what = "starting"
    stream, errors, *others = fds
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        what = "joining the cgroup"
        for fd in others[: job["groups"]]:
            os.write(fd, b"0")
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
            # Where this is privileged, none of them can lower it again. Where it is not, it had better stay as it is:
            # what the sandbox' init process has must never be more than what a command can choose for itself.
            if privileged():
                file.write(str(OOM_SCORE))
        what = "making its disk"
        if job["disk"] is not None:
            make_disk(job["disk"]["mount"], job["disk"]["size"], job["disk"]["folders"])
        what = f"running {job['argv'][0]}"
        for target, fd in zip((0, 1, 2), (stream, stream, errors)):
            os.dup2(fd, target)
        for target, fd in zip(job["files"], others[job["groups"] :]):
            os.dup2(fd, target)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.chdir("/")
        resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
        os.execve(job["argv"][0], job["argv"], {})
    except BaseException as error:
        os.write(errors, f"{what}: {error}".encode())
    finally:
        os._exit(126)


def privileged() -> bool:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> 24 & 1)  # CAP_SYS_RESOURCE
    return False


class Server:
    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.replies: dict[int, socket.socket] = {}

    def serve(self) -> bool:
        """Answer one request. False when nobody is there to make any more."""
        message, fds, flags, _ = socket.recv_fds(self.requests, 64, 250, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        moved: list[int] = []
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            moved.extend(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SCRATCH) for fd in fds)
        except OSError as error:  # no more fit in: an error of this one, and not of all that it has started before
            with contextlib.suppress(OSError, IndexError), socket.socket(fileno=os.dup(fds[1])) as reply:
                reply.send(json.dumps({"error": str(error)}).encode())
            for fd in moved:
                os.close(fd)
            return True
        finally:
            for fd in fds:
                os.close(fd)
        reply, pid = socket.socket(fileno=moved[1]), 0
        try:
            with open(moved[0], "rb", closefd=False) as file:
                job = json.load(file)
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                become(job, moved[2:], parent)
            self.replies[pid] = reply
            handle = os.pidfd_open(pid)
            try:
                socket.send_fds(reply, [json.dumps({"pid": pid}).encode()], [handle])
            finally:
                os.close(handle)
        except OSError as error:
            if pid > 0:  # whoever asked has gone
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                reply.send(json.dumps({"error": str(error)}).encode())
        finally:
            for fd in [moved[0], *moved[2:]]:
                os.close(fd)
        return True

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            reply = self.replies.pop(pid, None)
            if reply is not None:
                with contextlib.suppress(OSError), reply:
                    reply.send(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode())


def main() -> None:
    with contextlib.suppress(ValueError, OSError):  # each that runs takes one
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    owner = int(sys.argv[2])
    for fd in (server.requests.fileno(), owner):
        os.set_inheritable(fd, False)
    signals, wakeup = os.pipe()
    for fd in (signals, wakeup):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    # The owner's end of the socket may live on in processes that it has forked: it alone would not tell of its death.
    poll = select.poll()
    for fd in (server.requests.fileno(), owner, signals):
        poll.register(fd, select.POLLIN)
    gc.collect()
    gc.freeze()
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if signals in ready:
            os.read(signals, 4096)
            server.reap()
        if owner in ready or (server.requests.fileno() in ready and not server.serve()):
            return  # what it has started is killed with it


if __name__ == "__main__":
    main()
