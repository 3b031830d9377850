"""Starting processes from a helper process, which costs the event loop nothing and ends them when their owner ends.

Forking blocks a whole Python process with all its threads until the child has started its program: tens of
milliseconds with many sandboxes at once. And the kernel ties "die with your parent" to the thread that forked, which
may end before the process does. The helper (`spawn_server.py`) is small, has one thread and lives as long as its owner.
Its children get SIGKILL when either dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from backends.errors import BackendError

from .plan import Disk, Prepared, job

_ROOT = str(Path(__file__).parents[2])
_SERVER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from backends.host.spawn_server import main; main()"
_PATIENCE = 60.0
_PASSED = (
    "processes of this user are passing too many descriptors to each other (unix(7), ETOOMANYREFS). Next step: raise "
    "the hard limit of files, `ulimit -Hn`"
)
_limit = threading.Lock()


class Child:
    """A process that the helper has started. It keeps the helper alive until it is released."""

    def __init__(self, pid: int, handle: int, replies: socket.socket, spawner: Spawner) -> None:
        self.pid = pid
        self.handle, self._replies = handle, replies
        self._spawner: Spawner | None = spawner
        self.code: int | None = None
        """Exit code, negative for a signal; None while it runs, or until somebody has waited."""

    def kill(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    async def exited(self, timeout: float) -> bool:
        """Wait for its end. False when `timeout` seconds pass first."""
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        end = loop.time() + timeout
        while not self._look():
            fd = self._waits_on()
            loop.add_reader(fd, news.set)
            try:
                async with asyncio.timeout_at(end):
                    await news.wait()
            except TimeoutError:
                return self._look()
            finally:
                loop.remove_reader(fd)
            news.clear()
        return True

    def wait(self, timeout: float) -> bool:
        """`exited` for worker threads."""
        end = time.monotonic() + timeout
        while not self._look():
            poll = select.poll()
            poll.register(self._waits_on(), select.POLLIN)
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return self._look()
        return True

    def release(self) -> None:
        """Close the descriptors; the process itself lives on while anything else holds its spawner."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
            self._replies.close()
            self._spawner = None

    def _waits_on(self) -> int:
        return self.handle if self._replies.fileno() < 0 else self._replies.fileno()

    def _look(self) -> bool:
        """Read the helper's report. If the helper is gone, its children are being killed."""
        if self.code is not None:
            return True
        if self._replies.fileno() >= 0:
            try:
                message = self._replies.recv(4096)
            except BlockingIOError:
                return False
            except OSError:
                message = b""
            if message:
                self.code = int(json.loads(message)["exit"])
                return True
            self._replies.close()
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        if poll.poll(0):
            self.code = -signal.SIGKILL
        return self.code is not None


class Spawner:
    """Starts processes. Thread-safe; every method blocks for milliseconds and belongs into worker threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: Sequence[str] = ()
        self._env: Mapping[str, str] = {}
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._end: weakref.finalize[[socket.socket, subprocess.Popen[bytes], int], Spawner] | None = None

    def spawn(
        self,
        argv: Sequence[str],
        *,
        stream: int,
        errors: int,
        files: Sequence[int] = (),
        groups: Sequence[int] = (),
        disk: Disk | None = None,
        prepared: Prepared | None = None,
        env: Mapping[str, str] | None = None,
        layers: Sequence[int] = (),
        users: Sequence[int] = (),
        keeper: Sequence[int] = (),
        moved: int = 0,
    ) -> Child:
        """Start `argv`, whose first item is a path, in a new session; with an empty environment but for `env`.

        Args:
            stream: its standard input and output.
            errors: its standard error; gets the reason if the program cannot be run (exit code 126).
            files: descriptors to pass on; it knows them by `plan.numbers`.
            groups: descriptors of the `cgroup.procs` that it joins before it runs anything.
            prepared: runs in the sandbox that `argv` makes.
            layers, users, keeper, moved: see `plan.job`.

        Raises:
            BackendError: no process could be made.
        """
        described = job(argv, groups=len(groups), files=len(files), disk=disk, prepared=prepared, env=env)
        described.update(layers=len(layers), users=bool(users), keeps=bool(keeper), moved=moved)
        encoded = json.dumps(described).encode()
        fds = [stream, errors, *groups, *layers, *users, *keeper, *files]
        requests: socket.socket | None = None
        for _ in range(2):  # the helper may have been killed since it was last used
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    requests = self._helper(instead_of=requests)
                    _send(requests, encoded, [theirs.fileno(), *fds])
                ours.settimeout(_PATIENCE)
                message, handles, _, _ = socket.recv_fds(ours, 4096, 1)
                if message:
                    answer = json.loads(message)
                    if "error" not in answer and not handles:  # the table is full: the process ends with its stream
                        answer = {"error": os.strerror(errno.EMFILE)}
                    if "error" in answer:
                        raise BackendError(f"a process could not be started: {answer['error']}")
                    os.set_inheritable(handles[0], False)
                    ours.setblocking(False)
                    return Child(answer["pid"], handles[0], ours, self)
                reason = "the helper process has ended, or has too many open files"
            except TimeoutError:  # it lives, and so do its children, which would end with it
                ours.close()
                raise BackendError(f"a process could not be started within {_PATIENCE:g} s") from None
            except OSError as error:
                if error.errno == errno.EMSGSIZE:  # no failure of the helper, with which its other children would end
                    ours.close()
                    raise BackendError(
                        f"a process could not be started: {len(encoded)} bytes are too long a job"
                    ) from None
                if error.errno == errno.ETOOMANYREFS:  # nor is this
                    ours.close()
                    raise BackendError(f"a process could not be started: {_PASSED}") from None
                reason = str(error)
            except BaseException:
                ours.close()
                raise
            ours.close()
            if requests is not None and self._lives(requests):  # it is not replaced: its children would end with it
                break
        raise BackendError(f"a process could not be started: {reason}")

    def start_by(self, before: Sequence[str], env: Mapping[str, str]) -> int:
        """Start a new helper by a command line that ends in its own, such as `systemd-run --scope`.

        Returns its process id. Earlier children end with the earlier helper.

        Raises:
            BackendError: no process can be started in this way.
        """
        with self._lock:
            self._before, self._env, self._requests = before, env, None
        null = os.open(os.devnull, os.O_RDWR)
        try:
            self.spawn(["/bin/true"], stream=null, errors=null).release()  # it runs, and no longer what started it
        except BackendError:
            with self._lock:
                self._before, self._env, self._requests = (), {}, None
            raise
        finally:
            os.close(null)
        assert self._process is not None
        return self._process.pid

    def _helper(self, instead_of: socket.socket | None) -> socket.socket:
        """The helper, but not the one that `instead_of` leads to, which has failed."""
        with self._lock:
            # A forked copy of this process needs another helper: this one's children end with this process. If
            # several threads find that a helper has ended, the first one starts the new helper for all.
            if self._requests is None or self._owner != os.getpid() or self._requests is instead_of:
                self._start()
            assert self._requests is not None
            return self._requests

    def _lives(self, requests: socket.socket) -> bool:
        """Whether the helper that `requests` leads to still runs; its descriptors are closed shortly before its end."""
        with self._lock:
            if self._requests is not requests or self._process is None:
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
                return False
            return True

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.pidfd_open(os.getpid())
        try:
            python = [sys.executable, "-I", "-S", "-B", "-X", "utf8"]
            command = [*self._before, *python, "-c", _SERVER, _ROOT, str(theirs.fileno()), str(owner)]
            process = subprocess.Popen(
                command,
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), owner),
                start_new_session=True,  # Ctrl-C is for the owner
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise BackendError(f"the helper process that starts sandboxes cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(owner)
        if self._end is not None:
            self._end()
        self._owner, self._requests, self._process = os.getpid(), ours, process
        self._end = weakref.finalize(self, _end, ours, process, os.getpid())


def _send(requests: socket.socket, job: bytes, fds: Sequence[int]) -> None:
    """Pass a job on. Programs inside may be passing as many descriptors as this process may (`starting.INSIDE`)."""
    try:
        socket.send_fds(requests, [job], fds)
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        with _limit:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            try:
                socket.send_fds(requests, [job], fds)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _end(requests: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    """Let the helper end; its children end with it."""
    requests.close()
    if owner == os.getpid():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
