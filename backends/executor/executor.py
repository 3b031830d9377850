"""The dispatch of requests: `op_NAME` serves the request NAME, on the state that is kept here."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
from typing import TYPE_CHECKING

from .background import Background
from .carried import Connected, Listener
from .files import Upload, read_file
from .framing import LONGEST_PATH, failure, log_error
from .ipc import remove_ipc, shared_objects
from .jobs import Exec
from .loop import Loop
from .output import SPILL, Spills
from .owner_session import OwnerSession
from .processes import command_line, kill_tree, living_tree, send_signal, stop_processes
from .programs import find_python
from .services import Services
from .shell import ShellState
from .shells import Shells
from .transfers import FileReader, FileWriter, FolderPacker, FolderUnpacker
from .trees import make_folders

if TYPE_CHECKING:
    from .framing import LONGEST_PATH, Header
    from .groups import CommandGroup
    from .loop import Timer
    from .output import Capped
    from .transfers import OpenTransfer

ENDED = 1 << 25
"""Bytes of output kept of all ended background processes together."""


class Executor(Services):
    """Serves requests until the loop ends."""

    def __init__(
        self,
        bash: str,
        oom: tuple[int, bytes] | None,
        unfiltered: str,
        group: CommandGroup | None = None,
        own_bash: str | None = None,
    ) -> None:
        loop = Loop()
        shells = Shells(loop, bash, oom, group, own_bash)
        super().__init__(loop, OwnerSession(loop, self.serve), shells, Spills(self.running_outputs))
        self.unfiltered = unfiltered
        self.execs: dict[int, Exec] = {}
        self.processes: dict[str, Background] = {}
        self.transfers: dict[int, OpenTransfer] = {}
        self.held: list[tuple[Header, bytes]] | None = None
        """Requests that wait while the files are being changed from outside; None: they are served."""
        self.stopped: set[int] = set()
        self.ran = False
        """Whether a command has begun since `init`."""
        self.lifetime: Timer = [0.0, 0, None]
        self.python: str | None = None
        """The path of one inside, empty where there is none; None before `init`."""
        self.signals, wakeup = os.pipe()
        for fd in (self.signals, wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self.loop.watch(self.signals, select.EPOLLIN, self.on_signal)

    def on_signal(self, fd: int) -> None:
        if signal.SIGTERM in os.read(fd, 4096):
            self.loop.end("it received SIGTERM")
        self.shells.reap()

    def prepare(self) -> None:
        """Start shells for the next commands, one at a time, while no command runs."""
        idle = not self.execs and self.held is None
        if idle and self.loop.reason is None and self.session.goodbye is None and self.prewarmed.prepare():
            self.loop.after(0.0, self.prepare)

    def running_outputs(self) -> list[Capped]:
        return [output for job in self.execs.values() for output in (job.stdout, job.stderr)]

    def on_exec_ended(self, request: int) -> None:
        self.execs.pop(request, None)
        self.loop.after(0.0, self.prepare)  # while the owner handles the answer

    def on_process_ended(self) -> None:
        """Drop the output of the processes that ended first, once there is too much."""
        room = ENDED
        for process in reversed(list(self.processes.values())):
            if process.finished:
                room -= len(process.ring.data)
                if room < 0:
                    process.ring.drop()

    def serve(self, header: Header, payload: bytes) -> None:
        if self.held is not None and header["op"] not in ("go_on", "shutdown"):
            self.held.append((header, payload))
            return
        try:
            getattr(self, "op_" + header["op"])(header, payload)
        except Exception as error:
            if not isinstance(error, OSError):
                log_error(error)
            if "id" in header:
                self.session.send(failure(header["id"], error))

    # requests

    def path(self, path: str) -> str:
        """Absolute. What no file can be called is an error of the file system, and not of this process."""
        try:
            encoded = os.fsencode(path)
        except UnicodeEncodeError:
            encoded = b"\0"
        if b"\0" in encoded:
            raise OSError(errno.EINVAL, "a path contains NUL or half of a surrogate pair", ascii(path[:200]))
        if len(encoded) > LONGEST_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path[:200] + "...")
        return os.path.join(self.shells.state.workdir, path)

    def process(self, header: Header) -> Background:
        try:
            return self.processes[header["process"]]
        except KeyError:
            raise ProcessLookupError(errno.ESRCH, "no such process", header["process"]) from None

    def op_init(self, header: Header, _: bytes) -> None:
        workdir, env, lifetime = header["workdir"], header["env"], header["lifetime"]
        if self.python is not None:  # another user begins
            self.forget()
        make_folders(workdir)
        self.shells.state = ShellState(workdir, env)
        self.wall_time = header.get("wall_time") or math.inf
        self.session.grace = header.get("grace") or self.session.grace
        self.waiting.cpus = header.get("cpus") or math.inf
        if header.get("memory"):
            self.spills.limit = min(SPILL, header["memory"] // 8)
        self.ran = False
        self.lifetime[2] = None
        self.lifetime = self.loop.after(lifetime, lambda: self.session.stop("its lifetime of %g s is over" % lifetime))
        self.python = find_python(env.get("PATH", os.defpath)) or ""
        self.session.send({"id": header["id"], "python": self.python or None, "unfiltered": self.unfiltered})

    def op_exec(self, header: Header, payload: bytes) -> None:
        self.ran = True
        self.execs[header["id"]] = Exec(self, header, payload, self.on_exec_ended)

    def op_waited(self, header: Header, _: bytes) -> None:
        self.waiting.look()
        waited = self.waiting.total if self.waiting.is_known else None
        self.session.send({"id": header["id"], "waited": waited})

    def op_spilled(self, header: Header, _: bytes) -> None:
        chunks = self.spills.read(header["execution"], header["stream"], header["offset"], header["limit"])
        self.session.send_file(header["id"], chunks)

    def op_start(self, header: Header, _: bytes) -> None:
        self.ran = True
        name = "p%d" % (len(self.processes) + 1)
        self.processes[name] = Background(self, header, self.on_process_ended)
        self.session.send({"id": header["id"], "process": name})

    def op_processes(self, header: Header, _: bytes) -> None:
        listed = [[name, process.command] for name, process in self.processes.items()]
        self.session.send({"id": header["id"], "processes": listed})

    def op_status(self, header: Header, _: bytes) -> None:
        process = self.process(header)
        self.session.send({"id": header["id"], "exit_code": process.shown_exit_code, "output_size": process.ring.total})

    def op_output(self, header: Header, _: bytes) -> None:
        self.process(header).output(header["id"], header["offset"], header["wait"], header["limit"])

    def op_input(self, header: Header, payload: bytes) -> None:
        self.process(header).input(header["id"], payload, header.get("close", False))

    def op_kill(self, header: Header, _: bytes) -> None:
        self.process(header).kill()
        self.session.send({"id": header["id"]})

    def op_kill_all(self, header: Header, _: bytes) -> None:
        for job in [*self.execs.values(), *self.processes.values()]:
            job.abandoned = True
        self.prewarmed.discard()
        kill_tree(os.getpid())
        remove_ipc()
        self.session.send({"id": header["id"]})

    def op_hold(self, header: Header, _: bytes) -> None:
        """Hold all later requests back until `go_on`, unless something runs, which is then named; with `stop`, it is
        stopped until then."""
        running = living_tree(os.getpid()) - self.prewarmed.numbers()
        names = [command_line(pid) for pid in sorted(running)]
        names += ["a transfer of files" for each in self.transfers.values() if each.has_files]
        names += ["a file that is being read"] * len(self.session.files)
        held = not names or bool(header.get("stop"))
        if held:
            self.held = []
            self.stopped = stop_processes(running)
        shared = []
        with contextlib.suppress(OSError):  # there may be no such folder
            shared = os.listdir("/dev/shm")[:20]
        answer = {"id": header["id"], "held": held, "running": names, "ran": self.ran, "shared": shared}
        self.session.send(answer, self.shells.given_state())

    def op_go_on(self, header: Header, state: bytes) -> None:
        """Serve the requests that were held back; with the shell of `state`, if there is one, and new shells for the
        next commands if the root was `moved`: those that wait have the folders of the old one."""
        for pid in self.stopped:
            send_signal(pid, signal.SIGCONT)
        held, self.held, self.stopped = self.held or [], None, set()
        if state:
            self.shells.take_over(state)
        self.session.send({"id": header["id"], "left": shared_objects()})
        if header.get("moved") and self.prewarmed.waiting:
            self.prewarmed.discard()
            self.loop.after(0.0, self.prepare)
        for request in held:
            self.serve(*request)

    def forget(self) -> None:
        """Forget what earlier commands have left here."""
        for transfer in self.transfers.values():
            transfer.drop()
        self.transfers, self.processes, self.spills = {}, {}, Spills(self.running_outputs)
        self.waiting.total = 0.0
        self.shells.forget()

    def op_read(self, header: Header, _: bytes) -> None:
        chunks = read_file(self.path(header["path"]), header["offset"], header["limit"])
        self.session.send_file(header["id"], chunks)

    def op_write(self, header: Header, payload: bytes) -> None:
        upload = Upload(self.path(header["path"]), header.get("mode"))
        try:
            upload.feed(payload)
            upload.close(keep=True)
        except OSError:
            upload.close(keep=False)
            raise
        self.session.send({"id": header["id"]})

    def op_stat(self, header: Header, _: bytes) -> None:
        path = os.path.realpath(self.path(header["path"]))
        answer = {"id": header["id"], "path": path}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(path)
            mtime = max(-(1 << 62), min(int(status.st_mtime), 1 << 62))  # a tmpfs takes any that has 64 bits
            answer.update(mode=status.st_mode, size=status.st_size, mtime=mtime)
        self.session.send(answer)

    def transfer(self, header: Header) -> OpenTransfer:
        try:
            return self.transfers[header["transfer"]]
        except KeyError:
            raise OSError(errno.EBADF, "no such transfer") from None

    def op_open(self, header: Header, _: bytes) -> None:
        kinds = {"read": FileReader, "write": FileWriter, "pack": FolderPacker, "unpack": FolderUnpacker}
        options = {name: header[name] for name in ("most", "mode") if header.get(name) is not None}
        path = self.path(header["path"])
        self.transfers[header["transfer"]] = kinds[header["kind"]](self, path, **options)
        self.session.send({"id": header["id"]})

    def op_listen(self, header: Header, _: bytes) -> None:
        listener = self.transfers[header["transfer"]] = Listener(self)
        self.session.send({"id": header["id"], "port": listener.port})

    def op_accept(self, header: Header, _: bytes) -> None:
        listener = self.transfers.get(header["listener"])
        if not isinstance(listener, Listener):
            raise OSError(errno.EBADF, "no such listening socket")
        connected = self.transfers[header["transfer"]] = Connected(self, listener)
        listener.accept(header["id"], connected)

    def op_pull(self, header: Header, _: bytes) -> None:
        self.transfer(header).pull(header["id"])

    def op_push(self, header: Header, payload: bytes) -> None:
        self.transfer(header).push(header["id"], payload)

    def op_commit(self, header: Header, _: bytes) -> None:
        self.transfer(header).commit(header["id"])

    def op_drop(self, header: Header, _: bytes) -> None:
        transfer = self.transfers.pop(header["transfer"], None)
        if transfer is not None:
            transfer.drop()

    def op_cancel(self, header: Header, _: bytes) -> None:
        target = header["target"]
        if target in self.execs:
            self.waiting.look()
            self.execs[target].kill()
        self.session.cancel_file(target)
        for process in self.processes.values():
            process.waiting.pop(target, None)

    def op_shutdown(self, _: Header, __: bytes) -> None:
        self.session.stop("it was shut down")
