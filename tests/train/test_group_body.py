"""What the rollout API takes as a group, and what it hands out of it."""

from __future__ import annotations

import json
import math
import random

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_train.api import group_body
from lachesis_train.api.group_body import FIELDS, read_group, read_groups
from lachesis_train.group_encoding import GroupError
from tests.support.fake_serving import payload

MARKS = b'[]{}",:\\ 0-.eE1nN'
numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8"))
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)


@given(
    anything, st.lists(st.dictionaries(texts, anything, max_size=3), min_size=2, max_size=2), st.sampled_from([0, 2])
)
def test_a_group_is_handed_out_as_it_came_with_null_for_what_it_lacks(value, overrides, indent):
    group = {**payload(1), "images": value, "overrides": overrides, "unknown": value, "env_id": 3}
    body = json.dumps(group, indent=2 if indent else None, ensure_ascii=indent).encode()
    read = read_group(body)
    expected = {name: group.get(name) for name in FIELDS}
    assert orjson.loads(b"".join(read.pieces)) == expected
    assert (read.sequences, read.tokens, read.env_id, read.group_id) == (2, 80, 3, None)
    (of_list,) = read_groups(b" [ %b ] " % body)
    assert orjson.loads(b"".join(of_list.pieces)) == expected


@given(st.data())
def test_whatever_comes_is_refused_or_leaves_valid_json_with_equal_lengths(data):
    """A group that is taken cannot spoil the batch that it is in."""
    body = bytearray(json.dumps({**payload(1, length=4), "images": [{"a": ["]", '"']}]}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 2))] = bytes([data.draw(st.sampled_from(MARKS))])
    try:
        read = read_group(bytes(body))
    except GroupError:
        return
    group = orjson.loads(b"".join(read.pieces))
    lengths = [len(row) for row in group["tokens"]]
    assert min(lengths) > 0
    for name in ("masks", "inference_logprobs"):
        assert group[name] is None or [len(row) for row in group[name]] == lengths
    assert all(isinstance(token, int) for row in group["tokens"] for token in row)


def test_long_sequences_are_parsed_in_slices():
    length = group_body._SLICE // 2  # numbers of several bytes each
    group = payload(1, length=length)
    read = read_group(json.dumps(group).encode())
    assert read.tokens == 2 * length
    assert orjson.loads(b"".join(read.pieces))["inference_logprobs"] == group["inference_logprobs"]
    row = ",".join(["1"] * length)
    for bad in (f"{row},", f",{row}", f"{row},,{row}", f"{row} 1", f"{row},-"):
        with pytest.raises(GroupError, match=r"tokens\[0\]"):
            read_group(b'{"tokens":[[%b]],"masks":[[1]],"scores":[1]}' % bad.encode())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": []}, "tokens contains no sequence"),
        ({"tokens": [[1], []]}, r"tokens\[1\] is empty"),
        ({"tokens": [[1], [True]]}, r"tokens\[1\] contains something that is not an integer: 'true'"),
        ({"tokens": [[1], [1.5]]}, r"tokens\[1\] contains something that is not an integer"),
        ({"tokens": [[1], 2]}, r"tokens\[1\] is not a list of numbers"),
        ({"tokens": None}, "tokens is missing"),
        ({"masks": [[1] * 40]}, "masks holds 1 sequences, tokens 2"),
        ({"masks": [[1] * 40, [1] * 39]}, r"masks\[1\] has 39 positions, tokens\[1\] 40"),
        ({"inference_logprobs": [[math.nan] * 40] * 2}, r"inference_logprobs\[0\] contains something .* 'NaN"),
        ({"advantages": [[None] * 40] * 2}, r"advantages\[0\] contains something that is not a finite number"),
        ({"scores": [1.0, math.inf]}, "scores is not JSON with finite numbers"),
        ({"scores": [1.0]}, "scores holds 1 entries, tokens 2"),
        ({"scores": ["1", "2"]}, "scores is not a list of finite numbers"),
        ({"messages": [[{"role": "user"}]] * 2}, r"messages\[0\] contains something without a role and a content"),
        ({"env_id": "0"}, "env_id is '0'"),
        ({"group_overrides": []}, "group_overrides is not an object"),
    ],
)
def test_a_group_that_trainers_fail_over_is_refused_by_name(change, reason):
    with pytest.raises(GroupError, match=reason):
        read_group(json.dumps({**payload(1), **change}).encode())


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"tokens"', b'{"tokens":', b'{"a":1,}', b'{"a" 1}', b"{1:2}"]
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(GroupError):
        read_group(body)


def test_deep_nesting_is_refused_in_time():
    with pytest.raises(GroupError, match="values within 100 others"):
        read_group(b'{"images":' + b"[" * 5_000_000)


def test_the_id_and_the_begin_of_a_group_are_found():
    read = read_group(json.dumps({**payload(1), "group_overrides": {"group_id": "x", "begin_step": 7}}).encode())
    assert (read.group_id, read.begin_step, read.scores) == ("x", 7, (0.0, 1.0))


def test_random_bytes_are_refused():
    draw = random.Random(1)
    for _ in range(200):
        with pytest.raises(GroupError):
            read_group(draw.randbytes(50))
