"""Masks: private-use characters in place of the characters of markers that are not tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

MASK_BASE: Final = 0xF0000
ESCAPE_BASE: Final = 0x100000
ESCAPE_COUNT: Final = 0xFFFE
PRIVATE: Final = re.compile("[\U000f0000-\U0010ffff]")
_PRIVATE_ESCAPE: Final = re.compile(r"\\U(000f[0-9a-f]{4}|0010[0-9a-f]{4})")


def unmask_text(s: str, originals: Mapping[str, str]) -> str:
    """`s` with the originals of all masks."""
    return s if s.isascii() else PRIVATE.sub(lambda match: originals.get(match[0], match[0]), s)


def unmask_json(s: str, unmask: Callable[[str], str]) -> str:
    """`s` unmasked inside JSON text, where the original of a mask may need an escape."""
    if s.isascii():
        return s
    return PRIVATE.sub(lambda match: json.dumps(unmask(match[0]), ensure_ascii=False)[1:-1], s)


def unmask_repr(s: str, unmask: Callable[[str], str]) -> str:
    """`s` unmasked, including masks that `repr` has escaped."""
    return _PRIVATE_ESCAPE.sub(lambda match: unmask(chr(int(match[1], 16))), unmask(s))
