"""Resources: using up what a sandbox has, and what its owner has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path

from backends import BackendError, Sandbox, SandboxExhausted

from .attack import AttackTarget, Family, Fell, Held, Skipped, Verdict, python

resources = Family("resources")

MIB = 1 << 20

SEGMENTS = """
import os, struct
code = bytes.fromhex(
    "bd00190000b81d00000031ffbe00000100ba800100000f0585c0783289c731f631d2b81e0000000f"
    "054885c078204889c7bb10000000c60001480500100000ffcb75f3b8430000000f05ffcd75b7b83c"
    "00000031ff0f05"
)
elf = b"\\x7fELF" + bytes([2, 1, 1]).ljust(12, b"\\0")
elf += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0x400078, 64, 0, 0, 64, 56, 1, 0, 0, 0)
elf += struct.pack("<IIQQQQQQ", 1, 5, 0, 0x400000, 0x400000, 120 + len(code), 120 + len(code), 0x1000)
with open("fill", "wb") as file:
    file.write(elf + code)
os.chmod("fill", 0o755)
if os.uname().machine == "x86_64":
    os.execv("./fill", ["./fill"])
"""
"""Fills 400 MiB of System V memory and detaches it, in a program of one page: nothing that is killed frees less.

    left = 6400
    again: memory = shmat(shmget(IPC_PRIVATE, 65536, 0600), 0, 0); touch 16 pages; shmdt(memory); if (--left) goto again
"""
MEMORY_FILES = """
import os
for number in range(48):
    fd = os.memfd_create("x")
    os.write(fd, b"x" * (8 << 20))
    if os.fork() == 0:
        import time
        time.sleep(100)
"""
HEAP = "x = bytearray(384 << 20)"
PIPES = """
import fcntl, os
for _ in range(384):
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, 1031, 1 << 20)
    os.set_blocking(theirs, False)
    os.write(theirs, b"x" * (1 << 20))
"""
FORKS = """
import os, time
started = 0
try:
    while started < 400:
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
        started += 1
except OSError:
    pass
print(started)
"""
PASSING = """
import resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
kept = []
try:
    while len(kept) < 1000:
        kept.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        kept[-1][0].setblocking(False)
        for _ in range(8):
            socket.send_fds(kept[-1][0], [b"x"], [1] * 250)
except OSError as error:
    print(error, flush=True)
time.sleep(100)
"""
"""Descriptors that are sent and never received. The kernel counts them for all processes of a user."""
DEEP = """
import os
os.mkdir("deep")
os.chdir("deep")
for _ in range(2000):
    os.mkdir("d")
    os.chdir("d")
open("bottom", "w").close()
"""


async def _alive(sandbox: Sandbox) -> Verdict:
    """Whether later commands run, also those after the shells that wait already."""
    for cwd in (None, None, None, "/", "/"):
        try:
            result = await sandbox.exec("echo alive", timeout=60, cwd=cwd)
        except (BackendError, OSError) as error:
            return Fell(f"the next command cannot run: {type(error).__name__}: {error}")
        if result.stdout != b"alive\n":
            return Fell(f"the next command gave {result}")
    return Held()


async def _usable(sandbox: Sandbox) -> Verdict:
    """Whether commands without memory are killed, and the sandbox lives on or ends for that reason."""
    try:
        for _ in range(5):
            result = await sandbox.exec("echo alive", timeout=60)
            if result.stdout != b"alive\n" and result.exit_code not in (137, 126):
                return Fell(f"the next command gave {result}")
    except SandboxExhausted as ended:
        return Held(str(ended))
    except (BackendError, OSError) as error:
        return Fell(f"a failure of the infrastructure: {type(error).__name__}: {error}")
    return Held()


async def _fill_memory(target: AttackTarget, command: str) -> Verdict:
    async with target.another(memory_bytes=192 * MIB, pids=200) as sandbox:
        try:
            await sandbox.exec(python(sandbox), stdin=command.encode(), timeout=60)
        except SandboxExhausted as ended:
            return Held(str(ended))
        except BackendError as error:
            return Fell(f"the sandbox is lost: {error}")
        return await _usable(sandbox)


@resources.attack("memory", "use more memory than the limit, and end the sandbox by it")
async def memory(target: AttackTarget) -> Verdict:
    async with target.another(memory_bytes=192 * MIB) as sandbox:
        ran = await sandbox.exec(python(sandbox), stdin=HEAP.encode(), timeout=60)
        if ran.exit_code != 137:
            return Fell(f"384 MiB in spite of a limit of 192 MiB: {ran}")
        return await _alive(sandbox)


@resources.attack("detached memory", "fill System V memory, which no end of a process frees")
async def detached_memory(target: AttackTarget) -> Verdict:
    await target.needs_own_processes()  # without an IPC namespace, the memory would stay
    return await _fill_memory(target, SEGMENTS)


@resources.attack("memory files", "fill memory files in many processes", is_heavy=True)
async def memory_files(target: AttackTarget) -> Verdict:
    return await _fill_memory(target, MEMORY_FILES)


@resources.attack("pipes", "fill the memory of pipes")
async def pipes(target: AttackTarget) -> Verdict:
    return await _fill_memory(target, PIPES)


@resources.attack("many small commands", "fill memory with processes that are each smaller than the executor")
async def many_small(target: AttackTarget) -> Verdict:
    async with target.another(memory_bytes=96 * MIB, pids=400) as sandbox:
        many = "for i in $(seq 300); do (a=$(head -c 600000 /dev/zero | tr '\\0' x); sleep 100) & done; wait"
        try:
            await sandbox.exec(many, timeout=1)
        except SandboxExhausted as ended:
            return Held(str(ended))
        except BackendError as error:
            return Fell(f"the sandbox is lost: {error}")
        return await _usable(sandbox)


@resources.attack("processes", "start processes beyond the limit, and leave them to keep later commands from starting")
async def processes(target: AttackTarget) -> Verdict:
    async with target.another(pids=100) as sandbox:
        forks = await sandbox.exec(python(sandbox), stdin=FORKS.encode(), timeout=60)
        if int(forks.stdout or 0) >= 100:
            return Fell(f"{int(forks.stdout)} processes in spite of a limit of 100")
        for cwd in (None, None, None, "/"):  # also after the shells that wait already
            try:
                result = await sandbox.exec("echo alive", timeout=60, cwd=cwd)
            except (BackendError, OSError) as error:
                return Fell(f"the next command is a failure of the infrastructure: {type(error).__name__}: {error}")
            if result.stdout != b"alive\n" and b"Resource temporarily unavailable" not in result.stderr:
                return Fell(f"the next command gave {result}")
        await sandbox.stop_processes()
        return await _alive(sandbox)


@resources.attack("fork bomb", "fork without end until the time limit")
async def fork_bomb(target: AttackTarget) -> Verdict:
    async with target.another(pids=100) as sandbox:
        begin = time.monotonic()
        await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 100", timeout=1)
        if time.monotonic() - begin > 20:
            return Fell(f"the time limit of 1 s took {time.monotonic() - begin:.0f} s")
        return await _alive(sandbox)


@resources.attack("full disk", "fill the disk, and keep commands and files from working afterwards")
async def full_disk(target: AttackTarget) -> Verdict:
    async with target.another(disk_bytes=16 * MIB) as sandbox:
        for folder in (".", "~", "/tmp", "/dev/shm", "/dev", "/run", "/var/tmp"):
            command = f"cd {folder} && head -c 32M /dev/zero > .full; wc -c < .full"
            size = (await sandbox.exec(command, timeout=60, fresh=True)).stdout.strip()
            if int(size or 0) > 16 * MIB:
                return Fell(f"{int(size)} bytes in {folder} in spite of a limit of {16 * MIB}")
        try:
            await sandbox.write_bytes("new", b"x" * (32 * MIB))
            return Fell(f"a file of {32 * MIB} bytes in spite of a limit of {16 * MIB}")
        except BackendError as error:
            return Fell(f"a full disk is a failure of the infrastructure: {error}")
        except OSError:
            return await _alive(sandbox)


@resources.attack("kept outputs", "have the kept outputs of earlier commands use up the disk", is_executors=True)
async def kept_outputs(target: AttackTarget) -> Verdict:
    async with target.another(disk_bytes=32 * MIB) as sandbox:
        for _ in range(4):
            await sandbox.exec("head -c 32M /dev/zero; head -c 32M /dev/zero >&2", timeout=60, max_output=1000)
        left = await sandbox.exec("head -c 16M /dev/zero > half; du -sk . | cut -f 1", timeout=60)
        if int(left.stdout) < 16 << 10:
            return Fell(f"a file of half of the disk has only {int(left.stdout)} KiB, and `du` shows nothing else")
        return Held()


@resources.attack("deep tree", "have 2,000 nested folders copied and removed", is_executors=True)
async def deep_tree(target: AttackTarget) -> Verdict:
    async with target.another() as sandbox:
        await sandbox.exec(python(sandbox), stdin=DEEP.encode(), timeout=60)
        verdict = await _copied(sandbox, "deep", 15)
        if isinstance(verdict, Held):
            verdict = await _alive(sandbox)
        begin = time.monotonic()
        await sandbox.close()
        if time.monotonic() - begin > 15:
            return Fell(f"its removal took {time.monotonic() - begin:.0f} s")
    return verdict


@resources.attack("sparse file", "have a file of 4 TB without content copied to the owner's disk", is_executors=True)
async def sparse_file(target: AttackTarget) -> Verdict:
    await target.sandbox.exec("mkdir -p sparse && truncate -s 4T sparse/file", timeout=30)
    try:
        made = await target.sandbox.exec("stat -c %s sparse/file", timeout=30)
        if made.stdout.strip() != b"4398046511104":
            raise Skipped("the file system inside has no such files")
        try:
            await target.sandbox.read_bytes("sparse/file")
            return Fell("it was read whole")
        except OSError:
            pass
        return await _copied(target.sandbox, "sparse", 10)
    finally:
        await target.sandbox.exec("rm -rf sparse", timeout=30)


@resources.attack(
    "passed descriptors", "pass as many descriptors as a user may, so that no sandbox starts", is_heavy=True
)
async def passed_descriptors(target: AttackTarget) -> Verdict:
    async with target.another() as sandbox, target.another() as bystander:
        await sandbox.write_bytes("passing.py", PASSING.encode())
        await sandbox.start(f"exec {python(sandbox)} < passing.py > passed")
        await sandbox.exec("until test -s passed; do sleep 0.05; done", timeout=20)
        try:
            async with target.another() as later:
                verdict = await _alive(later)
        except BackendError as error:
            verdict = Fell(f"no sandbox can be made: {error}")
        other = await _alive(bystander)
        return Fell(f"another sandbox ended: {other.detail}") if isinstance(other, Fell) else verdict


@resources.attack("many files", "have 100,000 files copied", is_heavy=True)
async def many_files(target: AttackTarget) -> Verdict:
    async with target.another() as sandbox:
        await sandbox.exec("mkdir many && cd many && seq 100000 | xargs touch", timeout=120)
        return await _copied(sandbox, "many", 120)


MOST = 3 << 29
"""Bytes of a copy on this machine's disk at which an attack has succeeded, and is ended."""


async def _copied(sandbox: Sandbox, folder: str, seconds: float) -> Verdict:
    """Copy a folder of the sandbox. Held: it succeeds, or is refused with an `OSError`, in time and within bounds."""
    with tempfile.TemporaryDirectory(prefix="lachesis-attack-") as local:
        copying = asyncio.create_task(sandbox.download_dir(folder, local))
        begin = time.monotonic()
        try:
            while not copying.done():
                await asyncio.wait([copying], timeout=0.1)
                if _size(local) > MOST or time.monotonic() - begin > seconds:
                    return Fell(f"after {time.monotonic() - begin:.0f} s, {_size(local)} bytes are on this disk")
            await copying
            return Held()
        except OSError as error:
            return Held(str(error)[:200])
        except Exception as error:
            return Fell(f"copying raises {type(error).__name__}: {str(error)[:200]}")
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
            _remove(local)


def _size(folder: str) -> int:
    """The bytes of the files in a folder, without its subfolders."""
    sizes = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                sizes += entry.stat(follow_symlinks=False).st_size
    return sizes


def _remove(folder: str) -> None:
    """Empty a folder of any depth."""
    while inner := next(iter(Path(folder).glob("*/")), None):
        if any(inner.iterdir()) and inner.is_dir() and not inner.is_symlink():
            for entry in list(inner.iterdir()):
                entry.rename(Path(folder) / f"{entry.name}-{os.urandom(4).hex()}")
        if inner.is_dir():
            inner.rmdir()


@resources.attack(
    "output", "write 200 MB to each stream: the owner keeps what was asked for, and counts the rest", is_executors=True
)
async def output_flood(target: AttackTarget) -> Verdict:
    return await _flood(target, 200_000_000)


@resources.attack("output of gigabytes", "write 3 GB to each stream", is_heavy=True)
async def output_of_gigabytes(target: AttackTarget) -> Verdict:
    return await _flood(target, 3_000_000_000)


async def _flood(target: AttackTarget, size: int) -> Verdict:
    command = f"head -c {size} /dev/zero >&2 & head -c {size} /dev/zero; wait"
    result = await target.sandbox.exec(command, timeout=300, max_output=1000)
    kept = (len(result.stdout), len(result.stderr), result.stdout_elided, result.stderr_elided)
    if kept != (1000, 1000, size - 1000, size - 1000):
        return Fell(f"kept and counted: {kept}")
    return await _alive(target.sandbox)
