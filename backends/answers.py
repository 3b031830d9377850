"""The answers that an executor may give. An executor that gives any other answer is no longer trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 4096
"""Characters that are kept of a message from inside."""


_MOST = 1 << 63
_RIGHT: Mapping[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and abs(value) < _MOST,
    "size": lambda value: isinstance(value, int) and 0 <= value < _MOST,
    "seconds": lambda value: isinstance(value, int | float) and math.isfinite(value) and value >= 0,
    "text": lambda value: isinstance(value, str),
    "flag": lambda value: isinstance(value, bool),
    "texts": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "pairs": lambda value: isinstance(value, list) and all(map(_is_pair, value)),
}
"""What a field may be. A name that ends in `?` may be None as well."""
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "init": {"python": "text?", "unfiltered": "text"},
    "exec": {
        "execution": "text",
        "exit_code": "integer",
        "timed_out": "flag",
        "duration": "seconds",
        "stdout": "size",
        "stdout_elided": "size",
        "stderr_elided": "size",
    },
    "start": {"process": "text"},
    "processes": {"processes": "pairs"},
    "status": {"exit_code": "integer?", "output_size": "size"},
    "output": {"exit_code": "integer?", "offset": "size"},
    "stat": {"path": "text"},
    "hold": {"held": "flag", "running": "texts", "ran": "flag"},
    "go_on": {"left": "size"},
    "pull": {"end": "flag"},
    "listen": {"port": "size"},
    "accept": {"refused": "size"},
}
_OPTIONAL = {"mode": "integer?", "size": "size", "mtime": "integer?"}
_ERROR = {"errno": "integer?", "message": "text", "path": "text?"}


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and all(isinstance(each, str) for each in row)


def check(op: str, header: Mapping[str, Any]) -> None:
    """Raises `ValueError` if `header` is no answer to the request `op`."""
    if "error" in header:
        found, kinds, where = header["error"], _ERROR, "error."
        if not isinstance(found, dict):
            raise ValueError(f"its answer to {op!r} has a wrong 'error'")
    else:
        optional = {name: kind for name, kind in _OPTIONAL.items() if name in header}
        found, kinds, where = header, {**_FIELDS.get(op, {}), **optional}, ""
    for name, kind in kinds.items():
        value = found.get(name)
        if not ((value is None and kind.endswith("?")) or _RIGHT[kind.rstrip("?")](value)):
            raise ValueError(f"its answer to {op!r} has a wrong {where + name!r}")


def shown(text: object) -> str:
    """A message from inside: bounded, and of characters that can be encoded."""
    return str(text)[:LONGEST].encode("utf-8", "replace").decode()
