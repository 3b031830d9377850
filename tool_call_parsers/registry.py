"""The parsers that there are, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tool_call_parsers.formats import FOLDED, NAMES, fold, load_format
from tool_call_parsers.types import MinimalParser

if TYPE_CHECKING:
    from tool_call_parsers.parser import Format, ToolCallParser

AUTO = "auto"
F = TypeVar("F", bound="Callable[[], MinimalParser]")


class UnknownParser(ValueError, KeyError):
    """No parser has that name."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class _Registry:
    """Formats, and parsers that users registered, by folded name."""

    def __init__(self) -> None:
        self._names = dict(FOLDED)
        self._made: dict[tuple[str, str | None], ToolCallParser] = {}
        self.entries: dict[str, Format | Callable[[], MinimalParser] | None] = dict.fromkeys(NAMES)
        """By canonical name. None for a format that is not loaded."""

    def add(self, names: tuple[str, ...], entry: Format | Callable[[], MinimalParser]) -> None:
        for name in names:
            if not isinstance(name, str) or not fold(name):
                raise ValueError(f"a parser's name must be a word, not {name!r}")
            taken = self._names.get(fold(name))
            if fold(name) == AUTO or (taken is not None and self.entries[taken] is not entry):
                raise ValueError(f"tool-call parser {name!r} is already registered, as {taken or 'the detection'}")
        self.entries[names[0]] = entry
        self._names |= {fold(name): names[0] for name in names}

    def entry(self, canonical: str) -> Format | Callable[[], MinimalParser]:
        """What is registered under a canonical name."""
        entry = self.entries[canonical]
        if entry is None:
            entry = self.entries[canonical] = load_format(canonical)
        return entry

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

        entry = self.entry(self.find(name))
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


_making = threading.Lock()


def _registry() -> _Registry:
    """The registry, made on first use.

    By one thread: what another one had registered in a second registry would be lost.
    """
    with _making:
        return _made_registry()


_made_registry = cache(_Registry)


def parser_named(name: str, reasoning: str | None = None, tokenizer: Any = None) -> ToolCallParser:
    """A parser by name. For the arguments see `get_parser`, which also detects one."""
    return _registry().parser(name, reasoning, tokenizer)


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


def list_formats() -> Iterator[Format]:
    """The formats, without parsers that are registered as classes, in the order of their registration. Each is loaded
    when the iterator comes to it."""
    from tool_call_parsers.parser import Format

    registry = _registry()
    for name in list(registry.entries):
        if isinstance(entry := registry.entry(name), Format):
            yield entry


def list_parsers() -> list[str]:
    """The canonical names, sorted. `get_parser(name).format.aliases` has the other names."""
    return sorted(_registry().entries)
