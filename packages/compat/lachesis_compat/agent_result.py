"""`AgentResult` as unit tests of old rewards construct it: from the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.loop import result
from lachesis.loop.outcome import Outcome
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse


class _OfAnyLoop(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, result.AgentResult)


class AgentResultOfMessages(result.AgentResult, metaclass=_OfAnyLoop):
    """The result of any loop is one. Raises `MessageError` for messages that are not those of a conversation."""

    __slots__ = ()

    def __init__(
        self,
        messages: list[dict[str, Any]],
        managed_state: Mapping[str, Any] | None = None,
        turns_used: int = 0,
        finished_naturally: bool = False,
        reasoning_per_turn: Sequence[str | None] = (),
        tool_errors: Sequence[result.ToolError] = (),
    ) -> None:
        outcome = Outcome.COMPLETED if finished_naturally else Outcome.MAX_TURNS
        read = [Message.from_openai(message, index) for index, message in enumerate(messages)]
        said = [ChatResponse(each, FinishReason.STOP) if each.role == "assistant" else each for each in read]
        super().__init__(
            turns_used,
            finished_naturally,
            list(reasoning_per_turn),
            list(tool_errors),
            outcome,
            "constructed from messages",
            MessageHistory(said),
            server_state=None if managed_state is None else dict(managed_state),
        )
        self._messages = messages
