"""How many tokens a whole conversation has for the model that is trained on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final

from lachesis_messages.markup import think_block
from lachesis_messages.messages import REASONING_FIELDS
from lachesis_messages.records.sharegpt import system_prompt
from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts

_PART: Final = 1 << 16
"""Characters that are encoded at once, in about 15 ms. In one piece, some megabytes take longer, and 100 times as much
memory."""
_SEARCHED: Final = 1 << 10
"""Characters at the end of a part where a space between two words is looked for."""
_WORD: Final = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_FIRST: Final = -1
_KNOWN: Final = 1 << 16
"""Turns whose counts are kept."""


class ConversationTokens:
    """Counts with a tokenizer and its chat template, tools included.

    What the template has no place for is counted as the ShareGPT form writes it: tools in a system message, reasoning
    in a think block. Threads may share it.

    Turns are counted one by one, and each only once, however often it comes. One of more than 65,536 characters is cut
    between words for it, or anywhere in a text without spaces, where the count may be a token off for each cut.
    """

    def __init__(self, prompts: DatasetPrompts) -> None:
        self._prompts = prompts
        self._shows_tools = prompts.template_report.shows_tools
        user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        with_reasoning = prompts.conversation([user, {**said, "reasoning": "c"}])
        self._shows_reasoning = with_reasoning != prompts.conversation([user, said])
        ends = {prompts.encoder.token(end): end for end in prompts.end_of_turn}
        self._ends = {text: end for text, end in ends.items() if text}
        self._end = re.compile("|".join(map(re.escape, self._ends)) or "(?!)")
        self._known: dict[bytes, int] = {}

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        stopped: Callable[[], bool] = bool,
    ) -> int:
        """Tokens of OpenAI messages and their tools.

        Raises:
            PromptError: the template rejects them.
            TimeoutError: `stopped`, which is asked all the time, said yes.
        """
        if tools and not self._shows_tools and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt(tools)}, *messages]
        if not self._shows_reasoning:
            messages = [_with_think_block(message) for message in messages]
        text, cuts = self._prompts.conversation_text(messages, tools)
        before: int | None = _FIRST
        total = 0
        for start, end in pairwise((0, *cuts, len(text))):
            for turn, following in self._turns(text, start, end):
                total += self._count(turn, before, stopped)
                before = following
        return total

    def text(self, text: str) -> int:
        """Tokens of a text that follows another."""
        return self._count(text, None, bool)

    def _turns(self, text: str, start: int, end: int) -> Iterator[tuple[str, int | None]]:
        """The texts between `start` and `end`, each with the id of the end-of-turn token at its end, which is a token
        whatever is around it."""
        while found := self._end.search(text, start, end):
            yield text[start : found.end()], self._ends[found[0]]
            start = found.end()
        if start < end:
            yield text[start:end], None

    def _count(self, text: str, before: int | None, stopped: Callable[[], bool]) -> int:
        """Tokens of a text after a token, after text (None), or at the beginning."""
        total, start = 0, 0
        while start < len(text):
            if stopped():
                raise TimeoutError
            end = start + _PART
            if end < len(text):
                end = max((match.start() for match in _WORD.finditer(text, end - _SEARCHED, end)), default=end)
            part = text[start:end]
            key = blake2b(f"{before} {part}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if (count := self._known.get(key)) is None:
                if len(self._known) >= _KNOWN:
                    self._known.clear()
                encoder = self._prompts.encoder
                count = len(encoder.encode(part) if before == _FIRST else encoder.encode_after(part, before))
                self._known[key] = count
            total, start, before = total + count, end, None
        return total


def _with_think_block(message: Mapping[str, Any]) -> Mapping[str, Any]:
    reasoning = next((message[name] for name in REASONING_FIELDS[:2] if message.get(name)), None)
    if not isinstance(reasoning, str):
        return message
    content = message.get("content") or ""
    block = think_block(reasoning)
    said = block + content if isinstance(content, str) else [{"type": "text", "text": block}, *content]
    bare = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**bare, "content": said}
