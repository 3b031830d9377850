"""However a command is started, it reaches no more of the kernel than programs need; and what they need, they reach."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from backends import Process, Sandbox, SupportsPty

from .probes import output

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


async def _printed(process: Process, word: bytes) -> str:
    data, offset = b"", 0
    async with asyncio.timeout(60):
        while word not in data:
            chunk = await process.read(offset, wait=5)
            data, offset = data + chunk.data, chunk.offset + len(chunk.data)
    return data.decode()


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
