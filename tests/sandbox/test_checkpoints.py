"""Checkpoints, forks, restores and resets: each sandbox goes on as a plain copy would, and sees nothing of others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sandbox_watch import host_processes, until
from sandbox_watch import output as succeeded

from backends import (
    Backend,
    BackendError,
    BackendUnavailable,
    LeaseOver,
    ProcessesRunning,
    Sandbox,
    SandboxCheckpoint,
    SandboxSpec,
    SupportsCheckpoint,
    WarmSandboxes,
    create_backend,
)
from lachesis import ToolContext
from lachesis_tools import ToolSessions
from tests.support.changed_trees import CHANGE, PATHS, changed

TEXTS = st.text("abc", min_size=0, max_size=6)
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["write", "append", "mode"]), st.sampled_from(PATHS), TEXTS),
    st.tuples(st.sampled_from(["remove", "folder_at", "truncate"]), st.sampled_from(PATHS), st.just("")),
    st.tuples(st.sampled_from(["rename", "link", "symlink"]), st.sampled_from(PATHS), st.sampled_from(PATHS)),
)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(OPERATIONS, min_size=1, max_size=8),
        st.sampled_from(["nothing", "checkpoint", "fork", "fork from", "restore"]),
        st.integers(0, 3),
    ),
    min_size=2,
    max_size=7,
)


async def output(sandbox: Sandbox, command: str) -> str:
    return await succeeded(sandbox, f"{command}\ntrue") + "\n"


@pytest.fixture
async def local() -> Backend:
    return create_backend("local")


@pytest.fixture
async def parent(local: Backend) -> AsyncIterator[Any]:
    sandbox = await local.create(SandboxSpec())
    yield sandbox
    await sandbox.close()


def assert_same(mine: list[Any], theirs: list[Any]) -> None:
    tree, expected = mine[2], theirs[2]
    wrong = {path: (tree.get(path), expected.get(path)) for path in {*tree, *expected}}
    assert {path: both for path, both in wrong.items() if both[0] != both[1]} == {}
    assert mine == theirs


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # an example takes a second: to shrink one takes minutes
)
@given(steps=STEPS)
async def test_parents_and_children_have_the_trees_of_plain_copies(local: Backend, steps: list[Any]) -> None:
    first, oracle = await local.create(SandboxSpec()), await local.create(SandboxSpec())
    worlds: list[Any] = [first]
    kept: list[Any] = []
    try:
        for sandbox in (first, oracle):
            await sandbox.write_bytes("/tmp/change", CHANGE.encode())
        await first.exec("mkdir -p t/d/e && echo 0 > t/a && ln t/a t/d/b && touch -d @99 t t/d t/d/e t/a", timeout=20)
        await oracle.exec("mkdir -p w0/d/e && echo 0 > w0/a && ln w0/a w0/d/b", timeout=20)
        await oracle.exec("touch -d @99 w0 w0/d w0/d/e w0/a", timeout=20)
        clock = 100
        for number, operations, action, chosen in steps:
            place = number % len(worlds)
            mine = await changed(worlds[place], "/workspace/t", clock, operations)
            theirs = await changed(oracle, f"/workspace/w{place}", clock, operations)
            assert_same(mine, theirs)
            clock = mine[0]
            if action == "checkpoint":
                kept.append(await worlds[place].checkpoint())
                await oracle.exec(f"cp -a /workspace/w{place} /workspace/k{len(kept) - 1}", timeout=20)
            elif action == "restore" and kept:
                await worlds[place].restore(kept[chosen % len(kept)])
                copy = f"cp -a /workspace/k{chosen % len(kept)} /workspace/w{place}"
                await oracle.exec(f"rm -rf /workspace/w{place}; {copy}", timeout=20)
            elif action.startswith("fork") and len(worlds) < 4 and (kept or action == "fork"):
                old = kept[chosen % len(kept)] if action == "fork from" else None
                source = f"w{place}" if old is None else f"k{chosen % len(kept)}"
                worlds.append(await worlds[place].fork(old))
                await oracle.exec(f"cp -a /workspace/{source} /workspace/w{len(worlds) - 1}", timeout=20)
        for place, sandbox in enumerate(worlds):
            mine = await changed(sandbox, "/workspace/t", clock, [])
            assert_same(mine, await changed(oracle, f"/workspace/w{place}", clock, []))
    finally:
        for sandbox in (*worlds, oracle):
            await sandbox.close()


async def test_the_shell_goes_on_where_it_was(parent: Any) -> None:
    await parent.exec("mkdir -p a; cd a; export MARK='x y'; echo one > file", timeout=20)
    child = await parent.fork()
    try:
        assert await output(child, 'pwd; echo "$MARK"; cat file') == "/workspace/a\nx y\none\n"
        await parent.exec("cd /; unset MARK", timeout=20)
        assert await output(child, 'echo "$PWD $MARK"') == "/workspace/a x y\n"
        checkpoint = await child.checkpoint()
        await child.exec("cd /tmp; export MARK=other; rm /workspace/a/file; mkfifo /tmp/f", timeout=20)
        await child.restore(checkpoint)
        assert await output(child, 'echo "$PWD $MARK"; cat file; ls /tmp') == "/workspace/a x y\none\n"
        assert checkpoint.cwd == "/workspace/a" and checkpoint.sandbox == child.id
    finally:
        await child.close()


async def test_every_place_that_can_be_written_travels(parent: Any) -> None:
    places = ["/workspace/f", "/tmp/f", "/home/agent/f", "/etc/f", "/usr/local/f", "/usr/bin/f", "/dev/shm/f", "/f"]
    await parent.exec("; ".join(f"echo {place} > {place}" for place in places) + "; rm /usr/bin/env", timeout=20)
    child = await parent.fork()
    grandchild = await child.fork()
    try:
        for sandbox in (parent, child, grandchild):
            assert await output(sandbox, f"cat {' '.join(places)}") == "".join(f"{place}\n" for place in places)
            assert (await sandbox.exec("test -e /usr/bin/env", timeout=20)).exit_code == 1
    finally:
        await child.close()
        await grandchild.close()


async def test_what_runs_is_named_and_can_be_left_out(parent: Any) -> None:
    process = await parent.start("while :; do echo x >> /workspace/log; sleep 0.01; done")
    with pytest.raises(ProcessesRunning, match="running='left out'") as caught:
        await parent.checkpoint()
    assert any("bash" in command for command in caught.value.commands)
    await parent.exec("until test -s log; do sleep 0.01; done; ln log twin; mkdir d; touch -d @7 d", timeout=20)
    checkpoint = await parent.checkpoint(running="left out")
    assert checkpoint.left_out
    child = await parent.fork(checkpoint)
    try:
        before = await output(parent, "wc -l < log")
        assert (await process.status()).exit_code is None
        await parent.exec(f"until test $(wc -l < log) -gt {int(before)}; do sleep 0.01; done", timeout=20)
        size = await output(child, "wc -l < log; stat -c %h:%Y twin d; pgrep -c sleep")
        assert int(size.split()[0]) <= int(before) and size.split()[1:] == ["2:" + size.split()[1][2:], "2:7", "0"]
        await asyncio.sleep(0.1)
        assert await output(child, "wc -l < log; stat -c %h:%Y twin d; pgrep -c sleep") == size
    finally:
        await child.close()


async def test_requests_that_come_meanwhile_wait(parent: Any) -> None:
    await parent.exec("echo 0 > count", timeout=20)

    async def count() -> None:
        for _ in range(20):
            await parent.write_bytes("count", b"%d" % (int(await parent.read_bytes("count")) + 1))

    async def checkpoints() -> list[SandboxCheckpoint]:
        return [await parent.checkpoint() for _ in range(8)]

    _, taken = await asyncio.gather(count(), checkpoints())
    assert await parent.read_bytes("count") == b"20" and len(taken) == 8


async def test_a_checkpoint_of_nothing_new_is_no_layer(parent: Any) -> None:
    first = await parent.checkpoint()
    assert (await parent.checkpoint()).layers == first.layers
    await parent.exec("chmod 700 /workspace", timeout=20)
    assert len((await parent.checkpoint()).layers) == 2
    await parent.exec("chmod 711 /", timeout=20)
    assert len((await parent.checkpoint()).layers) == 3


async def test_what_commands_left_does_not_reach_the_fresh_commands_of_a_child(parent: Any) -> None:
    spoil = "echo /tmp/evil.so > /etc/ld.so.preload; echo 'echo evil' > /tmp/b; export BASH_ENV=/tmp/b PATH=/tmp"
    await parent.exec(spoil, timeout=20)
    child = await parent.fork()
    try:
        done = await child.exec("cat /proc/self/maps | grep -c evil; echo good", timeout=20, fresh=True)
        assert (done.stdout, done.stderr) == (b"0\ngood\n", b"")
        assert await child.read_bytes("/etc/ld.so.preload") == b"/tmp/evil.so\n", "it is where it was"
    finally:
        await child.close()


async def test_links_do_not_lead_a_mount_outside(parent: Any) -> None:
    """The folders of mounts are found without following links; those of others are only files."""
    await parent.exec("ln -s /proc/1/root /tmp/out; ln -s / /workspace/root; mkdir /tmp/dev", timeout=20)
    child = await parent.fork()
    try:
        assert await output(child, "ls /tmp/dev; readlink /tmp/out") == "/proc/1/root\n"
    finally:
        await child.close()


async def test_children_cost_their_own_changes_and_see_no_sibling(parent: Any) -> None:
    await parent.exec("head -c 20000000 /dev/urandom > big", timeout=20)
    checkpoint = await parent.checkpoint()
    children = [await parent.fork(checkpoint) for _ in range(8)]
    try:
        for number, child in enumerate(children):
            await child.exec(f"echo {number} > own; echo {number} > /dev/shm/own", timeout=20)
        # Of its own file system each: the memory of the machine changes with other tests.
        own = [os.fstatvfs(child._launched.disk.own.fd) for child in children]
        assert all((disk.f_blocks - disk.f_bfree) * disk.f_frsize < 2_000_000 for disk in own), "memory of 8 children"
        whole = os.fstatvfs(checkpoint.layers[0].fd)
        assert (whole.f_blocks - whole.f_bfree) * whole.f_frsize > 20_000_000
        for number, child in enumerate(children):
            assert await output(child, "cat own /dev/shm/own; ls | wc -l") == f"{number}\n{number}\n2\n"
            assert (await child.exec("cmp big <(cat big)", timeout=20)).exit_code == 0
        assert await output(parent, "ls; ls /dev/shm") == "big\n"
    finally:
        await asyncio.gather(*(child.close() for child in children))


def shared_memory() -> int:
    with Path("/proc/meminfo").open() as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Shmem:"))


async def test_the_disk_of_a_child_is_bounded_as_that_of_its_parent(local: Backend) -> None:
    parent: Any = await local.create(SandboxSpec(disk_bytes=8 << 20))
    child: Any = await parent.fork()
    try:
        for sandbox in (parent, child):
            done = await sandbox.exec("head -c 20000000 /dev/zero > big", timeout=20)
            assert done.exit_code != 0 and b"No space left" in done.stderr
            assert (await sandbox.exec("rm big; echo x > small", timeout=20)).exit_code == 0
    finally:
        await parent.close()
        await child.close()


async def test_a_reset_sandbox_has_nothing_of_its_last_user(parent: Any) -> None:
    base = await parent.checkpoint()
    variables, files = (
        await output(parent, "export -p"),
        await output(parent, "find / -xdev -newer /etc/passwd | wc -l"),
    )
    await parent.exec("yes | head -c 3000000; ", timeout=20, max_output=10)
    await parent.start("sleep 1000")
    await parent.exec(
        "setsid sleep 1000 & cd /tmp; export SECRET=1; echo s > /usr/bin/ls; rm -rf /home/agent", timeout=20
    )
    await parent.exec("ipcmk -M 100000 -Q; echo x > /dev/shm/x; echo /x > /etc/ld.so.preload", timeout=20)
    last = await parent.exec("yes | head -c 3000000", timeout=20, max_output=10)
    await parent.reset(base, labels={"task_id": "next"})
    assert await parent.processes() == []
    with pytest.raises(FileNotFoundError):
        await parent.read_output(last, limit=10)
    assert await output(parent, "export -p") == variables
    assert await output(parent, "find / -xdev -newer /etc/passwd | wc -l") == files
    assert await output(parent, "ls /dev/shm /workspace /home; pgrep -c sleep; ipcs -mq | grep -c 0x; pwd") == (
        "/dev/shm:\n\n/home:\nagent\n\n/workspace:\n0\n0\n/workspace\n"
    )


QUEUE = """python3 -c '
import ctypes, os, sys
print(ctypes.CDLL(None).mq_open(b"/queue", os.O_RDWR | int(sys.argv[1]), 0o600, None) >= 0)
' """


async def test_message_queues_do_not_reach_the_next_user(parent: Any) -> None:
    base = await parent.checkpoint()
    assert await output(parent, f"{QUEUE} {os.O_CREAT}; echo x > x") == "True\n"
    assert await output(parent, f"{QUEUE} 0") == "True\n", "without a process that has it open"
    await parent.checkpoint()
    assert await output(parent, f"{QUEUE} 0") == "True\n", "a checkpoint takes nothing from its parent"
    await parent.reset(base)
    assert await output(parent, f"{QUEUE} 0") == "False\n"
    await parent.reset(base)
    assert await output(parent, f"{QUEUE} {os.O_CREAT}") == "True\n"
    await parent.reset(base)
    assert await output(parent, f"{QUEUE} 0") == "False\n", "where no file was written"


async def test_a_checkpoint_can_be_used_by_another_sandbox_and_after_its_own_is_closed(local: Backend) -> None:
    first: Any = await local.create(SandboxSpec())
    await first.exec("echo kept > file", timeout=20)
    checkpoint = await first.checkpoint()
    await first.close()
    second: Any = await local.create(SandboxSpec())
    try:
        await second.exec("echo other > file; sleep 1000 &", timeout=20)
        await second.restore(checkpoint)
        assert await output(second, "cat file; pgrep -c sleep") == "kept\n0\n"
    finally:
        await second.close()


async def test_what_a_session_has_opened_is_in_no_checkpoint() -> None:
    async with ToolSessions(create_backend("local")) as sessions:
        session = sessions.open("t")
        session.rollout_session = object()
        with pytest.raises(BackendUnavailable, match=r"session\(item\)"):
            await ToolContext(session).fork()


async def test_without_isolation_there_are_no_checkpoints() -> None:
    warm = WarmSandboxes(create_backend("local", isolation="none"), most=1)
    for _ in range(2):
        lease = await warm.lease(SandboxSpec())
        assert await output(lease.sandbox, "ls; touch x") == "\n"
        await lease.release()
    await warm.close()
    sandbox: Any = await create_backend("local", isolation="none").create(SandboxSpec())
    try:
        assert isinstance(sandbox, SupportsCheckpoint)
        with pytest.raises(BackendUnavailable, match="Next step"):
            await sandbox.checkpoint()
    finally:
        await sandbox.close()


async def test_a_checkpoint_of_a_dead_sandbox_is_a_backend_error(parent: Any) -> None:
    checkpoint = await parent.checkpoint()
    await parent.close()
    for call in (parent.checkpoint(), parent.restore(checkpoint), parent.reset(checkpoint)):
        with pytest.raises(BackendError):
            await call


async def test_a_cancelled_checkpoint_leaves_the_sandbox_usable(parent: Any) -> None:
    for delay in (0.0, 0.001, 0.003, 0.006, 0.01):
        await parent.exec("date > now", timeout=20)
        call = asyncio.create_task(parent.checkpoint())
        await asyncio.sleep(delay)
        call.cancel()
        await asyncio.wait({call})
        assert await output(parent, "echo usable") == "usable\n"


async def test_warm_sandboxes_are_used_again_and_are_as_new(local: Backend) -> None:
    warm = WarmSandboxes(local, most=2)
    seen = set()
    for number in range(6):
        leases = [await warm.lease(SandboxSpec(labels={"task_id": f"t{number}-{each}"})) for each in range(3)]
        for lease in leases:
            sandbox = lease.sandbox
            seen.add(sandbox.id)
            assert await output(sandbox, 'ls -A /workspace /tmp /home/agent; pgrep -c sleep; printf "$MARK"') == (
                "/home/agent:\n\n/tmp:\n\n/workspace:\n0\n"
            )
            await sandbox.exec("echo x > /workspace/x; echo x > /tmp/x; export MARK=1; sleep 1000 &", timeout=20)
        listed = {info.task_id for info in await local.sandboxes()}
        assert {f"t{number}-{each}" for each in range(3)} <= listed
        await asyncio.gather(*(lease.release() for lease in leases))
        with pytest.raises(LeaseOver):
            await leases[0].sandbox.exec("true", timeout=20)
    assert len(seen) == 3 + 5, "one of three is removed and made again"
    await warm.close()
    assert not {info.id for info in await local.sandboxes()} & seen


async def test_a_lease_that_ends_under_a_checkpoint_leaves_a_sandbox_that_can_be_reset(local: Backend) -> None:
    warm = WarmSandboxes(local, most=1)
    for delay in (0.0, 0.001, 0.003, 0.01):
        lease = await warm.lease(SandboxSpec())
        sandbox: Any = lease.sandbox
        await sandbox.exec("echo x > x", timeout=20)
        call = asyncio.create_task(sandbox.checkpoint())
        await asyncio.sleep(delay)
        await lease.release()
        await asyncio.wait({call})
    assert lease.sandbox.id == (await warm.lease(SandboxSpec())).sandbox.id
    await warm.close()


async def test_a_sandbox_that_cannot_be_reset_is_not_used_again(local: Backend) -> None:
    warm = WarmSandboxes(local, most=1)
    lease = await warm.lease(SandboxSpec(memory_bytes=64 << 20, disk_bytes=8 << 20))
    done = await lease.sandbox.exec("python3 -c 'bytearray(1 << 30)'", timeout=20)
    await lease.release()
    again = await warm.lease(SandboxSpec(memory_bytes=64 << 20, disk_bytes=8 << 20))
    if done.exit_code == 137:  # where limits can be set
        assert again.sandbox.id != lease.sandbox.id
    await again.release()
    await warm.close()


async def test_rewards_try_things_in_a_fork_and_go_back() -> None:
    async with ToolSessions(create_backend("local")) as sessions:
        session = sessions.open("t")
        ctx = ToolContext(session)
        await ctx.write_file("answer", "right")
        before = await ctx.checkpoint()
        other = await ctx.fork(before)
        await other.write_file("answer", "wrong")
        assert await ctx.read_file("answer") == "right" and await other.read_file("answer") == "wrong"
        await ctx.terminal("rm answer; sleep 1000 &")
        with pytest.raises(ProcessesRunning):
            await ctx.fork()
        await ctx.restore(before)
        assert await ctx.read_file("answer") == "right"
        assert {"checkpoint", "fork", "restore"} <= {call.method for call in ctx.calls}
        third = await other.fork()
        assert (await third.cleanup())["success"] and await other.read_file("answer") == "wrong"
    assert not any(
        info.task_id.startswith("t") and not info.orphan for info in await create_backend("local").sandboxes()
    )


OWNER = """
import asyncio, os, sys
from backends import SandboxSpec, create_backend

async def main():
    parent = await create_backend("local").create(SandboxSpec())
    print(os.getpid(), flush=True)
    while True:
        await parent.exec(f"date +%N > now; exec -a {sys.argv[1]} sleep 0.001", timeout=60)
        checkpoint = await parent.checkpoint()
        children = await asyncio.gather(*(parent.fork(checkpoint) for _ in range(2)))
        await children[0].start(f"exec -a {sys.argv[1]} sleep 1000")
        await parent.restore(checkpoint)
        await children[0].restore(checkpoint)
        await asyncio.gather(*(child.close() for child in children))

asyncio.run(main())
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("victim", ["owner", "helper", "executor"])
async def test_nothing_is_left_of_what_is_killed_at_any_step(local: Backend, victim: str) -> None:
    mark, draw = f"mark-{uuid.uuid4().hex}", random.Random(victim)
    for _ in range(4):
        owner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", OWNER, mark),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )
        assert owner.stdout is not None and await owner.stdout.readline()
        await asyncio.sleep(draw.uniform(0.05, 0.5))
        if victim == "owner":
            owner.kill()
        else:
            helper = below(owner.pid)[0]
            inside = below(helper)
            for pid in [helper] if victim == "helper" else inside[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _, errors = await asyncio.wait_for(owner.communicate(), 60)
        assert victim == "owner" or b"SandboxLost" in errors or b"BackendError" in errors, errors.decode()
        assert await until(lambda: host_processes(mark) == [])
    await local.reap()
    assert not [info for info in await local.sandboxes() if info.orphan]
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "/lachesis-" in line]


def below(pid: int) -> list[int]:
    """The children of a process."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found += [int(each) for each in (thread / "children").read_text().split()]
    return found


@pytest.mark.long
async def test_a_thousand_children_in_a_row_leave_nothing(parent: Any) -> None:
    await (await parent.fork()).close()
    before = len(list(Path("/proc/self/fd").iterdir())), shared_memory()
    for number in range(1000):
        if number % 100 == 0:
            await parent.exec("rm -f old; head -c 100000 /dev/zero > new; mv new old", timeout=20)
        child = await parent.fork()
        await child.exec("head -c 1000000 /dev/zero > file", timeout=20)
        await child.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before[0] + 10  # layers
    assert shared_memory() - before[1] < 20_000_000


async def test_too_many_layers_are_refused_by_name(parent: Any) -> None:
    with pytest.raises(BackendError, match="checkpoints lie over each other"):
        for number in range(102):
            await parent.exec(f"echo {number} > file", timeout=20)
            await parent.checkpoint()
    assert await output(parent, "cat file") == "100\n"


@pytest.mark.slow
async def test_a_sandbox_that_nobody_has_used_since_its_reset_is_lent_at_once_and_lives_as_long_as_any() -> None:
    sandboxes = WarmSandboxes(create_backend("local"), 1)
    try:
        first = await sandboxes.lease(SandboxSpec(lifetime=5.0))
        id = first.sandbox.id
        await first.sandbox.exec("echo mine > file; (sleep 100 &)", timeout=20)
        await first.release()
        await asyncio.sleep(3.0)
        second = await sandboxes.lease(SandboxSpec(lifetime=5.0, labels={"task_id": "second"}))
        assert second.sandbox.id == id
        await asyncio.sleep(3.0)  # its first lifetime is over
        ran = await second.sandbox.exec("ls; pgrep sleep", timeout=20)
        assert ran.stdout == b""
        [listed] = [each for each in await create_backend("local").sandboxes() if each.id == id]
        assert listed.task_id == "second"
        await second.release()
    finally:
        await sandboxes.close()
