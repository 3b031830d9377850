"""Tags with a suffix that differs between checkpoints: `<tool_call:opensource>`, as Hunyuan writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from tool_call_parsers.engine import BlockGrammar, RenderTurn, Run, Step, cut_off
from tool_call_parsers.tag_blocks.blocks import TagBlocks

T = TypeVar("T", bound=tuple[str, ...])

_SUFFIX_LIMIT = 40
_SUFFIXES = 8
"""How many suffixes a completion may use. A checkpoint has one, and each costs new patterns."""
_SUFFIX = re.compile(r"((?>(?::[^\s<>]{1,32})?))>")
_SUFFIX_BEGIN = re.compile(r"(?>(?::[^\s<>]{0,32})?)")


@dataclass(frozen=True)
class SuffixedTags(BlockGrammar):
    """`TagBlocks` that reads the suffix from the first tag of a block, and writes none."""

    plain: TagBlocks

    openers = cached_property(lambda self: tuple(tag.removesuffix(">") for tag in self.plain.openers))
    closers = cached_property(lambda self: self.plain.closers)
    separators = cached_property(lambda self: self.plain.separators)

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        while (match := _SUFFIX.match(run.text, body)) is None:
            if run.final or len(run.text) > body + _SUFFIX_LIMIT or _SUFFIX_BEGIN.fullmatch(run.text, body) is None:
                if run.final and _SUFFIX_BEGIN.fullmatch(run.text, body) is not None:
                    return cut_off(run, start, self.separators)
                return None
            yield
        if match[1] not in run.hints:
            if sum(hint[:1] == ":" for hint in run.hints) >= _SUFFIXES:
                return None
            run.hints.add(match[1])
        tags = _with_suffix(self.plain, match[1])
        return (yield from tags.block(run, start, match.end(), f"{opener}{match[1]}>"))

    def render_calls(self, turn: RenderTurn) -> str:
        return self.plain.render_calls(turn)


@lru_cache(maxsize=16)
def _with_suffix(tags: TagBlocks, suffix: str) -> TagBlocks:
    if not suffix:
        return tags

    def spell(spellings: T) -> T:
        return tuple(tag[:-1] + suffix + ">" for tag in spellings)  # type: ignore[return-value]  # as many as before

    template = suffix.replace("{", "{{").replace("}", "}}")
    before, after = tags.around
    return replace(
        tags,
        around=(before.replace(">", suffix + ">"), after.replace(">", suffix + ">")),
        call=tags.call.replace(">", template + ">"),
        parameter=tags.parameter.replace(">", template + ">"),
        calls=spell(tags.calls),
        ends=spell(tags.ends),
        parameters=spell(tags.parameters),
        value_ends=spell(tags.value_ends),
        wraps=spell(tags.wraps),
        unwraps=spell(tags.unwraps),
        pair=spell(tags.pair),
        name_end="".join(spell((tags.name_end,))),
    )
