"""How pages and reports call a group and an item, so that a reader finds one of them in the other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from lachesis_messages.errors import MISSHAPEN

LINES = 1_000_000
"""The number of a group is LINES times its step, and its line from 0."""


def group_name(number: int, trained: bool) -> str:
    """A group for people: the number of a `trained` one is made of two, and those without a score count downwards."""
    if trained:
        step, line = divmod(number, LINES)
        return f"step {step}, group {line}"
    return f"unscored group {-number}" if number < 0 else f"group {number}"


def places_of(path: Path) -> Mapping[str, int]:
    """By key, the items of the evaluation that a file is of, counted from 0; none where its manifest says none."""
    manifest = path.with_name(f"{path.name.removesuffix('.jsonl').removesuffix('.failed')}.run.json")
    with suppress(OSError, *MISSHAPEN):
        if manifest.is_file():
            return _places(manifest, manifest.stat().st_mtime_ns)
    return {}


@lru_cache(maxsize=64)
def _places(manifest: Path, _: int) -> dict[str, int]:
    seen, found = Counter[str](), {}
    for place, digest in enumerate(json.loads(manifest.read_bytes()).get("items", ())):
        seen[digest] += 1
        found[f"{digest}-{seen[digest]}"] = place
    return found
