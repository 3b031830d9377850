"""The filter of system calls: its table, what it decides on both kinds of machines, and that programs go on."""

from __future__ import annotations

import ctypes
import errno
import re
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_watch import opened

from backends import create_backend
from backends.executor import system_calls
from backends.executor.kernel import MACHINES
from backends.executor.system_calls import FILTERED, IGNORED, LATER, REFUSED, call_numbers, filter_program

PAGE = Path(__file__).parents[2] / "docs" / "system-calls.md"
ALLOWED = 0x7FFF0000
machines = pytest.mark.parametrize("machine", MACHINES)


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter answers, by an interpreter of the steps that seccomp(2) names: an errno, 0 for allowed."""
    steps = filter_program(machine, own_pid=1)
    padded = [argument & (1 << 64) - 1 for argument in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("IIQ6Q", number, MACHINES[machine][0] if architecture is None else architecture, 0, *padded)
    at = loaded = 0
    for _ in range(len(steps)):
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            loaded = struct.unpack_from("I", data, value)[0]
        elif code == 0x05:
            at += value
        elif code == 0x06:
            return 0 if value == ALLOWED else value & 0xFFFF
        else:
            passed = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if passed else if_false
    raise AssertionError("it decides nothing")


def number(name: str, machine: str) -> int:
    return call_numbers(FILTERED, MACHINES[machine][1])[name]


def test_the_numbers_are_those_of_libseccomp() -> None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    checked = 0
    for machine, (architecture, column) in MACHINES.items():
        for text in (*REFUSED.values(), FILTERED, IGNORED):
            for name, expected in call_numbers(text, column).items():
                found = library.seccomp_syscall_resolve_name_arch(ctypes.c_uint32(architecture), name.encode())
                if found != -1:  # it is older than the call
                    assert (name, found) == (name, expected), machine
                    checked += 1
    assert checked > 120


@machines
def test_every_listed_call_is_refused_and_every_other_allowed(machine: str) -> None:
    expected = {}
    for error, text in REFUSED.items():
        expected.update(dict.fromkeys(call_numbers(text, MACHINES[machine][1]).values(), error))
    filtered = set(call_numbers(FILTERED, MACHINES[machine][1]).values())
    for call in range(LATER):
        if call not in filtered:
            assert decide(machine, call) == expected.get(call, 0), call
    for call in (LATER, 600, 0x40000000, 0x40000000 | 39, 0xFFFFFFFF):
        assert decide(machine, call) == errno.ENOSYS
    assert decide(machine, 1, architecture=0x40000003) == errno.ENOSYS, "a 32-bit program"


@machines
@given(family=st.integers(0, 2**32 - 1) | st.integers(0, 50), protocol=st.integers(0, 300), above=st.integers(0, 1))
def test_sockets_are_of_four_families(machine: str, family: int, protocol: int, above: int) -> None:
    """The kernel reads the lower half of these arguments: the upper one changes nothing."""
    found = decide(machine, number("socket", machine), family | above << 32, 1, protocol | above << 40)
    if family in (2, 10):
        assert found == (errno.EPROTONOSUPPORT if protocol in system_calls.PROTOCOLS else 0)
    elif family == 16:
        assert found == (errno.EPROTONOSUPPORT if protocol else 0)
    else:
        assert found == (0 if family == 1 else errno.EAFNOSUPPORT)


@machines
def test_some_calls_are_refused_with_some_arguments(machine: str) -> None:
    threads = 0x3D0F00  # as glibc starts them
    cases = [
        ("clone", (threads,), 0),
        ("clone", (17,), 0),
        ("clone", (0x4111,), 0),  # vfork
        *(("clone", (flag | 17,), errno.EPERM) for flag in (1 << 17, *(1 << bit for bit in range(25, 31)))),
        ("unshare", (0x600,), 0),  # files and folders of a process
        ("unshare", (0x80,), errno.EPERM),
        ("ioctl", (0, 0x5401), 0),
        ("ioctl", (0, 0x5412), errno.EPERM),
        ("ioctl", (0, 0x5412 | 1 << 32), errno.EPERM),
        ("fcntl", (0, 3), 0),
        ("fcntl", (0, 1024), errno.EINVAL),
        ("personality", (0xFFFFFFFF,), 0),
        ("personality", (0x40000,), 0),
        ("personality", (0x440000,), errno.EPERM),
        ("preadv2", (0, 0, 0, 0, 0, 0), 0),
        ("preadv2", (0, 0, 0, 0, 0, 8), errno.EOPNOTSUPP),
        ("prlimit64", (1,), errno.EPERM),
        ("prlimit64", (0,), 0),
        ("prlimit64", (2,), 0),
        ("setpriority", (0, 1), errno.EPERM),
        ("setpriority", (2, 0), errno.EPERM),
        ("setpriority", (0, 5), 0),
        ("ioprio_set", (3, 5), errno.EPERM),
    ]
    for name, arguments, expected in cases:
        assert decide(machine, number(name, machine), *arguments) == expected, (name, arguments)


@machines
def test_ptrace_is_refused_where_it_could_change_a_call_behind_the_filter(machine: str) -> None:
    before = filter_program(machine, own_pid=1, traceable=False)
    assert len(before) > len(filter_program(machine, own_pid=1))
    assert decide(machine, {"x86_64": 101, "aarch64": 117}[machine]) == 0


def test_the_page_lists_what_is_refused() -> None:
    listed: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*?) \| `(E\w+|0)` \|", PAGE.read_text(), re.MULTILINE):
        listed.setdefault(row[1], set()).update(re.findall(r"`([a-z_0-9]+)`", row[0]))
    filtered = set(call_numbers(FILTERED, 0)) | {"ptrace"}
    for error, text in REFUSED.items():
        assert listed[errno.errorcode[error]] - filtered == set(call_numbers(text, 0))
    assert filtered <= set().union(*listed.values())


THREADS = """
#include <pthread.h>
void *f(void *x) { return x; }
int main() { pthread_t t; pthread_create(&t, 0, f, 0); return pthread_join(t, 0); }
"""
WORKER = """
new (require("worker_threads").Worker)("0", {eval: true})
const {exec} = require("child_process")
require("fs").readFile("/etc/passwd", () => exec("true", error => process.exit(error ? 1 : 0)))
"""
PROGRAMS = {
    "gcc": "gcc -g -pthread threads.c -o threads && ./threads",
    "gdb": "gdb -batch -ex 'break f' -ex run -ex continue ./threads 2>&1 | grep 'Breakpoint 1, f'",
    "strace": "strace -f -o calls ./threads && grep -q 'clone(' calls",
    "git": "git init -q r && cd r && git -c user.name=a -c user.email=b commit -qm c --allow-empty && git gc -q; cd ..",
    "make": "printf 'all: x y\nx y:\n\techo $@\n' > Makefile && make -j2",
    "node": "node worker.js",
    "tmux": "tmux -f /dev/null new-session -d 'sleep 5' && tmux list-sessions && tmux kill-server",
    "perl": "perl -e 'exit system(\"true\")'",
    "script": "script -qec 'test -t 0' /dev/null",
    "flock": "flock /tmp/lock true",
    "setarch": "setarch -R true && taskset -c 0 true && nice true",
    "curl": "(python3 -m http.server 8123 2> /dev/null &); "
    "curl -s --retry 50 --retry-delay 1 --retry-connrefused http://127.0.0.1:8123/ > /dev/null",
}


async def test_ordinary_programs_of_this_machine_go_on() -> None:
    async with opened(create_backend("local")) as sandbox:
        await sandbox.write_bytes("threads.c", THREADS.encode())
        await sandbox.write_bytes("worker.js", WORKER.encode())
        for program, command in PROGRAMS.items():
            if shutil.which(program) is not None:
                result = await sandbox.exec(command, timeout=60)
                assert result.exit_code == 0, (program, result)


async def test_no_command_has_the_machines_handler_of_core_dumps_started() -> None:
    async with opened(create_backend("local")) as sandbox:
        done = await sandbox.exec(
            "ulimit -c 0 && prlimit --pid $$ --core=0:0 && prlimit --core -o SOFT,HARD", timeout=20
        )
    assert done.stdout.split()[2:] == [b"1", b"1"], done
