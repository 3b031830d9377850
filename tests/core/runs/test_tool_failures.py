"""Which tool failed how often, and why: on the console, in the report and in the viewer."""

from __future__ import annotations

import asyncio
import io
import itertools
import re
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lachesis.figures.tool_failures import MOST_KINDS, ToolFailures
from lachesis.runs.results import print_result
from lachesis_view.app import Viewer
from lachesis_view.index import Index
from tests.support.scripted_server import call, say
from tests.support.small_envs import ManyWords, process

WORDS = st.text("ab'\"/\n 1.x:#…", max_size=8)


def reads_nothing(request: dict[str, Any]) -> Any:
    """A model that reads two files that are missing, and writes one."""
    turn = sum(message["role"] == "tool" for message in request["messages"])
    calls = [
        ("read_file", {"path": f"gone-{len(str(request))}.txt"}),
        ("read_file", {"path": "gone.txt", "offset": "x"}),
        ("write_file", {"path": "there.txt", "content": "x"}),
    ]
    return call(calls[turn]) if turn < len(calls) else say("Done.")


async def test_they_are_on_the_console_in_the_report_and_in_the_viewer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    result = await process(ManyWords, folder, reads_nothing, total_steps=2, group_size=2)
    print_result(Console(file=(shown := io.StringIO()), width=500), result)
    said = next(line for line in shown.getvalue().splitlines() if line.startswith("failed calls"))
    assert "read_file 8 of 8: 4 x " in said and "no such file" in said and "write_file" not in said
    report = result.files.report.read_text()
    assert "<b>read_file</b> 8 of 8<div>4 × " in report
    index = Index(tmp_path, tmp_path / "index.sqlite")
    await asyncio.to_thread(index.refresh)
    async with TestClient(TestServer(Viewer(index).app())) as client:
        page = await (await client.get("/run/run")).text()
    index.close()
    row = re.search(r"<b>read_file</b>.*?</tr>", page, re.DOTALL)
    assert row is not None and "8 of 8" in row[0] and "4 × " in row[0] and "no such file" in row[0]


@given(st.lists(st.tuples(WORDS, WORDS), max_size=30))
def test_no_failure_is_lost_or_doubled_however_they_are_added(errors: list[tuple[str, str]]) -> None:
    at_once, one_by_one, again = ToolFailures(), ToolFailures(), ToolFailures()
    tools = {tool for tool, _ in errors}
    stats = {tool: {"count": 40, "failure": sum(tool == name for name, _ in errors)} for tool in tools}
    at_once.add(stats, errors)
    for tool, error in errors:
        one_by_one.add({tool: {"count": 1, "failure": 1}}, [(tool, error)])
    again.add_rows(at_once.to_rows())
    assert [*again] == [*at_once]
    assert sorted(tool for tool, *_ in at_once) == sorted(tools)
    for tool, failed, calls, reasons in at_once:
        assert failed == sum(count for _, count in reasons) == stats[tool]["failure"] and calls == 40
        assert reasons in [found for name, _, _, found in one_by_one if name == tool]


def test_what_differs_among_failures_of_one_reason_is_left_out() -> None:
    failures = ToolFailures()
    for name, code in (("a", 2), ("b", 2)):
        failures.add({"run": {"count": 1, "failure": 1}}, [("run", f"no such file: /srv/{name} (exit code {code})")])
        failures.add({"run": {"count": 1, "failure": 1}}, [("run", f"{name!r} is no {'name' * 2}, line 7")])
    (line,) = failures.lines()
    assert line == "run 4 of 4: 2 x no such file: …; 2 x … is no namename, line 7"


def test_names_without_quotes_are_one_reason_where_many_differ_in_them() -> None:
    failures = ToolFailures()
    for start, end in itertools.permutations(["Ulm", "Aalen", "Bonn", "Kiel"], 2):
        failures.add({"line": {"count": 2, "failure": 1}}, [("line", f"no line from {start} to {end} today")])
    for what in ("file", "folder"):
        failures.add({"read": {"count": 1, "failure": 1}}, [("read", f"no such {what}: x")])
    assert [*failures.lines()] == [
        "line 12 of 24: 12 x no line from … to … today",
        "read 2 of 2: 1 x no such file: x; 1 x no such folder: x",
    ]


def test_a_model_that_makes_up_errors_fills_no_memory() -> None:
    failures = ToolFailures()
    for number in range(5 * MOST_KINDS):
        name = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        failures.add({"run": {"count": 1, "failure": 1}}, [("run", f"{name} is unknown")])
    ((tool, failed, calls, reasons),) = failures
    assert (tool, failed, calls) == ("run", 5 * MOST_KINDS, 5 * MOST_KINDS) and len(reasons) <= MOST_KINDS + 1
    (line,) = failures.lines()
    assert line.count(" x ") <= 4
