"""Looks up a parser, by its name or by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tool_call_parsers.registry import AUTO, UnknownParser, list_parsers, parser_named
from tool_call_parsers.types import ToolSchemas

if TYPE_CHECKING:
    from tool_call_parsers.detect import Detection
    from tool_call_parsers.parser import ToolCallParser


def get_parser(name: str, *, reasoning: str | None = None, tokenizer: Any = None) -> ToolCallParser:
    """A parser by name.

    name: vLLM's spelling, or an alias (SGLang's, hermes-agent's and the models' names); case and `-_.` are ignored.
        "auto" detects the format from `tokenizer.chat_template`: the one that reads the template's own calls back.
    reasoning: vLLM's name of a reasoning format, "auto" for the format's own, None to leave reasoning in the content
        (formats with channels always read theirs).
    tokenizer: `parse(..., token_ids=...)` then takes special tokens for markers only if they are tokens.

    Raises `UnknownParser` or `UnknownReasoning`, which list similar names.
    """
    if isinstance(name, str) and name.casefold() == AUTO:
        detection = _detect(tokenizer)
        if detection.tool_parser is None:
            raise UnknownParser(f"tool-call parser 'auto': {detection.why}; name one: {', '.join(list_parsers())}")
        name = detection.tool_parser
        reasoning = detection.reasoning if reasoning == AUTO else reasoning
    return parser_named(name, reasoning, tokenizer)


def _detect(tokenizer: Any) -> Detection:
    from tool_call_parsers.detect import detect_parser  # only this needs the rules of detection

    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):  # named templates: {"default": ..., "tool_use": ...}
        template = template.get("tool_use") or template.get("default")
    if not isinstance(template, str):
        raise ValueError("tokenizer: 'auto' needs a tokenizer with a chat template; name a parser instead")
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None:
        return detect_parser(template, vocabulary)

    def render(messages: list[dict[str, Any]], tools: ToolSchemas | None, add_generation_prompt: bool) -> str:
        offered = None if tools is None else list(tools)
        return str(
            apply(
                messages,
                tools=offered,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )

    return detect_parser(template, vocabulary, render=render)
