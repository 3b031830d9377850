"""Groups in Atropos' shape as the JSON that a rollout API takes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from backends.errors import LachesisError
from backends.text import without_lone_surrogates

SLICE = 8192
"""Numbers encoded at once. orjson holds the GIL while it works, so this bounds how long the event loop waits."""


PER_TOKEN = ("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs")


class GroupError(LachesisError, ValueError):
    """A group that no trainer could use; the message names the field and the reason."""


def encode_group(group: Mapping[str, Any]) -> list[bytes]:
    """A group in Atropos' shape as JSON, in pieces to be joined. Call it in a thread.

    Each piece takes a millisecond or two; other threads run in between. `build_group` has checked that the lists of the
    group fit together; an API and a trainer check what they get from others.

    Raises:
        GroupError: JSON cannot hold the group, or a number is not finite.
    """
    pieces: list[bytes] = []
    for name, value in group.items():
        if value is None:
            continue
        pieces += (b"," if pieces else b"{", orjson.dumps(name), b":")
        pieces += _encode(name, value, numbers=name in PER_TOKEN or name == "scores")
    return [*pieces, b"}"]


def encode_json(value: Any) -> bytes:
    """JSON, with U+FFFD for lone surrogates: models produce them, and an API that holds one cannot encode its batch.

    Raises:
        GroupError: not JSON.
    """
    try:
        return orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        try:
            return orjson.dumps(_clean(value))
        except (TypeError, orjson.JSONEncodeError, RecursionError) as error:
            raise GroupError(f"cannot become JSON: {error}") from error


def compress(body: Iterable[bytes]) -> bytes:
    """gzip, level 1: a tenth of level 9's time for a tenth more bytes. zlib releases the GIL. Call it in a thread."""
    gzip = zlib.compressobj(level=1, wbits=31)
    return b"".join([*(gzip.compress(piece) for piece in body), gzip.flush()])


def _encode(name: str, value: Any, *, numbers: bool) -> Iterator[bytes]:
    if not isinstance(value, list | tuple):
        yield encode_json(value)
        return
    yield b"["
    for at, entry in enumerate(value):
        if at:
            yield b","
        if not isinstance(entry, list | tuple) or len(entry) <= SLICE:
            yield _finite(name, encode_json(entry), numbers)
            continue
        yield b"["
        for start in range(0, len(entry), SLICE):
            if start:
                yield b","
            yield _finite(name, encode_json(entry[start : start + SLICE])[1:-1], numbers)
        yield b"]"
    yield b"]"


def _finite(name: str, piece: bytes, numbers: bool) -> bytes:
    if numbers and b"null" in piece:  # orjson's form of nan and infinity
        raise GroupError(f"{name} contains a number that is not finite")
    return piece


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_lone_surrogates(value)
    if isinstance(value, Mapping):
        return {str(_clean(key)): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    return value
