"""The program on a far machine for one ssh session: it starts, lists and ends sandboxes there.

Nothing is installed on the far machine. A sandbox that has ended leaves nothing but the portable runtime, in the
user's cache folder.

The hub lives as long as its ssh session, and answers one JSON object per line:

  facts    walled, bwrap                              what this machine is and has
  probe    open                                       socket: a path on which the hub listens, until the next probe
  create   id, meta, request, bwrap, lifetime         socket: the executor's; workdir, env, written
  alive    id                                         alive: whether its supervisor is running
  end      ids                                        left: those that could not be ended, after all others have
  list                                                sandboxes: all of this user, with their `meta` and state

Every answer carries the request's `n`. If it failed, `failed` is the class of the error and `error` its message.
The hub also sends `{"ended": id, "code", "log", "starved"}` when a sandbox that it has made has ended.

It forks a supervisor (`supervisor.py`) for every sandbox, which outlives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from backends.executor.processes import send_signal

from . import cgroups, hardened
from .bubblewrap import Bubblewrap
from .folders import private_folder, remove_sandbox
from .machine import Machine
from .plan import FIRST_FILE, Request, job, memory_file
from .starting import become
from .supervisor import END_PATIENCE, remove_base, supervise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from .plan import Disk

    Message = dict[str, Any]

PREFIX = "lachesis-"
_REMOVAL = 120.0
"""Seconds for which a process that nobody waits for removes a folder."""
GROUP_SUFFIX = ".ssh"
"""Distinguishes cgroups from those that other backends make on the same machine."""
_INSTALL = "apt-get install bubblewrap"
_NO_CGROUPS = "log in as a user who may write cgroups (root)"


class Hub:
    """Requests in, answers and events out."""

    def __init__(self, base: str) -> None:
        os.umask(0o077)
        self.own_base = not base
        self.base = Path(base or f"/tmp/{PREFIX}ssh-{os.geteuid()}")
        self.machine = Machine(self.try_command, install=_INSTALL)
        self.cgroups: cgroups.Cgroups | None = None
        self.endings: list[Iterator[bool]] = []
        """The requests `end` that go on."""
        self.probe: socket.socket | None = None
        self.events, self.event_end = os.pipe()
        os.set_blocking(self.event_end, False)
        self.make_base()

    def make_base(self) -> None:
        """The folder of all of this user's sandboxes."""
        self.base.parent.mkdir(parents=True, exist_ok=True)
        private_folder(self.base, "set the option folder")

    def run(self) -> None:
        received = events = b""
        while True:
            wait = 0.004 if self.endings else None
            readable = select.select([0, self.events], [], [], wait)[0]
            if self.events in readable:
                *lines, events = (events + os.read(self.events, 1 << 16)).split(b"\n")
                self.put(b"".join(line + b"\n" for line in lines))
            if 0 in readable:
                data = os.read(0, 1 << 16)
                if not data:
                    return remove_base(self.base, self.own_base)
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self.serve(json.loads(line.decode()))
            self.endings = [ending for ending in self.endings if not next(ending)]

    def put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]

    def answer(self, number: int, **fields: Any) -> None:
        self.put((json.dumps({"n": number, **fields}) + "\n").encode())

    def serve(self, request: Message) -> None:
        number = request["n"]
        try:
            fields = getattr(self, "op_" + request["op"])(request)
        except Exception as error:
            self.answer(number, failed=type(error).__name__, error=str(error))
        else:
            if fields is not None:
                self.answer(number, **fields)

    def try_command(self, command: Sequence[str], disk: Disk | None) -> str:
        """See `bubblewrap.Run`."""
        errors = os.memfd_create("errors")
        null = os.open(os.devnull, os.O_RDWR)
        parent, child = os.getpid(), os.fork()
        if child == 0:
            become(job(command, disk=disk), [null, errors], parent)
        status = os.waitpid(child, 0)[1]
        text = os.pread(errors, 4096, 0).decode(errors="replace").strip().replace("\n", "; ")
        os.close(errors)
        os.close(null)
        return "" if status == 0 else text or "it fails without a message"

    def available(self) -> cgroups.Cgroups:
        if self.cgroups is None:
            self.cgroups = cgroups.find(_NO_CGROUPS)
        return self.cgroups

    # requests

    def op_facts(self, request: Message) -> Message:
        facts: Message = {"system": os.uname().sysname, "bash": shutil.which("bash") or ""}
        if facts["system"] != "Linux" or not facts["bash"]:
            return facts
        facts["file_systems"] = 0
        facts["detail"] = ["Python " + ".".join(map(str, sys.version_info[:3]))]
        if request["walled"]:
            bwrap = shutil.which(request["bwrap"]) if request["bwrap"] else ""
            if bwrap is None:
                return dict(facts, detail=f"there is no {request['bwrap']}", fix=_INSTALL)
            self.machine = Machine(self.try_command, bwrap, _INSTALL)
            detail, fix = self.machine.check()
            if self.machine.bwrap is None:
                return dict(facts, detail=detail, fix=fix)
            facts["bwrap"] = dataclasses.asdict(self.machine.bwrap)
            facts["file_systems"] = self.machine.bwrap.file_systems
            facts["detail"].append(detail)
        available = self.available()
        enforced = facts["enforced"] = available.enforced(countable=request["walled"])
        facts["why_not"] = available.why_not(field for field in cgroups.FIELDS if field not in enforced)
        facts["next_step"] = cgroups.next_step(available)
        facts["processors"] = os.cpu_count() or 1
        counted = "pids" in enforced and "pids" not in available.parents
        limits = cgroups.describe(available) + (", pids without a cgroup" if counted else "")
        facts["detail"].append("limits: " + limits)
        facts["limits"] = limits
        facts["isolation"] = hardened.isolation("bubblewrap") if request["walled"] else "none"
        facts["lacks"] = hardened.lacks(available, self.machine.bwrap)
        return dict(facts, detail=", ".join(facts["detail"]), fix="")

    def op_probe(self, request: Message) -> Message:
        """A socket with which the near end tries whether the server forwards any."""
        path = str(self.base / f"probe-{os.getpid()}")
        if self.probe is not None:
            self.probe.close()
            self.probe = None
            os.unlink(path)
        elif request["open"]:
            self.make_base()  # the last sandbox may have just removed it
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self.probe = socket.socket(socket.AF_UNIX)
            self.probe.bind(path)
            self.probe.listen(8)
        return {"socket": path}

    def op_create(self, message: Message) -> Message:
        id, request = message["id"], Request(**message["request"])
        folder = self.base / id
        path = str(folder / "socket")
        if len(os.fsencode(path)) > 107:
            raise OSError(errno.ENAMETOOLONG, "too long for a socket; choose a shorter `folder`", path)
        if request.walled and self.machine.bwrap is None:  # another hub has tried it
            self.machine.bwrap = Bubblewrap(**message["bwrap"])
        available = self.available()
        limits = cgroups.Limits(request.cpus, request.memory_bytes, request.pids)
        group, limits, counted = available.allot(
            id + GROUP_SUFFIX, limits, countable=request.walled, tracked=not request.walled
        )
        while True:
            self.make_base()
            with contextlib.suppress(FileNotFoundError):  # the last sandbox has just removed the folder of all
                folder.mkdir(0o700)
                break
        fds: list[int] = []
        lock = -1
        try:
            lock = os.open(str(folder / "meta.json"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, json.dumps(dict(message["meta"], groups=list(map(str, group.folders)))).encode())
            arguments, passed = ["--listen", f"fd:{FIRST_FILE}"], 1 + group.divided
            arguments += group.arguments(FIRST_FILE + 1)
            plan = self.machine.plan(id, folder, request, arguments=arguments, passed=passed, counted=counted)
            if group.folders:
                fds += available.create(id + GROUP_SUFFIX, limits).open()
            files = passed + len(plan.contents)
            described = job(plan.command, groups=len(fds), files=files, disk=plan.disk, env=plan.own_env)
            described["signal"] = signal.SIGTERM  # an executor without walls then ends its own processes
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(16)
                fds.append(os.dup(listener.fileno()))
            if group.divided:
                fds.append(group.open_commands())
            for content in plan.contents:
                fds.append(memory_file("file", content))
            ending = (group, lock, self.event_end, message["lifetime"], self.own_base)
            self.detach(id, lambda: supervise(folder, described, fds, *ending))
        except BaseException:
            remove_sandbox(folder, group.folders)
            raise
        finally:
            for fd in [*fds, lock] if lock >= 0 else fds:
                os.close(fd)
        written = {name: data.decode("latin-1") for name, data in plan.written.items()}
        return {"socket": path, "workdir": plan.workdir, "env": dict(plan.env), "written": written}

    def detach(self, id: str, body: Callable[[], None]) -> None:
        """Run `body` in a process that is not a child of this one."""
        between = os.fork()
        if between == 0:
            try:
                if os.fork() == 0:
                    body()
            except BaseException as error:
                os.write(
                    self.event_end,
                    (json.dumps({"ended": id, "code": None, "log": str(error), "starved": False}) + "\n").encode(),
                )
            finally:
                os._exit(0)
        os.waitpid(between, 0)

    def op_alive(self, request: Message) -> Message:
        return {"alive": bool(self.held(self.base / request["id"]))}

    def op_end(self, request: Message) -> None:
        self.endings.append(self.ending(request["n"], request["ids"]))

    def ending(self, number: int, ids: Sequence[str]) -> Iterator[bool]:
        """End sandboxes: each step looks once at those that are left. Yields whether it has answered."""
        begin, left = time.monotonic(), set(ids)
        signalled: set[str] = set()
        while True:
            waited = time.monotonic() - begin
            left = {id for id in left if not self.gone(id, signalled, waited)}
            if not left or waited > 2 * END_PATIENCE:
                break
            yield False
        self.answer(number, left=sorted(left))
        yield True

    def gone(self, id: str, signalled: set[str], waited: float) -> bool:
        folder = self.base / id
        if not folder.is_dir():
            return True
        held = self.held(folder)
        if held is None and waited < 1.0:
            return False  # it is just being made or removed
        if held:
            with contextlib.suppress(OSError, ValueError):
                pid = int((folder / "pid").read_text())
                if id not in signalled:
                    send_signal(pid, signal.SIGTERM)
                    signalled.add(id)
                elif waited > END_PATIENCE + 5:
                    send_signal(pid, signal.SIGKILL)
            return False
        # The supervisor was killed, or could not remove all: that may take long, and others wait for this process.
        with contextlib.suppress(FileNotFoundError):
            (folder / "pid").unlink()
        self.detach(id, lambda: self.remove(folder))
        return not folder.is_dir()

    def remove(self, folder: Path) -> None:
        """In a separate process: what a supervisor does at its end."""
        try:
            lock = os.open(str(folder / "meta.json"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is gone, or another one does it
            return
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # the ssh session stays open while any process holds its pipes
            os.dup2(null, number)
        remove_sandbox(folder, meta_of(folder).get("groups", ()), folder.name, _REMOVAL)
        remove_base(self.base, self.own_base)

    def held(self, folder: Path) -> bool | None:
        """Whether its supervisor lives; None if that is unknown."""
        try:
            fd = os.open(str(folder / "meta.json"), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def op_list(self, _: Message) -> Message:
        attached = set()
        with open("/proc/net/unix") as file:
            for line in file:
                fields = line.split()
                if len(fields) == 8 and fields[5] == "03":  # an accepted connection has its listener's path
                    attached.add(fields[7])
        sandboxes: list[Message] = []
        try:
            folders = sorted(self.base.glob(PREFIX + "*"))
        except FileNotFoundError:  # the last sandbox has removed it
            return {"sandboxes": sandboxes}
        for folder in folders:
            try:
                young = time.time() - folder.stat().st_mtime < 10
            except FileNotFoundError:
                continue
            if young and not (folder / "meta.json").exists():
                continue  # it is just being made or removed
            alive = bool(self.held(folder))
            state = "in use" if str(folder / "socket") in attached else "nobody is attached"
            sandboxes.append(
                {"id": folder.name, "meta": meta_of(folder), "alive": alive, "state": state if alive else "dead"}
            )
        return {"sandboxes": sandboxes}


def meta_of(folder: Path) -> Message:
    try:
        meta: Message = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError):
        meta = {}
    return meta
