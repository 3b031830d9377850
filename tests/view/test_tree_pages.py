"""Groups of trees on the pages and in the report: values, advantages, links, and whose turns a rollout begins with."""

from __future__ import annotations

import asyncio
import copy
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis_view.app import Viewer, serve
from lachesis_view.filters import Filter
from lachesis_view.group_page import group_context
from lachesis_view.index import Index
from lachesis_view.reports.run import render_report
from lachesis_view.rollout_page import advantages, rollout_context, sample_tokens
from lachesis_view.trees import tree_drawing, tree_parts
from tests.support.chromium import needs_chromium, open_page
from tests.support.viewed_runs import TREE_REWARDS, played_trees


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@pytest.fixture(scope="module")
def group(folder: Path) -> dict[str, Any]:
    return asyncio.run(played_trees(folder))


def pages(folder: Path, run: str, *paths: str) -> list[str]:
    """The pages of the viewer over a folder."""
    index = Index(folder, folder.parent / f"{folder.name}.sqlite")
    try:
        index.refresh()
        assert not index.unread
        viewer, frame = Viewer(index), {"run": run, "number": 0, "name": "group 0", "filter": Filter()}
        found = []
        for path in paths:
            if path == "group":
                html = viewer.templates.page("group.html.jinja", **group_context(index.group(run, 0)), frame=frame)
            else:
                context = rollout_context(index.group(run, 0), int(path))
                html = viewer.templates.page("rollout.html.jinja", **context, frame=frame | {"n": int(path)})
            found.append(html)
        return found
    finally:
        index.close()


def named(group: dict[str, Any], path: str) -> int:
    """The number of the rollout at the end of a path."""
    return [rollout["tree"]["path"] for rollout in group["rollouts"]].index(path)


def texts(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_a_part_has_the_mean_of_what_follows_and_leads_to_its_first_turn(group: dict[str, Any]) -> None:
    parts = tree_parts(group)
    values = {name: part.value for name, part in parts.items()}
    assert values == {"0": 0.5, "0.0": 1, "0.1": 0, "1": 0.75, "1.0": 1, "1.1": 0.5, **TREE_REWARDS}
    found = {name: part.advantage for name, part in parts.items() if part.advantage}
    # Of 1.0.0 the only sibling has no score: it is compared as the part before it is.
    expected = {"0": -1, "1": 1, "0.0": 2, "0.1": -2, "1.0": 1, "1.1": -1, "1.0.0": 0.5, "1.1.0": -1, "1.1.1": 1}
    assert found == expected
    assert (parts["0"].baseline, parts["1.0.0"].baseline, parts["1.0.1"].baseline) == (0.75, 0.5, None)
    assert sum(part.tokens or 0 for part in parts.values()) == sum(
        rollout["completion_tokens"] for rollout in group["rollouts"]
    ), "each sampled token is in one part, those of the discarded attempt too"
    for name, part in parts.items():
        messages = rollout_context(group, part.rollout)["shown"]["branches"][0]["messages"]
        answers = [message for message in messages if message["role"] == "assistant"]
        assert answers[part.begin]["anchor"] == part.anchor != "", name


def test_the_drawing_marks_where_the_mean_falls_most(folder: Path, group: dict[str, Any]) -> None:
    drawing = tree_drawing(group)
    assert drawing is not None
    lines = {
        group["rollouts"][line["part"].rollout]["tree"]["path"]: line for line in drawing["lines"] if not line["stem"]
    }
    order = sorted(TREE_REWARDS)
    assert sorted(lines, key=lambda path: lines[path]["y"]) == order
    assert [lines[path]["part"].sign for path in ("1.0.1", "1.1.0", "1.1.1", "0.0.0")] == ["off", "bad", "good", ""]
    (html,) = pages(folder, folder.name, "group")
    first, second = named(group, "0.1.0"), named(group, "1.1.0")
    falls = f"0.50 → 0.00 in turn 1 of rollout {first} ; 0.50 → 0.00 in turns 2 to 3 of rollout {second} ."
    assert f"The mean falls here: {falls}" in texts(html)
    anchors = {each.rollout: each.anchor for each in tree_parts(group).values() if each.value == 0 and each.begin}
    assert f"/{first}#turn-" in html and f'/{second}#{anchors[second]}"' in html
    assert html.count("<circle") == 2 and "Rollouts diverge at token" not in html
    two = group_context(group, only=[first, second])
    assert two["tree"] is not None and two["tokens"] is not None, "where two of them part is of their tokens"


def test_what_was_left_out_is_said_with_the_turns_of_the_page(group: dict[str, Any]) -> None:
    other = copy.deepcopy(group)
    assert tree_drawing(other)["left_out"] == []  # type: ignore[index]
    other["rollouts"][3]["tree"] |= {"not_forked": [[3, "a <process> runs"]]}
    assert tree_drawing(other)["left_out"] == [(3, "turn 3: a <process> runs")]  # type: ignore[index]


def test_tokens_have_the_advantage_of_their_part(group: dict[str, Any]) -> None:
    parts = tree_parts(group)
    for path in ("0.0.0", "0.1.1", "1.1.0"):
        n = named(group, path)
        own = {completion: part for part in parts.values() if part.rollout == n for completion in part.completions}
        (sample, *_) = (each for each in group["samples"] if each["rollout_id"] == group["rollouts"][n]["rollout_id"])
        shown = sample_tokens(group, n, sample["index"], None)
        sampled = [each for each in shown["segments"] if each["kind"] == "sampled"]
        assert [each["advantage"] for each in sampled] == [own[each["turn"]].advantage for each in sampled]
        assert shown["largest_advantage"] == 2
    assert [advantages(group)[named(group, path)] for path in ("0.0.0", "1.0.1", "1.1.0")] == [0, None, -1]


async def test_the_settings_of_a_run_say_how_its_trees_are_credited(tmp_path: Path) -> None:
    n = named(await played_trees(tmp_path, tree_credit="leaves"), "0.1.1")
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await serve(index, "127.0.0.1", 0)
    try:
        await asyncio.to_thread(index.refresh)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}rollout/{tmp_path.name}/0/{n}") as answer:
                html = texts(await answer.text())
            async with session.get(f"{url}tokens/{tmp_path.name}/0/{n}/0") as answer:
                tokens = await answer.json()
    finally:
        await runner.cleanup()
        index.close()
    # Four of seven scored rollouts succeeded, and two of the four of this tree.
    assert "turns 2 to 3 0.00 −0.57 0.57 1 1" in html and "0.50 −0.29 0.57 4 4" in html
    assert [each["advantage"] for each in tokens["segments"] if each["kind"] == "sampled"] == [
        pytest.approx(-4 / 7)
    ] * 2


def test_a_branch_says_whose_turns_it_begins_with(folder: Path, group: dict[str, Any]) -> None:
    n, root, fork = named(group, "0.1.1"), named(group, "0.0.0"), named(group, "0.1.0")
    own, first = pages(folder, folder.name, str(n), str(root))
    turns = f"turn 0 of rollout {root} , turn 1 of rollout {fork} ."
    assert f"It begins with turns of other rollouts, which train them: {turns}" in texts(own)
    assert "turns 2 to 3 0.00 0.00 0.00 1 1 " in texts(own)
    assert "It begins with" not in first and "context only" not in first
    assert own.count("context only") == 2
    assert re.findall(r'href="#turn-\d+">(turn \d+)<', own) == ["turn 2", "turn 3"]


def test_the_report_and_the_list_have_groups_of_trees(folder: Path, group: dict[str, Any]) -> None:
    html, summary = render_report("trees", [group])
    assert (summary.branched, summary.inherited_tokens > 0) == (6, True)
    assert f"branched off another one 6 tokens that they shared {summary.inherited_tokens:,} " in texts(html)
    assert "Rollouts of a tree share their first turns" in html
    index = Index(folder, folder.parent / "list.sqlite")
    index.refresh()
    assert index.rollouts(Filter()).total == 8
    index.close()


@pytest.mark.slow
@needs_chromium
async def test_a_part_is_read_by_a_click_and_the_drawing_scrolls_in_its_card(
    folder: Path, group: dict[str, Any]
) -> None:
    index = Index(folder, folder.parent / "browsed.sqlite")
    runner, url = await serve(index, "127.0.0.1", 0)
    try:
        await asyncio.to_thread(index.refresh)
        async with open_page(width=300) as page:
            await page.open(f"{url}group/{folder.name}/0")
            root = "document.documentElement"
            assert not await page.eval(f"{root}.scrollWidth > {root}.clientWidth")
            assert await page.eval("(box => box.scrollWidth > box.clientWidth)(document.querySelector('.tree .wide'))")
            part = tree_parts(group)["0.1.1"]
            shape = f"document.querySelector('.tree .wide a[href$=\"/{part.rollout}#{part.anchor}\"] rect')"
            await page.eval(f"{shape}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
            await page.until(f"location.hash === '#{part.anchor}' && document.querySelector('.message.current')")
            assert "turn 2" in await page.eval("document.querySelector('.message.current header').innerText")
            assert page.errors == []
    finally:
        await runner.cleanup()
        index.close()
