"""Two rollouts side by side, of one run or of two, and what leads there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from lachesis_messages.records.groups import stored_messages
from lachesis_testing.export_suite import example_groups
from lachesis_view import app as viewer
from lachesis_view.group_page import diff_context, group_context, partings
from lachesis_view.index import Index
from lachesis_view.single_page import group_of_one, group_page
from tests.support.viewed_runs import played_shelves


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run; the same item in another one, under another prompt and setting; and a third with another item."""
    root = tmp_path_factory.mktemp("runs")
    (root / "a run").mkdir()
    group = asyncio.run(played_shelves(root / "a run"))
    settings = json.loads((root / "a run" / "groups.run.json").read_text())
    later = json.loads(json.dumps(group))
    for messages in later["messages"]:
        messages[0]["content"] += " Be brief."
    settings["settings"]["temperature"] = 0.125
    for name, each in (("later", later), ("other", {**group, "item_key": "else-1"})):
        (root / name).mkdir()
        (root / name / "groups.jsonl").write_text(json.dumps(each) + "\n")
    (root / "later" / "groups.run.json").write_text(json.dumps(settings))
    (root / "measured").mkdir()
    samples = ({**group_of_one(group, n), "item_key": f"a-1{f'+{n}' * bool(n)}"} for n in range(2))
    (root / "measured" / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))
    (root / "measured" / "samples.run.json").write_text(json.dumps({**settings, "items": ["a"]}))
    return root


@pytest.fixture
async def pages(root: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """Asks for a page: its status and its text."""
    index = Index(root, tmp_path / "index.sqlite")
    await asyncio.to_thread(index.refresh)
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:

        async def page(path: str, **query: str) -> tuple[int, str]:
            async with session.get(f"{url}{path}", params=query) as answer:
                return answer.status, await answer.text()

        page.url = url  # type: ignore[attr-defined]
        yield page
    await runner.cleanup()
    index.close()


async def test_the_same_item_of_two_runs_is_compared_and_the_settings_that_differ_are_named(pages: Any) -> None:
    status, html = await pages("diff", a="a run/0/0", b="later/0/0")
    assert status == 200 and "<h1>a run, group 0, rollout 0 and later, group 0, rollout 0</h1>" in html
    assert "Both are of the same item." in html and "their prompts differ" in html
    assert "<code>0.125</code>" in html and "1 setting of the runs differs" in html
    assert "/rollout/a%20run/0/0" in html and "/rollout/later/0/0" in html and 'id="parted"' not in html
    status, html = await pages("diff", a="a run/0/0", b="a run/0/1")
    assert status == 200 and "they differ from turn 1 on" in html and "Rollouts diverge at token" in html
    assert "<h1>Rollout 0 and rollout 1 of a run, group 0</h1>" in html
    status, html = await pages("diff", a="measured/0/0", b="measured/1/0")
    assert status == 200 and "<h1>Rollout 0 and rollout 1 of measured, item 0</h1>" in html
    status, html = await pages("diff", a="a run/0/0", b="other/0/1")
    assert "Rollouts diverge at token" not in html, "ids of another tokenizer say nothing"


async def test_rollouts_with_the_same_tokens_do_not_diverge(root: Path) -> None:
    group = json.loads((root / "a run" / "groups.jsonl").read_text().splitlines()[0])
    first, second = (rollout["rollout_id"] for rollout in group["rollouts"][:2])
    own = [sample for sample in group["samples"] if sample["rollout_id"] == first]
    sampled = sum(span["end"] - span["start"] for span in own[-1]["spans"])
    group["samples"] = own + [{**sample, "rollout_id": second} for sample in own]
    assert group_context(group)["tokens"] == {"same": sampled, "of": 2}
    html = group_page(group)
    assert f"Both rollouts sampled the same {sampled} tokens." in html and "diverge at token" not in html


async def test_the_lines_of_the_drawing_end_in_letters_which_are_named_beside_it(pages: Any) -> None:
    _, html = await pages("diff", a="a run/0/0", b="a run/0/1")
    drawing = re.search(r'<svg viewBox="0 0 (\d+) \d+" role="group"(.*?)</svg>', html, re.DOTALL)
    assert drawing is not None
    labels = re.findall(r'<text x="([\d.]+)" y="[\d.]+">(.*?)</text>', drawing[2])
    assert [text[:4] for _, text in labels] == ["A · ", "B · "] and "A: rollout 0, B: rollout 1</p>" in html
    assert all(float(x) + 10 * len(text) <= int(drawing[1]) for x, text in labels), "also in the letters of a phone"


async def test_an_address_of_a_page_is_a_place(pages: Any) -> None:
    _, plain = await pages("diff", a="a run/0/0", b="later/0/1")
    for address in (f"{pages.url}rollout/later/0/1?q=x#turn-1", "/rollout/later/0/1#reward", " later/0/1 "):
        assert await pages("diff", a="a run/0/0", b=address) == (200, plain)
    assert (await pages("diff", a=f"{pages.url}rollout/{quote('a run')}/0/0", b="later/0/1"))[1] == plain
    for wrong in ("", "later", "later/x/1", "https://[/0/1", f"{pages.url}group/later/0"):
        status, html = await pages("diff", a="a run/0/0", b=wrong)
        assert status == 400 and "A rollout is RUN/GROUP/N" in html
    for missing in ("later/0/9", "later/7/0", "nothing/0/0"):
        assert (await pages("diff", a="a run/0/0", b=missing))[0] == 404


async def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    names = ("rollout/x", "sweep/3", "a,b", "plain")
    for name in names:
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "groups.jsonl").write_text(json.dumps(example_groups()[0]) + "\n")
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    await asyncio.to_thread(index.refresh)
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:

            async def page(path: str) -> str:
                async with session.get(url + path.lstrip("/")) as answer:
                    assert answer.status == 200, path
                    return await answer.text()

            for name in map(quote, names):
                for link in re.findall(r'href="(/send[^"]*)"', await page(f"group/{name}/0")):
                    assert "by side" not in (saved := await page(link)) and "Each rollout" in saved
                await page(f"diff?a={name}/0/0&b={name}/0/1")
            pair = await page("?runs=a,b&runs=plain")
            (order,) = re.findall(r'href="(/\?[^"]*order=worst[^"]*)#items"', pair)
            assert "plain minus a,b" in pair and await page(order.replace("&amp;", "&"))
    finally:
        await runner.cleanup()
        index.close()


async def test_a_rollout_leads_to_its_siblings_and_to_the_same_item_in_other_runs(pages: Any) -> None:
    status, html = await pages("rollout/a%20run/0/0")
    assert status == 200 and ">Diff with rollout 1</a>" in html
    assert "/diff?a=a%20run/0/0&amp;b=a%20run/0/1#parted" in html and "diverges at turn 1" in html
    assert "/diff?a=a%20run/0/0&amp;b=later/0/0#parted" in html and "b=other" not in html


def test_siblings_part_where_they_say_something_else(root: Path) -> None:
    group = json.loads((root / "a run" / "groups.jsonl").read_text())
    found = partings(group, 0)
    assert [(each["n"], each["turn"]) for each in found] == [(1, 1)]
    theirs = stored_messages(group, group["rollouts"][1])
    second = [message for message in theirs if message["role"] == "assistant"][1]
    assert found[0]["said"].startswith(second["content"].split("\n")[0][:20])
    for place, message in enumerate(theirs):  # what a tool answers is of the turn that called it, as beside each other
        messages = [[*theirs[:place], {**message, "content": "other"}, *theirs[place + 1 :]], theirs, theirs[:place]]
        rollouts = [{**group["rollouts"][1], "place": at} for at in range(3)]
        other = {**group, "messages": messages, "rollouts": rollouts}
        beside = [diff_context((other, 0), (other, n))["parted"] for n in (1, 2)]
        turns = {each["n"]: each["turn"] for each in partings(other, 0)}
        assert [turns[1], turns[2]] == [at or 0 for at in beside], place
    same = {**group, "rollouts": [group["rollouts"][0]] * 2}
    assert [(each["turn"], each["said"]) for each in partings(same, 0)] == [(None, "")]
    same["rollouts"][1] = {**same["rollouts"][1], "completion_tokens": 1_000_000}
    assert [(each["turn"], each["said"]) for each in partings(same, 0)] == [(3, "an answer that was not kept")]
    assert partings({**group, "rollouts": group["rollouts"][:1]}, 0) == []


def test_trainers_keep_no_items_so_that_none_is_the_same_or_another() -> None:
    group, other = ({"rollouts": example_groups()[0]["rollouts"], **of} for of in (example_groups()[0],) * 2)
    del group["item"], other["item"]
    assert diff_context((group, 0), (other, 0))["same_item"] is None
    assert diff_context((group, 0), (group, 1))["same_item"] is True


def test_rollouts_of_two_runs_have_the_colours_of_their_rewards_and_no_advantage() -> None:
    better, worse = (
        {**group, "rollouts": [{**group["rollouts"][0], "reward": reward}]}
        for group, reward in zip(example_groups()[:1] * 2, (0.75, 0.5), strict=True)
    )
    columns = diff_context((worse, 0), (better, 0))["columns"]
    assert [(each["sign"], each["advantage"]) for each in columns] == [("bad", None), ("good", None)]
    columns = diff_context((worse, 0), ({**worse}, 0))["columns"]
    assert [each["sign"] for each in columns] == ["", ""]


def test_every_pair_of_rollouts_has_a_page_and_itself_is_the_same() -> None:
    sides = [(group, n) for group in example_groups() for n in range(len(group["rollouts"]))]
    for a in sides:
        for b in sides:
            context = diff_context(a, b, same_vocabulary=True)
            assert len(context["columns"]) == 2 and (context["parted"] is None) == (
                [message for message in stored_messages(a[0], a[0]["rollouts"][a[1]]) if message["role"] != "system"][
                    1:
                ]
                == [
                    message for message in stored_messages(b[0], b[0]["rollouts"][b[1]]) if message["role"] != "system"
                ][1:]
            )
