"""Items drawn by their signal: as often as the lines say, none starved, and after a kill as if there had been none."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.figures.item_keys import item_digest
from lachesis.runs.failures import UnusableSettings
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import FakeServer, ToolUser
from lachesis_tokens.samples.group_shapes import group_problems, samples_from_atropos
from lachesis_train.item_pools import FLOOR, REMEMBERED, RETURN, ItemPools, PooledItem
from lachesis_train.signal_rates import SignalRates
from tests.run import some
from tests.support.own_api import OwnApi, own_api
from tests.support.token_trees import UNTIMED
from tests.support.training_runs import CoinToss, serving, trained, with_tokens

__all__ = ["own_api"]


class Stream:
    """Items 0, 1, ... up to `count`, over and over if it cycles."""

    def __init__(self, count: int, *, cycles: bool = False) -> None:
        self.count, self.cycles, self.at = count, cycles, 0

    async def __call__(self) -> dict[str, int] | None:
        self.at += 1
        return {"n": (self.at - 1) % self.count} if self.cycles or self.at <= self.count else None


def pools(path: Path, stream: Any, done: Collection[str] = (), **changes: Any) -> ItemPools:
    found = ItemPools(stream, path, **{"seed": 3, "new_share": 0.5, "most": 1000, **changes})
    found.open(done)
    return found


def rewards_of(key: str, rate: Callable[[str], float] = lambda digest: int(digest, 16) % 5 / 4) -> list[float | None]:
    """Those of a group of four, always the same for a key."""
    chance = random.Random(key)
    return [float(chance.random() < rate(key.partition("-")[0])) for _ in range(4)]


@given(st.lists(st.lists(st.floats(-1, 2), min_size=1, max_size=8), max_size=7))
def test_the_signal_is_the_variance_with_two_rollouts_that_nobody_played(groups: list[list[float]]) -> None:
    item = PooledItem("x")
    for at, rewards in enumerate(groups):
        item.note(f"x-{at}", rewards)
    last = [reward for rewards in groups[-REMEMBERED:] for reward in rewards]
    assert item.signal == pytest.approx(max(FLOOR, np.var([0.0, 1.0, *last])), rel=1e-9)
    if set(last) <= {0.0, 1.0}:
        p = (sum(last) + 1) / (len(last) + 2)
        assert item.signal == pytest.approx(max(FLOOR, p * (1 - p)), rel=1e-9)


def test_a_solved_item_keeps_the_least_signal() -> None:
    item = PooledItem("x")
    item.note("x-1", [1.0] * 200)
    assert item.signal == FLOOR > np.var([0.0] + [1.0] * 201)


async def test_an_item_that_never_has_a_reward_is_drawn_no_oftener_than_a_solved_one(tmp_path: Path) -> None:
    run = pools(tmp_path / "d", Stream(32))
    declined = {item_digest({"n": number}) for number in (3, 11)}
    for _ in range(600):
        key = run.key(await run.next_item())
        await run.finished(key, [None] * 4 if key.partition("-")[0] in declined else [1.0] * 4)
    run.close()
    again = pools(tmp_path / "d", Stream(32))
    for each in (run, again):
        assert {each.items[digest].signal for digest in declined} == {FLOOR}
        assert {each.items[digest].pool for digest in declined} == {"new"}
    drawn = Counter(line["key"].partition("-")[0] for line in read_lines(tmp_path / "d") if "draw" in line)
    assert sum(drawn[digest] for digest in declined) < 2 * 2 / 32 * 600


def test_pools_are_named_by_the_rate() -> None:
    for rewards, name in (([0, 0], "unsolved"), ([0, 0, 0, 1], "hard"), ([0, 1], "medium"), ([1, 1, 1, 0], "easy")):
        item = PooledItem("x")
        assert item.pool == "new"
        item.note("x-1", [float(reward) for reward in rewards])
        assert item.pool == name
    item.note("x-1", [1.0, 1.0])
    assert item.pool == "solved"


async def play(run: ItemPools, draws: int) -> list[str]:
    """Draw and finish, one after the other; the keys."""
    keys = []
    for _ in range(draws):
        item = await run.next_item()
        keys.append(key := run.key(item))
        assert key.partition("-")[0] == item_digest(item)
        await run.finished(key, rewards_of(key))
    return keys


async def test_each_draw_states_its_probability_given_what_was_known(tmp_path: Path) -> None:
    """Every probability is computed again from the lines before it; those of all items add up to 1."""
    run = pools(tmp_path / "draws.jsonl", Stream(12), new_share=0.25)
    await play(run, 300)
    known: dict[str, dict[str, list[float]]] = {}
    last: dict[str, int] = {}
    through, kinds = False, Counter[str]()
    for line in read_lines(tmp_path / "draws.jsonl"):
        if "through" in line:
            through = True
            continue
        digest = line["key"].partition("-")[0]
        if "rewards" in line:
            known[digest][line["key"]] = line["rewards"]
            continue
        signals = {}
        for each, groups in known.items():
            rewards = [reward for group in list(groups.values())[-REMEMBERED:] for reward in group]
            signals[each] = max(FLOOR, float(np.var([0.0, 1.0, *rewards])))
        share = 0.0 if through else 0.25 if known else 1.0
        if line.get("new"):
            assert line["probability"] == pytest.approx(share)
            known[digest] = {}
        elif line.get("overdue"):
            assert line["draw"] - last[digest] >= (RETURN - 1) * len(known)
            assert last[digest] == min(last.values()) and line["probability"] == 1
        else:
            assert line["probability"] == pytest.approx((1 - share) * signals[digest] / sum(signals.values()))
        kinds["new" if line.get("new") else "overdue" if line.get("overdue") else "again"] += 1
        last[digest] = line["draw"]
    assert kinds["new"] == 12 and kinds["again"] > 200 and kinds["overdue"]


@pytest.mark.slow
@settings(UNTIMED, max_examples=some(20))
@given(st.integers(1, 12), st.booleans(), st.integers(0, 5), st.floats(0.05, 0.9))
def test_every_item_enters_and_none_is_starved(count: int, cycles: bool, seed: int, new_share: float) -> None:
    """One item has all of the signal; the others are solved from the first group on."""
    first = item_digest({"n": 0})
    with TemporaryDirectory() as folder:

        async def run() -> list[str]:
            found = pools(Path(folder) / "d", Stream(count, cycles=cycles), seed=seed, new_share=new_share)
            keys = []
            for _ in range(30 * count + 60):
                keys.append(key := found.key(await found.next_item()))
                await found.finished(key, [0.0, 1.0] * 8 if key.startswith(first) else [1.0] * 16)
            return keys

        keys = [key.partition("-")[0] for key in asyncio.run(run())]
    assert len(set(keys)) == count
    seen: dict[str, int] = {}
    for at, digest in enumerate(keys):
        if digest in seen:
            assert at - seen[digest] <= RETURN * count
        seen[digest] = at
    assert all(len(keys) - at <= RETURN * count for at in seen.values())
    if count > 3:
        assert Counter(keys)[first] > 1.5 * len(keys) / count


async def flown(path: Path, ends: Sequence[int], draws: int, seed: int, **of_pools: Any) -> list[dict[str, Any]]:
    """Draws with up to three groups in flight, which finish in an order of chance, in a run that is killed at these
    events. A killed start leaves half a line; where a group was finished, its rewards, but no group in the outbox. The
    lines of its draws."""
    done: set[str] = set()
    stops, run = set(ends), pools(path, Stream(9), done, **of_pools)
    chance, flying = random.Random(seed), list[str]()
    total = event = 0
    while total < draws or flying:
        event += 1
        draws_one = total < draws and (not flying or (len(flying) < 3 and chance.random() < 0.5))
        key = "" if draws_one else chance.choice(flying)
        if event in stops:
            if key:
                await run.finished(key, rewards_of(key))
            run.close()
            with path.open("ab") as file:
                file.write(b'{"draw": 1, "ke')
            run = pools(path, Stream(9), done, **of_pools)
            assert [run.key(await run.next_item()) for _ in flying] == flying
        if draws_one:
            flying.append(run.key(await run.next_item()))
            total += 1
        else:
            await run.finished(key, rewards_of(key))
            flying.remove(key)
            done.add(key)
    return [line for line in read_lines(path) if "draw" in line]


@pytest.mark.slow
@settings(UNTIMED, max_examples=some(20))
@given(st.sets(st.integers(1, 150), max_size=4), st.integers(0, 1000), st.sampled_from([4, 1000]))
def test_a_run_that_ended_anywhere_goes_on_as_if_it_had_not(ends: set[int], seed: int, most: int) -> None:
    with TemporaryDirectory() as folder:
        whole = asyncio.run(flown(Path(folder) / "whole", [], 80, seed, most=most))
        parts = asyncio.run(flown(Path(folder) / "parts", sorted(ends), 80, seed, most=most))
    assert parts == whole


async def killed(path: Path) -> None:
    """Draws and finishes three groups at a time, and waits for a line after each, until somebody kills it."""
    run = pools(path, Stream(9), [line.strip() for line in iter(sys.stdin.readline, "\n")])
    flying: list[str] = []
    while True:
        flying += [run.key(await run.next_item()) for _ in range(3 - len(flying))]
        await run.finished(key := flying.pop(0), rewards_of(key))
        print(key, flush=True)
        sys.stdin.readline()


@pytest.mark.slow
def test_a_killed_run_draws_what_one_that_was_not_killed_draws(tmp_path: Path) -> None:
    command = "import asyncio, sys, pathlib, tests.train.test_item_pools as t; asyncio.run(t.killed(pathlib.Path(%r)))"
    files = []
    for name, starts in (("whole", [60]), ("parts", [7, 1, 20, 32])):
        done: list[str] = []
        for groups in starts:
            child = [sys.executable, "-c", command % str(tmp_path / name)]
            with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.writelines(f"{key}\n" for key in done)
                for _ in range(groups):
                    process.stdin.write("\n")
                    process.stdin.flush()
                    done.append(process.stdout.readline().strip())
                process.kill()
        lines = read_lines(tmp_path / name, torn_tail=True)
        files.append([line for line in lines if "draw" in line][:60])
    assert len(files[0]) == 60 and files[0] == files[1]


async def test_a_full_pool_gives_the_place_of_the_least_signal_to_a_new_item(tmp_path: Path) -> None:
    run = pools(tmp_path / "d", Stream(10**6), most=5, new_share=0.9)
    for _ in range(5):
        key = run.key(await run.next_item())
        await run.finished(key, [1.0] * 16 if len(run.items) == 2 else [0.0, 1.0])
    solved = next(digest for digest, item in run.items.items() if item.pool == "solved")
    while solved in run.items:
        await run.next_item()
    assert len(run.items) == 5
    run.close()
    assert pools(tmp_path / "d", Stream(10**6), most=5).items.keys() == run.items.keys()


async def test_an_item_in_flight_keeps_its_place(tmp_path: Path) -> None:
    run = pools(tmp_path / "d", Stream(10**6), most=3)
    first = run.key(await run.next_item())
    run.items[first.partition("-")[0]].note("earlier", [1.0] * 16)
    for _ in range(20):
        if (key := run.key(await run.next_item())) != first:
            await run.finished(key, [0.0, 1.0])
    assert len(run.items) == 3 and first.partition("-")[0] in run.items


async def test_keys_of_a_start_without_pools_are_not_used_again(tmp_path: Path) -> None:
    digest = item_digest({"n": 0})
    run = pools(tmp_path / "d", Stream(1), {f"{digest}-1", f"{digest}-2", f"{digest}-4"})
    assert await play(run, 3) == [f"{digest}-{number}" for number in (3, 5, 6)]


@pytest.mark.parametrize("item", [{"a": (1, 2)}, {1: "a"}, np.zeros(2)])
async def test_items_that_would_come_back_as_something_else_are_refused(tmp_path: Path, item: Any) -> None:
    async def stream() -> Any:
        return item

    with pytest.raises(UnusableSettings, match="item_sampling"):
        await pools(tmp_path / "d", stream).next_item()


async def test_a_stream_without_items_ends_the_run(tmp_path: Path) -> None:
    assert await pools(tmp_path / "d", Stream(0)).next_item() is None


class OfThree(CoinToss):
    """Three items: one that is solved, one that never is, and one that sometimes is."""

    async def setup(self) -> None:
        self.left = ["some 2", "never 1", "solved 0"]

    async def get_next_item(self) -> Any:
        return self.left.pop() if self.left else None

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 1.0 if "solved" in item else 0.0 if "never" in item else float(ctx.task_id.split("-")[2] == "0")


async def test_groups_say_how_their_item_was_drawn_over_two_starts(tmp_path: Path, own_api: OwnApi) -> None:
    async with own_api.wiped() as api, FakeServer(ToolUser()) as model:
        server = with_tokens(model, tmp_path)
        chosen: dict[str, Any] = {"item_sampling": "difficulty", "target_signal_rate": 0.9}
        groups = []
        for _ in range(2):
            env = serving(tmp_path, api, server, OfThree, **chosen)
            groups += (await trained(env, api, groups=6, steps=3)).groups
    lines = [line for line in read_lines(tmp_path / "spool" / "draws.jsonl") if "draw" in line]
    assert [line["draw"] for line in lines] == list(range(len(lines)))
    by_draw = {line["draw"]: line for line in lines}
    assert len(groups) == 12
    for group in groups:
        about = group["group_overrides"]["item_draw"]
        assert about.items() <= by_draw[about["draw"]].items() and 0 < about["probability"] <= 1
        assert group_problems(group, samples_from_atropos(group)) == []
        assert set(group["scores"]) == {0.0, 1.0}
    drawn = Counter(line["key"].partition("-")[0] for line in lines)
    assert len(drawn) == 3 and drawn.most_common(1)[0][0] == item_digest("some 2")
    assert re.search(r"signal in 0\.\d\d of groups \(target 0\.90\)", (tmp_path / "console.txt").read_text())


def test_the_rate_of_signals_is_shown_by_item_beside_its_target() -> None:
    rates = SignalRates(0.75)
    assert not list(rates.rows()) and rates.rate is None
    keys = [f"{item}-{number}" for number in range(16) for item in "abcd"]
    of: dict[str, list[float | None]] = {"a": [1.0, 0.0], "b": [0.5, 0.5], "c": [0.0, None], "d": [1.0, 2.0, None]}
    for key in keys + keys:
        rates.add(key, of[key[0]])
    assert rates.rate == pytest.approx(2 / 3)
    assert dict(rates.rows()) == {
        "signal": "signal in 0.67 of groups (target 0.75), the last 96 of this start",
        "by item": "2 of 3 items had a signal in every group, 1 in none (b 0 of 32)",
    }


@pytest.mark.slow
async def test_pools_raise_the_share_of_groups_with_a_signal(tmp_path: Path) -> None:
    """One item in eight is neither solved nor too hard. The figures are those of the same groups, played uniformly."""
    hard = {item_digest({"n": number}): number % 8 for number in range(64)}
    rate = {0: 0.5, 1: 0.0, 2: 1.0, 3: 0.0, 4: 1.0, 5: 0.0, 6: 1.0, 7: 0.0}
    rates = {"uniform": SignalRates(), "difficulty": SignalRates()}
    run = pools(tmp_path / "d", Stream(64))
    for draw in range(1024):
        key = run.key(await run.next_item())
        rewards = rewards_of(key, lambda digest: rate[hard[digest]])
        await run.finished(key, rewards)
        rates["difficulty"].add(key, rewards)
        key = f"{list(hard)[draw % 64]}-{draw // 64 + 1}"
        rates["uniform"].add(key, rewards_of(key, lambda digest: rate[hard[digest]]))
    uniform, difficulty = rates["uniform"].rate or 0.0, rates["difficulty"].rate or 0.0
    assert uniform < 0.15 and difficulty > 2 * uniform
