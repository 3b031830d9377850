"""A parser for one wire format: it reads whole texts and streams, and writes turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tool_call_parsers.engine import Grammar, Marker, Markers, RenderCall, RenderTurn, Run
from tool_call_parsers.reasoning import ReasoningFormat, get_reasoning
from tool_call_parsers.row_checks import check_types
from tool_call_parsers.schema import ToolIndex
from tool_call_parsers.tokens import Aligned, TokenMap, TokenStream, unmask_json, unmask_repr
from tool_call_parsers.types import (
    ArgumentsDelta,
    CallSpan,
    CallStart,
    ContentDelta,
    Event,
    ParsedCompletion,
    ParsedToolCall,
    ReasoningDelta,
    ToolSchemas,
    new_call_id,
)

if TYPE_CHECKING:
    from tool_call_parsers.token_run import TokenRun

ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<|eot|>")
"""End-of-turn tokens that many models share. At the end of a completion they are dropped."""
SCRATCHPAD = ("<REASONING_SCRATCHPAD>", "</REASONING_SCRATCHPAD>")
"""Tags of reasoning that Hermes Agent's prompts name. Calls that a model drafts between them are no calls."""

AnyRun = TypeVar("AnyRun", bound=Run)


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table of formats: name, grammar and metadata."""

    name: str
    """vLLM's spelling where vLLM has the format."""
    grammar: Grammar
    """How calls are read and written."""
    models: str
    """The models that write it."""
    aliases: tuple[str, ...] = ()
    """Other names."""
    reasoning: str | None = None
    """The reasoning format of its models, by name. `reasoning="auto"` selects it."""
    channels: bool = False
    """The format has a channel for reasoning, which is read whatever `reasoning` says."""
    ends: tuple[str, ...] = ()
    """Further end-of-turn tokens."""
    lossy: str = ""
    """What the format cannot write, so that `parse(render(x))` differs from `x`."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.reasoning is not None:
            get_reasoning(self.reasoning)  # raises for an unknown one


class ToolCallParser:
    """One wire format. Stateless: one instance serves any number of completions at once."""

    __slots__ = (
        "_hides",
        "_markers",
        "_markup",
        "_tokens",
        "_with_scratchpad",
        "format",
        "reads_reasoning",
        "reasoning",
    )

    def __init__(self, format: Format, reasoning: str | None, tokenizer: Any = None) -> None:
        """For the arguments see `get_parser`."""
        self.format = format
        named = reasoning if reasoning is not None and reasoning != "auto" else format.reasoning
        self.reasoning = own = get_reasoning(named) if named is not None else None
        """How the model marks reasoning, whether or not the parser reads it."""
        separate = own is None or not own.keeps_markers
        self.reads_reasoning = (reasoning is not None and separate) or format.channels
        self._hides = own if own is not None and self.reads_reasoning else _hiding(own)
        self._markers = format.grammar.markers(self._hides, (*ENDS, *format.ends))
        self._with_scratchpad: tuple[ReasoningFormat, Markers] | None = None
        self._markup: str | None = None
        self._tokens = self.token_map(tokenizer) if tokenizer is not None else None

    def __repr__(self) -> str:
        return f"<ToolCallParser {self.format.name}>"

    @property
    def name(self) -> str:
        """The format's name."""
        return self.format.name

    @property
    def tokens(self) -> TokenMap | None:
        """How text aligns with the tokens of `tokenizer`."""
        return self._tokens

    @property
    def tokenizer(self) -> Any:
        """The tokenizer whose ids the parser reads; None if it was made without one."""
        return self._tokens.tokenizer if self._tokens is not None else None

    def token_map(self, tokenizer: Any) -> TokenMap:
        """How completions of this format align with the tokens of a tokenizer."""
        ends = [name for name, kind in self._markers.kinds.items() if kind is Marker.END and not self.is_markup(name)]
        return TokenMap(tokenizer, belongs=self.is_markup, ends=ends)

    def parse(
        self,
        text: str | None,
        tools: ToolSchemas | None = None,
        *,
        token_ids: Sequence[int] | Aligned | None = None,
        prompt_opened_reasoning: bool = False,
        strict: bool = False,
    ) -> ParsedCompletion:
        """Parse a whole completion. Never raises on any text; raises `TypeError` or `ValueError` for misuse.

        tools: the schemas that the model was offered, for names and for the types of untyped values.
        token_ids: the tokens of `text`, special ones included (`text` may then be None), or what `tokens.align` made
            of them; needs a parser made with
            `tokenizer=`. Markers that are special tokens then count only as tokens, and a call with another special
            token in it, or with an id without text, is malformed.
        prompt_opened_reasoning: the generation prompt ended inside reasoning (`...<think>\\n`).
        strict: calls that need a repair are rejected.
        """
        aligned = None
        if not isinstance(text, str) and (text is not None or token_ids is None):
            raise TypeError(f"text must be a str, not {type(text).__name__}")
        if isinstance(token_ids, Aligned):
            aligned = token_ids
        elif token_ids is not None:
            if self._tokens is None:
                raise ValueError(
                    "token_ids: the parser was made without a tokenizer; use get_parser(name, tokenizer=...)"
                )
            aligned = self._tokens.align(text, token_ids)
        shape = self._of_scratchpads((text or "") if aligned is None else aligned.masked)
        if aligned is None or not aligned.strays:
            run = self._run(Run, tools, prompt_opened_reasoning, strict, shape)
            self._read(run, text or "" if aligned is None else aligned.masked)
            return run.result() if aligned is None else _with_tokens(run.result(), aligned)
        from tool_call_parsers.token_run import TokenRun  # of streams, and of the rare completions with stray tokens

        stray = self._run(TokenRun, tools, prompt_opened_reasoning, strict, shape)
        stray.tokens = aligned
        self._read(stray, aligned.masked)
        stray.note_hidden(self.format.grammar, aligned)
        return _with_tokens(stray.result(), aligned)

    def stream(
        self, tools: ToolSchemas | None = None, *, prompt_opened_reasoning: bool = False, strict: bool = False
    ) -> StreamingParser:
        """Start a parser for one completion that arrives in pieces. Takes the arguments of `parse`."""
        from tool_call_parsers.token_run import TokenRun

        run = self._run(TokenRun, tools, prompt_opened_reasoning, strict)
        run.events = []
        return StreamingParser(run, self.format.grammar, self._tokens)

    def render(
        self,
        content: str | None = None,
        reasoning: str | None = None,
        tool_calls: Iterable[ParsedToolCall | Mapping[str, Any]] = (),
        tools: ToolSchemas | None = None,
    ) -> str:
        """Write an assistant turn as the model does, without the end-of-turn token.

        tool_calls: parsed calls, or OpenAI's `{"id", "function": {"name", "arguments"}}` with JSON text or an object
            as arguments. Formats that hold JSON keep the JSON text of parsed calls verbatim.
        Raises `ValueError` if the format cannot write reasoning, or if arguments are not an object.
        """
        for what, text in (("content", content), ("reasoning", reasoning)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{what} must be a str, not {type(text).__name__}")
        if reasoning is not None and self.reasoning is None and not self.format.channels:
            raise ValueError(
                f"reasoning: format {self.format.name!r} has none; name one with get_parser(reasoning=...)"
            )
        calls = tuple(_render_call(call, index) for index, call in enumerate(tool_calls))
        return self.format.grammar.render(RenderTurn(content or "", reasoning, calls, ToolIndex(tools), self.reasoning))

    def is_markup(self, token: str) -> bool:
        """Whether a token's text belongs to the format or its reasoning. The other special tokens of a vocabulary
        (roles, padding, end of text) mean nothing inside a completion."""
        if self._markup is None:
            call = {
                "id": "call_00001",
                "function": {"name": "name", "arguments": {"key": "value", "other": {"n": [1]}}},
            }
            thought = "thought" if self.reasoning is not None or self.format.channels else None
            written = self.render("content", thought, [call, call])
            ends = {literal for literal, kind in self._markers.kinds.items() if kind is Marker.END}
            self._markup = "\n".join([written, *(set(self._markers.all.literals) - ends)])
        return token in self._markup

    def closes_call(self, text: str) -> bool:
        """Whether a text, blanks aside, is a closing marker of calls."""
        return self._markers.kinds.get(text.strip()) is Marker.CLOSE

    def _read(self, run: Run, text: str) -> None:
        run.append(text)
        run.final = True
        for _ in self.format.grammar.read(run):
            raise AssertionError("a lexer waits for text after the end of the text")

    def _run(
        self,
        kind: type[AnyRun],
        tools: ToolSchemas | None,
        opened: bool,
        strict: bool,
        shape: tuple[ReasoningFormat, Markers] | None = None,
    ) -> AnyRun:
        reasoning_format, markers = shape or (self._hides, self._markers)
        return kind(
            tools=ToolIndex(tools),
            markers=markers,
            reasoning_format=reasoning_format,
            reads_reasoning=self.reads_reasoning and self.reasoning is not None,
            opened=opened,
            strict=strict,
        )

    def _of_scratchpads(self, text: str) -> tuple[ReasoningFormat, Markers] | None:
        """Reasoning and markers for a text with the tags that prompts tell models to write which have none of their
        own; else None. Other texts do not pay for the search."""
        opener, closer = SCRATCHPAD
        if opener not in text or self._hides.channels:
            return None
        if self._with_scratchpad is None:
            own = self._hides
            marks = (*own.opens, opener), (*own.closes, closer)
            shape = replace(own, opens=marks[0], closes=marks[1], inside=("\n", "\n"), after="\n")
            self._with_scratchpad = shape, self.format.grammar.markers(shape, (*ENDS, *self.format.ends))
        return self._with_scratchpad


def _hiding(own: ReasoningFormat | None) -> ReasoningFormat:
    """Reasoning that is not read still hides the calls drafted in it, in the format's markers and the common ones."""
    common = get_reasoning("deepseek_r1")
    if own is None or common.opens[0] in own.opens:
        return own or common
    return replace(own, opens=(*own.opens, *common.opens), closes=(*own.closes, *common.closes))


@dataclass(slots=True, eq=False)
class StreamingParser:
    """One completion, fed in pieces. However the text is cut, the result is that of `parse` for the whole."""

    _run: TokenRun
    _grammar: Grammar
    _token_map: TokenMap | None
    _tokens: TokenStream | None = None
    _lexer: Generator[None, None, None] = field(init=False)
    _finished: ParsedCompletion | None = None
    last_events: list[Event] = field(default_factory=list)
    """The events of the last `feed` or `finish`."""

    def __post_init__(self) -> None:
        self._lexer = self._grammar.read(self._run)

    def feed(self, text: str, token_ids: Sequence[int] | None = None) -> list[Event]:
        """Add text and return the events that it makes certain. Pass ids with every piece or with none."""
        if self._finished is not None:
            raise ValueError("feed: the stream is finished")
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, not {type(text).__name__}")
        if token_ids is None:
            if self._tokens is not None:
                raise ValueError("token_ids: missing for this piece, given for the first")
        else:
            if self._tokens is None:
                if self._token_map is None:
                    raise ValueError("token_ids: the parser was made without a tokenizer")
                if self._run.text:
                    raise ValueError("token_ids: given for this piece, missing for the first")
                self._tokens = self._run.tokens = TokenStream(self._token_map)
            text = self._tokens.feed(text, token_ids)
        self._run.append(text)
        return self._advance()

    def finish(self) -> ParsedCompletion:
        """End the completion and return the result of `parse` for all of it. `last_events` has the last events."""
        if self._finished is None:
            aligned = None
            if self._tokens is not None:
                aligned = self._tokens.finish()
                self._run.append(aligned.masked[len(self._run.text) :])
            self._run.final = True
            self._advance(aligned)
            result = self._run.result()
            self._finished = result if aligned is None else _with_tokens(result, aligned)
        return self._finished

    def _advance(self, aligned: Aligned | None = None) -> list[Event]:
        next(self._lexer, None)
        if aligned is not None and aligned.strays:
            self._run.note_hidden(self._grammar, aligned)
        events, self._run.events = self._run.events or [], []
        if self._tokens is not None:
            events = [_event_with_tokens(event, self._tokens) for event in events]
        self.last_events = events
        return events


def _render_call(call: ParsedToolCall | Mapping[str, Any], index: int) -> RenderCall:
    if isinstance(call, ParsedToolCall):
        return RenderCall(call.id, call.name, call.arguments, call.arguments_json, index)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise TypeError(f"tool_calls[{index}] must be a parsed call or a mapping that holds a function")
    name, given = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool_calls[{index}] names no function")
    if given is not None and not isinstance(given, str | Mapping):
        raise ValueError(f"tool_calls[{index}].function.arguments is not an object")
    try:
        if isinstance(given, str):
            text = given.strip() or "{}"
        else:
            text = json.dumps(dict(given or {}), ensure_ascii=False, allow_nan=False)
        # Decode objects too: grammars then get plain JSON types, whatever types the caller used.
        arguments = json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"tool_calls[{index}].function.arguments is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"tool_calls[{index}].function.arguments is not an object")
    return RenderCall(str(call.get("id") or new_call_id()), name, arguments, text, index)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _with_tokens(result: ParsedCompletion, aligned: Aligned) -> ParsedCompletion:
    """The result with masks undone and spans in tokens."""
    masked = aligned.masked != aligned.text
    if not masked and not result.attempts:
        return result
    attempts = tuple(_call_with_tokens(call, aligned, masked) for call in result.attempts)
    usable = {id(call) for call in result.tool_calls}
    return replace(
        result,
        content=_unmasked(result.content, aligned.unmask) if masked else result.content,
        reasoning=_unmasked(result.reasoning, aligned.unmask) if masked else result.reasoning,
        tool_calls=tuple(new for old, new in zip(result.attempts, attempts, strict=True) if id(old) in usable),
        attempts=attempts,
    )


def _event_with_tokens(event: Event, tokens: TokenStream) -> Event:
    unmask = tokens.unmask
    if isinstance(event, ContentDelta | ReasoningDelta):
        return replace(event, text=unmask(event.text))
    if isinstance(event, CallStart):
        return replace(event, id=unmask(event.id), name=unmask(event.name))
    if isinstance(event, ArgumentsDelta):
        return replace(event, fragment=unmask_json(event.fragment, unmask))
    return replace(event, call=_call_with_tokens(event.call, tokens))


def _call_with_tokens(call: ParsedToolCall, tokens: Aligned | TokenStream, masked: bool = True) -> ParsedToolCall:
    """The call with its span in tokens, and unmasked if its text has masks."""
    unmask, (start, end, *_) = tokens.unmask, call.span
    span = CallSpan(start, end, *tokens.token_span(start, end))
    if not masked:
        return replace(call, span=span)
    return replace(
        call,
        id=unmask(call.id),
        name=unmask(call.name),
        arguments=_unmasked(call.arguments, unmask),
        arguments_raw=unmask(call.arguments_raw),
        raw=unmask(call.raw),
        error=call.error and unmask_repr(call.error, unmask),
        span=span,
    )


def _unmasked(value: Any, unmask: Callable[[str], str]) -> Any:
    """A value with all its strings unmasked. The depth of arguments is bounded."""
    if isinstance(value, str):
        return unmask(value)
    if isinstance(value, dict):
        return {unmask(key): _unmasked(item, unmask) for key, item in value.items()}
    if isinstance(value, list):
        return [_unmasked(item, unmask) for item in value]
    return value
