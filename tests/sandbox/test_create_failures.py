"""Whatever keeps a sandbox from being made, `create` says so as a `BackendError` with the cause, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import platform
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends import BackendError, SandboxSpec, create_backend
from backends.host.machine import Machine

# Makes sandboxes under a condition, and again after it: prints the kind and the text of each failure.
ATTEMPTS = """
import asyncio, contextlib, os, resource, sys, tempfile
from pathlib import Path
from backends import SandboxSpec, create_backend
from backends.host import records

condition, isolation = sys.argv[1:]
backend = create_backend("local", isolation=isolation)

def limited(name, more):
    number = getattr(resource, name)
    soft, hard = resource.getrlimit(number)
    resource.setrlimit(number, (more, hard))
    return lambda: resource.setrlimit(number, (soft, hard))

def full():
    free = os.statvfs(tempfile.gettempdir())
    with open(tempfile.gettempdir() + "/full", "wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return lambda: os.unlink(tempfile.gettempdir() + "/full")

def readonly():
    folder = tempfile.gettempdir()
    assert os.system(f"mount -o remount,ro {folder}") == 0
    return lambda: os.system(f"mount -o remount,rw {folder}")

def processes():
    group = Path("/sys/fs/cgroup/pids") / os.environ["GROUP"]
    (group / "pids.max").write_text((group / "pids.current").read_text())
    return lambda: (group / "pids.max").write_text("max")

async def main():
    if condition == "processes":
        (Path("/sys/fs/cgroup/pids") / os.environ["GROUP"] / "cgroup.procs").write_text("0")
    await (await backend.create(SandboxSpec())).close()
    if condition == "files":
        undo = limited("RLIMIT_NOFILE", len(os.listdir("/proc/self/fd")) + int(os.environ["MORE"]))
    else:
        undo = {"full": full, "readonly": readonly, "processes": processes}[condition]()
    results = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(8)), return_exceptions=True)
    undo()
    for result in results:
        if isinstance(result, BaseException):
            print([kind.__name__ for kind in type(result).__mro__][:-3], result)
        else:
            await result.close()
    sandbox = await backend.create(SandboxSpec())
    print((await sandbox.exec("echo works again", timeout=20)).stdout.decode())
    await sandbox.close()
    await backend.reap()  # what could not be removed for want of descriptors
    print("left:", await backend.sandboxes(), records.folder().exists())

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = Path(tempfile.mkdtemp(prefix="lachesis-test-"))
    mounting = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode != 0:
        folder.rmdir()
        pytest.skip("this user cannot mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


@pytest.mark.sample(5)
@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
@pytest.mark.parametrize(
    ("condition", "more", "cause"),
    [
        *(("files", more, os.strerror(errno.EMFILE)) for more in (0, 9)),
        ("full", 0, os.strerror(errno.ENOSPC)),
        ("readonly", 0, os.strerror(errno.EROFS)),
        ("processes", 0, "(can't start new thread|Resource temporarily unavailable)"),
    ],
)
def test_a_real_cause_is_named_and_nothing_is_left(
    disk: Path, isolation: str, condition: str, more: int, cause: str
) -> None:
    # In their namespaces others may have the process id of this one.
    group = Path("/sys/fs/cgroup/pids") / f"lachesis-test-{secrets.token_hex(8)}"
    if condition == "processes":
        try:
            group.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, condition, isolation],
        env={**os.environ, "TMPDIR": str(disk), "MORE": str(more), "GROUP": group.name},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    with contextlib.suppress(FileNotFoundError):
        group.rmdir()
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith("[")]
    assert done.returncode == 0 and failures, (done.stdout, done.stderr)
    for line in failures:
        assert "'BackendError'" in line and re.search(cause, line), line
    assert lines[-3:] == ["works again", "", "left: [] False"], (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM])
@pytest.mark.parametrize("late", [False, True])
def test_a_shortage_makes_no_sandbox_weaker(number: int, late: bool, tmp_path: Path) -> None:
    """The first trial of bubblewrap fails for it, or the one of a prepared executor."""

    def run(command: list[str], disk: object, prepared: object = None) -> str:
        tried.append(prepared)
        return os.strerror(number) if len(tried) == 1 + late else ""

    tried: list[object] = []
    machine = Machine(run, "/bin/true", prepares=True)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        machine.found()
    assert raised.value.errno == number and machine.bwrap is None
    tried += [None] * 9
    assert machine.found().joined and machine.found().disable_userns and machine.found().disk


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
@pytest.mark.parametrize("kind", ["missing", "read-only", "a file"])
def test_a_tmpdir_that_cannot_be_used_is_named(isolation: str, kind: str, disk: Path) -> None:
    """Where every other folder for temporary files is one that cannot be written, as in a read-only container."""
    folder = disk / "tmpdir"
    script = f"""
import asyncio, tempfile
from backends import BackendError, SandboxSpec, create_backend
tempfile._candidate_tempdir_list = lambda: [{str(folder)!r}]
async def main():
    try:
        await create_backend("local", isolation={isolation!r}).create(SandboxSpec())
    except BackendError as error:
        print(error)
asyncio.run(main())
"""
    if kind != "missing":
        folder.mkdir() if kind == "read-only" else folder.touch()
    if kind == "read-only":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=4k", "none", str(folder)], check=True)
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    finally:
        if kind == "read-only":
            subprocess.run(["umount", str(folder)], check=True)
        if kind != "missing":
            folder.rmdir() if kind == "read-only" else folder.unlink()
    assert "No usable temporary directory" in done.stdout and "set TMPDIR to a folder" in done.stdout, done
    assert done.stdout.count("\n") == 1 and done.stderr == "", done


JSON = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
VERSION = f'{{"ApiVersion": "1.41", "Version": "20", "Os": "linux", "Arch": "{ARCHITECTURE}"}}'
INFO = '{"NCPU": 2}'
ANSWERS = {
    "no HTTP": lambda path: "\0garbage\r\n\r\n",
    "nothing": lambda path: "",
    "a page": lambda path: "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    "no JSON": lambda path: JSON.format(2, "{]"),
    "another JSON": lambda path: JSON.format(2, "[]"),
    "half of it": lambda path: JSON.format(20, '{"Api'),
    "nonsense, later": lambda path: JSON.format(
        *next(
            ((len(text), text) for end, text in (("version", VERSION), ("info", INFO)) if path.endswith(end)), (2, "[]")
        )
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_an_engine_that_answers_garbage_is_named(kind: str, tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWERS[kind](head.split()[1].decode().partition("?")[0]).encode())
        writer.close()

    url = f"unix://{tmp_path}/engine"
    async with await asyncio.start_unix_server(serve, tmp_path / "engine"):
        backend = create_backend("docker", url=url)
        assert (await backend.check()).ok is (kind == "nonsense, later"), "it raises nothing"
        for call in (backend.create(SandboxSpec()), backend.sandboxes(), backend.reap()):
            try:
                assert await call == [], "no sandbox"
            except BackendError as error:
                assert url in str(error) and "\n" not in str(error)
