"""How many tokens a whole conversation has for the model that is trained on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.inference.prompts import PromptBuilder
from lachesis.trajectories.markup import think_block
from lachesis.trajectories.messages import REASONING_FIELDS
from lachesis.trajectories.sharegpt import system_prompt


class ConversationTokens:
    """Counts with a tokenizer and its chat template, tools included.

    What the template has no place for is counted as the ShareGPT form writes it: tools in a system message, reasoning
    in a think block. Threads may share it.
    """

    def __init__(self, prompts: PromptBuilder) -> None:
        self._prompts = prompts
        self._shows_tools = prompts.template_report.shows_tools
        user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        with_reasoning = prompts.conversation([user, {**said, "reasoning": "c"}])
        self._shows_reasoning = with_reasoning != prompts.conversation([user, said])

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """Tokens of OpenAI messages and their tools. Raises PromptError where the template rejects them."""
        if tools and not self._shows_tools and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt(tools)}, *messages]
        if not self._shows_reasoning:
            messages = [_with_think_block(message) for message in messages]
        return len(self._prompts.conversation(messages, tools))

    def text(self, text: str) -> int:
        """Tokens of a text that follows another."""
        return len(self._prompts.encode(text))


def _with_think_block(message: Mapping[str, Any]) -> Mapping[str, Any]:
    reasoning = next((message[name] for name in REASONING_FIELDS[:2] if message.get(name)), None)
    if not isinstance(reasoning, str):
        return message
    content = message.get("content") or ""
    block = think_block(reasoning)
    said = block + content if isinstance(content, str) else [{"type": "text", "text": block}, *content]
    bare = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
    return {**bare, "content": said}
