"""The sandbox's inner half: one process that runs commands and moves files for whoever holds its byte stream.

One file of standard library, Python 3.8 or later, started as `python3 -I -S executor.py` (as PID 1 where the sandbox
has its own PID namespace). On its command line:

  (nothing)        its standard input and output are the stream; the end of the stream is its end
  --dial PATH      it connects to the Unix socket PATH, and again after every cut
  --listen @NAME   it waits for connections to the abstract Unix socket NAME
  --listen fd:N    it waits for connections to the listening socket that it inherits as descriptor N
  --relay @NAME    no executor: copies its standard input and output to and from that socket, until either ends
  --bash PATH      the bash to use where none is on PATH
  FOLDER ...       are removed when it ends, unless it is PID 1

The protocol
------------
A frame is two big-endian 32-bit lengths, a JSON header, a binary payload: `!II`, header, payload.

* Every request has an `id` (a positive integer, never reused) and an `op`. Every request gets one answer with that
  `id`; answers come in any order. An error is `{"error": {"errno", "message", "path"}}`; without an `errno` it is the
  executor's own failure. `cancel`, `drop` and `shutdown` are no requests: they have no `id` and no answer.
* A message may be split over frames of one `id`; all but the last carry `"more": true`. (`write` upwards, `read` and
  `spilled` downwards: nothing large ever blocks the stream for the others.)
* Frames with `"id": 0` are about the stream itself. Unasked, it sends `{"id": 0, "hello": 2, "pid", "python"}` once it
  is ready for `init`, and `{"id": 0, "bye": reason}` when it ends of itself.

Requests, with what they carry, and their answers (`?` marks what may be null or left out; seconds, bytes):

  init       workdir, env, lifetime, wall_time?, grace?, memory?                     python?; comes first, once
  exec       command, timeout, cwd?, env?, stdin? (true: the payload), max_output,   as `ExecResult`; see below
             fresh? (true: the first variables and folder, and none of its changes)
  spilled    execution, stream ("stdout" or "stderr"), offset, limit                 payload
  start      command, cwd?, env?, terminal? ([rows, columns])                        process: its id
  processes                                                                          processes: [[id, command], ...]
  status     process                                                                 exit_code?, output_size
  output     process, offset, wait, limit                                            offset, exit_code?; payload
  input      process, close? (true: the end); payload                                {} when all of it is in the pipe
  kill       process                                                                 {}
  kill_all                                                                           {} when nothing else runs inside
  read       path, offset, limit?                                                    payload
  write      path; payload                                                           {}
  open       transfer: a number, never reused; kind, path                            {}
  pull       transfer                                                                end; payload (at most 256 KiB)
  push       transfer; payload (at most 256 KiB)                                     {} when there is room for more
  commit     transfer                                                                {} when all is in its place

  cancel     target: the id of a request; ends it, and its command
  drop       transfer; a file that is not committed is gone, of a folder what was unpacked stays
  shutdown

The payload of `exec`'s answer is stdout and then stderr; `stdout` in its header is the length of the former, and
`execution` is what `spilled` knows it by. Kinds of transfers: `read` and `write` are of a file, `pack` (pulled) and
`unpack` (pushed) of a folder's contents as a tar stream in GNU format, with files, folders and symbolic links.

`memory` is the limit of everything inside, if there is one. `wall_time` bounds every command, background ones included.

Sessions
--------
With `--dial` and `--listen` a stream may break and be replaced by another within `grace` seconds (at first 120; what
`init` says from then on); after that it ends. The one who holds the session is called near, the executor far.

1. far sends `{"id": 0, "hello": 2, "nonce": FAR, "fresh", "pid", "python"}`; `fresh` is true until somebody attached.
2. near sends `{"id": 0, "attach": 2, "nonce": NEAR, "received": n, "sealed": 0 or 1}` and, on a fresh one, `"token"`:
   32 random bytes in hex, which never travel again; else `"proof": P("near", FAR, NEAR, n, sealed)`.
3. far sends `{"id": 0, "attached": 2, "received": m, "proof": P("far", FAR, NEAR, n, sealed, m)}` and closes the stream
   that it had before, if that is still there.

P(words) is keyed BLAKE2b with 32 bytes of digest, in hex, the token being the key and the words, each as text, joined
by single spaces. Who fails is hung up on without a word, as is who sends more than 4096 bytes before it has succeeded.

Frames whose `id` is not 0 are numbered from 1 in each direction, without the number being written anywhere. n and m
are how many the side has received: the other one forgets these and sends all later ones again, so that each is
served once. Between attachments, `{"id": 0, "ack": n}` says the same, after 16 frames or 256 KiB at the latest; files
wait while more than 4 MiB are unacknowledged. `{"id": 0, "ack": n, "ping": true}` asks for an `ack`. A stream on which
nothing came for 5 minutes is closed.

Sealed, for streams that pass through a process which others inside may tamper with: every frame of either side after
the third step is followed by 16 bytes, keyed BLAKE2b of that size over the frame's number within this attachment and
direction (8 bytes, big-endian, from 0, `id` 0 included) and the whole frame; `person` is `near` or `far` after its
sender; the key is keyed BLAKE2b with 32 bytes of digest over `frames FAR NEAR`, the token being its key. A wrong tag
ends the stream.

Invariants
----------
* The stream and this process cannot be reached from inside: its fds are moved away and close-on-exec, and it is not
  dumpable, so that /proc/PID/fd, /proc/PID/mem and ptrace are closed even to the same uid.
* What is kept of a command's output in memory is bounded while it is read; of a truncated one the whole goes into a
  nameless file while there is room. Nothing that a command does blocks the loop.
* When the stream ends for good, or `lifetime` seconds are over, it ends, and everything that it started with it.
* The shell's state (folder, exported variables) is reported by an EXIT trap into a memory file of its own, never
  through the output. A shell that never reaches its trap leaves the remembered state as it was.
* When memory runs out, the kernel takes what runs inside, and not this process.
* Shells are started ahead of the commands that they will run. One that was killed or stopped before it began is
  replaced; one that has begun is not: a command runs once.
"""

# ruff: noqa: PTH101, PTH103, PTH105, PTH108, PTH110, PTH112, PTH114, PTH115, PTH116, PTH118, PTH119, PTH120, PTH123
# ruff: noqa: PTH208, PTH211, SIM115, UP031
# (pathlib would add to the start-up time; %-formatting suits templates that are full of braces)
from __future__ import annotations

import _socket
import contextlib
import ctypes
import errno
import fcntl
import heapq
import json
import math
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
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # on Python 3.8 these could not be evaluated
    from collections.abc import Callable, Iterator
    from typing import IO, Any, BinaryIO, TypeAlias

    Header: TypeAlias = dict[str, Any]
    Timer: TypeAlias = list[Any]

PROTOCOL = 2
FRAME = struct.Struct("!II")
CHUNK = 1 << 18
RING = 1 << 20
"""Bytes of output that are kept of a background process."""
GRACE = 0.05
"""Seconds that a finished shell's pipes may stay open before its result is sent without their end."""
REPORT_FD = 211
"""Where shells report their state: high and odd, as scripts like to use 3 to 9, 100 and 200 for their own."""
GO_FD, COMMAND_FD = 212, 213
"""Where a shell that was started ahead waits for its command, and finds it."""
SPARES, SPARE_COMMAND = 2, 16_384
"""Shells that are started ahead, and the bytes of a command up to which they are used (they read slowly)."""
ARGUMENT = 100_000
"""A command is passed in arguments of this size (the kernel's limit for one, and for a variable, is 128 KiB)."""
ENVIRONMENT = 1_000_000
"""Bytes of variables that carry over: with more (the kernel's limit is about 2 MiB), no command could be started."""
REPORT = 1 << 22
"""Bytes of a shell's report that are looked at, from its end: what was written last counts."""
WHOLE = 1 << 28
"""Bytes of a file that are read without a `limit`: a sparse file may claim more than its reader has memory."""
SPILLS, SPILL = 4, 1 << 28
"""Truncated results whose whole output is kept, and the bytes of each of the two streams."""
ENDED = 1 << 25
"""Bytes of output that are kept of all background processes together that have ended."""
TAKING = 0.2
"""Seconds after which a shell that waits for a command, and has not taken it, is replaced."""
NAMED = 20
"""Variables that are named when they do not carry over."""
FORKING = 2.0
"""Seconds for which a shell that cannot be started for want of processes or memory is tried again."""
STALL = 30.0
"""Seconds without progress after which the process that packs or unpacks a folder is given up."""

START, HANDSHAKE, SILENCE, FAREWELL = 120.0, 10.0, 300.0, 2.0
"""Seconds: until somebody has attached; for a handshake; without a word until a stream counts as dead; for saying why
it ends to somebody who is not attached just then."""
WINDOW = 1 << 22
"""Bytes that nobody has acknowledged at which files wait."""
ACK_FRAMES, ACK_BYTES = 16, 1 << 18
STRANGER, STRANGERS = 4096, 32
"""Bytes that somebody may send, and how many may be connected, before they have shown who they are."""

OWN_FILES = ("auxv", "environ", "maps", "mem", "numa_maps", "pagemap", "smaps", "smaps_rollup", "stack", "syscall")
TMPFS_MAGIC = 0x01021994
PF_FORKNOEXEC = 0x40
F_SETPIPE_SZ, F_ADD_SEALS = 1031, 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1, 2, 4, 8
F_SEAL_ALL = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 4, 22, 36
libc = ctypes.CDLL(None, use_errno=True)
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Open files allowed to what runs inside."""


class Spill:
    """The whole of a truncated stream, in a file without a name, for as long as there is room."""

    def __init__(self, folders: list[str], memory: int | None) -> None:
        self.file, scarce = nameless(folders)
        status = os.fstatvfs(self.file.fileno())
        self.room = min(SPILL, status.f_bavail * status.f_frsize // 4 if status.f_blocks else SPILL // 4)
        if scarce and memory is not None:
            self.room = min(self.room, memory // 8)
        self.size = 0
        self.full = False

    def feed(self, data: bytes | bytearray) -> None:
        if self.full:
            return
        view = memoryview(data)[: self.room - self.size]
        self.full = len(view) < len(data)
        try:
            while view:
                written = os.write(self.file.fileno(), view)
                self.size += written
                view = view[written:]
        except OSError:  # the room is the command's first of all
            self.full, self.size = True, 0
            os.ftruncate(self.file.fileno(), 0)

    def read(self, offset: int, limit: int) -> Iterator[bytes]:
        while limit > 0:
            data = os.pread(self.file.fileno(), min(CHUNK, limit, max(0, self.size - offset)), offset)
            if not data:
                return
            yield data
            offset += len(data)
            limit -= len(data)


def nameless(folders: list[str]) -> tuple[BinaryIO, bool]:
    """A file that vanishes with its descriptor, on a disk if possible; and whether it takes memory instead."""
    fallback = None
    for number, folder in enumerate(folders):
        with contextlib.suppress(OSError):
            try:
                fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError:  # not every file system can do that
                path = os.path.join(folder, ".output-%d-%d" % (os.getpid(), number))
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                os.unlink(path)
            file = open(fd, "r+b", buffering=0)
            statfs = ctypes.create_string_buffer(256)
            libc.fstatfs(fd, statfs)
            if struct.unpack_from("l", statfs)[0] != TMPFS_MAGIC:
                return file, False
            fallback = fallback or file
    return fallback or open(os.memfd_create("output"), "r+b", buffering=0), True


class Capped:
    """The first `limit // 2` bytes of a stream, its last ones up to `limit` together, and the count of all."""

    def __init__(self, limit: int, spilling: Callable[[], Spill | None]) -> None:
        self.limit = limit
        self.head_limit = limit // 2
        self.tail_limit = limit - self.head_limit
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0
        self.spilling = spilling
        self.spill: Spill | None = None

    def feed(self, data: bytes) -> None:
        if self.total <= self.limit < self.total + len(data):  # until here, nothing has been dropped
            self.spill = self.spilling()
            if self.spill is not None:
                self.spill.feed(self.head + self.tail)
        self.total += len(data)
        if self.spill is not None:
            self.spill.feed(data)
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

    def drop(self) -> None:
        self.data = bytearray()

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
                fd = os.open("/proc/%s/stat" % name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fields = os.read(fd, 4096).rpartition(b")")[2].split()
                finally:
                    os.close(fd)
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


def are_forking() -> bool:
    """Whether processes are being started right now."""
    try:
        with open("/proc/loadavg", "rb") as file:
            last = file.read().split()[-1]
        time.sleep(0.002)
        with open("/proc/loadavg", "rb") as file:
            return file.read().split()[-1] != last
    except (OSError, IndexError):
        return True


def kill_tree(root: int) -> None:
    """Kill what `root` started until nothing new turns up.

    A shell is the subreaper of what it starts, so that an orphan stays in its tree: unless the shell becomes a program
    that gives that up. Then only the end of all, here or by the sandbox' owner, reaches it.

    All are stopped before any is killed: a dead process makes room for another where their number is limited, and
    then those that fork win; a stopped one does not.
    """
    # Who forks and ends all the time is never where a table says: as PID 1 one can stop all. Only then, as shells
    # with terminals see their jobs stopped and take the terminal away.
    if os.getpid() == 1 and (root == 1 or are_forking()):
        stopped = {pid for pid, (state, _, _) in process_table().items() if state == "T"}  # and are to stay so
        send_signal(-1, signal.SIGSTOP)
        victims = living_tree(root)
        for pid in victims:
            send_signal(pid, signal.SIGKILL)
        # Children first, which mostly have the higher numbers: a shell that looks at a job which is still stopped takes
        # its terminal away.
        for pid in sorted(process_table().keys() - victims - stopped - {1, root}, reverse=True):
            send_signal(pid, signal.SIGCONT)
    end = time.monotonic() + 5.0
    seen: set[int] = set()
    while True:
        victims = living_tree(root)
        fresh = victims - seen
        for pid in fresh:
            send_signal(pid, signal.SIGSTOP)
        seen |= fresh
        if not fresh or time.monotonic() > end:
            break
    patience = time.monotonic() + 0.15
    while victims:
        for pid in victims:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.001)
        victims = living_tree(root)
        now = time.monotonic()
        if victims - seen:
            patience = now + 0.15  # still forking
        seen |= victims
        if now > patience or now > end:
            return


# --- the shell -------------------------------------------------------------------------------------------------------

# `builtin`, because the command may have functions called `set` or `exit`; a DEBUG trap would write into the report.
_QUIET = "{ %sbuiltin trap - DEBUG; builtin set +xv; } >&- 2>&-; "
_SAVE = r'{ builtin printf "%%s\0" "$PWD"; builtin export -p; builtin printf "\0"; } 2>&- >&%d || :' % REPORT_FD
# `eval`, because the command may set an EXIT trap of its own; the one here is for commands that call `exit`.
_STATEFUL = (
    "trap '" + _QUIET % "" + 'builtin test "${__saved-}" || ' + _SAVE + "' EXIT; RUN; "
    + _QUIET % 'builtin set -- "$?"; ' + _SAVE + '; __saved=1; builtin exit "$1"'
)  # fmt: skip
_AHEAD = (
    "builtin read -r -u %d __command || builtin exit; exec %d<&-; "
    "IFS= builtin read -r -d '' -u %d __command; exec %d<&-; "
    'SECONDS=0; builtin printf "\\0" >&%d || builtin exit; eval "builtin unset -v __command; $__command"'
) % (GO_FD, GO_FD, COMMAND_FD, COMMAND_FD, REPORT_FD)
_PLAIN = re.compile(r"[\t\n -~\u00a1-\ud7ff]*\Z")
_ODD = frozenset(
    ["BASH_COMPAT", "BASH_ENV", "BASH_XTRACEFD", "BASHOPTS", "ENV", "POSIXLY_CORRECT", "SHELLOPTS", "TMOUT"]
)
"""Variables that make a difference to when a shell is started."""

_EXPORT = re.compile(rb"^(?:declare -\w+|export) (\w+)(?:=(\"|\$'))?", re.MULTILINE)
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"e": b"\33", b"E": b"\33", b"f": b"\f", b"n": b"\n", b"r": b"\r"}
_ESCAPES.update({b"t": b"\t", b"v": b"\v"})
_NAME = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
_NOT_KEPT = frozenset(["_", "PWD", "SHLVL", "BASHOPTS", "SHELLOPTS", "BASH_ENV"])


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match.group(1)
    if code[:1] in (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7"):
        return bytes([int(code, 8) & 255])
    return _ESCAPES.get(code, code)


def find_unescaped(quote: bytes, text: bytes, begin: int) -> int:
    """Where `quote` stands without a backslash that is meant for it; -1 when it is nowhere."""
    while True:
        end = text.find(quote, begin)
        slashes = end
        while slashes > begin and text[slashes - 1] == ord("\\"):
            slashes -= 1
        if end < 0 or (end - slashes) % 2 == 0:
            return end
        begin = end + 1


def parse_exports(text: bytes) -> dict[str, str]:
    """What bash's `export -p` printed, as a mapping. In time and memory, whatever it is, no more than its length."""
    found: dict[str, str] = {}
    end = 0
    while True:
        match = _EXPORT.search(text, end)
        if match is None:
            return found
        name, quote = match.groups()
        begin = end = match.end()
        if quote is None:
            continue  # exported, yet without a value: not in the environment
        end = find_unescaped(quote[-1:], text, begin)
        if end < 0:
            return found
        value = text[begin:end]
        if quote == b'"':
            value = re.sub(rb"\\([$`\"\\])", rb"\1", value)
        else:
            value = re.sub(rb"\\([0-7]{1,3}|.)", _unescape, value, flags=re.DOTALL)
        found[os.fsdecode(name)] = os.fsdecode(value)


def shell_arguments(bash: str, command: str, stateful: bool) -> list[bytes]:
    encoded = os.fsencode(command)
    arguments = [os.fsencode(bash), b"--norc", b"--noprofile", b"-c"]
    if not stateful and len(encoded) <= ARGUMENT:
        return [*arguments, encoded]
    parts = [encoded[i : i + ARGUMENT] for i in range(0, len(encoded), ARGUMENT)] or [b""]
    run = 'eval "shift %d; %s"' % (len(parts), "".join("${%d}" % (i + 1) for i in range(len(parts))))
    return [*arguments, os.fsencode(_STATEFUL.replace("RUN", run) if stateful else run), b"bash", *parts]


def weight(name: str, value: str) -> int:
    """Bytes that a variable takes of the kernel's limit, with `=`, NUL and its pointer."""
    return len(os.fsencode(name + value)) + 10


class ShellState:
    """The folder and the variables that the next shell starts with."""

    def __init__(self, workdir: str, env: dict[str, str]) -> None:
        self.workdir = workdir
        self.cwd = workdir
        self.env = dict(env)
        self.first = dict(env)
        """The variables before any command."""
        self.version = 0
        """Changes with the folder and the variables."""
        self._parsed: tuple[bytes, dict[str, str]] = (b"", {})

    def commit(self, report: bytes, before: dict[str, str], cwd: str | None, env: dict[str, str]) -> list[str]:
        """Take over what a shell changed, except what `cwd` and `env` overrode for that call.

        Only its changes are applied: shells that ran at the same time do not undo each other. Returns the names of
        the first variables that are too large to carry over; they keep the value that they had.
        """
        parts = report.split(b"\0")
        if len(parts) < 3 or parts[-1]:
            return []
        if cwd is None and parts[-3].startswith(b"/"):
            folder = os.fsdecode(parts[-3])
            self.version += folder != self.cwd
            self.cwd = folder
        if parts[-2] != self._parsed[0]:  # a rare event: most commands export nothing
            self._parsed = (parts[-2], parse_exports(parts[-2]))
        after = self._parsed[1]
        for name in before:
            if name not in after and name not in _NOT_KEPT and name not in env and _NAME.match(name):
                self.env.pop(name, None)
                self.version += 1
        room = ENVIRONMENT - sum(weight(*item) for item in self.env.items())
        refused = []
        for name, value in after.items():
            if name not in _NOT_KEPT and name not in env and before.get(name) != value:
                size = weight(name, value)
                grown = size - (weight(name, self.env[name]) if name in self.env else 0)
                if size > ARGUMENT or grown > room:
                    refused.append(name)
                else:
                    self.env[name] = value
                    self.version += 1
                    room -= grown
        return refused[:NAMED]


# --- starting shells -------------------------------------------------------------------------------------------------

# Machine code, by machine: its number in an ELF header, START and BECOME.
#
# START is a function of (moves, argv, envp, score). It makes a process that shares this one's memory until it has
# become a program, and returns its id, or -errno: clone(CLONE_VM | SIGCHLD). What it does in the new process: setsid();
# write(open(SCORE_FILE), score, 5); dup2() of every pair in `moves`, until a negative number; ioctl(0, TIOCSCTTY, 0),
# which a terminal needs and nothing else minds; execve(argv[0], argv, envp); exit_group(127). Both processes are on
# one stack at one time, so it uses none.
#
# BECOME is a program: prctl(PR_SET_CHILD_SUBREAPER, 1); write(open(SCORE_FILE), SCORE); sigprocmask(SIG_SETMASK, NONE);
# execve(argv[1], argv + 1, envp); and if that returns, write(2, MESSAGE) and exit_group(126).
#
# A line of code is a system call. What it is assembled from is in scripts/starter of the repository.
_CODE = {
    "x86_64": (
        62,
        "4989f9 4989f0 4989ca bf11010000 31f6 b838000000 0f05 4885c0 7572"
        "4889d3 b870000000 0f05"
        "488d3d62000000 be01000800 b802000000 0f05 89c7 4c89d6 ba05000000 b801000000 0f05"
        "418b39 418b7104 4983c108 85ff 7809 b821000000 0f05 ebe8"
        "31ff be0e540000 31d2 b810000000 0f05"
        "498b38 4c89c6 4889da b83b000000 0f05"
        "bf7f000000 b8e7000000 0f05 c3",
        "bf24000000 be01000000 31d2 4531d2 4531c0 b89d000000 0f05"
        "488d3d9b000000 be01000800 b802000000 0f05"
        "89c7 488d356a000000 ba04000000 b801000000 0f05"
        "bf02000000 488d354a000000 31d2 41ba08000000 b80e000000 0f05"
        "488b0424 488d742410 488b3e 488d14c6 b83b000000 0f05"
        "bf02000000 488d3524000000 ba18000000 b801000000 0f05"
        "bf7e000000 b8e7000000 0f05",
    ),
    "aarch64": (
        183,
        "e90300aa ea0301aa eb0302aa ec0303aa 202280d2 010080d2 881b80d2 010000d4 000400b5"
        "a81380d2 010000d4"
        "600c8092 a1030010 22008052 0201a072 080780d2 010000d4 e1030caa a20080d2 080880d2 010000d4"
        "2005c128 a000f837 020080d2 080380d2 010000d4 fbffff17"
        "000080d2 c1818ad2 020080d2 a80380d2 010000d4"
        "400140f9 e1030aaa e2030baa a81b80d2 010000d4"
        "e00f80d2 c80b80d2 010000d4 c0035fd6",
        "800480d2 210080d2 020080d2 030080d2 040080d2 e81480d2 010000d4"
        "600c8092 c1040010 22008052 0201a072 080780d2 010000d4"
        "41030010 820080d2 080880d2 010000d4"
        "400080d2 61020010 020080d2 030180d2 e81080d2 010000d4"
        "e20340f9 e1430091 200040f9 220c028b a81b80d2 010000d4"
        "400080d2 41010010 020380d2 080880d2 010000d4"
        "c00f80d2 c80b80d2 010000d4",
    ),
}
_NONE, _SCORE, _MESSAGE, _SCORE_FILE = bytes(8), b"1000", b"bash: cannot be started\n", b"/proc/self/oom_score_adj\0"


def own_oom_score() -> bytes:
    """This process' oom_score_adj, as a child sees its own: that of PID 1 may be covered."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open("/proc/self/oom_score_adj", "rb") as file:
                os.write(theirs, file.read(16).strip())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with open(ours, "rb") as file:
        return file.read() or b"0"


class Starter:
    """Starts shells in the same short time however large this process is.

    To `fork` it copies its page tables, and then every page that either process writes to: that costs more than all
    else of a short command. After `vfork`, and so `posix_spawn`, this process would wait for the new one, which others
    inside can stop for ever. Here neither happens; nothing of Python can run in the new process then, and what that has
    to do to itself is done by code of its own. Source: clone(2), prctl(2), elf(5), memfd_create(2).

    While two processes share their memory, what is written to the oom_score_adj of one holds for the other. Whoever may
    write to the new process' could so have the executor taken when memory runs out: each start puts it right again, and
    a process that was stopped before it became a program goes on (`Executor.settle`).
    """

    def __init__(self) -> None:
        """Raises `OSError` where it does not work; shells are forked then."""
        machine, start, become = _CODE.get(os.uname().machine, (0, "", ""))
        if not machine or FILES[0] <= COMMAND_FD:
            raise OSError(errno.ENOSYS, "not on this machine")
        reserved = (REPORT_FD, GO_FD, COMMAND_FD)  # taken, so that no other descriptor is in their way when they move
        if any(os.path.lexists("/proc/self/fd/%d" % fd) for fd in reserved):  # inherited: the socket to listen on, say
            raise OSError(errno.EBUSY, "a descriptor is in use")
        for fd in reserved:
            os.dup2(0, fd, inheritable=False)
        program = bytes.fromhex(become) + _NONE + _SCORE + _MESSAGE + _SCORE_FILE
        base, headers = 0x400000, 64 + 2 * 56
        size = headers + len(program)
        elf = b"\x7fELF" + bytes([2, 1, 1]).ljust(12, b"\0")
        elf += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, base + headers, 64, 0, 0, 64, 56, 2, 0, 0, 0)
        elf += struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x10000)  # all of it, to be read and run
        elf += struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # a stack that is not to be run
        file = os.memfd_create("starter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        code = (elf + program).ljust(size + -size % 16, b"\0")
        os.write(file, code + bytes.fromhex(start) + _SCORE_FILE)
        fcntl.fcntl(file, F_ADD_SEALS, F_SEAL_ALL)
        self.path = b"/proc/self/fd/%d" % file
        libc.mmap.restype = ctypes.c_void_p
        readable_and_executable, private = 5, 2
        address = libc.mmap(None, ctypes.c_size_t(1 << 12), readable_and_executable, private, file, ctypes.c_long(0))
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "no code can be mapped")
        texts = ctypes.POINTER(ctypes.c_char_p)
        function = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_char_p, texts, texts, ctypes.c_char_p)
        self.function = function(address + len(code))
        self.score = own_oom_score().ljust(5, b"\0")
        self.sigprocmask = {62: 14, 183: 135}[machine]
        self.every = ctypes.create_string_buffer(b"\xff" * 128)
        self.before = ctypes.create_string_buffer(128)
        self.kept: dict[int, Any] = {}
        """What a new process may still be reading, by its id."""
        pid = self.start([b"/dev/null/none"], [], [(0, 2)])
        status = os.waitpid(pid, 0)[1]
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status) != 126:
            raise OSError(errno.ENOEXEC, "its program does not run")
        self.kept.clear()

    def start(self, arguments: list[bytes], env: list[bytes], moves: list[tuple[int, int]]) -> int:
        """Run a program with the descriptors that `moves` gives it; returns its process id. Raises `OSError`."""
        pairs = struct.pack("%di" % (2 * len(moves) + 1), *(fd for pair in moves for fd in pair), -1)
        argv = (ctypes.c_char_p * (len(arguments) + 2))(self.path, *arguments)
        envp = (ctypes.c_char_p * (len(env) + 1))(*env)
        block, restore = 0, 2
        # A handler would need the stack. Not by libc's sigprocmask: that leaves out two signals of its own.
        libc.syscall(self.sigprocmask, block, self.every, self.before, 8)
        pid: int = self.function(pairs, argv, envp, self.score)
        libc.syscall(self.sigprocmask, restore, self.before, None, 8)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        self.kept[pid] = pairs, argv, envp
        return pid


# --- jobs ------------------------------------------------------------------------------------------------------------


def unread(fd: int) -> int:
    """The bytes that wait in a pipe."""
    count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    return count


def encode_environment(env: dict[str, str]) -> list[bytes]:
    return [os.fsencode(name + "=" + value) for name, value in env.items()]


class Job:
    """A shell and the pipes that it writes to. It is finished after its exit and the end of its output, or GRACE."""

    def __init__(self, executor: Executor, command: str) -> None:
        self.executor = executor
        self.command = command
        self.pid = 0
        self.abandoned = False  # it is not to be started any more
        self.terminal = -1
        self.exit_code: int | None = None
        self.finished = False
        self.timer: Timer = [0.0, 0, None]
        self.sinks: dict[int, Callable[[bytes], None]] = {}

    def pipe(self, sink: Callable[[bytes], None]) -> int:
        """A new pipe that is drained into `sink`; returns the end to write to."""
        read_end, write_end = os.pipe()
        try:
            self.drain(read_end, sink)
        except OSError:
            os.close(write_end)
            raise
        return write_end

    def drain(self, fd: int, sink: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.sinks[fd] = sink
        self.executor.watch(fd, select.EPOLLIN, self.on_output)

    def on_output(self, fd: int, limit: int = CHUNK) -> int:
        try:
            data = os.read(fd, limit)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: nobody holds the other end of a terminal any more
            data = b""
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
            if fd == self.terminal:  # what is on its way through one is not counted
                for _ in range(64):
                    if not self.on_output(fd):
                        break
                continue
            waiting = unread(fd)
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
        self.abandoned = True
        if self.pid <= 0 or (self.exit_code is not None and os.path.exists("/proc/%d" % self.pid)):
            return  # by now its number is somebody else's, which it cannot be while anything is left of its session
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGSTOP)
        kill_tree(self.pid)
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """It could not be started: leave nothing behind."""
        self.finished = True
        self.timer[2] = None
        for fd in self.sinks:
            self.executor.unwatch(fd)
            os.close(fd)
        self.sinks = {}

    def finish(self) -> None:
        raise NotImplementedError


def discard(_: bytes) -> None:
    """Children that outlive their command keep writing: it is read, or they would block or die of SIGPIPE."""


class Spare:
    """A shell that was started ahead, with the folder and the variables that the next command is to have.

    Starting one takes longer than most commands do. Earlier commands may have left processes that can open what it has
    in /proc/PID/fd: not its end of a socket, though, and to no avail a file that is sealed. (They could still write to
    its memory, as to any shell's: who must not be deceived ends them first.)
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        state = executor.state
        self.version = state.version
        self.folder = self.identify(state.cwd)
        self.fds: list[int] = []
        theirs = [os.dup(executor.null)]
        try:
            self.stdout, self.stderr = self.pipe(theirs), self.pipe(theirs)
            self.report, self.command = self.file("report"), self.file("command")
            fcntl.fcntl(self.report, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK)  # what has begun cannot seem not to have
            go, ours = _socket.socketpair()
            theirs.append(go.detach())
            self.go = ours.detach()
            self.fds.append(self.go)
            os.set_blocking(self.go, False)
            script = os.fsencode(_STATEFUL.replace("RUN", _AHEAD))
            arguments = [os.fsencode(executor.bash), b"--norc", b"--noprofile", b"-c", script, b"bash"]
            inherited = {REPORT_FD: self.report, GO_FD: theirs[3], COMMAND_FD: self.command}
            self.pid = executor.start_shell(arguments, theirs[:3], None, encode_environment(state.env), inherited)
        except BaseException:
            self.close(theirs)
            raise
        self.close(theirs, keep=True)
        executor.children[self.pid] = self.on_exit

    def file(self, name: str) -> int:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fds.append(fd)
        return fd

    def pipe(self, theirs: list[int]) -> int:
        read_end, write_end = os.pipe()
        self.fds.append(read_end)
        theirs.append(write_end)
        return read_end

    @staticmethod
    def identify(folder: str) -> tuple[int, int]:
        status = os.stat(folder)
        return status.st_dev, status.st_ino

    def close(self, others: list[int], keep: bool = False) -> None:
        for fd in others if keep else [*others, *self.fds]:
            os.close(fd)
        self.fds = self.fds if keep else []

    def is_usable(self) -> bool:
        """Whether it lives, is not stopped, and would do what one that is started now would do."""
        state = self.executor.state
        ended_or_stopped = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        try:
            if os.waitid(os.P_PID, self.pid, ended_or_stopped) is not None:
                return False
            return self.version == state.version and self.folder == self.identify(state.cwd)
        except OSError:
            return False

    def run(self, command: str) -> bool:
        """Give it its command. Its report and its outputs are the caller's then; False when it is not to be trusted.

        What others have written for it goes, unless they let it run that: then it has begun, or is about to read more
        than there is.
        """
        encoded = os.fsencode(command)
        try:
            os.ftruncate(self.command, 0)
            os.pwrite(self.command, encoded, 0)
            fcntl.fcntl(self.command, F_ADD_SEALS, F_SEAL_ALL)
            if os.pread(self.command, len(encoded) + 1, 0) != encoded or self.has_begun() or self.has_spoken():
                return False
            os.write(self.go, b"\n")
        except OSError:  # it is dead, or others hold on to its command
            return False
        os.close(self.command)
        os.close(self.go)
        self.fds = []
        return True

    def has_spoken(self) -> bool:
        return any(unread(fd) for fd in (self.stdout, self.stderr))

    def has_begun(self) -> bool:
        """Whether it has written its first byte; one that is dead and has not, has not run the command."""
        return os.fstat(self.report).st_size > 0

    def discard(self) -> None:
        send_signal(self.pid, signal.SIGKILL)
        self.close([])

    def on_exit(self, _: int) -> None:
        """It was killed: by its own end, or by somebody inside."""
        self.close([])
        if self in self.executor.spares:
            self.executor.spares.remove(self)


class Exec(Job):
    """A command whose result somebody waits for."""

    def __init__(self, executor: Executor, request: Header, stdin: bytes) -> None:
        super().__init__(executor, request["command"])
        self.request = request["id"]
        self.timed_out = False
        self.report = -1
        self.cwd, self.env = request.get("cwd"), request.get("env") or {}
        self.fresh = request.get("fresh", False)
        if self.fresh:
            self.cwd = self.cwd or executor.state.workdir
        self.begin = time.monotonic()
        alike = self.cwd is None and not self.env and not request.get("stdin")
        self.spare = executor.take_spare(self.command) if alike else None  # it is at work from here on
        self.stdout, self.stderr = (Capped(request["max_output"], executor.new_spill) for _ in range(2))
        self.before = dict(executor.state.first if self.fresh else executor.state.env, **self.env)
        self.timer = executor.after(min(request["timeout"], executor.wall_time), self.on_timeout)
        if self.spare is None:
            self.begin_anew(stdin if request.get("stdin") else None)
            return
        self.report = self.spare.report
        self.drain(self.spare.stdout, self.stdout.feed)
        self.drain(self.spare.stderr, self.stderr.feed)
        executor.adopt(self.spare.pid, self)
        executor.after(TAKING, self.on_taking)

    def begin_anew(self, stdin: bytes | None) -> None:
        """Start a shell for it. Raises, with nothing left behind, what is wrong with the request, or `OSError`."""
        fds: list[int] = []
        try:
            arguments = shell_arguments(self.executor.bash, self.command, stateful=True)
            env = encode_environment(self.before)
            fds.append(os.dup(self.executor.null) if stdin is None else os.memfd_create("stdin"))
            if stdin is not None:
                with open(os.dup(fds[0]), "wb") as file:
                    file.write(stdin)
                os.lseek(fds[0], 0, os.SEEK_SET)
            self.report = os.memfd_create("report")
            fds += [self.pipe(self.stdout.feed)]
            fds += [self.pipe(self.stderr.feed)]
        except BaseException:
            close_all(fds)
            self.release()
            raise
        self.executor.spawn(self, fds, arguments, self.cwd, env, {REPORT_FD: self.report})

    def release(self) -> None:
        super().release()
        if self.report >= 0:
            os.close(self.report)
            self.report = -1

    def on_taking(self) -> None:
        if self.spare is not None and not self.abandoned and not self.spare.has_begun():
            send_signal(self.pid, signal.SIGKILL)  # somebody inside has stopped it

    def on_exit(self, exit_code: int) -> None:
        spare, self.spare = self.spare, None
        if spare is None or self.abandoned or spare.has_begun():
            super().on_exit(exit_code)
            return
        for fd in self.sinks:
            self.executor.unwatch(fd)
            os.close(fd)
        self.sinks = {}
        os.close(self.report)
        self.report = -1
        self.pid = 0
        try:
            self.begin_anew(None)
        except Exception as error:
            self.executor.execs.pop(self.request, None)
            self.executor.send(failure(self.request, error))

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
        size = os.fstat(self.report).st_size
        skipped = max(0, size - REPORT)
        report = os.pread(self.report, min(size, REPORT), skipped)
        os.close(self.report)
        if skipped:
            report = report.partition(b"\0")[2]
            if not self.fresh:
                self.stderr.feed(b"bash: export: too much to carry anything over to the next command\n")
        if not self.timed_out and not self.fresh:
            refused: list[str] = []
            try:
                refused = self.executor.state.commit(report, self.before, self.cwd, self.env)
            except Exception as error:  # the report is what the command wrote there, whatever that may be
                complain(error)
            for name in refused:
                self.stderr.feed(b"bash: export: %s: too large to carry over to the next command\n" % os.fsencode(name))
        stdout, stderr = self.stdout.result(), self.stderr.result()
        self.executor.execs.pop(self.request, None)
        execution = "e%d" % self.request
        if self.stdout.total > len(stdout) or self.stderr.total > len(stderr):
            self.executor.keep(execution, {"stdout": self.stdout, "stderr": self.stderr})
        self.executor.send(
            {
                "id": self.request,
                "execution": execution,
                "exit_code": 124 if self.timed_out else self.exit_code,
                "timed_out": self.timed_out,
                "stdout": len(stdout),
                "stdout_elided": self.stdout.total - len(stdout),
                "stderr_elided": self.stderr.total - len(stderr),
                "duration": duration,
            },
            stdout + stderr,
        )
        self.executor.after(0.0, self.executor.prepare)  # while whoever has the answer looks at it


class Background(Job):
    """A process that was `start`ed: its output is kept in a ring, for as long as the sandbox lives."""

    def __init__(self, executor: Executor, request: Header) -> None:
        super().__init__(executor, request["command"])
        self.ring = Ring()
        self.waiting: dict[int, tuple[int, int]] = {}  # request id: (offset, limit)
        self.writing: list[tuple[int, memoryview, bool]] = []
        self.killed = 137
        self.stdin = -1
        self.timer = executor.after(executor.wall_time, self.on_wall_time)
        fds: list[int] = []
        try:
            arguments = shell_arguments(executor.bash, self.command, stateful=False)
            env = encode_environment(dict(executor.state.env, **(request.get("env") or {})))
            if request.get("terminal"):
                rows, columns = request["terminal"]
                self.terminal, given = os.openpty()
                fds += [given, given, given]
                self.drain(self.terminal, self.on_data)
                self.stdin = os.dup(self.terminal)
                fcntl.ioctl(given, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            else:
                given, self.stdin = os.pipe()
                fds += [given]
                fds += [self.pipe(self.on_data)] * 2
            os.set_blocking(self.stdin, False)
        except BaseException:
            close_all(fds)
            self.release()
            self.close_stdin()
            raise
        executor.spawn(self, fds, arguments, request.get("cwd"), env, {})

    def on_wall_time(self) -> None:
        if self.exit_code is None:
            self.killed = 124
            self.kill()

    def on_exit(self, exit_code: int) -> None:
        super().on_exit(self.killed if exit_code == 137 else exit_code)

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
        if close and self.terminal >= 0:
            data, close = data + b"\x04", False
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
        except OSError:
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
            self.timer[2] = None
            for fd in self.sinks:
                self.sinks[fd] = discard
            self.close_stdin()
            self.answer_waiting()
            self.executor.on_process_ended()


def complain(error: BaseException) -> None:
    """Without the lines of a traceback, which would be looked for in files that others can have made."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    line = at.tb_lineno if at is not None else 0
    with contextlib.suppress(OSError):
        os.write(2, os.fsencode("executor: %s in line %d: %s\n" % (type(error).__name__, line, error)))


def close_all(fds: list[int]) -> None:
    for fd in set(fds):
        os.close(fd)


def failure(request: int, error: BaseException) -> Header:
    if isinstance(error, OSError):
        detail = {"errno": error.errno, "message": error.strerror or str(error), "path": error.filename}
    else:
        detail = {"errno": None, "message": "%s: %s" % (type(error).__name__, error)}
    return {"id": request, "error": detail}


# --- files -----------------------------------------------------------------------------------------------------------


def is_private(fd: int) -> bool:
    """Whether it shows this process' memory, by whatever path or mount of /proc it was reached."""
    status = os.fstat(fd)
    for name in OWN_FILES if status.st_size == 0 else ():
        for folder in ("/proc/self/", "/proc/thread-self/"):
            with contextlib.suppress(OSError):
                if os.path.samestat(status, os.stat(folder + name)):
                    return True
    return False


def open_regular(path: str) -> int:
    # O_NONBLOCK, because opening a FIFO would wait for its writer
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    private = is_private(fd)
    if stat.S_ISREG(mode) and not private:
        return fd
    os.close(fd)
    if private:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def read_file(path: str, offset: int, limit: int | None) -> Iterator[bytes]:
    """The file's bytes, chunk by chunk; errors come with the first."""
    fd = open_regular(path)
    try:
        status = os.fstat(fd)
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

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        try:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
        except FileExistsError:  # what stands where a folder has to be
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        self.temporary = os.path.join(os.path.dirname(self.path), ".upload-%s" % os.urandom(8).hex())
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


class Transfer:
    """A file or a folder that is open for requests that move it part by part."""

    def __init__(self, executor: Executor, path: str, number: int) -> None:
        self.executor = executor

    def pull(self, request: int) -> None:
        raise OSError(errno.EBADF, "nothing can be pulled from it")

    def push(self, request: int, data: bytes) -> None:
        raise OSError(errno.EBADF, "nothing can be pushed to it")

    def commit(self, request: int) -> None:
        raise OSError(errno.EBADF, "there is nothing to commit")

    def drop(self) -> None:
        raise NotImplementedError


class Reading(Transfer):
    def __init__(self, executor: Executor, path: str, number: int) -> None:
        super().__init__(executor, path, number)
        self.file = open(open_regular(path), "rb", buffering=0)

    def pull(self, request: int) -> None:
        data = b""
        while len(data) < CHUNK:
            part = self.file.read(CHUNK - len(data))  # files of /proc give a page at a time
            data += part
            if not part:
                break
        self.executor.send({"id": request, "end": not part}, data)

    def drop(self) -> None:
        self.file.close()


class Writing(Transfer):
    def __init__(self, executor: Executor, path: str, number: int) -> None:
        super().__init__(executor, path, number)
        self.upload = Upload(path)
        self.done = False

    def push(self, request: int, data: bytes) -> None:
        self.upload.feed(data)
        self.executor.send({"id": request})

    def commit(self, request: int) -> None:
        self.upload.close(keep=True)
        self.done = True
        self.executor.send({"id": request})

    def drop(self) -> None:
        if not self.done:
            self.upload.close(keep=False)


class Child(Transfer):
    """A folder, which a forked child of this process packs or unpacks through a pipe."""

    def __init__(self, executor: Executor, path: str, number: int) -> None:
        super().__init__(executor, path, number)
        self.report = open(os.memfd_create("report"), "r+b", buffering=0)
        self.exit_code: int | None = None
        self.result: OSError | None = None
        self.progress = time.monotonic()
        self.watching = False
        theirs, self.pipe = self.make_pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.pipe, F_SETPIPE_SZ, 1 << 20)
        os.set_blocking(self.pipe, False)
        try:
            self.pid = executor.fork()
        except OSError:
            os.close(self.pipe)
            os.close(theirs)
            raise
        if self.pid == 0:
            self.be_child(theirs, path)
        os.close(theirs)
        executor.children[self.pid] = self.on_exit

    def make_pipe(self) -> tuple[int, int]:
        """The child's end, and this one."""
        raise NotImplementedError

    def work(self, file: IO[bytes], path: str) -> None:
        raise NotImplementedError

    def be_child(self, pipe: int, path: str) -> None:
        """Never returns. It is not dumpable, as its memory is that of the executor."""
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(pipe, 0)
            os.dup2(self.report.fileno(), 1)
            os.closerange(3, min(FILES[1], 1 << 16))
            with os.fdopen(0, self.MODE, CHUNK) as file:
                self.work(file, path)
            os._exit(0)
        except BaseException as error:
            if not isinstance(error, BrokenPipeError):  # nobody wants the rest
                os.write(1, json.dumps(failure(0, error)).encode())
        finally:
            os._exit(1)

    MODE = "rb"

    def on_exit(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.conclude()

    def error(self) -> OSError:
        """Why the child did not finish its work."""
        if self.result is not None:
            return self.result
        report = os.pread(self.report.fileno(), 1 << 16, 0)
        try:
            told = json.loads(report.decode())["error"]
        except ValueError:
            return OSError(errno.EIO, "the process that moves the folder was killed (exit code %s)" % self.exit_code)
        return OSError(errno.EIO if told["errno"] is None else told["errno"], told["message"], told.get("path"))

    def conclude(self) -> None:
        raise NotImplementedError

    def is_waiting(self) -> bool:
        raise NotImplementedError

    def on_progress(self) -> None:
        self.progress = time.monotonic()
        if self.is_waiting() and not self.watching:
            self.watching = True
            self.executor.after(STALL, self.on_stall)

    def on_stall(self) -> None:
        """Others inside may stop the child: then it is an error of the folder, and not of the sandbox."""
        self.watching = False
        if self.exit_code is not None or not self.is_waiting():
            return
        left = self.progress + STALL - time.monotonic()
        if left > 0:
            self.watching = True
            self.executor.after(left, self.on_stall)
        else:
            self.result = OSError(errno.ETIMEDOUT, "the process that moves the folder makes no progress")
            send_signal(self.pid, signal.SIGKILL)

    def close_pipe(self) -> None:
        if self.pipe >= 0:
            self.executor.unwatch(self.pipe)
            os.close(self.pipe)
            self.pipe = -1

    def drop(self) -> None:
        self.close_pipe()
        if self.exit_code is None:
            send_signal(self.pid, signal.SIGKILL)


class Packing(Child):
    MODE = "wb"

    def __init__(self, executor: Executor, path: str, number: int) -> None:
        self.pulls: list[int] = []
        super().__init__(executor, path, number)

    def make_pipe(self) -> tuple[int, int]:
        ours, theirs = os.pipe()
        return theirs, ours

    def work(self, file: IO[bytes], path: str) -> None:
        pack(path, file)

    def is_waiting(self) -> bool:
        return bool(self.pulls)

    def pull(self, request: int) -> None:
        self.pulls.append(request)
        self.on_progress()
        if self.pipe >= 0:
            self.executor.watch(self.pipe, select.EPOLLIN, self.on_readable)
        else:
            self.conclude()

    def on_readable(self, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if data:
            self.executor.send({"id": self.pulls.pop(0), "end": False}, data)
            self.on_progress()
            if not self.pulls:
                self.executor.unwatch(fd)
        else:
            self.close_pipe()
            self.conclude()

    def conclude(self) -> None:
        if self.pipe >= 0 or self.exit_code is None:
            return
        pulls, self.pulls = self.pulls, []
        for request in pulls:
            self.executor.send(failure(request, self.error()) if self.exit_code else {"id": request, "end": True})


class Unpacking(Child):
    MODE = "rb"

    def __init__(self, executor: Executor, path: str, number: int) -> None:
        self.pushes: list[tuple[int, memoryview]] = []
        self.committing = 0
        super().__init__(executor, path, number)

    def make_pipe(self) -> tuple[int, int]:
        return os.pipe()

    def work(self, file: IO[bytes], path: str) -> None:
        unpack(file, path)

    def is_waiting(self) -> bool:
        return bool(self.pushes or self.committing)

    def push(self, request: int, data: bytes) -> None:
        self.pushes.append((request, memoryview(data)))
        self.on_progress()
        self.on_writable(self.pipe)

    def commit(self, request: int) -> None:
        self.committing = request
        self.on_progress()
        self.on_writable(self.pipe)

    def on_writable(self, fd: int) -> None:
        try:
            while self.pushes and fd >= 0:
                request, data = self.pushes[0]
                if data:
                    self.pushes[0] = (request, data[os.write(fd, data) :])
                    self.progress = time.monotonic()
                    continue
                del self.pushes[0]
                self.executor.send({"id": request})
        except BlockingIOError:
            self.executor.watch(fd, select.EPOLLOUT, self.on_writable)
            return
        except BrokenPipeError:  # it has failed, and says why as it ends
            self.close_pipe()
        if self.pipe >= 0:
            self.executor.unwatch(self.pipe)
        if self.committing:
            self.close_pipe()
        self.conclude()

    def conclude(self) -> None:
        if self.exit_code is None:
            return
        self.close_pipe()
        pushes, self.pushes = self.pushes, []
        for request, _ in pushes:
            self.executor.send(failure(request, self.error()))
        if self.committing:
            done: Header = {"id": self.committing}
            self.executor.send(failure(self.committing, self.error()) if self.exit_code else done)
            self.committing = 0


# --- a folder as a tar stream ----------------------------------------------------------------------------------------


class Exactly:
    """A file as the number of bytes that it had, whatever becomes of it meanwhile."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, size: int = CHUNK) -> bytes:
        data = b""
        while len(data) < size:
            part = os.read(self.fd, size - len(data))
            if not part:
                return data.ljust(size, b"\0")
            data += part
        return data


def pack(folder: str, file: IO[bytes]) -> None:
    """Write what is below `folder`: files, folders and symbolic links, nothing else. What vanishes is left out.

    Raises `OSError` for what cannot be read.
    """
    import tarfile

    with tarfile.open(
        fileobj=file,
        mode="w|",
        bufsize=CHUNK,
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        archive.copybufsize = CHUNK  # type: ignore[attr-defined]
        left = [("", sorted(os.listdir(folder), reverse=True))]
        while left:
            parent, names = left[-1]
            if not names:
                left.pop()
                continue
            name = parent + names.pop()
            path = os.path.join(folder, name)
            fd = -1
            try:
                status = os.lstat(path)
                member = tarfile.TarInfo(name)
                if stat.S_ISLNK(status.st_mode):
                    member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
                elif stat.S_ISDIR(status.st_mode):
                    member.type = tarfile.DIRTYPE
                    left.append((name + "/", sorted(os.listdir(path), reverse=True)))
                elif stat.S_ISREG(status.st_mode):
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                    status = os.fstat(fd)
                    member.size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                else:
                    continue
                member.mode, member.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
                archive.addfile(member, Exactly(fd) if member.size else None)
                archive.members = []  # type: ignore[attr-defined]  # or it would remember every one
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # it was replaced meanwhile
                    raise
            finally:
                if fd >= 0:
                    os.close(fd)


def unpack(file: IO[bytes], folder: str) -> None:
    """Put the files, folders and symbolic links of a tar stream below `folder`, over what is there.

    Raises `OSError`.
    """
    import tarfile

    os.makedirs(folder, exist_ok=True)
    modes = []
    with tarfile.open(fileobj=file, mode="r|", bufsize=CHUNK, encoding="utf-8", errors="surrogateescape") as archive:
        while True:
            member = archive.next()
            archive.members = []  # type: ignore[attr-defined]
            if member is None:
                break
            path = os.path.join(folder, member.name)
            if member.isdir():
                os.makedirs(path, exist_ok=True)
                os.chmod(path, member.mode | 0o700)
                modes.append((path, member.mode))
                continue
            if os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path)):
                os.unlink(path)
            if member.issym():
                os.symlink(member.linkname, path)
            elif member.isreg():
                source = archive.extractfile(member)
                with open(path, "wb") as target:
                    while True:
                        data = source.read(CHUNK) if source is not None else b""
                        if not data:
                            break
                        target.write(data)
                    target.flush()
                    os.fchmod(target.fileno(), member.mode)
                    os.utime(target.fileno(), (member.mtime, member.mtime))
        for path, mode in reversed(modes):  # at the end: a folder may be one that nothing can be written to
            os.chmod(path, mode)


# --- sessions --------------------------------------------------------------------------------------------------------


def encode(header: Header, payload: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return b"".join((FRAME.pack(len(encoded), len(payload)), encoded, payload))


def keyed(key: bytes, message: bytes, size: int, sender: bytes = b"") -> bytes:
    try:
        from _blake2 import blake2b  # without the rest of hashlib, which would load OpenSSL
    except ImportError:
        from hashlib import blake2b
    return blake2b(message, key=key, digest_size=size, person=sender).digest()


def prove(token: bytes, *words: object) -> str:
    return keyed(token, " ".join(str(word) for word in words).encode(), 32).hex()


def is_same(one: str, other: str) -> bool:
    """Takes as long wherever they differ."""
    from _operator import _compare_digest

    return bool(_compare_digest(one.encode(), other.encode()))


class Link:
    """One byte stream, until it breaks or is replaced."""

    def __init__(self, executor: Executor, stream_in: int, stream_out: int, attached: bool) -> None:
        self.executor = executor
        self.stream_in, self.stream_out = stream_in, stream_out
        self.attached = attached
        self.closed = False
        self.timer: Timer = [0.0, 0, None]
        self.nonce = os.urandom(16).hex()
        self.key = b""
        self.sealed = self.opened = 0  # frames of this attachment, by direction
        self.received = bytearray()
        self.sending: deque[memoryview] = deque()
        for fd in (stream_in, stream_out):
            os.set_blocking(fd, False)
        executor.watch(stream_in, select.EPOLLIN, self.on_readable)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.timer[2] = None
            for fd in (self.stream_in, self.stream_out):
                self.executor.unwatch(fd)
                os.close(fd)

    def write(self, frame: bytes) -> None:
        if self.key:
            frame += keyed(self.key, self.sealed.to_bytes(8, "big") + frame, 16, b"far")
            self.sealed += 1
        self.sending.append(memoryview(frame))

    def flush(self) -> None:
        if not self.closed:
            self.on_sendable(self.stream_out)

    def on_sendable(self, fd: int) -> None:
        try:
            while self.sending or (self.attached and self.executor.next_chunk()):
                written = os.write(fd, self.sending[0])
                if written == len(self.sending[0]):
                    self.sending.popleft()
                else:
                    self.sending[0] = self.sending[0][written:]
            self.executor.unwatch(fd)
        except BlockingIOError:
            self.executor.watch(fd, select.EPOLLOUT, self.on_sendable)
        except OSError:
            self.executor.on_cut(self, "nobody reads its answers")

    def on_readable(self, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK if self.attached else STRANGER)
        except BlockingIOError:
            return
        except OSError as error:
            self.executor.on_cut(self, "its stream broke: %s" % error)
            return
        if not data:
            self.executor.on_cut(self, "its stream was closed")
            return
        self.received += data
        try:
            begin = self.parse()
        except Exception as error:
            if self.attached:
                complain(error)
            self.executor.on_cut(self, "its stream is damaged: %s" % error)
            return
        del self.received[:begin]

    def parse(self) -> int:
        """Serve all frames that have come; returns where the rest begins."""
        begin, available = 0, len(self.received)
        while available - begin >= FRAME.size and not self.closed and self.executor.reason is None:
            header_size, payload_size = FRAME.unpack_from(self.received, begin)
            payload_at = begin + FRAME.size + header_size
            end = payload_at + payload_size
            if not self.attached and end > STRANGER:
                raise ValueError("a stranger's frame is too large")
            tag_end = end + 16 if self.key else end
            if tag_end > available:
                break
            with memoryview(self.received) as view:
                if self.key:
                    message = self.opened.to_bytes(8, "big") + bytes(view[begin:end])
                    self.opened += 1
                    if not is_same(keyed(self.key, message, 16, b"near").hex(), bytes(view[end:tag_end]).hex()):
                        raise ValueError("a frame is by somebody else")
                header = json.loads(bytes(view[begin + FRAME.size : payload_at]).decode())
                payload = bytes(view[payload_at:end])
            if self.attached:
                self.executor.on_frame(self, header, payload, end - begin)
            else:
                self.executor.shake_hands(self, header)
            begin = tag_end
        return begin


# --- the loop --------------------------------------------------------------------------------------------------------


class Executor:
    """One thread, one epoll: requests in, answers out, pipes and deadlines in between."""

    def __init__(self, bash: str, oom: tuple[int, bytes] | None) -> None:
        self.bash = bash
        self.oom = oom  # an open /proc/self/oom_score_adj, and what is in it; None: children write their own
        self.state = ShellState("/", {})
        self.wall_time = math.inf
        self.memory: int | None = None
        self.reason: str | None = None  # why it is to end
        self.farewell: str | None = None  # why it ends as soon as somebody has been told
        self.execs: dict[int, Exec] = {}
        self.spares: list[Spare] = []
        self.null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # now, while it is sure to be that
        self.starter: Starter | None = None
        with contextlib.suppress(OSError):
            self.starter = Starter()
        self.spilled: dict[str, dict[str, Capped]] = {}
        self.processes: dict[str, Background] = {}
        self.children: dict[int, Callable[[int], None]] = {}
        self.uploads: dict[int, Upload | None] = {}  # None: failed, the rest is ignored
        self.transfers: dict[int, Transfer] = {}
        self.streams: deque[tuple[int, Iterator[bytes]]] = deque()
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[int], Any]] = {}
        self.timers: list[Timer] = []
        self.counter = 0
        self.signals, wakeup = os.pipe()
        for fd in (self.signals, wakeup):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self.watch(self.signals, select.EPOLLIN, self.on_signal)
        # The session:
        self.link: Link | None = None
        self.resumable = False
        self.dial: Callable[[], None] | None = None
        self.redial_after = 0.05
        self.strangers: list[Link] = []
        self.token = b""
        self.grace = START
        self.grace_timer: Timer = []
        self.retained: deque[bytes] = deque()  # sent, not acknowledged
        self.retained_bytes = 0
        self.acknowledged = 0  # frames, counted from the first
        self.taken = 0  # frames received
        self.due_frames = self.due_bytes = 0  # of these, since the last acknowledgement
        self.heard = time.monotonic()

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
        if self.counter % 1000 == 0:  # commands end long before their time limits: most timers are off
            self.timers = [timer for timer in self.timers if timer[2] is not None]
            heapq.heapify(self.timers)
        timer: Timer = [time.monotonic() + seconds, self.counter, callback]
        if seconds < math.inf:
            heapq.heappush(self.timers, timer)
        return timer

    def run(self) -> None:
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

    def new_spill(self) -> Spill | None:
        try:
            return Spill(["/tmp", self.state.workdir], self.memory)
        except OSError:
            return None

    def keep(self, execution: str, outputs: dict[str, Capped]) -> None:
        for output in outputs.values():
            output.head, output.tail = bytearray(), bytearray()
        self.spilled[execution] = outputs
        while len(self.spilled) > SPILLS:
            del self.spilled[next(iter(self.spilled))]

    def on_process_ended(self) -> None:
        """Of processes that have ended, the output of the last ones is kept."""
        room = ENDED
        for process in reversed(list(self.processes.values())):
            if process.finished:
                room -= len(process.ring.data)
                if room < 0:
                    process.ring.drop()

    def stop(self, reason: str) -> None:
        """End; one who is about to come back is told why, if that takes no longer than a moment."""
        if self.token and self.link is None and self.farewell is None:
            self.farewell = reason
            kill_tree(os.getpid())
            self.after(FAREWELL, lambda: self.stop(reason))
        else:
            self.give_up(reason)

    def give_up(self, reason: str) -> None:
        self.reason = self.reason or reason

    def settle(self, pid: int) -> None:
        """A while after its start. What has become no program by then is slow, or was stopped, and must not stay so.

        It shares this process' memory, and with it what anybody writes to its oom_score_adj.
        """
        if self.starter is not None and pid in self.starter.kept:
            with contextlib.suppress(OSError), open("/proc/%d/stat" % pid, "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[6]) & PF_FORKNOEXEC:
                    send_signal(pid, signal.SIGCONT)
                    self.after(TAKING, lambda: self.settle(pid))
                else:
                    del self.starter.kept[pid]
        if self.oom is not None:
            os.pwrite(self.oom[0], self.oom[1], 0)

    def on_signal(self, fd: int) -> None:
        if signal.SIGTERM in os.read(fd, 4096):
            self.give_up("it was told to end (SIGTERM)")
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.starter is not None:
                self.starter.kept.pop(pid, None)
            on_exit = self.children.pop(pid, None)
            if on_exit is not None:  # otherwise an orphan that this process adopted
                on_exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))

    def fork(self) -> int:
        """A child that goes before this process when memory runs out."""
        if self.oom is not None:
            os.pwrite(self.oom[0], b"1000", 0)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0 and self.oom is not None:
                os.pwrite(self.oom[0], self.oom[1], 0)
        if pid == 0 and self.oom is None:
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        return pid

    def spawn(
        self,
        job: Job,
        fds: list[int],
        arguments: list[bytes],
        cwd: str | None,
        env: list[bytes],
        inherited: dict[int, int],
    ) -> None:
        """Start `job`'s shell with `fds` as its 0, 1 and 2, and close them here.

        What goes wrong before bash runs looks like bash's own failure: a message in its output, and exit code 1 or 126.
        """
        end = time.monotonic() + FORKING

        def attempt() -> None:
            try:
                pid = -1 if job.abandoned else self.start_shell(arguments, fds, cwd, env, inherited)
            except OSError as error:  # the limit of processes, or of memory: others may end and make room
                if time.monotonic() < end:
                    self.after(0.02, attempt)
                    return
                os.write(fds[2], b"bash: fork: " + os.fsencode(error.strerror or "failed") + b"\n")
                self.after(0.0, lambda: job.on_exit(126))
            else:
                if pid < 0:
                    self.after(0.0, lambda: job.on_exit(137))
                else:
                    self.adopt(pid, job)
            close_all(fds)

        attempt()

    def prepare(self) -> None:
        """Have shells ready for the next commands, one at a time."""
        if self.execs or self.reason is not None or self.farewell is not None or not _ODD.isdisjoint(self.state.env):
            return
        for spare in [spare for spare in self.spares if spare.version != self.state.version]:
            self.spares.remove(spare)
            spare.discard()
        if len(self.spares) < SPARES:
            with contextlib.suppress(OSError):
                self.spares.append(Spare(self))
                self.after(0.0, self.prepare)

    def take_spare(self, command: str) -> Spare | None:
        while self.spares and len(command) <= SPARE_COMMAND and _PLAIN.match(command):
            spare = self.spares.pop(0)
            if spare.is_usable() and spare.run(command):
                return spare
            spare.discard()
        return None

    def adopt(self, pid: int, job: Job) -> None:
        job.pid = pid
        self.children[pid] = job.on_exit
        for other in self.processes.values():
            if other.pid == pid and other is not job:  # the number came round again: the ended one has lost its name
                other.pid = -1

    def start_shell(
        self, arguments: list[bytes], fds: list[int], cwd: str | None, env: list[bytes], inherited: dict[int, int]
    ) -> int:
        """Its process id. Raises `OSError` when there can be no more processes, or no more memory."""
        moves = [(fd, target) for target, fd in [*enumerate(fds), *inherited.items()]]
        texts = b"".join((*arguments, *env))  # a child of Python's says what it is that no program can be given
        simple = len(texts) < 1 << 20 and b"\0" not in texts and max(map(len, env), default=0) <= ARGUMENT
        if self.starter is not None and simple and self.enter(cwd):
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
            try:
                pid = self.starter.start(arguments, env, moves)
                self.after(TAKING, lambda: self.settle(pid))
                return pid
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
                os.chdir("/")
        pid = self.fork()
        if pid == 0:
            self.become_shell(arguments, moves, cwd, env)
        return pid

    def enter(self, cwd: str | None) -> bool:
        """Go to the folder where a shell is to start."""
        if cwd is not None:
            with contextlib.suppress(OSError, ValueError):
                os.chdir(os.path.join(self.state.workdir, cwd))
                return True
            return False
        for path in (self.state.cwd, self.state.workdir, "/"):
            with contextlib.suppress(OSError, ValueError):
                os.chdir(path)
                break
        return True

    def become_shell(
        self, arguments: list[bytes], moves: list[tuple[int, int]], cwd: str | None, env: list[bytes]
    ) -> None:
        """In a forked child: does what `Starter` does, or says why it cannot be done. Never returns."""
        failed, what = 126, "bash"
        try:
            os.setsid()
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # its orphans become its children, and can be found
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            above = [(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, COMMAND_FD + 1), target) for fd, target in moves]
            for fd, target in above:
                os.dup2(fd, target)
            resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
            with contextlib.suppress(OSError):
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if cwd is not None:
                failed, what = 1, "cd: " + cwd
                os.chdir(os.path.join(self.state.workdir, cwd))
                failed, what = 126, "bash"
            else:
                self.enter(None)
            os.execve(arguments[0], arguments, dict(text.split(b"=", 1) for text in env))
        except BaseException as error:
            reason = getattr(error, "strerror", None) or repr(error)
            os.write(2, os.fsencode("bash: %s: %s\n" % (what, reason)))
        finally:
            os._exit(failed)

    # the session

    def greet(self, link: Link) -> None:
        hello: Header = {"id": 0, "hello": PROTOCOL, "pid": os.getpid(), "python": list(sys.version_info[:3])}
        if not link.attached:
            hello.update(nonce=link.nonce, fresh=not self.token)
        link.write(encode(hello))
        link.flush()

    def use_stream(self, stream_in: int, stream_out: int) -> None:
        """One stream, the end of which is the end."""
        self.link = Link(self, stream_in, stream_out, attached=True)
        self.greet(self.link)

    def use_listener(self, accept: Callable[[], int]) -> Callable[[int], None]:
        """Streams come by `accept`, which raises `BlockingIOError` when there is none."""
        self.begin_session()

        def on_connection(fd: int) -> None:
            try:
                self.add_stranger(accept())
            except BlockingIOError:
                pass
            except OSError:  # no more descriptors: it would be reported again at once
                self.unwatch(fd)
                self.after(0.1, lambda: self.watch(fd, select.EPOLLIN, on_connection))

        return on_connection

    def use_dial(self, connect: Callable[[], int]) -> None:
        """Streams are made by `connect`, whenever there is none."""
        self.begin_session()

        def dial() -> None:
            if self.link is not None or self.strangers:
                return
            try:
                self.add_stranger(connect())
            except OSError:
                self.redial()

        self.dial = dial
        dial()

    def redial(self) -> None:
        if self.dial is not None and self.link is None and not self.strangers:
            self.after(self.redial_after, self.dial)
            self.redial_after = min(1.0, 2 * self.redial_after)

    def begin_session(self) -> None:
        self.resumable = True
        self.grace_timer = self.after(self.grace, lambda: self.give_up("nobody came"))
        self.on_silence()

    def on_silence(self) -> None:
        if self.link is not None and time.monotonic() > self.heard + SILENCE:
            self.on_cut(self.link, "nobody speaks to it")
        self.after(SILENCE / 5, self.on_silence)

    def add_stranger(self, fd: int) -> None:
        if len(self.strangers) >= STRANGERS:  # whom it hits is chance: a crowd cannot keep the right one out for long
            other = self.strangers[os.urandom(1)[0] % len(self.strangers)]
            self.on_cut(other, "too many")
        try:
            other_fd = os.dup(fd)
        except OSError:
            os.close(fd)
            raise
        link = Link(self, fd, other_fd, attached=False)
        self.strangers.append(link)
        link.timer = self.after(HANDSHAKE, lambda: self.on_cut(link, "it said nothing"))
        self.greet(link)

    def shake_hands(self, link: Link, header: Header) -> None:
        """The first message of a stranger; raises whatever it likes when that is not as it should be."""
        near, received, sealed = header["nonce"], header["received"], header["sealed"]
        facts = (link.nonce, near, received, sealed)
        token = self.token
        if not token:
            token = bytes.fromhex(header["token"])
            if len(token) != 32:
                raise ValueError("no token")
        elif not is_same(prove(token, "near", *facts), header["proof"]):
            raise ValueError("a stranger")
        if not self.acknowledged <= received <= self.acknowledged + len(self.retained):
            raise ValueError("it has received what was never sent")
        self.token = token
        self.strangers.remove(link)
        if self.link is not None:
            self.link.close()
        proof = prove(token, "far", *facts, self.taken)
        link.write(encode({"id": 0, "attached": PROTOCOL, "received": self.taken, "proof": proof}))
        if sealed:
            link.key = keyed(token, ("frames %s %s" % (link.nonce, near)).encode(), 32)
        link.attached = True
        link.timer[2] = None
        self.link = link
        self.heard = time.monotonic()
        self.due_frames = self.due_bytes = 0
        self.redial_after = 0.05
        self.grace_timer[2] = None
        self.forget(received)
        for frame in self.retained:
            link.write(frame)
        link.flush()
        if self.farewell is not None:
            self.stop(self.farewell)

    def on_cut(self, link: Link, reason: str) -> None:
        link.close()
        if link is self.link:
            self.link = None
            if not self.resumable:
                self.stop(reason)
                return
            message = "%s, and nobody came back within %g s" % (reason, self.grace)
            self.grace_timer = self.after(self.grace, lambda: self.give_up(message))
        elif link in self.strangers:
            self.strangers.remove(link)
        self.redial()

    def forget(self, acknowledged: int) -> None:
        if not self.acknowledged <= acknowledged <= self.acknowledged + len(self.retained):
            raise ValueError("an acknowledgement of what was never sent")
        while self.acknowledged < acknowledged:
            self.retained_bytes -= len(self.retained.popleft())
            self.acknowledged += 1

    def on_frame(self, link: Link, header: Header, payload: bytes, size: int) -> None:
        self.heard = time.monotonic()
        due = False
        if header.get("id") == 0:
            if "ack" in header:
                self.forget(header["ack"])
                link.flush()
            due = "ping" in header
        else:
            self.taken += 1
            self.due_frames += 1
            self.due_bytes += size
            self.serve(header, payload)
            due = self.due_frames >= ACK_FRAMES or self.due_bytes >= ACK_BYTES
        if due and self.resumable and not link.closed:
            self.due_frames = self.due_bytes = 0
            link.write(encode({"id": 0, "ack": self.taken}))
            link.flush()

    def send(self, header: Header, payload: bytes = b"") -> None:
        self.post(encode(header, payload))
        self.flush()

    def post(self, frame: bytes) -> None:
        if self.resumable:
            self.retained.append(frame)
            self.retained_bytes += len(frame)
        if self.link is not None:
            self.link.write(frame)

    def flush(self) -> None:
        if self.link is not None:
            self.link.flush()

    def next_chunk(self) -> bool:
        """Files go out when nothing else has to, a chunk of each in turn. False when there is nothing to send now."""
        if not self.streams or self.retained_bytes > WINDOW:
            return False
        request, chunks = self.streams.popleft()
        header: Header = {"id": request}
        data = b""
        try:
            data = next(chunks)
            header["more"] = True
            self.streams.append((request, chunks))
        except StopIteration:
            pass
        except Exception as error:  # it may have been asked for what is no path, or no offset
            header = failure(request, error)
        self.post(encode(header, data))
        return True

    def serve(self, header: Header, payload: bytes) -> None:
        try:
            getattr(self, "op_" + header["op"])(header, payload)
        except Exception as error:
            if not isinstance(error, OSError):
                complain(error)
            if "id" in header:
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
        workdir, env, lifetime = header["workdir"], header["env"], header["lifetime"]
        os.makedirs(workdir, exist_ok=True)
        self.state = ShellState(workdir, env)
        self.wall_time = header.get("wall_time") or math.inf
        self.grace = header.get("grace") or self.grace
        self.memory = header.get("memory")
        self.after(lifetime, lambda: self.stop("its lifetime of %g s is over" % lifetime))
        self.send({"id": header["id"], "python": find_python(env.get("PATH", os.defpath))})

    def op_exec(self, header: Header, payload: bytes) -> None:
        self.execs[header["id"]] = Exec(self, header, payload)

    def op_spilled(self, header: Header, _: bytes) -> None:
        offset = header["offset"]
        try:
            output = self.spilled[header["execution"]][header["stream"]]
        except KeyError:
            message = "the whole of this output is not kept any more"
            raise FileNotFoundError(errno.ENOENT, message, header["execution"]) from None
        kept = output.spill.size if output.spill is not None else 0
        if output.spill is None or offset >= kept < output.total:
            message = "of this output of %d bytes, only the first %d could be kept" % (output.total, kept)
            raise OSError(errno.ENOSPC, message, header["execution"])
        self.streams.append((header["id"], output.spill.read(offset, header["limit"])))
        self.flush()

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

    def op_kill_all(self, header: Header, _: bytes) -> None:
        for job in [*self.execs.values(), *self.processes.values()]:
            job.abandoned = True
        for spare in self.spares:
            spare.discard()
        self.spares = []
        kill_tree(os.getpid())
        self.send({"id": header["id"]})

    def op_read(self, header: Header, _: bytes) -> None:
        chunks = read_file(self.path(header["path"]), header["offset"], header["limit"])
        self.streams.append((header["id"], chunks))
        self.flush()

    def op_write(self, header: Header, payload: bytes) -> None:
        request, more = header["id"], header.get("more", False)
        upload = None
        try:
            upload = self.uploads.pop(request) if request in self.uploads else Upload(self.path(header["path"]))
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

    def transfer(self, header: Header) -> Transfer:
        try:
            return self.transfers[header["transfer"]]
        except KeyError:
            raise OSError(errno.EBADF, "no such transfer") from None

    def op_open(self, header: Header, _: bytes) -> None:
        kinds = {"read": Reading, "write": Writing, "pack": Packing, "unpack": Unpacking}
        number = header["transfer"]
        self.transfers[number] = kinds[header["kind"]](self, self.path(header["path"]), number)
        self.send({"id": header["id"]})

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
            self.execs[target].kill()
        upload = self.uploads.pop(target, None)
        if upload is not None:
            upload.close(keep=False)
        self.streams = deque(stream for stream in self.streams if stream[0] != target)
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


def find_bash(fallback: str | None) -> str:
    for folder in [*os.environ.get("PATH", os.defpath).split(":"), "/bin", "/usr/bin", "/usr/local/bin"]:
        path = os.path.join(folder, "bash")
        if os.access(path, os.X_OK):
            return path
    if fallback is None:
        raise FileNotFoundError(errno.ENOENT, "bash is needed inside the sandbox", "bash")
    return fallback


def find_python(search_path: str) -> str | None:
    """A Python >= 3.8 for programs inside, by file names alone: starting one takes longer than starting a sandbox."""
    for folder in search_path.split(":"):
        for name in ("python3", "python"):
            path = os.path.join(folder, name)
            if folder.startswith("/") and os.access(path, os.X_OK):
                real = os.path.realpath(path)
                library = os.path.join(os.path.dirname(os.path.dirname(real)), "lib")
                names = [os.path.basename(real)]
                if names[0] in ("python", "python3"):
                    with contextlib.suppress(OSError):
                        names = sorted(os.listdir(library))
                if any(int(minor) >= 8 for minor in re.findall(r"\bpython3\.(\d+)\b", " ".join(names))):
                    return path
    return None


def relay(name: str) -> None:
    """Copy standard input to the abstract socket `name` and what comes from there to standard output."""
    import socket

    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect("\0" + name)
        other.setblocking(False)
        routes = [(0, other.fileno()), (other.fileno(), 1)]
        for fd in (0, 1):
            os.set_blocking(fd, False)
        waiting = {source: b"" for source, _ in routes}
        poll = select.poll()
        while True:
            for fd in {0, 1, other.fileno()}:
                events = sum(select.POLLIN for source, _ in routes if source == fd and not waiting[source])
                events |= sum(select.POLLOUT for source, target in routes if target == fd and waiting[source])
                if events:
                    poll.register(fd, events)
                else:  # or its end would be reported again and again
                    with contextlib.suppress(KeyError):
                        poll.unregister(fd)
            ready = dict(poll.poll())
            for source, target in routes:
                if not waiting[source] and ready.get(source, 0) & ~select.POLLOUT:
                    with contextlib.suppress(BlockingIOError):
                        waiting[source] = os.read(source, CHUNK)
                        if not waiting[source]:
                            return
                if waiting[source]:
                    with contextlib.suppress(BlockingIOError):
                        waiting[source] = waiting[source][os.write(target, waiting[source]) :]
            if ready.get(1, 0) & (select.POLLERR | select.POLLHUP):
                return


def connection_maker(path: str) -> Callable[[], int]:
    import socket

    def connect() -> int:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.setblocking(False)
            stream.connect(path)
            return stream.detach()

    return connect


def listener(address: str) -> tuple[int, Callable[[], int]]:
    """The descriptor of a listening socket, and what accepts a connection to it."""
    import socket

    if address.startswith("fd:"):
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, int(address[3:]))
        server.set_inheritable(False)
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind("\0" + address[1:] if address.startswith("@") else address)
    server.listen(128)
    server.setblocking(False)

    def accept() -> int:
        return server.accept()[0].detach()

    return server.fileno(), accept


def main() -> None:
    options: dict[str, str] = {}
    folders = sys.argv[1:]
    while folders and folders[0] in ("--dial", "--listen", "--relay", "--bash"):
        options[folders[0]] = folders[1]
        del folders[:2]
    if "--relay" in options:
        relay(options["--relay"].lstrip("@"))
        return
    is_init = os.getpid() == 1
    stream_in, stream_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.set_inheritable(2, False)  # every child gets its own
    oom = None
    # Opened now, because what is not dumpable cannot open its own file. PID 1's may be covered, lest others write it.
    with contextlib.suppress(OSError, ValueError):
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        value = b"%d" % int(os.read(fd, 16))
        os.pwrite(fd, value, 0)
        oom = (fd, value)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))  # children left behind hold two pipes each
    keyctl = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
    if keyctl is not None:
        libc.syscall(keyctl, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING: an empty one, not the owner's with its keys
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A PID 1 without handlers is deaf to signals from inside its namespace; elsewhere SIGTERM means a tidy end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # what is ignored would be so in every child
        signal.signal(number, lambda *_: None)
    if is_init:
        lock_own_settings()
    else:
        signal.signal(signal.SIGTERM, lambda *_: None)
    executor = Executor(find_bash(options.get("--bash")), oom)
    if "--dial" in options or "--listen" in options:
        os.close(stream_in)
        os.close(stream_out)
    else:
        executor.use_stream(stream_in, stream_out)
        if not is_init:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if "--listen" in options:
        fd, accept = listener(options["--listen"])
        executor.watch(fd, select.EPOLLIN, executor.use_listener(accept))
    elif "--dial" in options:
        executor.use_dial(connection_maker(options["--dial"]))
    try:
        executor.run()
        link = executor.link
        if link is not None:
            with contextlib.suppress(OSError):
                link.write(encode({"id": 0, "bye": executor.reason}))
                link.flush()
    finally:
        if not is_init:  # the kernel does this for a PID namespace
            kill_tree(os.getpid())
            import shutil

            for path in folders:
                shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
