"""Results of tools as JSON objects, for code and models that expect every result to be one."""

from __future__ import annotations

import json
from typing import Final

from lachesis_tools.text import to_json

_KEYS: Final = {"read_file": "content", "patch": "diff"}
"""What the text of a result is called, where not `output`."""
_TEXT: Final = frozenset({"read_file", "write_file", "patch", "search_files", "python"})
"""Tools whose results are text, also where it looks like JSON."""


def as_json(tool: str, content: str) -> str:
    """The result of a tool as the text of a JSON object; one that is an object already stays as it is.

    Failures are `{"error": ...}` in either form.
    """
    found = _object(content)
    if found is not None and (tool not in _TEXT or found.keys() == {"error"}):
        return content
    return to_json({_KEYS.get(tool, "output"): content})


def _object(text: str) -> dict[str, object] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
