"""One rollout, one session, one sandbox: nothing is shared or left, and a broken sandbox is never an answer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from backends import BackendError, Sandbox, SandboxLost, SandboxSpec, create_backend
from lachesis_tools import SessionClosed, ToolResult, ToolSession, ToolSessions, call_tool, handle_function_call

Call = Callable[..., Awaitable[ToolResult]]


class Watched:
    """The local backend, with a record of what was asked of it."""

    name = "watched"

    def __init__(self, *, failures: int = 0, delay: float = 0.0) -> None:
        self.local = create_backend("local")
        self.check = self.local.check
        self.specs: list[SandboxSpec] = []
        self.made: list[Sandbox] = []
        self.failures = failures
        self.delay = delay

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.specs.append(spec)
        await asyncio.sleep(self.delay)
        if len(self.specs) <= self.failures:
            raise BackendError("the engine is down")
        self.made.append(await self.local.create(spec))
        return self.made[-1]


async def lost(sandbox: Sandbox) -> bool:
    try:
        await sandbox.exec("true", timeout=5)
    except SandboxLost:
        return True
    return False


async def run(session: ToolSession, command: str) -> str:
    output: str = json.loads((await call_tool("terminal", {"command": command}, session)).content)["output"]
    return output


async def test_two_rollouts_never_see_each_others_files_processes_or_environment(sessions: ToolSessions) -> None:
    one, two = sessions.open("one"), sessions.open("two")
    await run(one, "echo secret > f; echo secret > /tmp/f; echo secret > ~/f; export SECRET=1; cd /tmp")
    await call_tool("terminal", {"command": "sleep 987", "background": True}, one)
    await call_tool("python", {"code": "secret = 1"}, one)
    await call_tool("todo", {"todos": [{"id": "1", "content": "secret"}]}, one)
    assert "sleep 987" in await run(one, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "secret" not in await run(two, "cat f /tmp/f ~/f; env | tr A-Z a-z; cat /proc/[0-9]*/environ")
    assert "sleep 987" not in await run(two, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | sed 's/cat.*//'")
    assert await run(two, "pwd") == "/workspace\n"
    assert json.loads((await call_tool("process", {"action": "list"}, two)).content) == {"processes": []}
    assert "NameError" in (await call_tool("python", {"code": "secret"}, two)).content
    assert json.loads((await call_tool("todo", {}, two)).content)["todos"] == []


async def test_the_sandbox_is_made_once_on_first_use_and_labelled(sessions: ToolSessions) -> None:
    backend = Watched(delay=0.05)
    async with ToolSessions(backend, SandboxSpec(env={"A": "b"}, labels={"own": "x"}), run_id="r") as mine:
        session = mine.open("t")
        await call_tool("todo", {}, session)
        assert backend.specs == [] and not session.started
        found = await asyncio.gather(*(session.sandbox() for _ in range(5)))
        assert len({each.id for each in found}) == 1 and session.started
        assert backend.specs == [SandboxSpec(env={"A": "b"}, labels={"own": "x", "run_id": "r", "task_id": "t"})]
    assert await lost(backend.made[0])


async def test_a_caller_that_gives_up_does_not_take_the_sandbox_from_the_others(sessions: ToolSessions) -> None:
    backend = Watched(delay=0.2)
    async with ToolSessions(backend) as mine:
        session = mine.open("t")
        first, second = asyncio.create_task(session.sandbox()), asyncio.create_task(session.sandbox())
        await asyncio.sleep(0.05)
        first.cancel()
        assert (await second).id == backend.made[0].id
        assert first.cancelled() and len(backend.specs) == 1


async def test_a_sandbox_that_cannot_be_made_is_raised_and_tried_again_by_the_next_call(sessions: ToolSessions) -> None:
    async with ToolSessions(Watched(failures=1)) as mine:
        session = mine.open("t")
        with pytest.raises(BackendError, match="the engine is down"):
            await call_tool("terminal", {"command": "true"}, session)
        assert await run(session, "echo back") == "back\n"


CALLS = {
    "terminal": {"command": "true"},
    "process": {"action": "list"},
    "read_file": {"path": "f"},
    "write_file": {"path": "f", "content": ""},
    "patch": {"path": "f", "old_string": "a", "new_string": "b"},
    "search_files": {"pattern": "a"},
    "python": {"code": "1"},
}


CROWDED = """
import asyncio, os, resource
from backends import BackendError, create_backend
from lachesis_tools import ToolSessions, call_tool

async def main():
    async with ToolSessions(create_backend("local")) as sessions:
        await call_tool("terminal", {"command": "true"}, sessions.open("first"))
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(set(range(len(numbers) + 1)) - set(numbers)) + 2, hard))
        try:
            print(await call_tool("terminal", {"command": "true"}, sessions.open("second")))
        except BackendError as error:
            print("raised", error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

asyncio.run(main())
"""


def test_a_machine_without_descriptors_is_an_infrastructure_error() -> None:
    done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("raised ") and "task_id=second" in done.stdout, done
    assert "Too many open files" in done.stdout


@pytest.mark.parametrize("name", CALLS)
async def test_a_lost_sandbox_is_raised_by_every_tool_and_never_becomes_text(session: ToolSession, name: str) -> None:
    await call_tool("python", {"code": "1"}, session)
    await (await session.sandbox()).close()
    with pytest.raises(SandboxLost):
        await call_tool(name, CALLS[name], session)


@pytest.mark.parametrize("name", ["terminal", "python"])
async def test_a_sandbox_that_is_lost_under_a_running_call_is_raised(session: ToolSession, name: str) -> None:
    sandbox = await session.sandbox()
    arguments = {"terminal": {"command": "sleep 30"}, "python": {"code": "import time; time.sleep(30)"}}[name]
    task = asyncio.create_task(call_tool(name, arguments, session))
    await asyncio.sleep(0.3)
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await task


async def test_a_closed_session_answers_that_it_is_closed(session: ToolSession, call: Call) -> None:
    sandbox = await session.sandbox()
    await session.close()
    await session.close()
    assert session.closed and await lost(sandbox)
    for name, arguments in {**CALLS, "todo": {}}.items():
        result = await call(name, **arguments)
        assert result.error == f"the session of task {session.task_id!r} is closed"
    with pytest.raises(SessionClosed):
        await session.sandbox()
    with pytest.raises(SessionClosed):
        session.state(list)


async def test_closing_while_the_sandbox_starts_leaves_none(sessions: ToolSessions) -> None:
    backend = Watched(delay=0.2)
    mine = ToolSessions(backend)
    session = mine.open("t")
    starting = asyncio.create_task(session.sandbox())
    await asyncio.sleep(0.05)
    await mine.close_all()
    with pytest.raises(SessionClosed):
        await starting
    assert backend.made == [] or await lost(backend.made[0])


async def test_a_task_id_belongs_to_one_open_session(sessions: ToolSessions) -> None:
    first = sessions.open("t")
    assert sessions.get("t") is first and list(sessions) == ["t"]
    with pytest.raises(ValueError, match="'t' has an open session"):
        sessions.open("t")
    await sessions.close("t")
    await sessions.close("t")
    with pytest.raises(KeyError, match="no open session for task 't'"):
        sessions.get("t")
    assert sessions.open("t") is not first


async def test_close_all_leaves_no_process_on_the_machine(sessions: ToolSessions) -> None:
    mark = str(uuid.uuid4().int)[:9]  # others on this machine may run this test
    for name in "ab":
        session = sessions.open(name)
        await run(session, f"setsid sleep {mark} & sleep {mark} & disown -a")
        await call_tool("terminal", {"command": f"sleep {mark}", "background": True}, session)
    async with asyncio.timeout(60):
        while len(sleeping(mark)) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await sessions.close_all()
    assert sleeping(mark) == [] and len(sessions) == 0


def sleeping(mark: str) -> list[str]:
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if each.read_bytes() == f"sleep\0{mark}\0".encode():
                found.append(each.parent.name)
        except OSError:
            continue
    return found


async def test_the_working_folder_of_a_sandbox_is_where_shell_and_files_start() -> None:
    async with ToolSessions(create_backend("local"), SandboxSpec(workdir="/workspace/repo/src")) as mine:
        session = mine.open("t")
        await call_tool("write_file", {"path": "f", "content": "x"}, session)
        assert await run(session, "pwd; cat f") == "/workspace/repo/src\nx"
        assert (await call_tool("python", {"code": "open('f').read()"}, session)).content == "'x'"


async def test_handle_function_call_always_returns_a_string(sessions: ToolSessions) -> None:
    sessions.open("t")
    answer = await handle_function_call("terminal", '{"command": "echo hi"}', task_id="t", sessions=sessions)
    assert json.loads(answer)["output"] == "hi\n"
    for name, arguments, task_id in (("nope", {}, "t"), ("terminal", "null", "t"), ("terminal", {}, "unknown")):
        failed = await handle_function_call(name, arguments, task_id=task_id, sessions=sessions)
        assert list(json.loads(failed)) == ["error"]


async def test_the_todo_list_is_replaced_merged_and_read(call: Call) -> None:
    first = [{"id": 1, "content": "read"}, {"id": "2", "content": "write", "status": "in_progress"}]
    await call("todo", todos=first)
    merged = json.loads((await call("todo", todos=[{"id": "1", "status": "completed"}], merge=True)).content)
    assert merged == {
        "todos": [
            {"id": "1", "content": "read", "status": "completed"},
            {"id": "2", "content": "write", "status": "in_progress"},
        ],
        "summary": {"completed": 1, "in_progress": 1},
    }
    assert "needs a content" in str((await call("todo", todos=[{"id": "3"}], merge=True)).error)
    assert "two items" in str((await call("todo", todos=[first[0], first[0]])).error)
    assert "todos.0.status" in str((await call("todo", todos=[{"id": "1", "content": "a", "status": "x"}])).error)
    assert json.loads((await call("todo")).content) == merged
    assert json.loads((await call("todo", todos=[])).content)["todos"] == []


async def test_a_sandbox_that_cannot_be_created_for_any_reason_is_no_failure_of_a_tool() -> None:
    class Broken(Watched):
        async def create(self, spec: SandboxSpec) -> Sandbox:
            raise SystemError("AST constructor recursion depth mismatch")

    async with ToolSessions(Broken()) as sessions:
        with pytest.raises(BackendError, match="cannot be created: SystemError: AST constructor"):
            await call_tool("write_file", {"path": "f", "content": "1"}, sessions.open("t"))
