"""The short way to read arguments takes nothing that the careful one refuses, and finds the same keys."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.loop.turn_check import _usual_json
from lachesis_messages.markup import load_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ALMOST = st.text(alphabet='{}[]":,0123456789eE+-.NaInfity\\ud80\x00 ', max_size=24)


@given(VALUES.map(json.dumps) | ALMOST | ALMOST.map(lambda text: f'{{"a":{text}}}'))
def test_what_is_taken_would_be_taken_by_the_other(text: str) -> None:
    found = _usual_json(text)
    if found is not None:
        assert load_json(text).keys() == found.keys()


@pytest.mark.parametrize(
    "text",
    ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[1]", '{"a": 1', '{"a":' * 101 + "1" + "}" * 101],
)
def test_the_rest_is_left_to_the_other(text: str) -> None:
    assert _usual_json(text) is None


def test_usual_arguments_are_taken() -> None:
    assert _usual_json('{"query": "a", "limit": 3}') == {"query": "a", "limit": 3}
