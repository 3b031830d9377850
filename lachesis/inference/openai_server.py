"""One OpenAI-compatible server: chat messages in, a `ChatResponse` out (Phase 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.inference import wire
from lachesis.inference.http_client import Answer, HttpClient, ServerSettings
from lachesis.trajectories.messages import ChatResponse, Message
from tool_call_parsers import get_parser

__all__ = ["Answer", "OpenAIServer", "ServerSettings"]


class OpenAIServer(HttpClient):
    """Chat completions from one server. Usable from one event loop at a time; made without one."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.parser = get_parser(settings.tool_call_parser, reasoning="auto") if settings.tool_call_parser else None

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: wire.Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        max_retries: int | None = None,
    ) -> ChatResponse:
        """One completion.

        What is None is not sent: the server's default holds. Raises `ServerUnavailable`, `RequestRejected` (and its
        kinds `Unauthorized`, `ContextExhausted`) and `BadResponse`. `max_retries` overrides the setting.
        """
        chosen = {
            "tool_choice": tool_choice if tools else None,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "top_p": top_p,
            "stop": stop,
            "seed": seed,
        }
        sampling = {key: value for key, value in chosen.items() if value is not None} | dict(extra_body or {})
        payload: wire.Payload = {"messages": wire.encode_messages(messages, self.settings.reasoning_field), **sampling}
        if tools:
            payload["tools"] = list(tools)
        answer = await self.post("/chat/completions", payload, max_retries=max_retries)
        choice = wire.read_choices(answer.body, self.base_url)[0]
        reading = wire.read_message(choice["message"], self.parser, tools)
        raw_reason, model = choice.get("finish_reason"), answer.body.get("model")
        return ChatResponse(
            message=reading.message,
            malformed_calls=reading.malformed_calls,
            finish_reason=wire.read_finish_reason(raw_reason),
            raw_finish_reason=raw_reason if isinstance(raw_reason, str) else None,
            model=model if isinstance(model, str) else None,
            usage=wire.read_usage(answer.body),
            latency=answer.latency,
            attempts=answer.attempts,
            server=self.base_url,
            sampling={**self.settings.extra_body, **sampling},
        )

    async def chat_raw(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """POST any chat-completion payload (`model` defaults to ours) and return the decoded answer as it is."""
        return (await self.post("/chat/completions", payload)).body
