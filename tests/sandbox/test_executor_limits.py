"""What the executor keeps, and moves, is bounded: outputs, files and folders of any size, and what is made of them."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import gc
import io
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from executor_box import Box, Mode, sandbox_over
from hypothesis import given, settings
from hypothesis import strategies as st
from sandbox_watch import until

from backends import SandboxSpec, executor, executor_code
from backends.executor.output import Capped, Spill
from backends.executor.programs import find_python
from backends.extraction import Room, extract
from tests.run import some


def memory(pid: int | str, name: str) -> int:
    """Bytes that /proc/PID/status gives under `name`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{name} is not in /proc/{pid}/status")


def below(box: Box, program: str) -> list[int]:
    """The executor's living children that run `program`; those that move folders are what it is itself."""
    children = Path(f"/proc/{box.process.pid}/task/{box.process.pid}/children").read_text().split()
    stats = []
    for pid in children:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stats.append(Path(f"/proc/{pid}/stat").read_text())
    return [int(stat.split()[0]) for stat in stats if f"({program}" in stat and ") Z " not in stat]


@contextlib.contextmanager
def at_most(size: int, *pids: int | str):  # type: ignore[no-untyped-def]
    """No process grows by more than `size` bytes meanwhile, not even for a moment."""
    gc.collect()
    before = {}
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        before[pid] = memory(pid, "VmRSS")
    yield
    grown = {pid: memory(pid, "VmHWM") - before[pid] for pid in pids}
    assert max(grown.values()) <= size, grown


# --- outputs ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=50)), st.integers(0, 60))
def test_of_any_output_head_and_tail_are_shown_the_rest_counted_and_the_whole_kept(
    parts: list[bytes], limit: int
) -> None:
    whole = b"".join(parts)
    output = Capped(limit, lambda: Spill(lambda size: size))
    for part in parts:
        output.feed(part)
    shown = output.result()
    assert len(shown) == min(limit, len(whole))
    assert output.total == len(whole)
    if len(whole) > limit:
        assert shown == whole[: limit // 2] + whole[len(whole) - (limit - limit // 2) :]
        assert output.spill is not None
        assert b"".join(output.spill.read(0, len(whole))) == whole
        assert b"".join(output.spill.read(3, 4)) == whole[3:7]
    else:
        assert shown == whole


@pytest.mark.slow
async def test_a_flood_of_output_takes_little_memory_and_can_be_read_whole() -> None:
    async with sandbox_over("dial") as (sandbox, box, _):
        with at_most(16 << 20, "self", box.process.pid):
            result = await sandbox.exec("yes 1234567 | head -c 100000000", timeout=60, max_output=10_000)
            assert (len(result.stdout), result.stdout_elided) == (10_000, 99_990_000)
            offset = 0
            while data := await sandbox.read_output(result, offset=offset, limit=1_000_000):
                assert data == b"1234567\n" * 125_000
                offset += len(data)
            assert offset == 100_000_000


async def test_the_whole_of_the_last_four_truncated_outputs_is_kept() -> None:
    async with sandbox_over("dial") as (sandbox, _, __):
        results = [await sandbox.exec(f"seq {i} 100; seq 9 >&2", timeout=20, max_output=20) for i in range(5)]
        for first, result in enumerate(results[1:], 1):
            assert await sandbox.read_output(result, limit=3) == f"{first}\n".encode() + f"{first + 1}\n".encode()[:1]
            assert await sandbox.read_output(result, "stderr", offset=14, limit=99) == b"8\n9\n"
        with pytest.raises(FileNotFoundError, match="no longer kept"):
            await sandbox.read_output(results[0], limit=3)
        assert await sandbox.read_output(results[0], "stderr", limit=3) == b"1\n2", "it was not truncated"


async def test_kept_outputs_take_no_disk_and_newer_ones_the_room_of_older_ones() -> None:
    async with sandbox_over("dial", spec=SandboxSpec(memory_bytes=32 << 20)) as (sandbox, box, _):
        old = await sandbox.exec("yes old | head -c 3000000", timeout=20, max_output=20)
        assert len(await sandbox.read_output(old, limit=4_000_000)) == 3_000_000
        new = await sandbox.exec("yes new | head -c 3000000", timeout=20, max_output=20)
        assert len(await sandbox.read_output(new, limit=4_000_000)) == 3_000_000
        with pytest.raises(FileNotFoundError, match="newer outputs took the room"):
            await sandbox.read_output(old, limit=10)
        large = await sandbox.exec("yes large | head -c 9000000", timeout=20, max_output=20)
        assert len(await sandbox.read_output(large, limit=1 << 22)) == 1 << 22, "an eighth of the memory"
        with pytest.raises(OSError, match="only the first 4194304 bytes of this output of 9000000 bytes could be kept"):
            await sandbox.read_output(large, offset=1 << 22, limit=10)
        files = Path(f"/proc/{box.process.pid}/fd").iterdir()
        kept = [file.readlink().name for file in files if file.stat().st_size > 100_000]
        assert kept == ["memfd:output (deleted)"], "nothing that was kept is on a disk"


async def test_without_room_for_files_what_is_kept_ends_and_not_the_command() -> None:
    async with sandbox_over("dial") as (sandbox, box, _):
        hard = resource.prlimit(box.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(box.process.pid, resource.RLIMIT_FSIZE, (1 << 20, hard))
        result = await sandbox.exec("yes | head -c 5000000; echo end", timeout=20, max_output=1000)
        assert (result.exit_code, result.stdout_elided) == (0, 5_000_004 - 1000)
        assert result.stdout.endswith(b"y\nend\n")
        with pytest.raises(OSError, match="only the first 0 bytes of this output of 5000004 bytes could be kept"):
            await sandbox.read_output(result, limit=10)


async def test_of_many_ended_processes_the_output_of_the_last_is_kept() -> None:
    async with sandbox_over("dial") as (sandbox, box, _):
        for _ in range(60):
            process = await sandbox.start("head -c 1500000 /dev/zero")
            while (await process.read(1_500_000, wait=20)).exit_code is None:
                pass
        assert len((await process.read(1_499_000)).data) == 1000
        assert (await (await sandbox.processes())[0].read(1_499_000)).data == b""
        assert memory(box.process.pid, "VmHWM") < 100 << 20


# --- files and folders -----------------------------------------------------------------------------------------------


async def test_files_of_any_size_move_in_constant_memory() -> None:
    block, count = os.urandom(1 << 20), 96

    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield block

    async with sandbox_over("dial") as (sandbox, box, _):
        with at_most(16 << 20, "self", box.process.pid):
            await sandbox.write_chunks("deep/big", blocks())
            size = 0
            async for part in sandbox.read_chunks("deep/big"):
                begin = size % len(block)
                assert part == (block + block)[begin : begin + len(part)]
                size += len(part)
            assert size == count << 20


async def test_chunks_that_stop_coming_leave_the_old_file() -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"new" * 1_000_000
        raise RuntimeError("no more")

    async with sandbox_over("dial") as (sandbox, _, __):
        await sandbox.write_bytes("file", b"old")
        with pytest.raises(RuntimeError, match="no more"):
            await sandbox.write_chunks("file", broken())
        for path, error in (("missing", FileNotFoundError), (".", IsADirectoryError)):
            with pytest.raises(error):
                async for _ in sandbox.read_chunks(path):
                    pass
        assert (await sandbox.exec("ls -A; cat file", timeout=20)).stdout == b"file\nold"


async def test_a_transfer_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async with sandbox_over("dial") as (sandbox, box, _):
        near, far = tmp_path / "near", box.folder / "work" / "far"
        for folder in (near, far):
            folder.mkdir()
            (folder / "big").touch()
            os.truncate(folder / "big", 1_000_000_000)  # it is given up before all of that is moved
        threads = threading.active_count()
        calls = [sandbox.download_dir("far", tmp_path / "a"), sandbox.upload_dir(near, "up")]
        tasks = [asyncio.ensure_future(call) for call in calls]
        assert await until(lambda: len(below(box, "python")) == 2)
        parts = sandbox.read_chunks("far/big")
        await anext(parts)
        await parts.aclose()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome
        assert await until(lambda: threading.active_count() <= threads)
        assert await until(lambda: not below(box, "python")), "the processes that packed and unpacked"


async def test_who_stops_what_moves_a_folder_gets_an_error_and_loses_no_sandbox(tmp_path: Path) -> None:
    async with sandbox_over("dial") as (sandbox, box, _):
        await sandbox.exec("truncate -s 1000M big", timeout=60)  # more than is moved before it is stopped
        moving = asyncio.ensure_future(sandbox.download_dir(".", tmp_path / "a"))
        while not moving.done():
            for pid in below(box, "python"):  # among them, for a moment, what is about to be a shell
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="was killed"):
            await moving
        assert (await sandbox.exec("echo fine", timeout=20)).stdout == b"fine\n"


def outside(root: Path, inside: Path) -> list[tuple[str, bytes | str | None]]:
    found: list[tuple[str, bytes | str | None]] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if Path(folder, name) != inside]
        found.append((folder, None))
        found += [(f"{folder}/{name}", Path(folder, name).read_bytes()) for name in files]
    return found


def resolved(path: Path) -> Path:
    """Where the kernel ends up; a loop of links is nowhere."""
    try:
        fd = os.open(path, os.O_PATH)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError(path) from None
        raise
    try:
        return Path(f"/proc/self/fd/{fd}").readlink()
    finally:
        os.close(fd)


NAMES = st.lists(st.sampled_from(["a", "b", "c", "..", ".", ""]), min_size=1, max_size=4).map("/".join)
MEMBERS = st.lists(
    st.tuples(
        st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]),
        NAMES,
        NAMES,
    ),
    max_size=8,
)


@settings(max_examples=some(300))
@given(MEMBERS)
def test_no_archive_lands_or_leads_outside_its_folder(members: list[tuple[bytes, str, str]]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for kind, name, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o777
            member.size = 4 if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(b"evil") if member.size else None)
    buffer.seek(0)
    with tempfile.TemporaryDirectory() as root:
        inside = Path(root, "x", "y", "inside")
        inside.mkdir(parents=True)
        for folder in (Path(root), Path(root, "x"), Path(root, "x", "y")):
            (folder / "a").write_bytes(b"good")
        before = outside(Path(root), inside)
        with contextlib.suppress(OSError):
            extract(buffer, str(inside), Room())
        assert outside(Path(root), inside) == before
        for folder, folders, files in os.walk(inside):
            for name in folders + files:
                path = Path(folder, name)
                assert path.is_symlink() or path.is_dir() or path.is_file(), "nothing else comes out of an archive"
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    assert resolved(path).is_relative_to(inside), path


# --- shells that are started ahead -----------------------------------------------------------------------------------


async def test_a_command_is_taken_literally_whichever_shell_runs_it() -> None:
    letters = random.Random(5)
    alphabet = [chr(c) for c in range(1, 0x180) if chr(c) != "'"] + ["\n", "\\", '"', "$x", "`", "漢", "🙂", "\udcff"]
    async with sandbox_over("dial") as (sandbox, _, __):
        for size in (0, 1, 5, 50, 500, 5000, 20_000):
            for env in ({}, {"OTHER": "1"}):
                text = "".join(letters.choices(alphabet, k=size))
                result = await sandbox.exec(f"printf %s '{text}'; exit 9", timeout=20, env=env)
                assert (result.exit_code, result.stdout) == (9, os.fsencode(text))
            for plain in ("a b\t c \\n ", " x  "):
                assert (await sandbox.exec(f"printf %s '{plain}'", timeout=20)).stdout == plain.encode()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_who_kills_or_stops_the_shells_that_wait_does_not_hurt_the_next_command(number: signal.Signals) -> None:
    async with sandbox_over("dial") as (sandbox, box, _):
        await sandbox.exec("true", timeout=20)
        assert await until(lambda: len(below(box, "bash")) == 2), "shells wait for the next commands"
        waiting = below(box, "bash")
        for pid in waiting:
            os.kill(pid, number)
        results = await asyncio.gather(*(sandbox.exec(f"echo {i}; exit {i}", timeout=20) for i in range(3)))
        assert [(result.exit_code, result.stdout) for result in results] == [(i, f"{i}\n".encode()) for i in range(3)]
        assert await until(lambda: set(below(box, "bash")).isdisjoint(waiting) and len(below(box, "bash")) == 2)
        waiting = below(box, "bash")
        await sandbox.stop_processes()
        assert set(below(box, "bash")).isdisjoint(waiting)
        assert (await sandbox.exec("echo fine", timeout=20)).stdout == b"fine\n"


async def test_a_shell_that_was_started_ahead_is_as_if_it_were_started_now() -> None:
    async with sandbox_over("dial") as (sandbox, box, _):
        await sandbox.exec("mkdir here; cd here; touch old", timeout=20)
        await sandbox.start("sleep 0.3; cd ..; mv here away; mkdir here; touch here/new")
        assert await until(lambda: (box.folder / "work" / "here" / "new").exists())
        assert (await sandbox.exec("ls", timeout=20)).stdout == b"new\n"
        await asyncio.sleep(2.3)  # seconds of a shell are whole ones: one may pass at any moment, two do not
        assert (await sandbox.exec("((SECONDS < 2)) && echo now", timeout=20)).stdout == b"now\n"
        await sandbox.exec("echo 'echo sourced' > rc; export BASH_ENV=$PWD/rc", timeout=20)
        assert (await sandbox.exec("echo 1", timeout=20)).stdout == b"1\n", "it is not carried over"
        await sandbox.exec("export TMOUT=1", timeout=20)
        await asyncio.sleep(1.3)
        assert (await sandbox.exec("echo $TMOUT; unset TMOUT", timeout=20)).stdout == b"1\n"
        opened = await sandbox.exec("ls /proc/self/fd | tr '\\n' ' '; compgen -v | grep -ci lachesis", timeout=20)
        assert opened.stdout == b"0 1 2 211 3 0\n"


# --- its code -------------------------------------------------------------------------------------------------


def test_it_is_python_3_8_and_imports_what_it_says_it_imports() -> None:
    ast.parse(executor_code.executor_source(), feature_version=(3, 8))
    code = f"import {', '.join(executor_code.modules())}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
    assert {"select", "socket", "json"} <= set(executor_code.modules())


def test_the_one_file_is_all_its_modules_and_no_name_is_given_twice() -> None:
    bound: dict[str, str] = {}
    joined = ast.parse(executor_code.executor_source())
    for module in Path(executor.__file__).parent.glob("*.py"):
        for name in names_given(ast.parse(module.read_text())):
            assert bound.setdefault(name, module.name) == module.name, f"{name} is also given in {bound[name]}"
    assert names_given(joined) == set(bound)
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(joined))


def names_given(tree: ast.Module) -> set[str]:
    """By definitions and assignments at the top level."""
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            found |= {node.id for node in stored if isinstance(node.ctx, ast.Store)}
    return found


async def test_commands_inherit_nothing_of_the_stream() -> None:
    modes: list[Mode] = ["dial", "listen", "fd"]
    for mode in modes:
        async with sandbox_over(mode) as (sandbox, _, __):
            await sandbox.start("sleep 100")
            assert (await sandbox.exec("ls -l /proc/self/fd | grep -c socket", timeout=20)).stdout == b"0\n"


def test_a_python_is_found_by_its_name_alone(tmp_path: Path) -> None:
    def program(path: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        file.chmod(0o755)
        return file

    program("old/bin/python3.6")
    (tmp_path / "old/bin/python3").symlink_to("python3.6")
    program("shims/python3")
    program("new/bin/python3.13")
    (tmp_path / "new/bin/python3").symlink_to("python3.13")
    program("plain/bin/python3")
    (tmp_path / "plain/lib/python3.9").mkdir(parents=True)
    folders = {name: f"{tmp_path}/{name}" for name in ("old/bin", "shims", "new/bin", "plain/bin")}
    assert find_python(f"{folders['old/bin']}:{folders['shims']}:nowhere") is None
    assert find_python(":".join(folders.values())) == f"{folders['new/bin']}/python3"
    assert find_python(folders["plain/bin"]) == f"{folders['plain/bin']}/python3"
