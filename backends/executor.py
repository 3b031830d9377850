"""The sandbox's inner half: one process that runs commands and moves files for whoever holds its byte stream.

One file of standard library, Python 3.8 or later, started as `python3 -I -S executor.py` (as PID 1 where the sandbox
has its own PID namespace). Its standard input and output are the stream; any transport will do. Folders named on its
command line are removed when it ends.

The protocol
------------
A frame is two big-endian 32-bit lengths, a JSON header, a binary payload: `!II`, header, payload.

* Every request has an `id` (a positive integer, never reused) and an `op`. Every request but `cancel` and `shutdown`
  gets one answer with that `id`; answers come in any order. An error is `{"error": {"errno", "message", "path"}}`.
* A message may be split over frames of one `id`; all but the last carry `"more": true`. (`write` upwards, `read`
  downwards: nothing large ever blocks the stream for the others.)
* Unasked, it sends two frames: `{"id": 0, "hello": 1, ...}` once it is ready for `init`, and
  `{"id": 0, "bye": reason}` when it ends of itself.

Requests, with what they carry, and their answers (`?` marks what may be null or left out):

  init       workdir, env, lifetime (seconds)                                        {}; comes first, once
  exec       command, timeout, cwd?, env?, stdin? (true: the payload), max_output    as `ExecResult`; see below
  start      command, cwd?, env?                                                     process: its id
  processes                                                                          processes: [[id, command], ...]
  status     process                                                                 exit_code?, output_size
  output     process, offset, wait (seconds), limit                                  offset, exit_code?; payload
  input      process, close? (true: the end); payload                                {} when all of it is in the pipe
  kill       process                                                                 {}
  read       path, offset, limit?                                                    payload
  write      path; payload                                                           {}
  cancel     target: the id of a request                                             none; ends it, and its command
  shutdown                                                                           none

The payload of `exec`'s answer is stdout and then stderr; `stdout` in its header is the length of the former.

Invariants
----------
* The stream and this process cannot be reached from inside: its fds are moved away and close-on-exec, and it is not
  dumpable, so that /proc/PID/fd, /proc/PID/mem and ptrace are closed even to the same uid.
* What is kept of a command's output is bounded while it is read. Nothing that a command does blocks the loop.
* When the stream ends, or `lifetime` seconds are over, it ends, and everything that it started ends with it.
* The shell's state (folder, exported variables) is reported by an EXIT trap into a memory file of its own, never
  through the output. A shell that never reaches its trap leaves the remembered state as it was.
"""

# ruff: noqa: PTH103, PTH105, PTH108, PTH112, PTH116, PTH118, PTH120, PTH123, PTH208, UP031
# (pathlib would add to the start-up time; %-formatting suits templates that are full of braces)
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import heapq
import json
import os
import re
import resource
import select
import signal
import stat
import struct
import sys
import termios
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # on Python 3.8 these could not be evaluated
    from collections.abc import Callable, Iterator
    from typing import Any, TypeAlias

    Header: TypeAlias = dict[str, Any]
    Timer: TypeAlias = list[Any]

PROTOCOL = 1
FRAME = struct.Struct("!II")
CHUNK = 1 << 18
RING = 1 << 20
"""Bytes of output that are kept of a background process."""
GRACE = 0.05
"""Seconds that a finished shell's pipes may stay open before its result is sent without their end."""
REPORT_FD = 211
"""Where shells report their state: high and odd, as scripts like to use 3 to 9, 100 and 200 for their own."""
ARGUMENT = 100_000
"""A command is passed in arguments of this size (the kernel's limit for one, and for a variable, is 128 KiB)."""
ENVIRONMENT = 1_000_000
"""Bytes of variables that carry over: with more (the kernel's limit is about 2 MiB), no command could be started."""
REPORT = 1 << 24
"""Bytes of a shell's report that are looked at, from its end: what was written last counts."""
WHOLE = 1 << 28
"""Bytes of a file that are read without a `limit`: a sparse file may claim more than its reader has memory."""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 4, 22, 36
libc = ctypes.CDLL(None, use_errno=True)
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Open files allowed to what runs inside."""


class Capped:
    """The first `limit // 2` bytes of a stream, its last ones up to `limit` together, and the count of all."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit // 2
        self.tail_limit = limit - self.head_limit
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.tail_limit + CHUNK:
            del self.tail[: len(self.tail) - self.tail_limit]

    def result(self) -> bytes:
        return bytes(self.head + self.tail[max(0, len(self.tail) - self.tail_limit) :])


class Ring:
    """The last `RING` bytes of a stream; offsets count from the stream's beginning."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        self.data += data
        if len(self.data) > 2 * RING:
            del self.data[: len(self.data) - RING]

    def read(self, offset: int, limit: int) -> tuple[int, bytes]:
        kept = min(len(self.data), RING)
        offset = min(max(offset, self.total - kept), self.total)
        begin = len(self.data) - (self.total - offset)
        return offset, bytes(self.data[begin : begin + limit])


# --- processes -------------------------------------------------------------------------------------------------------


def process_table() -> dict[int, tuple[str, int, int]]:
    """`{pid: (state, ppid, session)}` of every process that can be seen."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                table[int(name)] = (fields[0].decode(), int(fields[1]), int(fields[3]))
            except (OSError, IndexError):
                continue  # it ended meanwhile
    return table


def living_tree(root: int) -> set[int]:
    """Living processes below `root`, members of its session, and what is below those; never `root` itself."""
    table = process_table()
    tree = {pid for pid, (_, _, session) in table.items() if pid == root or session == root} | {root}
    grown = True
    while grown:
        found = {pid for pid, (_, parent, _) in table.items() if parent in tree and pid not in tree}
        tree |= found
        grown = bool(found)
    return {pid for pid in tree if pid != root and pid in table and table[pid][0] not in "ZX"}


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_tree(root: int) -> None:
    """Kill what `root` started until nothing new turns up. `root` is their subreaper, so none can leave its tree."""
    seen: set[int] = set()
    now = time.monotonic()
    patience, end = now + 0.15, now + 5.0
    while True:
        victims = living_tree(root)
        for pid in victims:
            send_signal(pid, signal.SIGKILL)
        now = time.monotonic()
        if victims - seen:
            patience = now + 0.15  # still forking
        seen |= victims
        if not victims or now > patience or now > end:
            return
        time.sleep(0.001)


# --- the shell -------------------------------------------------------------------------------------------------------

# `builtin`, because the command may have functions called `set` or `exit`; a DEBUG trap would write into the report.
_QUIET = "{ %sbuiltin trap - DEBUG; builtin set +xv; } >/dev/null 2>&1; "
_SAVE = (
    _QUIET % ""
    + r'{ builtin printf "%%s\0" "$PWD"; builtin export -p; builtin printf "\0"; } 2>/dev/null >&%d || :' % REPORT_FD
)
# `eval`, because the command may set an EXIT trap of its own: then the second _SAVE is the one that counts.
_STATEFUL = "trap '" + _SAVE + "' EXIT; RUN; " + _QUIET % 'builtin set -- "$?"; ' + _SAVE + '; builtin exit "$1"'

_EXPORT = re.compile(
    rb"^(?:declare -\w+|export) (\w+)(?:=(\"(?:[^\"\\]|\\.)*\"|\$'(?:[^'\\]|\\.)*'))?$", re.MULTILINE | re.DOTALL
)
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"e": b"\33", b"E": b"\33", b"f": b"\f", b"n": b"\n", b"r": b"\r"}
_ESCAPES.update({b"t": b"\t", b"v": b"\v"})
_NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
_NOT_KEPT = frozenset(["_", "PWD", "SHLVL", "BASHOPTS", "SHELLOPTS", "BASH_ENV"])


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match.group(1)
    if code[:1].isdigit():
        return bytes([int(code, 8) & 255])
    return _ESCAPES.get(code, code)


def parse_exports(text: bytes) -> dict[str, str]:
    """What bash's `export -p` printed, as a mapping."""
    found = {}
    for match in _EXPORT.finditer(text):
        name, quoted = match.groups()
        if quoted is None:
            continue  # exported, yet without a value: not in the environment
        if quoted[:1] == b"$":
            value = re.sub(rb"\\([0-7]{1,3}|.)", _unescape, quoted[2:-1], flags=re.DOTALL)
        else:
            value = re.sub(rb"\\([$`\"\\])", rb"\1", quoted[1:-1])
        found[os.fsdecode(name)] = os.fsdecode(value)
    return found


def shell_arguments(bash: str, command: str, stateful: bool) -> list[bytes]:
    encoded = os.fsencode(command)
    arguments = [os.fsencode(bash), b"--norc", b"--noprofile", b"-c"]
    if not stateful and len(encoded) <= ARGUMENT:
        return [*arguments, encoded]
    parts = [encoded[i : i + ARGUMENT] for i in range(0, len(encoded), ARGUMENT)] or [b""]
    run = 'eval "shift %d; %s"' % (len(parts), "".join("${%d}" % (i + 1) for i in range(len(parts))))
    return [*arguments, os.fsencode(_STATEFUL.replace("RUN", run) if stateful else run), b"bash", *parts]


class ShellState:
    """The folder and the variables that the next shell starts with."""

    def __init__(self, workdir: str, env: dict[str, str]) -> None:
        self.workdir = workdir
        self.cwd = workdir
        self.env = dict(env)
        self._parsed: tuple[bytes, dict[str, str]] = (b"", {})

    def commit(self, report: bytes, before: dict[str, str], cwd: str | None, env: dict[str, str]) -> list[str]:
        """Take over what a shell changed, except what `cwd` and `env` overrode for that call.

        Only its changes are applied: shells that ran at the same time do not undo each other. Returns the names of
        variables that are too large to carry over; they keep the value that they had.
        """
        parts = report.split(b"\0")
        if len(parts) < 3 or parts[-1]:
            return []
        if cwd is None and parts[-3].startswith(b"/"):
            self.cwd = os.fsdecode(parts[-3])
        if parts[-2] != self._parsed[0]:  # a rare event: most commands export nothing
            self._parsed = (parts[-2], parse_exports(parts[-2]))
        after = self._parsed[1]
        for name in before:
            if name not in after and name not in _NOT_KEPT and name not in env and _NAME.match(name):
                self.env.pop(name, None)
        room = ENVIRONMENT - sum(len(os.fsencode(name + value)) for name, value in self.env.items())
        refused = []
        for name, value in after.items():
            if name not in _NOT_KEPT and name not in env and before.get(name) != value:
                size = len(os.fsencode(name + value))
                grown = size - (len(os.fsencode(name + self.env[name])) if name in self.env else 0)
                if size > ARGUMENT or grown > room:
                    refused.append(name)
                else:
                    self.env[name] = value
                    room -= grown
        return refused


# --- jobs ------------------------------------------------------------------------------------------------------------


class Job:
    """A shell and the pipes that it writes to. It is finished after its exit and the end of its output, or GRACE."""

    def __init__(self, executor: Executor, command: str) -> None:
        self.executor = executor
        self.command = command
        self.pid = 0
        self.exit_code: int | None = None
        self.finished = False
        self.sinks: dict[int, Callable[[bytes], None]] = {}

    def pipe(self, sink: Callable[[bytes], None]) -> int:
        """A new pipe that is drained into `sink`; returns the end to write to."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self.sinks[read_end] = sink
        self.executor.watch(read_end, select.EPOLLIN, self.on_output)
        return write_end

    def on_output(self, fd: int, limit: int = CHUNK) -> int:
        try:
            data = os.read(fd, limit)
        except BlockingIOError:
            return 0
        if data:
            self.sinks[fd](data)
            return len(data)
        self.executor.unwatch(fd)
        os.close(fd)
        del self.sinks[fd]
        if self.exit_code is not None and not self.sinks:
            self.finish()
        return 0

    def on_exit(self, exit_code: int) -> None:
        """The shell has ended: all that it wrote is in the pipes now; a child of it may hold them open for ever."""
        self.exit_code = exit_code
        for fd in list(self.sinks):
            waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
            while waiting > 0:
                waiting -= self.on_output(fd, waiting) or waiting
            if fd in self.sinks:
                self.on_output(fd, 1)  # sees the end, if it is there
        if self.sinks:
            self.executor.after(GRACE, self.finish)
        else:
            self.finish()

    def kill(self) -> None:
        """Kill the shell with everything that it started. It is stopped first, lest it carries on with its script."""
        if self.pid <= 0:
            return
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGSTOP)
        kill_tree(self.pid)
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGKILL)

    def finish(self) -> None:
        raise NotImplementedError


def discard(_: bytes) -> None:
    """Children that outlive their command keep writing: it is read, or they would block or die of SIGPIPE."""


class Exec(Job):
    """A command whose result somebody waits for."""

    def __init__(self, executor: Executor, request: Header, stdin: bytes) -> None:
        super().__init__(executor, request["command"])
        self.request = request["id"]
        self.timed_out = False
        self.stdout, self.stderr = Capped(request["max_output"]), Capped(request["max_output"])
        self.cwd, self.env = request.get("cwd"), request.get("env") or {}
        self.before = dict(executor.state.env, **self.env)
        self.begin = time.monotonic()
        self.report = os.memfd_create("report")
        given = os.open(os.devnull, os.O_RDONLY)
        if request.get("stdin"):
            os.close(given)
            given = os.memfd_create("stdin")
            with open(os.dup(given), "wb") as file:
                file.write(stdin)
            os.lseek(given, 0, os.SEEK_SET)
        fds = [given, self.pipe(self.stdout.feed), self.pipe(self.stderr.feed)]
        executor.spawn(self, fds, self.cwd, self.before, self.report)
        self.timer = executor.after(request["timeout"], self.on_timeout)

    def on_timeout(self) -> None:
        if self.exit_code is None and not self.finished:
            self.timed_out = True
            self.kill()
            self.executor.after(0.2, self.finish)  # were it stuck in the kernel, the answer would still be in time

    def finish(self) -> None:
        if self.finished:
            return
        self.finished = True
        self.timer[2] = None
        duration = time.monotonic() - self.begin
        for fd in self.sinks:
            self.sinks[fd] = discard
        skipped = max(0, os.fstat(self.report).st_size - REPORT)
        report = os.pread(self.report, REPORT, skipped)
        os.close(self.report)
        if skipped:
            report = report.partition(b"\0")[2]
        if not self.timed_out:
            for name in self.executor.state.commit(report, self.before, self.cwd, self.env):
                self.stderr.feed(b"bash: export: %s: too large to carry over to the next command\n" % os.fsencode(name))
        stdout, stderr = self.stdout.result(), self.stderr.result()
        self.executor.execs.pop(self.request, None)
        self.executor.send(
            {
                "id": self.request,
                "exit_code": 124 if self.timed_out else self.exit_code,
                "timed_out": self.timed_out,
                "stdout": len(stdout),
                "stdout_elided": self.stdout.total - len(stdout),
                "stderr_elided": self.stderr.total - len(stderr),
                "duration": duration,
            },
            stdout + stderr,
        )


class Background(Job):
    """A process that was `start`ed: its output is kept in a ring, for as long as the sandbox lives."""

    def __init__(self, executor: Executor, request: Header) -> None:
        super().__init__(executor, request["command"])
        self.ring = Ring()
        self.waiting: dict[int, tuple[int, int]] = {}  # request id: (offset, limit)
        self.writing: list[tuple[int, memoryview, bool]] = []
        given, self.stdin = os.pipe()
        os.set_blocking(self.stdin, False)
        output = self.pipe(self.on_data)
        env = dict(executor.state.env, **(request.get("env") or {}))
        executor.spawn(self, [given, output, output], request.get("cwd"), env, None)

    def on_data(self, data: bytes) -> None:
        self.ring.feed(data)
        self.answer_waiting()

    def answer_waiting(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for request, (offset, limit) in waiting.items():
            self.answer(request, offset, limit)

    def answer(self, request: int, offset: int, limit: int) -> None:
        offset, data = self.ring.read(offset, limit)
        self.executor.send({"id": request, "offset": offset, "exit_code": self.shown_exit_code}, data)

    @property
    def shown_exit_code(self) -> int | None:
        """The exit code once its output is complete: a reader who sees it has seen everything."""
        return self.exit_code if self.finished else None

    def output(self, request: int, offset: int, wait: float, limit: int) -> None:
        if offset < self.ring.total or self.finished or wait <= 0:
            self.answer(request, offset, limit)
            return
        self.waiting[request] = (offset, limit)

        def enough() -> None:
            if request in self.waiting:
                self.answer(request, *self.waiting.pop(request))

        self.executor.after(wait, enough)

    def input(self, request: int, data: bytes, close: bool) -> None:
        if self.stdin < 0 or self.exit_code is not None:
            if not close:
                raise ProcessLookupError(errno.ESRCH, "the process has ended or its input is closed")
            self.executor.send({"id": request})
            return
        self.writing.append((request, memoryview(data), close))
        self.on_writable(self.stdin)

    def on_writable(self, fd: int) -> None:
        try:
            while self.writing:
                request, data, close = self.writing[0]
                data = data[os.write(fd, data) :] if data else data
                self.writing[0] = (request, data, close)
                if data:
                    continue
                del self.writing[0]
                self.executor.send({"id": request})
                if close:
                    self.close_stdin()
                    return
            self.executor.unwatch(fd)
        except BlockingIOError:
            self.executor.watch(fd, select.EPOLLOUT, self.on_writable)
        except BrokenPipeError:
            self.close_stdin()

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            self.executor.unwatch(self.stdin)
            os.close(self.stdin)
            self.stdin = -1
        for request, _, close in self.writing:
            gone = ProcessLookupError(errno.ESRCH, "the process no longer reads its input")
            self.executor.send({"id": request} if close else failure(request, gone))
        self.writing = []

    def finish(self) -> None:
        if not self.finished:
            self.finished = True
            self.close_stdin()
            self.answer_waiting()


def failure(request: int, error: BaseException) -> Header:
    if isinstance(error, OSError):
        detail = {"errno": error.errno, "message": error.strerror or str(error), "path": error.filename}
    else:
        detail = {"errno": None, "message": "%s: %s" % (type(error).__name__, error)}
    return {"id": request, "error": detail}


# --- files -----------------------------------------------------------------------------------------------------------


def read_file(path: str, offset: int, limit: int | None) -> Iterator[bytes]:
    """The file's bytes, chunk by chunk; errors come with the first."""
    # O_NONBLOCK, because opening a FIFO would wait for its writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        end = offset + WHOLE
        while limit is None or limit > 0:
            if limit is None and max(status.st_size, offset) > end:
                raise OSError(errno.EFBIG, "larger than %d bytes, read it in parts" % WHOLE, path)
            data = os.pread(fd, CHUNK if limit is None else min(CHUNK, limit), offset)
            if not data:
                return
            yield data
            offset += len(data)
            limit = None if limit is None else limit - len(data)
    finally:
        os.close(fd)


class Upload:
    """A file on its way: written beside its place, then moved over it."""

    def __init__(self, path: str, number: int) -> None:
        self.path = os.path.realpath(path)
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        except FileExistsError:  # what stands where a folder has to be
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        self.temporary = os.path.join(os.path.dirname(self.path), ".upload-%d-%d" % (os.getpid(), number))
        self.fd = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            os.fchmod(self.fd, stat.S_IMODE(os.stat(self.path).st_mode))

    def feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def close(self, keep: bool) -> None:
        """Put the file in its place, or take it away, which is still possible after the former has failed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if keep:
            os.replace(self.temporary, self.path)
        else:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)


# --- the loop --------------------------------------------------------------------------------------------------------


class Executor:
    """One thread, one epoll: requests in, answers out, pipes and deadlines in between."""

    def __init__(self, bash: str, stream_in: int, stream_out: int) -> None:
        self.bash = bash
        self.stream_in, self.stream_out = stream_in, stream_out
        self.state = ShellState("/", {})
        self.reason: str | None = None  # why it is to end
        self.execs: dict[int, Exec] = {}
        self.processes: dict[str, Background] = {}
        self.children: dict[int, Job] = {}
        self.uploads: dict[int, Upload | None] = {}  # None: failed, the rest is ignored
        self.received = bytearray()
        self.sending: list[memoryview] = []
        self.streams: list[tuple[int, Iterator[bytes]]] = []
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[int], Any]] = {}
        self.timers: list[Timer] = []
        self.counter = 0
        self.signals, wakeup = os.pipe()
        for fd in (self.signals, wakeup, stream_in, stream_out):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self.watch(self.signals, select.EPOLLIN, self.on_signal)
        self.watch(stream_in, select.EPOLLIN, self.on_readable)

    def watch(self, fd: int, events: int, handler: Callable[[int], Any]) -> None:
        if fd in self.handlers:
            self.poll.modify(fd, events)
        else:
            self.poll.register(fd, events)
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None):
            self.poll.unregister(fd)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` later; the timer is off once its third item is None."""
        self.counter += 1
        timer: Timer = [time.monotonic() + seconds, self.counter, callback]
        heapq.heappush(self.timers, timer)
        return timer

    def run(self) -> None:
        self.send({"id": 0, "hello": PROTOCOL, "pid": os.getpid(), "python": list(sys.version_info[:3])})
        while self.reason is None:
            wait = -1.0
            while self.timers and self.timers[0][2] is None:
                heapq.heappop(self.timers)
            if self.timers:
                wait = min(max(0.0, self.timers[0][0] - time.monotonic()), 3600.0)
            for fd, _ in self.poll.poll(wait):
                if fd in self.handlers:  # an earlier handler of this round may have closed it
                    self.handlers[fd](fd)
            now = time.monotonic()
            while self.timers and self.timers[0][0] <= now:
                callback = heapq.heappop(self.timers)[2]
                if callback is not None:
                    callback()

    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason

    def on_signal(self, fd: int) -> None:
        if signal.SIGTERM in os.read(fd, 4096):
            self.stop("it was told to end (SIGTERM)")
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self.children.pop(pid, None)
            if job is not None:  # otherwise an orphan that this process adopted
                job.on_exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))

    def spawn(self, job: Job, fds: list[int], cwd: str | None, env: dict[str, str], report: int | None) -> None:
        """Start `job`'s shell with `fds` as its 0, 1 and 2, and close them here.

        What goes wrong before bash runs looks like bash's own failure: a message in its output, and exit code 1 or 126.
        """
        arguments = shell_arguments(self.bash, job.command, report is not None)
        try:
            pid = os.fork()
        except OSError as error:
            os.write(fds[2], b"bash: fork: " + os.fsencode(error.strerror or "failed") + b"\n")
            self.after(0.0, lambda: job.on_exit(126))
        else:
            if pid == 0:
                self.become_shell(arguments, fds, cwd, env, report)
            job.pid = pid
            self.children[pid] = job
            for other in self.processes.values():
                if other.pid == pid:  # the number came round again: the ended process has lost its name
                    other.pid = -1
        for fd in set(fds):
            os.close(fd)

    def become_shell(
        self,
        arguments: list[bytes],
        fds: list[int],
        cwd: str | None,
        env: dict[str, str],
        report: int | None,
    ) -> None:
        """In the child: never returns."""
        failed, what = 126, "bash"
        try:
            os.setsid()
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # its orphans become its children, and can be found
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            if report is not None:
                os.set_inheritable(os.dup2(report, REPORT_FD), True)
            if cwd is not None:
                failed, what = 1, "cd: " + cwd
                os.chdir(os.path.join(self.state.workdir, cwd))
                failed, what = 126, "bash"
            else:
                for path in (self.state.cwd, self.state.workdir, "/"):
                    with contextlib.suppress(OSError):
                        os.chdir(path)
                        break
            os.execve(self.bash, arguments, env)
        except BaseException as error:
            reason = getattr(error, "strerror", None) or repr(error)
            os.write(2, os.fsencode("bash: %s: %s\n" % (what, reason)))
        finally:
            os._exit(failed)

    # the stream

    def send(self, header: Header, payload: bytes = b"") -> None:
        encoded = json.dumps(header).encode()
        self.sending.append(memoryview(FRAME.pack(len(encoded), len(payload)) + encoded + payload))
        self.on_sendable(self.stream_out)

    def on_sendable(self, fd: int) -> None:
        try:
            while self.sending or self.streams:
                if not self.sending:  # files go out when nothing else has to, a chunk of each in turn
                    self.next_chunk(*self.streams.pop(0))
                    continue
                self.sending[0] = self.sending[0][os.write(fd, self.sending[0]) :]
                if not self.sending[0]:
                    del self.sending[0]
            self.unwatch(fd)
        except BlockingIOError:
            self.watch(fd, select.EPOLLOUT, self.on_sendable)
        except OSError:
            self.stop("nobody reads its answers")

    def next_chunk(self, request: int, chunks: Iterator[bytes]) -> None:
        header: Header = {"id": request}
        data = b""
        try:
            data = next(chunks)
            header["more"] = True
            self.streams.append((request, chunks))
        except StopIteration:
            pass
        except OSError as error:
            header = failure(request, error)
        encoded = json.dumps(header).encode()
        self.sending.append(memoryview(FRAME.pack(len(encoded), len(data)) + encoded + data))

    def on_readable(self, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            return self.stop("its stream broke: %s" % error)
        if not data:
            return self.stop("its stream was closed")
        self.received += data
        begin, available = 0, len(self.received)
        while available - begin >= FRAME.size:
            header_size, payload_size = FRAME.unpack_from(self.received, begin)
            end = begin + FRAME.size + header_size + payload_size
            if end > available:
                break
            payload_at = begin + FRAME.size + header_size
            header = json.loads(self.received[begin + FRAME.size : payload_at].decode())
            self.serve(header, bytes(self.received[payload_at:end]))
            begin = end
        del self.received[:begin]
        return None

    def serve(self, header: Header, payload: bytes) -> None:
        try:
            getattr(self, "op_" + header["op"])(header, payload)
        except Exception as error:
            if not isinstance(error, OSError):
                sys.excepthook(*sys.exc_info())
            self.send(failure(header["id"], error))

    # requests

    def path(self, path: str) -> str:
        return os.path.join(self.state.workdir, path)

    def process(self, header: Header) -> Background:
        try:
            return self.processes[header["process"]]
        except KeyError:
            raise ProcessLookupError(errno.ESRCH, "no such process", header["process"]) from None

    def op_init(self, header: Header, _: bytes) -> None:
        self.state = ShellState(header["workdir"], header["env"])
        lifetime = header["lifetime"]
        self.after(lifetime, lambda: self.stop("its lifetime of %g s is over" % lifetime))
        self.send({"id": header["id"]})

    def op_exec(self, header: Header, payload: bytes) -> None:
        self.execs[header["id"]] = Exec(self, header, payload)

    def op_start(self, header: Header, _: bytes) -> None:
        name = "p%d" % (len(self.processes) + 1)
        self.processes[name] = Background(self, header)
        self.send({"id": header["id"], "process": name})

    def op_processes(self, header: Header, _: bytes) -> None:
        listed = [[name, process.command] for name, process in self.processes.items()]
        self.send({"id": header["id"], "processes": listed})

    def op_status(self, header: Header, _: bytes) -> None:
        process = self.process(header)
        self.send({"id": header["id"], "exit_code": process.shown_exit_code, "output_size": process.ring.total})

    def op_output(self, header: Header, _: bytes) -> None:
        self.process(header).output(header["id"], header["offset"], header["wait"], header["limit"])

    def op_input(self, header: Header, payload: bytes) -> None:
        self.process(header).input(header["id"], payload, header.get("close", False))

    def op_kill(self, header: Header, _: bytes) -> None:
        self.process(header).kill()
        self.send({"id": header["id"]})

    def op_read(self, header: Header, _: bytes) -> None:
        chunks = read_file(self.path(header["path"]), header["offset"], header["limit"])
        self.streams.append((header["id"], chunks))
        self.on_sendable(self.stream_out)

    def op_write(self, header: Header, payload: bytes) -> None:
        request, more = header["id"], header.get("more", False)
        upload = None
        try:
            upload = (
                self.uploads.pop(request) if request in self.uploads else Upload(self.path(header["path"]), request)
            )
            if more:
                self.uploads[request] = upload
            if upload is None:
                return
            upload.feed(payload)
            if not more:
                upload.close(keep=True)
                self.send({"id": request})
        except OSError:
            if more:
                self.uploads[request] = None
            if upload is not None:
                upload.close(keep=False)
            raise

    def op_cancel(self, header: Header, _: bytes) -> None:
        target = header["target"]
        if target in self.execs:
            self.execs[target].kill()
        upload = self.uploads.pop(target, None)
        if upload is not None:
            upload.close(keep=False)
        self.streams = [stream for stream in self.streams if stream[0] != target]
        for process in self.processes.values():
            process.waiting.pop(target, None)

    def op_shutdown(self, _: Header, __: bytes) -> None:
        self.stop("it was shut down")


def lock_own_settings() -> None:
    """Refuse, here and in all that is started from here, to change the limits and the priority of PID 1.

    Its commands run as the same user, so `prlimit --pid 1 --cpu=1` would kill it and `--nofile=9` cripple it for ever.
    A seccomp filter; source: seccomp(2), linux/filter.h. Without it where the machine is not known, or where the
    kernel wants no_new_privs for it, which bubblewrap sets.
    """
    number, first, second = 0, 16, 24  # offsets in struct seccomp_data: system call, first and second argument
    known = {
        "x86_64": (0xC000003E, (302, 203, 144, 142, 314), 141, 251),
        "aarch64": (0xC00000B7, (261, 122, 119, 118, 274), 140, 30),
    }.get(os.uname().machine)
    if known is None:
        return
    # prlimit64, sched_setaffinity, _setscheduler, _setparam and _setattr; setpriority; ioprio_set
    machine, with_pid, setpriority, ioprio_set = known
    rules = [(call, first, 1) for call in with_pid]
    for call, of_user in ((setpriority, 2), (ioprio_set, 3)):  # of a process, or of all that a user has
        rules += [(call, second, 1), (call, first, of_user)]

    load, equal, at_least, done = 0x20, 0x15, 0x35, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    # The same calls have other numbers for 32-bit programs and in the x32 ABI: those are not supported at all.
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (done, 0, 0, unknown)]
    program += [(load, 0, 0, number), (at_least, 0, 1, 0x40000000), (done, 0, 0, unknown)]
    for call, argument, value in rules:
        program += [(load, 0, 0, number), (equal, 0, 3, call), (load, 0, 0, argument), (equal, 0, 1, value)]
        program += [(done, 0, 0, refuse)]
    program += [(done, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    pointer = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(pointer), 0, 0)


def find_bash() -> str:
    for folder in [*os.environ.get("PATH", os.defpath).split(":"), "/bin", "/usr/bin", "/usr/local/bin"]:
        path = os.path.join(folder, "bash")
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(errno.ENOENT, "bash is needed inside the sandbox", "bash")


def main() -> None:
    is_init = os.getpid() == 1
    stream_in, stream_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.set_inheritable(2, False)  # every child gets its own
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # when memory runs out, what ran here goes before what trains
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))  # children left behind hold two pipes each
    keyctl = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
    if keyctl is not None:
        libc.syscall(keyctl, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING: an empty one, not the owner's with its keys
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A PID 1 without handlers is deaf to signals from inside its namespace; elsewhere SIGTERM means a tidy end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if is_init:
        lock_own_settings()
    else:
        signal.signal(signal.SIGTERM, lambda *_: None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    executor = Executor(find_bash(), stream_in, stream_out)
    try:
        executor.run()
        with contextlib.suppress(OSError):
            os.set_blocking(stream_out, False)
            executor.send({"id": 0, "bye": executor.reason})
    finally:
        if not is_init:  # the kernel does this for a PID namespace
            kill_tree(os.getpid())
            import shutil

            for path in sys.argv[1:]:
                shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
