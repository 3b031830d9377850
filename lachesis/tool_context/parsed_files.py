"""Files that an agent left, as text and as JSON, whatever is in them."""

from __future__ import annotations

import codecs
import errno
import functools
import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import TypeAdapter

from backends.tasks import in_own_thread
from lachesis.rewards.agent_fault import AgentFault
from lachesis.tool_context.context_calls import context_method
from lachesis.tool_context.context_results import Text

if TYPE_CHECKING:
    from lachesis.tool_context.tool_context import ToolContext

_RAISE: Any = object()
_AT_ONCE = 1 << 16
"""Bytes that are parsed on the event loop: it takes under a millisecond."""
_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF8, "utf-8-sig"))
_SHORT_MARKS = ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@context_method
async def read_text(self: ToolContext, path: str, default: str = "") -> Text:
    """The text of a file, whatever the agent left at `path`; `default` where it is not a file that can be read.

    UTF-8, or UTF-16 and UTF-32 with a byte order mark, which is left out. What is not a character becomes U+FFFD.
    """
    try:
        data = await (await self._sandbox()).read_bytes(await self._path(path))
    except OSError:
        return Text(default)
    encoding = next((name for mark, name in (*_MARKS, *_SHORT_MARKS) if data.startswith(mark)), "utf-8")
    return Text(data.decode(encoding, errors="replace"))


@context_method
async def read_json(self: ToolContext, path: str, type: Any = Any, *, default: Any = _RAISE) -> Any:
    """The JSON value in a file, of a type: `dict[str, int]`, a model of pydantic, a `TypedDict`, `Literal[1, 2]`.

    It is read strictly: the text "42" is not an `int`, and NaN, infinity and numbers beyond a float are not numbers.
        The type of a number that is compared is `int` or `float`.

    Raises:
        AgentFault: there is no file, or no such value in it, and no `default`. The
            rollout gets `score_of_agent_fault`.
    """
    adapter = _adapter(type)
    try:
        data = await (await self._sandbox()).read_bytes(await self._path(path))
        if len(data) <= _AT_ONCE:
            return _parsed(data, adapter, path)
        return await in_own_thread(_parsed, data, adapter, path)
    except OSError:
        if default is _RAISE:
            raise
        return default


def _adapter(type: Any) -> TypeAdapter[Any]:
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
