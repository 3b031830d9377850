"""Time, memory and space that run out, lines that break, and commands that attack: each has its documented result,
and afterwards nothing is left on this machine. All from outside, on every backend.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sandbox_watch import host_processes, output, stopped, until

from backends import Backend, BackendError, BackendUnavailable, Sandbox, SandboxLost, SandboxSpec
from backends import create_backend as create
from backends.host import cgroups
from backends.owner import this_owner
from tests.support.docker_engine import BARE_IMAGE, DockerEngine, docker_engine
from tests.support.leftovers import Leftovers
from tests.support.ssh_engine import FaultyWire

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PRIVATE_PIDS = ["local-bubblewrap", "docker", "singularity", "ssh"]
"""Variants whose executor is PID 1 of its namespace, so that nothing inside can signal it."""
CUTTABLE = ["docker", "ssh", "modal"]
"""Variants that reach their executor over something that may break, and come back."""
LIMITS: dict[str, int] = {"memory_bytes": 160 * MIB, "pids": 80, "disk_bytes": 16 * MIB}
UNENFORCED = {"local-none": ["disk_bytes"], "modal": ["pids", "disk_bytes"]}


@dataclass
class Place:
    """A backend under test, and whatever tells from outside what its sandboxes leave."""

    name: str
    backend: Backend
    engine: Any
    """What its fixture yields; None for the local ones."""

    @property
    def folders(self) -> list[Path]:
        """Folders that are this backend's alone."""
        if self.name == "docker":
            return [self.engine.folder / "data/containers", self.engine.folder / "data/overlay2"]
        if self.name == "ssh":
            return [self.engine.state]
        return [self.engine.folder] if self.name == "modal" else []

    @contextlib.asynccontextmanager
    async def opened(self, **fields: Any) -> AsyncIterator[Sandbox]:
        """A new sandbox, of which nothing may be left after it is closed."""
        mark = uuid.uuid4().hex
        env = {**fields.pop("env", {}), "MARK": mark}
        leftovers = Leftovers(self.folders)
        sandbox = await self.backend.create(SandboxSpec(env=env, **fields))
        try:
            await sandbox.start("sleep 1000")
            assert await until(lambda: host_processes(mark) != [])
            await asyncio.to_thread(leftovers.watch, mark, sandbox.id)
            assert len(await asyncio.to_thread(leftovers.left)) >= 2, "it and its executor, while it lives"
            yield sandbox
        finally:
            await sandbox.close()
        assert await asyncio.to_thread(leftovers.left_after) == []
        assert sandbox.id not in [info.id for info in await self.backend.sandboxes() if info.owner == this_owner()]


ENGINES = {"docker": "docker", "ssh": "ssh", "singularity": "singularity", "pool": "pool", "modal": "modal_server"}


@pytest.fixture
def place(request: pytest.FixtureRequest, backend: Backend) -> Place:
    name: str = request.node.callspec.params["backend"]
    return Place(name, backend, request.getfixturevalue(ENGINES[name]) if name in ENGINES else None)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared() -> AsyncIterator[dict[str, Sandbox]]:
    """A sandbox of each backend for all tests that leave it usable."""
    async with contextlib.AsyncExitStack() as stack:
        sandboxes: dict[str, Sandbox] = {}
        yield sandboxes
        for sandbox in sandboxes.values():
            stack.push_async_callback(sandbox.close)


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(place: Place, shared: dict[str, Sandbox]) -> Sandbox:
    if place.name not in shared:
        shared[place.name] = await place.backend.create(SandboxSpec())
    return shared[place.name]


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", names, indirect=True)


WALLED = only("local-bubblewrap", "docker", "singularity", "ssh", "modal")

# --- time ------------------------------------------------------------------------------------------------------------

CHILDREN = {
    "foreground": "sleep {mark}",
    "background": "sleep {mark} & wait",
    "setsid": "setsid sleep {mark} & setsid sleep {mark} & sleep {mark}",
    "deaf": "trap '' TERM INT HUP QUIT; (trap '' TERM; sleep {mark}) & sleep {mark}; sleep {mark}",
    "double fork": "(setsid bash -c '(setsid sleep {mark} &) ; exit' &) ; sleep {mark}",
    "closed output": "exec >&- 2>&-; sleep {mark}",
    "closed everything": 'for fd in /proc/self/fd/*; do eval "exec ${{fd##*/}}>&-"; done; sleep {mark}',
    "flood": "yes {mark} >&2",
}


@pytest.mark.slow
async def test_a_time_limit_holds_for_every_kind_of_child(sandbox: Sandbox) -> None:
    """All at once: what ends one command must not touch another."""
    mark = str(uuid.uuid4().int)[:12]
    bystander = await sandbox.start("sleep 1000")
    results = await asyncio.gather(
        *(
            stopped(sandbox, f"echo err >&2; echo out; {command.format(mark=mark)}; echo survived", 1)
            for command in CHILDREN.values()
        )
    )
    assert host_processes(mark) == []
    for name, result in zip(CHILDREN, results, strict=True):
        assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"out\n"), name
        assert result.stderr.startswith(b"err\n"), name
        assert result.duration >= 1, name
    assert (await bystander.status()).exit_code is None
    await bystander.kill()
    assert await output(sandbox, "echo usable") == "usable"


DEADLINES = ["attaching", "connection", "byte_stream", "sandbox", "transfer", "lease", "host/sandbox", "host/sandboxes"]
DEADLINES += ["host/spawner", "host/spawn_server", "host/starting", "host/supervisor", "ssh/link"]
DEADLINES += sorted(f"executor/{file.stem}" for file in (ROOT / "backends/executor").glob("*.py"))


@pytest.mark.parametrize("module", DEADLINES)
async def test_no_deadline_is_kept_by_a_clock_that_can_be_set(module: str) -> None:
    """What keeps deadlines reads no clock that somebody may turn; elsewhere it dates what is listed."""
    calls = {
        f"{node.func.value.id}.{node.func.attr}"
        for node in ast.walk(ast.parse((ROOT / f"backends/{module}.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    }
    assert calls.isdisjoint({"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now"})
    imported = (ROOT / f"backends/{module}.py").read_text()
    assert "from time import" not in imported
    assert "import datetime" not in imported


# --- output ----------------------------------------------------------------------------------------------------------

# In a separate process: the test measures the memory of the owner, without the tests and their engines.
LADDER = r"""
import asyncio, gc, json, sys
from pathlib import Path
from backends import SandboxSpec, create_backend

def memory(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name + ":"))

async def main():
    asked = json.loads(sys.stdin.read())
    options = asked["options"]
    if "modal" in asked:
        import modal
        from modal_proto import api_pb2
        url, *credentials = asked["modal"]
        options["client"] = modal.Client(url, api_pb2.CLIENT_TYPE_CLIENT, tuple(credentials))
        await options["client"].__aenter__()
    sandbox = await create_backend(asked["backend"], **options).create(SandboxSpec())
    await sandbox.exec("true", timeout=30)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, seen = memory("VmRSS"), []
    for size in asked["sizes"]:
        floods = f"{{ yes 1234567 | head -c {size}; }} & {{ yes abcdefg | head -c {size} >&2; }} & wait"
        result = await sandbox.exec(floods, timeout=100)
        for shown, elided, line in (
            (result.stdout, result.stdout_elided, b"1234567\n"),
            (result.stderr, result.stderr_elided, b"abcdefg\n"),
        ):
            head = len(shown) // 2 if elided else len(shown)
            at = (head + elided) % 8
            tail = shown[head:]
            right = shown[:head] == (line * (head // 8 + 1))[:head]
            right = right and tail == (line * (len(tail) // 8 + 2))[at : at + len(tail)]
            seen.append([size, len(shown), elided, right, result.exit_code])
    grown = memory("VmHWM") - before
    alive = (await sandbox.exec("echo usable", timeout=30)).stdout.decode()
    await sandbox.close()
    print(json.dumps([seen, grown, alive]))
    if "modal" in asked:
        await options["client"].__aexit__(None, None, None)

asyncio.run(main())
"""


@pytest.mark.sample(3)
async def test_the_output_ladder(place: Place) -> None:
    sizes = [1000, 65_536, 1_000_000, 16_000_000]
    sizes += [100_000_000] if place.name in ("local-bubblewrap", "docker") else []
    asked: dict[str, Any] = {"backend": place.name.partition("-")[0], "options": {}, "sizes": sizes}
    if place.name == "modal":
        asked["modal"] = [place.engine.url, *place.engine.credentials]
    elif place.name == "local-none":
        asked["options"] = {"isolation": "none"}
    elif place.engine is not None:
        asked["options"] = place.engine.options
    child = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", LADDER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(400):
            answer, _ = await child.communicate(json.dumps(asked).encode())
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    seen, grown, alive = json.loads(answer)
    kept = 1_000_000
    assert seen == [[size, min(size, kept), max(0, size - kept), True, 0] for size in sizes for _ in range(2)]
    assert alive == "usable\n"
    assert grown <= 16 * MIB


async def test_a_command_without_any_output_left_is_waited_for(sandbox: Sandbox) -> None:
    begin = time.monotonic()
    gone = "exec <&- >&- 2>&-; sleep 0.7; echo late > late; exit 7"
    result = await sandbox.exec(f"echo seen; {gone}", timeout=30)
    assert (result.exit_code, result.stdout, result.timed_out) == (7, b"seen\n", False)
    assert time.monotonic() - begin >= 0.7
    assert await sandbox.read_bytes("late") == b"late\n"


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fields(place: Place) -> dict[str, int]:
    """The limits that it keeps here."""
    here = {name: limit for name, limit in LIMITS.items() if name not in UNENFORCED.get(place.name, [])}
    if place.name != "docker" and not {"memory", "pids"} <= set(cgroups.find().parents):
        pytest.skip(cgroups.describe(cgroups.find()))
    return here


@only(*UNENFORCED)
async def test_a_limit_that_nobody_would_keep_is_refused_by_name(place: Place) -> None:
    for field in UNENFORCED[place.name]:
        with pytest.raises(BackendUnavailable, match=rf"{field}.*Next step: "):
            await place.backend.create(SandboxSpec(**{field: LIMITS[field]}))  # type: ignore[arg-type]


@pytest.mark.sample(2)
@only("local-bubblewrap", "local-none", "docker", "singularity", "ssh")
async def test_memory_processes_and_disk_run_out_and_the_sandbox_lives_on(place: Place, fields: dict[str, int]) -> None:
    mark = uuid.uuid4().hex
    async with place.opened(**fields, env={"BOMB": mark}) as sandbox:
        for greedy in ("x = bytearray(600 << 20)", "x = [b'x' * (1 << 20) + bytes([i & 255]) for i in range(600)]"):
            result = await sandbox.exec(f"echo begun; python3 -c {greedy!r}; echo $?; kill -9 $$", timeout=60)
            assert (result.exit_code, result.stdout) == (137, b"begun\n137\n"), result
        bomb = await stopped(sandbox, "echo lit; bomb() { bomb | bomb & }; bomb; sleep 1000", 1)
        assert (bomb.exit_code, bomb.timed_out, bomb.stdout) == (124, True, b"lit\n")
        assert await output(sandbox, "echo alive") == "alive"
        assert await until(lambda: len(host_processes(mark)) <= 4), "one in the background, and shells that wait"
        if "disk_bytes" in fields:
            filled = "head -c 64M /dev/zero > ./fill; head -c 64M /dev/zero > /tmp/fill; seq 300000; echo end"
            full = await sandbox.exec(f"cd; {filled}", timeout=60, max_output=1000)
            assert full.stderr.count(b"No space left on device") >= 2, full.stderr
            assert (full.exit_code, full.stdout[-4:]) == (0, b"end\n")
            assert full.stdout_elided == sum(len(f"{i}\n") for i in range(1, 300_001)) + 4 - 1000
            with pytest.raises(OSError, match="No space left"):
                await sandbox.write_bytes("/tmp/more", b"x" * (32 * MIB))
            assert await output(sandbox, "rm ~/fill /tmp/fill; echo x > /tmp/again; cat /tmp/again") == "x"


@only(*PRIVATE_PIDS)
async def test_files_in_memory_cannot_take_it_all(place: Place, fields: dict[str, int]) -> None:
    """What they take is given back by nobody's death: without room for the executor, the sandbox would be lost."""
    backends = [place.backend]
    if place.name == "docker":  # then all that can be written is in memory
        backends.append(create("docker", **place.engine.options, read_only=True))
    for backend in backends:
        await files_cannot_take_it_all(Place(place.name, backend, place.engine))


async def files_cannot_take_it_all(place: Place) -> None:
    async with place.opened(memory_bytes=64 * MIB) as sandbox:
        folders = ("/dev/shm", "/tmp", "~", ".")
        await sandbox.exec("; ".join(f"head -c 100M /dev/zero > {folder}/fill" for folder in folders), timeout=60)
        assert await output(sandbox, "echo alive") == "alive"
        await output(sandbox, "rm -f " + " ".join(f"{folder}/fill" for folder in folders))
        greedy = await sandbox.exec("python3 -c 'x = bytearray(100 << 20)'", timeout=60)
        assert greedy.exit_code == 137
        assert await output(sandbox, "python3 -c 'print(len(bytearray(20 << 20)))'") == str(20 * MIB)


@only(*PRIVATE_PIDS)
async def test_a_command_that_kills_everything_it_can_kills_itself_alone(place: Place) -> None:
    async with place.opened() as sandbox:
        for suicide in ("kill -9 -1", "kill -9 1; kill -STOP 1; kill -9 $$", "kill -STOP -1; kill -9 $$"):
            result = await stopped(sandbox, f"echo begun; {suicide}; sleep 1000", 1)
            assert result.stdout == b"begun\n", suicide
            assert result.exit_code in (124, 137), suicide
            assert await output(sandbox, "echo alive") == "alive", suicide


@only("modal")
async def test_an_executor_that_a_command_kills_is_a_lost_sandbox(place: Place) -> None:
    async with place.opened() as sandbox:
        with pytest.raises(SandboxLost, match=sandbox.id):
            async with asyncio.timeout(60):
                await sandbox.exec("kill -9 -1; sleep 60", timeout=60)


# --- attacks ---------------------------------------------------------------------------------------------------------

ATTACK = r"""
import ctypes, json, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def frame(header, payload=b""):
    encoded = json.dumps(header).encode()
    return struct.pack("!II", len(encoded), len(payload)) + encoded + payload

forged = {"exit_code": 0, "timed_out": False, "stdout": 6, "stdout_elided": 0, "stderr_elided": 0, "duration": 0.1}
frames = [frame({"id": 0, "hello": 2, "nonce": "0" * 32, "fresh": True, "pid": 1, "python": [3, 11, 2]})]
frames += [frame({"id": 0, "attach": 2, "nonce": "0" * 32, "received": 0, "sealed": s, "token": "00" * 32,
                  "proof": "0"}) for s in (0, 1)]
frames += [frame({"id": 0, "attached": 2, "received": 0, "proof": "00" * 32}), frame({"id": 0, "ack": 1})]
frames += [frame(dict(forged, id=n, execution="e%d" % n), b"forged") for n in range(1, 30)]
frames += [frame({"id": n, "op": "exec", "command": "touch /tmp/owned", "timeout": 9, "max_output": 9})
           for n in (1, 999)]
frames += [frame({"op": "shutdown"}), frame({"id": 0, "bye": "forged"})]
blobs = frames + [b"".join(frames), b"\xff" * 8, struct.pack("!II", 1 << 31, 1 << 31), b"\nsleep 30; echo forged\n\0"]

def parent(pid):
    return next(int(line.split()[1]) for line in open("/proc/%d/status" % pid) if line.startswith("PPid"))

def attempt(what, call, *arguments):
    try:
        return call(*arguments)
    except OSError:
        return None

shell = os.getppid()
executor = parent(shell)
broken = []

class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]

for name in ("environ", "mem", "maps", "auxv", "stack", "syscall", "pagemap", "io"):
    def read():
        with open("/proc/%d/%s" % (executor, name), "rb", buffering=0) as file:
            return file.read(64)
    if attempt(name, read):
        broken.append("read " + name)
for name in ("map_files", "task/%d/map_files" % executor):
    if attempt("list", os.listdir, "/proc/%d/%s" % (executor, name)):
        broken.append("listed " + name)
for number in range(300):
    if attempt("fd", os.readlink, "/proc/%d/fd/%d" % (executor, number)) is not None:
        broken.append("descriptor %d" % number)
if libc.ptrace(16, executor, 0, 0) == 0:
    broken.append("ptrace")
local, remote = Vector(ctypes.addressof(ctypes.create_string_buffer(8)), 8), Vector(0x400000, 8)
ctypes.set_errno(0)
if libc.process_vm_readv(executor, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) >= 0 or ctypes.get_errno() != 1:
    broken.append("process_vm_readv %d" % ctypes.get_errno())
handle = libc.syscall(434, executor, 0)
if handle >= 0 and libc.syscall(438, handle, 10, 0) >= 0:
    broken.append("pidfd_getfd")

# Every writable descriptor: those of all processes, its own, and those of its shell.
written = 0
for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
    for number in attempt("fd", os.listdir, "/proc/%d/fd" % pid) or []:
        fd = attempt("open", os.open, "/proc/%d/fd/%s" % (pid, number), os.O_WRONLY | os.O_NONBLOCK)
        if fd is not None:
            for blob in blobs:
                written += attempt("write", os.write, fd, blob) or 0
            os.close(fd)
for fd in range(300):
    for blob in blobs:
        try:
            os.set_blocking(fd, False)
            written += os.write(fd, blob)
        except OSError:
            break

reached = set()
names = {line.split()[7] for line in open("/proc/net/unix") if len(line.split()) == 8}
names |= {os.path.join(root, name) for top in ("/run", "/tmp", "/var/run", "/dev") for root, _, files in os.walk(top)
          for name in files}
for name in names | {"@lachesis"}:
    address = "\0" + name[1:] if name.startswith("@") else name
    for blob in (*frames[:5], frames[-1], frames[-2], *blobs[-4:]):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(0.05)
        if connection.connect_ex(address) == 0:
            reached.add(name)
            attempt("send", connection.sendall, blob)
            attempt("recv", connection.recv, 65536)
        connection.close()
for folder in ("/.lachesis", "/run/lachesis-link", "/run", "/dev/shm"):
    os.system("rm -rf %s 2>/dev/null; mv %s /tmp/taken 2>/dev/null; touch %s/x 2>/dev/null" % (folder, folder, folder))
with open(sys.argv[1], "w") as file:
    json.dump({"executor": executor, "broken": broken, "written": written, "reached": sorted(reached)}, file)
"""

# Writes a long command for every prewarmed shell; with "go", it makes them begin.
POISON = r"""
import os, sys
for pid in [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (os.getpid(), os.getppid())]:
    for number, text in ((213, b"echo forged; %s; exit 0\n" % (b":" * 400)), (212, b"\n")):
        try:
            if number == 213 or sys.argv[1] == "go":
                fd = os.open("/proc/%s/fd/%d" % (pid, number), os.O_WRONLY)
                os.write(fd, text)
                print("reached")
        except OSError:
            pass
"""

# Whether the inverse of what is given can be read anywhere: in memory, variables, files.
SEARCH = r"""
import os, sys
secret = bytes(255 - byte for byte in sys.stdin.buffer.read())
needles = [secret, secret.hex().encode()]
found = []
for pid in [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
    for name in ("environ", "cmdline"):
        try:
            if any(needle in open("/proc/%s/%s" % (pid, name), "rb").read() for needle in needles):
                found.append((pid, name))
        except OSError:
            pass
    try:
        with open("/proc/%s/maps" % pid) as maps, open("/proc/%s/mem" % pid, "rb", buffering=0) as memory:
            for line in maps:
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                try:
                    memory.seek(begin)
                    if any(needle in memory.read(min(end - begin, 1 << 26)) for needle in needles):
                        found.append((pid, line))
                except (OSError, OverflowError, ValueError):
                    pass
    except OSError:
        pass
print(found)
"""


@WALLED
async def test_an_attack_on_all_that_can_be_reached_forges_and_reveals_nothing(place: Place) -> None:
    async with place.opened() as sandbox, place.opened() as other:
        await sandbox.write_bytes("attack.py", ATTACK.encode())
        elsewhere = asyncio.create_task(other.exec("sleep 1; echo theirs; exit 5", timeout=30))
        await sandbox.write_bytes("poison.py", POISON.encode())
        reached = set()
        for how in ("stay", "go") * 100:
            if (await sandbox.exec(f"python3 poison.py {how}", timeout=20)).stdout:
                reached.add(how)
            result = await sandbox.exec("echo right; exit 7", timeout=20)
            assert (result.exit_code, result.stdout, result.stderr) == (7, b"right\n", b"")
            if reached == {"stay", "go"}:
                break
            await asyncio.sleep(0.05)  # shells are started ahead when there is nothing else to do
        assert reached == {"stay", "go"}
        await sandbox.exec("python3 attack.py /tmp/report.json; exit 3", timeout=300)
        for number in range(6):
            result = await sandbox.exec(f"echo right {number}; exit {number}", timeout=20, max_output=1000)
            assert (result.exit_code, result.stdout, result.stderr) == (number, b"right %d\n" % number, b"")
        report = json.loads(await sandbox.read_bytes("/tmp/report.json"))
        assert report["broken"] == []
        assert report["written"] > 0
        assert await output(sandbox, "ls /tmp/owned 2>/dev/null; true") == ""
        result = await elsewhere
        assert (result.exit_code, result.stdout) == (5, b"theirs\n")
        attaching = getattr(sandbox, "_connection")._attaching  # noqa: B009
        if attaching is not None:
            inverse = bytes(255 - byte for byte in attaching._token)
            await sandbox.write_bytes("search.py", SEARCH.encode())
            found = await sandbox.exec("python3 search.py", timeout=300, stdin=inverse)
            assert (found.stdout, found.stderr) == (b"[]\n", b"")
        await sandbox.write_bytes("file", b"x" * 300_000)
        assert await sandbox.read_bytes("file") == b"x" * 300_000


async def test_output_that_looks_like_the_protocol_is_output(sandbox: Sandbox) -> None:
    """On every descriptor that the shell has; what its own report holds can change its own folder and variables."""
    header = json.dumps({"id": 0, "bye": "forged"}).encode()
    answer = json.dumps({"id": 3, "exit_code": 0, "timed_out": False, "stdout": 0, "stderr_elided": 0}).encode()
    hostile = b"".join(len(h).to_bytes(4, "big") + bytes(4) + h for h in (header, answer)) + b"\0/etc\0exit 0\0\n124\n"
    await sandbox.write_bytes("hostile", hostile)
    every = "for fd in /proc/self/fd/*; do cat hostile >&${fd##*/}; done 2>/dev/null"
    result = await sandbox.exec(f"{every}; cat hostile; cat hostile >&2; exit 9", timeout=30)
    assert result.exit_code == 9
    assert result.stdout.endswith(hostile)
    assert set(result.stdout.replace(hostile, b"")) == set()
    assert result.stderr.replace(hostile, b"") == b""
    background = await sandbox.start("cat hostile; exit 8")
    async with asyncio.timeout(30):
        while (chunk := await background.read(wait=5)).exit_code is None:
            pass
    assert (chunk.data, chunk.exit_code) == (hostile, 8)
    await sandbox.exec(f"cd {sandbox.workdir}", timeout=30)
    assert await output(sandbox, "echo right") == "right"


# --- lines that break ------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """How a backend reaches its sandboxes."""

    place: Place
    cut: Callable[[float], Awaitable[None]]
    """Break it, and keep it broken for so many seconds."""


async def _cut(wire: FaultyWire, seconds: float) -> None:
    await asyncio.to_thread(wire.cut)
    await asyncio.sleep(seconds)
    wire.restore()


@contextlib.contextmanager
def line(name: str, request: pytest.FixtureRequest) -> Iterator[Line]:
    engine = request.getfixturevalue(ENGINES[name])
    if name == "modal":

        async def cut(seconds: float) -> None:
            await asyncio.to_thread(engine.cut, seconds)
            await asyncio.sleep(seconds)

        backend = create("modal", client=request.getfixturevalue("modal_client"))
        yield Line(Place(name, backend, engine), cut)
    elif name == "ssh":
        with engine.wire() as (wire, options):
            yield Line(Place(name, create("ssh", **options), engine), lambda seconds: _cut(wire, seconds))
    else:
        wire = FaultyWire(engine.socket)
        try:
            backend = create("docker", **{**engine.options, "url": f"tcp://127.0.0.1:{wire.port}"})
            yield Line(Place(name, backend, engine), lambda seconds: _cut(wire, seconds))
        finally:
            wire.close()


async def broken_again_and_again(line: Line) -> None:
    place = line.place
    async with place.opened() as sandbox:
        done, breaking = 0, True

        async def work() -> None:
            nonlocal done
            while breaking or done < 12:
                payload = secrets.token_bytes(100_000)
                result = await sandbox.exec(f"echo {done} >> counter; sleep 0.1; cat", timeout=200, stdin=payload)
                assert (result.exit_code, result.stdout) == (0, payload), place.name
                done += 1

        async def disturb() -> None:
            nonlocal breaking
            for seconds in (0.0, 0.2, 0.0, 5.0, 0.1):
                await asyncio.sleep(0.35)
                await line.cut(seconds)
            breaking = False

        async with asyncio.timeout(300):
            long = asyncio.create_task(sandbox.exec("echo long >> long; sleep 6; echo end; exit 4", timeout=200))
            await asyncio.gather(work(), disturb())
            result = await long
        assert (result.exit_code, result.stdout) == (4, b"end\n"), place.name
        assert await output(sandbox, "cat counter") == "\n".join(map(str, range(done))), place.name
        assert await output(sandbox, "cat long") == "long", place.name


@pytest.mark.slow
async def test_commands_run_once_and_in_order_however_the_line_breaks(request: pytest.FixtureRequest) -> None:
    """On all lines at once, as it is mostly waiting. One of the cuts lasts 5 s."""
    with contextlib.ExitStack() as stack:
        lines = []
        for name in CUTTABLE:
            with contextlib.suppress(pytest.skip.Exception):
                lines.append(stack.enter_context(line(name, request)))
        if not lines:
            pytest.skip("none of these engines is here")
        async with asyncio.TaskGroup() as group:
            for each in lines:
                group.create_task(broken_again_and_again(each))


async def test_a_remote_engine_killed_in_mid_exec_is_a_lost_sandbox_and_leaves_nothing(
    docker: DockerEngine, roots: Path
) -> None:
    """With the engine its containers go, when it comes back: the command is not run again."""
    mark = str(uuid.uuid4().int)[:12]
    with docker_engine(roots, images=[BARE_IMAGE]) as engine:
        wire = FaultyWire(engine.socket)
        try:
            options = {**engine.options, "image": BARE_IMAGE, "url": f"tcp://127.0.0.1:{wire.port}"}
            sandbox = await create("docker", **options, grace=20).create(SandboxSpec())
            running = asyncio.create_task(sandbox.exec(f"busybox sleep {mark}", timeout=600))
            assert await until(lambda: host_processes(mark) != [])
            engine.kill()
            await asyncio.to_thread(engine.start)
            with pytest.raises(SandboxLost, match=sandbox.id):
                async with asyncio.timeout(180):
                    await running
            with contextlib.suppress(BackendError):
                await sandbox.close()
            assert await until(lambda: host_processes(mark) == [])
            assert await until(lambda: engine.containers() == [])
        finally:
            wire.close()


CROWD = r"""
import socket, time
held = [socket.socket(socket.AF_UNIX) for _ in range(60)]
for connection in held:
    connection.connect("\0lachesis")
print("in", flush=True)
time.sleep(1000)
"""


@only("modal")
async def test_silent_strangers_on_its_socket_do_not_keep_the_owner_out(place: Place) -> None:
    async with place.opened() as sandbox:
        await sandbox.write_bytes("crowd.py", CROWD.encode())
        process = await sandbox.start("exec python3 crowd.py")
        assert (await process.read(wait=60)).data == b"in\n"
        for number in range(3):
            assert await asyncio.to_thread(place.engine.kill_execs, sandbox.id) >= 1
            assert await output(sandbox, f"echo {number} >> counter; cat counter | wc -l") == str(number + 1)


async def test_what_is_left_is_seen() -> None:
    """Of the witness itself: a process that outlives its parent in silence is named by it."""
    mark, leftovers = uuid.uuid4().hex, Leftovers()
    with subprocess.Popen(["/bin/sleep", "1000"], env={"MARK": mark}) as process:  # noqa: ASYNC220
        try:
            assert await until(lambda: host_processes(mark) == [process.pid])
            leftovers.watch(mark)
            assert [line.split(":")[0] for line in leftovers.left()] == [f"process {process.pid}"]
        finally:
            process.kill()
        process.wait()
        assert leftovers.left() == []
