"""One OpenAI-compatible server: chat messages in, a `ChatResponse` out (Phase 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Unpack

from lachesis_client.affinity import Route
from lachesis_client.chat_format import (
    Payload,
    is_refusal,
    raw_finish_reason,
    read_choices,
    read_finish_reason,
    read_message,
    read_usage,
    request_messages,
)
from lachesis_client.chat_options import PROMPTED_BY_A_MODEL, ChatOptions, check_arguments
from lachesis_client.client_settings import ServerSettings
from lachesis_client.http_client import HttpClient
from lachesis_client.parse_thread import is_long, parse
from lachesis_client.sampling import recorded_fields
from lachesis_client.streaming import AnswerStream
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, as_message

HARMLESS: Final = ({"role": "user", "content": "Hi"},)
"""A conversation whose content no server refuses."""


class OpenAIServer(HttpClient):
    """Chat completions from one server. It can be created without an event loop and used from one loop at a time."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.parser = None
        if settings.tool_call_parser:
            from tool_call_parsers import get_parser

            self.parser = get_parser(settings.tool_call_parser, reasoning="auto")

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        max_retries: int | None = None,
        route: Route | None = None,
        stream: AnswerStream | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatResponse:
        """One completion.

        Options that are None are not sent. `max_retries` overrides the setting. `route` is for the headers. `stream`
        gets the answer piece by piece; the completion is the same. Raises
        `ServerUnavailable`, `RequestRejected` (and its kinds `Unauthorized`, `ContextExhausted`, `ConversationRefused`)
        and `BadResponse`.
        """
        check_arguments(options, ChatOptions.__annotations__.keys(), "chat")
        tools = options.get("tools")
        apart = ("tools", "extra_body") if tools else ("tools", "extra_body", "tool_choice")
        sampling = {name: value for name, value in options.items() if value is not None and name not in apart}
        sampling |= options.get("extra_body") or {}
        payload: Payload = {"messages": request_messages(messages, self.settings.reasoning_field), **sampling}
        if tools:
            payload["tools"] = list(tools)
        answer = await self.post(
            "/chat/completions",
            payload,
            max_retries=max_retries,
            route=route,
            stream=stream,
            check=partial(read_choices, server=self.base_url),
            harmless=lambda: {**payload, "messages": HARMLESS},
            continues=lambda: (
                PROMPTED_BY_A_MODEL.get() or any(as_message(message).role == "assistant" for message in messages)
            ),
        )
        choice = read_choices(answer.body, self.base_url)[0]
        read = partial(read_message, choice["message"], self.parser, tools)
        message, malformed = await parse(is_long(choice["message"]), read)
        raw_reason, model = raw_finish_reason(choice), answer.body.get("model")
        return ChatResponse(
            message=message,
            malformed_calls=malformed,
            refusal=is_refusal(choice["message"]),
            finish_reason=read_finish_reason(raw_reason),
            raw_finish_reason=raw_reason,
            model=model if isinstance(model, str) else None,
            usage=read_usage(answer.body),
            latency=answer.latency,
            attempts=answer.attempts,
            server=self.base_url,
            sampling={**recorded_fields(self.settings.extra_body), **sampling},
        )
