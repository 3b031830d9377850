"""OpenAI's `/v1/completions`: text or token ids in, text out; as `openai_chat`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from lachesis_messages.responses import ChatResponse
from lachesis_tokens.wire import openai_chat
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
from lachesis_tokens.wire.writing import NamesOf, data, usage_of

_KNOWN: Final = frozenset(
    {"model", "prompt", "n", "max_tokens", "stop", "logprobs", "stream", "stream_options", "user", "timeout", *SAMPLING}
)


def read(body: JSON) -> list[TextRequest]:
    """One request for each prompt. Raises `Refused`."""
    refuse_unknown(body, _KNOWN | ({"best_of"} if body.get("best_of") == 1 else set()))
    openai_chat.wants_usage(body)
    if (take(body, "logprobs", int, default=0)) > 1:
        raise Refused(400, "logprobs: only the logprobs of sampled tokens are known; send 0 or 1", param="logprobs")
    given = take(body, "prompt", str, list)
    prompts = [given] if isinstance(given, str) or is_ids(given) else given
    if not prompts or not all((isinstance(prompt, str) and prompt) or is_ids(prompt) for prompt in prompts):
        raise Refused(400, "prompt: a text or a list of token ids is required, or a list of these", param="prompt")
    limit = whole(body, "max_tokens")
    return [
        TextRequest(
            prompt,
            n=answers(body),
            max_tokens=limit,
            stop=stop_texts(body),
            logprobs=body.get("logprobs") is not None,
            sampling=wanted_sampling(body),
        )
        for prompt in prompts
    ]


def answer(asked: Sequence[Sequence[ChatResponse]], names_of: NamesOf | None = None) -> JSON:
    """The choices of every prompt, in order. With `names_of`, they have the logprobs of the sampled tokens."""
    responses = [response for each in asked for response in each]
    prompt, sampled = (sum(count) for count in zip(*map(usage_of, asked), strict=True))
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": responses[0].model or "",
        "choices": [
            {
                "index": index,
                "text": response.message.text,
                "logprobs": None if names_of is None else _logprobs(response, names_of(response)),
                "finish_reason": openai_chat.finish_reason(response),
            }
            for index, response in enumerate(responses)
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def chunks(answer: JSON, *, include_usage: bool) -> Iterator[bytes]:
    """The chunks of a stream: all text in one."""
    usage = answer.pop("usage")
    yield data(answer)
    if include_usage:
        yield data({**answer, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _logprobs(response: ChatResponse, names: list[str]) -> JSON:
    assert response.tokens is not None
    return {
        "tokens": names,
        "token_logprobs": list(response.tokens.logprobs),
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, names), initial=0))[:-1],
    }
