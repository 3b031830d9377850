"""Where the time of a rollout went: what its record says, laid out end to end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_testing.export_suite import example_groups
from lachesis_view.html.rollout import rollout_view
from lachesis_view.html.times import time_view


def view(group: dict[str, Any], **more: Any) -> Any:
    rollout = {**group["rollouts"][0], **more}
    return time_view(rollout, rollout_view(group, rollout)["branches"])


def example() -> dict[str, Any]:
    """A rollout of two turns, of which the first calls a tool."""
    group: dict[str, Any] = json.loads(json.dumps(example_groups()[0]))
    return group


CALLED = {"seconds": 0.25}
REWARD = [{"method": "read_file", "arguments": ["x"], "seconds": 0.1, "reward": "right"}]


def test_turns_follow_each_other_and_the_totals_are_those_of_the_rollout() -> None:
    group = example()
    calls = {message["tool_call_id"]: CALLED for message in group["messages"][0] if message["role"] == "tool"}
    shown = view(group, calls=calls, reward_calls=REWARD, seconds=2.0)
    assert [row["label"] for row in shown["rows"]] == [*range(len(shown["rows"]) - 1), "reward"]
    assert dict(shown["totals"]) == pytest.approx(
        {"model": 1.0, "tools": 0.25, "waiting": 0.25, "reward": 0.1, "rest": 0.4}
    )
    kind, begin, width, text = shown["rows"][0]["bars"][0]
    assert (kind, begin, width, text) == ("model", 0.0, 25.0, "model: 0.50 s")
    assert shown["rows"][0]["bars"][1][:3] == ("tool", 25.0, 12.5)
    assert shown["rows"][1]["bars"][0][1] == 25.0 + 12.5 * len(calls), "after the calls before it"
    assert shown["rows"][0]["tokens"] == (10, 3) and shown["lacking"] == ""


def test_what_an_older_record_lacks_is_said_and_the_rest_is_shown() -> None:
    group = example()
    completions = {**group["rollouts"][0]["completions"], "tokens": [7, 9]}
    old = {name: value for name, value in completions.items() if name not in ("seconds", "usage")}
    shown = view(group, completions=old)
    assert shown["lacking"] == "the time of each completion" and dict(shown["totals"])["model"] == 1.0
    assert [row["tokens"] for row in shown["rows"]][:2] == [(None, 7), (None, 9)]
    without = dict.fromkeys(("completions", "seconds", "seconds_in_model", "seconds_own"))
    assert view(group, **without) is None, "nothing to show: a trainer's file"


def test_a_failed_call_is_red_and_a_sub_agent_begins_where_its_call_does() -> None:
    group = example()
    (called, *_) = (message["tool_call_id"] for message in group["messages"][0] if message["role"] == "tool")
    chat = {
        "messages": [{"role": "user", "content": "look"}, {"role": "assistant", "content": "a tower"}],
        "message_turns": [None, 2],
        "calls": {},
        "discarded": [],
    }
    completions = {**group["rollouts"][0]["completions"], "seconds": [1.0, 1.0, 0.5]}
    calls = {called: {"seconds": 2.0, "failed": True, "subagent": chat}}
    shown = view(group, completions=completions, calls=calls, seconds=10.0)
    by_kind = {row["label"]: row for row in shown["rows"]}
    assert [bar[0] for bar in by_kind[0]["bars"]] == ["model", "failed"]
    assert by_kind[2]["kind"] == "subagent" and by_kind[1]["bars"][0][1] == 30.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=2), st.floats(0, 1e6), st.floats(0, 1e6))
def test_no_bar_leaves_the_drawing(took: list[float], called: float, whole: float) -> None:
    group = example()
    completions = {**group["rollouts"][0]["completions"], "seconds": took}
    calls = {
        message["tool_call_id"]: {"seconds": called} for message in group["messages"][0] if message["role"] == "tool"
    }
    for row in view(group, completions=completions, calls=calls, seconds=whole)["rows"]:
        for _, begin, width, _ in row["bars"]:
            assert 0 <= begin <= 100.01 and 0 < width <= 100.01 and begin + width <= 100.7
