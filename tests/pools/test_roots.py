"""Images of Dockerfiles on workers of other machines, which do not have the folders."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends import BackendError, BackendUnavailable, SandboxSpec, create_backend
from backends.images import Build, image_for
from lachesis_pools.roots import PART, RootFolders, RootSender
from tests.support.pool_engine import pool_engine
from tests.support.root_images import full_root


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a worker without the folders of this machine needs a mount")
async def test_a_worker_gets_the_image_that_a_run_has_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (tmp_path / "task").mkdir()
    steps = ("FROM base", "ENV A=b", "WORKDIR /app", "COPY words .", "RUN tr a-c x-z < words > back")
    (tmp_path / "task/Dockerfile").write_text("\n".join(steps) + "\n")
    (tmp_path / "task/words").write_text("abc\n")
    root = full_root(tmp_path / "base")
    with pool_engine(tmp_path / "pool", "--engine", "none") as pool:
        hidden = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(cache)]
        command = [sys.executable, "-m", "lachesis_pools", "worker", "--connect", pool.place["url"], "--slots", "3"]
        worker = await asyncio.create_subprocess_exec(
            *hidden, *command, env={**os.environ, "LACHESIS_POOL_TOKEN": pool.place["token"]}, stderr=subprocess.PIPE
        )
        try:
            pool.ready(1)
            backend = create_backend("pool", **pool.options)
            built = await image_for(Build(tmp_path / "task"), backend, bases={"base": str(root)})
            assert built.workdir == "/app" and Path(built.image).is_dir()
            spec = SandboxSpec(image=built.image, env=built.env, workdir=built.workdir, root=built.root)
            made = await asyncio.gather(*(backend.create(spec) for _ in range(3)))
            for sandbox in made:
                ran = await sandbox.exec("cat words back; echo $A; stat -c %a /tmp", timeout=30)
                assert ran.stdout == b"abc\nxyz\nb\n1777\n", ran
            await asyncio.gather(*(sandbox.close() for sandbox in made))
            with pytest.raises(BackendUnavailable, match=r"no folder /nowhere/root\. Next step"):
                await backend.create(SandboxSpec(image="/nowhere/root"))
        finally:
            worker.terminate()
            await worker.wait()


async def test_a_transfer_that_fails_leaves_nothing_and_the_next_one_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "source"
    root.mkdir()
    (root / "large").write_bytes(os.urandom(2 * PART + 17))
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o4755)
    (root / "link").symlink_to("run")
    image = f"/elsewhere/layers/{'a1' * 16}/root"
    folders, calls = RootFolders(), 0

    async def broken() -> tuple[bytes, bool]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise BackendError("the run is gone")
        return await sender.part()

    sender = RootSender(str(root))
    with pytest.raises(BackendError, match="the run is gone"):
        await folders.have(image, broken)
    sender.close()
    assert [path.name for path in (tmp_path / "cache").rglob("incoming-*")] == []
    sender = RootSender(str(root))
    first, second = await asyncio.gather(folders.have(image, sender.part), folders.have(image, sender.part))
    assert first == second
    assert (Path(first) / "large").read_bytes() == (root / "large").read_bytes()
    assert (Path(first) / "run").stat().st_mode & 0o7777 == 0o4755 and (Path(first) / "link").is_symlink()
    assert Path(first).parent.stat().st_mode & 0o777 == 0o700
    missing = RootSender(str(tmp_path / "none"))
    with pytest.raises(BackendError, match="tar could not read"):
        await missing.part()
