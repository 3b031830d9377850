from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import ADDED, BPE, SPECIAL, sentencepiece_like, spelled

from tests.run import some
from tool_call_parsers.tokens import Aligned, TokenMap, TokenStream

LLAMA = sentencepiece_like()
BPE_MAP, LLAMA_MAP = TokenMap(BPE), TokenMap(LLAMA)
ADDED_VOCABULARY: dict[str, int] = BPE.get_added_vocab()
RAW_BYTES = {
    name: BPE.convert_tokens_to_ids(name) for name in "ĤģðŁâĢïé"
}  # single bytes, most of them parts of characters


def ids(*parts: str) -> list[int]:
    """Token ids: a special token where a part is one, else ordinary tokens; "=" in front forces the latter."""
    out: list[int] = []
    for part in parts:
        if part in ADDED_VOCABULARY:
            out.append(ADDED_VOCABULARY[part])
        else:
            out.extend(spelled(part.removeprefix("=")))
    return out


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check(aligned: Aligned, count: int) -> None:
    """The rules for every alignment."""
    assert len(aligned.masked) == len(aligned.text)
    assert aligned.unmask(aligned.masked) == aligned.text
    assert len(aligned.starts) == count + 1
    assert aligned.starts[-1] == len(aligned.text)
    assert aligned.starts == sorted(aligned.starts)
    first, last = aligned.token_span(0, len(aligned.text))
    assert all(aligned.starts[k] == 0 for k in range(first))
    assert all(aligned.starts[k] == len(aligned.text) for k in range(last, count))


@given(st.lists(st.integers(0, len(BPE) - 1), max_size=12), st.lists(st.integers(0, len(LLAMA) - 1), max_size=12))
def test_ids_say_what_the_tokenizer_decodes(of_bpe: list[int], of_llama: list[int]) -> None:
    for tokens, token_ids in ((BPE_MAP, of_bpe), (LLAMA_MAP, of_llama)):
        aligned = tokens.align(None, token_ids)
        assert aligned.text == decode(tokens.tokenizer, token_ids)
        same = tokens.align(aligned.text, token_ids)
        assert (same.masked, same.starts) == (aligned.masked, aligned.starts)
        assert same.token_span(0, len(same.text)) == aligned.token_span(0, len(same.text))


def test_real_special_tokens_stay_and_spelled_ones_are_masked() -> None:
    token_ids = ids("say ", "=<tool_call>", " then", "<tool_call>", '\n{"a": 1}\n', "</tool_call>")
    aligned = BPE_MAP.align(None, token_ids)
    assert aligned.text == 'say <tool_call> then<tool_call>\n{"a": 1}\n</tool_call>'
    assert aligned.masked.count("<tool_call>") == 1
    assert aligned.masked.index("<tool_call>") == len("say <tool_call> then")
    assert aligned.masked.endswith('<tool_call>\n{"a": 1}\n</tool_call>')
    assert aligned.unmask(aligned.masked[4:15]) == "<tool_call>"
    assert aligned.unmask(aligned.masked[7:12]) == aligned.text[7:12]
    check(aligned, len(token_ids))


def test_a_token_span_is_the_smallest_that_covers_the_characters() -> None:
    token_ids = ids("é🙂 x", "<tool_call>", "y", "</tool_call>", "z")
    aligned = BPE_MAP.align(None, token_ids)
    at = aligned.text.index("<tool_call>")
    first, last = aligned.token_span(at, at + len("<tool_call>y</tool_call>"))
    assert token_ids[first] == ADDED_VOCABULARY["<tool_call>"]
    assert token_ids[last - 1] == ADDED_VOCABULARY["</tool_call>"]
    assert aligned.token_span(at, at + 1) == (first, first + 1)
    assert aligned.token_span(at, at)[0] == aligned.token_span(at, at)[1]


def test_a_marker_assembled_from_sub_tokens_is_text() -> None:
    """vllm#58315: grammars accept it, parsers on ids do not. It does not count as the marker."""
    aligned = BPE_MAP.align(None, ids("=<", "=tool", "=_call", "=>", "<|im_end|>"))
    assert "<tool_call>" in aligned.text
    assert "<tool_call>" not in aligned.masked
    assert aligned.masked.endswith("<|im_end|>")


def test_a_marker_partly_of_special_tokens_is_broken_and_they_are_not() -> None:
    aligned = BPE_MAP.align(None, ids("=<|im_st", "=art|>", "<|a", "=b|>", "b|>"))
    assert aligned.masked[12:15] == "<|a"
    assert aligned.masked.endswith("b|>")
    assert aligned.masked.count("b|>") == 1
    assert "<|im_start|>" not in aligned.masked


def test_added_words_and_blanks_are_never_masked() -> None:
    aligned = BPE_MAP.align(None, ids("=a\n\nb  word", "\n\n", "word"))
    assert aligned.masked == aligned.text == "a\n\nb  word\n\nword"
    assert BPE_MAP.is_special(ADDED_VOCABULARY["word"])


def test_characters_over_several_tokens() -> None:
    token_ids = [token_id for character in "a🙂b" for byte in character.encode() for token_id in _byte(byte)]
    assert len(token_ids) == 6
    aligned = BPE_MAP.align("a🙂b", token_ids)
    assert aligned.starts == [0, 1, 1, 1, 1, 2, 3]
    assert [aligned.token_span(k, k + 1) for k in range(3)] == [(0, 1), (1, 5), (5, 6)]
    check(aligned, 6)


def _byte(byte: int) -> list[int]:
    text = next(name for name, value in _byte_alphabet().items() if value == byte)
    return [BPE.convert_tokens_to_ids(text)]


def _byte_alphabet() -> dict[str, int]:
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + k): byte for k, byte in enumerate(hidden)}


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 5000])
def test_broken_bytes_and_genuine_replacement_characters(count: int) -> None:
    broken = _byte(0xF0) * count + ids("x", "<tool_call>") + spelled("\ufffd") * count + ids("</tool_call>")
    aligned = BPE_MAP.align(None, broken)
    assert aligned.text == decode(BPE, broken)
    assert aligned.masked == aligned.text
    at = aligned.text.index("<tool_call>")
    first, last = aligned.token_span(at, at + 11)
    assert broken[first:last] == [ADDED_VOCABULARY["<tool_call>"]]
    check(aligned, len(broken))


def test_decoding_work_is_linear_in_broken_bytes() -> None:
    class Counting:
        def __init__(self) -> None:
            self.tokens = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(BPE, name)

        def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
            self.tokens += len(token_ids)
            return decode(BPE, token_ids)

    work = []
    for count in (2000, 8000):
        tokenizer = Counting()
        tokens = TokenMap(tokenizer)
        tokenizer.tokens = 0
        tokens.align(None, _byte(0xF0) * count)
        work.append(tokenizer.tokens)
    assert work[1] < 5 * work[0]


def test_a_character_cut_off_at_the_end_may_be_missing_from_the_text() -> None:
    token_ids = ids("ab", "<tool_call>") + _byte(0xF0) + _byte(0x9F)
    for text in ("ab<tool_call>\ufffd", "ab<tool_call>"):
        aligned = BPE_MAP.align(text, token_ids)
        assert aligned.text == aligned.masked == text
        assert aligned.token_span(2, 13) == (len(token_ids) - 3, len(token_ids) - 2)
        check(aligned, len(token_ids))


@pytest.mark.parametrize("text", ["abX", "ab", "abcd", ""])
def test_ids_of_another_text_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"token_ids do not decode.*character") as caught:
        BPE_MAP.align(text, ids("=abc"))
    assert repr("abc") in str(caught.value)


def test_ids_have_to_be_integers() -> None:
    with pytest.raises(TypeError, match="token_ids"):
        BPE_MAP.align("a", ["a"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="token_ids"):
        BPE_MAP.align(None, [-1])


@pytest.mark.parametrize("tokenizer", [object(), None, type("T", (), {"decode": lambda self, token_ids: ""})()])
def test_an_unsuitable_tokenizer_is_rejected(tokenizer: Any) -> None:
    with pytest.raises(TypeError, match="tokenizer"):
        TokenMap(tokenizer)


def test_a_plain_tokenizers_tokenizer_will_do() -> None:
    token_ids = ids("=<think>", "<think>", "🙂")
    assert TokenMap(BPE._tokenizer).align(None, token_ids).masked == BPE_MAP.align(None, token_ids).masked


def test_private_use_characters_of_the_text_survive() -> None:
    text = "\U000f0000\U00100000\U000f0001 <think> \U00100000\U0010fffd"
    aligned = BPE_MAP.align(text, ids("=" + text))
    assert aligned.text == text
    assert aligned.unmask(aligned.masked) == text
    assert aligned.unmask(aligned.masked[5:9]) == text[5:9]
    assert "<think>" not in aligned.masked


def test_a_sentencepiece_decoder_drops_the_first_blank_only() -> None:
    name = LLAMA.convert_tokens_to_ids
    token_ids = [name("▁the"), name("▁"), name("tool"), name("<tool_call>"), name("▁the"), name("<0xE2>")]
    token_ids += [name("<0x82>"), name("<0xAC>"), name("<0x0A>"), name("<"), name("tool"), name("_"), name("call")]
    token_ids += [name(">"), name("</tool_call>")]
    text = "the tool<tool_call> the€\n<tool_call></tool_call>"
    for given_text in (None, text, " " + text):
        aligned = LLAMA_MAP.align(given_text, token_ids)
        assert aligned.text.lstrip() == text
        assert aligned.masked.count("<tool_call>") == 1
        euro = aligned.text.index("€")
        assert aligned.token_span(euro, euro + 1) == (5, 8)
        check(aligned, len(token_ids))


def test_byte_tokens_that_spoil_their_neighbours() -> None:
    """A fallback decoder rejects a whole run of bytes that is not UTF-8, with the newlines in it."""
    name = LLAMA.convert_tokens_to_ids
    token_ids = [name("a"), *map(name, ["<0xE2>", "<0x82>", "<0xAC>", "<0x0A>", "<0xE2>"]), name("<think>"), name("b")]
    aligned = LLAMA_MAP.align(None, token_ids)
    assert aligned.text == decode(LLAMA, token_ids)
    assert aligned.text.count("\ufffd") == 5
    at = aligned.text.index("<think>")
    assert aligned.token_span(at, at + 7) == (6, 7)
    assert aligned.token_span(0, 1) == (0, 1)
    check(aligned, len(token_ids))


def test_a_decoder_that_joins_tokens_freely_is_aligned_at_its_special_tokens() -> None:
    names = {0: "<think>", 1: "</think>", 2: "it", 3: " 's", 4: " ."}

    class Joining:
        def get_added_vocab(self) -> dict[str, int]:
            return {"<think>": 0, "</think>": 1}

        def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
            return "".join(names[k] for k in token_ids).replace(" 's", "'s").replace(" .", ".")

    tokens = TokenMap(Joining())
    aligned = tokens.align(None, [2, 3, 0, 2, 4, 1, 4])
    assert aligned.text == aligned.masked == "it's<think>it.</think>."
    assert aligned.token_span(4, 11) == (2, 3)
    assert aligned.token_span(14, 22) == (5, 6)
    check(aligned, 7)


def stream(tokens: TokenMap, text: str, token_ids: Sequence[int], cuts: Sequence[tuple[int, int]]) -> Aligned:
    """Feed text and ids in deltas that end at the cuts. The results must be a prefix of the masked text."""
    running = TokenStream(tokens)
    out, at, taken = "", 0, 0
    for upto, count in [*cuts, (len(text), len(token_ids))]:
        upto, count = max(at, min(upto, len(text))), max(taken, min(count, len(token_ids)))
        out += running.feed(text[at:upto], token_ids[taken:count])
        assert running.unmask(out) == text[: len(out)]
        at, taken = upto, count
    aligned = running.finish()
    assert aligned.masked.startswith(out)
    return aligned


def test_certain_text_comes_at_once() -> None:
    running = TokenStream(BPE_MAP)
    assert running.feed("xy", ids("=xy")) == "xy"
    assert running.feed("<tool_call>", ids("<tool_call>")) == "<tool_call>"
    assert running.feed("<to", ids("=<to")) == ""
    assert running.feed("y> ", ids("=y> ")) == "<toy> "
    assert running.feed("", _byte(0xC3)) == ""
    assert running.feed("é", _byte(0xA9)) == "é"
    assert running.feed("late", []) == ""
    assert running.feed("", ids("=late")) == "late"
    assert running.finish().masked == "xy<tool_call><toy> élate"


def test_a_first_token_of_blanks_waits_for_the_second_blank() -> None:
    running = TokenStream(BPE_MAP)
    assert running.feed(" ", ids("  ", "=x")) == ""
    assert running.feed(" x", []) == "  x"
    assert running.finish().starts == [0, 2, 3]


def test_a_hit_that_reaches_past_what_is_certain_is_masked_to_its_end() -> None:
    """The end of one marker, spelled out, may be the beginning of the next."""
    token_ids = ids("=<|ab", "=|>")
    cut = next(k for k in range(1, len(token_ids)) if decode(BPE, token_ids[:k]) == "<|ab")
    whole = BPE_MAP.align(None, token_ids)
    assert not any(name in whole.masked for name in ("<|a", "b|>"))
    assert stream(BPE_MAP, "<|ab|>", token_ids, [(4, cut), (5, cut + 1)]).masked == whole.masked

    class Overlapping:
        def get_added_vocab(self) -> dict[str, int]:
            return {"<ab>": 0, "b><c": 1}

        def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
            return "".join({0: "<ab>", 1: "b><c"}.get(k) or chr(k) for k in token_ids)

    tokens = TokenMap(Overlapping())
    for text, masked in (("<ab><c", "******"), ("<ab><d", "****<d"), ("<ab><ab><d", "********<d")):
        token_ids = [ord(character) for character in text]
        whole = tokens.align(text, token_ids)
        assert "".join("*" if character >= "\U000f0000" else character for character in whole.masked) == masked
        for k in range(1, len(text)):
            assert stream(tokens, text, token_ids, [(k, k)]).masked == whole.masked


def test_a_stream_reports_ids_of_another_text_at_the_end() -> None:
    running = TokenStream(BPE_MAP)
    assert running.feed("xy", ids("=xy")) == "xy"
    assert running.feed("X", ids("=c")) == ""
    assert running.feed("d", ids("=d")) == ""
    with pytest.raises(ValueError, match="token_ids"):
        running.finish()


CHUNKS = st.one_of(
    st.sampled_from([*SPECIAL, *ADDED]),
    st.sampled_from(["=" + name for name in SPECIAL]),
    st.sampled_from(["=<", "=<tool", "=_call>", "=|>", "=</thi", "=nk>", "=<|im_start|", "=<think><think>"]),
    st.text(max_size=6).map(lambda text: "=" + text),
    st.sampled_from(["=🙂👩‍👧", "=天气", "=\ufffd", "=\U000f0000", "=\U00100001"]),
)


@st.composite
def completions(draw: st.DrawFn) -> list[int]:
    out: list[int] = []
    for chunk in draw(st.lists(CHUNKS, max_size=8)):
        out.extend(ids(chunk))
        out.extend(draw(st.lists(st.sampled_from(sorted(RAW_BYTES.values())), max_size=2)))
    return out


CUTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12).map(
    lambda cuts: list(zip(sorted(text for text, _ in cuts), sorted(count for _, count in cuts), strict=True))
)


@settings(max_examples=some(300), deadline=None)
@given(completions(), CUTS)
def test_any_split_gives_what_one_piece_gives(token_ids: list[int], cuts: list[tuple[int, int]]) -> None:
    whole = BPE_MAP.align(None, token_ids)
    assert whole.text == decode(BPE, token_ids)
    check(whole, len(token_ids))
    split = stream(BPE_MAP, whole.text, token_ids, cuts)
    assert (split.text, split.masked, split.starts) == (whole.text, whole.masked, whole.starts)
    spans = [(k, k + 1) for k in range(len(whole.text))]
    assert [split.token_span(*span) for span in spans] == [whole.token_span(*span) for span in spans]


@settings(max_examples=some(150), deadline=None)
@given(st.lists(st.integers(0, len(LLAMA) - 1), max_size=25), CUTS)
def test_any_split_of_a_sentencepiece_completion(token_ids: list[int], cuts: list[tuple[int, int]]) -> None:
    whole = LLAMA_MAP.align(None, token_ids)
    assert whole.text == decode(LLAMA, token_ids)
    check(whole, len(token_ids))
    split = stream(LLAMA_MAP, whole.text, token_ids, cuts)
    assert (split.text, split.masked, split.starts) == (whole.text, whole.masked, whole.starts)


@settings(max_examples=some(150), deadline=None)
@given(completions())
def test_only_special_tokens_read_as_markers(token_ids: list[int]) -> None:
    aligned = BPE_MAP.align(None, token_ids)
    for name in SPECIAL:
        token_id = ADDED_VOCABULARY[name]
        genuine = {aligned.starts[k] for k, t in enumerate(token_ids) if t == token_id}
        found = {k for k in range(len(aligned.masked)) if aligned.masked.startswith(name, k)}
        assert genuine <= found
        # A marker may also be inside a longer special token, or across two of them.
        for k in found - genuine:
            first, last = aligned.token_span(k, k + len(name))
            assert all(BPE_MAP.is_special(t) for t in token_ids[first:last])


def test_one_map_serves_many_threads() -> None:
    tokens = TokenMap(BPE)
    rng = random.Random(0)
    batch = [[rng.randrange(len(BPE)) for _ in range(60)] for _ in range(24)]
    expected = [TokenMap(BPE).align(None, token_ids).masked for token_ids in batch]
    out: list[list[str]] = []
    workers = [
        threading.Thread(target=lambda: out.append([tokens.align(None, token_ids).masked for token_ids in batch]))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert out == [expected] * 4
