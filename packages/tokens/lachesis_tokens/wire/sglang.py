"""SGLang's `/generate`: text or token ids in, text and token ids out; as `openai_chat`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final

from lachesis_messages.messages import FinishReason
from lachesis_messages.responses import ChatResponse
from lachesis_tokens.wire.request import (
    JSON,
    SAMPLING,
    Refused,
    TextRequest,
    answers,
    is_ids,
    refuse_unknown,
    stop_texts,
    take,
    wanted_sampling,
    whole,
)
from lachesis_tokens.wire.writing import NamesOf, data, listed_versions

_KNOWN: Final = frozenset(
    {"text", "input_ids", "sampling_params", "return_logprob", "return_text_in_logprobs", "stream", "rid", "model"}
)
_PARAMETERS: Final = frozenset({"max_new_tokens", "stop", "n", "sampling_seed", *SAMPLING} - {"seed"})
_DEFAULTS: Final[JSON] = {"skip_special_tokens": True, "spaces_between_special_tokens": True}
"""Parameters that clients send with SGLang's default."""


def read(body: JSON) -> TextRequest:
    """The request. Raises `Refused`."""
    refuse_unknown(body, _KNOWN)
    text, ids = take(body, "text", str), take(body, "input_ids", list)
    if (text is None) == (ids is None) or not (text or is_ids(ids)):
        raise Refused(400, "either text or input_ids is required: one prompt", param="input_ids")
    parameters = take(body, "sampling_params", dict, default={})
    given = {name: value for name, value in parameters.items() if _DEFAULTS.get(name, ...) != value}
    refuse_unknown(given, _PARAMETERS)
    if given.get("top_k") == -1:  # off
        del given["top_k"]
    return TextRequest(
        text if text is not None else ids,
        n=answers(given),
        max_tokens=whole(given, "max_new_tokens"),
        stop=stop_texts(given),
        logprobs=True,
        sampling=wanted_sampling({**given, "seed": given.get("sampling_seed")}),
    )


def write(body: JSON, response: ChatResponse, names_of: NamesOf) -> JSON:
    """One completion, in SGLang's fields."""
    assert response.tokens is not None
    ids, ends = response.tokens.ids, response.tokens.end_of_turn
    cut = response.finish_reason is FinishReason.LENGTH
    reason: JSON = {"type": "length", "length": len(ids)} if cut else {"type": "stop", "matched": None}
    if not cut and ids and ids[-1] in ends:
        reason["matched"] = ids[-1]
    meta: JSON = {
        "id": uuid.uuid4().hex,
        "finish_reason": reason,
        "prompt_tokens": response.usage.prompt_tokens,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": response.model_version,
        "weight_versions": listed_versions(response),
    }
    if body.get("return_logprob"):
        names = names_of(response) if body.get("return_text_in_logprobs") else repeat(None)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = list(zip(response.tokens.logprobs, ids, names, strict=False))
    return {"text": response.message.text, "output_ids": ids, "meta_info": meta}


def chunks(answers: Sequence[JSON]) -> Iterator[bytes]:
    """The events of a stream: one for each completion."""
    for index, each in enumerate(answers):
        yield data({**each, "index": index})
    yield b"data: [DONE]\n\n"


def error(refused: Refused) -> JSON:
    """The body of an error."""
    return {"error": {"message": str(refused), "code": refused.code, "param": refused.param}}
