"""The text of token ids, without a tokenizer library: a vocabulary has the bytes of each id.

A token may hold a part of a character only. `texts` shows such tokens as bytes, and says which text a run of them is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from backends.errors import LachesisError
from lachesis_tokens.engines.embedded import EmbeddedServer, EmbeddedServerError
from lachesis_tokens.prompts.gguf_metadata import GGUFError, read_metadata
from tool_call_parsers.tokens import mark

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF: their texts stand for themselves."""


class NoVocabulary(LachesisError):
    """A file has no vocabulary that can be read. The message names the file and the next step."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The bytes that each id adds to a text."""

    name: str
    pieces: Sequence[bytes | None]
    """By id; None for a hole."""
    special: frozenset[int]
    """Ids of special tokens."""

    def piece(self, number: int) -> bytes | None:
        return self.pieces[number] if 0 <= number < len(self.pieces) else None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, with a mark for each without text. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.piece(number) or mark(number).encode() for number in ids).decode("utf-8", "replace")

    def texts(self, ids: Sequence[int]) -> tuple[list[str | None], list[tuple[int, int, str]]]:
        """The text of each id, None where its bytes alone are none, and the runs of these that make a text.

        A run is (place of its first token, number of tokens, text).
        """
        found: list[str | None] = []
        runs: list[tuple[int, int, str]] = []
        start, held = 0, b""
        for place, number in enumerate(ids):
            piece = self.piece(number)
            if not held:
                start = place
            try:
                text = None if piece is None else piece.decode()
            except UnicodeDecodeError:
                text = None
            found.append(text)
            if piece is None or text is not None:
                held = b""
                continue
            for begun, joined in ((start, held + piece), (place, piece)):
                try:
                    runs.append((begun, place + 1 - begun, joined.decode()))
                    held = b""
                    break
                except UnicodeDecodeError as error:
                    start, held = begun, joined if "unexpected end" in error.reason else b""
                    if held:
                        break
        return found, runs


def read_vocabulary(path: Path) -> TokenTexts:
    """The vocabulary of a GGUF file, of a `tokenizer.json`, or of a folder with one.

    Raises:
        NoVocabulary: it cannot be read.
    """
    path = path.expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if file.suffix == ".gguf":
            return _of_gguf(file)
        return _of_json(path.name, json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise NoVocabulary(
            f"{file}: no vocabulary ({reason}); give a tokenizer.json, a folder with one, or a .gguf file"
        ) from error


def vocabulary_of(settings: Mapping[str, Any]) -> TokenTexts | None:
    """The vocabulary of the tokenizer that a run's settings name, if it is on this machine. Asks no network."""
    named = settings.get("tokenizer")
    name = named.get("name") if isinstance(named, Mapping) else settings.get("base_model")  # that of a trainer
    if not isinstance(name, str) or not name:
        return None
    for path in _places(name):
        try:
            return read_vocabulary(path)
        except NoVocabulary:
            continue
    return None


def _places(name: str) -> Iterable[Path]:
    """Where the tokenizer `name` may be: the embedded model's file, a path, a folder of ours, the hub's cache."""
    if name.endswith(".gguf"):
        try:
            embedded = EmbeddedServer().model_file
        except EmbeddedServerError:
            return
        if embedded.name == Path(name).name:
            yield embedded
    if Path(name).exists():
        yield Path(name)
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from lachesis_tokens.prompts.model_folders import MADE, made_folder

    if name in MADE:
        yield made_folder(name)
        return
    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return
    if isinstance(found, str):
        yield Path(found)


def _of_json(name: str, state: Mapping[str, Any]) -> TokenTexts:
    model, added = state["model"], state.get("added_tokens") or []
    vocab = model["vocab"]  # a mapping, or the list of pairs of a unigram model
    numbered = vocab.items() if isinstance(vocab, dict) else [(pair[0], at) for at, pair in enumerate(vocab)]
    pieces = _pieces(numbered, byte_level="ByteLevel" in json.dumps(state.get("decoder")))
    pieces |= {token["id"]: token["content"].encode() for token in added}
    return _made(name, pieces, {token["id"] for token in added if token.get("special")})


def _of_gguf(path: Path) -> TokenTexts:
    metadata = read_metadata(path)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise GGUFError(path, "it has no tokenizer.ggml.tokens", "give a file with the whole model")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    numbered = [(text, at) for at, text in enumerate(tokens)]
    pieces = _pieces(numbered, byte_level=metadata.get("tokenizer.ggml.model") == "gpt2")
    verbatim = [at for at, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    pieces |= {at: tokens[at].encode("utf-8", "surrogateescape") for at in verbatim}
    return _made(path.name, pieces, {at for at, kind in enumerate(types) if kind == _CONTROL})


def _made(name: str, pieces: Mapping[int, bytes], special: Iterable[int]) -> TokenTexts:
    return TokenTexts(name, [pieces.get(at) for at in range(max(pieces) + 1)], frozenset(special))


def _pieces(numbered: Iterable[tuple[str, int]], *, byte_level: bool) -> dict[int, bytes]:
    def piece(text: str) -> bytes:
        if byte_level:
            return b"".join(_BYTES.get(each) or each.encode("utf-8", "surrogateescape") for each in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("▁", " ").encode("utf-8", "surrogateescape")

    return {number: piece(text) for text, number in numbered}


def _byte_characters() -> dict[str, bytes]:
    """The byte for which each character of a byte-level vocabulary stands (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in printable]
    characters = [(chr(byte), byte) for byte in printable] + [(chr(256 + at), byte) for at, byte in enumerate(shifted)]
    return {character: bytes([byte]) for character, byte in characters}


_BYTES: Final = _byte_characters()
