"""Checkpoints that are images of a service: a Docker engine, Modal."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox_watch import output as succeeded
from sandbox_watch import until

from backends import (
    Backend,
    BackendUnavailable,
    ProcessesRunning,
    Sandbox,
    SandboxSpec,
    SupportsCheckpoint,
    SupportsRestore,
    WarmSandboxes,
    create_backend,
)
from lachesis import ToolContext
from lachesis_tools import ToolSessions
from tests.support.changed_trees import CHANGE, PATHS, changed
from tests.support.docker_engine import BARE_IMAGE, DockerEngine

USABLE = Callable[[str], Awaitable[Backend]]


@pytest.fixture(params=["docker", "modal"])
async def saved(request: pytest.FixtureRequest, usable_backend: USABLE) -> Backend:
    return await usable_backend(request.param)


async def output(sandbox: Sandbox, command: str) -> str:
    return await succeeded(sandbox, f"{command}\ntrue") + "\n"


def tree(found: list[Any]) -> Any:
    """Paths with kind, mode, time in seconds, contents and number of names; and which paths are one file."""
    _, _, entries, links = found
    return {path: [kind, mode, time // 10**9, *rest] for path, (kind, mode, time, *rest) in entries.items()}, links


def operations(seed: int) -> list[tuple[str, str, str]]:
    chance = random.Random(seed)
    kinds = ["write", "append", "mode", "remove", "folder_at", "truncate", "rename", "link", "symlink"]
    return [(chance.choice(kinds), chance.choice(PATHS), chance.choice([*PATHS, "ab"])) for _ in range(40)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_a_child_has_the_tree_of_its_parent(saved: Backend, seed: int) -> None:
    parent: Any = await saved.create(SandboxSpec())
    made: list[Any] = [parent]
    try:
        await parent.write_bytes("/tmp/change", CHANGE.encode())
        await parent.exec("mkdir -p t/d/e && echo 0 > t/a && ln t/a t/d/b", timeout=20)
        for generation in range(2):
            folder = f"{parent.workdir}/t"
            wanted = tree(await changed(made[-1], folder, 100 * generation, operations(2 * seed + generation)))
            made.append(await made[-1].fork())
            assert tree(await changed(made[-1], folder, 0, [])) == wanted
            await made[-1].exec("rm -rf t", timeout=20)
            assert tree(await changed(made[-2], folder, 0, [])) == wanted
            await made[-1].exec("mkdir -p t/d/e", timeout=20)
    finally:
        for sandbox in made:
            await sandbox.close()


async def test_the_shell_goes_on_where_it_was(saved: Backend) -> None:
    parent: Any = await saved.create(SandboxSpec(env={"GIVEN": "1"}, labels={"task_id": "first"}))
    try:
        await parent.exec("mkdir -p a; cd a; export MARK='x y'; echo one > file", timeout=20)
        checkpoint = await parent.checkpoint()
        await parent.exec("cd /; unset MARK; rm a/file", timeout=20)
        child = await parent.fork(checkpoint, labels={"task_id": "second"})
        try:
            assert checkpoint.sandbox == parent.id and checkpoint.cwd == f"{parent.workdir}/a"
            assert await output(child, 'echo "$PWD $MARK $GIVEN"; cat file') == f"{checkpoint.cwd} x y 1\none\n"
            assert {(info.id, info.task_id) for info in await saved.sandboxes()} >= {
                (parent.id, "first"),
                (child.id, "second"),
            }
        finally:
            await child.close()
    finally:
        await parent.close()


async def test_what_runs_is_named_and_can_be_left_out(saved: Backend) -> None:
    parent: Any = await saved.create(SandboxSpec())
    try:
        process = await parent.start("while :; do echo x >> log; sleep 0.01; done")
        with pytest.raises(ProcessesRunning, match="running='left out'"):
            await parent.checkpoint()
        await parent.exec("until test -s log; do sleep 0.01; done", timeout=20)
        checkpoint = await parent.checkpoint(running="left out")
        assert any("bash" in command for command in checkpoint.left_out)
        size = await output(parent, "wc -l < log")
        assert (await process.status()).exit_code is None
        await parent.exec(f"until test $(wc -l < log) -gt {int(size)}; do sleep 0.01; done", timeout=20)
        child = await parent.fork(checkpoint)
        try:
            kept = await output(child, "wc -l < log")
            assert 0 < int(kept) <= int(size)
            await asyncio.sleep(0.1)
            assert await output(child, "wc -l < log") == kept
        finally:
            await child.close()
    finally:
        await parent.close()


async def test_what_no_image_has_is_refused_by_name(saved: Backend) -> None:
    parent: Any = await saved.create(SandboxSpec())
    try:
        await parent.exec("echo 1 > /dev/shm/kept", timeout=20)
        with pytest.raises(BackendUnavailable, match=r"files in /dev/shm \(kept\).*Next step"):
            await parent.checkpoint()
        await parent.exec("rm /dev/shm/kept", timeout=20)
        await (await parent.fork()).close()
        other: Any = await create_backend("local").create(SandboxSpec())
        try:
            with pytest.raises(BackendUnavailable, match="another backend"):
                await parent.fork(await other.checkpoint())
        finally:
            await other.close()
    finally:
        await parent.close()


async def test_rewards_try_things_in_a_fork(saved: Backend) -> None:
    async with ToolSessions(saved) as sessions:
        ctx: Any = ToolContext(sessions.open("t"))
        await ctx.write_file("answer", "right")
        before = await ctx.checkpoint()
        other = await ctx.fork(before)
        await other.write_file("answer", "wrong")
        assert await ctx.read_file("answer") == "right" and await other.read_file("answer") == "wrong"
        with pytest.raises(BackendUnavailable, match=r"Next step: .*fork"):
            await ctx.restore(before)


async def test_warm_sandboxes_are_new_ones(saved: Backend) -> None:
    warm = WarmSandboxes(saved, most=1)
    for _ in range(2):
        lease = await warm.lease(SandboxSpec())
        assert isinstance(lease.sandbox, SupportsCheckpoint)
        assert not isinstance(lease.sandbox, SupportsRestore)
        assert await output(lease.sandbox, "ls /tmp; touch /tmp/x") == "\n"
        await lease.release()
    await warm.close()


# --- images of an engine ---------------------------------------------------------------------------------------------


def images(engine: DockerEngine) -> list[str]:
    names = [name for row in engine.call("GET", "/images/json") for name in row["RepoTags"] or []]
    return [name for name in names if "lachesis-checkpoint" in name]


@pytest.mark.slow
async def test_an_image_goes_with_the_last_that_needs_it(docker: DockerEngine) -> None:
    before = len(docker.call("GET", "/images/json?all=1"))
    parent: Any = await create_backend("docker", **docker.options).create(SandboxSpec(image=BARE_IMAGE))
    checkpoint = await parent.checkpoint()
    child = await parent.fork(checkpoint)
    await child.exec("echo 1 > /f", timeout=20)
    later = await child.checkpoint()
    pulling = create_backend("docker", **{**docker.options, "pull": "always"})  # no registry has it
    other: Any = await pulling.create(SandboxSpec(image=checkpoint.image))
    with pytest.raises(BackendUnavailable, match="another backend"):
        await other.fork(checkpoint)
    await other.close()
    await parent.close()
    del checkpoint, parent
    gc.collect()
    await asyncio.sleep(0.5)
    assert len(images(docker)) == 2, "a child still runs on it"
    await child.close()
    del child
    gc.collect()
    await until(lambda: len(images(docker)) == 1)
    del later
    gc.collect()
    await until(lambda: len(docker.call("GET", "/images/json?all=1")) == before)


OWNER = """
import asyncio, json, sys
from backends import SandboxSpec, create_backend

async def main():
    parent = await create_backend("docker", **json.loads(sys.argv[1])).create(SandboxSpec())
    checkpoint = await parent.checkpoint()
    child = await parent.fork(checkpoint)
    print("ready", flush=True)
    if sys.argv[2] == "kill":
        await asyncio.sleep(1000)
    await child.close()
    await parent.close()

asyncio.run(main())
"""


async def test_a_process_that_ends_leaves_no_image(docker: DockerEngine) -> None:
    before = images(docker)  # garbage of other tests
    arguments = [sys.executable, "-c", OWNER, json.dumps(docker.options), "end"]
    done = await asyncio.to_thread(
        subprocess.run, arguments, cwd=Path(__file__).parents[2], capture_output=True, timeout=120
    )
    assert done.returncode == 0, done
    assert set(images(docker)) <= set(before)


async def test_images_of_a_killed_process_are_reaped(docker: DockerEngine) -> None:
    gc.collect()
    await until(lambda: images(docker) == [])  # no garbage of other tests
    backend = create_backend("docker", **docker.options)
    arguments = [sys.executable, "-c", OWNER, json.dumps(docker.options), "kill"]
    owner = await asyncio.create_subprocess_exec(
        *arguments, cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    own: Any = await backend.create(SandboxSpec())
    kept = await own.checkpoint()
    os.kill(owner.pid, signal.SIGKILL)
    await owner.wait()
    assert len(images(docker)) == 2
    await backend.reap()
    assert images(docker) == [kept.image], "the other process has ended"
    child = await own.fork(kept)
    image = await child.snapshot()
    await backend.reap(everyone=True)
    assert images(docker) == []
    assert docker.call("DELETE", f"/images/{image}"), "an image of a user was removed"
