"""Root folders as images, and programs that a sandbox may change, on this machine and on one that ssh reaches."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from sandbox_watch import opened, output

from backends import Backend, BackendUnavailable, SandboxSpec
from backends.ssh import SshBackend
from tests.support.root_images import bare_root, full_root
from tests.support.ssh_engine import ORDINARY_UID, ssh_engine

HOSTS = pytest.mark.parametrize("walled", ["local-bubblewrap", "ssh"], indirect=True)


@pytest.fixture(scope="module")
def images(roots: Path) -> dict[str, Path]:
    return {"full": full_root(roots / "full"), "bare": bare_root(roots / "bare")}


@HOSTS
@pytest.mark.parametrize("name", ["full", "bare"])
async def test_an_image_is_the_root_and_stays_as_it_is(walled: Backend, images: dict[str, Path], name: str) -> None:
    image = images[name]
    before = sorted(path.relative_to(image) for path in image.rglob("*"))
    script = (
        "pwd; id -u; echo x > /etc/new; mkdir /data; rm -r /etc/passwd /var; echo ${BASH_VERSION:+bash}; echo /[ud]*"
    )
    async with opened(walled, SandboxSpec(image=str(image), workdir="/made/on/demand")) as sandbox:
        result = await sandbox.exec(script, timeout=20)
        assert result.stdout.decode().split("\n")[:-1] == ["/made/on/demand", "1000", "bash", "/data /dev /usr"], result
        assert sorted(path.relative_to(image) for path in image.rglob("*")) == before
        assert (sandbox.python is None) == (name == "bare")
        await sandbox.write_bytes("file", b"content")
        assert await output(sandbox, "echo $(<file)") == "content"


@HOSTS
async def test_one_disk_limit_holds_for_all_of_an_image(walled: Backend, images: dict[str, Path]) -> None:
    async with opened(walled, SandboxSpec(image=str(images["full"]), disk_bytes=8 << 20)) as sandbox:
        places = "/usr/lib /etc /opt /tmp /dev/shm"
        fill = f"for p in {places}; do head -c 16M /dev/zero > $p/big; done 2>&1 | grep -c 'No space'"
        total = "du -ck " + " ".join(f"{place}/big" for place in places.split()) + " | tail -n 1 | cut -f 1"
        full, used = (await output(sandbox, f"{fill}; {total}", 60)).split()
        assert full == "5"
        assert 4096 < int(used) <= 8192


@HOSTS
async def test_programs_that_were_overwritten_inside_are_not_the_executors(
    walled: Backend, images: dict[str, Path]
) -> None:
    for spec in (SandboxSpec(), SandboxSpec(image=str(images["full"]))):
        async with opened(walled, spec) as sandbox:
            overwrite = "import os, sys; sys.stdout.write(os.path.dirname(os.__file__))"
            library = await output(sandbox, f"python3 -I -c '{overwrite}'")
            done = await sandbox.exec(
                f"for f in tarfile hmac hashlib shutil; do echo 'raise SystemExit(9)' > {library}/$f.py; done;"
                "echo overwritten > $(readlink -f $(which python3))",
                timeout=20,
            )
            if b"Read-only" in done.stderr:
                continue
            assert (await sandbox.exec("python3 -c 1", timeout=20)).exit_code != 0
            with tempfile.TemporaryDirectory() as folder:
                await sandbox.exec("mkdir d; echo 1 > d/file", timeout=20)
                await sandbox.download_dir("d", folder)
                assert (Path(folder) / "file").read_text() == "1\n"


@HOSTS
async def test_names_of_the_machine_resolve_in_an_image_with_a_network(
    walled: Backend, images: dict[str, Path]
) -> None:
    async with opened(walled, SandboxSpec(image=str(images["full"]), network=True)) as sandbox:
        assert await sandbox.read_bytes("/etc/resolv.conf") == Path("/etc/resolv.conf").read_bytes()


@HOSTS
@pytest.mark.parametrize("image", ["relative", "/no/such/folder", "/proc"])
async def test_an_image_that_cannot_be_used_is_rejected_with_the_reason(walled: Backend, image: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"image|overlay") as rejected:
        await walled.create(SandboxSpec(image=image))
    assert "Next step" in str(rejected.value)


async def test_an_ordinary_user_uses_an_image_of_their_own() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can let another user in")
    with ssh_engine(ordinary_user=True) as crowd:
        image = bare_root(crowd.folder / "bare")
        for path in (image, *image.rglob("*")):
            os.chown(path, ORDINARY_UID, ORDINARY_UID, follow_symlinks=False)
        async with opened(SshBackend(**crowd.options), SandboxSpec(image=str(image), disk_bytes=4 << 20)) as sandbox:
            assert await output(sandbox, "id -un; echo x > /etc/new; busybox cat /etc/new") == "agent\nx"
            size = await output(sandbox, "head -c 8000000 /dev/zero > /usr/big 2> /dev/null; wc -c < /usr/big")
            assert int(size) <= 4 << 20
        assert not (image / "etc/new").exists()
