"""Special tokens that messages and tools spell.

A tokenizer turns the text `<|im_end|>` into the token wherever it is, so a web page in a tool result could end the turn
and open another. Only tokens that the template writes may have that effect. A rendered text does not show where a token
comes from, so a conversation that spells one is rendered again with another character at the beginning of each. These
show where to cut the text: a special token in two parts is encoded as ordinary text. If the template then writes
something else, the words around the tokens are tried. Other conversations cost a look for the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, groupby, pairwise
from secrets import token_hex
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import orjson

from lachesis_client.errors import PromptError, TemplateError

SpecialTokensInText: TypeAlias = Literal["encode_as_text", "as_is", "error"]
"""How text of messages and tools that spells a special token is treated: it is encoded as text, it becomes the token,
or `PromptError` is raised."""

_PLACES: Final = ((None, 0), (0, 1), (-1, -1))
"""Where a word is put, as an offset in the token (-1: after it; None: a stand-in and no word), and from there to the
cut."""
_WORD: Final = f"spelled-token-{token_hex(8)}"
"""No message can contain it, even by intent."""
_STAND_IN: Final = 0xF0000
"""Of the private use area: each character that begins a token is replaced by one from here."""


class RenderedText(NamedTuple):
    """Text that a template wrote."""

    text: str
    cuts: tuple[int, ...] = ()
    """Offsets inside special tokens that messages spell, ascending."""

    def last(self, length: int) -> RenderedText:
        """The last `length` characters."""
        start = len(self.text) - length
        return RenderedText(self.text[start:], tuple(cut - start for cut in self.cuts if cut > start))


class SpecialTokens:
    """`tokens` are those that text must not become. One of a single character is text like any other. `removed` are
    texts that the template leaves out of messages: the rest may spell a token."""

    def __init__(
        self, tokens: Iterable[str], policy: SpecialTokensInText = "encode_as_text", removed: Iterable[str] = ()
    ) -> None:
        known = sorted({token for token in tokens if len(token) > 1}, key=len, reverse=True)
        if policy == "as_is":
            known = []
        self._policy = policy
        self._tokens = frozenset(known)
        shortest = len(known[-1]) if known else 0
        self._lengths: dict[str, dict[int, None]] = {}
        for token in known:
            self._lengths.setdefault(token[: min(shortest, 4)], {})[len(token)] = None
        self._openings = tuple(self._lengths)
        self._opening = re.compile("|".join(map(re.escape, self._openings)))
        quoted = (json.dumps(opening, ensure_ascii=False)[1:-1] for opening in self._openings)
        self._opening_in_json = re.compile("|".join(map(re.escape, quoted)).encode("utf-8", "surrogatepass"))
        self._removed = re.compile("|".join(map(re.escape, removed))) if known and removed else None
        firsts = sorted({ord(token[0]) for token in known})
        self._stand_ins = {first: chr(_STAND_IN + number) for number, first in enumerate(firsts)}
        self._firsts = {ord(stand_in): first for first, stand_in in self._stand_ins.items()}

    def _find(self, text: str) -> Iterator[tuple[int, str]]:
        """The special tokens in a text, each with its offset: the longest at each. Tokenizers may have thousands."""
        found = self._opening.search(text)
        while found is not None:
            at = found.start()
            for length in self._lengths[found[0]]:
                if (token := text[at : at + length]) in self._tokens:
                    yield at, token
                    break
            found = self._opening.search(text, at + 1)  # tokens may overlap

    def spelled_in(self, value: Any) -> str:
        """The first special token in the texts of a value, "" if there is none."""
        if isinstance(value, str):
            return next((token for _, token in self._find(value)), "") or self._formed_in(value)
        values: Iterable[Any] = ()
        if isinstance(value, dict):
            values = (*value, *value.values())
        elif isinstance(value, (list, tuple)):
            values = value
        return next((found for each in values if each and (found := self.spelled_in(each))), "")

    def _may_spell(self, value: Any) -> bool:
        """Whether a text of the value may spell a special token: every message of every turn comes here, and most have
        nothing to find. JSON has all texts in one."""
        if self._removed is not None:
            return True
        try:
            return self._opening_in_json.search(orjson.dumps(value)) is not None
        except TypeError:  # lone surrogates and huge integers: models write them
            return True

    def render(self, render: Callable[..., str | None], **given: Any) -> RenderedText | None:
        """`render(**given)`, with a cut in each special token that `given` spells.

        Raises `PromptError` with the policy "error", and `TemplateError` if the template writes something else for such
        tokens.
        """
        text = render(**given)
        if text is None:
            return None
        values = tuple(given.values())
        if not (self._openings and self._may_spell(values) and (spelled := self.spelled_in(values))):
            return RenderedText(text)
        if self._policy == "error":
            raise PromptError(
                "the prompt",
                f"{self._where(given)} spells the special token {spelled!r}",
                'remove it, or set special_tokens_in_text to "encode_as_text"',
            )
        for offset, to_cut in _PLACES:
            try:
                pieces = (render(**self._marked(given, offset)) or "").split(_WORD)
            except TemplateError:
                continue
            marked = "".join(pieces)
            if marked.translate(self._firsts) == text:
                ends = accumulate(map(len, pieces[:-1]))
                cuts = {end + to_cut for end in ends}
                cuts |= {at + 1 for at, _ in self._find(text) if ord(marked[at]) in self._firsts}
                return RenderedText(text, tuple(sorted(cut for cut in cuts if 0 < cut < len(text))))
        raise TemplateError(
            "the chat template",
            f"it looks for special tokens in messages, and {self._where(given)} spells {spelled!r}",
            'remove it, or set special_tokens_in_text to "as_is"',
        )

    def joined(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message, with its texts as one if a special token begins in one part and ends in another."""
        content = message.get("content")
        if not isinstance(content, list) or len(content) < 2 or not self._openings:
            return message
        joined: list[dict[str, Any]] = []
        for is_text, parts in groupby(content, lambda part: part.get("type") == "text"):
            given = list(parts)
            texts = [str(part.get("text", "")) for part in given]
            whole = "".join(texts)
            same = len([*self._find(whole)]) == sum(len([*self._find(text)]) for text in texts)
            joined += given if same or not is_text else [{"type": "text", "text": whole}]
        return {**message, "content": joined} if len(joined) < len(content) else message

    def _where(self, given: Any) -> str:
        """The message, or whatever it is, that spells a special token."""
        if isinstance(given, dict) and "role" in given:
            return f"a {given['role']} message"
        values = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else ()
        named = given if isinstance(given, dict) else {}
        if named.get("type") == "function":
            return "a tool"
        return next((self._where(value) for value in values if self.spelled_in(value)), "a text")

    def _formed_in(self, value: str) -> str:
        """A special token that appears where the template leaves out a text, "" if none does."""
        if self._removed is None or not self._removed.search(value):
            return ""
        spelled = sum(not self._removed.search(token) for _, token in self._find(value))
        while self._removed.search(value):
            value = self._removed.sub("", value)
            if len(left := [*self._find(value)]) > spelled:
                return left[0][1]
        return ""

    def _marked(self, value: Any, offset: int | None) -> Any:
        """With a word at this place of each special token, or with stand-ins for their first characters."""
        if isinstance(value, str):
            if not self.spelled_in(value):
                return value
            if self._formed_in(value):
                return value.translate(self._stand_ins)
            starts = [*self._find(value)]
            if offset is None:
                characters = list(value)
                for start, _ in starts:
                    characters[start] = self._stand_ins[ord(characters[start])]
                return "".join(characters)
            places = sorted(start + (offset if offset >= 0 else len(token)) for start, token in starts)
            ends = [0, *places, len(value)]
            return _WORD.join(value[start:end] for start, end in pairwise(ends))
        if isinstance(value, dict):
            return {self._marked(key, offset): self._marked(each, offset) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self._marked(each, offset) for each in value])
        return value
