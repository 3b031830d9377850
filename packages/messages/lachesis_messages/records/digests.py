"""Digests of records, over canonical JSON: keys sorted, no spaces, the same bytes on every machine.

A digest shows damage and changes by hand. It is not a signature: whoever can write the file can compute it again, and
is caught only where two facts of the record then contradict each other (`lachesis_tokens.samples.cross_checks`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Final

import orjson

from lachesis_messages.records.jsonl import json_text

LINE_DIGEST: Final = "line_digest"
"""Key of a line: the digest of everything that the digests of its samples do not cover."""
COVERED: Final = frozenset({"tokens", "masks", "logprobs", "experts", "sampling_mask"})
"""The long fields of a sample. The digests of its spans and its own `digest` cover them."""
_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


def canonical(value: Any) -> bytes:
    """The JSON of a value in its canonical form.

    Raises:
        TypeError, ValueError, RecursionError: JSON cannot hold it.
    """
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:  # an integer over 64 bits, half of a surrogate pair, or deeply nested
        text = json_text(value)
    try:
        return orjson.dumps(orjson.loads(text), option=_OPTIONS)  # such integers become floats, as where it is read
    except (TypeError, ValueError):
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")).encode()


def json_digest(value: Any, *, strict: bool = False) -> str:
    """Hex digest of a value: blake2b over `canonical(value)`, whose errors it raises.

    With `strict`, TypeError also for integers over 64 bits and halves of surrogate pairs.
    """
    text = orjson.dumps(value, option=_OPTIONS) if strict else canonical(value)
    return blake2b(text, digest_size=16).hexdigest()


def line_digest(record: Mapping[str, Any]) -> str:
    """The expected `LINE_DIGEST` of this record of a group, or of a sample with additional fields.

    Raises the errors of `canonical`.
    """
    covered = COVERED if "spans" in record else frozenset[str]()
    kept = {name: value for name, value in record.items() if name != LINE_DIGEST and name not in covered}
    if isinstance(samples := record.get("samples"), list):
        kept["samples"] = [_without_covered(sample) for sample in samples]
    return json_digest(kept)


def digest_problem(record: Mapping[str, Any]) -> str | None:
    """Why the digest of a line that must have one does not match its fields."""
    if LINE_DIGEST not in record:
        return f"its {LINE_DIGEST} is missing, and its samples have their own"
    try:
        digest = line_digest(record)
    except (RecursionError, TypeError, ValueError) as error:
        return f"its {LINE_DIGEST} cannot be computed: {error}"
    if digest == record[LINE_DIGEST]:
        return None
    return f"its {LINE_DIGEST} is not that of its fields ({digest}): the line was changed after it was written"


def sample_line_problem(record: Mapping[str, Any]) -> str | None:
    """The same for a line with one sample, which needs the digest if it has a reward besides the sample's fields."""
    needed = LINE_DIGEST in record or ("reward" in record and record.get("digest"))
    return digest_problem(record) if needed else None


def certified(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its digest as the last field."""
    return {**{name: value for name, value in record.items() if name != LINE_DIGEST}, LINE_DIGEST: line_digest(record)}


def copies_of(*sources: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Gives records that were made from `sources` their digests, if every source has the right one.

    A copy of a record without a digest has none, and that of a damaged one keeps the wrong one: copying proves nothing.
    """
    given = [source.get(LINE_DIGEST) for source in sources]
    if not all(given):
        return lambda record: {name: value for name, value in record.items() if name != LINE_DIGEST}
    wrong = [found for found, source in zip(given, sources, strict=True) if found != line_digest(source)]
    return (lambda record: {**record, LINE_DIGEST: wrong[0]}) if wrong else certified


def _without_covered(sample: Any) -> Any:
    if not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name not in COVERED}
