"""The prompt that a server repeats is taken out of its answer where it is the one that was sent, and only there."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.engines.shortening import ECHOED, without_echo

NAME = "prompt_token_ids"
IDS = st.lists(st.integers(0, 130), max_size=4)


def field(ids: list[int]) -> bytes:
    return f'"{NAME}":'.encode() + orjson.dumps(ids)


def read(raw: bytes, sent: list[int]) -> Any:
    return json.loads(without_echo(raw, f'"{NAME}":'.encode(), pieces(sent)))


def pieces(sent: list[int]) -> list[bytes | memoryview]:
    """The prompt as its first turn and a later one hold it."""
    return TokenPrefix(sent[:2]).extend(sent[2:]).json_pieces()


@given(st.lists(IDS, min_size=1, max_size=4), IDS, st.text(max_size=20))
def test_what_repeats_the_prompt_is_marked_and_all_else_is_as_it_was(
    echoed: list[list[int]], sent: list[int], text: str
) -> None:
    body = {"choices": [{"text": text, NAME: ids, "token_ids": sent} for ids in echoed]}
    expected = {
        "choices": [{**choice, NAME: ECHOED if choice[NAME] == sent else choice[NAME]} for choice in body["choices"]]
    }
    assert read(orjson.dumps(body), sent) == expected


def test_a_prompt_that_only_begins_alike_stays() -> None:
    assert read(orjson.dumps({NAME: [1, 23]}), [1, 2]) == {NAME: [1, 23]}


def test_text_that_spells_the_field_stays() -> None:
    body = {"text": field([1, 2]).decode(), NAME: [1, 2]}
    assert read(orjson.dumps(body), [1, 2]) == {**body, NAME: ECHOED}


def test_an_answer_that_repeats_nothing_is_not_copied() -> None:
    raw = orjson.dumps({"token_ids": [1, 2]})
    assert without_echo(raw, b'"prompt_token_ids":', pieces([1, 2])) is raw
