"""Token ids as an append-only chain with a running digest: what a model was given, and what it sampled after that.

One invariant: `TokenPrefix.digest` depends on the ids alone, not on how the chain was cut into pieces. So whoever holds
the ids of a sample can prove offline that a span of it was sampled behind exactly these ids.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

_DIGEST_SIZE: Final = 16
_UINT: Final = next(code for code in "IL" if array(code).itemsize == 4)
MASKED: Final = -100
"""Mask of a position that is not trained; where it is, the mask is the token id. Atropos' convention."""
MASKED_LOGPROB: Final = 1.0
"""Logprob of a position that is not trained: no real one is positive. Atropos' convention."""


def digest_of(ids: Iterable[int]) -> str:
    """Hex digest of token ids: blake2b over their little-endian 32-bit words.

    Raises:
        ValueError: an id is no unsigned 32-bit number.
    """
    return blake2b(_pack(ids), digest_size=_DIGEST_SIZE).hexdigest()


class TokenPrefix:
    """Immutable token ids: those of `parent`, then `own_ids`. Extending costs O(new ids) and shares the rest.

    Compared by identity: two prefixes may hold the same ids and still belong to two samplings.
    """

    __slots__ = ("_hash", "_json", "_own", "length", "parent")

    def __init__(self, ids: Iterable[int] = (), parent: TokenPrefix | None = None) -> None:
        self.parent = parent
        self._own: bytes = _pack(ids)
        self._hash: blake2b = parent._hash.copy() if parent is not None else blake2b(digest_size=_DIGEST_SIZE)
        self._hash.update(self._own)
        self.length: int = len(self._own) // 4 + (parent.length if parent is not None else 0)
        """Token ids in all."""
        self._json: bytes | None = None

    def extend(self, ids: Iterable[int]) -> TokenPrefix:
        """These ids and then `ids`."""
        return TokenPrefix(ids, self)

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"<TokenPrefix of {self.length} ids, {self.digest[:8]}>"

    @property
    def digest(self) -> str:
        """`digest_of(self.ids)`, kept up to date while the chain grew."""
        return self._hash.hexdigest()

    @property
    def own_ids(self) -> list[int]:
        """The ids that this piece adds."""
        return _unpack(self._own)

    @property
    def own_length(self) -> int:
        return len(self._own) // 4

    @property
    def ids(self) -> list[int]:
        """All ids, in order. O(length)."""
        return _unpack(b"".join(reversed([piece._own for piece in self.lineage()])))

    def to_json(self) -> bytes:
        """All ids as a compact JSON list: what a request for the next turn needs, at the cost of the new ids only."""
        pieces = []
        for piece in self.lineage():
            if piece._json is None:
                piece._json = ",".join(map(str, piece.own_ids)).encode()
            if piece._json:
                pieces.append(piece._json)
        return b"[" + b",".join(reversed(pieces)) + b"]"

    def lineage(self) -> Iterator[TokenPrefix]:
        """This piece, its parent, and so on to the root."""
        piece: TokenPrefix | None = self
        while piece is not None:
            yield piece
            piece = piece.parent

    def __reduce__(self) -> tuple[object, ...]:
        # Flat: pickling parent pointers would recurse once per turn.
        return (_chain, (tuple(piece._own for piece in self.lineage()),))


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The token side of one completion, as the engine reported it. Compared by identity: each was sampled once."""

    after: TokenPrefix
    """Prompt ids, then the sampled ids as the last piece: `after.parent` is the prompt."""
    logprobs: Sequence[float] = field(repr=False)
    """Natural logarithms, one for each sampled id, of the distribution that `sampling` describes."""
    end_of_turn: tuple[int, ...] = ()
    """Ids that end a turn of this model: at most one of them ends `ids`, and the next prompt does not repeat it."""
    context: str = ""
    """Digest of what else the prompt depends on: chat template, tokenizer, tools. Only a prompt with the same one may
    continue these ids."""

    def __post_init__(self) -> None:
        if self.after.parent is None:
            raise ValueError("sampled ids need the prompt that they were sampled after as parent, be it an empty one")
        if len(self.logprobs) != self.after.own_length:
            raise ValueError(f"{self.after.own_length} sampled ids, but {len(self.logprobs)} logprobs")
        object.__setattr__(self, "logprobs", _Floats(self.logprobs))

    @classmethod
    def sample(cls, prompt: TokenPrefix, ids: Iterable[int], logprobs: Sequence[float], **more: Any) -> SampledTokens:
        """`ids`, sampled after `prompt`."""
        return cls(prompt.extend(ids), logprobs, **more)

    @property
    def prompt(self) -> TokenPrefix:
        """What the model was given."""
        assert self.after.parent is not None
        return self.after.parent

    @property
    def ids(self) -> list[int]:
        """The sampled ids."""
        return self.after.own_ids

    def __len__(self) -> int:
        return self.after.own_length


class _Floats(Sequence[float]):
    """Read-only float64 values in 8 bytes each."""

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[float]) -> None:
        self._values = memoryview(array("d", values).tobytes()).cast("d")

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        found = self._values[index]
        return found.tolist() if isinstance(index, slice) else found

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._values.tolist())

    def __reduce__(self) -> tuple[object, ...]:
        return (_Floats, (self._values.tolist(),))


def sampling_problem(sampling: Mapping[str, Any]) -> str | None:
    """Why these logprobs are not those that a trainer computes for its policy, and what to set; else None.

    `sampling` names what the engine was told (absent: off) and, under `logprobs`, what it reports: "raw" logits at
    temperature 1, "temperature" for logits divided by the temperature, "processed" for the final distribution. A
    trainer computes the softmax of all logits, divided by the temperature that goes to it with the sample.
    """
    reported = sampling.get("logprobs")
    if reported not in ("raw", "temperature", "processed"):
        return f"the sampling record names no kind of logprobs (got {reported!r}); set openai.logprobs_mode"
    temperature = sampling.get("temperature")
    if not isinstance(temperature, (int, float)) or not -_ABSURD < temperature < _ABSURD:
        return "the temperature was not sent, so it is unknown; set env.agent_temperature"
    if temperature <= 0:
        return f"temperature {temperature:g} is no sampling; set env.agent_temperature to 1.0"
    if temperature != 1 and reported == "raw":
        return (
            f"sampled at temperature {temperature:g}, but the server reports logprobs at temperature 1; set "
            "env.agent_temperature to 1.0, or have the server report processed logprobs (vLLM: --logprobs-mode "
            "processed_logprobs) and set openai.logprobs_mode to processed"
        )
    for name, off in _OFF.items():
        value = sampling.get(name)
        if value is not None and value not in off:
            return f"{name} = {value!r} samples from another distribution than the trainer's; set it to {off[0]!r}"
    for name in _CONSTRAINTS:
        if sampling.get(name):
            return f"{name} samples from another distribution than the trainer's; leave it out of extra_body"
    return None


_ABSURD: Final = 1e6
_OFF: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "typical_p": (1.0,),
}
_CONSTRAINTS: Final = (
    "allowed_token_ids",
    "bad_words",
    "custom_logit_processor",
    "ebnf",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "json_schema",
    "logit_bias",
    "min_new_tokens",
    "min_tokens",
    "mirostat",
    "regex",
    "response_format",
    "samplers",
    "structured_outputs",
    "thinking_token_budget",
)


def _pack(ids: Iterable[int]) -> bytes:
    try:
        words = array(_UINT, ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids have to be whole numbers from 0 to 4294967295: {error}") from None
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _unpack(data: bytes) -> list[int]:
    words = array(_UINT)
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def _chain(pieces: Sequence[bytes]) -> TokenPrefix:
    prefix: TokenPrefix | None = None
    for piece in reversed(pieces):
        prefix = TokenPrefix(_unpack(piece), prefix)
    assert prefix is not None
    return prefix
