"""`terminal` and `process` in a real sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lachesis_tools import ToolResult, ToolSession

Call = Callable[..., Awaitable[ToolResult]]


def answer(result: ToolResult) -> dict[str, Any]:
    assert result.error is None, result.error
    parsed: dict[str, Any] = json.loads(result.content)
    return parsed


@pytest.mark.parametrize(
    ("command", "output", "exit_code"),
    [
        ("echo out; echo err >&2; echo out", "out\nerr\nout\n", 0),
        ("cat <<EOF\n$((1+1))\nEOF", "2\n", 0),
        ("cat <<'EOF'\nit's \"$x\"\nEOF\n# the end", 'it\'s "$x"\n', 0),
        ("echo a # comment", "a\n", 0),
        ("echo a \\", "a \\\n", 0),
        ("for i in 1 2; do\n  echo $i\ndone", "1\n2\n", 0),
        ("exit 3", "", 3),
        ("false", "", 1),
        ("kill -9 $$", "", 137),
        ("echo 'a'\"'\"'b'", "a'b\n", 0),
        ("printf '\\033[31mred\\033[0m'", "red", 0),
        ("printf '\\377'", "\ufffd", 0),
    ],
)
async def test_a_command_runs_as_it_was_written(call: Call, command: str, output: str, exit_code: int) -> None:
    assert answer(await call("terminal", command=command)) == {"output": output, "exit_code": exit_code, "error": None}


@pytest.mark.parametrize("command", ["echo (", "if true; then", "echo 'open"])
async def test_a_syntax_error_is_output(call: Call, command: str) -> None:
    result = answer(await call("terminal", command=command))
    assert "syntax error" in result["output"] or "unexpected EOF" in result["output"]
    assert result["exit_code"] != 0


async def test_the_folder_and_variables_carry_over_and_workdir_is_for_one_command(call: Call) -> None:
    await call("terminal", command="mkdir -p a/b && cd a && export X=1")
    assert answer(await call("terminal", command="basename $PWD; echo $X"))["output"] == "a\n1\n"
    assert answer(await call("terminal", command="basename $PWD", workdir="a/b"))["output"] == "b\n"
    assert answer(await call("terminal", command="basename $PWD"))["output"] == "a\n"
    failed = await call("terminal", command="pwd", workdir="nowhere")
    assert failed.error == "workdir 'nowhere' is not a directory"


async def test_a_timeout_is_reported_with_the_partial_output(call: Call) -> None:
    result = answer(await call("terminal", command="echo before; sleep 30; echo after", timeout=2))
    assert result["output"] == "before\n"
    assert result["exit_code"] == 124
    assert "timeout of 2 s" in result["error"]
    assert "'timeout'" in str((await call("terminal", command="true", timeout=601)).error)


@pytest.mark.parametrize("command", ["yes 'a\"b' | head -c 3000000", "head -c 300000 /dev/zero"])
async def test_huge_output_keeps_its_ends_and_stays_json(call: Call, command: str) -> None:
    result = answer(await call("terminal", command=f"echo begin; {command}; echo end"))
    assert len(result["output"]) <= 50_000
    assert result["output"].startswith("begin\n") and result["output"].endswith("end\n")
    assert "characters elided" in result["output"]


async def test_empty_and_impossible_commands_are_rejected(call: Call) -> None:
    assert (await call("terminal", command="  ")).error == "the command is empty"
    assert "NUL" in str((await call("terminal", command="echo \0")).error)


async def start(call: Call, command: str) -> str:
    started = answer(await call("terminal", command=command, background=True))
    assert started["exit_code"] is None
    name: str = started["session_id"]
    return name


async def test_a_background_process_lives_from_start_to_kill(call: Call) -> None:
    name = await start(call, "echo ready; while read line; do echo got $line; done; echo over; sleep 60")
    listed = answer(await call("process", action="list"))["processes"]
    assert [each["session_id"] for each in listed] == [name]
    assert listed[0]["status"] == "running"
    assert answer(await call("process", action="submit", session_id=name, data="one"))["status"] == "running"
    await call("process", action="write", session_id=name, data="two\n")
    await call("process", action="close", session_id=name)
    output = ""
    async with asyncio.timeout(60):
        while "over\n" not in output:
            output += answer(await call("process", action="poll", session_id=name))["output"]
            await asyncio.sleep(0.02)
    assert output == "ready\ngot one\ngot two\nover\n"
    waited = answer(await call("process", action="wait", session_id=name, timeout=0.2))
    assert (waited["status"], waited["error"]) == ("running", "still running after 0.2 s")
    killed = answer(await call("process", action="kill", session_id=name))
    assert killed["status"] == "exited"
    late = await call("process", action="submit", session_id=name, data="x")
    assert "takes no more input" in str(late.error)


async def test_wait_returns_the_end_and_all_new_output(call: Call) -> None:
    name = await start(call, "echo a; sleep 0.3; echo b >&2; exit 5")
    done = answer(await call("process", action="wait", session_id=name))
    assert (done["output"], done["exit_code"], done["status"]) == ("a\nb\n", 5, "exited")
    assert answer(await call("process", action="poll", session_id=name))["output"] == ""


async def test_the_log_can_be_paged(call: Call) -> None:
    name = await start(call, "seq 1000")
    await call("process", action="wait", session_id=name)
    whole = "".join(f"{number}\n" for number in range(1, 1001))
    last = answer(await call("process", action="log", session_id=name, limit=9))
    assert (last["output"], last["total"]) == (whole[-9:], len(whole))
    read, offset = "", 0
    while offset < len(whole):
        page = answer(await call("process", action="log", session_id=name, offset=offset, limit=1000))
        read, offset = read + page["output"], page["next_offset"]
    assert read == whole


async def test_polling_a_process_that_never_stops_writing_comes_back(call: Call) -> None:
    name = await start(call, "yes")
    async with asyncio.timeout(60):
        output = ""
        while "characters elided" not in output:
            await asyncio.sleep(0.3)
            output = answer(await call("process", action="poll", session_id=name))["output"]
    assert len(output) <= 50_000
    await call("process", action="kill", session_id=name)


async def test_unknown_processes_are_named(call: Call) -> None:
    assert "needs a session_id" in str((await call("process", action="poll")).error)
    assert "there is no process 'x'" in str((await call("process", action="poll", session_id="x")).error)


async def test_writing_to_a_process_that_does_not_read_comes_back(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lachesis_tools.background.WRITE_TIMEOUT", 0.3)
    name = await start(call, "sleep 60")
    failed = await call("process", action="write", session_id=name, data="x" * 200_000)
    assert "has not read its input" in str(failed.error)


async def test_the_interpreter_is_not_one_of_the_models_processes(call: Call, session: ToolSession) -> None:
    await call("python", code="1")
    assert len(await (await session.sandbox()).processes()) == 1
    assert answer(await call("process", action="list")) == {"processes": []}
