"""The report: whatever a model writes is text in it, and everything that happened is there."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.html import parts, pretty
from lachesis.runs import report
from lachesis.runs.comparison import compare, write_comparison
from lachesis.runs.report import render_report, reward_histogram, write_report
from lachesis.testing.fake_server import Lengths, RandomWords
from tests.support.report_pages import everything, groups, index, read
from tests.support.scripted_server import call, say
from tests.support.small_envs import ManyWords, SortWords, process
from tests.support.training_runs import played

HOSTILE = (
    "</pre><script>alert('x')</script>\"'><img src=http://evil.example/x onerror=alert(1)> {{ 7*7 }} ünï 😀 \u202e"
)


SAFE_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "section", "div", "p"),
    *("span", "b", "i", "u", "em", "details", "summary", "pre", "table", "tr", "th", "td"),
    *("input", "select", "option", "noscript", "kbd", "script"),
    *("svg", "g", "line", "text", "polygon", "polyline", "circle"),
}
SAFE_ATTRIBUTES = {
    *("lang", "charset", "name", "content", "class", "style", "id", "open", "http-equiv", "title"),
    *("type", "placeholder", "aria-label", "value", "role", "viewbox"),
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "points", "text-anchor"),
}


async def test_everything_is_in_it_and_nothing_of_it_is_markup(tmp_path: Path) -> None:
    class Hostile(SortWords):
        def format_prompt(self, item: Any) -> str:
            return f"PROMPT {HOSTILE}"

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            if ctx.task_id.split("-")[2] == "1":
                raise ValueError(f"JUDGE {HOSTILE}")
            return 0.625

    played = 0

    def hostile(request: dict[str, Any]) -> Any:
        nonlocal played
        played += 1
        if request["messages"][-1]["role"] == "tool":
            return say(f"ANSWER {HOSTILE} \ud83d", reasoning_content=f"THOUGHT {HOSTILE}")
        if played == 1:
            return call(("write_file", '{"ROLLED": "BACK <script>'))
        return call(("write_file", {"path": "a.txt", "content": f"ARGUMENT {HOSTILE}"}), (f"<b>{HOSTILE}</b>", {}))

    result = await process(Hostile, tmp_path, hostile, total_steps=1)
    page = result.files.report.read_text(encoding="utf-8")
    reader = read(page)
    assert reader.tags <= SAFE_TAGS
    assert reader.attributes <= SAFE_ATTRIBUTES
    text = everything(page)
    for mark in ("PROMPT ", "ANSWER ", "THOUGHT ", "JUDGE "):
        assert f"{mark}{HOSTILE}" in text
    assert "ARGUMENT </pre>" in text
    ((dropped, *_),) = groups(page)[0]["rollouts"][0]["discarded"]
    assert dropped.startswith("arguments are not JSON")
    assert '{"ROLLED": "BACK <script>' in text
    assert "There is no tool" in text
    assert [rollout[:2] for rollout in index(page)["items"][0][3][0][1]] == [
        [0.625, "completed"],
        [None, "completed"],
    ]
    assert "Traceback (most recent call last)" in text
    # No network: what looks like a reference is the model's text, escaped or packed.
    assert not re.search(r"<[^>]*(https?:|src=|href=|url\()", page)
    # And the browser is to run the script of the page alone, and to load nothing.
    digest = base64.b64encode(hashlib.sha256(reader.scripts[-1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert reader.scripts[-1] == (Path(report.__file__).parent / "templates" / "report.js").read_text()


async def test_interrupts_and_versions_of_the_weights_are_counted(tmp_path: Path) -> None:
    """Two rollouts of a second each, while the weights change every 0.3 s and abort what is in flight."""
    slow = {"tokens_per_second": 30.0, "update_every": 0.3}
    rollouts = await played(ManyWords, tmp_path / "run", RandomWords(Lengths(30, 30)), fake=slow)
    assert all(rollout["interrupts"] and len(rollout["policy_versions"]) > 1 for rollout in rollouts)
    assert {rollout["completion_tokens"] for rollout in rollouts} == {30}
    records = [json.loads(line) for line in (tmp_path / "run" / "groups.jsonl").read_text().splitlines()]
    assert all(span["interrupts"] for record in records for sample in record["samples"] for span in sample["spans"])
    page, summary = render_report("run", records)
    assert summary.interrupts == sum(rollout["interrupts"] for rollout in rollouts)
    assert f"{summary.interrupts} interrupts" in read(page).text
    assert f"at most {summary.most_versions}" in read(page).text


async def test_a_report_without_a_rollout(tmp_path: Path) -> None:
    class Empty(SortWords):
        async def get_next_item(self) -> Any:
            return None

    result = await process(Empty, tmp_path)
    assert (result.summary.items, result.exhausted) == (0, True)
    assert "none" in read(result.files.report.read_text()).text
    assert read(render_report(HOSTILE, [])[0]).tags <= SAFE_TAGS


async def test_every_trajectory_of_every_group_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = await process(SortWords, tmp_path, total_steps=4, group_size=3)
    page = result.files.report.read_text()
    shown = [rollout for group in groups(page) for rollout in group["rollouts"]]
    calls = [call for rollout in shown for message in rollout["messages"] for call, _ in message[4]]
    assert calls == ["write_file"] * 12
    assert [rollout["reward"] for rollout in shown] == [1.0] * 12
    records = [json.loads(line) for line in result.files.groups.read_text().splitlines()]
    assert [item[0] for item in index(page)["items"]] == [record["item_key"] for record in records]
    write_report(tmp_path / "again.html", title="sort-words: scripted", groups=records)
    assert (tmp_path / "again.html").read_text() == page
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.setattr(parts, "PART_SIZE", 2000)
    monkeypatch.setattr(report, "MAX_CHARACTERS", 2000)
    many = [{**record, "item_key": f"{at}-1"} for at, record in enumerate(records * 10)]
    long, _ = render_report("long", iter(many))
    items = index(long)["items"]
    held = [item[0] for item in items if item[3][0][0] != [None]]
    assert len(items) == 40 and 0 < len(held) == len(groups(long)) < 40
    assert f"The trajectories of {len(held)} of 40 groups are in this page" in long
    assert "<b>40</b><span>items</span>" in long, "the figures are about all of them"


def test_what_a_model_writes_cannot_break_the_report(tmp_path: Path) -> None:
    deep = "[" * 100_000
    contents = [deep, '{"a":' * 5000 + "1" + "}" * 5000, "9" * 5000, "NaN", "\ud800 \x00 \x1b[31m", "null"]
    messages = [{"role": "user", "content": "go"}, *({"role": "tool", "content": text} for text in contents)]
    rollout = {
        **dict.fromkeys(("reward", "traceback", "place")),
        **dict.fromkeys(("index", "turns", "tool_calls", "seconds"), 0),
        "messages": messages,
        "outcome": "timeout",
        "reason": "late",
        "attempts": 1,
        "metrics": {},
        "tool_stats": {},
        "tool_errors": [],
        "discarded": [],
    }
    group = {"item_key": "k-1", "item": {"a": HOSTILE}, "rollouts": [rollout], "messages": []}
    summary = write_report(tmp_path / "report.html", title="t", groups=[group])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert deep in everything(page)
    assert "\ud800" in everything(page)
    assert (summary.rollouts, summary.scored) == (1, 0)


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=60))
def test_the_histogram_counts_every_reward_once(rewards: list[float]) -> None:
    bars = reward_histogram(rewards)
    assert sum(bar.count for bar in bars) == len(rewards)
    assert len(bars) <= report.HISTOGRAM_BINS
    assert all(0.0 <= bar.share <= 1.0 for bar in bars)
    if bars:
        assert max(bar.share for bar in bars) == 1.0


def test_a_bin_holds_what_its_label_says() -> None:
    bars = reward_histogram([at / 20 for at in range(21)])
    assert [bar.label for bar in bars][:2] == ["0 to 0.1", "0.1 to 0.2"]
    assert sum(bar.count for bar in bars[:5]) == sum(at / 20 < 0.5 - 1e-12 for at in range(21))
    assert math.isclose(bars[-1].count, 3), "the last bin holds its upper edge"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ('{"output": "1\\n2\\n", "exit_code": 0, "error": null}', "1\n2"),
        ('{"output": "1\\n", "exit_code": 2, "error": "timed out"}', "1\n[exit code 2; timed out]"),
        ('{"output": "", "exit_code": 0, "error": null}', "[no output]"),
        ('{"command": "ls\\npwd"}', "ls\npwd"),
        ('{"command": 3}', '{\n  "command": 3\n}'),
        ("42", "42"),
        (
            '{"a": [], "b": [NaN, null, 1.5], "é": {}}',
            '{\n  "a": [],\n  "b": [\n    NaN,\n    null,\n    1.5\n  ],\n  "é": {}\n}',
        ),
        ('[100000000000000000000, "\\ud83d"]', '[\n  100000000000000000000,\n  "\ud83d"\n]'),
    ],
)
def test_a_command_and_what_it_wrote_are_shown_as_a_terminal_does(value: str, shown: str) -> None:
    assert pretty(value) == shown


def test_the_values_of_a_report_leave_no_garbage() -> None:
    gc.collect()
    gc.disable()
    try:
        for number in range(100):
            pretty(f'{{"text": "é", "number": [{number}, 1e-7], "no": {{}}}}')
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
async def test_a_browser_shows_it_and_runs_nothing_that_a_model_wrote(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": f"PROMPT {HOSTILE}"}, {"role": "assistant", "content": f"ANSWER {HOSTILE}"}]
    rollout = {
        "reward": 0.5,
        "traceback": f"JUDGE {HOSTILE}",
        "place": None,
        "messages": messages,
        **dict.fromkeys(("index", "turns", "tool_calls", "seconds"), 1),
        "outcome": "completed",
        "reason": HOSTILE,
        "metrics": {HOSTILE: 1.0},
        "tool_stats": {},
        "tool_errors": [],
        "discarded": [],
        "verifier": {"stdout": f"STDOUT {HOSTILE}", "diff": f"+DIFF {HOSTILE}", "grading": "seal"},
    }
    run = {"environment": "hostile", "model": HOSTILE, "category": HOSTILE}
    group = {**run, "item_key": "k-1", "item": {"kind": HOSTILE}, "rollouts": [rollout], "messages": []}
    write_report(tmp_path / "one.html", title=HOSTILE, groups=[group])
    (tmp_path / "samples.jsonl").write_text(json.dumps(group) + "\n")
    write_comparison(tmp_path / "two.html", compare(tmp_path, tmp_path))
    for page in ("one.html", "two.html"):
        browser = await asyncio.create_subprocess_exec(
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--virtual-time-budget=20000", "--dump-dom", (tmp_path / page).as_uri()),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        dom, _ = await browser.communicate()
        reader = read(dom.decode())
        for mark in ("PROMPT ", "ANSWER ", "JUDGE ", "STDOUT ", "+DIFF "):
            assert reader.text.count(f"{mark}{HOSTILE}") >= (1 if page == "one.html" else 2), mark
        assert reader.tags <= SAFE_TAGS | {"h3", "tbody"}
        assert reader.attributes <= SAFE_ATTRIBUTES | {"data-ready"}
