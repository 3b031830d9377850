"""A rollout or a group as a page that is sent: whole, harmless, without network; and its record as a file."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis.cli import main
from lachesis_messages.records.digests import digest_problem
from lachesis_messages.records.groups import read_groups, stored_messages
from lachesis_testing.export_suite import example_groups
from lachesis_view import app as viewer
from lachesis_view.index import Index
from lachesis_view.single_page import file_name, group_of_one, group_page, rollout_page
from tests.support.chromium import needs_chromium, open_page
from tests.support.hostile_groups import hostile_group
from tests.support.viewed_runs import mixed_run, played_shelves

OVERFLOWS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelves")
    asyncio.run(played_shelves(folder))
    return folder


@pytest.fixture
def group(folder: Path) -> dict[str, Any]:
    (found,) = read_groups(folder / "groups.jsonl")
    return found


def check_alone(page: str) -> None:
    """Its policy allows only the script that is in it, and nothing in it leads out of it."""
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; img-src data:"
    assert f'content="{policy.format(digest)}"' in page
    markup = page.replace(script, "")
    assert not re.findall(r'<[^>]* (?:href|src|action|data-url)="(?!#|data:,|data:image/)', markup)


def test_the_page_of_a_rollout_has_all_of_it_and_needs_nothing_else(group: dict[str, Any]) -> None:
    for n, rollout in enumerate(group["rollouts"]):
        page = rollout_page(group, n)
        check_alone(page)
        assert rollout["rollout_id"] in page and "honest" in page and "Against its siblings" in page
        assert ("text that starts a tool call" in page) == bool(rollout["discarded"]), "the attempt, with its reason"
        assert ("there is no such shelf &lt;i&gt;here" in page) == bool(rollout["tool_errors"])
        assert "Send as page" not in page and "lachesis chat" not in page and "data-url" not in page


def test_the_page_of_a_group_has_every_rollout_as_a_whole(group: dict[str, Any]) -> None:
    for each in (group, *example_groups(), hostile_group()):
        page = group_page(each)
        check_alone(page)
        for n in range(len(each["rollouts"])):
            assert f'id="rollout-{n}"' in page and f'href="#rollout-{n}"' in page


@needs_chromium
async def test_a_browser_shows_both_pages_and_runs_nothing_of_a_model(group: dict[str, Any], tmp_path: Path) -> None:
    hostile = hostile_group()
    pages = {"one": rollout_page(hostile, 0), "all": group_page(hostile), "shelves": group_page(group)}
    async with open_page(width=390) as browser:
        for name, page in pages.items():
            path = tmp_path / f"{name}.html"
            path.write_text(page, encoding="utf-8", errors="backslashreplace")
            await browser.open(path.as_uri())
            await browser.eval("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert not await browser.eval(OVERFLOWS), name
            assert "owned" not in await browser.eval("document.title")
        # The head of a column leads to the whole rollout.
        await browser.eval("document.querySelectorAll('details').forEach(each => each.open = false)")
        await browser.eval("document.querySelector('th a').click()")
        await browser.until("document.querySelector('#rollout-0').open")
        assert browser.errors == []


async def test_the_viewer_sends_pages_and_records_to_be_saved(folder: Path, tmp_path: Path, group: Any) -> None:
    index = Index(folder, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        await asyncio.to_thread(index.refresh)
        place, rollout_id = f"{folder.name}/0", group["rollouts"][1]["rollout_id"]
        async with aiohttp.ClientSession() as session:

            async def saved(path: str) -> tuple[str, bytes]:
                async with session.get(f"{url}{path}") as answer:
                    assert answer.status == 200
                    return str(answer.headers["Content-Disposition"]), await answer.read()

            shown, page = await saved(f"send/{place}/1")
            assert shown == f'attachment; filename="rollout-{rollout_id[:12]}.html"'
            assert page.decode() == rollout_page(group, 1)
            shown, page = await saved(f"send-group/{place}")
            assert shown == f'attachment; filename="group-{group["item_key"]}.html"'
            shown, record = await saved(f"record/{place}/1")
            assert shown == f'attachment; filename="rollout-{rollout_id[:12]}.jsonl"'
            for missing in (f"send/{place}/9", f"send-group/{folder.name}/7", f"record/{place}/9"):
                async with session.get(f"{url}{missing}") as answer:
                    assert answer.status == 404
    finally:
        await runner.cleanup()
        index.close()
    (tmp_path / "sent.jsonl").write_bytes(record)
    (one,) = read_groups(tmp_path / "sent.jsonl")
    assert digest_problem(one) is None and one["scores"] == [group["rollouts"][1]["reward"]]
    assert stored_messages(one, one["rollouts"][0]) == stored_messages(group, group["rollouts"][1])
    assert main(["verify", str(tmp_path / "sent.jsonl")]) == 0, "its samples are certified as before"


def test_a_rollout_without_a_score_and_a_changed_line_stay_what_they_are() -> None:
    group = example_groups()[0]
    n = [rollout["reward"] for rollout in group["rollouts"]].index(None)
    one = group_of_one(group, n)
    assert (one["scores"], one["messages"], one["rollouts"][0]["place"]) == ([], [], None)
    assert digest_problem(one) is None
    forged = group_of_one({**group, "model": "another"}, 0)
    assert digest_problem(forged) is not None, "a copy proves nothing"


def test_an_image_goes_with_the_rollout_whatever_sample_had_it() -> None:
    group = example_groups()[3]
    for each in group["samples"]:
        each["images"] = [{"sha256": "digest", "start": 0, "tokens": 1, "id": 0}]
    group["samples"][0]["image_data"] = {"digest": "data:image/png;base64,AA=="}
    other = next(
        n for n, each in enumerate(group["rollouts"]) if each["rollout_id"] != group["samples"][0]["rollout_id"]
    )
    assert group_of_one(group, other)["samples"][0]["image_data"] == group["samples"][0]["image_data"]


def test_the_command_writes_the_page_of_one(folder: Path, group: Any, tmp_path: Path, capsys: Any) -> None:
    rollout_id, out = group["rollouts"][0]["rollout_id"], tmp_path / "one.html"
    assert main(["report", str(folder), "--rollout", rollout_id[:10], "--output", str(out)]) == 0
    assert out.read_text() == rollout_page(group, 0) and str(out) in capsys.readouterr().out
    assert main(["report", str(folder / "groups.jsonl"), "--group", group["item_key"]]) == 0
    written = folder / f"group-{group['item_key']}.html"
    assert written.read_text() == group_page(group)
    written.unlink()
    several = json.loads(json.dumps(group))
    several["rollouts"][1]["rollout_id"] = rollout_id
    (tmp_path / "groups.jsonl").write_text(json.dumps(several) + "\n")
    for name, said in (("zz", "there is no rollout zz"), (rollout_id[:4], "2 are named rollout")):
        assert main(["report", str(tmp_path), "--rollout", name]) == 2
        assert said in capsys.readouterr().err


def test_a_group_that_failed_in_earlier_starts_is_the_one_that_counts(tmp_path: Path) -> None:
    done, _, failed, _ = example_groups()
    early = {**failed, "item_key": done["item_key"]}
    (tmp_path / "groups.jsonl").write_text(json.dumps(done) + "\n")
    lines = (early, failed, {**failed, "environment": "the last start"})
    (tmp_path / "groups.failed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "one.html"
    for key, said in ((done["item_key"], "Sorted."), (failed["item_key"], "the last start")):
        assert main(["report", str(tmp_path), "--group", key, "--output", str(out)]) == 0
        assert said in out.read_text()


def test_failed_calls_of_a_sub_agent_are_not_counted_among_those_of_the_rollout() -> None:
    group = example_groups()[0]
    look = {"id": "inner", "function": {"name": "look", "arguments": "{}"}}
    said = [{"role": "assistant", "content": "", "tool_calls": [look]}, {"role": "tool", "tool_call_id": "inner"}]
    chat = {"messages": said, "message_turns": [None] * 2, "calls": {"inner": {"failed": True}}, "discarded": []}
    rollout = group["rollouts"][0] | {"tool_calls": 1, "tool_errors": [], "calls": {"call_1": {"subagent": chat}}}
    page = rollout_page({**group, "rollouts": [rollout]}, 0)
    assert "1 call ·" in page and "look failed</a>" in page, "as the list counts them, and it is shown"
    rollout["tool_errors"] = [{"tool": "terminal", "arguments": "{}", "error": "no"}]
    assert re.search(r"1 call, <a [^>]*>1 failed</a>", rollout_page({**group, "rollouts": [rollout]}, 0))


async def test_the_record_that_is_downloaded_has_every_digit_of_it(group: dict[str, Any], tmp_path: Path) -> None:
    group["item"] = {"id": 123456789012345678901}
    (tmp_path / "groups.jsonl").write_text(json.dumps(group) + "\n")
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        await asyncio.to_thread(index.refresh)
        async with aiohttp.ClientSession() as session, session.get(f"{url}record/{tmp_path.name}/0/0") as answer:
            (tmp_path / "one.jsonl").write_bytes(await answer.read())
    finally:
        await runner.cleanup()
        index.close()
    (one,) = read_groups(tmp_path / "one.jsonl")
    assert one["item"] == group["item"]


@pytest.mark.parametrize(
    ("name", "found"), [("../../etc/x y", "etc-x-y"), ("..", "one"), ("é" * 9, "one"), ("a" * 99, "a" * 40)]
)
def test_a_key_of_any_text_makes_a_plain_file_name(name: str, found: str) -> None:
    assert file_name("group", name, ".html") == f"group-{found}.html"


def test_a_report_that_is_written_again_is_that_of_the_run_with_what_has_no_score(tmp_path: Path) -> None:
    report = mixed_run(tmp_path) / "mixed/groups.html"
    of_the_run = report.read_text()
    report.unlink()
    assert main(["report", str(report.parent)]) == 0
    assert report.read_text() == of_the_run


@pytest.mark.slow
def test_a_report_needs_no_memory_for_a_long_file(tmp_path: Path, group: Any, capsys: Any) -> None:
    tracemalloc.start()
    peaks = []
    try:
        for size in (20, 100):
            with (tmp_path / "groups.jsonl").open("w", encoding="utf-8") as file:
                for number in range(size):
                    file.write(json.dumps(group | {"item_key": f"{number}/0", "metadata": "x" * 200_000}) + "\n")
            tracemalloc.reset_peak()
            assert main(["report", str(tmp_path)]) == 0
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 80 * 200_000 / 2, "by what its groups hold"
