"""What reading, writing and copying files and folders promise."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from backends import Sandbox

from .probes import output


async def test_files_come_back_as_they_were_written(sandbox: Sandbox) -> None:
    data = os.urandom(10_000_000)
    await sandbox.write_bytes("deep/er/data.bin", data)
    assert await sandbox.read_bytes(f"{sandbox.workdir}/deep/er/data.bin") == data
    assert await sandbox.read_bytes("deep/er/data.bin", offset=5, limit=7) == data[5:12]
    assert await sandbox.read_bytes("deep/er/data.bin", offset=9_999_990) == data[-10:]
    assert await sandbox.read_bytes("deep/er/data.bin", offset=10_000_001, limit=5) == b""
    assert await output(sandbox, "ls -A deep/er") == "data.bin"
    await sandbox.write_bytes("deep/er/data.bin", b"")
    assert await sandbox.read_bytes("deep/er/data.bin") == b""


async def test_writing_keeps_the_mode_and_follows_links(sandbox: Sandbox) -> None:
    await sandbox.exec("echo old > run.sh; chmod 750 run.sh; ln -s run.sh link", timeout=20)
    await sandbox.write_bytes("link", b"echo new")
    assert await output(sandbox, "stat -c %a run.sh; readlink link; ./run.sh") == "750\nrun.sh\nnew"


async def test_the_mode_of_a_written_file_can_be_given(sandbox: Sandbox) -> None:
    async def blocks() -> AsyncIterator[bytes]:
        yield b"#!/bin/sh\necho ran"

    await sandbox.write_bytes("given.sh", b"#!/bin/sh\necho ran", mode=0o755)
    await sandbox.write_chunks("chunks.sh", blocks(), mode=0o711)
    assert await output(sandbox, "stat -c %a chunks.sh; ./given.sh") == "711\nran"


async def test_the_home_folder_is_the_one_it_was_made_with(sandbox: Sandbox) -> None:
    await sandbox.exec("export HOME=/tmp", timeout=20)
    done = await sandbox.exec("echo ~", timeout=20, fresh=True)
    assert done.stdout.decode() == f"{sandbox.home}\n" != "/tmp\n"


async def test_stat_says_where_a_path_leads(sandbox: Sandbox) -> None:
    await sandbox.exec(
        "mkdir real; echo four > real/file; chmod 750 real/file; ln -s real link; ln -s on on", timeout=20
    )
    here = await output(sandbox, "pwd -P")
    found = await sandbox.stat("link/../link/file")
    assert (found.path, found.mode, found.size) == (f"{here}/real/file", 0o100750, 5)
    missing = await sandbox.stat("link/none/../none")
    assert (missing.path, missing.mode) == (f"{here}/real/none", None)
    with pytest.raises(OSError):
        await sandbox.stat("on")


async def test_file_errors_are_the_file_systems(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir folder; echo x > file; mkfifo fifo", timeout=20)
    with pytest.raises(FileNotFoundError) as missing:
        await sandbox.read_bytes("missing")
    assert str(missing.value.filename).endswith("missing")
    with pytest.raises(IsADirectoryError):
        await sandbox.read_bytes("folder")
    with pytest.raises(IsADirectoryError):
        await sandbox.write_bytes("folder", b"x")
    with pytest.raises((NotADirectoryError, FileExistsError)):
        await sandbox.write_bytes("file/below", b"x")
    with pytest.raises(OSError, match="not a regular file"):
        await sandbox.read_bytes("fifo")


async def test_a_big_file_does_not_hold_up_others(sandbox: Sandbox) -> None:
    await sandbox.exec("head -c 50000000 /dev/zero > big", timeout=20)
    reading = asyncio.create_task(sandbox.read_bytes("big"))
    await asyncio.sleep(0)
    assert await output(sandbox, "echo quick") == "quick"
    assert len(await reading) == 50_000_000


async def test_files_move_in_chunks(sandbox: Sandbox) -> None:
    block, sent, came = os.urandom(300_000), hashlib.blake2b(), hashlib.blake2b()

    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(50):
            sent.update(block)
            yield block

    await sandbox.write_chunks("deep/er/data.bin", blocks())
    async for chunk in sandbox.read_chunks(f"{sandbox.workdir}/deep/er/data.bin"):
        came.update(chunk)
    assert came.digest() == sent.digest()
    assert await output(sandbox, "ls -A deep/er; wc -c < deep/er/data.bin") == "data.bin\n15000000"
    await sandbox.exec("mkdir folder", timeout=20)
    for path, error in (("missing", FileNotFoundError), ("folder", IsADirectoryError)):
        with pytest.raises(error):
            async for _ in sandbox.read_chunks(path):
                pass
    with pytest.raises(IsADirectoryError):
        await sandbox.write_chunks("folder", blocks())


async def test_folders_go_in_and_come_out_as_they_were(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "empty").mkdir(parents=True)
    for i in range(100):
        (source / "a" / f"{i}.txt").write_text(f"{i}\n" * i)
    (source / "run.sh").write_text("echo ran")
    (source / "run.sh").chmod(0o751)
    (source / ("long" * 40)).write_bytes(os.urandom(1_500_000))
    (source / "naïve name").write_bytes(b"")
    (source / "a" / "link").symlink_to("../run.sh")
    os.mkfifo(source / "left out")
    await sandbox.exec("mkdir -p up/a; echo old > up/a/1.txt; echo stays > up/mine", timeout=20)
    await sandbox.upload_dir(source, "up")
    assert await output(
        sandbox, "cd up; ./run.sh; readlink a/link; stat -c %a run.sh; cat mine a/1.txt; ls a | wc -l"
    ) == ("ran\n../run.sh\n751\nstays\n1\n102")
    await sandbox.download_dir("up", tmp_path / "back")
    (source / "left out").unlink()
    (source / "mine").write_text("stays\n")

    def tree(folder: Path) -> dict[str, tuple[int, bytes | str | None]]:
        return {
            str(path.relative_to(folder)): (
                path.lstat().st_mode,
                os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None,  # noqa: PTH115
            )
            for path in sorted(folder.rglob("*"))
        }

    assert tree(tmp_path / "back") == tree(source)


async def test_modes_go_on_into_another_folder(sandbox: Sandbox, tmp_path: Path) -> None:
    shown = "stat -c '%a %n' . key run in in/ro in/ro/key; stat -c %Y key"
    made = "mkdir -p up/in/ro; cd up; for file in key run in/ro/key; do echo k > $file; chmod 400 $file; done"
    await output(sandbox, f"({made}; touch -d @5 key; chmod 4755 run; chmod 1777 in; chmod 555 in/ro; chmod 750 .)")
    for _ in range(2):  # the second time, it replaces what is there
        modes: dict[str, int] = {}
        await sandbox.download_dir("up", tmp_path / "copy", modes=modes)
        assert modes == {"key": 0o400, "run": 0o755, "in": 0o1777, "in/ro": 0o555, "in/ro/key": 0o400}
        local = [(tmp_path / "copy" / name).stat().st_mode & 0o7777 for name in sorted(modes)]
        assert local == [0o777, 0o755, 0o400, 0o400, 0o755], "its owner can change the folders"
        await sandbox.upload_dir(tmp_path / "copy", "again", modes={**modes, ".": 0o750})
        was = await output(sandbox, f"(cd up; {shown})")
        assert await output(sandbox, f"(cd again; {shown})") == was.replace("4755 run", "755 run")
    assert (await sandbox.stat("again/key")).mtime == 5


async def test_what_would_land_or_lead_outside_is_refused_by_name(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir out; cd out; ln -s /etc/passwd absolute; ln -s ../.. above; echo x > fine", timeout=20)
    with pytest.raises(OSError, match=r"rejected above .*absolute .*everything else was copied"):
        await sandbox.download_dir(f"{sandbox.workdir}/out", tmp_path / "here")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["fine"]


async def test_folders_that_cannot_be_moved_are_errors(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.exec("mkdir big; head -c 2000 /dev/zero > big/one; head -c 2000 /dev/zero > big/two", timeout=20)
    with pytest.raises(OSError, match="more than 3000 bytes"):
        await sandbox.download_dir("big", tmp_path / "a", max_bytes=3000)
    assert not (tmp_path / "a").exists(), "a part of it would look like the whole"
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError):
        await sandbox.download_dir("missing", tmp_path / "b")
    with pytest.raises(NotADirectoryError):
        await sandbox.download_dir("big/one", tmp_path / "c")
    with pytest.raises(NotADirectoryError):
        await sandbox.upload_dir(tmp_path / "a", "big/one/below")
    with pytest.raises(FileNotFoundError):
        await sandbox.upload_dir(tmp_path / "missing", "up")


async def test_a_folder_that_is_too_large_or_too_deep_is_refused_with_the_numbers(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    nest = "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')"
    await sandbox.exec("mkdir sparse deep; truncate -s 4T sparse/file", timeout=20)
    assert (await sandbox.exec("python3 -", stdin=nest.encode(), cwd="deep", timeout=60)).exit_code == 0
    for name, numbers in (
        ("sparse", "1073741824 bytes .*: 4398046511104 with file"),
        ("deep", "more than 256 nested folders"),
    ):
        with pytest.raises(OSError, match=numbers) as raised:
            await sandbox.download_dir(name, tmp_path / name)
        assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == [], "nothing is left of what was refused"


async def test_a_sparse_file_cannot_fill_the_readers_memory(sandbox: Sandbox) -> None:
    await output(sandbox, "truncate -s 500G big")
    with pytest.raises(OSError, match="read it in parts"):
        await sandbox.read_bytes("big")
    assert await sandbox.read_bytes("big", offset=1 << 38, limit=3) == b"\0\0\0"


async def test_a_write_that_fails_at_its_end_leaves_nothing_and_says_why(sandbox: Sandbox) -> None:
    with pytest.raises(OSError, match="File name too long"):
        await sandbox.write_bytes("x" * 300, b"data")
    await sandbox.write_bytes("file", b"data")
    with pytest.raises(NotADirectoryError):
        await sandbox.write_bytes("file/below/it", b"data")
    assert await output(sandbox, "ls -A") == "file"
