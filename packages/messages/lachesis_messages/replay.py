"""Data that a trainer replays in addition to the tokens, packed: the experts of each token, and the tokens that could
be sampled.

A mixture-of-experts model routes each token to a few experts of each layer, and a trainer that routes it to others
trains another model than the one that sampled (router replay). Where top-p or top-k cut the distribution, a trainer
normalises over the tokens that were left (sampling masks). Both are large and stay bytes from the wire to the trainer.
"""

from __future__ import annotations

import binascii
import math
import re
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

_DTYPES: Final[Mapping[str, int]] = {"uint8": 1, "uint16": 2, "int32": 4}
"""Names of numpy, and bytes of a number; little-endian."""
_NAMES: Final = {size: name for name, size in _DTYPES.items()}
_NPY: Final = {b"|u1": 1, b"<u2": 2, b"<i2": 2, b"<i4": 4}
_HEADER: Final = re.compile(
    rb"\{'descr': '(\|u1|<u2|<i2|<i4)', 'fortran_order': False, 'shape': \((\d+), (\d+), (\d+)\), \}\s*"
)
"""As numpy writes it."""
_UINT: Final = next(code for code in "IL" if array(code).itemsize == 4)


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts:
    """The experts of the tokens `start` to `end` of a sequence, one row of ids for each token.

    A token is routed when the model computes it, so the last sampled token of a sequence has no row.
    """

    start: int
    row: tuple[int, ...]
    """(layers, top_k); (layers * top_k,) where the server does not say more."""
    size: int
    """Bytes of an id: 1, 2 or 4."""
    data: bytes = field(repr=False)
    """Ids, little-endian, token after token."""

    def __post_init__(self) -> None:
        stride = math.prod(self.row) * self.size
        fits = self.size in _NAMES and self.row and min(self.row) > 0 and self.start >= 0
        if not fits or len(self.data) % stride:
            raise ValueError(f"{len(self.data)} bytes are not rows of {self.row} ids of {self.size} bytes")

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + len(self.data) // (math.prod(self.row) * self.size)

    def rows(self, start: int, end: int) -> RoutedExperts:
        """The rows of these positions, which it has."""
        stride = math.prod(self.row) * self.size
        data = self.data[(start - self.start) * stride : (end - self.start) * stride]
        return RoutedExperts(start, self.row, self.size, data)

    def digest(self, start: int, end: int) -> str:
        """Hex digest of the rows of these positions: blake2b over `data`."""
        return blake2b(self.rows(max(start, self.start), end).data, digest_size=16).hexdigest()

    def to_record(self) -> dict[str, Any]:
        """JSON: `data` is base64 of an array of `dtype` with this `shape`."""
        shape = [self.end - self.start, *self.row]
        return {"start": self.start, "shape": shape, "dtype": _NAMES[self.size], "data": _to_text(self.data)}

    @classmethod
    def from_record(cls, record: Any) -> RoutedExperts:
        """Reads `to_record()`. Raises `ValueError`."""
        try:
            tokens, *row = map(int, record["shape"])
            found = cls(int(record["start"]), tuple(row), _DTYPES[record["dtype"]], _to_bytes(record["data"]))
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"not the record of routed experts: {error!r}") from error
        if found.end - found.start != tokens:
            raise ValueError(f"routed experts of {found.end - found.start} tokens, and the shape says {tokens}")
        return found

    @classmethod
    def from_npy(cls, text: str, start: int) -> RoutedExperts:
        """Base64 of a `.npy` file with [tokens, layers, top_k], as vLLM sends it. Raises `ValueError`."""
        raw = _to_bytes(text)
        if raw[:6] != b"\x93NUMPY" or len(raw) < 12:
            raise ValueError("routed_experts is not an .npy file")
        wide = raw[6] >= 2  # version 1 has a length of 2 bytes
        at = (12 if wide else 10) + int.from_bytes(raw[8 : 12 if wide else 10], "little")
        found = _HEADER.fullmatch(raw, 12 if wide else 10, at)
        if found is None:
            raise ValueError(f"routed_experts has a header that cannot be read: {raw[8:at][:200]!r}")
        size, shape = _NPY[found[1]], tuple(map(int, found.groups()[1:]))
        if math.prod(shape) * size != len(raw) - at:
            raise ValueError(f"routed_experts of shape {shape} in {len(raw) - at} bytes")
        narrowed, data = _narrow(raw[at:], size)
        if found[1] == b"<i2" and narrowed == 2 and max(data[1::2]) > 127:
            raise ValueError("routed_experts has negative ids")
        return cls(start, shape[1:], narrowed, data)

    @classmethod
    def from_int32(cls, text: str, start: int, row: int) -> RoutedExperts:
        """Base64 of little-endian int32, `row` of them for each token, as SGLang sends it. Raises `ValueError`."""
        return cls(start, (row,), *_narrow(_to_bytes(text), 4))


def join_experts(pieces: Iterable[RoutedExperts]) -> RoutedExperts:
    """Consecutive pieces as one. Where two have a row for one position, the first counts: it was there when the tokens
    after it were sampled. Ends before a gap, or before a piece with rows of another form.

    Raises:
        ValueError: there is no piece.
    """
    found: list[RoutedExperts] = []
    for piece in pieces:
        end = found[-1].end if found else piece.start
        if piece.start > end or (found and piece.row != found[0].row):
            break
        if piece.end > end:
            found.append(piece.rows(end, piece.end))
    if not found:
        raise ValueError("no routed experts")
    size = max(piece.size for piece in found)
    return RoutedExperts(found[0].start, found[0].row, size, b"".join(_widened(piece, size) for piece in found))


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """For each of some tokens, the ids that top-k, top-p and min-p left. None at all: nothing is known of the token."""

    counts: bytes = field(repr=False)
    """How many ids each token has, as little-endian uint32."""
    ids: bytes = field(repr=False)
    """The ids of all tokens one after the other, as little-endian uint32."""

    def __post_init__(self) -> None:
        if len(self.counts) % 4 or sum(_numbers(self.counts)) * 4 != len(self.ids):
            raise ValueError("the counts of a sampling mask do not add up to its ids")

    def __len__(self) -> int:
        return len(self.counts) // 4

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]]) -> SamplingMask:
        """One list of ids for each token. Raises `ValueError` for anything else."""
        try:
            ids = array(_UINT)
            for each in kept:
                ids.extend(array(_UINT, each))
            return cls(_packed(array(_UINT, map(len, kept))), _packed(ids))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a sampling mask is not a list of ids for each token: {error}") from error

    def missing(self, tokens: Sequence[int]) -> int | None:
        """The first position whose token is not among its ids, where there are any."""
        ids, at = _numbers(self.ids), 0
        for place, (token, count) in enumerate(zip(tokens, _numbers(self.counts), strict=True)):
            if count and token not in ids[at : at + count]:
                return place
            at += count
        return None

    def first(self, count: int) -> SamplingMask:
        """That of the first tokens."""
        counts = self.counts[: 4 * count]
        return SamplingMask(counts, self.ids[: 4 * sum(_numbers(counts))])

    def covers(self, start: int, end: int) -> bool:
        """Whether each of these positions has ids."""
        return 0 not in _numbers(self.counts)[start:end]

    def to_record(self) -> dict[str, Any]:
        """JSON: base64 of two arrays of uint32."""
        return {"counts": _to_text(self.counts), "ids": _to_text(self.ids)}

    @classmethod
    def from_record(cls, record: Any) -> SamplingMask:
        """Reads `to_record()`. Raises `ValueError`."""
        try:
            return cls(_to_bytes(record["counts"]), _to_bytes(record["ids"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the record of a sampling mask: {error!r}") from error


def join_masks(pieces: Iterable[SamplingMask | int]) -> SamplingMask:
    """Consecutive masks as one. A number is that many tokens of which nothing is known."""
    parts = [SamplingMask(bytes(4 * piece), b"") if isinstance(piece, int) else piece for piece in pieces]
    return SamplingMask(b"".join(part.counts for part in parts), b"".join(part.ids for part in parts))


def _to_text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _to_bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} is not base64")
    try:
        return b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def _narrow(data: bytes, size: int) -> tuple[int, bytes]:
    """The numbers in as few bytes as they need. Whole planes of bytes at a time: a loop would block the event loop."""
    if len(data) % size:
        raise ValueError(f"{len(data)} bytes are not numbers of {size} bytes")
    planes = [data[plane::size] for plane in range(size)]
    zeros = bytes(len(planes[0]))
    while len(planes) > 1 and all(plane == zeros for plane in planes[len(planes) // 2 :]):
        del planes[len(planes) // 2 :]
    return len(planes), _woven(planes)


def _widened(piece: RoutedExperts, size: int) -> bytes:
    if piece.size == size:
        return piece.data
    planes = [piece.data[plane :: piece.size] for plane in range(piece.size)]
    return _woven([*planes, *[bytes(len(planes[0]))] * (size - piece.size)])


def _woven(planes: Sequence[bytes]) -> bytes:
    if len(planes) == 1:
        return planes[0]
    data = bytearray(len(planes) * len(planes[0]))
    for plane, values in enumerate(planes):
        data[plane :: len(planes)] = values
    return bytes(data)


def _packed(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _numbers(data: bytes) -> array[int]:
    numbers = array(_UINT, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
