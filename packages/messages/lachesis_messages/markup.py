"""The tags of the trajectory format of Hermes Agent, and the escapes for text that contains the same characters.

* Inside JSON (`<tool_call>`, structured `<tool_response>`, the tool list) the `<` of a tag becomes `\\u003c`, which
  JSON readers decode.
* In free text (the assistant's text, raw tool results) it becomes `&lt;`, and an `&lt;` before such a tag becomes
  `&amp;lt;`: `unescape_text(escape_text(t)) == t` for every text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

_TAG = "/?(?:tool_call|tool_response|tools|think|REASONING_SCRATCHPAD)>"
_JSON_TAG = re.compile(f"<(?={_TAG})")
_BLOCK = "/?(?:tool_call|tool_response)>"
_BLOCK_AND_THINK = "/?(?:tool_call|tool_response|think)>"
_THINK = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)

_SCRATCHPAD = re.compile(r"\s*<REASONING_SCRATCHPAD>(.*?)(?:</REASONING_SCRATCHPAD>\n*|\Z)", re.DOTALL)
_END_OF_SCRATCHPAD = re.compile(r"</REASONING_SCRATCHPAD>[ \t]*(?:\n+|\Z)")
_END_OF_THINK = re.compile(r"</think>[ \t]*(?:\n+|\Z)")

EMPTY_THINK = "<think>\n</think>\n"


class NotJson(ValueError):
    """Text that is not JSON, or JSON that cannot be written again (NaN, infinities)."""


def dump_json(value: Any) -> str:
    """JSON as the format writes it: Python's default spacing, no ASCII escapes except those that hide a tag."""
    text = write_json(value)
    return _JSON_TAG.sub(r"\\u003c", text) if "<" in text else text


def load_json(text: str, *, unique_keys: bool = False) -> Any:
    """The value of a JSON text, or NotJson. `unique_keys` rejects objects with a repeated key."""
    try:
        value = (READ_UNIQUE if unique_keys else _READ)(text)
        if text.count("[") + text.count("{") > _FLAT:
            write_json([[value]])  # the written form is nested two levels deeper
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None
    return value


def load_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call: no text and null are none, and JSON text in JSON text is read as what it holds.

    Raises NotJson where they are not an object.
    """
    value: Any = text
    while isinstance(value, str):
        value = load_json(value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotJson(f"{type(value).__name__} is not an object")
    return value


def _reject(constant: str) -> Any:
    raise NotJson(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise NotJson(f"{number[:20]} is out of the range of numbers")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise NotJson(f"the key {twice!r} is in an object more than once")
    return mapping


_FLAT = 100
"""Brackets that cannot nest too deeply to be written."""

# Made once: `json.loads` and `json.dumps` with arguments make a reader or writer for each call.
_READ = json.JSONDecoder(parse_constant=_reject, parse_float=_finite).decode
UNIQUE = json.JSONDecoder(parse_constant=_reject, parse_float=_finite, object_pairs_hook=_unique)
READ_UNIQUE = UNIQUE.decode
write_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def escape_text(text: str, *, think: bool = False) -> str:
    """Free text with the tags of blocks escaped; with `think`, also the think tags."""
    ampersand, tag, _ = _ESCAPES[think]
    if "&" in text:
        text = ampersand.sub(r"&amp;\1", text)
    return tag.sub("&lt;", text) if "<" in text else text


def unescape_text(text: str, *, think: bool = False) -> str:
    """The inverse of `escape_text`."""
    if "&" not in text:
        return text
    return _ESCAPES[think][2].sub(lambda m: f"&{m[1]}" if m[1] else f"<{m[2]}", text)


_ESCAPES = {
    think: (
        re.compile(f"&((?:amp;)*lt;{tag})"),
        re.compile(f"<(?={tag})"),
        re.compile(f"&(?:amp;((?:amp;)*lt;{tag})|lt;({tag}))"),
    )
    for think, tag in ((False, _BLOCK), (True, _BLOCK_AND_THINK))
}


def convert_scratchpad_to_think(text: str) -> str:
    """Renames `<REASONING_SCRATCHPAD>` tags to `<think>`."""
    return text.replace("<REASONING_SCRATCHPAD>", "<think>").replace("</REASONING_SCRATCHPAD>", "</think>")


def think_block(reasoning: str) -> str:
    """The block that holds `reasoning`, with the newline that follows it."""
    return f"<think>\n{escape_text(reasoning, think=True)}\n</think>\n"


def split_think(text: str) -> tuple[str, str]:
    """The content of the think blocks at the start of `text`, and the rest.

    Only whole blocks at the very start count. A tag further on, in prose, code or an argument, is text.
    """
    thoughts: list[str] = []
    end = 0
    while match := _THINK.match(text, end):
        thoughts.append(inside(match[1]))
        end = match.end()
    return "\n".join(thought for thought in thoughts if thought.strip()), text[end:]


def split_opened_think(text: str) -> tuple[str, str]:
    """The text before an end tag without a start tag, and the rest.

    Chat templates of reasoning models open the block in the prompt, so that the completion begins inside it. Only an
    end tag at the end of a line counts: a sentence that mentions the tag goes on.
    """
    end = _END_OF_THINK.search(text)
    if end is None or "<think>" in text[: end.start()]:
        return "", text
    return inside(text[: end.start()]), text[end.end() :]


def split_scratchpad(text: str) -> tuple[str, str]:
    """The content of the `<REASONING_SCRATCHPAD>` blocks at the start of `text`, and the rest.

    A block that is not closed, as a token limit leaves it, is all that follows; a text that closes one at the end of a
    line and opens none began inside it.
    """
    if "REASONING_SCRATCHPAD>" not in text:
        return "", text
    thoughts: list[str] = []
    end = 0
    if (closed := _END_OF_SCRATCHPAD.search(text)) and "<REASONING_SCRATCHPAD>" not in text[: closed.start()]:
        thoughts.append(inside(text[: closed.start()]))
        end = closed.end()
    while match := _SCRATCHPAD.match(text, end):
        thoughts.append(inside(match[1]))
        end = match.end()
    return "\n".join(thought for thought in thoughts if thought.strip()), text[end:]


def inside(block: str) -> str:
    """The text of a block without the newline after the opening tag and the one before the closing tag."""
    return block.removeprefix("\n").removesuffix("\n")
