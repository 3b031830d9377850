"""The budget of tool results: what is too long is a file in the sandbox, and nothing of it is lost."""

from __future__ import annotations

import re

from lachesis_tools import ToolResult, ToolSession
from lachesis_tools.budget import ResultBudget
from tests.tools.conftest import Call

LONG = "\n".join(f"line {number} äöü" for number in range(2000))


def path_in(content: str) -> str:
    found = re.search(r"in the file (\S+)\. It begins", content)
    assert found is not None, content
    return found[1]


async def read(session: ToolSession, path: str) -> str:
    return (await (await session.sandbox()).read_bytes(path)).decode()


async def test_a_result_over_its_limit_becomes_a_file_and_a_preview(session: ToolSession) -> None:
    budget = ResultBudget(1000, 10**6, 50, {"search_files": 10**6})
    calls = [("call/../1", "terminal"), ("call_2", "search_files"), ("call_3", "read_file"), ("call_4", "terminal")]
    results = [ToolResult(LONG), ToolResult(LONG), ToolResult(LONG), ToolResult("short")]
    kept = await budget.apply(calls, results, session)
    assert [result.content for result in kept[1:]] == [LONG, LONG, "short"]
    shown = kept[0].content
    assert shown.startswith("<persisted-output>") and shown.endswith("</persisted-output>")
    assert f"{len(LONG)} characters" in shown and LONG[:50] in shown and LONG[:60] not in shown
    assert kept[0].truncated
    assert re.fullmatch(r"/tmp/hermes-results/call_\.\._1-[0-9a-f]{8}\.txt", path_in(shown))
    assert await read(session, path_in(shown)) == LONG


async def test_over_the_budget_of_a_turn_the_longest_results_go_first(session: ToolSession) -> None:
    budget = ResultBudget(turn_budget=2500, preview_size=10)
    texts = ["a" * 900, "b" * 2000, "c" * 1000, "d" * 400]
    kept = await budget.apply(
        [(f"call_{name}", "read_file") for name in "abcd"], [ToolResult(text) for text in texts], session
    )
    shown = [result.content for result in kept]
    assert [shown[0], shown[2], shown[3]] == [texts[0], texts[2], texts[3]]
    assert await read(session, path_in(shown[1])) == texts[1]
    assert sum(map(len, shown)) <= 2500


async def test_a_budget_that_no_preview_can_keep_ends(session: ToolSession) -> None:
    texts = ["x" * 100] * 3
    kept = await ResultBudget(turn_budget=10).apply(
        [(f"call_{number}", "todo") for number in range(3)], [ToolResult(text) for text in texts], session
    )
    assert [result.content for result in kept] == texts


async def test_within_the_budget_no_sandbox_is_started(session: ToolSession) -> None:
    results = [ToolResult("x" * 100_000)]
    assert await ResultBudget().apply([("call_1", "todo")], results, session) == results
    assert not session.started


async def test_where_no_file_can_be_written_the_model_reads_both_ends(session: ToolSession, call: Call) -> None:
    await call("terminal", command="echo in the way > /tmp/hermes-results")
    (kept,) = await ResultBudget(1000, preview_size=200).apply([("call_1", "terminal")], [ToolResult(LONG)], session)
    assert "could not be written" in kept.content
    assert LONG[:20] in kept.content and LONG[-20:] in kept.content


async def test_results_whose_calls_have_equal_names_are_all_kept(session: ToolSession) -> None:
    calls = [("call:0", "terminal"), ("call_0", "terminal")]
    texts = [LONG, LONG[::-1]]
    kept = await ResultBudget(1000).apply(calls, [ToolResult(text) for text in texts], session)
    assert [await read(session, path_in(result.content)) for result in kept] == texts
