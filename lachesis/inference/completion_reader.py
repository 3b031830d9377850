"""What sampled ids say: the text, the reasoning and the calls in it. The ids stay the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lachesis.inference import wire
from lachesis.trajectories.messages import Message, ToolCall
from tool_call_parsers import CALLABLE, CallStatus, ToolCallParser

_NOT_MALFORMED = CALLABLE | {CallStatus.IN_REASONING}


class CompletionReader:
    """Reads completions of one model. `parser` is best made with the same tokenizer: special tokens then count as
    markup only where they were tokens."""

    def __init__(self, tokenizer: Any, parser: ToolCallParser) -> None:
        self.tokenizer = tokenizer
        self.parser = parser
        self._decode = _decoder(tokenizer)
        is_markup = getattr(parser, "is_markup", None)  # parsers from outside may need any of them
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self._silent = frozenset(id for id, text in special if is_markup is not None and not is_markup(text))
        """Special tokens that are no part of a message: roles, padding, ends of text."""
        self._reads_ids = isinstance(parser, ToolCallParser) and parser.tokenizer is tokenizer
        """The parser knows what the ids say."""
        self._has_channels = isinstance(parser, ToolCallParser) and parser.format.channels
        """An answer stands in markup of its own, which only the parser reads."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all ids, special tokens spelled out."""
        return self._decode(list(ids))

    def read(
        self,
        ids: Sequence[int],
        tools: wire.Tools | None,
        *,
        stop: Sequence[str] = (),
        forced: int = 0,
        reasoning_is_open: bool = False,
    ) -> wire.Reading:
        """The message of a completion, without its end-of-turn token. Without `tools` calls stay text.

        The first `forced` ids were not sampled: no stop text ends the message in there.
        """
        kept = list(ids) if self._silent.isdisjoint(ids) else [id for id in ids if id not in self._silent]
        if tools and self._reads_ids and not stop:
            return _reading(self.parser.parse(None, tools, token_ids=kept, prompt_opened_reasoning=reasoning_is_open))
        text = self.decode(kept)
        cut = cut_at_stop(text, stop, len(self.decode(ids[:forced])) if forced else 0)
        if not tools and self._has_channels:
            parsed = self._parse(cut, kept if cut == text else None, (), reasoning_is_open)
            if not parsed.attempts:
                return _reading(parsed)
        if not tools:
            reasoning, content = self.split_reasoning(cut, reasoning_is_open)
            return wire.Reading(Message("assistant", content, reasoning=reasoning))
        return _reading(self._parse(cut, kept if cut == text else None, tools, reasoning_is_open))

    def _parse(self, text: str, ids: list[int] | None, tools: wire.Tools, opened: bool) -> Any:
        try:
            return self.parser.parse(text, tools, token_ids=ids, prompt_opened_reasoning=opened)
        except (TypeError, ValueError):  # made without a tokenizer, or from outside, or ids that spell no text
            try:
                return self.parser.parse(text, tools, prompt_opened_reasoning=opened)
            except TypeError:
                return self.parser.parse(text, tools)

    def split_reasoning(self, text: str, reasoning_is_open: bool) -> tuple[str | None, str]:
        """(reasoning, content) of a completion in which calls are text."""
        shape = getattr(self.parser, "reasoning", None)
        if shape is None or shape.keeps_markers or shape.channels:
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

    def opens_reasoning(self, tail: str) -> bool:
        """Whether the end of a generation prompt stands inside a reasoning block."""
        shape = getattr(self.parser, "reasoning", None)
        if shape is None:
            return False
        opened = max((tail.rfind(marker) for marker in shape.opens), default=-1)
        return opened >= 0 and opened > max((tail.rfind(marker) for marker in shape.closes), default=-1)


def _reading(parsed: Any) -> wire.Reading:
    calls = tuple(ToolCall(call.id, call.name, call.arguments_json) for call in parsed.tool_calls)
    malformed = tuple(attempt.raw for attempt in parsed.attempts if attempt.status not in _NOT_MALFORMED)
    return wire.Reading(Message("assistant", parsed.content, calls, reasoning=parsed.reasoning), malformed)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """`tokenizer.decode` with every token spelled out. Where transformers only wraps a fast tokenizer, that is asked
    itself: the wrapping looks at each id and costs more than the decoding."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    own = getattr(type(tokenizer), "_decode", None)
    if fast is not None and getattr(own, "__module__", "").startswith("transformers.tokenization_utils"):
        return partial(fast.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def cut_at_stop(text: str, stop: Sequence[str], start: int = 0) -> str:
    """The text before the first of the stop texts from `start` on."""
    ends = [at for marker in stop if marker and (at := text.find(marker, start)) >= 0]
    return text[: min(ends)] if ends else text
