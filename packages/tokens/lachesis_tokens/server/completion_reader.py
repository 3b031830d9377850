"""Reads the text, the reasoning and the calls of sampled ids. The ids stay the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lachesis_client.chat_format import malformed_calls, parse_text, parsed_calls
from lachesis_client.chat_options import Tools
from lachesis_messages.messages import Message
from tool_call_parsers import ParsedCompletion, ToolCallParser
from tool_call_parsers.tokens import Aligned, TokenMap, mark


class CompletionReader:
    """Reads completions of one model.

    A `parser` that was made with the same tokenizer recognises special tokens only where they were sampled as tokens.
    With `reasoning_in_text`, reasoning stays in the content. A token that has no place in a message (an id without
    text, a special token of another purpose) is a mark in it, and a call with one is malformed; see
    `tool_call_parsers.tokens`.
    """

    def __init__(self, tokenizer: Any, parser: ToolCallParser, *, reasoning_in_text: bool = False) -> None:
        self.tokenizer = tokenizer
        self.parser = parser
        self.reasoning_in_text = reasoning_in_text
        self.strays: Counter[int] = Counter()
        """How often each id was sampled where it has no meaning."""
        self._decode = _decoder(tokenizer)
        self._ids = len(tokenizer)
        own = parser.tokens if isinstance(parser, ToolCallParser) and parser.tokenizer is tokenizer else None
        self._reads_ids = own is not None
        """The parser reads ids directly."""
        if own is None and isinstance(parser, ToolCallParser):
            own = parser.token_map(tokenizer)
        self._tokens = own or TokenMap(tokenizer)  # third-party parsers may need any special token
        self._has_channels = isinstance(parser, ToolCallParser) and parser.format.channels
        """The format wraps answers in channels, which only the parser reads."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all ids, special tokens included, with a mark for each id beyond the vocabulary."""
        listed = list(ids)
        return self._decode(listed) if max(listed, default=0) < self._ids else self._tokens.marked(listed)

    def text(self, ids: Sequence[int], *, stop: Sequence[str] = ()) -> str:
        """The text of a completion without its end-of-turn token, up to the stop text that its last token completes."""
        whole = None if stop else self._tokens.whole_text(ids)
        return self._align(ids, stop).visible if whole is None else whole

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

        It ends before the stop text that the last id completes. Without `tools`, calls stay text. The first `forced`
        ids were not sampled: no stop text begins there.
        """
        whole = None if stop or tools or self._has_channels else self._tokens.whole_text(ids)
        if whole is None:
            aligned = self._align(ids, stop, forced)
            if tools or self._has_channels:
                parsed = self._parse(self._closed(ids, stop) or aligned, tools or (), reasoning_is_open)
                if tools or not parsed.attempts:
                    return self._message(parsed, aligned)
            whole = aligned.visible
        reasoning, content = self.split_reasoning(whole, reasoning_is_open)
        return Message("assistant", content, reasoning=reasoning), ()

    def _closed(self, ids: Sequence[int], stop: Sequence[str]) -> Aligned | None:
        """The whole text, if the stop text that ends it closes a call: the model sampled it as part of the call."""
        if not stop or not isinstance(self.parser, ToolCallParser):
            return None
        closers = tuple(filter(self.parser.closes_call, stop))
        whole = self._tokens.align(None, ids) if closers else None
        return whole if whole is not None and whole.text.endswith(closers) else None

    def _align(self, ids: Sequence[int], stop: Sequence[str], forced: int = 0) -> Aligned:
        aligned = self._tokens.align(None, ids)
        if stop and ids:
            from lachesis_tokens.server.stop_texts import completed_stop

            at = completed_stop(aligned.text, stop, aligned.starts[-2], aligned.starts[forced])
            aligned = aligned.first(at)
        if aligned.strays:
            self.strays.update(aligned.strays)
        return aligned

    def _parse(self, aligned: Aligned, tools: Tools, opened: bool) -> ParsedCompletion:
        if self._reads_ids:
            return self.parser.parse(None, tools, token_ids=aligned, prompt_opened_reasoning=opened)
        return parse_text(self.parser, aligned.visible, tools, prompt_opened_reasoning=opened)

    def _message(self, parsed: ParsedCompletion, aligned: Aligned) -> tuple[Message, tuple[str, ...]]:
        content, calls, malformed = parsed.content, parsed_calls(parsed), malformed_calls(parsed)
        if aligned.strays and not self._reads_ids:
            # The parser saw a mark as any other text.
            marks = {mark(each)[1:] for each in aligned.strays}
            bad = [any(each in text for each in marks for text in (call.name, call.arguments)) for call in calls]
            if any(bad):
                malformed = (*malformed, aligned.visible)
                calls = tuple(call for call, is_bad in zip(calls, bad, strict=True) if not is_bad)
                content = aligned.visible
        return Message("assistant", content, calls, reasoning=parsed.reasoning), malformed

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
