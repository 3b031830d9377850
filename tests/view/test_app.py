"""The pages over the wire: who may read them, what they say of themselves, and that texts stay texts."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from lachesis.cli import main
from lachesis_testing.export_suite import example_groups
from lachesis_view import app as viewer
from lachesis_view.index import Index
from lachesis_view.verb import _has_runs
from tests.support.viewed_runs import HOSTILE, mixed_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
async def index(root: Path, tmp_path: Path) -> AsyncIterator[Index]:
    index = Index(root, tmp_path / "index.sqlite")
    await asyncio.to_thread(index.refresh)
    yield index
    index.close()


PAGES = (
    "/",
    "/?runs=mixed",
    "/run/mixed",
    "/rollouts?run=mixed&tool_error=yes&sort=-turns&q=evil",
    "/rollouts?min_reward=x&page=-3&sort=nothing&tool_error=maybe&q=%22%00)(%F0%9F",
    "/rollouts?q=%00evil&item=%00&outcome=%00&cause=%00&run=%00",
    f"/rollouts?page={'9' * 5000}",
    "/rollout/mixed/1/0?q=evil",
    "/group/mixed/1",
    "/group/mixed/-1",
    "/group/mixed/unscored-1",
    "/rollout/mixed/unscored-1/0",
    "/audits",
    "/pools",
    "/curves?runs=mixed&over=groups",
    "/static/view.js",
)


async def test_every_page_answers_and_lets_a_browser_run_and_load_our_own_files_only(index: Index) -> None:
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            for page in (
                *PAGES,
                "/run/none",
                "/group/mixed/99",
                "/rollout/mixed/0/7",
                "/static/..%2fapp.py",
                "/nothing",
            ):
                async with session.get(URL(f"{url[:-1]}{page}", encoded=True)) as answer:
                    text = await answer.text()
                    assert answer.status == (200 if page in PAGES else 404), page
                    assert page in PAGES or '<a href="/">All runs</a>' in text, page
                    policy = answer.headers["Content-Security-Policy"]
                    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
                    assert "unsafe" not in policy and answer.headers["X-Content-Type-Options"] == "nosniff"
                    if answer.content_type == "text/html":
                        assert "<img" not in text and " style=" not in text and "<style" not in text, page
                        assert "\u202e" not in text, page
                        assert text.count("<script") == text.count("<script defer src="), page
            async with session.get(f"{url}nothing/<b>") as answer:
                assert "There is no page /nothing/&lt;b&gt;" in await answer.text()
            async with session.get(f"{url}rollouts?q=evil") as answer:
                assert '<b id="total">6</b>' in await answer.text()
            async with session.get(f"{url}run/none") as answer:
                assert "<b>There is no run none in " in await answer.text(), "what is wrong, not its number"
            async with session.get(f"{url}rollouts?tag=starred") as answer:
                assert "<b>No rollout is starred yet</b>Open one and press Star" in await answer.text()
            async with session.get(f"{url}rollouts?reward=1&run=none") as answer:
                text = await answer.text()
                assert "Reward is no filter: use min_reward and max_reward, with numbers.</div>" in text
                assert "There is no run none; there are mixed.</div>" in text and '<b id="total">0</b>' in text
            async with session.get(f"{url}rollouts?cause=declined") as answer:
                assert 'href="/group/mixed/unscored-1">mixed · unscored group 1, rollout 0<' in await answer.text()
            place = "mixed/unscored-1/0"
            async with session.get(f"{url}diff", params={"a": place, "b": f"{url}rollout/{place}"}) as answer:
                assert answer.status == 200
            async with session.post(url) as answer:
                assert answer.status == 405
    finally:
        await runner.cleanup()


async def test_characters_that_control_or_reverse_a_text_are_shown_and_searched_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    group = json.dumps(example_groups()[0]).replace(
        "Sort the words", "\\u2067Sort\\u001b[31m\\tthe\\r\\nwords \\u200d\\u202e"
    )
    (tmp_path / "runs/groups.jsonl").write_text(group + "\n")
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        await asyncio.to_thread(index.refresh)
        async with aiohttp.ClientSession() as session:
            for page in ("group/runs/0", "rollout/runs/0/0"):
                async with session.get(f"{url}{page}") as answer:
                    text = await answer.text()
                assert "\\u{2067}Sort\\u{1b}[31m\tthe\nwords \u200d\\u{202e}" in text, page
                assert not set(text) & {"\x1b", "\u2067", "\u202e"}, page
            async with session.get(f"{url}rollouts", params={"q": "\u2067Sort", "item": "\u202e"}) as answer:
                text = await answer.text()
                assert 'name="q" value="\u2067Sort"' in text and 'name="item" value="\u202e"' in text
                assert "of item \\u{202e}" in text
    finally:
        await runner.cleanup()
        index.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:7007", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("LOCALHOST", 200),
        ("evil.example", 403),
        ("evil.example:7007", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1:evil.example", 403),
        ("", 403),
    ],
)
async def test_a_name_of_another_site_that_leads_here_is_refused(index: Index, host: str, status: int) -> None:
    runner, url = await viewer.serve(index, "localhost", 0)
    try:
        async with aiohttp.ClientSession() as session, session.get(url, headers={"Host": host}) as answer:
            assert answer.status == status
            assert ("mixed" in await answer.text()) == (status == 200)
    finally:
        await runner.cleanup()


async def test_beyond_this_machine_the_pages_ask_for_the_token_which_then_leaves_the_address(index: Index) -> None:
    runner, url = await viewer.serve(index, "0.0.0.0", 0)
    url = url.replace("0.0.0.0", "127.0.0.1")
    plain, _, token = url.partition("?token=")
    assert len(token) >= 32
    jar = aiohttp.CookieJar(unsafe=True)
    try:
        async with aiohttp.ClientSession() as stranger:
            for page in (*PAGES, "/events", "/?token=", f"/?token={token[:-1]}", "/?token=%C3%A9"):
                async with stranger.get(URL(f"{plain[:-1]}{page}", encoded=True)) as answer:
                    assert answer.status == 403 and "token" in await answer.text(), page
            for name, value in (
                ("Host", "a:b"),
                ("Host", "\udcff"),
                ("Cookie", f"lachesis-view-{URL(plain).port}=\udcff"),
            ):
                async with stranger.get(plain, headers={name: value}) as answer:
                    assert answer.status == 403, (name, value)
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            async with session.get(f"{plain}rollouts?q=evil&token={token}") as answer:
                assert answer.status == 200 and token not in str(answer.url) and answer.url.query["q"] == "evil"
                assert "HttpOnly" in answer.history[0].headers["Set-Cookie"]
            async with session.get(plain) as answer:
                assert answer.status == 200
    finally:
        await runner.cleanup()


async def test_a_page_that_cannot_be_made_is_an_error_with_the_same_policy(tmp_path: Path) -> None:
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        with closing(sqlite3.connect(tmp_path / "index.sqlite")) as database:
            database.execute("DROP TABLE rollouts")
        async with aiohttp.ClientSession() as session, session.get(f"{url}rollouts") as answer:
            assert answer.status == 500 and "cannot be shown" in await answer.text()
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    finally:
        await runner.cleanup()
        index.close()


async def test_a_record_of_another_shape_is_shown_as_it_is_and_no_other_page_with_it(tmp_path: Path) -> None:
    groups = example_groups()
    good, wrong = groups[-1], json.loads(json.dumps(groups[-1]))
    del wrong["samples"][0]["spans"][0]["start"]
    wrong["messages"][0][0]["content"] = 7
    lines = (good, {**wrong, "item_key": "wrong", "item": f"{HOSTILE} \ud83d"})
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        await asyncio.to_thread(index.refresh)
        async with aiohttp.ClientSession() as session:
            for number, status in ((0, 200), (1, 422)):
                for page in (
                    f"group/{tmp_path.name}/{number}",
                    *(f"{kind}/{tmp_path.name}/{number}/0" for kind in ("rollout", "tokens")),
                ):
                    async with session.get(f"{url}{page}{'/0' * page.startswith('tokens')}") as answer:
                        text = await answer.text()
                        assert answer.status == status, page
                        if status == 422:
                            assert "is shown as it is" in text and "&lt;img src=x" in text and "<img" not in text
            async with session.get(f"{url}tokens/{tmp_path.name}/0/0/99") as answer:
                assert answer.status == 404 and "no sample 99" in await answer.text()
    finally:
        await runner.cleanup()
        index.close()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the parts of a record are; one of each list is enough."""
    parts = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, part in parts:
        yield (*at, name)
        yield from places(part, (*at, name))


def changed(record: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place; with `...`, with another key there."""
    holder = copy = json.loads(json.dumps(record))
    for name in place[:-1]:
        holder = holder[name]
    if value is not ...:
        holder[place[-1]] = value
    elif isinstance(holder, dict):
        holder[HOSTILE] = holder.pop(place[-1])
    return copy


def full_groups() -> list[dict[str, Any]]:
    """A group with samples, branches and calls of its reward, and one with calls of the agent."""
    calls, full = example_groups()[0], example_groups()[3]
    calls["messages"][0].append({"role": "user", "content": IMAGE})
    for rollout in full["rollouts"]:
        rollout |= {"metrics": {"reward/part": 1.0, "more": 2}, "reason": "a reason"}
        rollout["reward_calls"] = [{"method": "terminal", "arguments": ["ls"], "seconds": 1.0, "output": "files"}]
        rollout["discarded"] = [{"at": 0, "reason": "an edit", "edit": True, "messages": calls["messages"][0]}]
    return [full, calls]


DEEP = "980 brackets"
ODD = (None, [], {}, -1, 1e308, float("nan"), True, "", 10**30, 10**12, [None], {"a": None}, DEEP)
IMAGE = [{"type": "image_url", "image_url": {"url": "javascript:x", HOSTILE: "data:text/html,x"}}]
MARKUP = re.compile(r'<script>|<img src=x|<b>bold|<!--|\b(href|src|action)="(?!/|#|data:,")')


@pytest.mark.slow
async def test_no_part_of_a_record_is_markup_breaks_a_page_or_hides_a_group(tmp_path: Path) -> None:
    odd = itertools.cycle(ODD)
    wrong = [
        changed(group, place, value)
        for group in full_groups()
        for place in places(group)
        if place != ("schema",)
        for value in (..., HOSTILE, next(odd))
    ]
    lines = [json.dumps(line).replace(f'"{DEEP}"', "[" * 980 + "]" * 980) for line in (*wrong, full_groups()[0])]
    (tmp_path / "groups.jsonl").write_text("\n".join(lines) + "\n")
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    statuses = Counter[int]()
    try:
        await asyncio.to_thread(index.refresh)
        listed = sorted({row["number"] for row in index.rollouts(viewer.Filter(), 10_000).rows})
        assert listed[-1] == len(wrong) and len(listed) <= len(lines) - index.unread
        pages = ["", "rollouts", "rollouts?sort=outcome", f"run/{tmp_path.name}"]
        for group in (f"{tmp_path.name}/{number}" for number in listed):
            pages += [f"group/{group}", f"rollout/{group}/0", f"tokens/{group}/0/0"]
        async with aiohttp.ClientSession() as session:
            for page in pages:
                async with session.get(f"{url}{page}") as answer:
                    assert answer.status in (200, 422) or (answer.status == 404 and "no sample" in await answer.text())
                    statuses[answer.status] += 1
                    if answer.content_type == "text/html":
                        assert not MARKUP.search(await answer.text()), page
    finally:
        await runner.cleanup()
        index.close()
    assert statuses[200] > statuses[422] > 0


async def test_labels_begin_with_a_capital_letter(index: Index) -> None:
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            for page in ("", "rollouts", "run/mixed", "group/mixed/1", "rollout/mixed/1/0"):
                async with session.get(f"{url}{page}") as answer:
                    text = await answer.text()
                heads = r"<(?:th|h2)(?: class=[^>]*)?>(?:<a [^>]*>)?([^<]+)<"
                labels = re.findall(
                    rf'placeholder="([^"]+)"|<label>([^<]+)<|class="button"[^>]*>([^<]+)<|{heads}', text
                )
                said = [label.strip() for found in labels for label in found if label.strip()]
                names = {"from", "to", "mixed"}  # of bounds, and of a run
                assert said and not [label for label in said if label[0].islower() and label not in names], page
    finally:
        await runner.cleanup()


async def test_what_a_run_writes_is_told_to_the_pages_that_are_open(root: Path, tmp_path: Path) -> None:
    index = Index(root, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    added = root / "later" / "groups.jsonl"
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}events") as events:
            assert events.content_type == "text/event-stream"
            added.parent.mkdir()
            added.write_bytes((root / "mixed" / "groups.jsonl").read_bytes())
            while index.rollouts(viewer.Filter(runs=("later",))).total < 8:
                assert (await events.content.readuntil(b"\n\n")) in (b": here\n\n", b"event: grown\ndata: 0\n\n")
    finally:
        added.unlink()
        added.parent.rmdir()
        await runner.cleanup()
        index.close()


async def test_the_figures_of_a_page_are_of_one_moment_while_the_run_goes_on(root: Path, tmp_path: Path) -> None:
    live = tmp_path / "runs" / "live" / "samples.jsonl"
    live.parent.mkdir(parents=True)
    lines = [{**json.loads(line), "evaluation": True} for line in (root / "mixed/groups.jsonl").open(newline="\n")]
    written = [json.dumps(line) + "\n" for line in lines]
    live.write_text(written[0])

    class Growing(Index):
        """Grows right after its runs are asked for."""

        def runs(self) -> list[dict[str, Any]]:
            found = super().runs()
            with live.open("a") as file:
                file.writelines(written[1:])
            with ThreadPoolExecutor() as others:
                others.submit(self.refresh).result()
            return found

    index = Growing(tmp_path / "runs", tmp_path / "index.sqlite")
    index.refresh()
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}run/live") as answer:
            text = await answer.text()
        assert "rollouts of 1 item<" in text and "pass@2 of 1 item<" in text
    finally:
        await runner.cleanup()
        index.close()


def test_the_command_prints_its_address_and_ends_on_a_signal(root: Path, tmp_path: Path) -> None:
    code = "import sys; from lachesis.cli import main; sys.exit(main(['view', *sys.argv[1:]]))"
    command = [sys.executable, "-c", code, str(root), "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("http://localhost:")
        process.send_signal(2)
        assert process.wait() == 130 and process.stderr.read() == "stopped\n"
    assert len(list((tmp_path / "lachesis" / "view").glob("*.sqlite"))) == 1
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before, "runs are read only"


def test_a_folder_or_a_port_that_cannot_be_used_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "none")]) == 2
    assert "none; name the folder" in capsys.readouterr().err
    assert main(["view", str(tmp_path), "--port", "1", "--host", "203.0.113.1", "--index", str(tmp_path / "i")]) == 2
    assert "choose another --port or --host" in capsys.readouterr().err


def test_a_folder_without_runs_is_said_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lachesis", "view", str(tmp_path), "--port", "0", "--index", str(tmp_path / "i")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.send_signal(2)
    assert said == f"no runs below {tmp_path} yet; make one with `lachesis process ENV`\n"
    assert not _has_runs(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "groups.jsonl").write_text(json.dumps(example_groups()[0]) + "\n")
    assert _has_runs(tmp_path), "whatever the index has read"


async def test_a_batch_without_rewards_is_shown_as_one_and_not_as_failed(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    group = {**example_groups()[0], "environment": "batch"}
    for rollout in group["rollouts"]:
        rollout |= {"reward": None, "outcome": "context_exhausted", "completed": False, "unscored_kind": "declined"}
    (tmp_path / "plain/groups.jsonl").write_text(json.dumps(group) + "\n")
    (tmp_path / "plain/groups.run.json").write_text(json.dumps({"settings": {"environment": "batch"}}))
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        await asyncio.to_thread(index.refresh)
        async with aiohttp.ClientSession() as session:
            said = {
                "": '<span class="faint">no reward</span>',
                "rollouts": ">no reward</span>",
                "run/plain": ">4</a></b><span>without a reward: a batch without --env</span>",
                "rollout/plain/0/0": '<span class="tag">no reward: a batch without --env</span>',
            }
            for page, words in said.items():
                async with session.get(f"{url}{page}") as answer:
                    text = await answer.text()
                assert words in text and ">declined<" not in text, page
                if page == "run/plain":
                    assert not re.search("not scored</span>|Why rollouts fail|Lowest first|Most mixed|cell none", text)
                    assert 'data-label="failed calls" class="' in text and "Latest first" in text
                    assert ">4 out of tokens</a>" in text
                    assert ">4 of 4 rollouts were cut off: allow longer answers with --env.max_token_length" in text
                assert "scored=no&amp;" not in text and "have no score" not in text and "no score:" not in text, page
            async with session.get(f"{url}rollouts?scored=no") as answer:
                assert '<b id="total">0</b>' in await answer.text()
    finally:
        await runner.cleanup()
        index.close()


@pytest.mark.parametrize(
    ("reward", "cell", "score"), [(1.0, "r10", "good"), (0.5, "r5", ""), (0.0, "r0", "bad"), (None, "none", "off")]
)
async def test_colours_follow_the_reward_and_not_the_outcome(
    reward: float | None, cell: str, score: str, tmp_path: Path
) -> None:
    group = example_groups()[0]
    for rollout in group["rollouts"]:
        rollout |= {"reward": reward, "outcome": "completed", "completed": True, "unscored_kind": ""}
    (tmp_path / "groups.jsonl").write_text(json.dumps(group) + "\n")
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        await asyncio.to_thread(index.refresh)
        async with aiohttp.ClientSession() as session:
            for page in ("rollouts", f"rollout/{tmp_path.name}/0/0"):
                async with session.get(f"{url}{page}") as answer:
                    text = await answer.text()
                    assert answer.status == 200, text
                ended, earned = ("faint nowrap", f"cell {cell}") if page == "rollouts" else ("tag ", f"score {score}")
                assert f'<span class="{ended}">completed</span>' in text, page
                assert f'class="{earned}"' in text, page
    finally:
        await runner.cleanup()
        index.close()
