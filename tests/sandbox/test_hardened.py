"""The profile `hardened`: what it insists on, and what it says where that cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_watch import opened, output

from backends import BackendUnavailable, SandboxSpec, create_backend
from backends.docker import hardened as docker_hardened
from backends.docker.client import EngineInfo
from backends.docker.container import Image, Options
from backends.host import hardened
from backends.host.bubblewrap import Bubblewrap
from backends.host.cgroups import Cgroups
from backends.limits import countable
from backends.spec import HARDENED_LIMITS, hardened_spec
from tests.support.docker_engine import FULL_IMAGE, DockerEngine
from tests.support.root_images import full_root
from tests.support.ssh_engine import ssh_engine

CGROUPS = Cgroups(2, {name: Path("/sys/fs/cgroup") for name in ("cpu", "memory", "pids")})
ENGINE = EngineInfo(
    product="Docker",
    version="27",
    api="v1.47",
    rootless=False,
    memory_limit=True,
    cpu_limit=True,
    pids_limit=True,
    cpus=2.0,
    selinux=False,
    storage="overlay2 on extfs",
    architecture="x86_64",
    userns=True,
    runtimes=("io.containerd.runc.v2", "runc", "runsc"),
    seccomp="builtin",
)
REMAPPED = """
set -e
for file in passwd group subuid subgid; do touch /etc/$file; cp /etc/$file "$0/$file"; done
echo remap:x:70000:70000::/:/bin/false >> "$0/passwd"
echo remap:x:70000: >> "$0/group"
for file in subuid subgid; do echo remap:200000:65536 >> "$0/$file"; done
for file in passwd group subuid subgid; do mount --bind "$0/$file" /etc/$file; done
exec "$@" --userns-remap remap
"""


def test_every_limit_is_set_and_a_spec_keeps_its_own() -> None:
    spec = hardened_spec(SandboxSpec(pids=7, network=True), disk_bytes=5)
    assert (spec.pids, spec.disk_bytes, spec.network) == (7, 5, True)
    assert (spec.cpus, spec.memory_bytes) == (HARDENED_LIMITS["cpus"], HARDENED_LIMITS["memory_bytes"])


@pytest.mark.parametrize(
    ("uid", "machine", "available", "bwrap", "words"),
    [
        (1000, "x86_64", CGROUPS, Bubblewrap("bwrap"), []),
        (1000, "aarch64", CGROUPS, None, []),
        (0, "x86_64", CGROUPS, Bubblewrap("bwrap"), ["user 0"]),
        (1000, "x86_64", CGROUPS, Bubblewrap("bwrap", disable_userns=False), ["bubblewrap 0.8"]),
        (1000, "riscv64", CGROUPS, None, ["riscv64"]),
        (1000, "x86_64", Cgroups(0), None, ["cpus, memory_bytes, pids cannot be limited"]),
        (0, "riscv64", Cgroups(2, {"pids": Path("/")}, {"cpu": "denied"}), None, ["user 0", "riscv64", "denied"]),
    ],
)
def test_a_machine_says_all_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    machine: str,
    available: Cgroups,
    bwrap: Bubblewrap | None,
    words: list[str],
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.1", "", machine)))
    lacking = hardened.lacks(available, bwrap)
    assert len(lacking) == len(words)
    for (what, step), word in zip(lacking, words, strict=True):
        assert word in f"{what}: {step}"
        assert step
    if words:
        with pytest.raises(BackendUnavailable, match=r"profile 'hardened'.*Next step: "):
            hardened.require_nothing("this", lacking)


def test_an_engine_says_all_that_it_lacks() -> None:
    assert docker_hardened.hardened(Options(), ENGINE).runtime == "runsc"
    bare = EngineInfo(**{name: getattr(ENGINE, name) for name in ENGINE.__slots__} | {"userns": False, "runtimes": ()})
    with pytest.raises(BackendUnavailable) as error:
        docker_hardened.hardened(Options(user="root", capabilities=("CHOWN",)), bare)
    for word in ("gVisor", "userns-remap", "option user", "capabilities"):
        assert word in str(error.value)
    with pytest.raises(BackendUnavailable, match="'runc' is not one"):
        docker_hardened.hardened(Options(runtime="runc"), ENGINE)


def test_there_is_no_root_inside_and_every_limit_is_set() -> None:
    image = Image("sha256:1", {}, "", "", ())
    spec, options = docker_hardened.in_image(SandboxSpec(), Options(), image)
    assert (options.user, spec.workdir, spec.disk_bytes) == ("1000:1000", "/workspace", docker_hardened.DISK)
    assert None not in (spec.cpus, spec.memory_bytes, spec.pids)
    own = Image("sha256:1", {}, "/srv", "app", ())
    assert docker_hardened.in_image(SandboxSpec(), Options(), own)[1].user is None, "the image's user is not root"


async def test_the_next_step_comes_with_the_error_of_every_backend() -> None:
    with pytest.raises(ValueError, match="isolation='bubblewrap'"):
        create_backend("local", isolation="none", profile="hardened")
    with pytest.raises(ValueError, match=r"has no profile 'hardened'.*Next step"):
        create_backend("modal", profile="hardened")
    with pytest.raises(ValueError, match="'standard' or 'hardened'"):
        create_backend("docker", profile="harder")
    if os.geteuid() == 0:
        backend = create_backend("local", profile="hardened")
        assert "ordinary user" in (await backend.check()).fix
        with pytest.raises(BackendUnavailable, match=r"user 0 for the kernel.*Next step: run it as an ordinary user"):
            await backend.create(SandboxSpec())


async def test_an_ordinary_user_of_a_far_machine_learns_that_limits_are_missing() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can let another user in")
    with ssh_engine(ordinary_user=True) as engine:
        availability = await create_backend("ssh", **engine.options, profile="hardened").check()
        assert not availability.ok
        assert "cpus, memory_bytes" in availability.detail
        assert "user 0" not in availability.detail
        standard = await create_backend("ssh", **engine.options).check()
        assert standard.ok and "an ordinary user" in standard.isolation
        assert any("cpus" in line for line in standard.better)


@pytest.fixture
def gvisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerEngine]:
    """An engine with gVisor and remapped users, which exist for it alone."""
    runsc = shutil.which("runsc")
    if runsc is None or shutil.which("dockerd") is None or os.geteuid() != 0:
        pytest.skip("it needs root, dockerd and runsc (Debian: apt-get install docker.io runsc)")
    folder = Path(tempfile.mkdtemp(prefix="ltd-"))
    folder.chmod(0o755)
    program = folder / "runsc"
    program.write_text(f'#!/bin/sh\nexec {runsc} --platform=ptrace --network=none "$@"\n')
    program.chmod(0o755)
    wrapper = folder / "dockerd"
    wrapper.write_text(
        f"#!/bin/sh\nexec unshare --mount sh -c '{REMAPPED}' {folder} {shutil.which('dockerd')} \"$@\"\n"
    )
    wrapper.chmod(0o755)
    engine = DockerEngine(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        try:
            engine.start("--add-runtime", f"runsc={program}")
            engine.add_image(FULL_IMAGE, full_root(tmp_path_factory.getbasetemp() / "roots" / "full"))
            yield engine
        finally:
            engine.stop()


async def test_gvisor_runs_commands_of_an_ordinary_user_in_a_kernel_of_its_own(gvisor: DockerEngine) -> None:
    backend = create_backend("docker", **gvisor.options, profile="hardened")
    availability = await backend.check()
    assert availability.ok, availability
    assert "the kernel of runsc" in availability.isolation and "remapped users" in availability.isolation
    async with opened(backend) as sandbox:
        assert (
            await output(sandbox, "uname -r; id -u; pwd; echo kept > file; cat file") == "4.4.0\n1000\n/workspace\nkept"
        )
        full = await sandbox.exec("head -c 400M /dev/zero > full", timeout=60)
        assert full.exit_code != 0 and b"No space" in full.stderr
        socket = await sandbox.exec("python3 -c 'import socket; socket.socket(40, 1)'", timeout=30)
        assert b"Address family not supported" in socket.stderr


def test_a_machine_with_few_epoll_watches_for_its_memory_says_so(tmp_path: Path) -> None:
    setting = tmp_path / "epoll/max_user_watches"
    assert countable(str(tmp_path)) == []
    setting.parent.mkdir()
    for watches, words in (
        (5_491_511, ["all 5491511 epoll watches", "sysctl -w fs.epoll.max_user_watches="]),
        (10**9, []),
    ):
        setting.write_text(f"{watches}\n")
        said = countable(str(tmp_path))
        assert len(said) == bool(words) and all(word in said[0] for word in words)


def test_doctor_says_of_a_backend_what_isolates_it() -> None:
    line = [sys.executable, "-m", "lachesis", "doctor", "--backend", "local"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    for word in ("isolation: bubblewrap", "filtered system calls", "limits: ", "better: for a kernel of its own"):
        assert word in done.stdout
    bad = subprocess.run([*line[:4], "--options", "{profile: hardened}"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2 and "needs --backend" in bad.stderr
