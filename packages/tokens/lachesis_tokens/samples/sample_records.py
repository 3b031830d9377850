"""Reads the records of token samples that were written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, get_args

from backends.errors import LachesisError
from lachesis_messages.images import PlacedImage
from lachesis_messages.messages import Purpose
from lachesis_messages.replay import RoutedExperts, SamplingMask
from lachesis_messages.tokens import PromptChecked, Versions
from lachesis_tokens.samples.samples import ADDED, SAMPLE_SCHEMA, SampledSpan, TokenSample


class MalformedSample(LachesisError, ValueError):
    """A record that is not a sample. The message names the field and its value."""


def read_sample(record: Any) -> TokenSample:
    """Reads `TokenSample.to_record()`; only `verify` checks the items of the three lists. Raises MalformedSample."""
    if not isinstance(record, Mapping):
        raise MalformedSample(f"is {_kind(record)}, not an object")
    if record.get("schema") != SAMPLE_SCHEMA:
        raise MalformedSample(f"schema is {_short(record.get('schema'))}, not {SAMPLE_SCHEMA!r}")
    read: dict[str, Any] = {name: _read(record, name, types, "") for name, types in _SAMPLE_FIELDS.items()}
    spans, end_of_turn = read.pop("spans"), read.pop("end_of_turn")
    if any(type(token) is not int for token in end_of_turn):
        raise MalformedSample(f"end_of_turn is {_short(end_of_turn)}, not a list of token ids")
    found = tuple(_read_span(span, f"spans[{at}]") for at, span in enumerate(spans))
    try:
        for name, kind in (("experts", RoutedExperts), ("sampling_mask", SamplingMask)):
            if record.get(name) is not None:
                read[name] = kind.from_record(record[name])
        name, data = "images", record.get("image_data")
        read[name] = tuple(PlacedImage.from_record(each, data) for each in record.get(name) or ())
    except (TypeError, ValueError) as error:
        raise MalformedSample(f"{name}: {error}") from error
    return TokenSample(**read, spans=found, end_of_turn=tuple(end_of_turn))


def _read_span(record: Any, at: str) -> SampledSpan:
    """Reads `SampledSpan.to_record()`; `at` is its name in errors."""
    if not isinstance(record, Mapping):
        raise MalformedSample(f"{at} is {_kind(record)}, not an object")
    read = {name: _read(record, name, types, at) for name, types in _SPAN_FIELDS.items()}
    if read["prompt_checked"] not in get_args(PromptChecked):
        raise MalformedSample(f"{at}.prompt_checked is {_short(read['prompt_checked'])}, not ids, length or none")
    if read["purpose"] not in get_args(Purpose):
        raise MalformedSample(f"{at}.purpose is {_short(read['purpose'])}, not turn or summary")
    return SampledSpan(**{**read, "versions": _read_versions(read["versions"], at)})


_JSON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "str | None": (str, type(None)),
    "Mapping[str, Any]": (dict,),
    "bool": (bool,),
    "PromptChecked": (str,),
    "Purpose": (str,),
}
"""By the type of a field; the others are lists."""


def _json_types(kind: type) -> dict[str, tuple[type, ...]]:
    return {field.name: _JSON_TYPES.get(str(field.type), (list,)) for field in fields(kind)}


_SPAN_FIELDS: Final = _json_types(SampledSpan)
_SAMPLE_FIELDS: Final = {
    name: types
    for name, types in _json_types(TokenSample).items()
    if name not in ("experts", "sampling_mask", "images")
}


def _read_versions(listed: list[Any], at: str) -> Versions:
    for place, entry in enumerate(listed):
        if not isinstance(entry, (list, tuple)) or [type(part) for part in entry] != [str, int, int]:
            raise MalformedSample(f"{at}.versions[{place}] is {_short(entry)}, not [version, start, end]")
    return tuple((name, start, end) for name, start, end in listed)


def _read(record: Mapping[str, Any], name: str, types: tuple[type, ...], at: str) -> Any:
    where = f"{at}.{name}" if at else name
    if name not in record:
        if name in ADDED:
            return ADDED[name]
        raise MalformedSample(f"{where} is missing")
    value = record[name]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
        raise MalformedSample(f"{where} is {_kind(value)}, not {wanted}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
