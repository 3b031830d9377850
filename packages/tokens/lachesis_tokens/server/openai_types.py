"""Answers in the openai package's types. Atropos' environments use them as objects and as dicts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from lachesis_messages.messages import FinishReason
from lachesis_messages.responses import ChatResponse


class _Subscriptable:
    """`x["name"]` as well as `x.name`."""

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and hasattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class _Function(_Subscriptable, Function):
    pass


class _ToolCall(_Subscriptable, ChatCompletionMessageFunctionToolCall):
    pass


class _Message(_Subscriptable, ChatCompletionMessage):
    pass


def chat_completion(responses: Sequence[ChatResponse]) -> ChatCompletion:
    """One choice for each response, in order."""
    choices = [
        Choice.construct(index=index, message=_message(response), finish_reason=_finish(response), logprobs=None)
        for index, response in enumerate(responses)
    ]
    return ChatCompletion.construct(object="chat.completion", choices=choices, **_envelope("chatcmpl", responses))


def completion(responses: Sequence[ChatResponse]) -> Completion:
    """The same for text completions."""
    choices = [
        CompletionChoice.construct(
            index=index, text=response.message.text, finish_reason=_finish(response), logprobs=None
        )
        for index, response in enumerate(responses)
    ]
    return Completion.construct(object="text_completion", choices=choices, **_envelope("cmpl", responses))


def _envelope(prefix: str, responses: Sequence[ChatResponse]) -> dict[str, Any]:
    prompt = responses[0].usage.prompt_tokens or 0
    sampled = sum(response.usage.completion_tokens or 0 for response in responses)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": responses[0].model or "",
        "usage": CompletionUsage.construct(
            prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled
        ),
    }


def tool_call(call_id: str, name: str, arguments: str) -> ChatCompletionMessageFunctionToolCall:
    """A call with its arguments as JSON text."""
    return _ToolCall.construct(
        id=call_id, type="function", function=_Function.construct(name=name, arguments=arguments)
    )


def _message(response: ChatResponse) -> ChatCompletionMessage:
    message = response.message
    calls = [tool_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    plain = _Message.construct(role="assistant", content=message.content, tool_calls=calls or None)
    if message.reasoning:
        plain.reasoning_content = message.reasoning  # type: ignore[attr-defined]  # the package allows extra fields
    return plain


def _finish(response: ChatResponse) -> str | None:
    """None for an unknown reason: OpenAI has no name for it."""
    return None if response.finish_reason is FinishReason.UNKNOWN else response.finish_reason.value
