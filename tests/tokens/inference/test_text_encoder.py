"""Texts are encoded as the tokenizer itself encodes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.history import MessageHistory
from lachesis_testing.fake_server import fake_tokenizer
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.prompts.text_encoder import TextEncoder

TOKENIZER = fake_tokenizer()
ENCODER = TextEncoder(TOKENIZER)
BUILDER = PromptBuilder(TOKENIZER)
PIECES = st.one_of(
    st.text(max_size=12), st.sampled_from([*ENCODER.added, " word", "123", "\n\n", "don't", "é🙂", "\u0301"])
)


@given(st.lists(PIECES, max_size=8).map("".join))
def test_ids_are_those_of_the_tokenizer(text: str) -> None:
    assert ENCODER.encode(text) == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert ENCODER.encode(text) == TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids


@given(st.lists(st.integers(0, 40), max_size=60))
def test_a_first_prompt_is_the_same_whatever_was_asked_for_before(items: list[int]) -> None:
    for item in items:
        history = MessageHistory([{"role": "user", "content": f"item {item}"}])
        rendered = TOKENIZER.apply_chat_template(list(history), add_generation_prompt=True, tokenize=False)
        assert BUILDER.prompt(history.nodes()).prefix.ids == ENCODER.encode(rendered)
    assert BUILDER._first_ids.cache_info().currsize <= 16
