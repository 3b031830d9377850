"""The token texts in OpenAI's `logprobs`, which nobody reads here, taken out of an answer before it is parsed.

Beside the logprob of each token stand its text, and an object with its text and the logprob again. To parse these takes
longer than all the rest of an answer.
"""

from __future__ import annotations

from typing import Final

_TEXTS: Final = b'"tokens":['
_BEHIND: Final = b'},"finish_reason":'
"""What follows `logprobs` in an answer as vLLM writes it."""
_READ: Final = (b'"token_logprobs":', b'"token_ids":', b'"index":')
"""Fields that may not be lost with the texts: where a server writes them in another order, nothing is taken out. No
choice is without the first."""


def without_token_texts(raw: bytes) -> bytes:
    """The answer with null for `tokens`, and without what stands between that and the end of `logprobs`.

    No text of a model can be taken for a field: a quote within JSON text stands behind a backslash, and all that is
    looked for begins with a bare one, or has it behind a comma. An answer in any other form comes back as it is.
    """
    parts: list[bytes] = []
    done, at = 0, raw.find(_TEXTS)
    while at >= 0:
        end = raw.find(_BEHIND, at)
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
