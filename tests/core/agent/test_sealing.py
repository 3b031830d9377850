"""What decides where sealed artifacts go, and how: the reward and the fresh sandbox, never what the agent replaced."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from backends import SandboxSpec, create_backend, tasks
from lachesis.runs.failures import RunStopped
from lachesis.tool_context import artifacts
from lachesis.tool_context.file_copies import HostDiskFull
from lachesis.tool_context.tool_context import ToolContext
from lachesis_tools import BUILTIN_TOOLS, ToolSessions, call_tool
from tests.support.scripted_server import say
from tests.support.small_envs import SortWords, process

REPLACED_BASH = """
cat > /tmp/bash <<'END'
#!/usr/bin/python3 -S
import os, sys
os.write(1, b"/usr")
END
chmod +x /tmp/bash
for shell in /bin/bash /usr/bin/bash /usr/bin/test; do rm -f $shell; cp /tmp/bash $shell; done
"""
"""Whatever asks this bash for a folder is told `/usr`."""


@pytest.fixture
async def sessions() -> AsyncIterator[ToolSessions]:
    async with ToolSessions(create_backend("local")) as sessions:
        yield sessions


def context(sessions: ToolSessions, name: str = "task") -> ToolContext:
    return ToolContext(sessions.open(name), BUILTIN_TOOLS, open_verifier=lambda: sessions.open(f"{name}-verifier"))


async def agent(ctx: ToolContext, command: str) -> str:
    return (await call_tool("terminal", {"command": command}, ctx._session)).content


@pytest.mark.parametrize("links", [True, False])
async def test_artifacts_keep_their_modes_and_times(
    sessions: ToolSessions, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """A task may ask for a key that only its owner can read, or a folder that nobody changes."""

    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:  # on this machine, as on some network file systems
        monkeypatch.setattr(artifacts.os, "link", refused)
    ctx = context(sessions)
    made = "mkdir -p d/ro; for file in key run far d/key d/ro/x; do echo k > $file; chmod 400 $file; done; mkdir ro"
    await agent(ctx, f"{made}; touch -d @5 key d/key; touch -d @-9223372036854775808 far; chmod 4750 run")
    await agent(ctx, "echo k > ro/x; chmod 555 d/ro ro .; chmod 1777 d")
    shown = "stat -c '%a %n' key run far d d/key d/ro d/ro/x ro ro/x; stat -c '%Y %n' key d/key"
    was = (await ctx.terminal(shown))["output"].replace("4750 run", "750 run")  # the reward may run as somebody else
    paths = ["d", "d/ro/x", "key", "run", "far", "ro"]
    for again in (False, True):
        verifier = await ctx.seal(paths if again else [*paths, "."], ends=again, exactly=again)
        assert (verifier.missing, verifier.refused) == ((), {})
        assert (await verifier.terminal(shown))["output"] == was
        await verifier.write_file("d/ro/x", "the reward's")
        await verifier.write_file("ro/new/x", "the reward's")
        assert await verifier.read_text("d/ro/x") == await verifier.read_text("ro/new/x") == "the reward's"
        assert (await verifier.terminal("touch new"))["exit_code"] == 0, "the workspace is not read-only"
        await verifier.cleanup()


async def test_a_replaced_bash_moves_no_artifact(sessions: ToolSessions) -> None:
    ctx = context(sessions)
    await agent(ctx, "mkdir -p ~/bin; printf '#!/bin/sh\\necho forged' > ~/bin/python3; chmod +x ~/bin/python3")
    await agent(ctx, REPLACED_BASH)
    shown = [await agent(ctx, "echo mine") for _ in range(3)]  # two shells had been started before
    assert "/usr" in shown[-1], "the agent's own shell is the one that it made"
    assert (await ctx.terminal("echo still mine; echo $BASH"))["output"].startswith("still mine\n/.lachesis/")
    verifier = await ctx.seal(["~/bin"])
    assert verifier.missing == () and verifier.refused == {}
    found = await verifier.terminal("~/bin/python3; python3 -c 'print(6 * 7)'; ls ~/bin")
    assert found["output"].split() == ["forged", "42", "python3"], found


async def test_the_rewards_shell_loads_nothing_that_the_agent_can_write(sessions: ToolSessions) -> None:
    ctx = context(sessions)
    for path in (
        "~/.bashrc",
        "~/.profile",
        "~/.bash_profile",
        "/etc/profile",
        "/etc/bash.bashrc",
        "/etc/ld.so.preload",
    ):
        await agent(ctx, f"echo 'echo forged; exit' > {path}")
    libraries = "/lib/x86_64-linux-gnu/libc.so.6 /lib/x86_64-linux-gnu/libtinfo.so.6 /lib64/ld-linux-x86-64.so.2"
    await agent(
        ctx, "echo charset EVIL > /usr/lib/locale/C.utf8/LC_CTYPE; rm -rf /usr/lib/*/gconv; echo > /etc/nsswitch.conf"
    )
    await agent(ctx, "echo BASH_ENV=/etc/profile >> /etc/environment; export BASH_ENV=/etc/profile ENV=/etc/profile")
    await agent(ctx, f"for f in {libraries} /bin/bash; do r=$(realpath $f); cp --remove-destination /dev/null $r; done")
    found = await ctx.terminal("x=äö; echo ${#x} $BASH ~; for i in 1 2; do echo $i; done; bash -c 'echo nested'")
    assert found["output"].split() == ["2", "/.lachesis/shell/bash", "/home/agent", "1", "2", "nested"], found
    assert "can" in (await agent(ctx, "true")), "the agent's own shell is broken"


@pytest.mark.parametrize(
    "path", ["/usr/bin/python3", "../usr/bin/python3", "//usr//bin/python3", "~/../../usr/bin/python3"]
)
async def test_what_is_outside_workspace_and_home_has_to_be_allowed_by_name(sessions: ToolSessions, path: str) -> None:
    ctx = context(sessions)
    await agent(
        ctx, "rm -f /usr/bin/python3; printf '#!/bin/sh\\necho forged' > /usr/bin/python3; chmod +x /usr/bin/python3"
    )
    verifier = await ctx.seal([path])
    assert "/usr/bin/python3" in verifier.refused[path] and "`allow`" in verifier.refused[path]
    assert (await verifier.terminal("/usr/bin/python3 -c 'print(42)'"))["output"] == "42\n"


async def test_what_is_allowed_by_name_is_taken(sessions: ToolSessions) -> None:
    ctx = context(sessions)
    await agent(
        ctx,
        "mkdir -p /opt/tool/bin; printf 'echo built' > /opt/tool/bin/run; chmod +x /opt/tool/bin/*; echo > /opt/other",
    )
    verifier = await ctx.seal(["/opt/tool/bin", "/opt/other"], allow=["/opt/tool"])
    assert list(verifier.refused) == ["/opt/other"]
    assert (await verifier.terminal("/opt/tool/bin/run"))["output"] == "built\n"
    for allow, taken in (("/", True), ("/op", False), ("/opt/other/", True)):
        ctx = context(sessions, f"task {allow}")
        await agent(ctx, "mkdir -p /opt; echo > /opt/other")
        assert (not (await ctx.seal(["/opt/other"], allow=[allow])).refused) is taken, allow


async def test_links_of_the_agent_lead_no_artifact_astray(sessions: ToolSessions) -> None:
    ctx = context(sessions)
    await agent(ctx, "ln -s /usr/bin out; mkdir folder; ln -s /usr/bin folder/out; mkdir -p ~/x; ln -s ~/x inner")
    await agent(
        ctx,
        "printf '#!/bin/sh\\necho forged' > /tmp/p; chmod +x /tmp/p; cp --remove-destination /tmp/p /usr/bin/python3",
    )
    verifier = await ctx.seal(["out/python3", "folder", "folder/out/python3"])
    assert (await verifier.terminal("/usr/bin/python3 -c 'print(42)'"))["output"] == "42\n"
    assert set(verifier.refused) == {"folder"}, "its link leads outside"


async def test_an_images_own_links_are_followed_before_the_decision(python_image: Path) -> None:
    image = python_image
    (image / "workspace").mkdir(exist_ok=True)
    (image / "workspace" / "bin").symlink_to("/usr/bin")
    async with ToolSessions(create_backend("local"), SandboxSpec(image=str(image))) as sessions:
        ctx = context(sessions)
        await agent(ctx, "echo forged > bin/tool")
        verifier = await ctx.seal(["bin/tool"])
        assert verifier.refused["bin/tool"].startswith("/usr/bin/tool ")


async def test_without_walls_every_sandbox_has_folders_of_its_own() -> None:
    async with ToolSessions(create_backend("local", isolation="none")) as sessions:
        ctx = context(sessions)
        await agent(ctx, "echo work > a; mkdir ~/d; echo home > ~/d/b; printf '#!/bin/sh\\necho ran' > c; chmod +x c")
        verifier = await ctx.seal(["a", "~/d", "c", "/tmp/x"])
        assert verifier.missing == ("/tmp/x",) and verifier.refused == {}
        assert (await verifier.terminal("cat a ~/d/b; ./c"))["output"] == "work\nhome\nran\n"


async def test_seals_wait_for_the_room_that_others_may_need(
    sessions: ToolSessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one and a half: all of them get it, one after the other."""
    copying: list[int] = []
    take = artifacts._take

    async def counted(*args: Any) -> int:
        copying.append(artifacts._promised)
        return await take(*args)

    monkeypatch.setattr(artifacts, "_take", counted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    size = shutil.disk_usage(tmp_path).free * 2 // 3
    contexts = [context(sessions, f"task-{number}") for number in range(3)]
    await asyncio.gather(*(ctx.write_file("a", "work") for ctx in contexts))
    verifiers = await asyncio.gather(*(ctx.seal(["a"], max_bytes=size) for ctx in contexts))
    assert [await verifier.read_file("a") for verifier in verifiers] == ["work"] * 3
    assert copying == [size] * 3 and artifacts._promised == 0


async def test_a_disk_without_room_is_named_whatever_the_agent_left(sessions: ToolSessions) -> None:
    ctx = context(sessions)
    with pytest.raises(HostDiskFull, match="Next step: make room there, set TMPDIR"):
        await ctx.seal(["never made"], max_bytes=1 << 60)
    assert isinstance(ctx.failure, HostDiskFull) and artifacts._promised == 0


async def test_a_reward_that_goes_on_after_its_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Swallows(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(0.3)
            return 1.0

    monkeypatch.setattr(tasks, "GOES_ON", 0.05)
    await process(Swallows, tmp_path, [say("Done.")], reward_timeout=0.2, max_failed_groups=9)
    assert any("reward still runs" in said for said in caplog.messages), caplog.messages


async def test_a_full_disk_stops_the_run_and_scores_nothing(tmp_path: Path) -> None:
    class Seals(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            await ctx.seal(["sorted.txt"], max_bytes=1 << 60)
            return 1.0

    with pytest.raises(RunStopped, match=r"a seal may copy .* TMPDIR"):
        await process(Seals, tmp_path, [say("Done.")], total_steps=3, group_size=2)


@pytest.mark.parametrize(
    "hidden",
    [
        "",
        "; chmod a-w /etc",
        "; ln /etc/ld.so.preload /etc/other",
        "; rm /etc/ld.so.preload; echo /nowhere.so > list; ln -s $PWD/list /etc/ld.so.preload",
    ],
)
async def test_in_place_the_programs_of_a_reward_load_nothing_that_the_agent_named(
    sessions: ToolSessions, hidden: str
) -> None:
    """The loader says on stderr that the library is missing."""
    ctx = context(sessions)
    await agent(ctx, f"echo /nowhere.so > /etc/ld.so.preload{hidden}")
    assert "nowhere.so" in await agent(ctx, "ls /"), "the agent's own programs obey it"
    found = await ctx.terminal("ls / 2>&1; bash -c 'cat /dev/null; true' 2>&1")
    assert "usr" in found["output"] and "nowhere" not in found["output"], found
    named = await ctx.terminal("cat /etc/ld.so.preload 2> /dev/null")
    assert named["output"] == "/nowhere.so\n", "a reward may ask for the file"
    assert "nowhere" not in (await ctx.terminal("ls / 2>&1"))["output"]
    verifier = await ctx.seal([])
    assert "nowhere" not in (await verifier.terminal("ls / 2>&1"))["output"]


async def test_a_link_to_an_answer_is_not_followed_when_the_preloads_are_set_aside(sessions: ToolSessions) -> None:
    ctx = context(sessions)
    await agent(ctx, "echo 42 > answer; ln -s $PWD/answer /etc/ld.so.preload")
    assert (await ctx.terminal("cat answer 2>&1"))["output"] == "42\n"
