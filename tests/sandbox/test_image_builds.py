"""Images made of Dockerfiles on this machine, without an engine: RUN, layers, and what must not be left or reached."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_watch import opened, output

from backends import Backend, BackendError, SandboxSpec, create_backend
from backends.images import Build, BuiltImage, ImageError, image_for, listed, prune, store
from backends.images.bases import _BUILDPACK, _PYTHON, base_of
from backends.images.dockerfile import Instruction
from tests.support.root_images import full_root

HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache for images of this module. The portable runtime is that of the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        yield folder
    if (folder / "lachesis/images").exists():
        assert not list((folder / "lachesis/images/building").iterdir())
        assert not list((folder / "lachesis/images/locks").iterdir())
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(folder) not in mounts


@pytest.fixture(scope="module")
def bases(roots: Path) -> dict[str, str]:
    return {"full": str(full_root(roots / "full"))}


class Builder:
    def __init__(self, folder: Path, bases: dict[str, str], backend: Backend) -> None:
        self.folder, self.bases, self.backend = folder, bases, backend
        self.lines: list[str] = []

    async def __call__(self, text: str, **options: Any) -> BuiltImage:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "Dockerfile").write_text("FROM full\n" + text)
        self.lines = []
        build = Build(self.folder, **options)
        return await image_for(build, self.backend, bases=self.bases, tell=self.lines.append)


@pytest.fixture
def build(cache: Path, tmp_path: Path, bases: dict[str, str], local: Backend) -> Builder:
    return Builder(tmp_path / "context", bases, local)


@pytest.fixture
async def local() -> Backend:
    backend = create_backend("local")
    found = await backend.check()
    if not found.ok:
        pytest.skip(f"{found.detail}; {found.fix}")
    return backend


def files(image: BuiltImage, folder: str) -> dict[str, str]:
    root = Path(image.image) / folder
    found = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_text(errors="replace") for path in found}


async def test_a_dockerfile_becomes_a_sandbox(build: Builder) -> None:
    build.folder.mkdir()
    (build.folder / "note").write_text("from the context\n")
    image = await build(
        'ARG WHO=nobody\nENV GREETING="hello $WHO"\nWORKDIR /app\nCOPY note .\n'
        "RUN echo $GREETING $WHO > made; pwd; id -u; chown 5:6 made; mknod n c 1 3; mkdir -p /run/kept\n"
        'SHELL ["/bin/bash", "-c"]\nRUN [[ -e made ]] && echo ${BASH_VERSION:+bash} > shell\n'
        'RUN ["sh", "-c", "echo \\"$0\\" > list", "word"]\nWORKDIR sub\nUSER agent\n'
        "RUN id -un > who; echo $HOME >> who\n"
        'ENTRYPOINT ["x"]\nCMD y\nEXPOSE 1\nLABEL a=b\n',
        args={"WHO": "you"},
    )
    assert image.env["GREETING"] == "hello you"
    assert (image.workdir, image.user) == ("/app/sub", "agent")
    assert files(image, "app") == {
        "list": "word\n",
        "made": "hello you you\n",
        "note": "from the context\n",
        "shell": "bash\n",
        "sub/who": "agent\n/home/agent\n",
    }
    assert (Path(image.image) / "run/kept").is_dir()
    assert "  /app" in build.lines
    assert "  0" in build.lines
    assert any("ENTRYPOINT" in line and "not run" in line for line in build.lines)
    spec = SandboxSpec(image=image.image, env=image.env, workdir=image.workdir)
    async with opened(build.backend, spec) as sandbox:
        assert await output(sandbox, "cat ../made; pwd; rm ../made; touch /app/new") == "hello you you\n/app/sub"
    assert "made" in files(image, "app")


@pytest.mark.slow
async def test_layers_are_used_again_until_an_input_changes(build: Builder) -> None:
    build.folder.mkdir()
    (build.folder / "a").write_text("1")
    text = "RUN date +%N > /first\nCOPY a /a\nRUN date +%N > /second\n"
    one, two = await build(text), await build(text)
    assert one.image == two.image
    assert sum("(cached)" in line for line in build.lines) == 3
    (build.folder / "a").write_text("2")
    three = await build(text)
    read = [(Path(each.image, "first").read_text(), Path(each.image, "second").read_text()) for each in (one, three)]
    assert read[0][0] == read[1][0]
    assert read[0][1] != read[1][1]
    with_argument = "ARG A\nRUN echo $A > /third\n"
    values = [files(await build(with_argument, args={"A": value}), "")["third"] for value in ("x", "y", "x")]
    assert values == ["x\n", "y\n", "x\n"]


async def test_a_layer_removes_and_replaces(build: Builder) -> None:
    image = await build(
        "RUN mkdir -p /d/e && echo 1 > /d/a && echo 1 > /d/e/b && echo 1 > /f\n"
        "RUN rm /d/a && rm -r /d/e && mkdir /d/e && echo 2 > /d/e/c && rm /f && mkdir /f && echo 2 > /f/g\n"
        "RUN mv /d /moved && ln -s moved /d && chmod 700 /moved\n"
    )
    root = Path(image.image)
    assert files(image, "moved") == {"e/c": "2\n"}
    assert (root / "f/g").read_text() == "2\n"
    assert os.readlink(root / "d") == "moved"  # noqa: PTH115
    assert (root / "moved").stat().st_mode & 0o777 == 0o700
    assert not any("overlay" in name for path in root.rglob("*") for name in os.listxattr(path, follow_symlinks=False))


async def test_nothing_of_the_build_stays_in_the_image(build: Builder) -> None:
    before = {path.relative_to(build.bases["full"]) for path in Path(build.bases["full"]).rglob("*")}
    image = await build("RUN cat /run/lachesis-host/apt.conf; cat /etc/resolv.conf; env | sort\n")
    after = {path.relative_to(image.image) for path in Path(image.image).rglob("*")}
    assert before == after
    assert "APT_CONFIG" not in image.env
    assert (Path(image.image) / "etc/resolv.conf").read_text() == ""


async def test_a_command_that_fails_names_line_reason_and_last_lines(build: Builder) -> None:
    with pytest.raises(ImageError, match=r"Dockerfile:3: RUN seq 100; .*exit code 3\. Next step: ") as caught:
        await build("\nRUN seq 100; echo oh >&2; exit 3\n")
    assert str(caught.value).endswith("98\n99\n100\noh")
    assert "\n50\n" not in str(caught.value)
    with pytest.raises(ImageError, match=r"Dockerfile:2: RUN sleep 60: the build did not end within 1 s\. Next step"):
        await build("RUN sleep 60\n", timeout=1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ADD https://example.org/x /x", "Dockerfile:2: ADD https.*no remote source"),
        ("ADD git@example.org:x.git /x", "no remote source"),
        ("COPY none /x", "Dockerfile:2: COPY none /x: there is no 'none'"),
        ("COPY a", "needs a source and a destination"),
        ("USER nobody-here", "no user 'nobody-here'"),
        ("USER agent:no-group", "no group 'no-group'"),
        ("SHELL bash -c", "takes the JSON form"),
        ("COPY --chmod=u+x Dockerfile /x", "is not an octal mode"),
        ("ENV a=${b%c}", "Dockerfile:2: ENV .*not supported"),
        ("WORKDIR '/x", "is not closed"),
    ],
)
async def test_what_cannot_be_played_is_refused(build: Builder, text: str, said: str) -> None:
    with pytest.raises(ImageError, match=said) as caught:
        await build(text)
    assert "Next step: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alpine:3.20", "is not in the table of bases"),
        ("python:3.12-slim", r"Debian has no Python for python:3.12-slim \(its own are 3.9, 3.11, 3.13\)"),
        ("python:3.12-slim", r'write "python:3.12-slim" = "python:3.13" into'),
        ("debian@sha256:abc", "by digest"),
        ("buildpack-deps:sid", "is not in the table of bases"),
        ("missing", "does not exist"),
        ("circle", "in a circle"),
    ],
)
async def test_an_unknown_base_is_refused_with_what_to_do(build: Builder, name: str, said: str) -> None:
    build.bases |= {"missing": "/nowhere", "circle": "circle"}
    with pytest.raises(ImageError, match=said) as caught:
        await image_for(name, build.backend, bases=build.bases)
    assert "Next step: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suite", "packages", "said"),
    [
        ("ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624", "trixie", ["python3"], True),
        ("ghcr.io/laude-institute/t-bench/python-3-13:20250620", "trixie", _PYTHON, True),
        ("python:3.13-slim-bookworm@sha256:abc", "trixie", _PYTHON, True),
        ("python:3.11-slim-bookworm", "bookworm", _PYTHON, True),
        ("debian:12-slim@sha256:abc", "bookworm", [], True),
        ("buildpack-deps", "trixie", _BUILDPACK[""], True),
        ("buildpack-deps:bookworm-scm", "bookworm", _BUILDPACK["scm"], True),
        ("docker.io/library/buildpack-deps:jammy-curl", "bookworm", _BUILDPACK["curl"], True),
        ("debian:12-slim", "bookworm", [], False),
    ],
)
def test_a_base_that_another_stands_in_for_says_so(name: str, suite: str, packages: Any, said: bool) -> None:
    base = base_of(name, Instruction(1, "FROM", name, "Dockerfile:1"), {})
    assert (base.suite, list(base.packages)) == (suite, list(packages))
    assert base.said.endswith(f"stands in for {name.removeprefix('docker.io/library/')}") if said else not base.said


async def test_the_error_of_a_command_says_that_another_base_stands_in(build: Builder) -> None:
    base = base_of("ubuntu:24.04", Instruction(1, "FROM", "", "Dockerfile:1"), {})

    async def make(folder: Path) -> None:
        await asyncio.to_thread(subprocess.run, ["cp", "-a", build.bases["full"], folder / "root"], check=True)

    await store.layer(base.key, {"parent": "", "instruction": "FROM trixie"}, make)
    build.folder.mkdir()
    (build.folder / "Dockerfile").write_text("FROM ubuntu:24.04\nRUN echo no such version; exit 100\n")
    with pytest.raises(
        ImageError, match=r"exit code 100 \(Debian 13 \(trixie\) stands in for ubuntu:24.04, with other"
    ):
        await image_for(Build(build.folder), build.backend)


async def test_a_base_by_argument_and_from_scratch(build: Builder) -> None:
    build.folder.mkdir()
    (build.folder / "Dockerfile").write_text("ARG BASE=nothing\nFROM $BASE AS one\nARG BASE\nRUN echo $BASE > /base\n")
    image = await image_for(Build(build.folder, args={"BASE": "full"}), build.backend, bases=build.bases)
    assert files(image, "")["base"] == "full\n"
    (build.folder / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /a/\n")
    image = await image_for(Build(build.folder), build.backend)
    assert list(files(image, "")) == ["a/Dockerfile"]
    assert "PATH" not in image.env


async def test_the_table_of_the_user(build: Builder, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = cache / "bases.toml"
    monkeypatch.setenv("LACHESIS_BASES", str(table))
    table.write_text(f'"registry.example/*" = "other"\n"other*" = "{build.bases["full"]}"\n')
    assert files(await image_for("registry.example/base:1", build.backend), "etc")["passwd"]
    table.write_text("not toml")
    with pytest.raises(ImageError, match=r"bases\.toml: the table of bases cannot be read"):
        await image_for("registry.example/base:1", build.backend)


async def test_run_is_within_walls(build: Builder, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    image = await build(
        f"RUN cat {secret}; ls /proc/1/root{secret}; kill -9 -1; mount -t tmpfs x /mnt; "
        "unshare -m true && echo nested; echo 1 > /proc/sys/kernel/panic; ls /dev/mem /sys/kernel; "
        f"umount /etc/resolv.conf; chroot /proc/1/cwd cat {secret}; ln -s / /out; touch /out{tmp_path}/new; true\n"
        "COPY Dockerfile /out/etc/copied\n"
    )
    said = "\n".join(build.lines)
    assert "of the host" not in said
    assert not (tmp_path / "new").exists()
    assert not Path("/etc/copied").exists()
    assert (Path(image.image) / "etc/copied").exists()
    assert Path(image.image).parents[2].stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "way",
    ["/oldroot{}", *(pytest.param(way, marks=pytest.mark.long) for way in ("../oldroot{}", "../../../..{}", "{}"))],
)
async def test_links_of_an_image_make_nothing_outside_of_it(build: Builder, tmp_path: Path, way: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    places = ("etc", "run", "home", "opt")
    # Renamed, never copied as `mv` would what is mounted there.
    move = 'python3 -c \'import os; os.rename("/{0}", "/old-{0}")\' 2>/dev/null'
    moves = "; ".join(f"{move.format(name)}; ln -s {{0}} /{name}" for name in places)
    image = await build(f"RUN {moves.format(way.format(outside))}; true\nRUN touch /etc/x /run/x; echo alive\n")
    assert "  alive" in build.lines
    async with opened(build.backend, SandboxSpec(image=image.image, workdir="/etc/made")) as sandbox:
        assert await output(sandbox, "pwd") == "/etc/made"
    assert not list(outside.iterdir())
    image = await build(
        f"RUN mkdir /x; cd /x; ln -s /oldroot{outside} proc; rm -rf /var; ln -s /oldroot{outside} /var\n"
    )
    with pytest.raises(BackendError, match="has a link at /proc"):
        await build.backend.create(SandboxSpec(image=f"{image.image}/x"))


async def test_host_settings_reach_run_without_logins(cache: Path, tmp_path: Path) -> None:
    index = tmp_path / "pypi/simple"
    for folder in (index / "a-package", tmp_path / "pypi/files", tmp_path / "pypi/private"):
        folder.mkdir(parents=True)
    (index / "a-package/index.html").write_text('<a href="../../files/a.whl">a</a><a href="../../../b.whl">b</a>')
    code = "import json; from backends.host.package_settings import settings; print(json.dumps(settings()))"
    env = {
        **os.environ,
        "PIP_EXTRA_INDEX_URL": f"https://user:password@example.org/simple https://plain.example/simple file://{index} "
        "https://example.org/simple?token=password",
        "https_proxy": "http://user:password@proxy.example:1",
        "HTTP_PROXY": "user:password@proxy.example:1",
        "HTTPS_PROXY": "http://user:pass/password@proxy.example:1",
        "http_proxy": "http://proxy.example:2",
        "PIP_CONFIG_FILE": os.devnull,
    }
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], env=env, cwd=HERE, capture_output=True, text=True, check=True
    )
    assert "password" not in done.stdout
    variables, mounts = json.loads(done.stdout)
    assert variables["http_proxy"] == "http://proxy.example:2"
    assert "https://plain.example/simple" in variables["PIP_EXTRA_INDEX_URL"]
    place = dict(mounts)[str(index)]
    assert f"file://{place}" in variables["PIP_EXTRA_INDEX_URL"]
    # The pages of a local index name files in a folder beside it, which come along; others there do not.
    assert dict(mounts)[str(index.parent / "files")] == str(Path(place).parent / "files")
    assert not [source for source, _ in mounts if source.endswith("private") or source == str(index.parent)]


BUILD = """
import asyncio, sys
from pathlib import Path
from backends import create_backend
from backends.images import Build, image_for
build = Build(Path(sys.argv[1]))
image = asyncio.run(image_for(build, create_backend("local"), bases={"full": sys.argv[2]}, tell=print))
print(image.image)
"""


def builder(build: Builder) -> subprocess.Popen[str]:
    argv = [sys.executable, "-u", "-c", BUILD, str(build.folder), build.bases["full"]]
    return subprocess.Popen(argv, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def test_many_builds_of_one_layer_run_it_once(build: Builder) -> None:
    build.folder.mkdir()
    (build.folder / "Dockerfile").write_text("FROM full\nRUN date +%N; sleep 1; date +%N > /made\n")
    processes = [builder(build) for _ in range(3)]
    here = [image_for(Build(build.folder), build.backend, bases=build.bases) for _ in range(3)]
    images = {image.image for image in await asyncio.gather(*here)}
    outputs = [await asyncio.to_thread(process.communicate) for process in processes]
    assert {said.splitlines()[-1] for said, _ in outputs} == images, outputs
    assert len(images) == 1


async def test_kill_9_in_the_middle_leaves_nothing_that_counts(build: Builder, cache: Path) -> None:
    build.folder.mkdir()
    mark = f"8{time.time_ns() % 10**9}"
    text = f"FROM full\nRUN echo begun; head -c 1M /dev/zero > /big; exec sleep {mark}\n"
    (build.folder / "Dockerfile").write_text(text)
    known = len(listed())
    process = builder(build)
    assert process.stdout is not None
    while "begun" not in await asyncio.to_thread(process.stdout.readline):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.communicate)
    assert list((cache / "lachesis/images/building").iterdir())
    assert len(listed()) == known
    await build("RUN echo after the kill > /a\n")
    await asyncio.to_thread(wait_for_the_end, mark)
    (cache / "lachesis/images/locks").joinpath("left").touch()
    prune(1e9)
    assert not list((cache / "lachesis/images/building").iterdir())
    assert not list((cache / "lachesis/images/locks").iterdir())


def sleeping(mark: str) -> bool:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == f"sleep\0{mark}\0".encode():
                return True
        except OSError:
            continue
    return False


def wait_for_the_end(mark: str) -> None:
    end = time.monotonic() + 60
    while sleeping(mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert not sleeping(mark)


async def test_a_cancelled_build_ends_its_command(build: Builder, cache: Path) -> None:
    mark = f"7{time.time_ns() % 10**9}"
    running = asyncio.create_task(build(f"RUN echo begun; exec sleep {mark}\n"))
    while not any("begun" in line for line in build.lines):
        await asyncio.sleep(0.05)
        assert not running.done(), running.result()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not sleeping(mark)
    assert not list((cache / "lachesis/images/building").iterdir())


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700m", "x", folder], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("this user cannot mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def make_bomb(path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar, Path("/dev/zero").open("rb") as zeros:
        member = tarfile.TarInfo("zeros")
        member.size = 300 << 20
        tar.addfile(member, zeros)


@pytest.mark.slow
async def test_a_full_disk_is_an_error_and_leaves_nothing(
    build: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small") as small:
        monkeypatch.setenv("XDG_CACHE_HOME", str(small))
        with pytest.raises(BackendError, match=r"Dockerfile:2: .*disk.*Next step: lachesis images prune"):
            await build("RUN head -c 300M /dev/zero > /big; sleep 60\n")
        make_bomb(build.folder / "bomb.tar.gz")
        with pytest.raises(BackendError, match=r"ADD bomb.*fewer than 512 MiB are left.*Next step: make room"):
            await build("ADD bomb.tar.gz /\n")
        (small / "filled").write_bytes(b"x" * (store.room() - (1 << 20)))
        with pytest.raises(BackendError, match=r"COPY bomb.*fewer than 512 MiB are left.*Next step: make room"):
            await build("COPY bomb.tar.gz /\n")
        assert not list((small / "lachesis/images/building").iterdir())
        assert len(listed()) == 1


async def test_list_and_prune(build: Builder) -> None:
    image = await build("RUN echo listed > /listed; echo nameserver ::1 > /etc/resolv.conf\n")
    key = Path(image.image).parent.name
    found = {layer.key: layer for layer in listed()}
    assert found[key].instruction.startswith("RUN echo listed > /listed;")
    assert found[found[key].parent].instruction.startswith("FROM ")
    assert found[key].size > 0
    os.utime(Path(image.image).parent / "layer.json", (1, 1))
    async with opened(build.backend, SandboxSpec(image=image.image)):
        assert prune(86_400.0) == []
    assert [layer.key for layer in prune(86_400.0)] == [key]
    assert not Path(image.image).exists()
    again = await build("RUN echo listed > /listed; echo nameserver ::1 > /etc/resolv.conf\n")
    assert again.image == image.image


async def test_a_base_that_changed_is_copied_again(build: Builder, tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "etc").mkdir(parents=True)
    for text in ("one", "two"):
        (base / "etc/mark").write_text(text)
        image = await image_for("own", build.backend, bases={"own": str(base)})
        assert files(image, "etc") == {"mark": text}


async def test_a_context_that_changes_makes_no_layer(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    build.folder.mkdir()
    (build.folder / "a").write_text("old")

    def tell(line: str) -> None:  # after the hash, before the copy
        if "COPY" in line:
            (build.folder / "a").write_text("new")

    (build.folder / "Dockerfile").write_text("FROM full\nCOPY a /a\n")
    with pytest.raises(ImageError, match="context changed"):
        await image_for(Build(build.folder), build.backend, bases=build.bases, tell=tell)
    (build.folder / "a").write_text("old")
    assert Path((await build("COPY a /a\n")).image, "a").read_text() == "old"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("WORKDIR /etc/passwd/x\n", "Not a directory.*Next step: correct it"),
        ("COPY Dockerfile /a/\nCOPY . /a/Dockerfile\n", "Not a directory.*Next step: correct it"),
        ("ENV A=" + "${X:-" * 3000 + "}" * 3000 + "\n", "recursion"),
        ("ARG " + "[" * 100_000 + "\nRUN false\n", "exit code 1"),
        ("ADD late.tar /\n", "out of range"),
    ],
)
async def test_what_no_layer_can_be_made_of_is_named(build: Builder, text: str, said: str) -> None:
    build.folder.mkdir()
    with tarfile.open(build.folder / "late.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("file")
        member.pax_headers = {"mtime": "1e300"}
        tar.addfile(member)
    with pytest.raises(ImageError, match=f"Dockerfile:.*{said}"):
        await build(text)


async def test_a_text_is_a_root_folder_or_a_name(build: Builder, tmp_path: Path) -> None:
    assert (await image_for(str(tmp_path), build.backend)).image == str(tmp_path)
    assert Path((await image_for("full", build.backend, bases=build.bases)).image, "etc/passwd").exists()
