"""Compression of the live conversation of a rollout: a summary replaces its middle once the context has grown.

It is an edit of the message history. Everything sampled before stays in its own context, on a branch, and is trained
there; the next completion is sampled after the compressed conversation. A summary that the policy writes is one of its
completions, sampled in the whole context as it was, and trained like every other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

from backends.errors import LachesisError
from lachesis.loop.context_edits import ContextEdit
from lachesis.loop.conversation import AgentConversation
from lachesis.loop.turn_check import check_turn
from lachesis_client import ContextExhausted
from lachesis_client.errors import RequestRejected, TemplateError, TurnRejected
from lachesis_data.compression.context_size import ContextSize
from lachesis_data.compression.conversation import PREFIX
from lachesis_data.compression.region import Role, Turn, choose_region
from lachesis_data.compression.settings import CompressionSettings
from lachesis_data.compression.summary import clean_summary
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse

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
    """There is no summary. The rollout continues with its whole context."""


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
        """The number of tokens that a summary should have at most."""
        return max(1, min(750, self.target // 4))

    def of_rollout(self, rollout: LiveRollout, *, max_resamples: int) -> LiveCompression:
        """The compression of one rollout."""
        return LiveCompression(self, rollout, max_resamples=max_resamples)


class LiveRollout(Protocol):
    """The rollout, as far as its compression needs it. `LiveCompression.size` is told of each change."""

    conversation: AgentConversation
    turns: int

    async def ask(self) -> ChatResponse:
        """A completion of the conversation as it is. It is counted, and not appended."""
        ...

    async def wait_for(self, answer: Awaitable[str]) -> str:
        """The answer. Its time is not the agent's own."""
        ...


class LiveCompression:
    """The compression of one rollout."""

    def __init__(self, settings: ContextCompression, rollout: LiveRollout, *, max_resamples: int) -> None:
        self.settings = settings
        self.size = ContextSize()
        self.edits: list[ContextEdit] = []
        self.broken: NotCompressed | None = None
        """Why the last attempt failed, if that was not the agent's own doing."""
        self._rollout = rollout
        self._attempts = 1 + max_resamples
        self._from: float = settings.at
        self._folds = False
        """The chat template takes no further message of the user, so texts become paragraphs of other messages."""
        self._task: Message | None = None
        """The first message of the user without a summary, where it has one."""
        self._of_region = CompressionSettings.model_validate(
            {
                "compression": {"summary_target_tokens": settings.summary_tokens},
                "protected_turns": {"last_n_turns": settings.keep},
            }
        )

    def copied(self, rollout: LiveRollout) -> LiveCompression:
        """The compression of another rollout, which goes on from here."""
        other = copy(self)
        other.size, other.edits, other._rollout = deepcopy(self.size), list(self.edits), rollout
        return other

    @property
    def due(self) -> bool:
        return self.size.total >= self._from

    async def run(self) -> None:
        """Compress the conversation, or record why it stays as it is."""
        before, turn, started = self.size.total, self._rollout.turns, time.monotonic()
        after, count, growth, error, region, self.broken = before, 0, _LATER, None, None, None
        try:
            region = self._region()
            text = await (self._own_summary(region) if self.settings.summarise is None else self._asked_for(region))
            count = self._put(text, region)
            after, growth = self.size.total, _AFTER
        except NotCompressed as failed:
            error = str(failed)
        self._from = max(self.settings.at, after * growth)
        start = region.start if region is not None and error is None else None
        seconds = time.monotonic() - started
        self.edits.append(ContextEdit(turn, self.settings.by, before, after, count, seconds, error, start))

    def _region(self) -> range:
        """The messages that a summary should replace. Raises NotCompressed if there are none."""
        blind = self.settings.summarise is not None
        turns = [
            Turn(_ROLES[each.role], round(tokens), bool(each.tool_calls), protected=blind and not _is_text(each))
            for each, tokens in zip(self._messages(), self.size.sizes, strict=True)
        ]
        region = choose_region(turns, self._of_region, self.settings.target)
        if region is None:
            raise NotCompressed("the messages that may be replaced are no longer than a summary")
        return region

    async def _asked_for(self, region: range) -> str:
        """The summary of another writer. Its failures are not the agent's."""
        assert self.settings.summarise is not None
        try:
            async with asyncio.timeout(self.settings.timeout):
                replaced = self._messages()[region.start : region.stop]
                text = (await self._rollout.wait_for(self.settings.summarise(replaced))).strip()
            problem = "" if text else "the summary is empty"
        except TimeoutError:
            problem = f"no summary after {self.settings.timeout:g} s"
        except LachesisError as error:
            problem = str(error)
        if problem:
            self.broken = NotCompressed(f"{self.settings.by}: {problem}")
            raise self.broken
        return text

    async def _own_summary(self, region: range) -> str:
        """The policy's, in the context as it is: the prompt continues the tokens so far."""
        conversation, settings, attempts, flaw = self._rollout.conversation, self.settings, 0, ""
        instruction = INSTRUCTION.format(keep=settings.keep, words=max(20, settings.summary_tokens * 3 // 4))
        while attempts < self._attempts:
            kept, last = len(conversation.history), conversation.history.nodes()[-1]
            asked, folded = Message("user", instruction), self._folds
            if folded:
                kept, asked = kept - 1, _with(last.message, instruction)
                conversation.rewind(kept, "instruction for a summary")
            conversation.append(asked)
            reason, too_long = "no summary", ""
            try:
                response = replace(await self._rollout.ask(), purpose="summary")
                conversation.append(response)
                text, flaw = _text_of(response)
                too_long = "" if flaw else self._too_long(text, self._replaced(region))
                reason = f"summary: {flaw or too_long}" if flaw or too_long else "summary of the conversation"
            except ContextExhausted as error:
                reason = f"no room for a summary: {error}"
                raise NotCompressed(reason) from error
            except (TemplateError, RequestRejected) as error:
                if folded or last.message.role == "assistant" or not _is_about_messages(error):
                    raise
                self._folds = True
                continue
            finally:
                conversation.rewind(kept, reason, attempt=bool(flaw or too_long))
                if folded:
                    conversation.append(last.origin if isinstance(last.origin, ToolResponse) else last.message)
            if too_long:
                raise NotCompressed(too_long)
            if not flaw:
                return text
            attempts += 1
        raise NotCompressed(f"no usable summary in {attempts} completions, the last one: {flaw}")

    def _put(self, text: str, region: range) -> int:
        """Replace the messages. The number of them; raises NotCompressed where that saves nothing."""
        messages, replaced, summary = self._messages(), self._replaced(region), Message("user", PREFIX + text)
        start, stop = replaced.start, replaced.stop
        if too_long := self._too_long(text, replaced):
            raise NotCompressed(too_long)
        if self._folds:
            task = next(at for at, each in enumerate(messages) if each.role == "user")
            self._task = self._task or messages[task]
            self._rollout.conversation.replace(start, stop)
            self._rollout.conversation.replace(task, task + 1, _with(self._task, summary.text))
        else:
            self._rollout.conversation.replace(start, stop, summary)
        return stop - start

    def _replaced(self, region: range) -> range:
        """The messages of the region that a summary replaces."""
        messages, stop = self._messages(), region.stop
        if self._folds:  # what is left has to alternate as before: as many turns of the user go as of the model
            while sum(each.role != "tool" and not each.tool_calls for each in messages[region.start : stop]) % 2:
                stop = next(at for at in range(stop - 1, region.start - 1, -1) if messages[at].role != "tool")
        return range(region.start, stop)

    def _too_long(self, text: str, replaced: range) -> str:
        """What is wrong with a summary that saves nothing; empty where it saves something."""
        longer = self.size.of(Message("user", PREFIX + text)) >= sum(self.size.sizes[replaced.start : replaced.stop])
        return "the summary is no shorter than the messages that it would replace" if longer else ""

    def _messages(self) -> list[Message]:
        return [node.message for node in self._rollout.conversation.history.nodes()]


def _text_of(response: ChatResponse) -> tuple[str, str]:
    """The text of a summary without its reasoning, and its flaw, if any."""
    if response.message.tool_calls:
        return "", "a tool call in place of a summary"
    flaw = check_turn(response, {}).flaw
    return (clean_summary(response.message.text), "") if flaw is None else ("", flaw.value)


def _is_text(message: Message) -> bool:
    return not isinstance(message.content, tuple) or all(part["type"] == "text" for part in message.content)


def _with(message: Message, text: str) -> Message:
    """The message with `text` as its last paragraph."""
    content = message.content
    if isinstance(content, tuple):
        return replace(message, content=(*content, {"type": "text", "text": f"\n\n{text}"}))
    return replace(message, content=f"{content or ''}\n\n{text}")


def _is_about_messages(error: TemplateError | RequestRejected) -> bool:
    """Whether a chat template, here or at a server, may reject the conversation for its last message."""
    return not isinstance(error, TurnRejected) if isinstance(error, TemplateError) else error.refuses_content
