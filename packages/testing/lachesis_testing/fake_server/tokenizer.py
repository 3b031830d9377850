"""A small real tokenizer, and `Codec`: bytes and text of ids, ids of text, prompts of messages."""

from __future__ import annotations

import copy
import functools
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from lachesis_testing.fake_server.corpus import CORPUS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

IMAGE_TOKEN: Final = "<|image_pad|>"
IMAGE_TOKENS: Final = ("<|vision_start|>", IMAGE_TOKEN, "<|vision_end|>")
"""Those of Qwen-VL."""
VOCABULARY: Final = 1400
"""Ids of bytes and merges. The added tokens follow."""
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, TURN_START, TURN_END)
ADDED_TOKENS: Final = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
"""One id each. They are part of the text and never skipped, as in Qwen's tokenizers."""


def fake_tokenizer(*, chat_template: str | None = None, images: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML tokens: the same ids on every machine, for any text, and nothing is downloaded.

    End of turn is `<|im_end|>`. `chat_template` defaults to `hermes.jinja` of `lachesis_tokens.templates`.
    `images` adds the tokens with which this template writes images.
    """
    from transformers import AddedToken, PreTrainedTokenizerFast

    if chat_template is None:
        chat_template = (resources.files("lachesis_tokens.templates") / "files" / "hermes.jinja").read_text("utf-8")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(),
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=2**20,
    )
    if images:
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in IMAGE_TOKENS])
    tokenizer.chat_template = chat_template
    return tokenizer


def letter_swapped(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A byte-level BPE of the same size whose ids mean other letters: each vowel the next one, in all pieces.

    What a wrong tokenizer does: it splits text plausibly, raises nothing, and means something else.
    """
    from tokenizers import Tokenizer

    other = copy.deepcopy(tokenizer)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    swap = str.maketrans("aeiou", "eioua")
    model = state["model"]
    model["vocab"] = {piece.translate(swap): index for piece, index in model["vocab"].items()}
    model["merges"] = [[part.translate(swap) for part in merge] for merge in model["merges"]]
    for added in state["added_tokens"]:  # they are not part of the vocabulary's pieces
        model["vocab"].pop(added["content"].translate(swap), None)
    other._tokenizer = Tokenizer.from_str(json.dumps(state))
    return other


def _byte_level_bpe() -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED_TOKENS])
    return tokenizer


class Codec:
    """The fake server's view of a tokenizer. Its tables are built once and never change."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast: Tokenizer = tokenizer.backend_tokenizer
        self.vocabulary_size: int = len(tokenizer)
        added = self._fast.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._texts: dict[int, str] = {index: token.content for index, token in added.items()}
        state = json.loads(self._fast.to_str())
        self.byte_level = "ByteLevel" in json.dumps(state.get("decoder"))
        self.bytes_of: Sequence[bytes] = [self._bytes(index) for index in range(self.vocabulary_size)]
        """The bytes that each id adds to the text."""
        self._words = functools.lru_cache(maxsize=4096)(self.encode)
        self.id_of_bytes: Mapping[bytes, int] = {
            piece: index for index, piece in reversed(list(enumerate(self.bytes_of))) if index not in self._texts
        }
        """The lowest ordinary id that adds these bytes."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        return () if self.tokenizer.eos_token_id is None else (int(self.tokenizer.eos_token_id),)

    @functools.cached_property
    def token_texts(self) -> list[str]:
        """The text of each id alone, as servers report it with a logprob."""
        return [piece.decode("utf-8", "replace") for piece in self.bytes_of]

    @functools.cached_property
    def opening(self) -> bytes:
        """The packed ids that open a turn of the model, or b"" if the template raises.

        White space at their end is left out, because it may merge with the following text.
        """
        asked = [{"role": "user", "content": "a"}]
        try:
            without, opened = self.render(asked, None, add_generation_prompt=False), self.render(asked, None)
        except Exception:  # templates raise any exception
            return b""
        return _packed(self.encode(opened[len(without) :].rstrip())) if opened.startswith(without) else b""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text. The text of a special token becomes its id, as in servers."""
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def prose(self, words: Sequence[str]) -> list[int]:
        """The ids of words with spaces between. Each word is encoded alone and cached."""
        encoded = self._words
        return [index for place, word in enumerate(words) for index in encoded(f" {word}" if place else word)]

    def spell(self, text: str) -> list[int]:
        """The ids of a text in ordinary tokens, also for the text of a special token."""
        middle = max(1, len(text) // 2)
        return [*self.encode(text[:middle]), *self.encode(text[middle:])] if len(text) > 1 else self.encode(text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids. Invalid UTF-8 becomes U+FFFD."""
        skipped = self.special_ids if skip_special else ()
        pieces = self.bytes_of
        return b"".join([pieces[index] for index in ids if index not in skipped]).decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation with the tokenizer's chat template. Raises the template's exceptions."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_kwargs,
            )
        )

    def turns(self, ids: Sequence[int]) -> int:
        """The number of the model's turns in a prompt, without the one that it opens."""
        if not self.opening:
            return sum(index in self.end_ids for index in ids)
        packed, found, start = _packed(ids), 0, 0
        while (start := packed.find(self.opening, start)) >= 0:
            found += start % 4 == 0
            start += 1
        return max(0, found - 1)

    def _bytes(self, index: int) -> bytes:
        if (text := self._texts.get(index)) is not None:
            return text.encode()
        token: str | None = self._fast.id_to_token(index)
        if token is None:
            return b""  # a hole in the vocabulary
        if self.byte_level:
            return bytes(_BYTES[character] for character in token if character in _BYTES)
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def _packed(ids: Iterable[int]) -> bytes:
    return array("i", ids).tobytes()


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES: Final = _byte_characters()
