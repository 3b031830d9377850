"""The report: whatever a model writes is text in it, and everything that happened is there."""

from __future__ import annotations

import base64
import gc
import hashlib
import io
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from lachesis.figures.figures import Figures
from lachesis.figures.summary import training_metrics
from lachesis.runs.results import print_result
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_testing.fake_server import Lengths, RandomWords
from lachesis_view.html import parts, pretty, tone
from lachesis_view.pairs import Difference
from lachesis_view.reports import run as report
from lachesis_view.reports.comparison import compare, write_comparison
from lachesis_view.reports.run import mean_bars, render_report, reward_histogram, write_report
from tests.support.chromium import Page, needs_chromium, open_page
from tests.support.hostile_groups import HOSTILE, MARKS, SHOWN, hostile_group
from tests.support.report_pages import everything, groups, index, read, rollouts
from tests.support.scripted_server import call, say
from tests.support.small_envs import ManyWords, SortWords, process
from tests.support.training_runs import played

SAFE_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "section", "div", "p"),
    *("span", "b", "i", "u", "em", "details", "summary", "pre", "table", "tr", "th", "td"),
    *("input", "select", "option", "noscript", "kbd", "script"),
    *("svg", "g", "line", "text", "polygon", "polyline", "circle", "path"),
    *("article", "header", "h3", "a", "ol", "li", "img", "code", "tbody"),
    *("dl", "dt", "dd", "rect"),
}
SAFE_ATTRIBUTES = {
    *("lang", "charset", "name", "content", "class", "style", "id", "open", "http-equiv", "title"),
    *("type", "placeholder", "aria-label", "value", "role", "viewbox"),
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "points", "text-anchor", "d", "width", "height"),
    *("tabindex", "data-step", "href", "src", "alt", "aria-hidden", "preserveaspectratio"),
}


def check_harmless(markup: str) -> str:
    """Nothing but our own elements is in it, and they lead and load from nowhere else; its text."""
    reader = read(markup)
    assert reader.tags <= SAFE_TAGS
    assert reader.attributes <= SAFE_ATTRIBUTES
    for tag, name, value in reader.values:
        if name in ("href", "src"):
            assert (value or "").startswith("#" if tag == "a" else "data:image/png;base64,"), (tag, value)
    return reader.text


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
    for markup in (page, *(each for group in groups(page) for each in group)):
        check_harmless(markup)
    text = everything(page)
    for mark in ("PROMPT ", "ANSWER ", "THOUGHT ", "JUDGE "):
        assert f"{mark}{SHOWN}" in text
    assert "ARGUMENT </pre>" in text
    assert "attempt arguments are not JSON" in rollouts(page)[0]
    assert '{"ROLLED": "BACK <script>' in text
    assert "There is no tool" in text
    assert [rollout[:2] for rollout in index(page)["items"][0][3][0][1]] == [
        [0.625, "completed"],
        [None, "completed"],
    ]
    assert "in compute_reward" in text, "the line that raised"
    assert "ValueError: JUDGE " in reader.text, "why a rollout was left out is among the figures"
    # No network: what looks like a reference is the model's text, escaped or packed.
    assert not re.search(r"<[^>]*(https?:|src=|href=(?!\"#)|url\()", page)
    # And the browser is to run the script of the page alone, and to load nothing.
    digest = base64.b64encode(hashlib.sha256(reader.scripts[-1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:" in page
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


def test_no_judge_leaves_out_what_has_no_reward_on_purpose() -> None:
    def batch(*kinds: str) -> dict[str, Any]:
        group = {**hostile_group(), "environment": "batch", "item_key": str(len(kinds))}
        kept = {"traceback": None, "outcome": "context_exhausted", "verifier": None, "agent_fault": None}
        ends = [{"reward": None, "unscored_kind": kind} if kind else {"reward": 1.0} for kind in kinds]
        return {**group, "rollouts": [{**group["rollouts"][0], **kept, **end} for end in ends]}

    page, _ = render_report("batch", [batch("declined", "declined")])
    shown = read(page).text.partition("all rewards")[0]
    assert "2 of 2 rollouts were cut off: allow longer answers with --env.max_token_length" in shown
    assert "no reward: a batch without --env" in shown and "mean reward" not in shown
    assert not re.search("left out|declined|if those", shown, re.IGNORECASE)
    assert "with rollouts left out" not in page and '<option value="context_exhausted">out of tokens<' in page
    assert [(each[:20], "out of tokens" in each) for each in rollouts(page)] == [
        ("rollout 0 no reward ", True),
        ("rollout 1 no reward ", True),
    ]
    page, _ = render_report("mixed", [batch("", "declined", "infra_error"), batch("", "declined")])
    shown = " ".join(read(page).text.partition("all rewards")[0].split())
    assert "no reward" in shown and '<i class="cut" style=' in page, "as in the viewer"
    assert "<dt>left out</dt><dd>3</dd>" in page, "of rollouts that could have a reward"
    assert "no reward" in (table := page.partition('<table><tr><th class="text">item')[2].partition("</table>")[0])
    assert table.count("<tr>") == 2 and "33.3 %" in table


def graded(key: str, *parts: float | None) -> dict[str, Any]:
    """A group whose reward is 0.8 x right + 0.2 x short; None for a rollout whose judge failed."""
    group = {**hostile_group(), "item_key": key, "number": 0, "traceback": None}
    kept = {
        **group["rollouts"][0],
        "outcome": "completed",
        "verifier": None,
        "agent_fault": None,
        "unscored_kind": None,
    }
    ends: list[dict[str, Any]] = [
        {"reward": None, "unscored_kind": "environment", "traceback": f"Traceback\nValueError: no judge for {key}"}
        if right is None
        else {
            "reward": 0.8 * right + 0.2,
            "traceback": None,
            "metrics": {"reward/right": right, "reward/short": 1.0, "steps": 7.0},
            "reward_weights": {"right": 0.8, "short": 0.2},
        }
        for right in parts
    ]
    return {**group, "rollouts": [{**kept, "metrics": {}, **end} for end in ends]}


def words(page: str) -> str:
    """Its text, with a blank between any two elements."""
    return " ".join(re.sub("<[^>]*>", " ", page).split())


def test_parts_of_the_reward_have_weights_and_intervals_and_add_up_to_the_mean_reward() -> None:
    page, summary = render_report("run", [graded("a", 1.0, 0.0), graded("b", 1.0), graded("c", 0.0, None)])
    shown = words(page)
    assert "name weight mean 95 % interval right 0.8 0.5 " in shown and "short 0.2 1 " in shown
    assert re.search(r"Metrics name mean 95 % interval steps 7 ", shown), "which have no weight"
    total = sum(weight * summary.metrics[f"reward/{name}"] for name, weight in summary.weights.items())
    assert total == pytest.approx(summary.reward.mean), "though the items have different numbers of rollouts"


def test_why_rollouts_are_left_out_is_said_of_each_item_and_by_how_often() -> None:
    page, _ = render_report("run", [graded("a", 1.0, None, None), graded("b", None), graded("c", 0.5)])
    shown = words(page)
    assert "2 × ValueError: no judge for a 1 × ValueError: no judge for b" in shown
    assert re.search(r"group 0: .*? 3 66\.7 % 66\.7 % ValueError: no judge for a ", shown)


def test_without_javascript_the_failed_the_worst_and_the_best_rollouts_can_be_read() -> None:
    page, _ = render_report("run", [graded("a", 1.0, None), graded("b", 0.25, 0.5), graded("c", 0.75, 0.5, 0.9)])
    static = page.partition("<noscript>")[2].partition("</noscript>")[0]
    check_harmless(f"<div>{static}</div>")
    said = [re.sub(r"\s+", " ", each) for each in static.split('<details class="rollout">')[1:]]
    found = [re.search(r"(rollout \d): .*?>(left out|reward [\d.]+)", each) for each in said]
    assert [each and each.group(1, 2) for each in found] == [
        ("rollout 1", "left out"),
        *(("rollout 0", "reward 0.4"), ("rollout 1", "reward 0.6"), ("rollout 1", "reward 0.6")),
        *(("rollout 0", "reward 1"), ("rollout 2", "reward 0.92"), ("rollout 0", "reward 0.8")),
    ]
    assert all('<article class="message' in each for each in said)


def test_settings_that_differ_from_the_defaults_come_first_and_no_tokenizer_that_was_not_loaded() -> None:
    of_run = HermesAgentEnvConfig().about_content(evaluation=True)
    settings = {**of_run, "environment": "e", "model": "m", "max_agent_turns": 7, "pages": 3}
    page, _ = render_report("run", [graded("a", 1.0)], settings)
    first = words(page).partition("Settings that differ from the defaults ")[2]
    assert first.startswith("max_agent_turns 7 default 30 pages 3 ")
    assert (
        "rollout_timeout" in first.partition("All settings")[2]
        and "rollout_timeout" not in first.partition("All settings")[0]
    )
    assert "tokenizer_name" not in page
    page, _ = render_report("run", [graded("a", 1.0)], {**settings, "tokenizer_name": "own/tokenizer"})
    assert "own/tokenizer" in page


def test_runs_are_compared_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name, model in (("old/same", "m"), ("new/same", "m"), ("other", "n")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "samples.jsonl").write_text(json.dumps({**graded("a", 1.0), "model": model}) + "\n")
    assert compare(tmp_path / "old/same", tmp_path / "new/same").names == ("old", "new")
    assert compare(tmp_path / "old/same", tmp_path / "other").names == ("m", "n")
    write_comparison(tmp_path / "two.html", compare(tmp_path / "old/same", tmp_path / "new/same"))
    page = (tmp_path / "two.html").read_text()
    assert "<h1>new against old</h1>" in page and '<th class="text">A: old</th>' in page


async def test_repaired_calls_are_in_the_table_the_figures_and_beside_each_call(tmp_path: Path) -> None:
    def open_call(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        return say('<tool_call>\n{"name": "todo", "arguments": {}}')

    result = await process(SortWords, tmp_path, open_call, total_steps=2, enabled_toolsets=["todo"])
    rollouts_played = result.summary.rollouts
    shown = io.StringIO()
    print_result(Console(file=shown, width=200), result)
    assert f"{rollouts_played} of {rollouts_played}, 100.0%: calls repaired by the parser" in shown.getvalue()
    page = result.files.report.read_text(encoding="utf-8")
    assert f"<dd>100.0 % ({rollouts_played} of {rollouts_played})</dd>" in page
    assert "repaired by the parser" in rollouts(page)[0]
    assert training_metrics_of(result.files.groups)["train/repaired_call_rate"] == 1.0


def training_metrics_of(groups_file: Path) -> dict[str, Any]:
    finished = Figures()
    for line in groups_file.read_text().splitlines():
        finished.add(json.loads(line))
    return training_metrics(finished.summary())


def test_the_report_of_a_training_has_the_alarm_and_that_of_unchanged_weights_has_none() -> None:
    def records(versions: Sequence[str]) -> list[dict[str, Any]]:
        groups = [hostile_group() for _ in range(18)]
        for number, group in enumerate(groups):
            for rollout in group["rollouts"]:
                rollout |= {
                    "repaired_calls": [4 * (number >= 12), 4],
                    "policy_versions": [versions[number * len(versions) // 18]],
                }
        return groups

    page, summary = render_report("t", records(["run:0", "run:1"]))
    assert summary.unlearns_calls.startswith("calls repaired by the parser: from 0.0%")
    assert f"Alarm: {summary.unlearns_calls}" in " ".join(read(page).text.split())
    page, summary = render_report("t", records(["run:0"]))
    assert summary.repaired.alarm and not summary.unlearns_calls, "items may differ, the weights do not"
    assert "Alarm:" not in read(page).text


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
    shown = rollouts(page)
    assert [each.count("calls write_file") for each in shown] == [1] * 12
    assert [" ".join(each.split()[:5]) for each in shown] == [f"rollout {n} reward 1 completed" for n in range(3)] * 4
    records = [json.loads(line) for line in result.files.groups.read_text().splitlines()]
    assert [item[0] for item in index(page)["items"]] == [record["item_key"] for record in records]
    file = tmp_path / "groups.jsonl"
    assert '<th class="text">max_agent_turns</th>' in page and ">2026-" in page, "its settings, and when it was"
    write_report(tmp_path / "again.html", title="sort-words: scripted", groups=records, groups_file=file)
    assert (tmp_path / "again.html").read_text() == page
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.setattr(parts, "PART_SIZE", 2000)
    monkeypatch.setattr(report, "MAX_CHARACTERS", 12_000)
    many = [{**record, "item_key": f"{at}-1"} for at, record in enumerate(records * 10)]
    long, _ = render_report("long", iter(many))
    items = index(long)["items"]
    held = [item[0] for item in items if item[3][0][0] != [None]]
    assert len(items) == 40 and 0 < len(held) == len(groups(long)) < 40
    assert f"The rollouts of {len(held)} of 40 groups are in this page" in long
    assert "<dt>items</dt><dd>40</dd>" in long, "the figures are about all of them"
    monkeypatch.setattr(report, "MAX_CHARACTERS", 64_000_000)
    monkeypatch.setattr(report, "MAX_ROLLOUTS", 16)
    few, _ = render_report("few", iter(many))
    assert "The rollouts of 5 of 40 groups are in this page" in few, "of three rollouts each"
    assert "<dt>items</dt><dd>40</dd>" in few


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


SEARCH = "(at('search').value = {}, search().then(() => at('count').textContent))"


@asynccontextmanager
async def opened(path: Path, hash: str = "", **size: int) -> AsyncIterator[Page]:
    """A report in a browser, as a file; nothing of what models wrote is run, refused or loaded."""
    async with open_page(**size) as page:
        await page.open(path.as_uri() + hash)
        await page.until("document.body.dataset.ready")
        yield page
        assert page.errors == []


@needs_chromium
async def test_a_browser_shows_it_and_runs_nothing_that_a_model_wrote(tmp_path: Path) -> None:
    write_report(tmp_path / "one.html", title=HOSTILE, groups=[hostile_group()])
    (tmp_path / "samples.jsonl").write_text(json.dumps(hostile_group()) + "\n")
    write_comparison(tmp_path / "two.html", compare(tmp_path, tmp_path))
    for path, runs in (("one.html", 1), ("two.html", 2)):
        async with opened(tmp_path / path) as page:
            await page.until("document.querySelector('.rollout')")
            await page.eval("document.querySelectorAll('details').forEach((each) => (each.open = true))")
            await page.until("document.body.textContent.includes('NAMED ')")
            text = check_harmless(await page.eval("document.querySelector('main').outerHTML"))
            for mark in MARKS:
                assert text.count(f"{mark} {SHOWN}") >= 2 * runs, mark
            for mark in ("NAMED", "SAYS"):
                assert f"{mark} {SHOWN}" in text
            assert f"GIVEN {SHOWN}, -l" in text
            shown = await page.eval("[...document.querySelectorAll('.message.failed, .call.failed')].length")
            assert shown == 3 * 2 * runs, "the call, its result, and the call of the reward that raised"
            ids: list[str] = await page.eval("[...document.querySelectorAll('[id]')].map((each) => each.id)")
            assert len(set(ids)) == len(ids)
            links: list[str] = await page.eval("[...document.querySelectorAll('#list a')].map((each) => each.hash)")
            assert links and {link[1:] for link in links} <= set(ids)
            await page.until("[...document.images].every((image) => image.naturalWidth === 1)")
            assert "lachesis view" in text, "where the tokens are"


@needs_chromium
async def test_an_address_leads_to_a_message_also_in_a_closed_branch(tmp_path: Path) -> None:
    groups = [hostile_group("other-1"), hostile_group("a key'ü%20/-1")]
    write_report(tmp_path / "report.html", title="t", groups=groups)
    attempt = "/0.1/turn-0"
    async with opened(tmp_path / "report.html", "#item-a%20key'%C3%BC%2520%2F-1" + attempt) as page:
        target = f"document.querySelector('[id$=\"{attempt}\"]')"
        place = f"{target}?.getBoundingClientRect().top"
        await page.until(f"{place} >= 0 && {place} < 900")
        assert await page.eval(f"{target}.closest('.branch').open && {target}.textContent.includes('DROPPED')")
        # In the page, a failed call is one click away; another item's address stays the item's.
        await page.eval("document.querySelector('.rollout[open] .failed-calls a').click()")
        await page.until(f"location.hash.endsWith('/turn-1') && {place} !== undefined")
        await page.eval("(at('search').value = '', search())")
        await page.eval("document.querySelector('#list > details').open = true")
        await page.until("location.hash === '#item-other-1'")


@needs_chromium
async def test_a_search_finds_what_was_written_and_nothing_of_the_markup(tmp_path: Path) -> None:
    plain = json.loads(json.dumps(hostile_group("plain-1")).replace("</pre><script>", ""))
    signs = 'if a<b && c == "d\'e": \\n'
    plain["rollouts"][0]["messages"][-1]["content"] = f"It says {signs}, \ud800 Ünïque."
    write_report(tmp_path / "report.html", title="t", groups=[hostile_group("k-1"), plain])
    async with opened(tmp_path / "report.html") as page:
        found = {signs: 1, "says if a<b": 1, "ünïque": 1, "</pre><script>": 1, "onerror": 2, "ünï 😀": 2, "plain-1": 1}
        for wanted in (*found, "tabindex", "<article", "&lt;", "amp;", "turn-1"):
            count = await page.eval(SEARCH.format(json.dumps(wanted)))
            assert count == f"{found.get(wanted, 0)} of 2 items", wanted


@needs_chromium
async def test_the_largest_difference_comes_first_and_what_one_of_two_runs_lacks_last(tmp_path: Path) -> None:
    for run, rewards in (("a", {"gone": 1.0, "near": 0.5, "far": 0.0}), ("b", {"near": 0.25, "far": 0.5})):
        lines = []
        for key, reward in rewards.items():
            line = hostile_group(f"{key}-1")
            line["rollouts"] = line["rollouts"][:1]
            line["rollouts"][0]["reward"] = reward
            lines.append(json.dumps(line) + "\n")
        (tmp_path / run).mkdir()
        (tmp_path / run / "samples.jsonl").write_text("".join(lines))
    write_comparison(tmp_path / "two.html", compare(tmp_path / "a", tmp_path / "b"))
    text = (tmp_path / "two.html").read_text()
    assert "Mean difference, B − A</h2>" in text and '+0.125 <span class="dim">over 2 items</span>' in text
    [bar] = mean_bars([("all", Difference(-0.5, -1.0, 0.0, 0.1, 4, 0, 4), 4)])
    assert (bar.start, bar.start + bar.width, bar.low, bar.spread) == (25, 50, 0, 50), "0 is in the middle"
    async with opened(tmp_path / "two.html") as page:
        await page.eval("(at('order').value = 'difference', at('order').dispatchEvent(new Event('change')))")
        await page.until("document.querySelectorAll('#list > details').length === 3")
        assert await page.eval("found.map((item) => item.key)") == ["far-1", "near-1", "gone-1"]
        tones = await page.eval("[...document.querySelectorAll('#list summary .cell')].map(each => each.className)")
        shown = (0.0, 0.5, 0.5, 0.25, 1.0)
        assert tones == [f"cell {tone(reward, (0.0, 1.0))}" for reward in shown], "as in the viewer"


@needs_chromium
async def test_a_report_is_readable_on_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", title="t", groups=[hostile_group()])
    async with opened(tmp_path / "report.html", width=390, height=844) as page:
        await page.prefer("dark")
        await page.until("document.querySelector('.rollout')")
        await page.eval("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        assert not await page.eval("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        for element in ("document.body", "document.querySelector('.rollout pre')"):
            ink, ground = await page.eval(
                f"['color', 'backgroundColor'].map(name => getComputedStyle({element})[name].match(/\\d+/g)[0])"
            )
            assert int(ink) > 90 > 60 > int(ground), element


def test_records_of_older_versions_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    group = hostile_group()
    newer = ("message_turns", "calls", "agent_fault", "reward_calls", "context_edits", "program", "verifier")
    for rollout in group["rollouts"]:
        for name in newer:
            del rollout[name]
        (dropped,) = rollout["discarded"] = [dict(rollout["discarded"][0])]
        del dropped["after"], dropped["message_turns"]
        rollout["tool_errors"] = [{"turn": 0, "error": "", **_named(rollout["messages"][2]["tool_calls"][0])}]
    del group["tools"], group["samples"]
    page, _ = render_report("old", [group])
    for shown in rollouts(page):
        assert f"DROPPED {SHOWN}" in shown and "TOOL " in shown and " failed" in shown


def _named(call: dict[str, Any]) -> dict[str, str]:
    return {"tool": call["function"]["name"], "arguments": call["function"]["arguments"]}
