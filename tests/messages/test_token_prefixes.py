"""Token ids read the same in every form in which a prefix holds them."""

from __future__ import annotations

import json
import math
import threading
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.tokens import SampledTokens, TokenPrefix, digest_of
from tests.support.token_trees import UNTIMED

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=6)
ASKS = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["json", "digest", "own_ids"])), max_size=12)


def chain(pieces: list[list[int]]) -> list[TokenPrefix]:
    found = [TokenPrefix(pieces[0])]
    for piece in pieces[1:]:
        found.append(found[-1].extend(piece))
    return found


@UNTIMED
@given(st.lists(IDS, min_size=1, max_size=5), ASKS)
def test_answers_do_not_depend_on_earlier_questions(pieces: list[list[int]], asks: list[tuple[int, str]]) -> None:
    prefixes = chain(pieces)
    for place, ask in asks:
        prefix = prefixes[place % len(prefixes)]
        if ask == "json":
            prefix.to_json()
        elif ask == "digest":
            _ = prefix.digest
        else:
            _ = prefix.own_ids
    so_far: list[int] = []
    for prefix, own in zip(prefixes, pieces, strict=True):
        so_far = so_far + own
        assert (prefix.own_ids, prefix.own_length) == (own, len(own))
        assert (prefix.ids, prefix.length) == (so_far, len(so_far))
        assert prefix.to_json() == json.dumps(so_far, separators=(",", ":")).encode()
        assert b"".join(prefix.json_pieces()) == prefix.to_json()
        assert prefix.digest == digest_of(so_far)


def test_branches_of_a_sent_prompt_have_separate_digests() -> None:
    root = TokenPrefix([1, 2])
    root.to_json()
    one, other = root.extend([3]), root.extend([4])
    one.to_json()
    assert one.ids == [1, 2, 3]
    assert other.digest == digest_of([1, 2, 4])
    assert one.digest == digest_of([1, 2, 3])
    assert root.digest == digest_of([1, 2])


def test_the_text_of_a_long_prompt_is_shared_by_all_that_continue_it() -> None:
    prompt = TokenPrefix(range(100_000))
    texts = [max(prompt.extend([turn]).json_pieces(), key=len) for turn in range(3)]
    assert len(texts[0]) > 500_000
    assert all(text.obj is texts[0].obj for text in texts)


def test_a_digest_is_found_after_thousands_of_pieces() -> None:
    prefixes = chain([[turn] for turn in range(5000)])
    assert prefixes[-1].digest == digest_of(range(5000))
    assert prefixes[2500].digest == digest_of(range(2501))


def test_threads_read_a_prefix_at_the_same_time() -> None:
    wrong: list[str] = []
    for _ in range(50):
        prefixes = chain([list(range(at, at + 200)) for at in range(0, 4000, 200)])
        last = prefixes[-1]
        together = threading.Barrier(4)

        def read(number: int, last: TokenPrefix = last, together: threading.Barrier = together) -> None:
            together.wait()
            if number % 2:
                last.to_json()
            if last.ids != list(range(4000)):
                wrong.append("ids")
            if last.digest != digest_of(range(4000)):
                wrong.append("digest")

        readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert not wrong


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["1"], [None]])
def test_a_value_that_is_not_an_id_is_rejected_at_once(ids: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids must be whole numbers"):
        TokenPrefix(ids)  # type: ignore[arg-type]


@UNTIMED
@given(st.lists(st.floats(width=64), max_size=20))
def test_logprobs_are_kept_to_the_last_bit(values: list[float]) -> None:
    tokens = SampledTokens.sample(TokenPrefix([1]), range(len(values)), values)
    logprobs = tokens.logprobs
    assert array("d", logprobs).tobytes() == array("d", values).tobytes()
    assert array("d", logprobs[1:]).tobytes() == array("d", values[1:]).tobytes()
    assert all(math.copysign(1, logprobs[at]) == math.copysign(1, value) for at, value in enumerate(values))


@pytest.mark.parametrize("wrong", ["-1.0", None, [-1.0]])
def test_a_logprob_that_is_no_number_is_rejected_at_once(wrong: object) -> None:
    with pytest.raises(TypeError):
        SampledTokens.sample(TokenPrefix([1]), [2], [wrong])  # type: ignore[list-item]


def test_pieces_know_their_parents() -> None:
    prefixes = chain([[1], [2], [3]])
    assert all(child.parent is parent for parent, child in pairwise(prefixes))
    assert list(prefixes[-1].lineage()) == prefixes[::-1]
