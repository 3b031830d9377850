"""Parsers by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from tool_call_parsers.types import ParsedCompletion, ToolSchemas

if TYPE_CHECKING:
    from tool_call_parsers.detect import Detection
    from tool_call_parsers.parser import Format, ToolCallParser

AUTO = "auto"
F = TypeVar("F", bound="Callable[[], MinimalParser]")


class MinimalParser(Protocol):
    """The interface that a registered parser must have."""

    def parse(self, text: str, tools: ToolSchemas | None = None) -> ParsedCompletion:
        """Parse a whole completion. Never raises on any text."""
        ...


class UnknownParser(ValueError, KeyError):
    """No parser has that name."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


def fold(name: str) -> str:
    """The name without case, `-`, `_`, `.` and blanks, so that spellings of one name are equal."""
    return re.sub(r"[-_.\s]", "", name).casefold()


class _Registry:
    """Formats, and parsers that users registered, by folded name."""

    def __init__(self, formats: Iterable[Format]) -> None:
        self._names: dict[str, str] = {}
        self._made: dict[tuple[str, str | None], ToolCallParser] = {}
        self.entries: dict[str, Format | Callable[[], MinimalParser]] = {}
        for row in formats:
            self.add((row.name, *row.aliases), row)

    def add(self, names: tuple[str, ...], entry: Format | Callable[[], MinimalParser]) -> None:
        for name in names:
            if not isinstance(name, str) or not fold(name):
                raise ValueError(f"a parser's name must be a word, not {name!r}")
            taken = self._names.get(fold(name))
            if fold(name) == AUTO or (taken is not None and self.entries[taken] is not entry):
                raise ValueError(f"tool-call parser {name!r} is already registered, as {taken or 'the detection'}")
        self.entries[names[0]] = entry
        self._names |= {fold(name): names[0] for name in names}

    def find(self, name: str) -> str:
        """The canonical name."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        if (canonical := self._names.get(fold(name))) is not None:
            return canonical
        from tool_call_parsers.model_names import EXACT, MODELS, shortened

        models = {fold(model): format for format, names in MODELS.items() for model in names.split()}
        for folded in shortened(name):
            if folded in EXACT and folded != fold(name):
                continue
            if (canonical := self._names.get(folded) or models.get(folded)) is not None:
                return canonical
        if (why := _NO_FORMAT.get(fold(name))) is not None:
            raise UnknownParser(f"tool-call parser {name!r} {why}")
        import difflib  # imported here because only errors need it

        known = {**models, **self._names}
        near = difflib.get_close_matches(fold(name.rpartition("/")[2]), known, n=5, cutoff=0.5)
        hint = f"similar names: {', '.join(dict.fromkeys(known[folded] for folded in near))}; " if near else ""
        raise UnknownParser(f"tool-call parser {name!r} is unknown; {hint}known: {', '.join(sorted(self.entries))}")

    def parser(self, name: str, reasoning: str | None, tokenizer: Any) -> ToolCallParser:
        if reasoning is not None and not isinstance(reasoning, str):
            raise TypeError(f"reasoning must be a str, not {type(reasoning).__name__}")
        # Parsers hold no state: all callers without a tokenizer share one.
        if tokenizer is None and isinstance(name, str) and (made := self._made.get((name, reasoning))) is not None:
            return made
        from tool_call_parsers.parser import Format, ToolCallParser

        entry = self.entries[self.find(name)]
        if not isinstance(entry, Format):
            if reasoning not in (None, AUTO):
                raise ValueError(f"tool-call parser {name!r} is registered as a class, which reads no reasoning format")
            return cast("ToolCallParser", entry())
        parser = ToolCallParser(entry, reasoning, tokenizer)
        if tokenizer is None:
            self._made[name, reasoning] = parser
        return parser


_BY_CHECKPOINT = "reads a template that comes with the checkpoint, and is not a format; name the model's format"
_NO_FORMAT = dict.fromkeys(("hf", "responsetemplate"), _BY_CHECKPOINT)
"""Names in vLLM and SGLang that are not wire formats."""


_making = threading.RLock()


def _registry() -> _Registry:
    """The registry, made on first use: the lexers are most of the cost of importing the package.

    By one thread: what another one had registered in a second registry would be lost.
    """
    with _making:
        return _made_registry()


@cache
def _made_registry() -> _Registry:
    from tool_call_parsers.formats import FORMATS

    return _Registry(FORMATS)


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
    return _registry().parser(name, reasoning, tokenizer)


def _detect(tokenizer: Any) -> Detection:
    from tool_call_parsers.detect import detect_parser

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


def register_parser(first: Format | str, *aliases: str) -> Any:
    """Add a format: `register_parser(Format(...))`, or a class with a `parse` method:

    @register_parser("my_format", "an_alias")
    class MyParser: ...
    """
    from tool_call_parsers.parser import Format

    if isinstance(first, Format):
        _registry().add((first.name, *first.aliases, *aliases), first)
        return first
    if not isinstance(first, str):
        raise TypeError(f"first must be a Format or a name, not {type(first).__name__}")

    def register(factory: F) -> F:
        if not callable(factory):
            raise TypeError(f"a parser's factory must be callable, and {type(factory).__name__} is not")
        _registry().add((first, *aliases), factory)
        return factory

    return register


def list_formats() -> list[Format]:
    """The formats, without parsers that are registered as classes, in the order of their registration."""
    from tool_call_parsers.parser import Format

    return [entry for entry in _registry().entries.values() if isinstance(entry, Format)]


def list_parsers() -> list[str]:
    """The canonical names, sorted. `get_parser(name).format.aliases` has the other names."""
    return sorted(_registry().entries)
