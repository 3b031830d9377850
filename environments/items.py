"""Names for items, so that a run that is started again knows which of them it has played."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import orjson


def item_digest(item: Any) -> str:
    """16 hex digits that stand for the content of an item; the same in every process."""
    try:
        canonical = orjson.dumps(item, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:
        canonical = repr(item).encode()
    return hashlib.blake2b(canonical, digest_size=8).hexdigest()


class ItemKeys:
    """Keys for a stream of items: the digest, and which occurrence of it this is (`8f…-1`, `8f…-2`).

    They depend on neither position nor order, so a dataset may be shuffled or cycled and a second start still
    recognises what is done.
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def key(self, item: Any) -> str:
        digest = item_digest(item)
        self._seen[digest] += 1
        return f"{digest}-{self._seen[digest]}"
