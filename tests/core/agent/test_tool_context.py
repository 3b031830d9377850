"""A reward's context: files of any size, its own shell, a log of its own, and a verifier sandbox after `seal`."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from backends import SandboxExhausted, SandboxLost, SandboxSpec, create_backend
from lachesis.rewards import AgentFault
from lachesis.tool_context.sealing import Sealed
from lachesis.tool_context.tool_context import ToolContext
from lachesis_tools import BUILTIN_TOOLS, ToolSession, ToolSessions, call_tool
from tests.support.scripted_server import call, say
from tests.support.small_envs import SortWords, kill_sandboxes, process, rollouts, sandboxes


@pytest.fixture
async def sessions() -> AsyncIterator[ToolSessions]:
    async with ToolSessions(create_backend("local")) as sessions:
        yield sessions


@pytest.fixture
def session(sessions: ToolSessions) -> ToolSession:
    return sessions.open("task")


@pytest.fixture
def ctx(sessions: ToolSessions, session: ToolSession) -> ToolContext:
    return ToolContext(session, BUILTIN_TOOLS, open_verifier=lambda: sessions.open("task-verifier"))


async def agent(session: ToolSession, command: str) -> str:
    return (await call_tool("terminal", {"command": command}, session)).content


async def test_files_go_both_ways_byte_for_byte_and_never_half(ctx: ToolContext, tmp_path: Path) -> None:
    data = os.urandom(10_000_019)
    (tmp_path / "out").write_bytes(data)
    await ctx.upload_file(tmp_path / "out", "in/side.bin")
    shown = await ctx.terminal("sha256sum < in/side.bin")
    assert shown["output"].split()[0] == hashlib.sha256(data).hexdigest()
    await ctx.download_file("in/side.bin", tmp_path / "new" / "back")
    assert (tmp_path / "new" / "back").read_bytes() == data
    (tmp_path / "kept").write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        await ctx.download_file("nowhere", tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "new", "out"]


async def test_a_download_has_a_bound_of_its_own_and_leaves_nothing(ctx: ToolContext, tmp_path: Path) -> None:
    await ctx.terminal("truncate -s 4T sparse; mkdir few; head -c 2000 /dev/zero > few/file")
    for download, numbers in (
        (lambda: ctx.download_file("few/file", tmp_path / "a", max_bytes=1999), "more than 1999 bytes .*: 2000 with"),
        (lambda: ctx.download_dir("few", tmp_path / "b", max_bytes=1999), "more than 1999 bytes .*: 2000 with file"),
        (lambda: ctx.download_dir(".", tmp_path / "c"), "more than 1073741824 bytes .*: 439804651[0-9]+ with"),
        (
            lambda: ctx.download_dir(".", tmp_path / "d", max_bytes=None),
            "needs 4398046511104 bytes of this machine's disk",
        ),
    ):
        with pytest.raises(OSError, match=numbers) as raised:
            await download()
        assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
    assert [reply["bytes"] for reply in await ctx.download_dir("few", tmp_path / "e", max_bytes=2000)] == [2000]


async def test_a_download_that_is_cancelled_at_any_step_leaves_nothing(ctx: ToolContext, tmp_path: Path) -> None:
    await ctx.write_file("side.bin", os.urandom(100_000))
    for steps in range(300):
        downloading = asyncio.create_task(ctx.download_file("side.bin", tmp_path / "kept"))
        for _ in range(steps % 40):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0001 * (steps % 7))
        downloading.cancel()
        await asyncio.wait([downloading])
    assert {path.name for path in tmp_path.iterdir()} <= {"kept"}


async def test_the_agents_shell_does_not_reach_the_rewards(ctx: ToolContext, session: ToolSession) -> None:
    await agent(
        session, "mkdir -p /tmp/bin; printf '#!/bin/sh\\necho passed' > /tmp/bin/grader; chmod +x /tmp/bin/grader"
    )
    await agent(
        session, "cd /tmp; export PATH=/tmp/bin:$PATH LD_PRELOAD=/tmp/evil.so BASH_ENV=/tmp/evil; alias ls=true"
    )
    found = await ctx.terminal("pwd; command -v grader; env | grep -c evil")
    assert found["output"].splitlines() == ["/workspace", "0"]
    assert "/tmp/bin/grader" in await agent(session, "command -v grader"), "the agent's own is as it was"


async def test_tools_that_are_not_set_up_name_their_setting(ctx: ToolContext) -> None:
    for reply in (await ctx.web_search("x"), await ctx.web_extract(["https://x"])):
        assert "--env.web" in reply["error"] and "did you mean" not in reply["error"]
    for reply in (await ctx.browser_navigate("https://x"), await ctx.browser_snapshot()):
        assert "here: the browser " in reply["error"] and "did you mean" not in reply["error"]


async def test_output_that_is_not_whole_says_so(ctx: ToolContext) -> None:
    shown = await ctx.terminal("head -c 10000007 /dev/zero; echo short >&2")
    assert len(shown["output"]) == 10_000_006 and shown["error"] == "7 bytes are missing in the middle of stdout"
    shown = await ctx.terminal("echo short")
    assert shown["error"] is None


async def test_the_agent_cannot_move_the_home_folder_that_a_reward_looks_into(
    ctx: ToolContext, session: ToolSession
) -> None:
    await agent(session, "mkdir /tmp/fake; echo forged > /tmp/fake/answer; echo real > ~/answer; export HOME=/tmp/fake")
    assert await ctx.read_file("~/answer") == "real\n"
    verifier = await ctx.seal(["~/answer"])
    assert await verifier.read_file("~/answer") == "real\n"


async def test_what_the_reward_does_is_written_down_apart(tmp_path: Path) -> None:
    class Looks(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            await ctx.terminal("echo checking", timeout=7)
            await ctx.write_file("big", b"x" * 100_000)
            await ctx.read_file("nowhere")
            try:
                await ctx.read_bytes("nowhere")
            except FileNotFoundError:
                return 1.0
            return 0.0

    script = [call(("terminal", {"command": "echo working"})), say("Done.")]
    ran = await process(Looks, tmp_path, script, total_steps=1, group_size=1)
    record = rollouts(ran.files.groups)[0]
    calls = record["reward_calls"]
    assert [made["method"] for made in calls] == ["terminal", "write_file", "read_file", "read_bytes"]
    assert calls[0]["arguments"] == ["echo checking", "timeout=7"]
    assert (calls[0]["output"], calls[0]["exit_code"]) == ("checking\n", 0)
    assert calls[1]["arguments"] == ["big", "100000 bytes"]
    assert "error" not in calls[2] and calls[3]["error"].startswith("AgentFault: read_bytes: [Errno 2]")
    assert all(made["seconds"] >= 0 for made in calls)
    assert "checking" not in str(record.get("messages")) and record["tool_calls"] == 1


async def test_seal_takes_the_artifacts_and_nothing_else(ctx: ToolContext, session: ToolSession) -> None:
    await agent(session, "mkdir -p src/deep; echo answer > src/deep/a.txt; ln -s deep/a.txt src/link; echo 1 > other")
    await agent(session, "printf '#!/bin/sh\\necho ran' > tool.sh; chmod +x tool.sh; export PATH=/tmp/evil:$PATH")
    await agent(
        session,
        "(setsid sh -c 'while :; do echo forged > forging; mv forging src/deep/a.txt; sleep 0.01; done' &)"
        " >/dev/null 2>&1",
    )
    await call_tool("terminal", {"command": "sleep 1000", "background": True}, session)
    verifier = await ctx.seal(["src", "tool.sh", "never-made"])
    assert verifier.missing == ("never-made",) and verifier.refused == {}
    assert verifier.task_id == "task-verifier"
    found = await verifier.terminal(
        "cat src/link; ./tool.sh; ls; echo $PATH | grep -c evil; ls /proc | grep -c '^[0-9]'"
    )
    words = found["output"].split()
    assert words[0] in ("answer", "forged"), "whichever it was when everything was stopped"
    assert words[1:5] == ["ran", "src", "tool.sh", "0"]
    before = await verifier.read_file("src/deep/a.txt")
    await verifier.write_file("src/test_hidden.py", "secret")
    await asyncio.sleep(0.1)
    assert await verifier.read_file("src/deep/a.txt") == before, "nothing of the agent's runs beside it"
    assert session.closed
    with pytest.raises(Sealed, match="use the context"):
        await ctx.terminal("echo late")
    with pytest.raises(Sealed, match="cannot be sealed again"):
        await verifier.seal(["src"])
    assert [made.method for made in verifier.calls][:2] == ["seal", "terminal"]


async def test_seal_refuses_what_is_no_honest_artifact_and_says_why(ctx: ToolContext, session: ToolSession) -> None:
    await agent(session, "mkdir bad; ln -s /etc/passwd bad/out; head -c 3000000 /dev/zero > huge; echo fine > fine")
    await agent(session, "mkfifo pipe; ln -s loop loop")
    verifier = await ctx.seal(["bad", "huge", "fine", "pipe", "loop", "/"], max_bytes=1_000_000)
    assert set(verifier.refused) == {"bad", "huge", "pipe", "loop", "/"} and verifier.missing == ()
    assert "1000000 bytes" in verifier.refused["huge"]
    assert (await verifier.terminal("ls"))["output"].split() == ["fine"]


async def test_a_time_that_cannot_be_expressed_here_keeps_no_file_from_the_reward(
    ctx: ToolContext, session: ToolSession, tmp_path: Path
) -> None:
    await agent(session, "mkdir late; echo answer > late/a.txt; touch -d @9223372036854775807 late/a.txt")
    await ctx.download_dir("late", tmp_path / "late")
    assert (tmp_path / "late" / "a.txt").read_text() == "answer\n"
    verifier = await ctx.seal(["late"])
    assert verifier.refused == {} and await verifier.read_file("late/a.txt") == "answer\n"


async def test_whatever_the_agent_left_in_a_files_place_reads_as_no_file(
    ctx: ToolContext, session: ToolSession
) -> None:
    await agent(session, "mkfifo pipe; ln -s loop loop; echo 1 > closed; chmod 0 closed; truncate -s 300M sparse")
    for path in ("pipe", "loop", "closed", "sparse", "x" * 300, "closed/below"):
        assert await ctx.read_file(path, default="nothing") == "nothing", path
        with pytest.raises(OSError):
            await ctx.read_file(path, default=None)
    assert ctx.failure is None


async def test_what_seal_keeps_for_a_while_is_within_max_bytes_and_removed_beside_the_event_loop(
    sessions: ToolSessions, session: ToolSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    threads: set[int] = set()
    remove = shutil.rmtree

    def look() -> ToolSession:
        kept.append(sum(path.stat().st_size for path in tmp_path.glob("lachesis-files-*/seal-*/*/*")))
        return sessions.open("task-verifier")

    def note(path: Any, *args: Any, **options: Any) -> None:
        threads.add(threading.get_ident() if "/seal-" in str(path) else 0)
        remove(path, *args, **options)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # before there is a sandbox: its record is below it too
    await agent(
        session, "for i in 1 2 3 4; do mkdir $i; for j in 1 2; do head -c 700000 /dev/zero > $i/$j; done; done; rm 4/1"
    )
    monkeypatch.setattr(shutil, "rmtree", note)
    verifier = await ToolContext(session, BUILTIN_TOOLS, open_verifier=look).seal(["1", "2", "3", "4"], max_bytes=10**6)
    assert set(verifier.refused) == {"1", "2", "3"} and kept == [700_000]
    assert str(tmp_path) not in str(verifier.refused), "where it was on this machine is nobody's business"
    assert threading.get_ident() not in threads, "removing many files takes time"
    assert list(tmp_path.glob("lachesis-files-*/*")) == []


async def test_what_fits_into_no_fresh_sandbox_is_refused_and_takes_no_room(tmp_path: Path) -> None:
    async with ToolSessions(create_backend("local"), SandboxSpec(disk_bytes=8 << 20)) as sessions:
        session = sessions.open("small")
        ctx = ToolContext(session, BUILTIN_TOOLS, open_verifier=lambda: sessions.open("verifier"))
        await agent(session, "mkdir sparse; truncate -s 20M huge sparse/huge; echo fine > fine")
        verifier = await ctx.seal(["sparse", "huge", "fine"])
        assert set(verifier.refused) == {"sparse", "huge"} and "No space left" in verifier.refused["huge"]
        await verifier.write_file("tests", b"x" * (6 << 20))
        assert (await verifier.terminal("ls; cat fine"))["output"].split() == ["fine", "tests", "fine"]


FULL = """
import asyncio, sys, tempfile
from backends import BackendError, create_backend
from lachesis.tool_context.tool_context import ToolContext
from lachesis_tools import BUILTIN_TOOLS, ToolSessions

async def main():
    async with ToolSessions(create_backend("local")) as sessions:
        ctx = ToolContext(sessions.open("task"), BUILTIN_TOOLS, open_verifier=lambda: sessions.open("verifier"))
        await ctx.terminal("mkdir d; head -c 3000000 /dev/zero | tee d/f > f")
        tempfile.tempdir = sys.argv[1]
        try:
            print("refused", (await ctx.seal([sys.argv[2]], max_bytes=2_000_000)).refused)
        except BackendError as error:
            print("raised", error, ctx.failure is error)
        tempfile.tempdir = None

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("path", ["f", "d"])
def test_a_full_disk_of_this_machine_is_no_refusal(tmp_path: Path, path: str) -> None:
    script = f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", FULL, str(tmp_path), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"raised a seal may copy 2000000 bytes to {tmp_path}"), done
    assert done.stdout.endswith("True\n")


async def test_a_sandbox_that_ends_by_its_own_limits_under_a_seal_is_the_agents_fault(
    ctx: ToolContext, session: ToolSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ended() -> Any:
        raise SandboxExhausted("its memory is used up")

    monkeypatch.setattr(session, "sandbox", ended)
    with pytest.raises(AgentFault, match="its memory is used up"):
        await ctx.seal(["a", "b"])


async def test_a_plain_reward_seals_too_and_its_verifier_is_released(tmp_path: Path) -> None:
    shown: dict[str, Any] = {}

    class Grades(SortWords):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
            verifier = ctx.seal(["sorted.txt"])
            shown["kind"] = type(verifier) is ToolContext
            shown["missing"] = verifier.missing
            verifier.write_file("check.sh", "sort -c sorted.txt && echo good")
            shown["output"] = verifier.terminal("sh check.sh")["output"]
            return 1.0

    script = [call(("write_file", {"path": "sorted.txt", "content": "a\nb\n"})), say("Done.")]
    ran = await process(Grades, tmp_path, script, total_steps=1, group_size=1)
    assert rollouts(ran.files.groups)[0]["reward"] == 1.0
    assert shown == {"kind": True, "missing": (), "output": "good\n"}
    assert sandboxes() == set()


async def test_a_sandbox_that_is_lost_under_seal_is_the_infrastructures_failure(
    ctx: ToolContext, session: ToolSession
) -> None:
    await agent(session, "echo 1 > f")
    kill_sandboxes()
    with pytest.raises(SandboxLost):
        await ctx.seal(["f"])
    assert isinstance(ctx.failure, SandboxLost)


async def test_several_backends_in_one_process(tmp_path: Path) -> None:
    walled, free = create_backend("local"), create_backend("local", isolation="none")
    async with ToolSessions(walled) as first, ToolSessions(free) as second:
        one, two = first.open("t"), second.open("t")
        contexts = [ToolContext(each, BUILTIN_TOOLS) for each in (one, two)]
        await asyncio.gather(*(each.write_file("f", str(number)) for number, each in enumerate(contexts)))
        found = await asyncio.gather(*(each.terminal("pwd; cat f") for each in contexts))
        assert found[0]["output"] == "/workspace\n0" and found[1]["output"].endswith("workspace\n1")
        assert found[1]["output"] != found[0]["output"]


class Point(BaseModel):
    x: float
    y: float


NO_JSON = {
    "text": b"x",
    "empty": b"",
    "cut": b'{"x": 1',
    "bad byte": b'{"x": "\xff"}',
    "not a number": b'{"x": NaN, "y": 1}',
    "infinite": b'{"x": 1e999, "y": 1}',
    "too many digits": b"1" * 5000,
    "half a character": b'{"x": "\\ud800"}',
    "deep": b"[" * 200_000,
    "long and deep": b" " * 100_000 + b"[" * 200_000,
    "another type": b'["x", "y"]',
    "a missing field": b'{"x": 1}',
    "a number as text": b'{"x": "1", "y": 1}',
    "a NUL": b'{"x": 1, "y": 1}\0',
    "two values": b"{} {}",
}


@pytest.mark.parametrize("name", NO_JSON)
async def test_json_of_another_kind_is_the_agents_fault_or_the_default(ctx: ToolContext, name: str) -> None:
    await ctx.write_file("a.json", NO_JSON[name])
    with pytest.raises(AgentFault, match=r"read_json: .* no such JSON value"):
        await ctx.read_json("a.json", Point)
    assert await ctx.read_json("a.json", Point, default=None) is None


async def test_json_is_read_as_its_type_in_any_encoding_of_json(ctx: ToolContext, session: ToolSession) -> None:
    text = '{"x": 1, "y": 2.5}'
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"):
        await ctx.write_file("a.json", text.encode(encoding))
        assert await ctx.read_json("a.json", Point) == Point(x=1, y=2.5)
    assert await ctx.read_json("a.json") == await ctx.read_json("a.json", dict[str, float]) == {"x": 1, "y": 2.5}
    for command in ("mkdir b", "mkfifo b", "ln -s b b", "echo 1 > b; chmod 000 b", "true"):
        await agent(session, f"rm -rf b; {command}")
        with pytest.raises(AgentFault, match="read_json"):
            await ctx.read_json("b", int)
        assert await ctx.read_json("b", int, default=0) == 0 and await ctx.read_text("b", default="none") == "none"


async def test_text_is_read_whatever_it_is(ctx: ToolContext) -> None:
    for data, text in ((b"a\xff", "a\ufffd"), ("ä".encode("utf-16"), "ä"), ("ä".encode("utf-8-sig"), "ä"), (b"", "")):
        await ctx.write_file("a", data)
        assert await ctx.read_text("a") == text
    assert await ctx.read_text("nowhere") == await ctx.read_text("a\0b") == ""


async def test_a_downloaded_folder_has_files_folders_and_links_to_them_only(
    ctx: ToolContext, session: ToolSession, tmp_path: Path
) -> None:
    await agent(session, "mkdir -p d/sub; cd d; echo 1 > a; ln -s a good; ln -s nowhere bad; ln -s loop loop; mkfifo p")
    await agent(session, "cd d; ln -s ../sub sub/around; ln -s .. sub/up; ln -s ../a sub/good; ln -s sub other")
    replies = await ctx.download_dir("d", tmp_path / "d")
    found = {path.relative_to(tmp_path / "d").as_posix() for path in (tmp_path / "d").rglob("*")}
    assert found >= {"a", "good", "sub", "sub/good", "other"}
    assert not {"bad", "loop", "p", "sub/around", "sub/up"} & found
    assert len(replies) == 3 and (tmp_path / "d" / "sub" / "good").read_text() == "1\n"
