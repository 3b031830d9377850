"""What runs on the far machine of an ssh connection: it starts, lists and ends sandboxes there.

Standard library, Python 3.8 or later, sent over an ssh session with `walls.py` and read from its standard input:
nothing is installed on the far machine, and what there is of a sandbox is gone when it ends.

The *hub* is this program. It lives as long as its ssh session, and answers one JSON object per line:

  facts    isolation, bwrap                           what this machine is and has
  probe    open                                       socket: a path on which the hub itself listens, until told not to
  executor source                                     keeps the executor for all sandboxes of this hub
  create   id, meta, isolation, limits, walls         socket: the path on which the sandbox' executor listens
  alive    id                                         alive: whether its supervisor is there
  end      ids                                        left: those that could not be ended, after all others have
  list                                                sandboxes: all of this user, with their `meta` and state

Every answer carries the request's `n`, and `error` or `refused` when it failed. Unasked, the hub says
`{"ended": id, "code", "log"}` when a sandbox of its own has come to an end.

It forks a supervisor (`supervisor.py`) for every sandbox, which outlives it.
"""

# ruff: noqa: PTH102, PTH103, PTH108, PTH110, PTH112, PTH116, PTH118, PTH119, PTH123, PTH208
# ruff: noqa: UP031
# (pathlib would add to the start-up time; Python 3.8 has no newer spellings)
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from .supervisor import END_PATIENCE, kill, remove_base, remove_folder, supervise
from .walls import (
    PIDS,
    PREFIX,
    Refused,
    counts_processes_per_namespace,
    enforceable,
    groups_of,
    interpreter,
    make_groups,
    memory_file,
    remove_groups,
    try_walls,
    walls,
)

if TYPE_CHECKING:  # on Python 3.8 these could not be evaluated
    from collections.abc import Callable, Iterable
    from typing import Any

    Message = dict[str, Any]

MARK = "LACHESIS_SANDBOX"
"""Variable by which processes without a PID namespace are found when their supervisor was killed."""


class Ending:
    """Sandboxes that a request wants to be gone."""

    def __init__(self, request: int, ids: Iterable[str]) -> None:
        self.request = request
        self.ids = set(ids)
        self.signalled: set[str] = set()
        self.begin = time.monotonic()


class Hub:
    """Requests in, answers and events out."""

    def __init__(self, base: str) -> None:
        os.umask(0o077)
        self.own_base = not base
        self.base = base or "/tmp/%sssh-%d" % (PREFIX, os.geteuid())
        self.source = b""
        self.code = b""
        self.endings: list[Ending] = []
        self.probe: socket.socket | None = None
        self.events, self.event_end = os.pipe()
        os.set_blocking(self.event_end, False)
        self.make_base()

    def make_base(self) -> None:
        """The folder that all of this user's sandboxes have in common."""
        with contextlib.suppress(FileExistsError):
            os.makedirs(self.base, 0o700)
        status = os.lstat(self.base)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not a folder that belongs to this user alone", self.base)

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
            for ending in list(self.endings):
                self.advance(ending)

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
        except Refused as refusal:
            self.answer(number, refused=list(refusal.args))
        except Exception as error:
            self.answer(number, error="%s: %s" % (type(error).__name__, error))
        else:
            if fields is not None:
                self.answer(number, **fields)

    # requests

    def op_facts(self, request: Message) -> Message:
        bash = shutil.which("bash") or ""
        bwrap = shutil.which(request["bwrap"] or "bwrap") or ""
        facts: Message = {"python": interpreter(), "version": "%d.%d.%d" % sys.version_info[:3], "bash": bash}
        facts.update(system=os.uname().sysname, uid=os.geteuid(), bwrap=bwrap, bwrap_failure="", limits=enforceable())
        if bwrap and bash and request["isolation"] != "none":
            facts["disable_userns"], facts["bwrap_failure"] = try_walls(bwrap)
            done = subprocess.run([bwrap, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            facts["bwrap_version"] = done.stdout.decode(errors="replace").strip()
        if os.geteuid() != 0:
            for name in ("kernel/apparmor_restrict_unprivileged_userns", "kernel/unprivileged_userns_clone"):
                with contextlib.suppress(OSError), open("/proc/sys/" + name) as file:
                    facts[os.path.basename(name)] = file.read().strip()
        return facts

    def op_probe(self, request: Message) -> Message:
        """A socket of its own, for the near end to try whether it is let through to one."""
        path = os.path.join(self.base, "probe-%d" % os.getpid())
        if self.probe is not None:
            self.probe.close()
            self.probe = None
            os.unlink(path)
        elif request["open"]:
            self.make_base()  # the last sandbox may have just taken it along
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self.probe = socket.socket(socket.AF_UNIX)
            self.probe.bind(path)
            self.probe.listen(8)
        return {"socket": path}

    def op_executor(self, request: Message) -> Message:
        """The executor's source, compiled once, as every sandbox would have to."""
        from importlib.util import MAGIC_NUMBER
        from marshal import dumps

        code = compile(request["source"], "executor.py", "exec", dont_inherit=True)
        self.code = MAGIC_NUMBER + b"\0" * 12 + dumps(code)
        return {}

    def op_create(self, request: Message) -> Message:
        folder = os.path.join(self.base, request["id"])
        path = os.path.join(folder, "socket")
        if len(os.fsencode(path)) > 107:
            raise OSError(errno.ENAMETOOLONG, "too long for a socket; choose a shorter `folder`", path)
        while True:
            self.make_base()
            with contextlib.suppress(FileNotFoundError):  # the last sandbox before this one has just tidied up
                os.mkdir(folder, 0o700)
                break
        fds: list[int] = []
        groups: list[str] = []
        lock = -1
        try:
            lock = os.open(os.path.join(folder, "meta.json"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, json.dumps(request["meta"]).encode())
            groups = self.limit(request)
            listener = socket.socket(socket.AF_UNIX)
            fds.append(listener.detach())
            listener = socket.socket(fileno=os.dup(fds[0]))
            listener.bind(path)
            listener.listen(16)
            listener.close()
            command, env = self.command(request, folder, fds)
            ending = (lock, self.event_end, request["lifetime"], self.own_base)
            self.detach(request["id"], lambda: supervise(folder, command, env, groups, fds, *ending))
        except BaseException:
            remove_groups(groups)
            remove_folder(folder)
            raise
        finally:
            for fd in fds:
                os.close(fd)
            if lock >= 0:
                os.close(lock)
        return {"socket": path, "folder": folder}

    def limit(self, request: Message) -> list[str]:
        limits = {name: request[name] for name in ("cpus", "memory_bytes")}
        pids = request["pids"] or PIDS
        try:
            return make_groups(request["id"], dict(limits, pids=pids))
        except Refused as refusal:
            if refusal.args[0] != "pids":
                raise
            if request["isolation"] != "none" and counts_processes_per_namespace():
                request["ulimit"] = pids
            elif request["pids"] is not None:
                raise
        return make_groups(request["id"], limits)

    def command(self, request: Message, folder: str, fds: list[int]) -> tuple[list[str], dict[str, str]]:
        """The command line and environment of a sandbox; opens what it needs into `fds`, whose first is the socket."""
        arguments = ["--listen", "fd:%d" % fds[0]]
        if request["isolation"] == "none":
            for name in ("workspace", "home", "tmp"):
                os.mkdir(os.path.join(folder, name), 0o755)
            code = os.path.join(folder, "executor.pyc")
            with open(code, "wb") as file:
                file.write(self.code)
            return [interpreter(), "-I", "-S", code, *arguments], {MARK: request["id"]}
        inner = [interpreter(), "-I", "-S", "/run/lachesis/executor.pyc", *arguments]
        if "ulimit" in request:
            limited = 'ulimit -u "$1" && shift && exec "$@"'
            inner = ["/bin/bash", "--norc", "--noprofile", "-c", limited, "bash", str(request["ulimit"]), *inner]
        contents = {path: text.encode() for path, text in request["files"].items()}
        files = {}
        for path, content in [*contents.items(), ("/run/lachesis/executor.pyc", self.code)]:
            files[path] = memory_file(os.path.basename(path), content)
            fds.append(files[path])
        return walls(request, files, inner), {}

    def detach(self, id: str, body: Callable[[], None]) -> None:
        """Run `body` in a process that is nobody's child here."""
        between = os.fork()
        if between == 0:
            try:
                if os.fork() == 0:
                    body()
            except BaseException as error:
                os.write(self.event_end, (json.dumps({"ended": id, "code": None, "log": str(error)}) + "\n").encode())
            finally:
                os._exit(0)
        os.waitpid(between, 0)

    def op_alive(self, request: Message) -> Message:
        return {"alive": bool(self.held(os.path.join(self.base, request["id"])))}

    def op_end(self, request: Message) -> None:
        self.endings.append(Ending(request["n"], request["ids"]))

    def advance(self, ending: Ending) -> None:
        waited = time.monotonic() - ending.begin
        for id in list(ending.ids):
            if self.gone(id, ending.signalled, waited):
                ending.ids.remove(id)
        if not ending.ids or waited > 2 * END_PATIENCE:
            self.endings.remove(ending)
            self.answer(ending.request, left=sorted(ending.ids))

    def gone(self, id: str, signalled: set[str], waited: float) -> bool:
        folder = os.path.join(self.base, id)
        if not os.path.isdir(folder):
            return True
        held = self.held(folder)
        if held is None and waited < 1.0:
            return False  # it is just being made, or removed
        if held:
            with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "pid")) as file:
                pid = int(file.read())
                if id not in signalled:
                    kill(pid, signal.SIGTERM)
                    signalled.add(id)
                elif waited > END_PATIENCE + 5:
                    kill(pid)
            return False
        self.clean(id)
        return not os.path.isdir(folder)

    def held(self, folder: str) -> bool | None:
        """Whether its supervisor lives; None when there is nothing to tell it by."""
        try:
            fd = os.open(os.path.join(folder, "meta.json"), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def clean(self, id: str) -> None:
        """What a supervisor does at its end, done for one that was killed."""
        groups = groups_of(id)
        mark = ("%s=%s" % (MARK, id)).encode()
        end, left = time.monotonic() + 3.0, True
        while left and time.monotonic() < end:
            victims = set()
            for group in groups:
                with contextlib.suppress(OSError), open(os.path.join(group, "cgroup.procs")) as file:
                    victims |= {int(line) for line in file}
            for name in os.listdir("/proc"):
                if name.isdigit():
                    with contextlib.suppress(OSError), open("/proc/%s/environ" % name, "rb") as environ:
                        if mark in environ.read().split(b"\0"):
                            victims.add(int(name))
            for pid in victims:
                kill(pid)
            left = bool(victims)
        remove_groups(groups)
        remove_folder(os.path.join(self.base, id))

    def op_list(self, _: Message) -> Message:
        attached = set()
        with open("/proc/net/unix") as file:
            for line in file:
                fields = line.split()
                if len(fields) == 8 and fields[5] == "03":  # an accepted connection bears its listener's path
                    attached.add(fields[7])
        sandboxes: list[Message] = []
        try:
            ids = sorted(os.listdir(self.base))
        except FileNotFoundError:  # it went with the last of them
            return {"sandboxes": sandboxes}
        for id in ids:
            folder = os.path.join(self.base, id)
            if not id.startswith(PREFIX) or not os.path.isdir(folder):
                continue
            meta: Message = {}
            try:
                young = time.time() - os.stat(folder).st_mtime < 10
            except FileNotFoundError:
                continue
            if young and not os.path.exists(os.path.join(folder, "meta.json")):
                continue  # it is just being made, or removed
            with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "meta.json")) as file:
                meta = json.load(file)
            alive = bool(self.held(folder))
            state = "in use" if os.path.join(folder, "socket") in attached else "nobody is attached"
            sandboxes.append({"id": id, "meta": meta, "alive": alive, "state": state if alive else "dead"})
        return {"sandboxes": sandboxes}


def relay(path: str) -> None:
    """Copy standard input and output to and from the socket `path`, where ssh does not lead there by itself."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    while True:
        for fd in select.select([0, stream.fileno()], [], [])[0]:
            if fd == 0:
                data = os.read(0, 1 << 18)
                if not data:
                    return
                stream.sendall(data)
            else:
                data = stream.recv(1 << 18)
                if not data:
                    return
                view = memoryview(data)
                while view:
                    view = view[os.write(1, view) :]


def main(arguments: list[str]) -> None:
    """`hub BASE` or `relay SOCKET`, after a mark that ends what the login shell has written by itself."""
    mark, mode, argument = arguments
    if mode == "relay":
        os.write(1, mark.encode() + b"\n")
        relay(argument)
        return
    try:
        hub = Hub(argument)
    except OSError as error:
        os.write(1, mark.encode() + b"\n" + json.dumps({"failed": str(error)}).encode() + b"\n")
        return
    os.write(1, mark.encode() + b"\n" + b'{"failed": ""}\n')
    hub.run()


if __name__ == "__main__":
    main(sys.argv[2:])
