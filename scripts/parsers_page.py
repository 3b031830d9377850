"""Write what the pages on parsers say of the registry and the grammars: their parts between two comments.

.venv/bin/python scripts/parsers_page.py          # writes these parts
.venv/bin/python scripts/parsers_page.py --check  # fails when a page is not what would be written
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import tool_call_parsers
from lachesis_testing.parser_suite import Case, FormatLimits
from tool_call_parsers import (
    ArgumentsDelta,
    CallStatus,
    Finish,
    Format,
    ToolCallParser,
    get_parser,
    list_parsers,
    list_reasoning,
)
from tool_call_parsers.channels import Channel, Harmony
from tool_call_parsers.delimited import Delimited
from tool_call_parsers.json_blocks import JsonBlocks, NamedJson
from tool_call_parsers.python_calls import PythonCalls
from tool_call_parsers.tag_blocks import NestedTags, TagBlocks

DOCS = Path(__file__).resolve().parent.parent / "docs"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "grep",
            "parameters": {
                "type": "object",
                "properties": {
                    "pattern": {"type": "string"},
                    "limit": {"type": "integer"},
                    "paths": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["pattern"],
            },
        },
    },
    {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    {
        "id": "a1b2c3d4e5",
        "function": {"name": "grep", "arguments": {"pattern": "def main", "limit": 3, "paths": ["src", "docs"]}},
    },
    {"id": "f6g7h8i9j0", "function": {"name": "list_files", "arguments": {}}},
]
CONTENT, REASONING = "I look for it.", "Where could it be?"

GRAMMARS = (
    ('`<call>{"name": "f", "arguments": {"k": 1}}</call>`', JsonBlocks, "hermes"),
    ('`<call>f<sep>{"k": 1}</call>`', NamedJson, "deepseek_v31"),
    ("`<function=f><parameter=k>1</parameter></function>`", TagBlocks, "qwen3_coder"),
    ('`<invoke name="f"><parameter name="k">1</parameter></invoke>`', TagBlocks, "minimax_m2"),
    ("`<call>f<key>k</key><value>1</value></call>`", TagBlocks, "glm45"),
    ('`<invoke name="f"><k>1</k></invoke>`, nested', NestedTags, "minimax_m3"),
    ("`[f(k=1)]`", PythonCalls, "pythonic"),
    ("`call:f{k:<q>text<q>}`", Delimited, "gemma4"),
    ("messages with headers", Harmony, "openai"),
)
"""The form of a call, its grammar, and a format to start from."""
PACKAGES = ("tool_call_parsers.engine", "tool_call_parsers.json_blocks", "tool_call_parsers.schema")
"""Packages that export further names in the types of fields."""


PART = re.compile(r"(?<=<!-- generated: )(\w+) -->\n.*?(?=<!-- end -->)", re.DOTALL)
"""A part of a page that this script writes."""


def module_of(kind: type) -> str:
    """The package that exports a class."""
    if kind.__name__ in tool_call_parsers.__all__:
        return "tool_call_parsers"
    package = kind.__module__.rpartition(".")[0]
    return kind.__module__ if package == "tool_call_parsers" else package


def grammars() -> str:
    """The table of grammars."""
    rows = [f"| {form} | `{module_of(kind)}.{kind.__name__}` | `{like}` |" for form, kind, like in GRAMMARS]
    return "\n".join(["| a call | grammar | start from |", "| --- | --- | --- |", *rows]) + "\n"


def statuses() -> str:
    """The table of the statuses of attempts."""
    meanings = texts_below(CallStatus)
    rows = [f"| `{status}` | {meanings[name]} |" for name, status in CallStatus.__members__.items()]
    return "\n".join(["| status | meaning |", "| --- | --- |", *rows]) + "\n"


def code(value: object) -> str:
    """A field's value as source code."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{code(key)}: {code(item)}' for key, item in value.items())}}}"
    if isinstance(value, frozenset):
        return f"frozenset({code(tuple(sorted(value)))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(code, value))}{',' * (len(value) == 1)})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and '"' not in value else repr(value)


def start_rows() -> str:
    """The grammar of each format to start from, without the fields that have their default."""
    parts = []
    for form, kind, like in GRAMMARS:
        grammar: Any = get_parser(like).format.grammar
        own = [field.name for field in dataclasses.fields(grammar) if getattr(grammar, field.name) != field.default]
        lines = "".join(f"    {name}={code(getattr(grammar, name))},\n" for name in own)
        names = ["Channel", kind.__name__] if "Channel." in lines else [kind.__name__]
        source = f"from {module_of(kind)} import {', '.join(names)}\n\n{kind.__name__}(\n{lines})\n"
        parts.append(f"`{like}`, {form}:\n\n```python\n{source}```\n")
    return "\n".join(parts)


def imports(kind: type, rows: Sequence[Field]) -> str:
    """The imports of a dataclass, and of the names in the types of its fields."""
    words = set(re.findall(r"\b[A-Z]\w+", " ".join(row.type for row in rows)))
    lines = []
    for package in dict.fromkeys((module_of(kind), *PACKAGES)):
        exported = set(getattr(sys.modules[package], "__all__", ()))
        names = sorted(({kind.__name__} if package == module_of(kind) else set()) | words & exported)
        words -= set(names)
        lines += [f"`from {package} import {', '.join(names)}`"] if names else []
    return "; ".join(lines) + "\n"


class Field(NamedTuple):
    """A field of a dataclass, as a page shows it."""

    name: str
    type: str
    default: str
    meaning: str


def body(kind: type) -> list[ast.stmt]:
    """The statements of a class."""
    (source,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(source, ast.ClassDef)
    return source.body


def texts_below(kind: type) -> dict[str, str]:
    """The text below each value that a class declares, by the name of the value."""
    found = {}
    for pair in itertools.pairwise(body(kind)):
        match pair:
            case ((ast.AnnAssign(target=name) | ast.Assign(targets=[name])), ast.Expr(ast.Constant(str(text)))):
                found[ast.unparse(name)] = " ".join(text.split())
    return found


def fields(kind: type) -> list[Field]:
    """The fields of a dataclass, each with the text below it, or below its declaration in a base class."""
    types: dict[str, str] = {}
    defaults: dict[str, str] = {}
    meanings: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if "__annotations__" not in vars(owner) or owner.__module__ == "typing":
            continue
        meanings |= texts_below(owner)
        for node in body(owner):
            if isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target)
                types[name] = ast.unparse(node.annotation)
                defaults[name] = f"`{ast.unparse(node.value)}`" if node.value is not None else "required"
    names = [field.name for field in dataclasses.fields(kind)]
    return [Field(name, types[name], defaults[name], meanings[name]) for name in names]


def table(rows: Iterable[Field]) -> str:
    """A table of fields."""
    lines = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (f"`{row.name}`", f"`{row.type}`", row.default, row.meaning)
        lines.append("| {} | {} | {} | {} |".format(*(cell.replace("|", "\\|") for cell in cells)))
    return "\n".join(lines) + "\n"


def streams(parser: ToolCallParser) -> str:
    """What a stream sends of a call before it is complete."""
    text = parser.render(None, None, CALLS[:1], TOOLS)
    stream = parser.stream(TOOLS)
    events = [event for character in text for event in stream.feed(character)]
    fragments = sum(isinstance(event, ArgumentsDelta) for event in events)
    return "arguments as they are written" if fragments > 2 else "whole calls"


def round_trip(parser: ToolCallParser) -> str:
    """`exact`, or what is lost."""
    reasoning = REASONING if parser.reasoning is not None or parser.format.channels else None
    for content, thought in ((None, None), (CONTENT, None), (None, reasoning), (CONTENT, reasoning)):
        text = parser.render(content, thought, CALLS, TOOLS)
        parsed = parser.parse(text, TOOLS)
        same = [call.arguments for call in parsed.tool_calls] == [call["function"]["arguments"] for call in CALLS]
        same &= (parsed.content, parsed.reasoning, parsed.finish) == (content, thought, Finish.TOOL_CALLS)
        if not same and not parser.format.lossy:
            raise AssertionError(f"{parser.name} does not read what it writes: {text!r}")
    return parser.format.lossy or "exact"


def formats() -> str:
    """The formats of the registry, and their examples."""
    parts = ["| name | models | aliases | reasoning | streams | round trip |\n" + "| --- " * 6 + "|\n"]
    examples = []
    notes: list[str] = []
    for name in list_parsers():
        parser = get_parser(name, reasoning="auto")
        row = parser.format
        reasoning = f"`{row.reasoning}`" if row.reasoning else "-"
        aliases = ", ".join(f"`{alias}`" for alias in row.aliases) or "-"
        lost = round_trip(parser)
        if lost != "exact":
            notes += [] if lost in notes else [lost]
            lost = f"[{notes.index(lost) + 1}]"
        cells = (f"`{name}`", row.models, aliases, reasoning, streams(parser), lost)
        parts.append(f"| {' | '.join(cells)} |\n")
        examples.append(f"### {name}\n\n```text\n{parser.render(CONTENT, None, CALLS, TOOLS)}\n```\n")
    parts.append("\n" + "".join(f"{number}. {note}\n" for number, note in enumerate(notes, 1)))
    parts.append(f"\nReasoning formats: {', '.join(f'`{name}`' for name in list_reasoning())}.\n")
    parts.append("\n## Examples\n\nContent and two calls, one without arguments, as each format writes them.\n\n")
    parts.append("\n".join(examples))
    return "".join(parts)


def rows_and_fields() -> str:
    """Rows to start from, and the fields of the grammars."""
    parts = [f"## Rows to start from\n\nThe grammars of nine formats.\n\n{start_rows()}"]
    parts.append("\n## Fields of the grammars\n")
    for kind in (Format, *dict.fromkeys(kind for _, kind, _ in GRAMMARS)):
        inherited = set(fields(kind.__base__)) if kind is NestedTags else set()
        rows = [row for row in fields(kind) if row not in inherited]
        parts.append(f"\n### {kind.__name__}\n\n{imports(kind, rows)}\n{table(rows)}")
        parts.append("\nThe other fields are those of `TagBlocks`.\n" if inherited else "")
    channels = ", ".join(f"`{channel}`" for channel in Channel)
    parts.append(f"\nThe channels are {channels}.\n")
    return "".join(parts)


def pages() -> dict[str, dict[str, str]]:
    """The generated parts of each page, in order."""
    return {
        "parsers.md": {"statuses": statuses()},
        "parser-formats.md": {"formats": formats()},
        "parser-plugins.md": {
            "grammars": grammars(),
            "case": table(fields(Case)),
            "limits": table(fields(FormatLimits)),
            "rows": rows_and_fields(),
        },
    }


def with_parts(text: str, parts: dict[str, str]) -> str:
    """A page, with its generated parts written anew."""
    assert PART.findall(text) == list(parts), "a comment around a generated part is missing"
    return PART.sub(lambda part: f"{part[1]} -->\n{parts[part[1]]}", text)


if __name__ == "__main__":
    for name, parts in pages().items():
        before = (DOCS / name).read_text(encoding="utf-8")
        text = with_parts(before, parts)
        if "--check" not in sys.argv[1:]:
            (DOCS / name).write_text(text, encoding="utf-8")
            print(f"docs/{name} written")
        elif text != before:
            sys.exit(f"{name} is out of date: run scripts/parsers_page.py")
