"""An item that fails alike while others are answered is broken; what fails for all is the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.loop.broken_items import ALIKE, BrokenItems
from lachesis.runs.failures import RunStopped
from tests.core.runs.test_refused import Questions, of_item
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import make

LOST = "sandbox 1-0-{} is gone"


def test_an_item_is_broken_after_so_many_failures_alike_while_others_are_answered() -> None:
    items = BrokenItems()
    items.answered("good-1")
    found = [items.failed("bad-1", LOST.format(f"{number:04x}1")) for number in range(ALIKE)]
    assert found == [False] * (ALIKE - 1) + [True]
    assert items.failed("bad-2", LOST.format("9")), "the same item in the next round of the data"


def test_where_nothing_was_answered_it_is_the_server() -> None:
    items = BrokenItems()
    assert not any(items.failed("bad-1", "503") for _ in range(10 * ALIKE))
    items.answered("good-1")
    assert items.failed("bad-1", "503")


def test_an_outage_that_meets_others_as_well_breaks_no_item() -> None:
    items = BrokenItems()
    items.answered("a-1")
    for number in range(10 * ALIKE):
        assert not items.failed("a-1" if number % 2 else "b-1", f"no connection, attempt {number}")


def test_two_broken_items_do_not_excuse_each_other() -> None:
    items = BrokenItems()
    for _ in range(ALIKE):
        items.failed("a-1", "gone")
        items.failed("b-1", "gone")
    items.answered("good-1")
    assert items.failed("a-1", "gone") and items.failed("b-1", "gone")


@pytest.mark.parametrize("between", ["another reason", "an answer"])
def test_failures_that_are_not_alike_in_a_row_start_anew(between: str) -> None:
    items = BrokenItems()
    items.answered("good-1")
    for _ in range(ALIKE - 1):
        items.failed("a-1", "gone")
    if between == "an answer":
        items.answered("a-1")
    else:
        items.failed("a-1", "full")
    assert not items.failed("a-1", "gone")


def fails(number: str) -> Any:
    return lambda request: 500 if number in json.dumps(request["messages"]) else say("Done.")


async def test_a_run_goes_on_without_a_broken_item_and_counts_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"total_steps": 4, "group_size": 4, "max_infra_retries": 9, "enabled_toolsets": []}
    async with ScriptedServer(fails("number 1")) as server:
        env = make(Questions, server, tmp_path, max_failed_groups=1, max_num_workers=1, **settings)
        result = await env.process_manager()
    failed = sum("number 1" in json.dumps(request["messages"]) for request in server.requests)
    assert ALIKE <= failed <= ALIKE + 4, "those in flight end on their own"
    assert result.summary.outcomes["completed"] == 12
    kinds = [rollout["unscored_kind"] for rollout in of_item(tmp_path, 1)]
    assert "broken_item" in kinds and {rollout["reward"] for rollout in of_item(tmp_path, 1)} == {None}
    assert any("1 item left out as broken" in line for line in result.warnings())
    assert "broken_item" in (tmp_path / "groups.html").read_text()


async def test_a_server_that_fails_for_all_ends_the_run(tmp_path: Path) -> None:
    async with ScriptedServer(fails("number")) as server:
        env = make(Questions, server, tmp_path, total_steps=4, group_size=4, max_infra_retries=9, max_failed_groups=1)
        with pytest.raises(RunStopped, match="without a scored rollout"):
            await env.process_manager()
