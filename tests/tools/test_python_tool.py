"""The interpreter of a session, in a real sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from lachesis_tools import ToolResult, ToolSession, call_tool

Call = Callable[..., Awaitable[ToolResult]]


def text(result: ToolResult) -> str:
    assert result.error is None, result.error
    return result.content


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1 + 1", "2"),
        ("x = 5", "[no output]"),
        ("None", "[no output]"),
        ("print('a'); 'b'", "a\n'b'"),
        ("", "[no output]"),
        ("# only a comment", "[no output]"),
        ("import sys; print('out'); print('err', file=sys.stderr)", "out\nerr"),
        ("import os, subprocess; subprocess.run('echo sub; echo err >&2', shell=True).returncode", "sub\nerr\n0"),
        ("import os; os.write(1, b'raw\\n'); print('é \\ud800')", "raw\né \\ud800"),
        ("def f(n):\n    return n * 2\n\nf(4)", "8"),
        ("__name__", "'__main__'"),
    ],
)
async def test_a_cell_answers_as_a_notebook_does(call: Call, code: str, expected: str) -> None:
    assert text(await call("python", code=code)) == expected


async def written(session: ToolSession, name: str) -> None:
    """Once there is something in this file."""
    sandbox = await session.sandbox()
    async with asyncio.timeout(60):
        while (await sandbox.exec(f"test -s {name}", timeout=20)).exit_code != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_variables_imports_and_functions_stay(call: Call) -> None:
    await call("python", code="import math\nvalues = [1, 2]\ndef f(): return math.pi")
    await call("python", code="values.append(round(f()))")
    assert text(await call("python", code="values")) == "[1, 2, 3]"
    assert (
        text(await call("python", code="import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A"))
        == "True"
    )


async def test_a_traceback_shows_the_cell_and_no_frame_of_ours(call: Call) -> None:
    await call("python", code="def f():\n    return 1 / 0")
    shown = text(await call("python", code="x = 1\nf()")).splitlines()
    assert [line for line in shown if line.strip(" ~^")] == [  # Pythons differ in what they underline
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 2, in <module>',
        "    f()",
        '  File "<cell 1>", line 2, in f',
        "    return 1 / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert text(await call("python", code="x")) == "1"
    broken = text(await call("python", code="def f(:\n  pass"))
    assert broken.startswith('  File "<cell 4>", line 1') and "SyntaxError" in broken
    assert "repl" not in broken and "ast" not in broken


async def test_input_is_at_its_end(call: Call) -> None:
    assert text(await call("python", code="input()")).endswith("EOFError: EOF when reading a line")
    assert text(await call("python", code="'still here'")) == "'still here'"


async def test_a_timeout_loses_the_state_and_says_so(call: Call) -> None:
    await call("python", code="x = 1")
    late = text(await call("python", code="print('begun')\nwhile True: pass", timeout=2))
    assert late == (
        "begun\n[The code was stopped after its timeout of 2 s. "
        "All variables are lost; the next call starts a new interpreter.]"
    )
    assert text(await call("python", code="x")).endswith("NameError: name 'x' is not defined")


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("exit()", 0),
        ("import sys; print('bye'); sys.exit(3)", 3),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
async def test_an_exit_ends_only_the_interpreter(call: Call, code: str, exit_code: int) -> None:
    await call("python", code="open('kept.txt', 'w').write('x')")
    assert f"[Python exited with code {exit_code}. All variables are lost" in text(await call("python", code=code))
    assert text(await call("python", code="open('kept.txt').read()")) == "'x'"


async def test_an_interpreter_that_dies_between_two_cells_is_reported(call: Call, session: ToolSession) -> None:
    await call("python", code="import os, threading; threading.Timer(0.1, os._exit, [9]).start()")
    (interpreter,) = await (await session.sandbox()).processes()
    async with asyncio.timeout(60):
        while (await interpreter.status()).exit_code is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert "[Python exited with code 9" in text(await call("python", code="1"))
    assert text(await call("python", code="1")) == "1"


async def test_huge_output_keeps_its_ends(call: Call) -> None:
    output = text(await call("python", code="print('begin')\nfor _ in range(400): print('x' * 20_000)\nprint('end')"))
    assert output.startswith("begin\n") and output.endswith("end")
    assert "characters elided" in output and len(output) <= 50_000
    assert text(await call("python", code="'next'")) == "'next'"


async def test_late_output_of_a_thread_comes_with_the_next_cell(call: Call, session: ToolSession) -> None:
    late = "def late():\n    print('late')\n    open('said', 'w').write('x')"
    await call("python", code=f"import threading\n{late}\nthreading.Timer(0.1, late).start()")
    await written(session, "said")
    assert text(await call("python", code="'now'")) == "late\n'now'"


async def test_nothing_that_a_cell_prints_ends_it_early(call: Call) -> None:
    code = "import sys\nprint('0' * 32 + 'K')\nf = sys._getframe()\nwhile f: f = f.f_back\nprint('after')"
    assert text(await call("python", code=code)).endswith("after")


async def test_a_cell_that_breaks_the_streams_does_not_break_the_interpreter(call: Call) -> None:
    await call("python", code="import sys, os; sys.stdout.close(); os.close(1)")
    assert "closed file" in text(await call("python", code="print(1)"))
    await call("python", code="import os; os._exit(0)")
    assert text(await call("python", code="2")) == "2"


async def test_large_code_arrives_whole(call: Call) -> None:
    data = os.urandom(300_000).hex()
    assert text(await call("python", code=f"len({data!r})")) == "600000"


async def test_a_cancelled_cell_does_not_go_on(session: ToolSession, call: Call) -> None:
    await call("python", code="import time")
    endless = "while True:\n    open('beat', 'a').write('x')\n    time.sleep(0.02)"
    task = asyncio.create_task(call_tool("python", {"code": endless}, session))
    await written(session, "beat")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    sandbox = await session.sandbox()
    before = len(await sandbox.read_bytes("beat"))
    await asyncio.sleep(0.3)
    assert len(await sandbox.read_bytes("beat")) == before > 0
    assert text(await call("python", code="'time' in dir()")) == "False"


async def test_a_forked_child_of_a_cell_takes_no_further_cells(call: Call) -> None:
    await call("python", code="import os\nchild = os.fork()\nif child: _ = os.waitpid(child, 0)")
    for _ in range(5):
        assert (await call("python", code="child > 0")).content == "True"


async def test_replaced_functions_and_streams_do_not_stop_the_interpreter(call: Call) -> None:
    await call("python", code="import ast, builtins, json, sys\njson.loads = ast.parse = builtins.print = None")
    await call("python", code="kept = 41; sys.stdout = sys.stderr = None")
    assert (await call("python", code="kept + 1")).content == "42"
    assert "ZeroDivisionError" in (await call("python", code="1 / 0")).content
