"""Scripts that call tools, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lachesis_tools import BUILTIN_TOOLS, ToolFailure, ToolResult, ToolSession, call_tool, tool
from lachesis_tools.on_request import ON_REQUEST

Run = Callable[..., Awaitable[dict[str, Any]]]


@tool(toolset="tests", name="odd-name")
async def odd_name(count: int = 0) -> ToolResult:
    """Return a reward, or fail."""
    if count < 0:
        raise ToolFailure("too small")
    return ToolResult(f"counted {count}", reward=float(count), done=count > 4)


TOOLS = BUILTIN_TOOLS.extended(ON_REQUEST["execute_code"], odd_name)


async def result_of(session: ToolSession, code: str, **arguments: Any) -> ToolResult:
    return await call_tool("execute_code", {"code": code, **arguments}, session, registry=TOOLS)


@pytest.fixture
def run(session: ToolSession) -> Run:
    async def call(code: str, **arguments: Any) -> dict[str, Any]:
        return dict(json.loads((await result_of(session, code, **arguments)).content))

    return call


async def running(session: ToolSession, word: str) -> str:
    found = await (await session.sandbox()).exec(f"pgrep -f '[{word[0]}]{word[1:]}'", timeout=20, fresh=True)
    return found.stdout.decode()


async def test_a_script_calls_tools_and_shows_only_what_it_prints(run: Run) -> None:
    code = """
from tools import terminal, write_file, read_file
import tools, hermes_tools
for number in range(3):
    write_file(f"{number}.txt", "pear\\n" * number)
print(sum(read_file(path=f"{number}.txt")["content"].count("pear") for number in range(3)))
print(terminal("ls")["output"].split(), hermes_tools is tools)
"""
    assert await run(code) == {
        "output": "3\n['0.txt', '1.txt', '2.txt'] True\n",
        "exit_code": 0,
        "tool_calls": {"write_file": 3, "read_file": 3, "terminal": 1},
        "error": None,
    }


async def test_a_call_by_a_name_that_is_no_text_is_counted(session: ToolSession) -> None:
    result = await result_of(session, 'import tools\ntools.terminal.func("\\ud800", [])')
    assert "Traceback" in result.content and json.loads(result.content)["tool_calls"] == {"?": 1}


async def test_a_failed_call_raises_in_the_script_and_a_traceback_shows_its_lines(run: Run) -> None:
    code = """import tools
try:
    tools.read_file("missing")
except tools.ToolError as error:
    print("caught", error)
for call in (lambda: tools.odd_name(1, 2), lambda: tools.terminal(command=b"ls")):
    try:
        call()
    except TypeError as error:
        print("TypeError", error)
print(hasattr(tools, "execute_code"))
tools.odd_name(-1)
"""
    done = await run(code)
    assert "caught" in done["output"] and "missing" in done["output"]
    assert "odd-name() takes count" in done["output"] and "False\n" in done["output"]
    assert '"<script>", line 12, in <module>' in done["output"]
    assert done["output"].endswith("\ntools.ToolError: too small\n") and "    tools.odd_name(-1)\n" in done["output"]
    assert "code_driver" not in done["output"]
    assert (done["exit_code"], done["tool_calls"]) == (1, {"read_file": 1, "odd-name": 1})


async def test_rewards_and_the_end_of_the_task_reach_the_agent(session: ToolSession) -> None:
    result = await result_of(session, "import tools\ntools.odd_name(2)\ntools.odd_name(5)")
    assert (result.reward, result.done, result.error) == (7.0, True, None)


async def test_the_output_of_children_is_there_and_a_long_one_loses_its_middle(run: Run) -> None:
    done = await run("import os, sys; os.system('echo child; echo err >&2'); sys.exit(3)")
    assert (done["output"], done["exit_code"]) == ("child\nerr\n", 3)
    done = await run("print('first'); print('x' * 3_000_000); print('last')")
    assert done["output"].startswith("first\n") and done["output"].endswith("x\nlast\n")
    assert len(done["output"]) <= 50_000


async def test_a_script_that_is_killed_leaves_nothing_running(session: ToolSession, run: Run) -> None:
    code = "import os, tools\nos.system('setsid sleep 4321 &')\ntools.terminal('sleep 4322')"
    done = await run(code, timeout=3)
    assert done["exit_code"] == 124 and "its timeout of 3 s" in done["error"]
    assert await running(session, "sleep 43") == ""
    killed = "import os, threading, time, tools\nthreading.Timer(1, os.abort).start()\ntools.terminal('sleep 4323')"
    assert (await run(killed))["exit_code"] == 134
    assert await running(session, "sleep 43") == ""
    assert (await run("import os; print(os.listdir('/tmp'))"))["output"].count("execute_code-") == 1  # its own
    call = asyncio.create_task(result_of(session, "import tools\ntools.terminal('touch begun; sleep 4324')"))
    sandbox = await session.sandbox()
    while (await sandbox.exec("test -e begun", timeout=20, fresh=True)).exit_code:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled() and await running(session, "sleep 43") == ""


async def test_a_script_that_gives_up_on_a_call_gets_the_answers_of_its_later_ones(run: Run) -> None:
    code = """
import signal
from tools import terminal, write_file, read_file
def late(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, late)
for size in (5, 200_000):
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        terminal(f"sleep 1; head -c {size} /dev/zero | tr '\\\\0' x")
    except TimeoutError:
        print("gave up")
    signal.setitimer(signal.ITIMER_REAL, 0)
    write_file("notes.txt", f"pear {size}")
    print(read_file("notes.txt")["content"].strip(), terminal("echo fig")["output"].strip())
"""
    done = await run(code, timeout=60)
    assert done["output"].count("gave up\n") == 2, done
    assert "pear 5" in done["output"] and "pear 200000" in done["output"] and done["output"].count(" fig\n") == 2
    assert done["tool_calls"] == {"terminal": 4, "write_file": 2, "read_file": 2}
    assert (done["exit_code"], done["error"]) == (0, None)


async def test_calls_are_limited_in_number_and_in_size(run: Run) -> None:
    code = "import tools\nfor _ in range(60):\n    tools.odd_name()"
    done = await run(code)
    assert done["tool_calls"] == {"odd-name": 50} and "may make 50 calls" in done["output"]
    huge = "import tools\ntools.write_file('big', 'x' * 20_000_000)"
    assert "too large" in (await run(huge))["error"]
    assert (await run("import os\nif os.fork() == 0:\n    import tools\n    tools.odd_name()\nos.wait()"))[
        "output"
    ].endswith("only the process of the script itself can call tools\n")
