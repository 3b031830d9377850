"""The pages of a rollout and of a group in a browser: tokens, keys, deep links, small and dark screens."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lachesis_console.chat.recordings import find_rollout
from lachesis_view.app import serve
from lachesis_view.index import Index
from tests.support.chromium import Page, needs_chromium, open_page
from tests.support.viewed_runs import played_shelves

pytestmark = needs_chromium
OVERFLOWS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two siblings, and one whose sample has 32,000 tokens."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "long").mkdir()
    group = asyncio.run(played_shelves(folder))
    (sample, *_) = (each for each in group["samples"] if not each["discarded"])
    times = 32_000 // len(sample["tokens"]) + 1
    spans = [
        {**span, "turn": at, "start": span["start"] + shift, "end": span["end"] + shift}
        for shift in range(0, times * len(sample["tokens"]), len(sample["tokens"]))
        for at, span in enumerate(sample["spans"], shift)
    ]
    lists = {name: sample[name] * times for name in ("tokens", "masks", "logprobs")}
    long = {**group, "run": "long", "samples": [{**sample, **lists, "spans": spans}]}
    (folder / "long" / "groups.jsonl").write_text(json.dumps(long) + "\n")
    (folder / "long" / "groups.run.json").write_bytes((folder / "groups.run.json").read_bytes())
    return folder


@asynccontextmanager
async def browsed(folder: Path, **size: int) -> AsyncIterator[tuple[Page, str, list[int]]]:
    """A page, the viewer's address, and the numbers of the rollouts: the honest one first."""
    index = Index(folder, folder.parent / f"{folder.name}.sqlite")
    runner, url = await serve(index, "127.0.0.1", 0)
    group = json.loads((folder / "groups.jsonl").read_text().splitlines()[0])
    rewards = [rollout["reward"] for rollout in group["rollouts"]]
    try:
        await asyncio.to_thread(index.refresh)
        (run,) = (each["name"] for each in index.runs() if each["name"] != "long")
        async with open_page(**size) as page:
            yield page, f"{url}{{}}/{run}/0", [rewards.index(1.0), rewards.index(0.0)]
            assert page.errors == []
            assert "owned" not in await page.eval("document.title"), "texts of models are never markup"
    finally:
        await runner.cleanup()
        index.close()


async def test_a_rollout_is_read_by_keys_and_its_failed_call_is_one_click_away(folder: Path) -> None:
    async with browsed(folder) as (page, url, (honest, other)):
        await page.open(f"{url.format('rollout')}/{honest}")
        await page.eval("document.querySelector('.facts a.bad').click()")
        await page.until("location.hash === '#turn-1'")
        assert "nowhere" in await page.eval("document.querySelector('.call.failed').textContent")
        await page.press("j")
        assert "no such shelf <i>here</i>" in await page.eval("document.querySelector('.current').textContent")
        await page.press("k")
        assert await page.eval("document.querySelector('.current').id") == "turn-1"
        said = await page.eval("document.querySelector('.call.failed header').innerText")
        assert "there is no such shelf <i>here</i>" in said, "why it failed, without a click"
        assert "honest" in await page.eval("document.querySelector('#reward').innerText")
        await page.press("n" if other > honest else "p")
        await page.until(f"location.pathname.endsWith('/{other}') && document.readyState === 'complete'")
        # The attempt is in a closed part of the page, and its row in the drawing leads to it.
        await page.eval("document.querySelector('.log li.attempt:not(:has(i)) a').click()")
        await page.until("document.querySelector('#turn-1').closest('details').open")


async def test_tokens_show_what_was_sampled_and_say_all_about_each(folder: Path) -> None:
    async with browsed(folder) as (page, url, (_, other)):
        await page.open(f"{url.format('rollout')}/{other}#tokens")
        await page.until("document.querySelectorAll('.sampled .t').length > 0")
        shown = await page.eval("[...document.querySelectorAll('.sampled')].map(each => each.innerText).join('|')")
        look = "getComputedStyle(document.querySelector('.sampled .t')).fontVariantLigatures"
        assert await page.eval(look) == "none", "<| has two signs"
        assert "Let me look first." in shown and "<tool_call>" in shown and "\\u{202e}" in shown
        assert "🙂" in await page.eval("document.querySelector('ruby rt').textContent")
        background = "getComputedStyle(document.querySelector('.sampled .m1')).backgroundColor"
        colours = set()
        for name in ("logprob", "training", "advantage", "version"):
            await page.eval(f"document.querySelector('input[value={name}]').click()")
            colours.add(await page.eval(background))
        assert len(colours) == 4, "each switch shows another fact"
        assert await page.eval("document.querySelector('input[value=choices]').disabled"), "the server reported none"
        first = await page.eval("document.querySelector('.sampled .t').i")
        await page.eval("document.querySelector('.sampled .t').click()")
        assert await page.eval("location.hash") == f"#token-{first}"
        card = await page.eval("document.querySelector('.card-of-token').innerText")
        assert "logprob" in card and f"{first} of" in card and "trained here" in card and "\u22120.50" in card
        await page.press("ArrowRight")
        assert await page.eval("location.hash") == f"#token-{first + 1}"
        await page.eval("document.querySelector('[data-sample=\"1\"]').click()")
        await page.until("document.querySelector('.segment.elsewhere a.tag')")
        assert "discarded attempt" in await page.eval("document.querySelector('.stage').innerText")
        await page.press("t")
        await page.until("!document.querySelector('#conversation').hidden")


async def test_a_button_has_the_command_that_plays_the_rollout_again(folder: Path) -> None:
    async with browsed(folder) as (page, url, (honest, _)):
        await page.open(f"{url.format('rollout')}/{honest}")
        command = await page.eval("document.querySelector('.actions [data-copy]').dataset.copy")
        place = command.removeprefix("lachesis chat --replay ")
        assert find_rollout(shlex.split(place)[0]).reward == 1.0
        at = await page.eval("[...document.querySelectorAll('.step-in')].map(each => each.dataset.copy)")
        assert await page.eval("document.querySelector('.step-in').textContent") == "continue from here"
        assert "Copy replay command" in await page.eval("document.querySelector('.actions').textContent")
        assert "the model answered" not in await page.eval("document.querySelector('.facts').textContent")
        assert at == [f"{command} --at {turns} --as agent" for turns in range(3)], "instead of each turn"
        await page.eval("document.querySelector('.actions [data-copy]').click()")
        # A browser without a window may refuse to copy: then the command is shown.
        await page.until("document.querySelector('.actions').textContent.match(/Copied|lachesis chat/)")


async def test_the_colour_of_tokens_is_in_the_address(folder: Path) -> None:
    async with browsed(folder) as (page, url, (honest, _)):
        await page.open(f"{url.format('rollout')}/{honest}?sort=turns#token-3")
        await page.until("document.querySelector('.t.selected')")
        await page.eval("document.querySelector('input[value=advantage]').click()")
        assert await page.eval("location.search + location.hash") == "?sort=turns&colour=advantage#token-3"
        await page.press("ArrowRight")
        address = await page.eval("location.href")
        assert address.endswith("?sort=turns&colour=advantage#token-4")
        await page.open(address)
        await page.until("document.querySelector('.stage.by-advantage .t.selected')?.i === 4")
        assert await page.eval("document.querySelector('input[value=advantage]').checked")
        here = await page.eval("location.pathname")
        await page.press("n" if await page.eval("document.querySelector('a[rel=next]') !== null") else "p")
        await page.until(f"location.pathname !== {here!r} && document.readyState === 'complete'")
        assert await page.eval("location.search") == "?sort=turns&colour=advantage"
        assert await page.eval("document.querySelector('input[value=advantage]').checked"), "the next one has it, too"
        await page.open(address)
        await page.until("document.querySelector('.t.selected')")
        await page.open(address)
        await page.until("document.querySelector('.t.selected')")
        await page.eval("document.querySelector('input[value=logprob]').click()")
        assert await page.eval("location.search + location.hash") == "?sort=turns#token-4"
        await page.open("about:blank")
        await page.send("Page.navigate", url=address.replace("advantage", "choices"))
        await page.until("document.querySelector('.stage.by-logprob .t.selected')")
        assert await page.eval("location.search + location.hash") == "?sort=turns#token-4", "it has no choices"


async def test_a_link_leads_to_one_of_32_000_tokens_and_all_of_them_are_there(folder: Path) -> None:
    async with browsed(folder) as (page, url, _):
        group = json.loads((folder / "long" / "groups.jsonl").read_text())
        (n,) = (
            at for at, each in enumerate(group["rollouts"]) if each["rollout_id"] == group["samples"][0]["rollout_id"]
        )
        await page.open(f"{url.rpartition('{}')[0]}rollout/long/0/{n}#token-20010")
        total = len(group["samples"][0]["tokens"])
        await page.until(f"document.querySelectorAll('.stage .t').length === {total}")
        ids: list[int] = await page.eval("[...document.querySelectorAll('.stage .t')].map(each => each.i)")
        assert ids == list(range(total)), "each once, in order"
        place = "document.querySelector('.t.selected')?.getBoundingClientRect().top"
        await page.until(f"{place} > 0 && {place} < 900")


async def test_siblings_stand_side_by_side_and_the_first_difference_is_marked(folder: Path) -> None:
    async with browsed(folder) as (page, url, (honest, _)):
        await page.open(url.format("group"))
        rows: list[Any] = await page.eval(
            "[...document.querySelectorAll('.side-by-side tbody tr')].map(row => [row.className, row.cells.length])"
        )
        assert rows == [["alike", 1], ["parted", 1], ["differ", 2], ["differ", 2]]
        letters = await page.eval("[...document.querySelectorAll('.letter')].map(each => each.textContent)")
        assert letters[:3] == ["the same in both", "A", "B"]
        await page.resize(1400)
        await page.eval("{const head = document.querySelector('.side-by-side tr'); head.innerHTML += head.innerHTML}")
        assert await page.eval(
            "(table => table.scrollWidth <= table.clientWidth)(document.querySelector('.side-by-side'))"
        ), "four columns with their borders"
        await page.resize(1280)
        assert await page.eval("document.querySelectorAll('.parting .leaf').length") == 2
        await page.eval(f"document.querySelectorAll('.fork a')[{honest}].click()")
        await page.until("document.querySelector('.t.selected')")
        assert "N" in await page.eval("document.querySelector('.card-of-token b').textContent")


async def test_the_conversation_begins_high_on_the_page_and_on_a_phone_before_the_notes(folder: Path) -> None:
    tops = "['.three', '#reward', '#conversation', '#note', '#elsewhere'].map(each => document.querySelector(each)"
    tops += ".getBoundingClientRect().top)"
    async with browsed(folder, width=1400, height=900) as (page, url, (_, other)):
        await page.open(f"{url.format('rollout')}/{other}")
        assert (await page.eval(tops))[0] < 130
        await page.eval("document.querySelector('.waterfall li > span:last-child').textContent = '1234.5 s'; 0")
        for column in ("svg", ":scope > span:last-child"):
            edges = f"[...document.querySelectorAll('.waterfall li')].map(row => row.querySelector('{column}')"
            edges += ".getBoundingClientRect()).map(box => `${box.left} ${box.right}`)"
            assert len(found := await page.eval(edges)) > 1 == len(set(found)), "the rows have the same columns"
        await page.resize(390, 844)
        _, *order = await page.eval(tops)
        assert order == sorted(order), "reward, conversation, notes, comparison"


async def test_the_sheet_of_a_token_leaves_the_token_to_be_seen_on_a_phone(folder: Path) -> None:
    async with browsed(folder, width=390, height=844) as (page, url, (_, other)):
        await page.open(f"{url.format('rollout')}/{other}#tokens")
        await page.until("document.querySelectorAll('.sampled .t').length > 0")
        ends = "(each => [each.top, each.bottom])(document.querySelector('%s').getBoundingClientRect())"
        for block in ("start", "end"):
            await page.eval(f"document.querySelector('.sampled .t').scrollIntoView({{block: '{block}'}})")
            await page.eval("document.querySelector('.sampled .t').click()")
            top, bottom = await page.eval(ends % ".t.selected")
            above, below = await page.eval(ends % ".card-of-token")
            assert below <= top or bottom <= above, block
            await page.press("Escape")


async def test_pages_are_readable_on_a_phone_and_in_the_dark(folder: Path) -> None:
    async with browsed(folder, width=390, height=844) as (page, url, (_, other)):
        await page.prefer("dark")
        for address in (
            f"{url.format('rollout')}/{other}",
            f"{url.format('rollout')}/{other}#tokens",
            url.format("group"),
        ):
            await page.open(address)
            if address.endswith("tokens"):
                await page.until("document.querySelectorAll('.sampled .t').length > 0")
            assert not await page.eval(OVERFLOWS), address
            ink, ground = await page.eval(
                "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name].match(/\\d+/g)[0])"
            )
            assert int(ink) > 150 > 60 > int(ground), address
