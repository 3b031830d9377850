"""Toolset distributions: independent draws, never empty, the same for the same key."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_tools import TOOLSETS, ToolsetError
from lachesis_tools.distributions import DISTRIBUTIONS, draw_toolsets
from lachesis_tools.toolsets import PROVIDED_TOOLSETS, REMOVED_TOOLSETS


def everything(_: str) -> bool:
    return True


def test_every_named_toolset_is_ours_or_known_to_be_missing() -> None:
    named = {toolset for chances in DISTRIBUTIONS.values() for toolset in chances}
    assert named <= {*TOOLSETS, *PROVIDED_TOOLSETS, *REMOVED_TOOLSETS}
    assert not REMOVED_TOOLSETS & {*TOOLSETS, *PROVIDED_TOOLSETS}
    assert all(0 < percent <= 100 for chances in DISTRIBUTIONS.values() for percent in chances.values())


@given(st.sampled_from(sorted(DISTRIBUTIONS)), st.text())
def test_a_draw_is_never_empty_and_the_same_for_the_same_key(name: str, key: str) -> None:
    drawn = draw_toolsets(name, key, exists=everything)
    assert drawn and set(drawn) <= set(DISTRIBUTIONS[name])
    assert drawn == draw_toolsets(name, key, exists=everything)
    certain = {toolset for toolset, percent in DISTRIBUTIONS[name].items() if percent == 100}
    assert certain <= set(drawn)


def test_toolsets_are_drawn_independently_with_their_percentages() -> None:
    draws = [draw_toolsets("development", str(number), exists=everything) for number in range(4000)]
    counts = Counter(toolset for drawn in draws for toolset in drawn)
    for toolset, percent in DISTRIBUTIONS["development"].items():
        assert counts[toolset] / 40 == pytest.approx(percent, abs=4)
    both = sum({"terminal", "file"} <= set(drawn) for drawn in draws)
    assert both / 40 == pytest.approx(64, abs=4)


def test_where_none_is_drawn_the_likeliest_that_exists_is_taken() -> None:
    drawn = {tuple(draw_toolsets("reasoning", str(n), exists=lambda name: name == "terminal")) for n in range(50)}
    assert drawn == {("terminal",)}


def test_what_cannot_be_drawn_says_why() -> None:
    with pytest.raises(ToolsetError, match="'browser_only': none of its toolsets exists here"):
        draw_toolsets("browser_only", "key", exists=lambda _: False)
    with pytest.raises(ToolsetError, match="did you mean 'terminal_only'"):
        draw_toolsets("terminal_onli", "key", exists=everything)
