"""The texts of tokens are taken out of an answer before it is parsed, and nothing that is read goes with them."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from lachesis_tokens.engines.shortening import without_token_texts

TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(['"tokens":[', '},"finish_reason":', '"}],"', "\\", '\\"', '"token_ids":', ',"tokens":[', "]},"]),
)


def choice(index: int, texts: list[str]) -> dict[str, Any]:
    """A choice as vLLM orders it."""
    logprobs = {
        "text_offset": [0] * len(texts),
        "token_logprobs": [-0.5] * len(texts),
        "tokens": texts,
        "top_logprobs": [{text: -0.5} for text in texts],
    }
    return {
        "index": index,
        "text": "".join(texts),
        "logprobs": logprobs,
        "finish_reason": "stop",
        "token_ids": list(range(len(texts))),
    }


def read(body: dict[str, Any]) -> Any:
    return json.loads(without_token_texts(orjson.dumps(body)))


def without_texts(body: dict[str, Any]) -> dict[str, Any]:
    """What is read of an answer."""
    kept: dict[str, Any] = json.loads(json.dumps(body))
    for found in kept["choices"]:
        found["logprobs"].pop("top_logprobs", None)
        found["logprobs"].pop("tokens", None)
    return kept


@given(st.lists(st.lists(TEXTS, max_size=6), min_size=1, max_size=3))
def test_all_but_the_texts_is_as_it_was(sampled: list[list[str]]) -> None:
    body = {"choices": [choice(index, texts) for index, texts in enumerate(sampled)], "usage": {"prompt_tokens": 1}}
    found = read(body)
    assert without_texts(found) == without_texts(body)


def test_the_texts_are_not_parsed() -> None:
    found = read({"choices": [choice(0, ["a", "b"]), choice(1, ["c"])]})
    assert [found["choices"][at]["logprobs"].get("tokens") for at in (0, 1)] == [None, None]
    assert all("top_logprobs" not in one["logprobs"] for one in found["choices"])


@given(
    st.permutations(["text_offset", "token_logprobs", "tokens", "top_logprobs"]),
    st.permutations(["index", "text", "logprobs", "finish_reason", "token_ids"]),
    st.lists(st.lists(TEXTS, max_size=3), min_size=1, max_size=3),
)
def test_in_another_order_nothing_that_is_read_is_lost(
    inner: list[str], outer: list[str], sampled: list[list[str]]
) -> None:
    choices = []
    for index, texts in enumerate(sampled):
        full = choice(index, texts)
        full["logprobs"] = {name: full["logprobs"][name] for name in inner}
        choices.append({name: full[name] for name in outer})
    expected = {"choices": choices}
    for one in (found := read(expected))["choices"]:
        for name in ("token_ids", "index", "finish_reason"):
            assert name in one
        assert "token_logprobs" in one["logprobs"]
    for one, same in zip(found["choices"], choices, strict=True):
        assert [one[name] for name in ("token_ids", "index", "finish_reason")] == [
            same[name] for name in ("token_ids", "index", "finish_reason")
        ]
        assert one["logprobs"]["token_logprobs"] == same["logprobs"]["token_logprobs"]


def test_another_form_comes_back_as_it_is() -> None:
    spaced = json.dumps({"choices": [choice(0, ["a"])]}).encode()
    assert without_token_texts(spaced) is spaced
