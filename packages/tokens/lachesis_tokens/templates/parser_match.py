"""Whether a tool-call parser reads the calls that a chat template writes."""

from __future__ import annotations

from dataclasses import dataclass

from lachesis_tokens.prompts.prompts import PromptBuilder
from tool_call_parsers import Detection, ToolCallParser, UnknownParser, get_parser
from tool_call_parsers.registry import AUTO
from tool_call_parsers.round_trip import PLAIN, Unread


@dataclass(frozen=True, slots=True)
class ParserMatch:
    """A parser compared with the one that its model's chat template requires."""

    parser: str
    detection: Detection
    unread: tuple[Unread, ...] = ()
    """The calls of the template that the parser does not read."""
    loses_calls: bool = False
    """It does not even read the plain call."""

    @property
    def lost(self) -> str | None:
        """Why the parser cannot be used; None if it reads the template's calls, or the template writes none."""
        if not self.loses_calls:
            return None
        unread = self.unread[0]
        shown = unread.sample.text.strip()
        shown = shown if len(shown) <= 120 else f"{shown[:120]}..."
        return f"it does not read the calls that the model's chat template writes ({unread.why}: {shown!r})"

    @property
    def note(self) -> str | None:
        """One line where the parser is not the detected one; None where nothing needs to be said."""
        detected = self.detection.tool_parser
        if detected is None:
            return f"tool_call_parser {self.parser}: the chat template names no format ({self.detection.why})"
        if detected == self.parser:
            return None
        if self.detection.calls is None:
            return f"tool_call_parser {self.parser}: the chat template calls for {detected} ({self.detection.why})"
        others = {unread.sample.probe.name for unread in self.detection.unread}
        missed = [unread for unread in self.unread if unread.sample.probe.name not in others]
        more = f"does not read {'; '.join(map(str, missed))}" if missed else "reads its calls too"
        return f"tool_call_parser {self.parser}: the chat template calls for {detected}; {self.parser} {more}"


def match_parser(prompts: PromptBuilder, parser: ToolCallParser, setting: str) -> ParserMatch:
    """Compare a parser with the chat template of `prompts`. Takes milliseconds.

    setting: its name where it has none of its own, as a registered class.
    """
    detection, name = prompts.detection, getattr(parser, "name", setting)
    if detection.calls is None:
        return ParserMatch(name, detection)
    unread = detection.unread if _reads_as(parser, detection) else tuple(detection.calls.unread(parser))
    return ParserMatch(name, detection, unread, any(each.sample.probe.name == PLAIN for each in unread))


def _reads_as(parser: ToolCallParser, detection: Detection) -> bool:
    """Whether the parser is the one that read the calls of the template when it was detected."""
    if detection.tool_parser is None or not isinstance(parser, ToolCallParser):
        return False
    detected = get_parser(detection.tool_parser, reasoning=AUTO)
    return parser.format is detected.format and parser.reasoning is detected.reasoning and parser.reads_reasoning


def parser_for(prompts: PromptBuilder, name: str) -> ToolCallParser:
    """The parser of that name for completions of these prompts; "auto" is the one for their chat template.

    Raises `UnknownParser`.
    """
    if name.casefold() != AUTO:
        return get_parser(name, reasoning=AUTO, tokenizer=prompts.tokenizer)
    detection = prompts.detection
    if detection.tool_parser is None:
        raise UnknownParser(f"{detection.why}; name the parser")
    return get_parser(detection.tool_parser, reasoning=detection.reasoning, tokenizer=prompts.tokenizer)
