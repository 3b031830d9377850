"""Items as JSON, and their keys, by which a second start knows the items that are done."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Set
from datetime import date, time, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

from backends.errors import LachesisError
from lachesis.settings.hooks import of_hook

_OF_CONTENT = re.compile(r"([0-9a-f]{16})(?:[0-9a-f]{8})?-\d+")
"""The digest of an item, that of the settings of a batch, and which of several equal items it is."""


class ItemError(LachesisError, TypeError):
    """An item that cannot become JSON, so that no record can hold it and no second start can recognise it."""


def plain(value: Any) -> Any:
    """`value` as JSON holds it: dicts with text keys, lists, text, finite numbers, booleans, None.

    Tuples and sets become lists, what numpy counts becomes numbers and lists, dates ISO text, bytes base64, dataclasses
    and pydantic models dicts; a number that is not finite becomes None.

    Raises:
        ItemError: names the type that has no such form.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise ItemError("the value contains itself or is nested too deeply to become JSON") from None


def _plain(value: Any) -> Any:
    # Enums before text and numbers: a StrEnum is both.
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int):
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Set):
        return sorted((_plain(entry) for entry in value), key=_canonical)
    return _plain(_unwrapped(value))


def _unwrapped(value: Any) -> Any:
    """One step from an object towards JSON."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for method in ("model_dump", "tolist", "as_py"):  # pydantic, numpy and torch, Arrow
        if callable(convert := getattr(value, method, None)) and not isinstance(value, type):
            return convert()
    raise ItemError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot become JSON; "
        "let get_next_item return plain data (dicts, lists, text, numbers) and load the rest where it is used"
    )


async def or_none(next_item: Callable[[], Awaitable[Any]]) -> Any:
    """The next item; None also where `next_item` lets the StopIteration of an iterator pass."""
    try:
        return await of_hook(next_item())
    except StopAsyncIteration:
        return None
    except RuntimeError as error:  # Python makes one of it
        if not isinstance(error.__cause__, StopIteration):
            raise
        return None


async def first_items(next_item: Callable[[], Awaitable[Any]], most: int) -> list[Any]:
    """The first items, or all where there are fewer."""
    items: list[Any] = []
    while len(items) < most and (item := await or_none(next_item)) is not None:
        items.append(item)
    return items


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def item_digest(item: Any) -> str:
    """A hash of the item's content in 16 hex digits, the same in every process. Raises `ItemError`."""
    return hashlib.blake2b(_canonical(plain(item)).encode(), digest_size=8).hexdigest()


def part_key(item_key: str, number: int) -> str:
    """The key of one of the groups of an item: the item's own for the first one."""
    return f"{item_key}+{number}" if number else item_key


def is_part(key: str) -> bool:
    """Whether a key is that of a further group of an item."""
    return "+" in key


def whole_and_part(key: str) -> tuple[str, int]:
    """The key of the item, and which of its groups it is, from 0."""
    whole, _, number = key.partition("+")
    return whole, int(number or 0)


def item_of(key: str) -> str:
    """The item that a key is about: the same for all groups, samples and occurrences of an item, in any run."""
    whole = re.sub(r"\+\d+$", "", key)
    found = _OF_CONTENT.fullmatch(whole)
    return found[1] if found else whole


def different(keys: Iterable[str]) -> int:
    """The number of distinct items, by the keys that `ItemKeys` gives."""
    return len({item_of(key) for key in keys})


def repeated(keys: Collection[str]) -> str:
    """What to say after the number of items that have these keys, where some come again."""
    once = different(keys)
    slightly = "slightly " if once >= 0.9 * len(keys) else ""
    return f", {once} of them distinct: the interval is {slightly}too narrow" if once < len(keys) else ""


class ItemKeys:
    """Keys for a stream of items: the digest, and which occurrence of it this is (`8f…-1`, `8f…-2`).

    They do not depend on the order, so a dataset may be shuffled or cycled and a second start still recognises the
    items that are done.
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def key(self, item: Any) -> str:
        digest = item_digest(item)
        self._seen[digest] += 1
        return self._name(digest, self._seen[digest])

    def _name(self, digest: str, occurrence: int) -> str:
        return f"{digest}-{occurrence}"


class SampleKeys(ItemKeys):
    """Keys for samples of items, where all items come once for the first sample, then for the second, and so on.

    A sample has the key of its item, as `ItemKeys` gives it, with its number: `8f…-1`, `8f…-1+1`, `8f…-1+2`.
    """

    def __init__(self, digests: Iterable[str]) -> None:
        super().__init__()
        self._equal = Counter(digests)

    def _name(self, digest: str, occurrence: int) -> str:
        sample, place = divmod(occurrence - 1, self._equal[digest])
        return part_key(super()._name(digest, place + 1), sample)
