"""Notes and tags: who may write them and where they are, that they find their rollouts again, and the lists of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis_testing.export_suite import example_groups
from lachesis_view import app as viewer
from lachesis_view.filters import Filter
from lachesis_view.index import Index
from lachesis_view.notes import LONGEST, NAME
from tests.support.chromium import needs_chromium, open_page
from tests.support.viewed_runs import mixed_run

SAID = {"tags": ["starred", "odd-end"], "note": "  it gives up\ntoo early  "}


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[Index]:
    (tmp_path / "runs").mkdir()
    await asyncio.to_thread(mixed_run, tmp_path / "runs")
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    await asyncio.to_thread(index.refresh)
    yield index
    index.close()


def notes(index: Index) -> list[dict[str, Any]]:
    path = index.root / "mixed" / NAME
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tagged(index: Index, tag: str) -> list[tuple[int, int]]:
    return [(row["number"], row["n"]) for row in index.rollouts(Filter.of({"q": f"tag:{tag}"})).rows]


async def test_a_note_is_a_line_beside_the_run_and_the_last_one_counts(index: Index, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in index.root.rglob("*") if path.is_file()}
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            for place, said in (("1/0", SAID), ("-1/1", {"tags": ["odd-end"], "note": ""}), ("2/1", SAID)):
                async with session.post(f"{url}notes/mixed/{place}", json=said) as answer:
                    assert answer.status == 200
            assert sorted(tagged(index, "odd-end")) == [(-1, 1), (1, 0), (2, 1)] and len(tagged(index, "starred")) == 2
            async with session.post(f"{url}notes/mixed/2/1", json={"tags": [], "note": ""}) as answer:
                assert await answer.json() == {"tags": [], "note": ""}
            assert tagged(index, "starred") == [(1, 0)] and len(notes(index)) == 4, "what was said before stays"
            async with session.get(f"{url}rollout/mixed/1/0") as answer:
                text = await answer.text()
                assert "it gives up\ntoo early</textarea>" in text and 'value="odd-end"' in text
            async with session.get(f"{url}rollouts?tag=starred") as answer:
                text = await answer.text()
                assert '<b id="total">1</b>' in text and '<span class="tag warn">starred</span>' in text
    finally:
        await runner.cleanup()
    assert before == {path: path.read_bytes() for path in before}, "nothing else is written"
    assert notes(index)[0]["file"] == "groups.jsonl" and notes(index)[0]["rollout_id"]
    # Another viewer, and one after the groups have other places in their file.
    lines = (index.root / "mixed/groups.jsonl").read_text().splitlines(keepends=True)
    (index.root / "mixed/groups.jsonl").write_text("".join(reversed(lines)))
    other = Index(index.root, tmp_path / "other.sqlite")
    other.refresh()
    place = len(lines) - 2
    assert (
        tagged(other, "starred") == [(place, 0)] and other.note("mixed", place, 0)["note"] == "it gives up\ntoo early"
    )
    (index.root / "mixed" / NAME).unlink()
    assert other.refresh() and not tagged(other, "starred")
    other.close()


@pytest.mark.parametrize(
    ("said", "headers", "status"),
    [
        ({"tags": ["two words"], "note": ""}, {}, 400),
        ({"tags": "starred", "note": ""}, {}, 400),
        ({"tags": [], "note": "x" * (LONGEST + 1)}, {}, 400),
        ([], {}, 400),
        ("[" * 100_000, {}, 400),
        (SAID, {"Content-Type": "application/json; charset=no"}, 400),
        (SAID, {"Origin": "https://evil.example"}, 403),
        (SAID, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 403),
        (SAID, {"Host": "evil.example"}, 403),
        (SAID, {"Content-Type": "text/plain"}, 415),
    ],
)
async def test_what_is_no_note_or_from_another_site_writes_nothing(
    index: Index, said: Any, headers: dict[str, str], status: int
) -> None:
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        headers = {"Content-Type": "application/json", **headers}
        body = said if isinstance(said, str) else json.dumps(said)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}notes/mixed/1/0", data=body, headers=headers) as answer,
        ):
            assert answer.status == status
    finally:
        await runner.cleanup()
    assert not notes(index)


async def test_a_note_stays_with_its_rollout_where_the_file_is_written_over(index: Index) -> None:
    path = index.root / "mixed/groups.jsonl"
    groups = [json.loads(line) for line in path.read_text().splitlines()]

    def rewritten() -> None:
        path.write_text("".join(json.dumps(group) + "\n" for group in groups))
        index.refresh()

    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            for number, note in ((0, "first"), (3, "second")):
                async with session.post(f"{url}notes/mixed/{number}/1", json={**SAID, "note": note}) as answer:
                    assert answer.status == 200
                # The same lines and as many bytes, in another order: what is said next is said of the other number.
                groups.reverse()
                await asyncio.to_thread(rewritten)
        rows = index.ask("SELECT number, n, tag, note FROM notes WHERE tag != 'odd-end'")
        assert sorted(map(tuple, rows)) == [(0, 1, "", "second"), (0, 1, "starred", "")], "once, and what was said last"
        groups[0]["rollouts"].reverse()
        await asyncio.to_thread(rewritten)
        assert tagged(index, "starred") == [(0, 0)]
        for rollout in groups[0]["rollouts"]:
            rollout["rollout_id"] = f"again {rollout['rollout_id']}"
        await asyncio.to_thread(rewritten)
        assert not tagged(index, "starred"), "the item was played again: it is another rollout"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("name", ["rollouts", "runs"])
async def test_notes_are_in_the_folder_of_the_run_whatever_its_name_is(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    for folder in (root, root / "rollouts"):
        folder.mkdir()
        (folder / "groups.jsonl").write_text(json.dumps(example_groups()[0]) + "\n")
    index = Index(root, tmp_path / "index.sqlite")
    index.refresh()
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            for run in index.runs():
                async with session.post(f"{url}notes/{run['name']}/0/0", json=SAID) as answer:
                    assert answer.status == 200
                assert index.note(run["name"], 0, 0)["tags"] == SAID["tags"]
    finally:
        await runner.cleanup()
        index.close()
    assert sorted(tmp_path.rglob(NAME)) == [root / NAME, root / "rollouts" / NAME]


def test_no_line_of_the_notes_that_people_edit_stops_the_viewer(index: Index) -> None:
    line = {"file": "groups.jsonl", "item_key": index.group("mixed", 1)["item_key"], "number": 1, "rollout": 0}
    odd: list[Any] = [{**line, "number": number, "tags": ["odd"], "note": ""} for number in (1e30, 1 << 70, None, "1")]
    good = {**line, "tags": ["by-hand"], "note": ""}
    (index.root / "mixed" / NAME).write_text("".join(json.dumps(each) + "\n" for each in ([[]], *odd, good, 7)))
    index.refresh()
    assert tagged(index, "by-hand") == [(1, 0)] and not tagged(index, "odd")


async def test_who_has_the_token_may_read_and_writes_only_where_that_is_allowed(index: Index) -> None:
    for allowed in (False, True):
        runner, url = await viewer.serve(index, "0.0.0.0", 0, notes=allowed)
        address, _, token = url.replace("[0.0.0.0]", "127.0.0.1").replace("0.0.0.0", "127.0.0.1").partition("?")
        try:
            jar = aiohttp.CookieJar(unsafe=True)
            async with aiohttp.ClientSession(cookie_jar=jar) as session:
                async with session.post(f"{address}notes/mixed/1/0", json=SAID) as answer:
                    assert answer.status == 403
                async with session.get(f"{address}rollout/mixed/1/0?{token}") as answer:
                    assert (" disabled>" in (await answer.text())) != allowed
                async with session.post(f"{address}notes/mixed/1/0", json=SAID) as answer:
                    assert answer.status == (200 if allowed else 403)
        finally:
            await runner.cleanup()
    assert len(notes(index)) == 1


@needs_chromium
async def test_a_star_and_a_tag_are_given_on_the_page_of_a_rollout(index: Index) -> None:
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with open_page() as page:
            await page.open(f"{url}rollout/mixed/1/0")
            await page.eval("document.querySelector('.star').click()")
            await page.until("document.querySelector('#note output').textContent === 'saved'")
            await page.eval(
                "(() => { const field = document.forms.note.elements.tags; field.value = 'slow, loops'; "
                "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
            )
            async with asyncio.timeout(60):  # it is sent although the page is left at once, and may come later
                found = ""
                while found != "1":
                    await page.open(f"{url}rollouts?tag=loops")
                    found = await page.eval("document.querySelector('#total').textContent")
            assert (await page.eval("document.querySelector('#list .quiet').textContent")).split()[:3] == [
                "slow",
                "loops",
                "starred",
            ]
            await page.eval("document.querySelector('#list td.title a').click()")
            # The button is there before the script that listens to its form.
            await page.until(
                "document.readyState === 'complete' && document.querySelector('.star')?.ariaPressed === 'true'"
            )
            await page.eval(
                "(() => { const field = document.forms.note.elements.tags; field.value = '<b>'; "
                "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
            )
            await page.until("document.querySelector('#note output').textContent.includes('is no tag')")
    finally:
        await runner.cleanup()
