"""`chat` over a server that has OpenAI's `chat_completion` only, as code written for Atropos passes around."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Unpack

from backends.errors import LachesisError
from lachesis_client.chat_format import (
    encode_messages,
    read_choices,
    read_finish_reason,
    read_message,
    read_usage,
)
from lachesis_client.chat_options import ChatOptions, Split
from lachesis_client.errors import BadResponse, ServerUnavailable
from lachesis_client.parse_thread import is_long, parse
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse


class ChatServer(Protocol):
    """Where completions come from: one server, or a router over several."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        split: Split = "train",
    ) -> ChatResponse:
        """`messages` is a MessageHistory: a list of OpenAI dicts, reasoning under `reasoning`, that also knows which of
        its messages were sampled."""
        ...


class CompletionSource(Protocol):
    """Anything that answers OpenAI's keyword arguments with a chat completion, as an object or a dict."""

    async def chat_completion(self, **kwargs: Any) -> Any: ...


class ChatCompletionServer:
    """`chat` for a `CompletionSource`. Calls that it leaves in the text are read with `tool_call_parser`.

    Its completions come without tokens. Its `get_state()`, where it has one, is in `AgentResult.managed_state`.
    """

    def __init__(self, source: CompletionSource, tool_call_parser: str = "hermes") -> None:
        self.source = source
        self.name = type(source).__name__
        from tool_call_parsers import get_parser

        self.parser = get_parser(tool_call_parser)

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        split: Split = "train",
        **options: Unpack[ChatOptions],
    ) -> ChatResponse:
        """One completion.

        Raises:
            ServerUnavailable: the source raised; errors that are ours pass as they are.
            BadResponse: its answer is not a chat completion.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if split != "train":  # an unknown keyword for many a stub
            given["split"] = split
        started = time.monotonic()
        try:
            answer = await self.source.chat_completion(
                messages=encode_messages(messages, "reasoning_content"), n=1, **given
            )
        except LachesisError:
            raise
        except Exception as error:
            raise ServerUnavailable(self.name, f"{type(error).__name__}: {error}", 1) from error
        body = _plain(answer)
        if not isinstance(body, Mapping):
            raise BadResponse(self.name, f"chat_completion returned {type(answer).__name__}, not a chat completion")
        choice = read_choices(body, self.name)[0]
        read = partial(read_message, choice["message"], self.parser, options.get("tools"))
        message, malformed = await parse(is_long(choice["message"]), read)
        raw = choice.get("finish_reason")
        model = body.get("model")
        return ChatResponse(
            message=message,
            finish_reason=read_finish_reason(raw),
            raw_finish_reason=raw if isinstance(raw, str) else None,
            model=model if isinstance(model, str) else None,
            usage=read_usage(body),
            latency=time.monotonic() - started,
            server=self.name,
            malformed_calls=malformed,
        )

    def get_state(self) -> dict[str, Any] | None:
        """The source's own record of its tokens, None where it keeps none."""
        state = self.source.get_state() if hasattr(self.source, "get_state") else None
        return state if isinstance(state, dict) else None


def _plain(value: Any) -> Any:
    """An object of the openai package, a namespace or a dict, as plain dicts and lists."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return _plain(vars(value)) if hasattr(value, "__dict__") else value
