"""Removes from an answer, before it is parsed, what takes longer to parse than all the rest.

That is the prompt that the server repeats, and the token texts in OpenAI's `logprobs`: an answer lists for each token
its logprob, its text, and an object with text and logprob once more.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

ECHOED: Final = secrets.token_hex()
"""What `without_echo` puts in the place of a prompt that came back as it was sent. No server can know it."""
_TEXTS: Final = b'"tokens":['
_AFTER_LOGPROBS: Final = b'},"finish_reason":'
"""The text after `logprobs` in an answer of vLLM."""
_READ: Final = (b'"token_logprobs":', b'"token_ids":', b'"index":')
"""Fields that must not be removed with the texts. If a server writes them in another order, nothing is removed. Every
choice has the first one."""


def without_token_texts(raw: bytes) -> bytes:
    """The answer with null for `tokens`, and without the rest of `logprobs` after it.

    Text of a model cannot be mistaken for a field: JSON escapes quotes inside text, and every search string begins with
    an unescaped quote, or has one after a comma. An answer in any other form is returned unchanged.
    """
    parts: list[bytes] = []
    done, at = 0, raw.find(_TEXTS)
    while at >= 0:
        end = raw.find(_AFTER_LOGPROBS, at)
        if end < 0:
            break
        value = at + len(_TEXTS) - 1
        if raw[at - 1] in b"{," and raw[end - 1] == 0x5D and not _holds_more(raw, value, end):
            parts += (raw[done:value], b"null")
            done = end
        at = raw.find(_TEXTS, end)
    return b"".join((*parts, raw[done:])) if parts else raw


def _holds_more(raw: bytes, start: int, end: int) -> bool:
    return any(raw.find(name, start, end) >= 0 for name in _READ)


def without_echo(raw: bytes, name: bytes, sent: Sequence[bytes | memoryview]) -> bytes:
    """The answer with `ECHOED` for a value that repeats the one that was sent. `name` is its JSON key with the colon.

    Comparing a long prompt as text takes a hundredth of the time of decoding its numbers.
    """
    # Search for the name only: a search for a whole long prompt costs more than decoding its numbers.
    parts: list[bytes] = []
    done, at = 0, raw.find(name)
    while at >= 0:
        value = end = at + len(name)
        for piece in sent:
            if not raw.startswith(piece, end):
                end = value
                break
            end += len(piece)
        if end > value:
            parts += (raw[done:value], b'"', ECHOED.encode(), b'"')
            done = end
        at = raw.find(name, end)
    return b"".join((*parts, raw[done:])) if parts else raw
