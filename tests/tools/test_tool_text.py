"""The characters that are cut from a text are counted exactly, and the rest is unchanged."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from lachesis_tools.text import HeadTail, cap_text, printable

MARKER = re.compile(r"\n\[\.\.\. (\d+) characters elided \.\.\.\]\n")


@given(st.text(alphabet="ab\n", max_size=3000), st.integers(100, 400))
@example("a" * 101, 100)
def test_kept_plus_elided_is_the_total(text: str, limit: int) -> None:
    capped, elided = cap_text(text, limit)
    assert len(capped) <= limit
    if len(text) <= limit:
        assert (capped, elided) == (text, 0)
        return
    marker = MARKER.search(capped)
    assert marker is not None and int(marker.group(1)) == elided
    head, tail = capped[: marker.start()], capped[marker.end() :]
    assert len(head) + len(tail) + elided == len(text)
    assert text.startswith(head) and text.endswith(tail)
    assert abs(len(head) - 0.4 * (len(head) + len(tail))) <= 1


@given(st.lists(st.binary(max_size=400).map(lambda data: bytes(97 + byte % 26 for byte in data)), max_size=40))
def test_a_stream_of_any_pieces_keeps_its_ends_and_counts_the_rest(pieces: list[bytes]) -> None:
    kept = HeadTail(300, 500)
    for piece in pieces:
        kept.add(piece)
    total = b"".join(pieces).decode()
    text = kept.text(400)
    marker = MARKER.search(text)
    if len(total) <= 400:
        assert text == total
        return
    assert marker is not None and len(text) <= 400
    head, tail = text[: marker.start()], text[marker.end() :]
    assert len(head) + len(tail) + int(marker.group(1)) == len(total)
    assert total.startswith(head) and total.endswith(tail)


def test_bytes_lost_before_they_were_read_are_counted() -> None:
    kept = HeadTail(10, 10)
    kept.add(b"begin")
    kept.skip(1000)
    kept.add(b"end")
    assert kept.text(200) == "begin\n[... 1000 characters elided ...]\nend"


def test_terminal_output_becomes_plain_text() -> None:
    data = b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b(B\r\nnul\0 \xff caf\xc3\xa9\tx"
    assert printable(data) == "red link\nnul\ufffd \ufffd caf\u00e9\tx"
