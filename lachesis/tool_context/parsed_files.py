"""What is in files that an agent left, as text and as JSON, whatever it is."""

from __future__ import annotations

import codecs
import errno
import functools
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from pydantic import TypeAdapter

from backends.tasks import in_own_thread
from lachesis.rewards.agent_fault import AgentFault

_AT_ONCE = 1 << 16
"""Bytes that are parsed on the event loop: it takes under a millisecond."""
_MARKS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF8, "utf-8-sig")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)


def decoded(data: bytes) -> str:
    """UTF-8, or UTF-16 and UTF-32 with a byte order mark, which is left out. What is not a character becomes U+FFFD."""
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    return data.decode(encoding, errors="replace")


async def parsed(data: bytes, adapter: TypeAdapter[Any], path: str) -> Any:
    """The JSON value in the file at `path`. Raises `AgentFault` where there is none of that type."""
    if len(data) <= _AT_ONCE:
        return _parsed(data, adapter, path)
    return await in_own_thread(_parsed, data, adapter, path)


def adapter_of(type: Any) -> TypeAdapter[Any]:
    try:
        return _known(type)
    except TypeError:  # it has no hash
        return TypeAdapter(type)


_known: Callable[[Any], TypeAdapter[Any]] = functools.lru_cache(maxsize=256)(TypeAdapter)


def _parsed(data: bytes, adapter: TypeAdapter[Any], path: str) -> Any:
    """The value. Raises `AgentFault`."""
    try:
        text = data.decode(json.detect_encoding(data))
        json.loads(text, parse_constant=_no_number, parse_float=_finite)
        return adapter.validate_json(text, strict=True)
    except (ValueError, RecursionError) as error:  # of pydantic and of wrong characters too
        said = " ".join(str(error).split())[:300]
        raise AgentFault(errno.EINVAL, f"no such JSON value: {said}", path) from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not valid JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number
