"""The ids of conversations that a dataset has as text: what a model would have sampled to write its turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lachesis_client.errors import TemplateError
from lachesis_messages.responses import Node
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.templates.chat_template import TemplateMessage, Tools
from lachesis_tokens.templates.special_tokens import RenderedText


class DatasetPrompts(PromptBuilder):
    """Prompts that also write whole conversations, and turns which no model sampled."""

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> list[int]:
        """The ids of a whole conversation as the template writes it, without a prompt for a further turn.

        Raises:
            TemplateError: the template raises for the conversation.
        """
        return self._encoder.encode(*self.conversation_text(messages, tools))

    def conversation_text(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> RenderedText:
        """The text of `conversation`, with the offsets that no token may contain. Raises TemplateError."""
        render = partial(self._template.render, add_generation_prompt=False)
        prepared = [self._prepare(message) for message in messages]
        rendered = self._special_tokens.render(
            render, messages=prepared, tools=[dict(tool) for tool in tools] if tools else None
        )
        assert rendered is not None
        return rendered

    def turn(self, nodes: Sequence[Node], tools: Tools | None = None) -> list[int]:
        """The ids with which a model would write the last message of `nodes`, an assistant message, after their prompt.

        They are what the template writes of it after the generation prompt, up to the end-of-turn token.

        Raises:
            TemplateError: the template writes it elsewhere, in another way, or leaves out a part of it.
        """
        offered = [dict(tool) for tool in tools] if tools else None
        prompt, _ = self._whole(nodes[:-1], offered)
        before = [self._prepare(node.item) for node in nodes[:-1]]
        turn = self._prepare(nodes[-1].item)
        render = partial(self._template.render, add_generation_prompt=False)
        rendered = self._special_tokens.render(render, messages=[*before, turn], tools=offered)
        assert rendered is not None
        if not rendered.text.startswith(prompt.text):
            raise _unplaceable("its text before the turn is not the prompt of the turn")
        for name, less in _without_a_part(turn):
            if self._says([*before, less], offered) == rendered.text:
                raise _unplaceable(f"it leaves out the {name} of the turn")
        written = rendered.last(len(rendered.text) - len(prompt.text))
        ids = self._encoder.encode_after(written.text, None, written.cuts)
        ends = [place for place, token in enumerate(ids) if token in self.end_of_turn]
        if len(ends) != 1:
            raise _unplaceable(f"it writes {len(ends) or 'no'} end-of-turn tokens in the turn")
        if self.tokenizer.decode(ids[ends[0] + 1 :]).strip():
            raise _unplaceable("it writes text after the end of the turn")
        return ids[: ends[0] + 1]

    def _says(self, messages: Sequence[TemplateMessage], tools: Tools | None) -> str | None:
        with suppress(TemplateError):
            return self._template.render(messages, tools, add_generation_prompt=False)
        return None


def _without_a_part(turn: TemplateMessage) -> Iterator[tuple[str, TemplateMessage]]:
    """The parts of an assistant message that say something, and the message without each of them."""
    reasoning = ("reasoning", "reasoning_content", "thinking")
    if str(turn.get("reasoning_content", "")).strip():
        yield "reasoning", {name: value for name, value in turn.items() if name not in reasoning}
    content = turn.get("content")
    if isinstance(content, str) and content.strip():
        yield "content", {**turn, "content": ""}
    calls = turn.get("tool_calls") or []
    bare = {name: value for name, value in turn.items() if name != "tool_calls"}
    for at in range(len(calls)):
        others = [*calls[:at], *calls[at + 1 :]]
        yield f"tool call {at + 1}", {**bare, "tool_calls": others} if others else bare


def _unplaceable(reason: str) -> TemplateError:
    return TemplateError("the chat template", reason, "set another chat_template")
