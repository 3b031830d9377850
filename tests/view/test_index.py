"""The index follows files that grow, are replaced and are torn, and finds rollouts by all that they are sorted by."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.errors import LachesisError
from lachesis.figures.intervals import mean_over_items
from lachesis_console.chat.recordings import recorded_rollouts
from lachesis_messages.records.step_files import step_files
from lachesis_testing.export_suite import example_groups
from lachesis_view.audits import audits_below
from lachesis_view.curves import curves
from lachesis_view.filters import Filter, ignored
from lachesis_view.followed_files import BATCH
from lachesis_view.index import Index, NoSuchGroup
from lachesis_view.matrix import matrix
from lachesis_view.reports.verdict import verdict
from lachesis_view.single_page import templates, write_single
from tests.run import some
from tests.support.small_envs import process
from tests.support.viewed_runs import Mixed, mixed, mixed_run


@contextmanager
def indexed(root: Path) -> Iterator[Index]:
    """An index of the folder as it is now, beside it."""
    index = Index(root, root.parent / f"{root.name}.sqlite")
    try:
        index.refresh()
        yield index
    finally:
        index.close()


def found(index: Index, query: dict[str, str]) -> list[tuple[int, int]]:
    """Group and number of the rollouts that a query lists."""
    return [(row["number"], row["n"]) for row in index.rollouts(Filter.of(query)).rows]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_run(tmp_path_factory.mktemp("played"))


@pytest.fixture
def root(played: Path, tmp_path: Path) -> Path:
    shutil.copytree(played, tmp_path / "runs")
    return tmp_path / "runs"


def test_every_rollout_has_a_row_with_what_its_record_says(root: Path) -> None:
    with indexed(root) as index:
        (run,) = index.runs()
        assert (run["name"], run["environment"], run["groups"], run["rollouts"]) == ("mixed", Mixed.name, 5, 10)
        assert run["settings"]["group_size"] == 2 and run["scored"] == 8
        records = [json.loads(line) for line in (root / "mixed/groups.jsonl").read_text().splitlines()]
        rows = {(row["number"], row["n"]): row for row in index.rollouts(Filter(), 100).rows}
        for number, record in enumerate(records):
            assert index.group("mixed", number) == record
            for n, rollout in enumerate(record["rollouts"]):
                row = rows[number, n]
                same = ("reward", "outcome", "turns", "seconds")
                assert [row[name] for name in same] == [rollout[name] for name in same]
                assert row["calls"] == rollout["tool_calls"] and row["errors"] == len(rollout["tool_errors"])
        assert index.group("mixed", -1)["scores"] == [], "a group without a score"
        assert {rows[-1, n]["cause"] for n in (0, 1)} == {index.group("mixed", -1)["rollouts"][0]["unscored_kind"]}
        with pytest.raises(NoSuchGroup, match="no group 7"):
            index.group("mixed", 7)


def test_tokens_that_no_server_counted_are_unknown_and_not_0(tmp_path: Path) -> None:
    first, *others = example_groups()
    first["rollouts"][0] |= {"uncounted_requests": 2, "completion_tokens": 0}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "groups.jsonl").write_text("".join(json.dumps(group) + "\n" for group in (first, *others)))
    with indexed(tmp_path) as index:
        known = {(row["number"], row["n"]): row["tokens"] for row in index.rollouts(Filter(), 100).rows}
        assert known[0, 0] is None and all(tokens is not None for at, tokens in known.items() if at != (0, 0))
        (run,) = index.runs()
        assert run["tokens"] == sum(filter(None, known.values())) and run["counted"] == len(known) - 1


def test_counts_whose_sum_is_over_64_bits_break_no_page(tmp_path: Path) -> None:
    group = example_groups()[1]
    rollout = {**group["rollouts"][0], "completion_tokens": (1 << 53) - 1}
    (tmp_path / "groups.jsonl").write_text(json.dumps({**group, "rollouts": [rollout] * 1100}) + "\n")
    with indexed(tmp_path) as index:
        assert index.runs()[0]["tokens"] == pytest.approx(1100 * 2**53)


@pytest.mark.parametrize(
    "scores", [[[1.0, 0.0], [1.0], [None]], [[0.25], [0.5, 1.0]], [[2.0], [-1.0]], [[1.0]], [[0.5]]]
)
def test_the_reward_of_a_run_is_that_of_its_report(
    played: Path, tmp_path: Path, scores: list[list[float | None]]
) -> None:
    (line, *_) = (played / "mixed/groups.jsonl").read_text().splitlines()
    group = json.loads(line)
    groups = [
        {**group, "item_key": key, "rollouts": [{**group["rollouts"][0], "reward": reward} for reward in rewards]}
        for key, rewards in zip("abc", scores, strict=False)
    ]
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    with indexed(tmp_path) as index:
        assert str(index.runs()[0]["reward"]) == str(mean_over_items(scores))


def test_rollouts_are_filtered_and_sorted_by_what_a_row_shows(root: Path) -> None:
    with indexed(root) as index:
        good = {(number, n) for number in range(4) for n in (0, 1) if number % 2 == 0}
        assert set(found(index, {"min_reward": "1"})) == good
        assert set(found(index, {"max_reward": "0.5", "scored": "yes"})) == {(1, 0), (1, 1), (3, 0), (3, 1)}
        turns = {(row["number"], row["n"]): row["turns"] for row in index.rollouts(Filter()).rows}
        assert {*turns.values()} == {1, 2} and set(found(index, {"min_turns": "2"})) == {
            at for at in turns if turns[at] > 1
        }
        assert set(found(index, {"max_turns": "1", "min_tokens": "0"})) == {at for at in turns if turns[at] == 1}
        assert found(index, {"min_tokens": "1e9"}) == [] and Filter.of({"max_turns": "1"}).to_query() == "max_turns=1"
        assert (
            Filter.of({"min_reward": "1e300", "max_reward": "0.5"}).to_query() == "min_reward=1e%2B300&max_reward=0.5"
        )
        assert set(found(index, {"cause": "declined"})) == {(-1, 0), (-1, 1)}
        assert set(found(index, {"tool_error": "yes"})) == {(number, n) for number in (-1, 1, 3) for n in (0, 1)}
        assert found(index, {"outcome": "no such"}) == [] and found(index, {"run": "other"}) == []
        by_turns = [row["turns"] for row in index.rollouts(Filter.of({"sort": "-turns"})).rows]
        assert by_turns == sorted(by_turns, reverse=True) and len(set(by_turns)) > 1
        assert [row["reward"] for row in index.rollouts(Filter.of({"sort": "reward"})).rows][-2:] == [None, None]
        pages = [index.rollouts(Filter.of({"page": str(page)}), 4) for page in (1, 2, 3, 4)]
        assert [len(page.rows) for page in pages] == [4, 4, 2, 0] and {page.total for page in pages} == {10}
        listed = [(row["run"], row["number"], row["n"]) for row in index.rollouts(Filter()).rows]
        assert [index.neighbours(Filter(), place) for place in listed] == [
            (before, after) for before, after in zip([None, *listed], [*listed[1:], None], strict=False)
        ]


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("pear", {0, 3}),
        ("PEAR fig", {0}),
        ('"fig pear"', set()),
        ("no_such_t", {-1, 1, 3}),
        ("evil", {-1, 1, 3}),
        ('")(*', {-1, 0, 1, 2, 3}),
        ('"', {-1, 0, 1, 2, 3}),
        ("NEAR(pear fig) OR body:", set()),
        ("unscorabl", {-1}),
        ("pea", {0, 3}),
        ("p", set()),
    ],
)
def test_a_search_finds_words_in_all_messages_and_is_no_language(root: Path, query: str, numbers: set[int]) -> None:
    with indexed(root) as index:
        assert {number for number, _ in found(index, {"q": query})} == numbers


def test_a_name_of_a_megabyte_is_cut_in_lists(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    group = json.loads(path.read_text().splitlines()[0])
    for each in (group, group["rollouts"][0]):
        each |= dict.fromkeys(("environment", "model", "outcome", "unscored_kind"), "x" * 10**6)
    path.write_text(json.dumps(group) + "\n")
    with indexed(root) as index:
        assert index.rollouts(Filter(outcome="x" * 200, cause="x" * 200)).total == 1
        assert len(repr(index.runs())) + len(repr(index.choices())) < 10**4


def test_what_is_appended_is_read_and_a_half_written_line_is_left_for_later(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    *most, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(most) + last[:100])
    with indexed(root) as index:
        assert index.runs()[0]["groups"] == 4
        assert not index.refresh() and index.left == 0, "nothing is new, and nothing left: it may never be finished"
        with path.open("ab") as file:
            file.write(last[100:-1])
        assert index.refresh() and index.runs()[0]["groups"] == 5, "whole but for its end, as reports take it"
        with path.open("ab") as file:
            file.write(b"\n" + last.replace(b'item_key": "', b'item_key": "f'))
        assert index.refresh() and index.runs()[0]["rollouts"] == 12 and index.unread == 0
        assert index.group("mixed", 3) == json.loads(last) and index.group("mixed", 4)["item_key"][0] == "f"
    with indexed(root) as again, sqlite3.connect(again.path) as database:
        assert again.runs()[0]["rollouts"] == 12
        assert database.execute("SELECT max(id) FROM rollouts").fetchone() == (12,), "nothing was read twice"


async def test_a_run_says_why_rollouts_have_no_score(tmp_path: Path) -> None:
    class Raising(Mixed):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float | None:
            return {"b a pear": None}[item]

    (tmp_path / "run").mkdir()
    settings = {"total_steps": 3, "max_num_workers": 1, "enabled_toolsets": ["todo"], "max_failed_groups": 9}
    await process(Raising, tmp_path / "run", mixed, **settings)
    with indexed(tmp_path) as index:
        (why,) = index.unscored("run")
        assert (why["cause"], why["count"]) == ("environment", 6) and why["said"].startswith("KeyError: ")


def test_files_that_have_not_changed_are_not_opened_again(root: Path) -> None:
    (root / "mixed/metrics.jsonl").write_text('{"step": 0}\n')
    (root / "mixed/other.jsonl").write_text("{}\n")
    opened: list[str] | None = None

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and opened is not None and str(arguments[0]).endswith(".jsonl"):
            opened.append(Path(arguments[0]).name)

    sys.addaudithook(watch)  # stays, and has nothing to do after this test
    with indexed(root) as index:
        opened = []
        assert not index.refresh() and opened == []
        with (root / "mixed/metrics.jsonl").open("a") as file:
            file.write('{"step": 1}\n')
        opened = []
        assert index.refresh() and set(opened) == {"metrics.jsonl"}
        opened = None


def test_a_file_that_was_cut_replaced_or_removed_is_read_anew(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    with indexed(root) as index:
        path.write_bytes(lines[0])
        assert index.refresh() and index.runs()[0]["groups"] == 2
        with pytest.raises(NoSuchGroup):
            index.group("mixed", 1)
        path.unlink()
        path.write_bytes(b"".join(reversed(lines)))
        with pytest.raises(NoSuchGroup, match="load the page again"):
            index.group("mixed", 0)  # before it has been read anew
        index.refresh()
        assert index.group("mixed", 0) == json.loads(lines[-1])
        assert {number for number, _ in found(index, {"q": "pear"})} == {0, 3}, "no text is found twice"
        shutil.rmtree(root / "mixed")
        assert index.refresh() and index.runs() == [] and index.rollouts(Filter()).total == 0


def test_a_file_that_was_written_over_at_the_same_length_is_read_anew(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    key = json.loads(lines[0])["item_key"].encode()
    with indexed(root) as index:
        before = path.stat()
        with path.open("r+b") as file:  # neither its inode, its size, its ends nor its time of change differ
            file.write(b"".join([lines[0], lines[1].replace(b'"reward": 0.0', b'"reward": 7.0', 1), *lines[2:]]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        assert index.refresh() and index.rollouts(Filter(min_reward=5.0)).total == 1
        with path.open("r+b") as file:
            file.write(lines[0].replace(key, b"x" * len(key)))
        with pytest.raises(NoSuchGroup, match="load the page again"):
            index.group("mixed", 0)  # another one is there now


def test_what_is_no_file_keeps_nobody_waiting(root: Path) -> None:
    """Agents leave FIFOs in folders that are downloaded below those of runs."""
    with indexed(root) as index:
        shown = found(index, {})
    folder = next(root.rglob("groups.jsonl")).parent
    for name in ("log.jsonl", "a.failed.jsonl", "a.json", "checkpoint.json", "other.run.json"):
        os.mkfifo(folder / name)
    (folder / "rollouts").mkdir()
    os.mkfifo(folder / "rollouts/step_00001.jsonl")
    with closing(Index(root, root.parent / "anew.sqlite")) as index:
        index.refresh()
        assert found(index, {}) == shown != []
    assert audits_below(root)["audits"] == [] and step_files(folder / "rollouts") == []
    assert all(each.rollout_id for each in recorded_rollouts(folder))
    with pytest.raises(LachesisError, match="no group"):
        write_single(folder, "", "none", None)


def test_what_failed_is_shown_again_where_the_score_that_replaced_it_is_gone(root: Path) -> None:
    failed = json.loads((root / "mixed/groups.failed.jsonl").read_text())
    path = root / "mixed/groups.jsonl"
    before = path.read_bytes()
    scored = json.loads(before.splitlines()[0])
    with indexed(root) as index:
        path.write_bytes(before + json.dumps({**scored, "item_key": failed["item_key"]}).encode() + b"\n")
        index.refresh()
        assert not found(index, {"cause": "declined"})
        path.write_bytes(before)
        assert index.refresh() and found(index, {"cause": "declined"})


def test_a_rollout_that_should_have_no_reward_is_no_failure(root: Path) -> None:
    path = root / "mixed/groups.failed.jsonl"
    group = json.loads(path.read_text())
    assert {rollout["unscored_kind"] for rollout in group["rollouts"]} == {"declined"}
    group["rollouts"][1]["unscored_kind"] = "sandbox"
    path.write_text(json.dumps(group) + "\n")
    with indexed(root) as index:
        (run,) = index.runs()
        assert (run["rollouts"], run["scored"], run["declined"]) == (10, 8, 1)
        assert found(index, {"scored": "no"}) == [(-1, 1)] and found(index, {"cause": "declined"}) == [(-1, 0)]
        assert [(each["cause"], each["count"]) for each in index.unscored("mixed")] == [("sandbox", 1)]
        charts = {chart["title"]: chart["lines"] for chart in curves(index, ["mixed"], "groups")}
        assert [line["label"] for line in charts["why unscored, share"]] == ["sandbox"]
        why = {row["item"]: row["why"] for row in matrix(index, "mixed")["rows"]}
        assert [("no score: sandbox", 1)] in why.values() and "declined" not in str(why)


def test_two_files_of_one_name_show_each_group_once(root: Path) -> None:
    source = (root / "mixed/groups.jsonl").read_bytes()
    (root / "mixed/x").mkdir()
    (root / "mixed/x/groups.jsonl").write_bytes(source)
    (root / "mixed/x.jsonl").write_bytes(source)
    with indexed(root) as index:
        assert index.rollouts(Filter(runs=("mixed/x",))).total == 8
        (root / "mixed/x.jsonl").unlink()
        index.refresh()
        for row in index.rollouts(Filter()).rows:
            assert index.group(row["run"], row["number"])


def test_a_file_that_grows_while_it_is_read_lets_others_have_their_turn(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    line = json.dumps({**json.loads(path.read_text().splitlines()[0]), "pad": "x" * BATCH}) + "\n"
    looks = []

    def changed() -> None:
        looks.append(1)
        with path.open("a") as file:
            file.write(line)
        if len(looks) == 5:
            index.stop()

    path.write_text(line * 2)
    with closing(Index(root, root.parent / "runs.sqlite")) as index:
        index.refresh(changed)
    assert len(looks) < 5


def files_after(draw: Any, root: Path, lines: Mapping[str, list[bytes]]) -> None:
    """Change one of the files of `lines` in some way."""
    name = draw(st.sampled_from(sorted(lines)))
    path = root / name
    text = b"".join(draw(st.lists(st.sampled_from([*lines[name], b"nonsense\n", b"\n"]), min_size=1, max_size=4)))
    text = text[: draw(st.sampled_from([len(text), len(text), len(text) // 2]))]
    match draw(st.sampled_from(["grow", "grow", "cut", "write over", "replace", "rename", "delete", "remove"])):
        case "cut" if path.exists():
            os.truncate(path, draw(st.integers(0, path.stat().st_size)))
        case "replace":
            path.with_suffix(".new").write_bytes(text)
            path.with_suffix(".new").replace(path)
        case "rename" if path.exists():
            path.rename(path.with_name(f"other-{path.name}"))
        case "delete":
            path.unlink(missing_ok=True)
        case "remove":
            shutil.rmtree(path.parent)
            path.parent.mkdir()
        case how:
            with path.open("wb" if how == "write over" else "ab") as file:
                file.write(text)


def all_of(index: Index) -> Any:
    """All that pages show of a folder, but the names of environments and models."""
    rows = [dict(row) for row in index.rollouts(Filter(sort="run"), 1000).rows]
    runs = [{name: run[name] for name in run.keys() - {"environment", "model", "evaluation"}} for run in index.runs()]
    runs.sort(key=lambda run: str(run["name"]))
    groups = [index.group(row["run"], row["number"]) for row in rows]
    found = sorted((row["run"], row["number"], row["n"]) for row in index.rollouts(Filter(q="pear"), 1000).rows)
    return repr((rows, runs, groups, found, index.unread, curves(index, [run["name"] for run in runs], "step")))


@pytest.mark.slow
@settings(max_examples=some(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_happens_to_files_an_index_says_what_a_new_one_says(played: Path, data: st.DataObject) -> None:
    scored = (played / "mixed/groups.jsonl").read_bytes().splitlines()
    failed = (played / "mixed/groups.failed.jsonl").read_bytes().splitlines()
    later = json.dumps({**json.loads(scored[0]), "item_key": json.loads(failed[0])["item_key"]}).encode()
    steps = [json.dumps({"step": at, "timestamp": at, "train/loss": at}).encode() for at in (1, 2)]
    names = ("a/groups.jsonl", "a/groups.failed.jsonl", "b/groups.jsonl", "b/metrics.jsonl")
    # Of distinct lengths: what grows and is written over in its middle between two looks is taken for grown.
    lines = {
        name: [line + b" " * 50 * at + b"\n" for at, line in enumerate(found)]
        for name, found in zip(names, ([*scored, later], failed, scored, steps), strict=True)
    }
    with TemporaryDirectory() as folder:
        root = Path(folder, "runs")
        for name in "ab":
            (root / name).mkdir(parents=True)
        with closing(Index(root, Path(folder, "index.sqlite"))) as index:
            for at in range(data.draw(st.integers(1, 8))):
                files_after(data.draw, root, lines)
                index.refresh()
                with closing(Index(root, Path(folder, f"new-{at}.sqlite"))) as new:
                    new.refresh()
                    assert all_of(index) == all_of(new)


def test_an_index_that_is_deleted_or_damaged_is_made_anew(root: Path) -> None:
    with indexed(root) as index:
        path = index.path
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        assert index.refresh() and index.rollouts(Filter()).total == 10
    whole = path.read_bytes()
    for damaged in (whole[:100], whole[:20_000], whole[:4096] + b"\xff" * (len(whole) - 4096)):
        path.write_bytes(damaged)
        with indexed(root) as index:
            assert index.rollouts(Filter()).total == 10
    path.write_bytes(whole)
    with closing(sqlite3.connect(path)) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rollouts'").fetchone()
    path.write_bytes(whole[: 4096 * (page - 1)] + b"\xff" * 4096 + whole[4096 * page :])
    with indexed(root) as index:
        with pytest.raises(sqlite3.DatabaseError) as error:
            index.runs()
        index.report(error.value)
        assert index.refresh() and index.rollouts(Filter(q="pear")).total == 4


def test_an_index_of_another_folder_or_version_is_made_anew_unless_a_viewer_uses_it(root: Path) -> None:
    other = root.parent / "other"
    shutil.copytree(root / "mixed", other / "mine")
    path = root.parent / "index.sqlite"
    with closing(Index(root, path)) as index:
        index.refresh()
        with pytest.raises(LachesisError, match="another viewer uses it"):
            Index(other, path)
    with closing(Index(other, path)) as index:
        assert index.runs() == [], "nothing of the other folder"
    with closing(sqlite3.connect(path)) as database:
        database.executescript("PRAGMA user_version = 1; DROP TABLE rollouts; CREATE TABLE rollouts (other)")
    with closing(Index(other, path)) as index:
        assert index.refresh() and index.rollouts(Filter()).total == 10


def test_a_database_of_something_else_is_left_alone(root: Path) -> None:
    path = root.parent / "notes.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript("CREATE TABLE notes (text); INSERT INTO notes VALUES ('precious')")
    before = path.read_bytes()
    with pytest.raises(LachesisError, match="it is not an index of the viewer"):
        Index(root, path)
    assert path.read_bytes() == before


def test_a_viewer_takes_over_where_the_one_that_followed_the_files_ended(root: Path) -> None:
    path = root.parent / "index.sqlite"
    first, second = Index(root, path), Index(root, path)
    first.refresh()
    second.refresh()
    assert not second.refresh(), "the first one follows the files"
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    second.refresh()
    assert first.refresh() or second.refresh(), "one of them reads the files again"
    assert first.runs()[0]["groups"] == second.runs()[0]["groups"] == 5
    first.close()
    with (root / "mixed/groups.jsonl").open("ab") as file:
        file.write((root / "mixed/groups.jsonl").read_bytes().splitlines(keepends=True)[0])
    assert second.refresh() and second.runs()[0]["groups"] == 6
    second.close()


def test_an_index_that_was_ended_in_the_middle_of_a_file_goes_on_there(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    line = path.read_bytes().splitlines()[0]
    group = json.loads(line)
    path.write_bytes(b"".join(json.dumps({**group, "pad": "x" * BATCH}).encode() + b"\n" for _ in range(3)))
    index = Index(root, root.parent / "runs.sqlite")
    index.refresh(index.stop)
    assert index.rollouts(Filter()).total < 8
    index.close()
    with indexed(root) as index:
        assert index.rollouts(Filter()).total == 8 and index.left == 0


def test_an_index_is_closed_when_the_thread_that_reads_has_ended(root: Path) -> None:
    index = Index(root, root.parent / "runs.sqlite")
    reads, goes_on = threading.Event(), threading.Event()

    def changed() -> None:
        reads.set()
        goes_on.wait()

    with ThreadPoolExecutor() as threads:
        refresh = threads.submit(index.refresh, changed)
        reads.wait()
        closing = threads.submit(index.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        goes_on.set()
        assert refresh.result()
        closing.result()


def test_lines_that_are_no_groups_are_counted_and_keep_their_numbers(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    first, second, *_ = path.read_bytes().splitlines(keepends=True)
    surrogate = json.dumps({**json.loads(second), "item_key": "half \ud83d"}).encode() + b"\n"
    odd: list[Any] = [b"{}\n", b"nonsense\n", b"[" * 100_000 + b"\n", b'{"rollouts": [{}]}\n', b"\n", surrogate]
    path.write_bytes(b"".join([first, *odd, second]))
    with indexed(root) as index:
        assert index.unread == 4
        assert index.group("mixed", 7) == json.loads(second)
        assert [number for number, n in found(index, {"min_reward": "-9"}) if n == 0] == [7, 6, 0]


def test_lines_of_a_wrong_type_hide_nothing_else_and_the_first_line_says_not_what_a_file_is(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    good = json.loads(path.read_text().splitlines()[0])
    odd: list[Any] = [10**30, -1, float("nan"), True, None, [], [None], {"a": [1]}, "", "half \ud83d\0"]
    names = (*good["rollouts"][0], "rollouts", "timestamp", "environment", "model", "item_key", "messages")
    wrong = [
        {**good, "item_key": f"{name}-{at}"}
        | ({name: value} if name in good else {"rollouts": [good["rollouts"][0], {**good["rollouts"][0], name: value}]})
        for name in names
        for at, value in enumerate(odd)
    ]
    lines = [{}, good, *wrong, {**good, "item_key": "last"}]
    path.write_text("nonsense\n" + "".join(json.dumps(line) + "\n" for line in lines))
    steps = [{"step": at, "timestamp": at, "train/loss": value} for at, value in enumerate([1.5, *odd])]
    steps += [{**steps[0], name: value} for name in ("step", "timestamp") for value in odd]
    (root / "mixed/metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (root / "mixed/groups.run.json").write_text('{"settings": {"nan": NaN, "half": "\\ud83d"}}')
    with indexed(root) as index:
        listed = {(row["number"], row["n"]): row for row in index.rollouts(Filter(), 10_000).rows}
        assert {(2, 0), (2, 1), (len(lines), 1)} <= listed.keys() and index.unread > 100
        assert all((number, 0) in listed for number, _ in listed), "a line is shown whole, or not at all"
        (run,) = index.runs()
        assert run["rollouts"] == len(listed) and run["settings"]["half"] == "\ud83d"
        kinds = {
            "reward": (float, type(None)),
            "seconds": (float, type(None)),
            "turns": int,
            "tokens": (int, type(None)),
            "outcome": str,
        }
        assert all(isinstance(row[name], kind) for row in listed.values() for name, kind in kinds.items())
        for over in ("groups", "time", "step"):
            charts = orjson.loads(orjson.dumps(curves(index, ["mixed"], over)))
            values = [y for chart in charts for line in chart["lines"] for y in line["y"]]
            assert values and all(y is None or isinstance(y, int | float) for y in values)


def test_components_and_metrics_have_means_and_curves_whatever_their_names_and_values_are(root: Path) -> None:
    path = root / "mixed/groups.jsonl"
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    odd = {"nan": float("nan"), "text": "1", "none": None, "vast": 10**400, "over": 1e101}
    odd |= {"half \ud83d\0": 0.5, "": True}
    for at, group in enumerate(groups):
        for rollout in group["rollouts"]:
            rollout["reward_weights"] = {"right": 0.25}
            rollout["metrics"] = {"reward/right": at, "turns": 3e99, "outcomes, share": 2.0, **(odd if at else {})}
    groups[-1]["rollouts"][0]["metrics"] = [1]
    groups[-1]["rollouts"][1]["metrics"] = {f"{name}{'x' * 999}": 1 for name in range(200)}
    shutil.copytree(root / "mixed", root / "other")
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    with indexed(root) as index:
        assert index.unread == 0
        means = {
            name: [(each.mean if count else None, count) for each, count in of]
            for name, _, of in index.measured(["mixed", "other"])
        }
        assert [*means] == index.metric_names(["mixed", "other"])
        assert [*means][:3] == ["reward/right", "metric/outcomes, share", "metric/turns"], "most frequent first"
        assert means["reward/right"] == [(1.0, 6), (None, 0)] and means["metric/turns"] == [(3e99, 6), (None, 0)]
        assert means["metric/half ? "] == [(0.5, 4), (None, 0)] and means["metric/"] == [(1.0, 4), (None, 0)]
        assert not means.keys() & {f"metric/{name}" for name in ("nan", "text", "none", "vast", "over")}
        assert len(means) == 5 + 50 and max(map(len, means)) == 200
        shown = {name: (weight, of) for name, weight, of in index.measured(["other", "mixed"])}
        assert [*shown] == [*means], "the same, in the same order"
        weight, (none, right) = shown["reward/right"]
        assert (weight, none[0].items, none[1]) == (0.25, 0, 0), "of the last run"
        assert (right[0].mean, right[0].items, right[1]) == (1.0, 3, 6) and right[0].low < 1.0 < right[0].high
        assert math.isnan(shown["metric/turns"][1][1][0].low), "no interval: there may be many"
        charts = {chart["title"]: chart for chart in curves(index, ["mixed", "other"], "groups")}
        assert sorted(charts["reward/right"]["lines"][0]["y"], key=str) == [0, 1, 2, None, None]
        assert [line["run"] for line in charts["reward/right"]["lines"]] == ["mixed"], "the other run has none"
        assert charts["turns"]["lines"][0]["y"] != charts["metric/turns"]["lines"][0]["y"]
        assert not charts["metric/outcomes, share"]["share"] and charts["outcomes, share"]["share"]
        assert sum(title.startswith(("reward/", "metric/")) for title in charts) == 12


@pytest.mark.parametrize(
    "manifest",
    [
        *(b"[]", b'{"settings": [1]}', b"[" * 100_000, b"7", b"\xff", b"{}"),
        b'{"settings": {"deep": ' + b"[" * 200_000 + b"]" * 200_000 + b"}}",
    ],
)
def test_a_manifest_that_is_none_hides_no_run(root: Path, manifest: bytes) -> None:
    (root / "mixed/groups.run.json").write_bytes(manifest)
    with indexed(root) as index:
        assert index.runs()[0]["settings"] == {} and index.rollouts(Filter()).total == 10


def test_a_group_that_was_scored_at_last_replaces_its_failure(root: Path) -> None:
    failed = json.loads((root / "mixed/groups.failed.jsonl").read_text())
    with indexed(root) as index:
        assert found(index, {"cause": "declined"})
        scored = json.loads((root / "mixed/groups.jsonl").read_text().splitlines()[0])
        with (root / "mixed/groups.jsonl").open("a") as file:
            file.write(json.dumps({**scored, "item_key": failed["item_key"]}) + "\n")
        index.refresh()
        assert not found(index, {"cause": "declined"}) and index.runs()[0]["groups"] == 5


def test_an_item_that_failed_at_every_start_is_one_group_as_its_last_start_left_it(root: Path) -> None:
    settings = {"total_steps": 5, "max_num_workers": 1, "enabled_toolsets": ["todo"]}
    with indexed(root) as index:
        result = asyncio.run(process(Mixed, root / "mixed", mixed, **settings))
        first, last = map(json.loads, (root / "mixed/groups.failed.jsonl").read_text().splitlines())
        assert first["item_key"] == last["item_key"] and index.refresh()
        (run,) = index.runs()
        summary = result.summary
        assert (run["groups"], run["rollouts"], run["scored"]) == (summary.groups, summary.rollouts, summary.scored)
        assert found(index, {"cause": "declined"}) == [(-2, 0), (-2, 1)] and index.group("mixed", -2) == last
        with pytest.raises(NoSuchGroup):
            index.group("mixed", -1)


def test_runs_have_the_names_of_their_folders_and_a_second_one_that_of_its_file(root: Path) -> None:
    (root / "deep/er/eval").mkdir(parents=True)
    source = (root / "mixed/groups.jsonl").read_bytes()
    for name in (
        "deep/er/groups.jsonl",
        "deep/er/other.jsonl",
        "deep/er/eval/samples.jsonl",
        "deep/er/eval.jsonl",
        "runs/groups.jsonl",
        "groups.jsonl",
        "top.jsonl",
        ".no/x.jsonl",
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(source)
    (root / "deep/er/trajectory_samples.jsonl").write_text('{"conversations": []}\n')
    steps = [{"step": at, "timestamp": 5e9 + at, "train/reward": at / 2, "train/staleness/mean": 1} for at in range(2)]
    (root / "deep/metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    with indexed(root) as index:
        runs = {run["name"]: run for run in index.runs()}
        names = {"deep/er", "deep/er/other", "deep/er/eval", "deep/er/eval.jsonl", "runs", "runs itself"}
        assert set(runs) == names | {"deep", "mixed", "runs itself/top"}
        assert {runs[name]["rollouts"] for name in names} == {8}, "no run has lines of two files"
        assert next(iter(runs)) == "deep" and runs["deep"]["steps"] == 2
        charts = {chart["title"]: chart["lines"] for chart in curves(index, ["deep", "mixed"], "step")}
        assert charts["reward"][0]["x"] == [0, 1] and charts["reward"][0]["y"] == [0.0, 0.5]
        assert charts["staleness, policy versions"][0]["run"] == "deep"
        over = {chart["title"]: chart["lines"] for chart in curves(index, ["mixed"], "groups")}
        (reward,) = over["reward"]
        assert sorted(y for y in reward["y"] if y is not None) == [0.0, 0.0, 1.0, 1.0] and len(reward["x"]) == 5
        causes = {
            title: [line["label"] for line in over[title]] for title in over if "cause" in title or "why" in title
        }
        assert causes == {}, "no reward is missing"
        shares = [line["y"] for line in over["outcomes, share"]]
        assert {line["kind"] for line in over["outcomes, share"]} == {"done"}, "the class of its colour in bars"
        assert [sum(column) for column in zip(*shares, strict=True)] == [1.0] * 5


def test_the_reward_of_a_training_run_is_that_of_its_last_steps_as_its_report_has_it(root: Path) -> None:
    steps: list[dict[str, Any]] = [
        {"step": at, "train/reward": at / 20, "train/reward_low": at / 20 - 0.1, "train/reward_high": at / 20 + 0.1}
        for at in range(10)
    ]
    steps += [{"step": 10 + at, "train/loss": 1.0} for at in range(9)]
    (root / "mixed/metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    with indexed(root) as index:
        (run,) = index.runs()
        assert (run["last_steps"], run["reward"].items) == (2, 2) and run["scored"] == 8
        said = f"{run['reward']}".removesuffix(", 95 % interval")
        assert said == "0.425 [0.354, 0.496]" and f"{said} in the last 2 steps" in verdict(steps, {})[0]
        page = templates().page("runs.html.jinja", runs=[run], axis=(0, 1), root="")
        assert 'title="0.425 [0.354, 0.496], 95 % interval of 2 steps"' in page
        assert '<span class="quiet">last 2 steps</span>' in page


def test_a_warm_start_is_shown_as_one_by_the_reference_policy_and_counts_the_steps_that_it_trained(root: Path) -> None:
    folder = root / "run/warm-start"
    shutil.copytree(root / "mixed", folder)
    steps: list[dict[str, Any]] = [{"step": 0, "eval/loss": 1.0, "train/tokens": 0}]
    steps += [{"step": at, "train/loss": 0.5, "train/tokens": 9} for at in (1, 2)]
    for file in (folder, root / "files"):
        file.mkdir(exist_ok=True)
        (file / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    with indexed(root) as index:
        page = templates().page("runs.html.jinja", runs=index.runs(), axis=(0, 1), root="")
        assert '<span class="quiet">warm start · mixed · reference policy · 2 steps</span>' in page
        assert '<span class="quiet">training on files · 2 steps</span>' in page


def test_a_folder_or_an_index_that_cannot_be_used_is_named(root: Path) -> None:
    with pytest.raises(LachesisError, match=r"there is no file or folder .*; name the folder"):
        Index(root / "none")
    (root.parent / "file").write_text("no database, but long enough to be looked at as one" * 20)
    with pytest.raises(LachesisError, match="cannot be written"):
        Index(root, root.parent / "file")


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"reward": "abc"}, "reward is no filter: use min_reward and max_reward, with numbers"),
        ({"min_reward": "abc"}, "min_reward=abc is not a number, and is ignored"),
        ({"run": "nope"}, "there is no run nope; there are one, two"),
        ({"outcome": "done"}, "there is no outcome done; there are completed"),
        ({"cause": "x"}, "there is no cause x"),
        ({"scored": "maybe"}, "scored=maybe is ignored: it is yes or no"),
        ({"sort": "size"}, "sort=size is ignored: it is one of reward, outcome"),
        ({"runs": "one"}, "runs is no filter; the filters are run, outcome, cause, tag, min_reward, max_reward"),
    ],
)
def test_what_an_address_asks_for_in_vain_is_said_with_what_is_allowed(query: dict[str, str], said: str) -> None:
    known = {"run": ["one", "two"], "outcome": ["completed"], "cause": [""], "tag": []}
    (found,) = ignored(query, known)
    assert found.startswith(said)
    empty = dict.fromkeys(("q", "run", "min_reward", "scored", "sort", "item", "page", "tag"), "")
    assert ignored(empty, known) == [], "a form sends empty fields too"
