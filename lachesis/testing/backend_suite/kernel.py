"""Commands reach no more of the kernel than programs need, and sandboxes do not signal each other through it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from backends import Backend, Process, Sandbox, SupportsPty

from .probes import opened, output

_START = r"""
import ctypes, errno, fcntl, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
arm = os.uname().machine == "aarch64"
buffer = ctypes.create_string_buffer(4096)

def call(x86, generic, *arguments):
    ctypes.set_errno(0)
    fixed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(generic if arm else x86), *fixed)
    return 0 if result >= 0 else ctypes.get_errno()

def report(what, error, refused=(errno.EPERM, errno.ENOSYS)):
    if error not in refused:
        print("%s: %s" % (what, errno.errorcode.get(error, "it works")))
"""

SOCKETS = (
    _START
    + r"""
for family in range(48):
    if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        continue
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        for protocol in (0, 1):
            try:
                socket.socket(family, kind, protocol).close()
                print("a socket of family", family, "kind", kind)
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EPERM, errno.ENOSYS):
                    print("family", family, "kind", kind, "is known:", error)
for protocol in range(1, 23):
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol).close()
        print("a netlink socket of protocol", protocol)
    except OSError:
        pass
for protocol in (33, 115, 132, 136, 256, 262):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, 6):
        try:
            socket.socket(socket.AF_INET, kind, protocol).close()
            print("an internet socket of protocol", protocol)
        except OSError:
            pass
"""
)

NAMESPACES = (
    _START
    + r"""
kinds = {"time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000}
kinds.update({"pid": 0x20000000, "network": 0x40000000, "user and mount": 0x10020000})
for name, flag in kinds.items():
    pid = os.fork()
    if pid == 0:
        os._exit(call(272, 97, flag))
    report("unshare, " + name, os.WEXITSTATUS(os.waitpid(pid, 0)[1]))
    if name == "time":
        continue
    pid = libc.syscall(ctypes.c_long(220 if arm else 56), ctypes.c_long(flag | 17), None, None, None, None)
    if pid == 0:
        os._exit(0)
    report("clone, " + name, 0 if pid > 0 else ctypes.get_errno())
arguments = struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0)
pid = libc.syscall(ctypes.c_long(435), arguments, ctypes.c_long(64))
if pid == 0:
    os._exit(0)
report("clone3, user", 0 if pid > 0 else ctypes.get_errno(), [errno.ENOSYS])
for name in os.listdir("/proc/self/ns"):
    try:
        fd = os.open("/proc/self/ns/" + name, os.O_RDONLY)
    except OSError:
        continue
    report("setns, " + name, call(308, 268, fd, 0))
report("mount", call(165, 40, b"none", b"/tmp", b"tmpfs", 0, None))
report("fsopen", call(430, 430, b"tmpfs", 0))
report("open_tree", call(428, 428, -100, b"/", 1))
"""
)

CALLS = (
    _START
    + r"""
path = os.path.realpath(sys.executable)
file = os.open(path, os.O_RDONLY)
report("add_key", call(248, 217, b"user", b"x", b"y", 1, -2))
report("request_key", call(249, 218, b"user", b"x", None, -2))
report("keyctl", call(250, 219, 0, -3, 0))
report("io_uring_setup", call(425, 425, 8, buffer))
report("userfaultfd", call(323, 282, 1))
report("bpf", call(321, 280, 0, buffer, 64))
ctypes.memset(buffer, 0, 4096)
buffer[0:8] = struct.pack("II", 1, 112)
report("perf_event_open", call(298, 241, buffer, 0, -1, -1, 0))
report("fanotify_init", call(300, 262, 0x200, 0))
buffer[0:8] = struct.pack("Ii", 128, 0)
report("name_to_handle_at", call(303, 264, -100, path.encode(), buffer, ctypes.byref(ctypes.c_int()), 0))
report("open_by_handle_at", call(304, 265, file, buffer, 0))
report("the kernel's log", call(103, 116, 3, buffer, 4096))
report("kexec_load", call(246, 104, 0, 0, None, 0))
report("init_module", call(175, 105, buffer, 0, b""))
report("finit_module", call(313, 273, file, b"", 0))
report("quotactl", call(179, 60, 0x800007 << 8, None, 0, buffer))
report("swapon", call(167, 224, b"/x", 0))
report("reboot", call(169, 142, 0, 0, 0, None))
report("settimeofday", call(164, 170, None, None))
report("pidfd_getfd", call(438, 438, os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else -1, file, 0))
report("kcmp", call(312, 272, os.getpid(), os.getpid(), 1, 0, 0))
if not arm:
    report("modify_ldt", call(154, 0, 0, buffer, 64))
    report("sysfs", call(139, 0, 3))
    report("x32", call(0x40000000 | 39, 0), [errno.ENOSYS])
report("a call from later kernels", call(600, 600), [errno.ENOSYS])
report("personality with executable data", call(135, 92, 0x400000))
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    os.setsid()
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, 0x540E, 0)
    for name, request, value in (("TIOCSTI", 0x5412, b"x"), ("TIOCSETD", 0x5423, struct.pack("i", 3))):
        try:
            fcntl.ioctl(terminal, request, value)
            print(name, "it works")
        except OSError as error:
            if error.errno != errno.EPERM:
                print(name, error)
    sys.stdout.flush()
    os._exit(0)
os.waitpid(pid, 0)
"""
)

FILES_OF_ALL = (
    _START
    + r"""
import mmap
for path in (os.path.realpath(sys.executable), os.__file__):
    file = os.open(path, os.O_RDONLY)
    for name, command, value in (("lease", 1024, fcntl.F_RDLCK), ("directory notice", 1026, 1)):
        target = file if command == 1024 else os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            fcntl.fcntl(target, command, value)
            print("%s on %s" % (name, path))
        except OSError:
            pass
    view = mmap.mmap(file, 4096, prot=mmap.PROT_READ)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0))
    report("mincore on " + path, call(27, 232, address, 4096, buffer))
    report("cachestat on " + path, call(451, 451, file, struct.pack("QQ", 0, 4096), buffer, 0))
    try:
        os.preadv(file, [bytearray(16)], 0, getattr(os, "RWF_NOWAIT", 8))
        print("preadv2 without waiting on", path)
    except OSError:
        pass
"""
)

ORDINARY = r"""
import ctypes, fcntl, mmap, multiprocessing, os, signal, socket, sqlite3, subprocess, tempfile, threading, time

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(square, [3]) == [9]
    threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert subprocess.run(["true"], start_new_session=True).returncode == 0
    assert sqlite3.connect("base.sqlite").execute("pragma journal_mode=wal").fetchone() == ("wal",)
    for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "sock")):
        with socket.socket(family) as server:
            server.bind(address)
            server.listen()
            with socket.socket(family) as one:
                one.connect(server.getsockname())
                other = server.accept()[0]
                other.sendall(b"hello")
                assert one.recv(5) == b"hello"
                other.close()
    assert socket.getaddrinfo("127.0.0.1", 80)
    socket.if_nameindex()
    memory = mmap.mmap(-1, 1 << 20)
    memory[0] = 1
    with tempfile.TemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        os.posix_fallocate(file.fileno(), 0, 4096)
    watch = ctypes.CDLL(None).inotify_init1(0)
    assert watch >= 0 and ctypes.CDLL(None).inotify_add_watch(watch, b".", 2) >= 0
    main, terminal = os.openpty()
    assert os.isatty(terminal)
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        libc.ptrace(0, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(7)
    assert os.WIFSTOPPED(os.waitpid(child, 0)[1]), "a debugger can trace its own programs"
    libc.ptrace(7, child, None, None)
    assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 7
    print("all of it")
"""

LOCKS = r"""
import fcntl, os, sys, time
for path in sys.argv[2:]:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("locked by another sandbox:", path)
print("done", flush=True)
if sys.argv[1] == "hold":
    time.sleep(60)
"""

WATCHES = r"""
import ctypes, os, select, sys
libc = ctypes.CDLL(None, use_errno=True)
queue, names = libc.inotify_init1(os.O_NONBLOCK), {}
for path in sys.argv[1:]:
    names[libc.inotify_add_watch(queue, os.fsencode(path), 0x20)] = path  # IN_OPEN
print("ready", flush=True)
sys.stdin.readline()
try:
    data = os.read(queue, 1 << 16)
except BlockingIOError:
    data = b""
seen = {names.get(int.from_bytes(data[i : i + 4], sys.byteorder)) for i in range(0, len(data), 16)}
for name in sorted(filter(None, seen)):
    print("opened in another sandbox:", name)
print("over")
"""


READ_BY_ALL = ["/run/lachesis", "/run/lachesis/executor.pyc", "/usr/bin/env", "/usr/bin", "/bin/bash", "/etc/passwd"]
"""What more than one sandbox may see, where it exists."""


async def _found(sandbox: Sandbox, program: str, unchecked: Collection[str]) -> str:
    if "kernel" in unchecked:
        pytest.skip("the fixture `unchecked` names kernel")
    result = await sandbox.exec("python3 -", stdin=program.encode(), timeout=120)
    assert (result.exit_code, result.stderr) == (0, b""), result
    return result.stdout.decode()


async def _printed(process: Process, word: bytes) -> str:
    data, offset = b"", 0
    async with asyncio.timeout(60):
        while word not in data:
            chunk = await process.read(offset, wait=5)
            data, offset = data + chunk.data, chunk.offset + len(chunk.data)
    return data.decode()


async def test_no_socket_but_local_and_internet_ones_can_be_made(sandbox: Sandbox, unchecked: Collection[str]) -> None:
    assert await _found(sandbox, SOCKETS, unchecked) == ""


async def test_no_namespace_can_be_made_or_entered_and_nothing_mounted(
    sandbox: Sandbox, unchecked: Collection[str]
) -> None:
    assert await _found(sandbox, NAMESPACES, unchecked) == ""


async def test_what_programs_do_not_need_of_the_kernel_is_refused(sandbox: Sandbox, unchecked: Collection[str]) -> None:
    assert await _found(sandbox, CALLS, unchecked) == ""


async def test_files_of_all_cannot_be_leased_and_their_cache_not_be_asked(
    sandbox: Sandbox, unchecked: Collection[str]
) -> None:
    assert await _found(sandbox, FILES_OF_ALL, unchecked) == ""


@pytest.mark.parametrize("way", ["exec", "prewarmed", "background", "terminal", "setuid program"])
async def test_it_is_refused_however_a_command_is_started(
    sandbox: Sandbox, unchecked: Collection[str], way: str
) -> None:
    if "kernel" in unchecked:
        pytest.skip("the fixture `unchecked` names kernel")
    attempt = "python3 -c 'import socket; socket.socket(40, socket.SOCK_STREAM)' 2>&1 | tail -n 1; echo over"
    if way == "exec":
        shown = (await sandbox.exec(attempt, timeout=30, env={"NEW": "shell"})).stdout.decode()
    elif way == "prewarmed":
        await output(sandbox, "true")  # afterwards, shells wait
        shown = await output(sandbox, attempt)
    elif way == "setuid program":
        # Whatever a set-user-id program may do, it starts with what its caller may ask for.
        flags = "import ctypes; print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))"  # PR_GET_NO_NEW_PRIVS
        assert await output(sandbox, f'python3 -c "{flags}"') == "1"
        return
    elif way == "background":
        shown = await _printed(await sandbox.start(attempt), b"over")
    elif isinstance(sandbox, SupportsPty):
        shown = await _printed(await sandbox.open_pty(attempt), b"over")
    else:
        pytest.skip("it gives no terminals")
    assert "not supported by protocol" in shown or "not permitted" in shown, shown


async def test_ordinary_programs_work(sandbox: Sandbox) -> None:
    await sandbox.write_bytes("ordinary.py", ORDINARY.encode())
    assert await output(sandbox, "python3 ordinary.py", timeout=120) == "all of it"


async def test_sandboxes_do_not_signal_each_other_by_locks_and_watches(
    backend: Backend, sandbox: Sandbox, unchecked: Collection[str]
) -> None:
    if "inodes" in unchecked:
        pytest.skip("the fixture `unchecked` names inodes")
    paths = " ".join(READ_BY_ALL)
    async with opened(backend) as other:
        for each in (sandbox, other):
            await each.write_bytes("locks.py", LOCKS.encode())
        holding = await sandbox.start(f"python3 locks.py hold {paths}")
        await _printed(holding, b"done")
        assert await output(other, f"python3 locks.py try {paths}") == "done"
        await holding.kill()
        await other.write_bytes("watches.py", WATCHES.encode())
        watching = await other.start(f"python3 watches.py {paths}")
        await _printed(watching, b"ready")
        await sandbox.exec(f"for path in {paths}; do head -c 1 $path; ls $path; done", timeout=30)
        await watching.write(b"\n")
        assert await _printed(watching, b"over") == "ready\nover\n"
