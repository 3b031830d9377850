"""Rollouts by item: what a page of them holds, in which order, beside which run, and why they fail."""

from __future__ import annotations

import asyncio
import copy
import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis.figures.item_keys import whole_and_part
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.export_suite import example_groups
from lachesis_view import app as viewer
from lachesis_view.filters import Filter
from lachesis_view.html import brief, decimals, settings_in_words
from lachesis_view.index import Index
from lachesis_view.matrix import ITEMS, comparable, difference, matrix, passes
from lachesis_view.pairs import paired
from lachesis_view.reports.comparison import compare, write_comparison
from lachesis_view.reports.run import write_report
from tests.support.report_pages import index as of_page

REWARDS: dict[str, dict[str, list[float | None]]] = {
    "old": {"a": [0.0, 0.0], "b": [1.0, 1.0], "c": [0.5, 0.5], "gone": [1.0, 1.0]},
    "new": {"a": [1.0, 0.5], "b": [0.0, None], "c": [0.5, 0.5], "none": [None, None]},
}


def written(path: Path, of: dict[str, list[float | None]], **manifest: Any) -> None:
    """An evaluation: a line for each sample, all items before the second sample of the first one."""
    path.parent.mkdir(parents=True)
    group = example_groups()[0]
    lines = []
    for sample in range(max(map(len, of.values()))):
        for key, rewards in of.items():
            line = copy.deepcopy(group)
            (rollout,) = line["rollouts"] = line["rollouts"][:1]
            key_of_sample = f"{key}-1+{sample}" if sample else f"{key}-1"
            line |= {"item_key": key_of_sample, "item": f"the question {key}", "evaluation": True}
            line["timestamp"] = "2026-01-01T00:00:00+00:00" if path.parent.name == "old" else line["timestamp"]
            reward = rewards[sample]
            failed = reward is not None and reward < 1
            rollout |= {
                "reward": reward,
                "outcome": "completed",
                "unscored_kind": "" if reward is not None else "sandbox",
            }
            rollout |= {"metrics": {"reward/right": reward or 0.0, "reward/short": 1.0}, "tool_calls": 2}
            rollout["tool_stats"] = {"look": {"count": 2, "success": 2 - failed, "failure": int(failed)}}
            rollout["tool_errors"] = [{"tool": "look", "error": "no shelf 7"}] * failed
            lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines))
    path.with_suffix(".run.json").write_text(json.dumps({"settings": {}, **manifest}))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    for run, items in REWARDS.items():
        written(tmp_path / f"runs/{run}/samples.jsonl", items, items=["a", "b", "c", "d", "e"], settings={"of": run})
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    index.refresh()
    yield index
    index.close()


def test_what_rounds_to_0_has_no_sign_and_other_negative_numbers_have_a_true_minus() -> None:
    assert [decimals(value) for value in (-0.001, 0.0, -1.0, 0.5)] == ["0.00", "0.00", "−1.00", "0.50"]
    assert [decimals(value, 3, "+") for value in (-0.0001, -0.5, 0.5)] == ["0.000", "−0.500", "+0.500"]


def test_a_reward_that_is_not_whole_never_reads_as_if_it_were() -> None:
    rewards = (0, 1.0, 0.5, 0.996, 1.004, 0.004, -0.999, 9.99, 12.3, 150.0)
    assert [brief(each) for each in rewards] == ["0", "1", "0.5", "<1", ">1", "0.004", ">-1", "<10", "12.3", "150"]


def test_what_weighs_nothing_is_no_reason_and_no_call_of_an_offered_tool_is_one(tmp_path: Path) -> None:
    path = tmp_path / "runs/run/samples.jsonl"
    written(path, {"a": [0.0], "b": [0.5]})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["tools"] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        line["rollouts"][0] |= {"tool_calls": 0, "tool_stats": {}, "tool_errors": []}
        line["rollouts"][0] |= {"metrics": {"reward/right": 0.0, "reward/read": 0.0}, "reward_weights": {"read": 0.0}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    index.refresh()
    assert [row["why"] for row in matrix(index, "run")["rows"]] == [[("called no tool", 1), ("right scored 0", 1)]] * 2
    index.close()


def test_calls_count_also_where_an_error_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "runs/run/samples.jsonl"
    written(path, {"a": [0.0], "b": [0.5], "c": [0.5]})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[0]["rollouts"][0]["tool_errors"][0]["error"]
    lines[1]["rollouts"][0]["tool_errors"][0]["error"] = None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    index.refresh()
    (run,) = index.runs()
    assert index.tool_failures("run") == [("look", 3, 6, [("", 2), ("no shelf 7", 1)])]
    assert (run["errors"], run["calls"]) == (3, 6)
    index.close()


def keys(found: dict[str, Any]) -> list[str]:
    return [row["item"].removesuffix("-1") for row in found["rows"]]


def test_what_changed_most_comes_first_beside_the_other_run(index: Index) -> None:
    found = matrix(index, "new", "old", "changed")
    assert keys(found) == ["b", "a", "c", "none"]
    assert [row["change"] for row in found["rows"]] == [-1.0, 0.75, 0.0, None]
    first = found["rows"][0]
    assert [cell[0] for cell in first["samples"]] == [0.0, None] and [cell[0] for cell in first["others"]] == [1.0, 1.0]
    assert first["title"].endswith("the question b") and len(first["numbers"]) == 2, "two samples are two groups"
    assert keys(matrix(index, "new", "old", "rose"))[0] == "a" and keys(matrix(index, "new", "old", "fell"))[0] == "b"
    assert keys(matrix(index, "new", order="worst")) == ["none", "b", "c", "a"]
    assert keys(matrix(index, "new", order="mixed"))[0] == "a" and keys(matrix(index, "new", order="first"))[0] == "a"
    assert comparable(index, "new", ["old", "new", "other"]) == ["old"]
    change = difference(index, "new", "old")
    assert change is not None and (change.items, change.better, change.worse) == (3, 1, 1)
    assert change.mean == pytest.approx(-0.25 / 3) and difference(index, "new", "other") is None


def test_a_difference_is_that_of_the_command_and_any_common_item_is_compared(tmp_path: Path) -> None:
    """Also where the scores of an item are further out than their mean, and common items are not the first ones."""
    first = {f"only-{number}": [1.0, 1.0] for number in range(30)}
    common = {"a": [1.0, -1.0], "b": [1.0, 1.0], "c": [0.0, 1.0]}, {"a": [1.0, 1.0], "b": [1.0, -1.0], "c": [1.0, 1.0]}
    written(tmp_path / "runs/old/samples.jsonl", {**common[0]})
    written(tmp_path / "runs/new/samples.jsonl", {**first, **common[1]})
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    index.refresh()
    assert comparable(index, "new", ["old"]) == ["old"] and comparable(index, "old", ["new"]) == ["new"]
    expected = paired(list(common[0].values()), list(common[1].values()))
    assert difference(index, "new", "old") == expected and expected.low < -0.5
    index.close()


def test_why_samples_fail_is_said_in_words(index: Index) -> None:
    why = {row["title"][-1]: dict(row["why"]) for row in matrix(index, "new")["rows"]}
    assert why["b"] == {"right scored 0": 1, "look failed: no shelf 7": 1, "no score: sandbox": 1}
    assert why["a"] == {"look failed: no shelf 7": 1}, "what passes has no reason, and half of a part is not 0"
    found = passes(index, "new")
    assert found is not None and (found[0], found[1].mean, found[1].items) == (2, 0.5, 2), "b has one score only"
    assert index.tool_failures("new") == [("look", 4, 16, [("no shelf 7", 4)])]


def test_a_page_has_its_items_only(tmp_path: Path) -> None:
    written(tmp_path / "runs/many/samples.jsonl", {f"i{at:03}": [at / 120] for at in range(120)})
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    index.refresh()
    pages = [matrix(index, "many", page=page) for page in (1, 2, 3, 4)]
    assert [len(page["rows"]) for page in pages] == [ITEMS, ITEMS, 20, 0] and pages[0]["pages"] == 3
    assert [key for page in pages for key in keys(page)] == [f"i{at:03}" for at in range(120)]
    index.close()


async def test_the_page_shows_both_runs_and_whether_the_run_goes_on(index: Index, tmp_path: Path) -> None:
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:

            async def text(path: str) -> str:
                async with session.get(f"{url}{path}") as answer:
                    assert answer.status == 200
                    return await answer.text()

            for place, number in (("new/0/0", 0), ("new/4/0", 1)):
                page = await text(f"rollout/{place}")
                assert f"<title>Item 0, rollout {number} · new · Lachesis</title>" in page
                assert re.search(">item 0</a>.*>rollout <a.*>0</a><a.*>1</a>", page, re.DOTALL), "beside the other one"
                assert f'<a href="/rollout/{place}" aria-current="page">{number}</a>' in page
                async with session.get(f"{url}send/{place}") as answer:
                    assert f"<title>Item 0, rollout {number} · " in await answer.text()
            assert "<title>Item 0, rollout 1 · new · " in await text("group/new/4")
            alone, beside = await text("run/new"), await text("run/new?against=old&order=fell")
            assert (
                "stopped at 4 of 5 items" in alone and "<th>Change</th>" not in alone and "pass@2 of 2 items" in alone
            )
            assert 'class="cell r10" href="/rollout/new/0/0?run=new"' in alone and "1 × no score: sandbox" in alone
            assert '<span class="quiet">item 0</span>' in alone, "as on all other pages"
            assert re.search('class="own">the question [abc]</span>', alone), "what follows the question in a title"
            assert 'id="curves"' not in alone + beside, "the order of an evaluation says nothing"
            for label in ("new", "old", "change"):  # on a phone a row is a card, without the head of the table
                assert f'data-label="{label}"' in beside, label
            listed = await text("")
            assert 'Outcome: <span><i class="done"></i> completed</span>' in listed
            assert '<td class="text opt3" data-label="outcome">' in listed
            assert '<td class="opt3" data-label="failed calls">' in listed
            assert "<th>Change</th>" in beside and 'href="/rollout/old/' in beside and "\N{MINUS SIGN}1.00" in beside
            assert "3 items: 1 better, 1 worse" in beside
            for names in ("old,new", "new,old"):
                compared = await text(f"?runs={names}")
                assert '<p class="verdict">new minus old: <b' in compared, "of two, the later one is looked at"
                (values,) = set(re.findall('<td class="text">of</td>(.*?)</tr>', compared))
                assert values.index("old") < values.index("new"), "in the order of the columns"
                assert re.search("Setting</th>.*>old</th>.*>new</th>", compared)
                assert '<th class="text">old</th><th class="text">new</th><th>Change</th>' in compared
            assert re.findall("new · (item [^<]*)<", await text("rollouts?run=new&sort=time")) == [
                *(f"item {item}, rollout {sample}" for sample in (0, 1) for item in (0, 1, 2)),
            ], "in the order in which they were played, without the one that the manifest does not name"
            assert ">item 1, rollout 1</a>" in await text("group/new/5")
            lock = tmp_path / "runs/new/samples.lock"
            with lock.open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                goes_on = await text("run/new")
                assert "4 of 5 items</span>" in goes_on and "stopped" not in goes_on
            await asyncio.sleep(0)
            assert "stopped at 4 of 5 items" in await text("run/new")
    finally:
        await runner.cleanup()


def test_an_item_has_one_name_in_the_viewer_in_a_report_and_in_a_comparison(index: Index, tmp_path: Path) -> None:
    file = tmp_path / "runs/old/samples.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(reversed(lines)))  # the last one was played first
    index.refresh()
    rows = index.rollouts(Filter(runs=("old",))).rows
    names = {"a-1": "item 0", "b-1": "item 1", "c-1": "item 2"}
    assert names.items() <= {whole_and_part(row["key"])[0]: row["name"].partition(",")[0] for row in rows}.items()
    page = tmp_path / "runs/old/samples.html"
    write_report(page, title="old", groups=read_lines(file))
    shown = {key: name for key, _, _, _, name in of_page(page.read_text())["items"]}
    assert names.items() <= shown.items() and [*shown][:3] == [*names], "in the order of the items"
    write_comparison(tmp_path / "compared.html", compare(tmp_path / "runs/old", tmp_path / "runs/new"))
    compared = of_page((tmp_path / "compared.html").read_text())["items"]
    assert names.items() <= {key: name for key, *_, name in compared}.items()


def test_an_empty_list_among_settings_is_not_null() -> None:
    """Of toolsets, null is all of them, and an empty list none."""
    said = settings_in_words({"toolsets": [], "image": None, "servers": [{"url": "u", "key": None}], "n": [1, 2]})
    assert said == {"toolsets": "none", "servers.0.url": "u", "n": "1, 2"}
