"""The answers that an executor may give. An executor that gives any other answer is no longer trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 4096
"""Characters that are kept of a message from inside."""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 63


def _is_size(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_integer_or_none(value: Any) -> bool:
    return value is None or _is_integer(value)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 2 and all(map(_is_text, row)) for row in value
    )


_FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "init": {"python": _is_text_or_none, "unfiltered": _is_text},
    "exec": {
        "execution": _is_text,
        "exit_code": _is_integer,
        "timed_out": _is_flag,
        "stdout": _is_size,
        "stdout_elided": _is_size,
        "stderr_elided": _is_size,
        "duration": _is_seconds,
    },
    "start": {"process": _is_text},
    "processes": {"processes": _is_list},
    "status": {"exit_code": _is_integer_or_none, "output_size": _is_size},
    "output": {"exit_code": _is_integer_or_none, "offset": _is_size},
    "stat": {"path": _is_text},
    "pull": {"end": _is_flag},
    "listen": {"port": _is_size},
    "accept": {"refused": _is_size},
}
_OPTIONAL = {"mode": _is_integer_or_none, "size": _is_size}
_ERROR = {"errno": _is_integer_or_none, "message": _is_text, "path": _is_text_or_none}


def check(op: str, header: Mapping[str, Any]) -> None:
    """Raises `ValueError` if `header` is not an answer to the request `op`."""
    if "error" not in header:
        for name, is_right in _FIELDS.get(op, {}).items():
            _check(op, name, is_right(header.get(name)))
        for name, is_right in _OPTIONAL.items():
            _check(op, name, name not in header or is_right(header[name]))
        return
    error = header["error"]
    _check(op, "error", isinstance(error, dict))
    for name, is_right in _ERROR.items():
        _check(op, f"error.{name}", is_right(error.get(name)))


def _check(op: str, name: str, right: bool) -> None:
    if not right:
        raise ValueError(f"its answer to {op!r} has a wrong {name!r}")


def shown(text: object) -> str:
    """A message from inside: bounded, and of characters that can be encoded."""
    return str(text)[:LONGEST].encode("utf-8", "replace").decode()
