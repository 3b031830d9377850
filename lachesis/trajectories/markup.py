"""The tags of the trajectory format of Hermes Agent, and how text that merely spells them is kept apart from them.

* Inside JSON (`<tool_call>`, structured `<tool_response>`, the tool list) the `<` of a tag becomes `\\u003c`, which
  every JSON reader turns back.
* In free text (what the assistant wrote, raw tool results) it becomes `&lt;`, and an `&lt;` that already stood before
  such a tag becomes `&amp;lt;`: `unescape_text(escape_text(t)) == t` for every text.
"""

from __future__ import annotations

import json
import re
from typing import Any

_TAG = "/?(?:tool_call|tool_response|tools|think|REASONING_SCRATCHPAD)>"
_JSON_TAG = re.compile(f"<(?={_TAG})")
_BLOCK = "/?(?:tool_call|tool_response)>"
_BLOCK_AND_THINK = "/?(?:tool_call|tool_response|think)>"
_THINK = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)

_END_OF_THINK = re.compile(r"</think>[ \t]*(?:\n+|\Z)")

EMPTY_THINK = "<think>\n</think>\n"


class NotJson(ValueError):
    """Text that is not JSON, or JSON that would not survive being written again (NaN, infinities)."""


def dump_json(value: Any) -> str:
    """JSON as the format spells it: Python's default spacing, no ASCII escapes except those that hide a tag."""
    return _JSON_TAG.sub(r"\\u003c", json.dumps(value, ensure_ascii=False, allow_nan=False))


def load_json(text: str, *, unique_keys: bool = False) -> Any:
    """The value of a JSON text, or NotJson. `unique_keys` refuses objects in which a key stands twice."""
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique if unique_keys else None)
        # Two levels deeper than it will stand when it is written; 1e999 has become an infinity.
        json.dumps([[value]], allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None
    return value


def _refuse(constant: str) -> Any:
    raise NotJson(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise NotJson("a key stands twice in an object")
    return mapping


def escape_text(text: str, *, think: bool = False) -> str:
    """Free text in which no tag of a block stands as a tag; with `think`, no think tag either."""
    tag = _BLOCK_AND_THINK if think else _BLOCK
    text = re.sub(f"&((?:amp;)*lt;{tag})", r"&amp;\1", text)
    return re.sub(f"<(?={tag})", "&lt;", text)


def unescape_text(text: str, *, think: bool = False) -> str:
    """The inverse of `escape_text`."""
    tag = _BLOCK_AND_THINK if think else _BLOCK
    return re.sub(f"&(?:amp;((?:amp;)*lt;{tag})|lt;({tag}))", lambda m: f"&{m[1]}" if m[1] else f"<{m[2]}", text)


def convert_scratchpad_to_think(text: str) -> str:
    """Renames `<REASONING_SCRATCHPAD>` tags to `<think>`."""
    return text.replace("<REASONING_SCRATCHPAD>", "<think>").replace("</REASONING_SCRATCHPAD>", "</think>")


def has_incomplete_scratchpad(text: str) -> bool:
    """Whether a scratchpad was opened and not closed: the model was cut off while it thought."""
    return text.rfind("<REASONING_SCRATCHPAD>") > text.rfind("</REASONING_SCRATCHPAD>")


def think_block(reasoning: str) -> str:
    """The block that holds `reasoning`, with the newline that follows it."""
    return f"<think>\n{escape_text(reasoning, think=True)}\n</think>\n"


def split_think(text: str) -> tuple[str, str]:
    """What stands in the think blocks that `text` begins with, and the rest.

    Only a whole block at the very beginning is one. A tag that text, code or an argument mentions further on is text.
    """
    thoughts: list[str] = []
    end = 0
    while match := _THINK.match(text, end):
        thoughts.append(inside(match[1]))
        end = match.end()
    return "\n".join(thought for thought in thoughts if thought.strip()), text[end:]


def split_opened_think(text: str) -> tuple[str, str]:
    """What stands before an end tag that no tag opens, and the rest.

    Chat templates of reasoning models open the block in the prompt, so that the completion begins within it. Only an
    end tag that ends its line is one: a sentence that mentions it goes on.
    """
    end = _END_OF_THINK.search(text)
    if end is None or "<think>" in text[: end.start()]:
        return "", text
    return inside(text[: end.start()]), text[end.end() :]


def inside(block: str) -> str:
    """The text of a block without the newline after the opening tag and the one before the closing tag."""
    return block.removeprefix("\n").removesuffix("\n")
