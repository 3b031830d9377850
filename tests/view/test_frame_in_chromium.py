"""The frame of the viewer in a browser: filters, keys, growth, curves, hostile texts, small and dark screens."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lachesis_testing.export_suite import example_groups
from lachesis_view.app import serve
from lachesis_view.index import Index
from tests.support.chromium import Page, needs_chromium, open_page
from tests.support.viewed_runs import HOSTILE, mixed_run

pytestmark = needs_chromium
OVERFLOWS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
ROWS = "document.querySelectorAll('#list tbody tr')"
LABELS = "document.querySelector('#curves .u-legend').querySelectorAll('tr:not([hidden]) .u-label')"
MEANS = "document.querySelector('#metrics').textContent.trim()"
TOTAL = "Number(document.querySelector('#total').textContent.replaceAll(',', ''))"


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose names attack the page, too."""
    root = mixed_run(tmp_path_factory.mktemp("runs"))
    for path in (root / "mixed").glob("groups*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for rollout in (rollout for line in lines for rollout in line["rollouts"]):
            rollout["metrics"] = {f"reward/{HOSTILE}": -1e100, "seen": 5000002}
        path.write_text("".join(json.dumps({**line, "model": HOSTILE}) + "\n" for line in lines))
    return root


@asynccontextmanager
async def browsed(root: Path, tmp_path: Path, **size: int) -> AsyncIterator[tuple[Page, str]]:
    index = Index(root, tmp_path / "index.sqlite")
    await asyncio.to_thread(index.refresh)
    runner, url = await serve(index, "127.0.0.1", 0)
    try:
        async with open_page(**size) as page:
            yield page, url
            assert page.errors == []
            assert "owned" not in await page.eval("document.title"), "texts of models are never markup"
    finally:
        await runner.cleanup()
        index.close()


async def test_rollouts_are_filtered_walked_by_keys_opened_and_followed(played: Path, tmp_path: Path) -> None:
    async with browsed(played, tmp_path) as (page, url):
        await page.open(f"{url}rollouts")
        assert await page.eval(TOTAL) == 10
        clear = "document.querySelector('main a[href=\"/rollouts\"]')"
        assert await page.eval(clear) is None, "nothing is filtered"
        await page.press("/")
        for key in "evil":
            await page.press(key)
        await page.until(f"{TOTAL} === 6 && location.search === '?q=evil'")
        assert await page.eval(f"{clear}.textContent") == "Clear filters"
        await page.eval(
            "for (const [name, value] of [['tool_error', 'yes'], ['scored', 'yes']]) "
            "{ const field = document.forms.filter.elements[name]; field.value = value; "
            "field.dispatchEvent(new Event('input', {bubbles: true})); }"
        )
        await page.until(f"{TOTAL} === 4 && location.search === '?tool_error=yes&scored=yes&q=evil'")
        await page.eval("document.activeElement.blur()")
        for key, place in (("j", 0), ("j", 1), ("k", 0), ("j", 1)):
            await page.press(key)
            assert (
                await page.eval(
                    "[...document.querySelectorAll('#list tbody tr')].findIndex(r => r.matches('.current'))"
                )
                == place
            )
        listed = await page.eval(f"[...{ROWS}].map(row => '/rollout/' + row.id)")
        await page.press("Enter")
        await page.until(f"location.pathname === {listed[1]!r} && document.readyState === 'complete'")
        for key, path in (("n", listed[2]), ("p", listed[1]), ("p", listed[0])):
            await page.press(key)
            await page.until(f"location.pathname === {path!r} && document.readyState === 'complete'")
        assert await page.eval("document.querySelector('a[rel=prev]')") is None, "the first of the list"
        assert await page.eval("document.querySelector('main').textContent.includes('{{ 7*7 }}')")
        await page.eval("document.querySelector('.steps a:not([rel])').click()")
        await page.until("location.pathname === '/rollouts' && document.readyState === 'complete'")
        assert await page.eval(TOTAL) == 4, "back in the same list"


async def test_a_growing_run_grows_on_the_open_page_which_keeps_its_mark(played: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "live").mkdir(parents=True)
    lines = (played / "mixed/groups.jsonl").read_text().splitlines(keepends=True)
    (root / "live/groups.jsonl").write_text(lines[0])
    async with browsed(root, tmp_path) as (page, url):
        await page.open(f"{url}rollouts")
        await page.press("j")
        mark = await page.eval("document.querySelector('tr.current').id")
        with (root / "live/groups.jsonl").open("a") as file:
            file.write("".join(lines[1:3]))
        await page.until(f"{TOTAL} === 6")
        await page.until(f"document.querySelector('tr.current')?.id === {mark!r}")
        await page.open(f"{url}run/live")
        assert re.search(r"-1e\+100-\S+ to -\S+6seen5,000,0026$", await page.eval(MEANS)), "no prefix"
        points = "document.querySelector('#curves .card')?.plot?.data[0].length"
        await page.until(f"{points} === 3")
        with (root / "live/groups.jsonl").open("a") as file:
            file.write(lines[3])
        await page.until(f"{points} === 4")
        await page.until("document.querySelector('#list').textContent.includes('8')")
        await page.until(f"{MEANS}.endsWith('seen5,000,0028')")
        titles = await page.eval("[...document.querySelectorAll('#curves h2')].map(title => title.textContent)")
        assert titles[-2].startswith("reward/</script>") and "\u202e" not in titles[-2] and titles[-1] == "seen metric"
        drawn = await page.eval(
            "[...document.querySelectorAll('#curves .card:not(.flat)')].map(card => "
            "[card.querySelector('h2').textContent, card.plot.scales.y.min, card.plot.scales.y.max, "
            "Math.min(...card.plot.data[1]), Math.max(...card.plot.data[1])])"
        )
        assert len(drawn) > 2
        for title, low, high, least, most in drawn:
            assert low <= least <= most <= high, title
            assert least < 0 or low >= 0, title
            assert not title.endswith("share") or high <= 1.02, title
            assert least == most or title == "reward" or (most - least) / (high - low) > 0.8, f"{title} fits its axis"
        (root / "live/groups.jsonl").unlink()
        await page.until("document.querySelector('#standing').textContent.includes('404')")
        assert page.errors and all("404" in error for error in page.errors)
        page.errors.clear()


async def test_a_single_step_is_figures_with_their_interval_and_the_colours_of_outcomes_are_named_above(
    played: Path, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    (root / "one").mkdir(parents=True)
    (root / "one/groups.jsonl").write_bytes((played / "mixed/groups.jsonl").read_bytes())
    lines = [{"step": at, "train/reward": 0.25, "train/reward_low": 0.125, "train/reward_high": 0.5} for at in (1, 2)]
    (root / "one/metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    async with browsed(root, tmp_path) as (page, url):
        await page.open(url)
        key, table = "document.querySelector('.ends')", "document.querySelector('#list table')"
        assert "completed" in await page.eval(f"{key}.textContent")
        assert await page.eval(f"{key}.getBoundingClientRect().bottom <= {table}.getBoundingClientRect().top")
        await page.open(f"{url}run/one?over=step")
        await page.until("document.querySelector('#curves')?.dataset.drawn > 0")
        assert "0.25 [0.125, 0.5]" in await page.eval("document.querySelector('#curves').textContent")
        assert await page.eval("document.querySelectorAll('#curves canvas').length") == 0
        assert ", 1 step</span>" in await page.eval("document.querySelector('.figs').innerHTML")
        lines[1]["train/reward"] = 0.375
        (root / "one/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        await page.until("document.querySelectorAll('#curves canvas').length > 0")
        assert "[0.125" not in await page.eval("document.querySelector('#curves').textContent")
        seen = "getComputedStyle(document.querySelector('#curves .u-label')).visibility"
        assert await page.eval(seen) == "hidden", "it would repeat the title"


async def test_curves_of_few_groups_are_folded_and_what_never_changes_is_a_figure(played: Path, tmp_path: Path) -> None:
    async with browsed(played, tmp_path) as (page, url):
        await page.open(f"{url}run/mixed")
        await page.until("document.querySelector('#curves').dataset.drawn > 3")
        assert await page.eval("document.querySelector('details.drawn').open") is False
        await page.eval("document.querySelector('details.drawn').open = true")
        await page.until("document.querySelector('#curves .card').plot.width > 300")
        flat = "[...document.querySelectorAll('#curves .flat')].map(each => each.textContent)"
        assert "seen metric5,000,002 throughout" in await page.eval(flat)
        assert await page.eval("document.querySelector('#curves .flat .u-wrap')") is None
        legend = "getComputedStyle(document.querySelector('.alone-line .u-legend')).position"
        assert await page.eval(legend) == "absolute", "it takes no room"


@pytest.mark.parametrize("width", [1280, 1400, 1600])
async def test_no_figure_of_a_run_has_a_row_of_its_own(played: Path, tmp_path: Path, width: int) -> None:
    async with browsed(played, tmp_path, width=width) as (page, url):
        await page.open(f"{url}run/mixed")
        tops = "[...document.querySelectorAll('.figs > div')].map(each => each.offsetTop)"
        *figures, outcomes = await page.eval(tops)
        assert all(figures.count(top) > 1 for top in figures) and outcomes > max(figures)


async def test_names_of_any_length_and_shape_fit_a_phone(tmp_path: Path) -> None:
    root, name = tmp_path / "runs", HOSTILE + "W" * 3000
    (root / "odd").mkdir(parents=True)
    group = json.loads(json.dumps(example_groups()[3]))
    group |= {**dict.fromkeys(("environment", "item", "model"), name), "item_key": "W" * 3000}
    for rollout in group["rollouts"]:
        rollout |= dict.fromkeys(("outcome", "unscored_kind", "skipped", "reason", "agent_fault", "traceback"), name)
        rollout |= {"metrics": {name: 1.0, f"reward/{name}": 1.0}, "verifier": {name: name}}
        rollout["reward_calls"] = [{"method": name, "arguments": [name], "seconds": 1.0, "output": name, "error": name}]
    group["tools"][0]["function"] |= {"name": name, "description": name}
    for message in group["messages"][0]:
        message |= {"name": name, "content": name, "reasoning": name}
        for call in message.get("tool_calls", ()):
            call["function"] |= {"name": name, "arguments": name}
    group["samples"][1]["weight"] = None
    (root / "odd/groups.jsonl").write_text(json.dumps(group) + "\n")
    (root / "odd/groups.run.json").write_text(json.dumps({"settings": {name: name}}))
    async with browsed(root, tmp_path, width=390) as (page, url):
        for path in ("", "rollouts", "run/odd", "group/odd/0", "rollout/odd/0/0"):
            await page.open(f"{url}{path}")
            if path == "run/odd":
                await page.until("document.querySelector('#curves')?.dataset.drawn > 3")
            await page.eval("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert await page.eval(OVERFLOWS) is False, path
        for part in ("reward", "setup", "tokens"):
            await page.eval(f"location.hash = {part!r}")
            await page.until(f"!document.querySelector('#{part}').hidden")
            assert await page.eval(OVERFLOWS) is False, part
        await page.open(f"{url}rollout/odd/0/1#tokens")
        await page.until("document.querySelector('.stage .bad')?.textContent.includes('cannot be read')")


@pytest.mark.slow
async def test_runs_are_compared_and_pages_fit_a_phone_in_the_dark(played: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name, size in (("one", 2), ("two", 4)):
        (root / name).mkdir(parents=True)
        (root / name / "groups.jsonl").write_bytes((played / "mixed/groups.jsonl").read_bytes())
        (root / name / "groups.run.json").write_text(json.dumps({"settings": {"group_size": size, "same": HOSTILE}}))
    (root / "two/metrics.jsonl").write_text("".join(f'{{"step": {at}, "train/loss": {at}}}\n' for at in range(4)))
    lines = [json.loads(line) for line in (root / "two/groups.jsonl").read_text().splitlines()]
    lines[0]["rollouts"][0]["outcome"] = "context_exhausted"
    (root / "two/groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with browsed(root, tmp_path, width=390) as (page, url):
        await page.prefer("dark")
        for path in ("", "rollouts", "run/one", "rollout/one/1/0"):
            await page.open(f"{url}{path}")
            ends = "[...document.querySelectorAll('.side > a')].map(each => each.getBoundingClientRect().right)"
            assert max(await page.eval(ends)) <= 390, "no link to a page is cut"
            assert await page.eval(OVERFLOWS) is False, path
            assert await page.eval("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 22)"
        await page.open(url)
        shown = HOSTILE.replace("\u202e", "\\u{202e}")
        assert shown in await page.eval("document.querySelector('#list').textContent")
        seen = "[...document.querySelectorAll('#list input, #compare button')].every(each => each.checkVisibility())"
        assert await page.eval(seen) and await page.eval("document.querySelector('#compare button').disabled")
        await page.eval("document.querySelectorAll('#list input').forEach(box => box.click())")
        await page.eval("document.querySelector('#compare button').click()")
        await page.until("document.querySelector('#curves')?.dataset.drawn > 3")
        table = "document.querySelector('table.settings').textContent.replace(/\\s+/g, ' ')"
        assert "group_size" in await page.eval(table) and "same" not in await page.eval(table)
        assert (await page.eval(f"[...{LABELS}].map(label => label.textContent)"))[1:] == ["one", "two"]
        key = "[...document.querySelectorAll('#curves .card')].find(card => card.innerText.startsWith('Outcomes'))"
        samples = (
            f"[...{key}.querySelectorAll('.u-series:not([hidden]) th')].slice(1).map(each => each.innerText + ' ' + "
        )
        samples += "getComputedStyle(each.querySelector('.u-marker')).borderTopStyle)"
        assert await page.eval(samples) == [
            "one · completed solid",
            "two · completed solid",
            "two · out of tokens dashed",
        ]
        strokes = (
            "Object.fromEntries(document.querySelector('#curves .card').plot.series.map(s => [s.label, s._stroke]))"
        )
        before = await page.eval(strokes)
        edges = "document.querySelector('#curves .card').plot.series"
        assert (await page.eval(f"{edges}.map(s => s._stroke).join()")).count("99") == 4, "bands are told apart"
        values = "getComputedStyle(document.querySelector('#curves .u-value')).visibility"
        colon = "getComputedStyle(document.querySelector('#curves .u-legend th'), '::after').visibility"
        assert await page.eval(f"{values} + {colon}") == "hiddenhidden", "none before the pointer is there"
        at = "JSON.parse(JSON.stringify(document.querySelector('#curves .u-over').getBoundingClientRect()))"
        await page.eval("document.querySelector('#curves .u-over').scrollIntoView({block: 'center'})")
        place = await page.eval(at)
        x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await page.until(f"{values} === 'visible'")
        await page.eval("document.querySelector('button[data-over=step]').click()")
        await page.until("document.querySelector('#curves h2')?.textContent === 'loss'")
        assert await page.eval("document.querySelectorAll('#curves .card').length") == 1
        assert (await page.eval(strokes))["two"] == before["two"] != before["one"], "a run has one colour in all plots"
        await page.open(await page.eval("location.href"))
        await page.until("document.querySelector('#curves h2')?.textContent === 'loss'")
        assert await page.eval(OVERFLOWS) is False
