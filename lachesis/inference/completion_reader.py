"""Reads the text, the reasoning and the calls of sampled ids. The ids stay the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lachesis.inference.chat_format import Tools, malformed_calls, parse_text, parsed_calls
from lachesis.trajectories.messages import Message
from tool_call_parsers import ParsedCompletion, ToolCallParser


class CompletionReader:
    """Reads completions of one model.

    A `parser` that was made with the same tokenizer recognises special tokens only where they were sampled as tokens.
    With `reasoning_in_text`, reasoning stays in the content.
    """

    def __init__(self, tokenizer: Any, parser: ToolCallParser, *, reasoning_in_text: bool = False) -> None:
        self.tokenizer = tokenizer
        self.parser = parser
        self.reasoning_in_text = reasoning_in_text
        self._decode = _decoder(tokenizer)
        is_markup = getattr(parser, "is_markup", None)  # third-party parsers may need any special token
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self._silent = frozenset(id for id, text in special if is_markup is not None and not is_markup(text))
        """Special tokens that are not part of a message: roles, padding, ends of text."""
        self._reads_ids = isinstance(parser, ToolCallParser) and parser.tokenizer is tokenizer
        """The parser reads ids directly."""
        self._has_channels = isinstance(parser, ToolCallParser) and parser.format.channels
        """The format wraps answers in channels, which only the parser reads."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all ids, special tokens included."""
        return self._decode(list(ids))

    def read(
        self,
        ids: Sequence[int],
        tools: Tools | None,
        *,
        stop: Sequence[str] = (),
        forced: int = 0,
        reasoning_is_open: bool = False,
    ) -> tuple[Message, tuple[str, ...]]:
        """The message of a completion without its end-of-turn token, and the raw text of its malformed calls.

        Without `tools`, calls stay text. The first `forced` ids were not sampled: no stop text ends the message there.
        """
        kept = list(ids) if self._silent.isdisjoint(ids) else [id for id in ids if id not in self._silent]
        if tools and self._reads_ids and not stop:
            return _read(self.parser.parse(None, tools, token_ids=kept, prompt_opened_reasoning=reasoning_is_open))
        text = self.decode(kept)
        cut = cut_at_stop(text, stop, len(self.decode(ids[:forced])) if forced else 0)
        if tools or self._has_channels:
            parsed = self._parse(cut, kept if self._reads_ids and cut == text else None, tools or (), reasoning_is_open)
            if tools or not parsed.attempts:
                return _read(parsed)
        reasoning, content = self.split_reasoning(cut, reasoning_is_open)
        return Message("assistant", content, reasoning=reasoning), ()

    def _parse(self, text: str, ids: list[int] | None, tools: Tools, opened: bool) -> ParsedCompletion:
        read = partial(parse_text, self.parser, text, tools, prompt_opened_reasoning=opened)
        try:
            return read(token_ids=ids)
        except ValueError:
            if ids is None:
                raise
            return read()  # the tokenizer decodes the ids to another text when they are taken one by one

    def split_reasoning(self, text: str, reasoning_is_open: bool) -> tuple[str | None, str]:
        """(reasoning, content) of a completion whose calls stay text."""
        shape = getattr(self.parser, "reasoning", None)
        if shape is None or shape.keeps_markers or shape.channels or self.reasoning_in_text:
            return None, text
        start = 0
        if not reasoning_is_open:
            opener = next((marker for marker in shape.opens if text.lstrip().startswith(marker)), None)
            if opener is None:
                return None, text
            start = text.index(opener) + len(opener)
        closed = min(((at, marker) for marker in shape.closes if (at := text.find(marker, start)) >= 0), default=None)
        if closed is None:
            return text[start:].removeprefix(shape.inside[0]) or None, ""
        reasoning = text[start : closed[0]].removeprefix(shape.inside[0]).removesuffix(shape.inside[1])
        return reasoning or None, text[closed[0] + len(closed[1]) :].removeprefix(shape.after)

    def opens_reasoning(self, generation_prompt: str) -> bool:
        """Whether a generation prompt opens a reasoning block and does not close it."""
        shape = getattr(self.parser, "reasoning", None)
        if shape is None:
            return False
        opened = max((generation_prompt.rfind(marker) for marker in shape.opens), default=-1)
        closed = max((generation_prompt.rfind(marker) for marker in shape.closes), default=-1)
        return opened >= 0 and opened > closed


def _read(parsed: ParsedCompletion) -> tuple[Message, tuple[str, ...]]:
    message = Message("assistant", parsed.content, parsed_calls(parsed), reasoning=parsed.reasoning)
    return message, malformed_calls(parsed)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """`tokenizer.decode` with every token spelled out.

    If transformers only wraps a fast tokenizer, the fast one decodes: the wrapper looks at each id and costs more than
    the decoding.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    own = getattr(type(tokenizer), "_decode", None)
    if fast is not None and getattr(own, "__module__", "").startswith("transformers.tokenization_utils"):
        return partial(fast.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def cut_at_stop(text: str, stop: Sequence[str], start: int = 0) -> str:
    """The text before the first stop text from `start` on."""
    ends = [at for marker in stop if marker and (at := text.find(marker, start)) >= 0]
    return text[: min(ends)] if ends else text
