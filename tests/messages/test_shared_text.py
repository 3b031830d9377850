"""A text that grows is, for everyone who holds a part of it, the text that it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.shared_text import SharedText
from lachesis_messages.tokens import TokenPrefix
from tests.support.token_trees import UNTIMED

STEPS = st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=5), st.booleans()), max_size=20)


@UNTIMED
@given(st.binary(max_size=5), STEPS)
def test_every_branch_keeps_its_own_text_also_while_others_are_read(
    first: bytes, steps: list[tuple[int, bytes, bool]]
) -> None:
    text = SharedText(first)
    texts, plain, read = [(text, len(first))], [first], []
    for place, more, reading in steps:
        (text, end), said = texts[place % len(texts)], plain[place % len(plain)]
        texts.append(text.extended(end, more))
        plain.append(said + more)
        if reading:  # a request that is being sent
            read.append((said, text.pieces(end)))
    assert [b"".join(text.pieces(end)) for text, end in texts] == plain
    assert all(b"".join(pieces) == said for said, pieces in read)


def test_a_prompt_is_one_piece_after_any_number_of_turns() -> None:
    prefix = TokenPrefix([1])
    for turn in range(500):
        assert b"".join(prefix.json_pieces()).endswith(b"]")  # sent
        prefix = prefix.extend([turn, turn]).extend([7])
    assert len(prefix.json_pieces()) == 3
