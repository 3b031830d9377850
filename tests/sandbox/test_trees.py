"""Trees that an agent has made, and archives of a taken-over executor: none recurses, escapes or fills a disk."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from backends import Sandbox, SandboxSpec, create_backend
from backends.executor.archive import BLOCK, END, FILE, FOLDER, LINK, Member, Reader, block, header
from backends.executor.folders import pack, unpack
from backends.executor.trees import DEEPEST, make_folders, remove_tree
from backends.extraction import Room, extract
from backends.host import folders, records


def nested(folder: Path, depth: int, name: str = "d") -> None:
    """Folders in each other, with a file in the last: too deep for paths."""
    folder.mkdir(exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("last", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: removing and making are quick there."""
    made = Path(tempfile.mkdtemp(prefix="lachesis-test-", dir="/dev/shm"))
    yield made
    assert remove_tree(str(made), 60) == ""


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- removing --------------------------------------------------------------------------------------------------------


def test_folders_of_any_depth_are_removed_with_few_descriptors(folder: Path) -> None:
    for number in range(3):
        nested(folder / f"tree {number}", 3000)
    before, most = open_files(), []
    watching = threading.Event()

    def watch() -> None:
        while not watching.wait(0.005):
            most.append(open_files())

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert remove_tree(str(folder), 60) == ""
    watching.set()
    watcher.join()
    assert not folder.exists()
    assert max(most) < before + 60


def test_a_removal_that_is_late_says_so_and_the_next_one_goes_on(folder: Path) -> None:
    nested(folder / "tree", 2000)
    (folder / "record").write_text("kept until all folders are gone")
    assert re.search(r"more is left after \d+\.\d s, which removed", remove_tree(str(folder), 0.01))
    assert (folder / "record").exists()
    assert remove_tree(str(folder), 60) == ""
    assert not folder.exists()


def test_names_of_any_bytes_and_links_are_removed_and_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b" ", b"\\", "漢".encode() * 80):
        (folder / os.fsdecode(name)).mkdir()
        (folder / os.fsdecode(name) / os.fsdecode(name)).touch()
    (folder / "link").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    assert remove_tree(str(folder), 60) == ""
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "alias").symlink_to(tmp_path)
    assert remove_tree(str(tmp_path / "alias"), 60) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"], "of a link, the link is removed"


def as_nobody(work: Callable[[], bool]) -> bool:
    """Whether `work` is true for an ordinary user."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def test_permissions_hinder_no_removal(folder: Path) -> None:
    folder.chmod(0o777)

    def work() -> bool:
        (folder / "mine").mkdir()
        nested(folder / "mine" / "tree", 100)
        for number in range(3):
            inner = folder / "mine" / f"closed {number}"
            (inner / "within").mkdir(parents=True)
            (inner / "within" / "file").touch(0o000)
            (inner / "within").chmod(0o000)
            inner.chmod((0o000, 0o555, 0o111)[number])
        (folder / "mine").chmod(0o500)
        return remove_tree(str(folder / "mine"), 60) == ""

    assert as_nobody(work)
    assert list(folder.iterdir()) == []


def test_what_cannot_be_removed_is_named(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root has files that others cannot remove")
    folder.chmod(0o777)
    (folder / "root's").mkdir()
    (folder / "root's" / "file").touch()
    (folder / "record").touch()
    told = folder / "told"

    def work() -> bool:
        said = remove_tree(str(folder), 5)
        told.write_text(said)
        return True

    assert as_nobody(work)
    assert told.read_text() in ("file: Permission denied", "root's: Operation not permitted")
    assert (folder / "root's" / "file").exists()
    assert (folder / "record").exists()


def test_other_file_systems_are_not_entered() -> None:
    script = """
import os, sys, tempfile
from backends.executor.trees import remove_tree
from pathlib import Path
mine, tree = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
(mine / "mine").write_text("mine")
(tree / "a" / "mounted").mkdir(parents=True)
(tree / "a" / "other").mkdir()
assert os.system(f"mount --bind {mine} {tree}/a/mounted") == 0, "mount"
print(remove_tree(str(tree), 5), (mine / "mine").read_text(), os.listdir(tree / "a"))
os.system(f"umount {tree}/a/mounted")
print(remove_tree(str(tree), 5), tree.exists())
remove_tree(str(mine), 5)
"""
    apart = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", script]
    done = subprocess.run(apart, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr[-200:]}")
    assert done.stdout == "mounted: Device or resource busy mine ['mounted']\n False\n"


def test_a_folder_that_is_swapped_for_a_link_meanwhile_leads_nowhere(folder: Path, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / str(number)).touch()
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            for name in ("a", "b"):
                with contextlib.suppress(OSError):
                    (folder / "tree" / name).rename(folder / "tree" / f"was {name}")
                with contextlib.suppress(OSError):
                    (folder / "tree" / name).symlink_to(tmp_path)
                with contextlib.suppress(OSError):
                    (folder / "tree" / name).unlink()

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(150):
            for name in ("a", "b"):
                with contextlib.suppress(OSError):
                    (folder / "tree" / name).mkdir(parents=True, exist_ok=True)
                    (folder / "tree" / name / "file").touch()
            remove_tree(str(folder / "tree"), 0.2)
            with contextlib.suppress(OSError):
                packed = io.BytesIO()
                pack(str(folder), packed)
                assert b"199" not in packed.getvalue(), "it was followed"
    finally:
        ended.set()
        swapper.join()
    assert all((tmp_path / str(number)).exists() for number in range(200))


# --- copying ---------------------------------------------------------------------------------------------------------


def packed(folder: Path, most: float = float("inf")) -> io.BytesIO:
    buffer = io.BytesIO()
    pack(str(folder), buffer, most)
    buffer.seek(0)
    return buffer


def members(archive: io.BytesIO) -> list[tuple[bytes, str, bytes, int, int, str]]:
    """The members of an archive with their contents, and with the times of files."""
    reader, found = Reader(archive), []
    while (member := reader.next()) is not None:
        data = b"".join(iter(reader.read, b""))
        mtime = member.mtime if member.kind == FILE else 0
        found.append((member.kind, member.name.strip("./"), data, member.mode, mtime, member.target))
    return found


def test_trees_that_are_too_deep_or_too_many_are_refused_with_the_numbers(folder: Path) -> None:
    nested(folder / "deep", 1500)
    with pytest.raises(OSError, match="more than 256 nested folders") as raised:
        packed(folder / "deep")
    assert raised.value.errno == errno.EFBIG
    nested(folder / "long", 20, "x" * 250)
    with pytest.raises(OSError, match="a path of more than 4095 bytes"):
        packed(folder / "long")
    (folder / "many").mkdir()
    for number in range(20):
        (folder / "many" / str(number)).touch()
    assert packed(folder / "many", 20).getvalue()
    with pytest.raises(OSError, match="more than 19 files and folders"):
        packed(folder / "many", 19)


def test_a_tree_of_the_greatest_depth_comes_back_whole_with_few_descriptors(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / "from").mkdir(exist_ok=True)
        nested(folder / "from" / name, DEEPEST - 1)
    (folder / "from" / os.fsdecode(b"\xff name")).write_text("text")
    before = open_files()
    extract(packed(folder / "from"), str(folder / "to"), Room())
    assert open_files() == before
    unpack(packed(folder / "to"), str(folder / "again"))
    assert members(packed(folder / "again")) == members(packed(folder / "from"))


def test_other_programs_read_its_archives_and_it_reads_those_of_gnu_tar(folder: Path) -> None:
    source = folder / "source"
    (source / ("long" * 40)).mkdir(parents=True)
    (source / ("long" * 40) / ("name" * 40)).write_bytes(os.urandom(1300))
    (source / "link").symlink_to("l" * 150)
    (source / "old").touch()
    os.utime(source / "old", (-5, -5))
    with tarfile.open(fileobj=packed(source)) as archive:
        archive.extraction_filter = lambda member, path: member  # the argument `filter` needs Python 3.11.4
        archive.extractall(folder / "theirs")
    assert members(packed(folder / "theirs")) == members(packed(source))
    made = subprocess.run(["tar", "--format=gnu", "-C", source, "-c", "."], capture_output=True, check=True).stdout
    unpack(io.BytesIO(made), str(folder / "ours"))
    assert members(packed(folder / "ours")) == members(packed(source))


def test_uploads_replace_links_and_follow_none(folder: Path) -> None:
    (folder / "from" / "a").mkdir(parents=True)
    (folder / "from" / "a" / "file").write_text("new")
    (folder / "from" / "b").write_text("new")
    (folder / "outside").mkdir()
    (folder / "to").mkdir()
    (folder / "to" / "a").symlink_to("../outside")
    (folder / "to" / "b").symlink_to("../outside/b")
    unpack(packed(folder / "from"), str(folder / "to"))
    assert list((folder / "outside").iterdir()) == []
    assert (folder / "to" / "a" / "file").read_text() == (folder / "to" / "b").read_text() == "new"


def test_a_path_of_a_thousand_folders_is_made_without_recursion(folder: Path) -> None:
    path = f"{folder}/{'/'.join('d' * 1500)}"
    make_folders(path)
    make_folders(path)
    assert Path(path).is_dir()
    (folder / "file").touch()
    for below in ("file/x/y", "file"):
        with pytest.raises((NotADirectoryError, FileExistsError)):
            make_folders(str(folder / below))


# --- archives of an attacker -----------------------------------------------------------------------------------------


def file(name: str, data: bytes = b"evil", size: int | None = None) -> bytes:
    made = header(Member(FILE, name, len(data) if size is None else size, 0o777, 0))
    return made + data + bytes(-len(data) % BLOCK)


def link(name: str, target: str) -> bytes:
    return header(Member(LINK, name, 0, 0o777, 0, target))


def other(kind: bytes, name: str, size: int = 0, target: str = "") -> bytes:
    return block(name.encode(), kind, size, 0o777, 0, target.encode())


def endless(part: bytes) -> Iterator[bytes]:
    return itertools.repeat(part)


def pax(text: bytes) -> bytes:
    return other(b"x", "pax", len(text)) + text + bytes(-len(text) % BLOCK)


REFUSED = {
    "a parent": ([file("../evil")], errno.EPERM),
    "a parent within": ([file("a/../../evil")], errno.EPERM),
    "an absolute path": ([file("/tmp/lachesis-evil")], errno.EPERM),
    "a link, then a file through it": ([link("a", "../.."), file("a/evil")], errno.EPERM),
    "an allowed link, then a file through it": ([file("b/x"), link("a", "b"), file("a/evil")], errno.EPERM),
    "a link in the place of a folder": ([file("a/x"), link("a", "b"), file("a/evil")], errno.EPERM),
    "links that lead out together": ([link("a/b", ".."), link("c", "a/b/../..")], errno.EPERM),
    "an empty link": ([link("a", "")], errno.EPERM),
    "a hard link": ([other(b"1", "a", target="/etc/passwd")], errno.EPERM),
    "a device": ([other(b"3", "a"), other(b"4", "b"), other(b"6", "c")], errno.EPERM),
    "a device with contents": ([other(b"3", "a", 1 << 40)], errno.EIO),
    "a sparse file": ([other(b"S", "a", 512), bytes(512)], errno.EIO),
    "a pax header that renames": ([pax(b"26 path=/tmp/lachesis-evil\n"), file("a")], errno.EIO),
    "a pax header of 1 TB": ([other(b"x", "a", 1 << 40)], errno.EIO),
    "a global pax header": ([other(b"g", "a", 512), bytes(512)], errno.EIO),
    "a name of 1 TB": ([other(b"L", "a", 1 << 40)], errno.EIO),
    "a name before a name before a name": (endless(other(b"L", "a", 1) + bytes(512)), errno.EIO),
    "a negative size": ([other(FILE, "a", -512), b"x" * 512], errno.EIO),
    "a size that is not a number": ([file("a").replace(b"%011o" % 4, b"0000000zz04")], errno.EIO),
    "a size that is too large": ([file("a", b"data", 1000)], errno.EIO),
    "a size that is too small": ([file("a", b"data" * 300, 4)], errno.EIO),
    "a wrong checksum": ([b"b" + file("a")[1:]], errno.EIO),
    "noise": ([os.urandom(5000)], errno.EIO),
    "nothing": ([], errno.EIO),
    "no end": ([file("a")], None),
    "a bomb": (endless(file("a", bytes(1 << 16))), errno.EFBIG),
    "a file of 4 TB": ([file("a", b"data", 4 << 40)], errno.EFBIG),
    "a million files": (endless(file("a", b"")), errno.EFBIG),
    "a million folders": (endless(header(Member(FOLDER, "a", 0, 0, 0))), errno.EFBIG),
    "a million rejected members": (endless(other(b"1", "a")), errno.EFBIG),
    "a million links of 4000 bytes": (endless(link("a", "x" * 4000)), errno.EFBIG),
    "folders in each other": ([file("a/" * (DEEPEST + 2) + "b")], errno.EFBIG),
    "a long path": ([file(("x" * 200 + "/") * 20 + "b" * 60)], errno.EFBIG),
    "a long name": ([file("x" * 300)], errno.ENAMETOOLONG),
}


class Stream(io.RawIOBase):
    """The concatenation of parts, which may be endless."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts, self.rest = iter(parts), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self.rest = self.rest or next(self.parts, b"")
        size = min(len(buffer), len(self.rest))
        buffer[:size], self.rest = self.rest[:size], self.rest[size:]
        return size


@pytest.mark.parametrize("attack", REFUSED)
def test_no_archive_harms_this_machine(folder: Path, attack: str) -> None:
    parts, code = REFUSED[attack]
    ends = code in (errno.EPERM, errno.ENAMETOOLONG)
    stream = Stream(itertools.chain([file("fine", b"fine")], parts, [END] if ends or attack == "nothing" else []))
    (folder / "precious").write_text("precious")
    target = folder / "target"
    before = open_files()
    room = Room(max_bytes=1_000_000, max_members=1000)
    if attack == "nothing":
        extract(cast(BinaryIO, io.BufferedReader(stream)), str(target), room)
    else:
        with pytest.raises(OSError) as raised:
            extract(cast(BinaryIO, io.BufferedReader(stream)), str(target), room)
        assert raised.value.errno == (code or errno.EIO), raised.value
        assert len(str(raised.value)) < 1000
    if code == errno.EPERM or attack == "nothing":
        assert (target / "fine").read_text() == "fine", "what is right is copied"
    else:
        assert not target.exists(), "nothing is left of what failed"
    assert (folder / "precious").read_text() == "precious"
    assert {path.name for path in folder.iterdir()} <= {"precious", "target"}
    assert not Path("/tmp/lachesis-evil").exists()
    assert open_files() == before
    shutil.rmtree(target, ignore_errors=True)


def test_a_failed_download_leaves_a_folder_as_it_was_and_a_good_one_joins_it(folder: Path) -> None:
    target = folder / "target"
    (target / "a" / "deep").mkdir(parents=True)
    (target / "a" / "old").write_text("old")
    (target / "a" / "both").write_text("old")
    (target / "file").write_text("old")
    (target / "link").symlink_to(folder)
    folders = b"".join(header(Member(FOLDER, name, 0, 0o755, 0)) for name in ("a", "a/deep", "file", "link", "a/deep2"))
    broken = io.BytesIO(folders + file("a/both", b"new") + file("a/deep/new", b"new"))
    with pytest.raises(OSError, match="ends too early"):
        extract(broken, str(target), Room())
    assert sorted(path.name for path in target.rglob("*")) == ["a", "both", "deep", "file", "link", "old"]
    assert (target / "a" / "both").read_text() == "old"
    good = folders + file("a/both", b"new") + file("a/deep/new", b"new")
    good += file("file/x") + file("link/x") + file("a/deep2/new")
    with pytest.raises(OSError, match=r"rejected (file|link) .*everything else was copied"):
        extract(io.BytesIO(good + END), str(target), Room())
    assert (target / "a" / "both").read_text() == (target / "a" / "deep" / "new").read_text() == "new"
    assert ((target / "a" / "old").read_text(), (target / "file").read_text()) == ("old", "old")
    assert (target / "a" / "deep2" / "new").exists()
    assert not (folder / "x").exists()


def test_a_download_leaves_this_machines_disk_a_reserve(folder: Path) -> None:
    script = """
import errno, io, os, sys
from backends.executor.archive import END, FILE, Member, header
from backends.extraction import Room, extract
assert os.system(f"mount -t tmpfs -o size=64m,nr_inodes=200 none {sys.argv[1]}") == 0, "mount"
for size, data, count in ((4 << 40, 512, 1), (40 << 20, 40 << 20, 2), (0, 0, 1000)):
    parts = (header(Member(FILE, str(n), size, 0o600, 0)) + bytes(data) for n in range(count))
    try:
        extract(io.BytesIO(b"".join(parts) + END), sys.argv[1] + "/target", Room(None, None))
    except OSError as error:
        free = os.statvfs(sys.argv[1])
        print(errno.errorcode[error.errno], free.f_bavail == free.f_blocks, os.listdir(sys.argv[1]), error)
"""
    apart = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", script, str(folder)]
    done = subprocess.run(apart, capture_output=True, text=True, check=False)
    if "mount" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr[-200:]}")
    lines = done.stdout.splitlines()
    assert [line.split("]")[0] for line in lines] == ["ENOSPC True ["] * 3, (done.stdout, done.stderr)
    assert "needs 4398046511104 bytes of this machine's disk, which has 67108864 left" in lines[0]
    assert "inodes left" in lines[2]


# --- sandboxes -------------------------------------------------------------------------------------------------------

NEST = """
import os
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
open("file", "w").close()
"""


async def test_a_deep_tree_is_refused_and_removed_and_hinders_no_other_sandbox(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    backend = create_backend("local", isolation="none")
    sandbox = await backend.create(SandboxSpec())
    try:
        assert (await sandbox.exec("python3 -", stdin=NEST.encode(), timeout=60)).exit_code == 0
        with pytest.raises(OSError, match="more than 256 nested folders"):
            await sandbox.download_dir(".", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        with pytest.raises(OSError, match="File name too long"):
            await sandbox.write_bytes("d/" * 2500 + "file", b"")
        await sandbox.write_bytes("e/" * 1500 + "file", b"deep")
        assert await sandbox.read_bytes("e/" * 1500 + "file") == b"deep"
    finally:
        await sandbox.close()
    await (await create_backend("local", isolation="none").create(SandboxSpec())).close()
    assert not records.folder(sandbox.id).exists()


async def test_a_tree_that_takes_long_to_remove_is_named_and_left_to_reap(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(folders, "REMOVAL", 0.01)
    backend = create_backend("local", isolation="none")
    sandbox = await backend.create(SandboxSpec())
    nested(records.folder(sandbox.id) / "files" / "workspace", 5000)
    os.kill(sandbox.pid, signal.SIGKILL)  # at its own end, it would begin
    await sandbox.close()
    assert "more is left after 0.0 s" in caplog.text and sandbox.id in caplog.text
    (left,) = await backend.sandboxes()
    assert (left.id, left.orphan) == (sandbox.id, True) and "not removed: more is left" in left.detail
    await (await backend.create(SandboxSpec())).close()
    assert [info.id for info in await backend.reap()] == [sandbox.id]
    assert not records.folder(sandbox.id).exists()


async def test_links_and_names_that_lead_nowhere_are_no_errors_of_the_executor() -> None:
    async with sandbox_of() as sandbox:
        chain = "import os\nfor i in range(1500): os.symlink(str(i + 1), str(i))"
        assert (await sandbox.exec("python3 -", stdin=chain.encode(), timeout=60)).exit_code == 0
        try:
            await sandbox.write_bytes("0", b"data")
        except OSError as error:
            assert error.errno == errno.ELOOP
        else:  # from Python 3.13 on, the executor's Python follows any number of links
            assert await sandbox.read_bytes("1500") == b"data"
        for path, code in (("a\0b", errno.EINVAL), ("a\ud800", errno.EINVAL), ("a/" * 100_000, errno.ENAMETOOLONG)):
            for call in (sandbox.write_bytes(path, b""), sandbox.read_bytes(path), sandbox.download_dir(path, "/none")):
                with pytest.raises(OSError) as raised:
                    await call
                assert raised.value.errno == code


@contextlib.asynccontextmanager
async def sandbox_of():  # type: ignore[no-untyped-def]
    sandbox: Sandbox = await create_backend("local").create(SandboxSpec())
    try:
        yield sandbox
    finally:
        await sandbox.close()
