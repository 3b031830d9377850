"""The body of `POST /scored_data`: checked, and put together again from the bytes that came.

A group is megabytes of numbers that the API has no use for. They are checked in slices (orjson holds the GIL while it
reads one, a fraction of a millisecond) and kept as the text that was sent. Every value of the new text was parsed by
itself, so the text is valid JSON whatever came, and one group cannot spoil the batch that it is in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from lachesis_train.group_encoding import GroupError

FIELDS: Final = (
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
)
"""Of the stock API's `ScoredData`, in the order in which it hands them out. Others are left out."""

INTEGERS: Final = ("tokens", "masks")
FLOATS: Final = ("advantages", "ref_logprobs", "inference_logprobs")
REQUIRED: Final = (*INTEGERS, "scores")

_SLICE = 1 << 16
"""Bytes of numbers that are parsed at once."""
_DEEPEST = 100
_OF_INTEGERS = b"0123456789- ,\n\r\t"
_OF_FLOATS = _OF_INTEGERS + b".eE+"
_SPACE = re.compile(rb"[ \t\n\r]*")
_NESTING = re.compile(rb'["\[\]{}]')
_SCALAR = re.compile(rb"[^,\]}\s]*")


@dataclass(frozen=True, slots=True)
class GroupBody:
    """A group that may be handed out."""

    pieces: Sequence[bytes]
    """The JSON object with all `FIELDS`, to be joined."""
    sequences: int
    tokens: int
    scores: tuple[float, ...]
    env_id: int | None
    group_id: str | None
    """`group_overrides.group_id`: with it, a second copy is known."""
    begin_step: int | None
    """`group_overrides.begin_step`: the trainer's step when the group was begun."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.pieces))


def read_group(body: bytes) -> GroupBody:
    """Check one group. Takes about a millisecond for each 300k numbers; other threads run in between.

    Raises:
        GroupError: names the field and the reason.
    """
    return _group(dict(_members(body)))


def read_groups(body: bytes) -> list[GroupBody]:
    """The same for a JSON array of groups (`POST /scored_data_list`)."""
    at = _skip_space(body, 0)
    if body[at : at + 1] != b"[":
        raise GroupError("the body is not a JSON array of groups")
    groups = []
    for number, (start, end) in enumerate(_elements(body, at)):
        try:
            groups.append(read_group(body[start:end]))
        except GroupError as error:
            raise GroupError(f"group {number}: {error}") from error
        at = end
    _check_end(body, _next(body, at, b"]") if groups else _skip_space(body, at + 1))
    return groups


def _group(fields: dict[str, bytes]) -> GroupBody:
    fields = {name: value for name, value in fields.items() if name in FIELDS and value != b"null"}
    for name in REQUIRED:
        if name not in fields:
            raise GroupError(f"{name} is missing")
    lengths = _row_lengths("tokens", fields["tokens"], _OF_INTEGERS)
    if not lengths:
        raise GroupError("tokens contains no sequence")
    for name in (*INTEGERS[1:], *FLOATS):
        if name in fields:
            _check_lengths(
                name, _row_lengths(name, fields[name], _OF_FLOATS if name in FLOATS else _OF_INTEGERS), lengths
            )
    parsed = {name: _parse(name, value) for name, value in fields.items() if name not in (*INTEGERS, *FLOATS)}
    _check_others(parsed, len(lengths))
    overrides = parsed.get("group_overrides") or {}
    group_id, begin_step = overrides.get("group_id"), overrides.get("begin_step")
    pieces: list[bytes] = []
    for name in FIELDS:
        pieces += (b"," if pieces else b"{", b'"%b":' % name.encode(), fields.get(name, b"null"))
    return GroupBody(
        pieces=[*pieces, b"}"],
        sequences=len(lengths),
        tokens=sum(lengths),
        scores=tuple(map(float, parsed["scores"])),
        env_id=parsed.get("env_id"),
        group_id=group_id if isinstance(group_id, str) and group_id else None,
        begin_step=begin_step if _is_number(begin_step) else None,
    )


def _is_number(value: Any) -> bool:
    """Whether the database can hold it as an integer."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _check_lengths(name: str, given: list[int], tokens: list[int]) -> None:
    if len(given) != len(tokens):
        raise GroupError(f"{name} holds {len(given)} sequences, tokens {len(tokens)}")
    for at, (found, expected) in enumerate(zip(given, tokens, strict=True)):
        if found != expected:
            raise GroupError(f"{name}[{at}] has {found} positions, tokens[{at}] {expected}")


def _check_others(parsed: dict[str, Any], count: int) -> None:
    scores = parsed["scores"]
    if not isinstance(scores, list) or not all(isinstance(score, int | float) for score in scores):
        raise GroupError("scores is not a list of finite numbers")
    if not all(map(math.isfinite, scores)):
        raise GroupError("scores contains a number that is not finite")
    for name in ("messages", "overrides"):
        if not isinstance(parsed.get(name, []), list):
            raise GroupError(f"{name} is not a list")
    for name in ("scores", "messages", "overrides"):
        if name in parsed and len(parsed[name]) != count:
            raise GroupError(f"{name} holds {len(parsed[name])} entries, tokens {count}")
    for name in ("generation_params", "group_overrides"):
        if not isinstance(parsed.get(name, {}), dict):
            raise GroupError(f"{name} is not an object")
    env_id = parsed.get("env_id", 0)
    if not _is_number(env_id) or env_id < 0:
        raise GroupError(f"env_id is {env_id!r}, no number of an environment")
    for at, conversation in enumerate(parsed.get("messages", ())):
        for message in conversation if isinstance(conversation, list) else [None]:
            if not isinstance(message, dict) or "role" not in message or "content" not in message:
                raise GroupError(f"messages[{at}] contains something without a role and a content")


# Numbers.


def _row_lengths(name: str, value: bytes, alphabet: bytes) -> list[int]:
    """The lengths of the lists of numbers in a list."""
    if value[:1] != b"[":
        raise GroupError(f"{name} is not a list of lists of numbers")
    lengths: list[int] = []
    for start, end in _elements(value, 0):
        if value[start : start + 1] != b"[":
            raise GroupError(f"{name}[{len(lengths)}] is not a list of numbers")
        length = _count_numbers(value[start + 1 : end - 1], alphabet, f"{name}[{len(lengths)}]")
        if not length:
            raise GroupError(f"{name}[{len(lengths)}] is empty")
        lengths.append(length)
    return lengths


def _count_numbers(row: bytes, alphabet: bytes, name: str) -> int:
    if other := row.translate(None, alphabet):
        kind = "an integer" if alphabet is _OF_INTEGERS else "a finite number"
        raise GroupError(f"{name} contains something that is not {kind}: {other[:20].decode('utf-8', 'replace')!r}")
    if not row.strip():
        return 0
    count = at = 0
    while True:
        end = row.find(b",", at + _SLICE)
        numbers = _parse(name, b"[%b]" % (row[at:end] if end >= 0 else row[at:]))
        if not numbers:
            raise GroupError(f"{name} is not valid JSON: nothing after a comma")
        count += len(numbers)
        if end < 0:
            return count
        at = end + 1


def _parse(name: str, value: bytes) -> Any:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise GroupError(f"{name} is not JSON with finite numbers: {error}") from error


# Places of values in JSON text. What is between them is not looked at; each value is parsed on its own.


def _members(text: bytes) -> Iterator[tuple[str, bytes]]:
    """The names and values of an object."""
    at = _skip_space(text, 0)
    if text[at : at + 1] != b"{":
        raise GroupError("the body is not a JSON object")
    at = _skip_space(text, at + 1)
    while text[at : at + 1] != b"}":
        if text[at : at + 1] != b'"':
            raise GroupError(f"the body is not valid JSON: no name of a field at byte {at}")
        end = _end_of_value(text, at)
        name = _parse("the name of a field", text[at:end])
        at = _skip_space(text, end)
        if text[at : at + 1] != b":":
            raise GroupError(f"the body is not valid JSON: no colon after {name!r}")
        at = _skip_space(text, at + 1)
        end = _end_of_value(text, at)
        yield name, text[at:end]
        at = _next(text, end, b"}")
    _check_end(text, at)


def _elements(text: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Where the elements of the array that begins at `at` are."""
    at = _skip_space(text, at + 1)
    while text[at : at + 1] != b"]":
        end = _end_of_value(text, at)
        yield at, end
        at = _next(text, end, b"]")


def _next(text: bytes, at: int, closing: bytes) -> int:
    """The place of the next member or element after one that ends at `at`, or of the closing bracket."""
    at = _skip_space(text, at)
    if (found := text[at : at + 1]) == closing:
        return at
    if found != b",":
        raise GroupError(f"the body is not valid JSON: no comma at byte {at}")
    at = _skip_space(text, at + 1)
    if text[at : at + 1] == closing:
        raise GroupError(f"the body is not valid JSON: nothing after the comma before byte {at}")
    return at


def _check_end(text: bytes, at: int) -> None:
    """The body ends after the bracket at `at`."""
    if (after := _skip_space(text, at + 1)) != len(text):
        raise GroupError(f"the body is not valid JSON: something follows its end, at byte {after}")


def _skip_space(text: bytes, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _end_of_value(text: bytes, at: int) -> int:
    if text[at : at + 1] == b'"':
        return _end_of_string(text, at)
    if text[at : at + 1] not in (b"[", b"{"):
        found = _SCALAR.match(text, at)
        if found is None or found.end() == at:
            raise GroupError(f"the body is not valid JSON: no value at byte {at}")
        return found.end()
    depth = 0
    while True:
        bracket = _NESTING.search(text, at)
        if bracket is None:
            raise GroupError("the body is not valid JSON: it ends within a value")
        at = bracket.end()
        match bracket[0]:
            case b'"':
                at = _end_of_string(text, at - 1)
            case b"[" if flat := _end_of_flat_array(text, at):
                at = flat
                if not depth:
                    return at
            case b"[" | b"{":
                depth += 1
                if depth > _DEEPEST:
                    raise GroupError(f"the body has values within {_DEEPEST} others")
            case _:
                depth -= 1
                if not depth:
                    return at


def _end_of_flat_array(text: bytes, at: int) -> int:
    """The end of an array of numbers whose inside begins at `at`; 0 if something else is in it. As fast as memchr."""
    end = text.find(b"]", at)
    if end < 0 or any(text.find(mark, at, end) >= 0 for mark in (b'"', b"[", b"{")):
        return 0
    return end + 1


def _end_of_string(text: bytes, at: int) -> int:
    while True:
        at = text.find(b'"', at + 1)
        if at < 0:
            raise GroupError("the body is not valid JSON: it ends within a string")
        before = at
        while text[before - 1 : before] == b"\\":
            before -= 1
        if (at - before) % 2 == 0:
            return at + 1
