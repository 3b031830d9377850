"""Entries of a conversation with what is known of them: completions, results of tools, counts of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from lachesis_messages.messages import FinishReason, Message, Purpose

if TYPE_CHECKING:
    from lachesis_messages.history import MessageHistory
    from lachesis_messages.tokens import SampledTokens


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the server; None where it sent none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server had in its prefix cache."""


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """One completion by the model, with its metadata."""

    message: Message
    finish_reason: FinishReason
    raw_finish_reason: str | None = None
    model: str | None = None
    """The model's name in the server's answer."""
    usage: Usage = Usage()
    latency: float = 0.0
    """Seconds from the request to the complete answer, without failed attempts before it."""
    attempts: int = 1
    """Number of requests, failed ones included."""
    server: str = ""
    """Base URL of the server that answered."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters of the request."""
    malformed_calls: tuple[str, ...] = ()
    """The raw text of tool calls that cannot be parsed."""
    refusal: bool = False
    """The server marks the text as the model's refusal."""
    tokens: SampledTokens | None = field(default=None, repr=False)
    """The sampled tokens; None where the server does not report them (Phase 1)."""
    model_version: str | None = None
    """The server's name for the weights; None where it gives none."""
    purpose: Purpose = "turn"

    def with_new_call_ids(self, taken: set[str]) -> ChatResponse:
        """The response with call ids that are not `taken`, to which they are added: some servers count from zero every
        turn. New ids keep the length, which some chat templates check."""
        calls = []
        own = {call.id for call in self.message.tool_calls}
        for call in self.message.tool_calls:
            new, number = call.id, 0
            while new in taken or (number and new in own):
                number += 1
                new = call.id[: -len(str(number))] + str(number)
            taken.add(new)
            calls.append(call if new == call.id else replace(call, id=new))
        if calls == list(self.message.tool_calls):
            return self
        return replace(self, message=replace(self.message, tool_calls=tuple(calls)))


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """The result of one tool call, as the model sees it."""

    message: Message
    tool: str
    duration: float = 0.0
    """Seconds."""
    error: str | None = None
    """Why the call failed; None where it did not."""
    chat: MessageHistory | None = field(default=None, repr=False, compare=False)
    """The conversation of the sub-agent, if the tool was one, frozen: later changes to the original are not part of it.
    Its samples belong to the same rollout."""

    def __post_init__(self) -> None:
        if self.chat is not None:
            object.__setattr__(self, "chat", self.chat.frozen())

    @property
    def length(self) -> int:
        """Characters of the result."""
        return len(self.message.text)


def as_message(item: MessageLike, index: int | None = None) -> Message:
    """The message of a Message, of a response, or of a plain OpenAI dict."""
    if isinstance(item, Message):
        return item
    if isinstance(item, (ChatResponse, ToolResponse)):
        return item.message
    return Message.from_openai(item, index)


MessageLike: TypeAlias = Message | ChatResponse | ToolResponse | Mapping[str, Any]
