"""Token ids as an append-only chain with a running digest: a prompt, and the ids that were sampled after it.

One invariant: `TokenPrefix.digest` depends on the ids alone, not on how the chain is cut into pieces. The ids of a
sample are therefore enough to verify, offline, the exact prefix after which a span of it was sampled.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_hex
from struct import error as StructError
from struct import pack
from threading import Lock
from typing import Any, Final, Literal, TypeAlias

import orjson

from lachesis_messages.images import PlacedImage
from lachesis_messages.replay import RoutedExperts, SamplingMask
from lachesis_messages.shared_text import SharedText

_DIGEST_SIZE: Final = 16
_WRITING: Final = Lock()
_UINT: Final = next(code for code in "IL" if array(code).itemsize == 4)
PromptChecked: TypeAlias = Literal["ids", "length", "none"]
"""How a server confirmed the prompt of a completion: it repeated the ids, it counted them, or it said nothing."""
Versions: TypeAlias = tuple[tuple[str, int, int], ...]
"""(version of the weights, start, end): contiguous ranges over all sampled ids, from 0; empty if none is reported."""
MASKED: Final = -100
"""The mask of a position that is not trained; elsewhere the mask is the token id. Atropos' convention."""
MASKED_LOGPROB: Final = 1.0
"""The logprob of a position that is not trained: a real logprob is never positive. Atropos' convention."""


def digest_of(ids: Iterable[int]) -> str:
    """Hex digest of token ids: blake2b over their little-endian 32-bit words.

    Raises:
        ValueError: an id is not an unsigned 32-bit number.
    """
    return blake2b(_little_endian(_words(ids)), digest_size=_DIGEST_SIZE).hexdigest()


class TokenPrefix:
    """Immutable token ids: those of `parent`, then `own_ids`. Extending costs O(new ids) and shares the rest.

    Compared by identity: two prefixes may hold the same ids and belong to two samplings. Several threads may read one
    prefix at the same time.
    """

    __slots__ = ("_end", "_held", "_state", "images", "length", "parent")

    def __init__(
        self, ids: Iterable[int] = (), parent: TokenPrefix | None = None, images: tuple[PlacedImage, ...] = ()
    ) -> None:
        self.parent = parent
        before = () if parent is None else parent.images
        self.images: tuple[PlacedImage, ...] = (*before, *images) if images else before
        """Those in all ids, in order. The argument has those in the ids that are added."""
        # Packed ids; or their JSON text, which replaces them at the first `to_json`. Memory holds thousands of
        # rollouts, and the ids of a prompt are needed as numbers once, at the end. The text up to `_end` is that of
        # all ids. `_end` is set before the replacement, which is one assignment, and readers read the attribute once.
        self._held: array[int] | SharedText = _words(ids)
        self._end = 0
        self._state: blake2b | None = None
        own = len(self._held)
        self.length: int = own if parent is None else parent.length + own
        """The number of token ids."""

    def extend(self, ids: Iterable[int], images: tuple[PlacedImage, ...] = ()) -> TokenPrefix:
        """These ids followed by `ids`."""
        return TokenPrefix(ids, self, images)

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"<TokenPrefix of {self.length} ids, {self.digest[:8]}>"

    @property
    def digest(self) -> str:
        """`digest_of(self.ids)`, computed at first use and kept: each piece of a chain is hashed once."""
        line = []
        piece: TokenPrefix | None = self
        while piece is not None and piece._state is None:
            line.append(piece)
            piece = piece.parent
        for piece in reversed(line):
            piece._hash(piece._packed())
        assert self._state is not None
        return self._state.hexdigest()

    @property
    def own_ids(self) -> list[int]:
        """The ids that this piece adds."""
        held = self._held
        if not isinstance(held, SharedText):
            return held.tolist()
        shared = self.parent is not None and self.parent._held is held
        start = self.parent._end if self.parent is not None and shared else 0
        found: list[int] = orjson.loads(b"[%b]" % held.part(start, self._end).removeprefix(b","))
        # Samples read the ids and the digests of a chain, root first: parsing the text once serves both.
        if self._state is None and (self.parent is None or self.parent._state is not None):
            self._hash(_little_endian(_words(found)))
        return found

    @property
    def own_length(self) -> int:
        return self.length - (self.parent.length if self.parent is not None else 0)

    @property
    def ids(self) -> list[int]:
        """All ids, in order. O(length)."""
        found: list[int] = []
        for piece in reversed([*self.lineage()]):
            found += piece.own_ids
        return found

    def to_json(self) -> bytes:
        """All ids as a compact JSON list, for the next request. Only the ids of new pieces are encoded."""
        return b"".join(self.json_pieces())

    def json_pieces(self) -> list[bytes | memoryview]:
        """`to_json()` in pieces, without a copy of what earlier requests encoded; see `SharedText.pieces`."""
        if not isinstance(self._held, SharedText):
            with _WRITING:
                line = []
                piece: TokenPrefix | None = self
                while piece is not None and not isinstance(piece._held, SharedText):
                    line.append(piece)
                    piece = piece.parent
                for piece in reversed(line):
                    piece._write()
        assert isinstance(self._held, SharedText)
        return [b"[", *self._held.pieces(self._end), b"]"]

    def lineage(self) -> Iterator[TokenPrefix]:
        """This piece, its parent, and so on to the root."""
        piece: TokenPrefix | None = self
        while piece is not None:
            yield piece
            piece = piece.parent

    def _write(self) -> None:
        """Replace the ids by their text. The parent must have its own."""
        held, parent = self._held, self.parent
        if isinstance(held, SharedText):
            return
        own = orjson.dumps(held.tolist())[1:-1]
        if parent is None:
            self._end, self._held = len(own), SharedText(own)
            return
        assert isinstance(parent._held, SharedText)
        own = b"," + own if own and parent.length else own
        text, self._end = parent._held.extended(parent._end, own)
        self._held = text

    def _hash(self, packed: bytes) -> None:
        """Compute the state. The parent must have its own."""
        if self.parent is None:
            state = blake2b(digest_size=_DIGEST_SIZE)
        else:
            assert self.parent._state is not None
            state = self.parent._state.copy()
        state.update(packed)
        self._state = state

    def _packed(self) -> bytes:
        held = self._held
        return _little_endian(_words(self.own_ids) if isinstance(held, SharedText) else held)


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The tokens of one completion, as the engine reported them. Compared by identity: each was sampled once."""

    after: TokenPrefix
    """The prompt ids, then the sampled ids as the last piece: `after.parent` is the prompt."""
    logprobs: Sequence[float] = field(repr=False)
    """One natural logarithm for each sampled id, of the distribution that `ChatResponse.sampling` describes."""
    end_of_turn: tuple[int, ...] = ()
    """Ids that end a turn of this model. At most one of them ends `ids`, and the next prompt does not repeat it."""
    context: str = ""
    """A digest of the chat template, the tokenizer and the tools. Only a prompt with an equal one may continue these
    ids."""
    experts: RoutedExperts | None = field(default=None, repr=False)
    """From where those of an earlier completion in the prompt end, or from the beginning."""
    sampling_mask: SamplingMask | None = field(default=None, repr=False)
    """Of the sampled ids."""
    prompt_checked: PromptChecked = "none"
    versions: Versions = ()
    interrupts: int = 0
    """How often the server aborted the completion, and it went on."""
    completion_id: str = field(default_factory=lambda: token_hex(8), repr=False)
    """Random, made when it was sampled: tells it from every other completion, also from one with the same ids."""

    def __post_init__(self) -> None:
        if self.after.parent is None:
            raise ValueError("sampled ids need their prompt as parent; it may be empty")
        if len(self.logprobs) != self.after.own_length:
            raise ValueError(f"{self.after.own_length} sampled ids, but {len(self.logprobs)} logprobs")
        object.__setattr__(self, "logprobs", Floats(self.logprobs))

    @classmethod
    def sample(cls, prompt: TokenPrefix, ids: Iterable[int], logprobs: Sequence[float], **more: Any) -> SampledTokens:
        """`ids`, sampled after `prompt`."""
        return cls(prompt.extend(ids), logprobs, **more)

    @property
    def prompt(self) -> TokenPrefix:
        """The ids that the model was given."""
        assert self.after.parent is not None
        return self.after.parent

    @property
    def ids(self) -> list[int]:
        """The sampled ids."""
        return self.after.own_ids

    def __len__(self) -> int:
        return self.after.own_length


class Floats(Sequence[float]):
    """Read-only float64 values in 8 bytes each."""

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[float]) -> None:
        try:
            self._values = pack(f"{len(values)}d", *values)  # half the time of an array's
        except StructError:
            self._values = array("d", values).tobytes()  # its error names the wrong value

    @property
    def packed(self) -> bytes:
        """The values in the machine's byte order."""
        return self._values

    def __len__(self) -> int:
        return len(self._values) // 8

    def __getitem__(self, index: Any) -> Any:
        found = memoryview(self._values).cast("d")[index]
        return found.tolist() if isinstance(index, slice) else found

    def __iter__(self) -> Iterator[float]:
        return iter(memoryview(self._values).cast("d"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def _words(ids: Iterable[int]) -> array[int]:
    try:
        return array(_UINT, ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be whole numbers from 0 to 4294967295: {error}") from None


def _little_endian(words: array[int]) -> bytes:
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()
