"""A small process that forks for a large one and ends with it, which `spawner.py` uses.

Its arguments are descriptors of a SOCK_SEQPACKET socket and of its owner's process. A request is one message, the job
(JSON, see `starting.become`), with descriptors: the reply socket, then those of
`become`. The reply is `{"pid": ...}` with a descriptor of the new process, and later `{"exit": code}`,
negative for a signal; or `{"error": text}` if it cannot be started.

Starting Python and the modules of the executor takes longer than everything else in a sandbox' start. So this process
can load the executor once (`load`), and a fork of it becomes the executor of each sandbox (`join`): bubblewrap makes
the namespaces and the files, the fork enters them, and gives up its privileges.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import marshal
import os
import resource
import select
import signal
import socket
import sys

from .starting import FILES, INSIDE, become

TYPE_CHECKING = False  # importing typing costs start-up time
if TYPE_CHECKING:
    from types import ModuleType


def load(path: str) -> ModuleType:
    """The executor, from its .pyc."""
    with open(path, "rb") as file:
        code = marshal.loads(file.read()[16:])
    module = type(sys)("executor")
    exec(code, vars(module))
    vars(module)["FILES"] = INSIDE  # this process has raised its limit
    gc.collect()
    gc.freeze()
    return module


class SpawnServer:
    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.poll = select.poll()
        self.children: dict[int, tuple[int, socket.socket, int]] = {}
        """Descriptor of a child, which can be read once it has ended -> its number; where its end is reported; and of
        one that prepares another process, where that one's number can be read, else -1."""
        self.programs: dict[str, ModuleType] = {}
        """What prepared jobs run, by the path of its code."""

    def serve(self) -> bool:
        """Answer one request. False when the owner has closed the socket."""
        message, fds, flags, _ = socket.recv_fds(self.requests, 1 << 18, 250)
        if not message:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)  # MSG_CMSG_CLOEXEC would not do: `recv_fds` ignores it
        if not fds:
            return True  # the table is full, also for the reply socket: the caller sees its end
        reply, report, theirs, program = socket.socket(fileno=fds[0]), -1, -1, None
        try:
            if flags & socket.MSG_CTRUNC:  # the table is full: this request fails, and what runs goes on
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            job, parent = json.loads(message), os.getpid()
            if job.get("prepared"):
                program = self.program(job["prepared"]["code"])
                report, theirs = os.pipe()
            move_root = None
            if job.get("layers"):
                from . import rooting  # late: few owners need it, and each process would load it again

                move_root = rooting.move_root
            pid = os.fork()
            if pid == 0:
                become(job, fds[1:], parent, program, theirs, move_root)
            self.watch(pid, reply, report)
        except (OSError, ValueError) as error:
            if report >= 0:
                os.close(report)
            with contextlib.suppress(OSError):
                reply.send(json.dumps({"error": str(error)}).encode())
        finally:
            for fd in fds[1:] if theirs < 0 else [*fds[1:], theirs]:
                os.close(fd)
        return True

    def program(self, path: str) -> ModuleType | None:
        if path and path not in self.programs:
            try:
                self.programs[path] = load(path)
            except Exception as error:  # others run on
                raise ValueError(f"{path} cannot be loaded: {error!r}") from error
        return self.programs.get(path)

    def watch(self, pid: int, reply: socket.socket, report: int = -1) -> None:
        """Answer with a new process, unless it only prepares the one that `report` will name; note when it ends."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:  # there is no descriptor for it
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self.children[handle] = pid, reply, report
        self.poll.register(handle, select.POLLIN)
        if report < 0:
            try:
                socket.send_fds(reply, [json.dumps({"pid": pid}).encode()], [handle])
            except OSError:  # the caller has gone
                os.kill(pid, signal.SIGKILL)
                raise

    def reap(self, handle: int) -> None:
        pid, reply, report = self.children.pop(handle)
        self.poll.unregister(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(handle, "rb"), contextlib.suppress(OSError):
            if report >= 0:
                named = os.read(report, 32)
                os.close(report)
                if named:
                    self.watch(int(named), reply)
                    return
                socket.send_fds(reply, [json.dumps({"pid": pid}).encode()], [handle])
            with reply:
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
