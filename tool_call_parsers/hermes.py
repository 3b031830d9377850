"""Hermes 2 Pro and later, Qwen2.5, Qwen3: `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`.

Format: https://github.com/NousResearch/Hermes-Function-Calling. A block is read by decoding the JSON that follows its
opener, so a literal `</tool_call>` in a string argument ends nothing. What does not become a call stays in the content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tool_call_parsers.bare_json import read_whole_answer
from tool_call_parsers.json_calls import NotJSON, Value, calls_of, failed, is_cut, read_value, skip_blanks
from tool_call_parsers.registry import register_parser
from tool_call_parsers.types import CALLABLE, CallStatus, ParsedCompletion, ParsedToolCall, Tools, tool_names

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKS = re.compile(r"<think>|</think>|<tool_call>")
_BODY = re.compile(r"<tool_call>\s*(?:```(?:json)?\s*)?(?=[{\[])")
_END = re.compile(r"\s*[}\]]*\s*(?:```)?\s*</tool_call>")


@dataclass(slots=True)
class _Walk:
    """What the scan has found so far. `content` and `reasoning` are pieces of the text, in order."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    attempts: list[ParsedToolCall] = field(default_factory=list)
    content_from: int = 0
    """Where the text starts that is in no list yet."""
    failed_until: int = 0
    """The end of the last broken block: openers before it may be part of its strings."""
    no_more_ends: bool = False
    """No `</think>` follows: nothing looks for one again."""
    cut_until: int = 0
    """The same for a block that the end of the text cut: reasoning tags before it are part of its strings."""


@register_parser("hermes", "qwen3_json")
class HermesParser:
    """`<tool_call>` blocks; an answer that is a bare JSON call to an offered tool is taken too."""

    def parse(self, text: str, tools: Tools | None = None) -> ParsedCompletion:
        known = tool_names(tools)
        walk = _Walk()
        position = 0
        while mark := _MARKS.search(text, position):
            if mark[0] == OPEN:
                position = _read_block(text, mark.start(), known, walk)
            elif mark.start() < walk.cut_until:
                position = mark.end()
            elif mark[0] == "<think>":
                position = _read_thought(text, mark, walk)
            else:
                position = _close_thought(text, mark, walk)
        walk.content.append(text[walk.content_from :])
        content = "".join(walk.content)
        untouched = not walk.reasoning and not any(call.status in CALLABLE for call in walk.attempts)
        if not walk.attempts and (calls := read_whole_answer(content, known)):
            content, walk.attempts, untouched = "", list(calls), False
        if not untouched:
            content = content.strip()
        return ParsedCompletion(
            content=content if content.strip() else None,
            reasoning="\n".join(piece.strip() for piece in walk.reasoning if piece.strip()) or None,
            tool_calls=tuple(call for call in walk.attempts if call.status in CALLABLE),
            attempts=tuple(walk.attempts),
        )


def _read_block(text: str, start: int, known: frozenset[str], walk: _Walk) -> int:
    """Read the block whose opener is at `start`; returns where to go on. A mere mention of the opener stays text."""
    after_opener = start + len(OPEN)
    body = _BODY.match(text, start)
    if body is None:
        return after_opener
    try:
        values, repaired, end = _read_values(text, body.end())
    except NotJSON as error:
        if start >= walk.failed_until:
            close = text.find(CLOSE, error.position)
            cut = close < 0 and is_cut(text, body.end())
            walk.failed_until = len(text) if close < 0 else close + len(CLOSE)
            status = CallStatus.INCOMPLETE if cut else CallStatus.INVALID_JSON
            reason = "the text ends inside the call" if cut else f"{error} at character {error.position - body.end()}"
            walk.cut_until = len(text) if cut else 0
            walk.attempts.append(failed(status, reason, text[start : walk.failed_until]))
        return after_opener
    raw = text[start:end]
    calls = [call for value in values for call in calls_of(value, known, raw, repaired=repaired)]
    walk.attempts += calls
    if any(call.status in CALLABLE for call in calls):
        walk.content.append(text[walk.content_from : start])
        walk.content_from = end
    return end


def _read_values(text: str, position: int) -> tuple[list[Value], str | None, int]:
    """The JSON values of a block, what had to be repaired, and the end of the block."""
    try:
        values = [read_value(text, position)]
    except NotJSON as error:
        if not text.startswith(CLOSE, error.position):
            raise
        closed = text[position : error.position] + "}"  # only the outermost brace may be missing
        value = read_value(closed, 0)
        if value.end != len(closed):
            raise
        return [value], "the closing brace was missing", error.position + len(CLOSE)
    while text.startswith("{", following := skip_blanks(text, values[-1].end)):
        try:
            values.append(read_value(text, following))
        except NotJSON:
            break
    end = _END.match(text, values[-1].end)
    return values, None, end.end() if end else values[-1].end


def _read_thought(text: str, mark: re.Match[str], walk: _Walk) -> int:
    """Reasoning: up to its end tag, or without one up to the first block (or the end of the text)."""
    walk.content.append(text[walk.content_from : mark.start()])
    close = -1 if walk.no_more_ends else text.find("</think>", mark.end())
    walk.no_more_ends = close < 0
    end = close
    if close < 0:
        body = _BODY.search(text, mark.end())
        end = body.start() if body else len(text)
    walk.reasoning.append(text[mark.end() : end])
    walk.content_from = end if close < 0 else end + len("</think>")
    return walk.content_from


def _close_thought(text: str, mark: re.Match[str], walk: _Walk) -> int:
    """An end tag alone: the prompt opened the reasoning, so all before it was thought, calls drafted there included."""
    if walk.reasoning:
        return mark.end()
    walk.reasoning.append(text[: mark.start()])
    walk.content.clear()
    walk.attempts.clear()
    walk.content_from = mark.end()
    return mark.end()
