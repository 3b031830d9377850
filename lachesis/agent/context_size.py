"""The tokens of a rollout's conversation, as its server counts them. Nothing is tokenised here."""

from __future__ import annotations

from typing import Final

from lachesis.trajectories import ChatResponse, Message, ToolResponse, Usage
from lachesis.trajectories.messages import as_message

_TOKENS_PER_CHARACTER: Final = 0.25
"""Until a server has counted text of this conversation, and where it counts nothing."""
_LEAST, _MOST = 0.1, 1.5
"""Bounds of what is learned: the count after a turn whose reasoning the template drops is too small."""


class ContextSize:
    """Tokens of each message, and of all of them.

    A completion counts its prompt and itself, which gives the tokens of the messages since the one before, with what
    the template writes around them. Several such messages share them by their length. Those that no completion has
    counted yet are estimated from their length and from what the earlier ones took. A message costs O(1).
    """

    def __init__(self) -> None:
        self.sizes: list[float] = []
        """By message. The first ones have the tools and ephemeral messages too."""
        self._total = 0.0
        self._counted = 0
        """Messages that a completion has counted."""
        self._characters: int | None = None
        """Of the messages since then; None where these are not all that the next count adds."""
        self._learned = [0, 0.0]
        """Characters that were counted after the first completion, and their tokens."""

    @property
    def total(self) -> int:
        """The tokens of the next prompt."""
        return round(self._total)

    def add(self, entry: ChatResponse | ToolResponse | Message) -> None:
        """The last message of the conversation."""
        if isinstance(entry, ChatResponse):
            self._add_completion(entry.message, entry.usage)
            return
        length = _length(as_message(entry))
        if self._characters is not None:
            self._characters += length
        self.sizes.append(length * self._rate)
        self._total += self.sizes[-1]

    def _add_completion(self, message: Message, usage: Usage) -> None:
        if usage.prompt_tokens is not None:
            new = self.sizes[self._counted :]
            estimated = sum(new)
            actual = max(0.0, usage.prompt_tokens - (self._total - estimated))
            if self._characters:
                self._learned[0] += self._characters
                self._learned[1] += actual
            share = actual / estimated if estimated else 1.0
            self.sizes[self._counted :] = [size * share for size in new]
            self._total = float(usage.prompt_tokens)
            self._counted, self._characters = len(self.sizes), 0
        own = usage.completion_tokens
        self.sizes.append(_length(message) * self._rate if own is None else own)
        self._total += self.sizes[-1]
        self._counted += usage.prompt_tokens is not None

    def cut(self, length: int) -> None:
        """The messages from `length` on were taken back."""
        self._total -= sum(self.sizes[length:])
        del self.sizes[length:]
        if length < self._counted:
            self._counted, self._characters = length, 0
        else:
            self._characters = None

    def replace(self, start: int, stop: int, tokens: float | None, message: Message) -> None:
        """`message` replaced those from `start` to before `stop`; `tokens` are its own, where they are known."""
        size = _length(message) * self._rate if tokens is None else tokens
        self._total += size - sum(self.sizes[start:stop])
        self.sizes[start:stop] = [size]
        self._counted, self._characters = min(start, self._counted), None

    @property
    def _rate(self) -> float:
        characters, tokens = self._learned
        return min(_MOST, max(_LEAST, tokens / characters)) if characters else _TOKENS_PER_CHARACTER


def _length(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return len(message.text) + len(message.reasoning or "") + calls
