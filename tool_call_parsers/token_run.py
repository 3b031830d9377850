"""A run over the text of a completion whose tokens are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tool_call_parsers.engine import Grammar, Run
from tool_call_parsers.tokens import Aligned, TokenStream, mark
from tool_call_parsers.types import CALLABLE, CallStatus

_BROKEN: Final = "tokens that are neither text nor markup of the format break the call"


@dataclass(slots=True, eq=False, kw_only=True)
class TokenRun(Run):
    """A run that knows the tokens of its text."""

    tokens: Aligned | TokenStream | None = None

    def end_call(
        self,
        start: int,
        end: int,
        status: CallStatus,
        name: str = "",
        arguments: dict[str, Any] | None = None,
        arguments_raw: str = "",
        **more: Any,
    ) -> bool:
        """As `Run.end_call`. A call with a stray token in it is malformed: nobody knows what was meant."""
        if self.tokens is not None and status in CALLABLE:
            stray = self.tokens.stray(self.offset + start, self.offset + end)
            if stray is not None:
                status, arguments = CallStatus.MALFORMED, None
                more["error"] = f"{mark(stray)} in the call, which is neither text nor markup of the format"
        return Run.end_call(self, start, end, status, name, arguments, arguments_raw, **more)

    def note_hidden(self, grammar: Grammar, aligned: Aligned) -> None:
        """Record calls that only stray tokens keep from being found: those in the text without them."""
        text, place = aligned.without_strays()
        other = Run(
            tools=self.tools,
            markers=self.markers,
            reasoning_format=self.reasoning_format,
            reads_reasoning=self.reads_reasoning,
            opened=self.opened,
        )
        other.append(text)
        other.final = True
        for _ in grammar.read(other):
            raise AssertionError("a lexer waits for text after the end of the text")
        known = [attempt.span for attempt in self.attempts]
        for call in other.attempts:
            start, end = place(call.span.start), place(call.span.end)
            if call.status in CALLABLE and not any(span.start < end and start < span.end for span in known):
                self.end_call(start, end, CallStatus.MALFORMED, call.name, error=_BROKEN, ends_block=False)
