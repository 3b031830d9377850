"""Compares the run's tokenizer with that of a model server before tokens are sampled there.

Requests carry ids. With another tokenizer than the server's they mean other text, and nothing fails: the model answers,
the answer decodes to other words, and all digests are right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from backends.errors import ExitCode
from lachesis_client.errors import BadResponse, ContextExhausted, InferenceError, RequestRejected, ServerUnavailable
from lachesis_tokens.engines.base import ServerTokenizer, TokenEngine
from lachesis_tokens.prompts.text_encoder import TextEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT: Final = (
    "The quick brown fox jumps over the lazy dog. SPHINX OF BLACK QUARTZ, JUDGE MY VOW! I'll, we've, don't\n"
    '0123456789 3.14159 1,000,000 2026-11-23 [x*(y+z)/2 <= 7] {"key": [true, null]} a_b = c->d; // é\r\n'
    "\tdef f(x):\n        return x  # naïve Größe, żółć, Привет мир, Ελλάδα, שלום, العربية, हिन्दी, 東京, 안녕 🙂👩‍💻\n"
    "<think></think><tool_call></tool_call><tool_response></tool_response><|im_start|><|im_end|><|endoftext|><|eot_id|>"
    "<|start_header_id|><|python_tag|><|channel|><|message|><start_of_turn><end_of_turn>[INST][TOOL_CALLS]<|end|></s>"
)
"""All letters and digits, punctuation, white space, scripts that byte-level and SentencePiece models split, and markup
that has tokens of its own in a later model of the same family."""
_PIECES: Final = 1024
"""Pieces of the vocabulary that are compared in addition, evenly spaced over its ids."""
_ADDED: Final = 512
"""Added tokens that are compared at most."""
_CHUNK: Final = 128
_PATIENCE: Final = 60.0
"""Seconds for one text. Some proxies let requests to routes that they do not know hang."""


class TokenizersDiffer(InferenceError):
    """The server splits text into other ids than the run does."""

    exit_code = ExitCode.SETTINGS


class TokenizerProof:
    """The comparison for one tokenizer and any number of servers.

    Args:
        name: that of the tokenizer. Default: its own.
        source: the setting that named it, for messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str = "", source: str = "") -> None:
        self.tokenizer = tokenizer
        self.name = name or str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__
        self.described = f"{self.name} ({source})" if source else self.name
        self._outages: dict[str, int] = {}
        """Of the servers that were compared: lost connections up to then."""
        self._lock = asyncio.Lock()

    @cached_property
    def encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    @cached_property
    def _begin(self) -> list[int]:
        """The begin-of-text token, where the tokenizer adds one."""
        return list(self.tokenizer("")["input_ids"])

    def to_record(self) -> dict[str, str]:
        """Plain JSON: its name, and a digest of its vocabulary."""
        return {"name": self.name, "digest": self.encoder.fingerprint().hex()}

    async def prove(self, engine: TokenEngine) -> bool:
        """Whether the server was compared; False if it has no way to, or shows no ids of special tokens.

        Raises:
            TokenizersDiffer: it splits a text otherwise. The message has the first difference.
        """
        outages = _outages(engine)
        try:
            if not await self._compare_briefly(engine):
                return False
            for text in await asyncio.to_thread(self._pieces):
                if not await self._compare(engine, text, added=False):
                    return False
        except ServerUnavailable:
            return False
        self._outages[engine.base_url] = outages
        return True

    async def prove_again(self, engine: TokenEngine) -> None:
        """After a compared server was lost, or not used for seconds: another model may be there now.

        Raises:
            TokenizersDiffer: there is.
            ServerUnavailable: it no longer says.
        """
        if self._outages.get(engine.base_url, _outages(engine)) == _outages(engine):
            return
        async with self._lock:
            if self._outages[engine.base_url] != (outages := _outages(engine)):
                if not await self._compare_briefly(engine):
                    cause = "it does not say how it splits text any more, so that another model may be there now"
                    raise ServerUnavailable(engine.base_url, cause, 1)
                self._outages[engine.base_url] = outages

    async def _compare_briefly(self, engine: TokenEngine) -> bool:
        specials = await asyncio.to_thread(self._specials)
        for text, added in ((_TEXT, False), *((one, True) for one in specials)):
            if not await self._compare(engine, text, added=added):
                return False
        return True

    async def _compare(self, engine: TokenEngine, text: str, *, added: bool) -> bool:
        theirs = await _ids_of(engine, text)
        if theirs is None:
            return False
        if added and not set(self.encoder.added.values()).difference(self._begin).intersection(theirs):
            return False  # the route takes no text for them, or the model has none of them
        if (difference := await asyncio.to_thread(self._difference, text, theirs, added=added)) is not None:
            raise TokenizersDiffer(
                engine.base_url,
                f"model {engine.settings.model_name!r} has another tokenizer than {self.described}: {difference}",
                "set --openai.tokenizer_name to the folder or name of the tokenizer that the server was started with",
            )
        return True

    def _difference(self, text: str, theirs: Sequence[int], *, added: bool) -> str | None:
        """The first difference. Text that the server splits otherwise, into ids of the same meaning, is none:
        implementations disagree about rare text. The text of an added token has one id."""
        ours = self.encoder.encode(text)
        with_begin = [*self._begin, *ours]  # some routes always add the begin-of-text token
        if list(theirs) in (ours, with_begin, list(self.tokenizer(text)["input_ids"])):
            return None
        # SentencePiece models may begin a text with a blank.
        meant = {self._decoded(ids).lstrip(" ") for ids in (ours, with_begin)}
        if not added and self._decoded(theirs).lstrip(" ") in meant:
            return None
        at = next(
            (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        before = self._decoded(ours[max(0, at - 4) : at])
        here, there = (f"{ids[at : at + 4]} ({self._decoded(ids[at : at + 4])!r})" for ids in (ours, list(theirs)))
        return f"after {before!r}, the ids of the run are {here}, and those of the server {there}"

    def _decoded(self, ids: Sequence[int]) -> str:
        try:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        except (IndexError, OverflowError, TypeError):  # ids beyond the vocabulary
            return "?"

    def _specials(self) -> list[str]:
        """Texts of the added tokens, which must get the same ids: first those that conversations are made of."""
        used = {*self.tokenizer.all_special_tokens}
        template = str(self.tokenizer.chat_template or "")
        first = [text for text in self.encoder.added if text in used or text in template]
        others = [text for text in self.encoder.added if text not in set(first)]
        return _chunks([*first[:_ADDED], *others[:: 1 + len(others) // _ADDED]])

    def _pieces(self) -> list[str]:
        """Texts of pieces of the vocabulary."""
        size, added = len(self.tokenizer), set(self.encoder.added.values())
        ids = dict.fromkeys((*range(0, size, max(1, size // _PIECES)), size - 1))
        texts = [self.tokenizer.decode([token]) for token in ids if token not in added]
        return _chunks([text for text in texts if text and "\ufffd" not in text])


async def _ids_of(engine: TokenEngine, text: str) -> list[int] | None:
    if not isinstance(engine, ServerTokenizer):
        return None
    try:
        async with asyncio.timeout(_PATIENCE):
            return await engine.tokenize(text)
    except (BadResponse, ContextExhausted, RequestRejected, TimeoutError):
        return None


def _outages(engine: TokenEngine) -> int:
    return int(getattr(engine, "outages", 0))


def _chunks(texts: Sequence[str]) -> list[str]:
    return ["".join(texts[at : at + _CHUNK]) for at in range(0, len(texts), _CHUNK)]
