"""Compression of the live conversation of a rollout: a summary replaces its middle once the context has grown.

It is an edit of the message history. What was sampled before stays in its own context, on a branch, and is trained
there; the next completion is sampled after the compressed conversation. A summary that the policy writes is one of its
completions, sampled in the whole context as it was, and trained like every other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

from lachesis.agent.context_size import ContextSize
from lachesis.agent.turn_check import check_turn
from lachesis.compression import CompressionSettings, Turn, choose_region
from lachesis.compression.conversation import PREFIX
from lachesis.compression.region import Role
from lachesis.compression.summary import clean_summary
from lachesis.errors import LachesisError
from lachesis.inference import ContextExhausted
from lachesis.trajectories import ChatResponse, Message, MessageHistory, ToolResponse

Summarise: TypeAlias = Callable[[Sequence[Message]], Awaitable[str]]
"""The summary of messages that are replaced by it."""

INSTRUCTION: Final = (
    "The context of this conversation is almost full. A summary that you write now will replace the older messages; "
    "the task and the last {keep} messages stay. Write down everything in the older messages that you need in order "
    "to go on: what was asked, what you did and found, the names, paths, numbers and errors that still matter, and "
    "what is left to do. Answer with the summary alone, in at most {words} words, and call no tool."
)
_ROLES: Final[dict[str, Role]] = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
_LATER, _AFTER = 1.25, 1.05
"""Growth of a context after which a compression is tried again that did not succeed, and one that saved little."""


class NotCompressed(LachesisError):
    """There is no summary. The rollout goes on with its whole context."""


@dataclass(frozen=True, slots=True)
class ContextCompression:
    """When the context of a rollout is compressed, and how."""

    at: int
    """Tokens of the next prompt from which on it is compressed."""
    to: int | None = None
    """Tokens that are aimed at; None is half of `at`."""
    keep: int = 4
    """Messages at the end that stay."""
    summarise: Summarise | None = None
    """None: the policy writes the summary."""
    by: str = "policy"
    """The writer's name in records."""
    timeout: float = 120.0
    """Seconds that `summarise` may take."""

    def __post_init__(self) -> None:
        if not 0 < self.target < self.at:
            raise ValueError(f"a context of {self.at} tokens cannot be compressed to {self.target}")

    @property
    def target(self) -> int:
        return self.at // 2 if self.to is None else self.to

    @property
    def summary_tokens(self) -> int:
        """What a summary should have at most."""
        return max(1, min(750, self.target // 4))


@dataclass(frozen=True, slots=True)
class ContextEdit:
    """One compression, or an attempt that left the conversation as it was."""

    turn: int
    """Turns before it."""
    by: str
    tokens_before: int
    """Of the next prompt, as far as the server has counted them; the newest messages are estimated."""
    tokens_after: int
    messages: int
    """Messages that the summary replaced."""
    seconds: float
    error: str | None = None
    """Why the conversation was not compressed."""
    at: int | None = None
    """The place of the first of them, and then of the summary."""

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3)}


class Conversation(Protocol):
    """The rollout, as far as its compression needs it."""

    history: MessageHistory
    turns: int

    async def ask(self) -> ChatResponse:
        """A completion of the conversation as it is. It is counted, and not appended."""
        ...

    async def wait_for(self, answer: Awaitable[str]) -> str:
        """The answer. Its time is not the agent's own."""
        ...

    def append(self, entry: ChatResponse | ToolResponse | Message) -> None: ...
    def rewind(self, length: int, reason: str, *, attempt: bool = False) -> None: ...
    def replace(self, start: int, stop: int, message: Message) -> None: ...


class LiveCompression:
    """The compression of one rollout."""

    def __init__(self, settings: ContextCompression, rollout: Conversation, *, max_resamples: int) -> None:
        self.settings = settings
        self.size = ContextSize()
        self.edits: list[ContextEdit] = []
        self.broken: NotCompressed | None = None
        """Why the last attempt failed, if that was not the agent's own doing."""
        self._rollout = rollout
        self._max_resamples = max_resamples
        self._from: float = settings.at
        self._of_region = CompressionSettings.model_validate(
            {
                "compression": {"summary_target_tokens": settings.summary_tokens},
                "protected_turns": {"last_n_turns": settings.keep},
            }
        )

    @property
    def due(self) -> bool:
        return self.size.total >= self._from

    async def run(self) -> None:
        """Compress the conversation, or record why it stays as it is."""
        before, turn, started = self.size.total, self._rollout.turns, time.monotonic()
        region = self._region()
        error: str | None = None
        if region is None:
            error = "the messages that may be replaced are no longer than a summary"
        else:
            try:
                text, tokens = await self._summary(region)
            except NotCompressed as failed:
                error = str(failed)
            else:
                message = Message("user", PREFIX + text)
                self._rollout.replace(region.start, region.stop, message)
                self.size.replace(region.start, region.stop, tokens, message)
        after = self.size.total if error is None else before
        self._from = max(self.settings.at, after * (_AFTER if error is None else _LATER))
        start, count = (region.start, len(region)) if region is not None and error is None else (None, 0)
        seconds = time.monotonic() - started
        self.edits.append(ContextEdit(turn, self.settings.by, before, after, count, seconds, error, start))

    async def _summary(self, region: range) -> tuple[str, int | None]:
        """The text, and its tokens where they are known. Raises NotCompressed."""
        if self.settings.summarise is None:
            return await self._own_summary()
        replaced = [node.message for node in self._rollout.history.nodes()[region.start : region.stop]]
        self.broken = None
        try:
            async with asyncio.timeout(self.settings.timeout):
                text = (await self._rollout.wait_for(self.settings.summarise(replaced))).strip()
        except TimeoutError:
            self.broken = NotCompressed(f"{self.settings.by}: no summary after {self.settings.timeout:g} s")
        except LachesisError as error:
            self.broken = NotCompressed(f"{self.settings.by}: {error}")
        else:
            if text:
                return text, None
            self.broken = NotCompressed(f"{self.settings.by}: the summary is empty")
        raise self.broken

    async def _own_summary(self) -> tuple[str, int | None]:
        """The policy's, in the context as it is: the prompt continues the tokens so far."""
        length = len(self._rollout.history)
        settings, flaw = self.settings, ""
        instruction = INSTRUCTION.format(keep=settings.keep, words=max(20, settings.summary_tokens * 3 // 4))
        for _ in range(1 + self._max_resamples):
            self._rollout.append(Message("user", instruction))
            try:
                response = replace(await self._rollout.ask(), purpose="summary")
            except ContextExhausted as error:
                self._rollout.rewind(length, f"no room for a summary: {error}")
                raise NotCompressed(f"no room for a summary: {error}") from error
            self._rollout.append(response)
            text, flaw = _text_of(response)
            self._rollout.rewind(
                length, f"summary: {flaw}" if flaw else "summary of the conversation", attempt=bool(flaw)
            )
            if not flaw:
                return text, response.usage.completion_tokens
        raise NotCompressed(f"no usable summary in {1 + self._max_resamples} completions, the last one: {flaw}")

    def _region(self) -> range | None:
        """The messages that a summary is to replace; None where there are none."""
        blind = self.settings.summarise is not None
        messages = [node.message for node in self._rollout.history.nodes()]
        turns = [
            Turn(_ROLES[each.role], round(tokens), bool(each.tool_calls), protected=blind and not _is_text(each))
            for each, tokens in zip(messages, self.size.sizes, strict=True)
        ]
        return choose_region(turns, self._of_region, self.settings.target)


def _text_of(response: ChatResponse) -> tuple[str, str]:
    """The text of a summary without its reasoning, and what is wrong with it."""
    if response.message.tool_calls:
        return "", "a tool call in place of a summary"
    flaw = check_turn(response, {}).flaw
    return (clean_summary(response.message.text), "") if flaw is None else ("", flaw.value)


def _is_text(message: Message) -> bool:
    return not isinstance(message.content, tuple) or all(part["type"] == "text" for part in message.content)
