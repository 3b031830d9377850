"""Write docs/parsers.md: the text from this file, the tables and examples from the registry and the grammars.

.venv/bin/python scripts/parsers_page.py          # writes the page
.venv/bin/python scripts/parsers_page.py --check  # fails when the page is not what would be written
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
from lachesis.testing.parser_suite import Case, Limits
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

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parsers.md"

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
    {"function": {"name": "grep", "arguments": {"pattern": "def main", "limit": 3, "paths": ["src", "docs"]}}},
    {"function": {"name": "list_files", "arguments": {}}},
]
CONTENT, REASONING = "I look for it.", "Where could it be?"

STATUS_WORDS = {
    CallStatus.OK: "well formed, and the tool was offered",
    CallStatus.REPAIRED: "the meaning is clear and the form is wrong; `error` names the repair",
    CallStatus.INCOMPLETE: "the text ended inside the arguments",
    CallStatus.INVALID_JSON: "the arguments are complete and cannot be read",
    CallStatus.NOT_AN_OBJECT: "the arguments are a list, a number or a text",
    CallStatus.MISSING_NAME: "the attempt names no tool",
    CallStatus.UNKNOWN_TOOL: "well formed, but no such tool was offered",
    CallStatus.MALFORMED: "the tags of a call around text that is not a call",
    CallStatus.IN_REASONING: "drafted inside a closed reasoning block",
}

INTRODUCTION = """\
# Tool-call parsers

`tool_call_parsers` turns the text that a model wrote into structured tool calls, and structured calls into the text
that a model would write. It needs only the standard library and can be used alone.

```python
from tool_call_parsers import get_parser

tools = [{"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}}}}]
parser = get_parser("qwen3_coder", reasoning="auto")
text = '''<think>
The files first.
</think>

I look around.

<tool_call>
<function=bash>
<parameter=command>
ls -la
</parameter>
<parameter=timeout>
30
</parameter>
</function>
</tool_call>'''
completion = parser.parse(text, tools)
assert completion.reasoning == "The files first."
assert completion.content == "I look around."
(call,) = completion.tool_calls
assert (call.name, call.arguments) == ("bash", {"command": "ls -la", "timeout": 30})
assert parser.render(completion.content, completion.reasoning, [call], tools) == text
```

## Names

`get_parser(name)` takes the names in the table below, which are vLLM's where vLLM has the format. SGLang's and
hermes-agent's names and the models' names are aliases. Case, `-`, `_` and `.` are ignored. The error for an unknown
name lists similar ones. With `name="auto"` and a `tokenizer=` the chat template decides;
`detect_parser(chat_template)` returns the decision and its reason.

`reasoning=` takes vLLM's names of reasoning parsers, or `"auto"` for the format that the models use. With `None`
reasoning stays in the content, except that formats with a channel for reasoning always read it. A call drafted inside a
closed reasoning block is never made, whatever `reasoning` says.

## Results

`parse(text, tools, *, token_ids=None, prompt_opened_reasoning=False, strict=False)` never raises on any text and loses
none of it: text that is neither reasoning nor a call is `content`, with the text of failed attempts.

* `tool_calls` are the usable calls: `ok`, `unknown_tool` (well formed, but not offered; the agent loop answers it with
  an error), and `repaired` unless `strict`. Arguments are always an object.
* `attempts` are all attempts in order, with `status`, `error`, `raw` and `span`: for a reward for the format, or to
  find out why a model's attempt failed.
* `reasoning_complete` and `finish` say whether the text ended inside reasoning or inside a call.

| status | meaning |
| --- | --- |
%(statuses)s

Formats that write JSON keep its types: `"3"` stays text, and `arguments_raw` is the text that the model wrote. Formats
without types (XML-like ones) are read by the tool's schema, with unions, nullable, enum and `$ref`: strings are
verbatim, integers of any size are exact, and a value that does not fit stays text. Nothing is ever evaluated. A call
with complete arguments counts without its end tag; a call that is cut inside its arguments never counts.

`prompt_opened_reasoning=True` says that the generation prompt ended in `<think>` or the like. With `token_ids=` and a
parser made with `tokenizer=`, markers that are special tokens count only if they are tokens, and spans are given in
tokens, too.

## Streaming

```python
from tool_call_parsers import ArgumentsDelta, get_parser

stream = get_parser("hermes").stream()
events = []
for piece in ('Hello.\\n<tool_call>\\n{"name": "bash", "argu', 'ments": {"command": "l', 's"}}\\n</tool_call>'):
    events += stream.feed(piece)
completion = stream.finish()
assert completion.content == "Hello."
assert "".join(event.fragment for event in events if isinstance(event, ArgumentsDelta)) == '{"command": "ls"}'
```

`feed` returns `ContentDelta`, `ReasoningDelta`, `CallStart` (with the complete name), `ArgumentsDelta` (more of the
arguments' JSON text) and `CallEnd` (with the call and its status). However a text is cut, `finish()` returns the result
of `parse` for the whole text. The last events are in `stream.last_events`.

## Add a format

A format is a row of data: a name, a grammar, and the models that write it. The grammar reads whole texts and streams,
and writes turns. Nothing in this package changes for a format of yours: register it in the module of your environment,
and name it in the settings (`--env.tool_call_parser my_format`).

The example adds a format whose models write `<call>{"tool": "ping", "input": {}}</call>`, and tests it. Save it as
`test_my_format.py` and run `pytest test_my_format.py` (the suite needs `pytest` and `hypothesis`).

```python
%(example)s```

1. Take an answer of the model with a call, with its tags and whitespace. Special tokens must be in the text.
2. Choose the grammar by the form of a call:

%(grammars)s

3. Copy the [row of that format](#rows-to-start-from) and change its [fields](#fields-of-the-grammars) to your model's
   spelling.
4. Compare `get_parser("my_format").render(content, reasoning, calls, tools)` with the model's text.
5. Write cases: at least one plain text, and one that is cut or malformed. The default tools of a case are `measure`,
   `note` and `ping` (`lachesis.testing.parser_suite.CASE_TOOLS`); set `tools` to offer others.
6. Run the suite. It checks the cases, whole and streamed in pieces, and properties of random turns and texts: a written
   turn is read back, a stream ends in the result for the whole text, no text raises or is lost, a cut text loses no
   whole call and invents none, and a call whose JSON is no object is not `ok`. `limits = Limits(...)` excludes turns
   that the format cannot write.

`Case`, of `lachesis.testing.parser_suite`:

%(case)s
`Limits`, of the same module:

%(limits)s
In this repository, the row goes into the module of its family in `tool_call_parsers/formats/`, the cases into
`tests/tool_call_parsers/own_cases.jsonl`, and a rule for `name="auto"` into `tool_call_parsers/detect.py`. Then run
`scripts/parsers_page.py`, which writes this page, and `pytest tests/tool_call_parsers`.

A row can express calls that begin with fixed text, with arguments as JSON, tags, Python literals or delimited strings.
Calls that only a pattern finds, and other arguments (lines of `key := value`, YAML, shell words), need a class with a
method `parse`. It may ignore the `options`, which are those of the parsers above. It can neither stream nor write, and
the suite does not apply to it.

```python
%(class_example)s```

## Formats

*Streams*: what a stream sends of a call before it is complete. *Round trip*: whether `parse(render(x))` is `x`, or what
is lost.

"""

EXAMPLE = """\
from lachesis.testing.parser_suite import Case, ParserSuite
from tool_call_parsers import Format, register_parser
from tool_call_parsers.json_blocks import JsonBlocks

register_parser(
    Format(
        "my_format",
        JsonBlocks(
            opens=("<call>",),
            closes=("</call>",),
            frame=("<call>", "</call>"),
            written='{"tool": %(name)s, "input": %(arguments)s}',
            name_key="tool",
            argument_keys=("input",),
        ),
        models="My Model 7B",
        reasoning="deepseek_r1",
    )
)


class TestMyFormat(ParserSuite):
    parser = "my_format"
    cases = (
        Case(
            "my_format",
            "content and a call",
            'Look: <call>{"tool": "note", "input": {"title": "a", "body": "b"}}</call>',
            [("note", {"title": "a", "body": "b"})],
            content="Look:",
        ),
        Case("my_format", "cut", '<call>{"tool": "note", "input": {"title": "a', [], statuses=["incomplete"]),
    )
"""
"""A complete module that adds a format and tests it. A test runs it as the page shows it."""

CLASS_EXAMPLE = """\
import re

from tool_call_parsers import CallSpan, CallStatus, Finish, ParsedCompletion, ParsedToolCall
from tool_call_parsers import get_parser, new_call_id, register_parser

CALL = re.compile(r"^@(?P<name>\\w+)\\n(?P<lines>(?:\\w+ := .*\\n)*)", re.MULTILINE)


@register_parser("my_lines")
class LineParser:
    def parse(self, text, tools=None, **options):
        calls = []
        for found in CALL.finditer(text):
            arguments = dict(line.split(" := ", 1) for line in found["lines"].splitlines())
            span = CallSpan(*found.span())
            calls.append(
                ParsedToolCall(
                    new_call_id(), found["name"], arguments, found["lines"], CallStatus.OK, raw=found[0], span=span
                )
            )
        finish = Finish.TOOL_CALLS if calls else Finish.STOP
        content = CALL.sub("", text).strip() or None
        return ParsedCompletion(content, tool_calls=tuple(calls), attempts=tuple(calls), finish=finish)


completion = get_parser("my_lines").parse("I look.\\n@grep\\npattern := def main\\n")
assert completion.content == "I look."
assert completion.tool_calls[0].arguments == {"pattern": "def main"}
"""
"""A parser that is a class."""

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


def module_of(kind: type) -> str:
    """The package that exports a class."""
    if kind.__name__ in tool_call_parsers.__all__:
        return "tool_call_parsers"
    package = kind.__module__.rpartition(".")[0]
    return kind.__module__ if package == "tool_call_parsers" else package


def grammars() -> str:
    """The table of grammars."""
    rows = [f"| {form} | `{module_of(kind)}.{kind.__name__}` | `{like}` |" for form, kind, like in GRAMMARS]
    return "\n".join(["| a call | grammar | start from |", "| --- | --- | --- |", *rows])


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
    """A field of a dataclass, as the page shows it."""

    name: str
    type: str
    default: str
    meaning: str


def fields(kind: type) -> list[Field]:
    """The fields of a dataclass, each with the text below it, or below its declaration in a base class."""
    types: dict[str, str] = {}
    defaults: dict[str, str] = {}
    meanings: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if "__annotations__" not in vars(owner) or owner.__module__ == "typing":
            continue
        (source,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(source, ast.ClassDef)
        for node, following in itertools.pairwise([*source.body, ast.Pass()]):
            if isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target)
                types[name] = ast.unparse(node.annotation)
                defaults[name] = f"`{ast.unparse(node.value)}`" if node.value is not None else "required"
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    meanings[name] = " ".join(str(following.value.value).split())
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


def page() -> str:
    """The whole page."""
    statuses = "\n".join(f"| `{status}` | {STATUS_WORDS[status]} |" for status in CallStatus)
    filled = {"statuses": statuses, "example": EXAMPLE, "grammars": grammars(), "class_example": CLASS_EXAMPLE}
    parts = [INTRODUCTION % (filled | {"case": table(fields(Case)), "limits": table(fields(Limits))})]
    parts.append("| name | models | aliases | reasoning | streams | round trip |\n" + "| --- " * 6 + "|\n")
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
    parts.append(f"\n## Rows to start from\n\nThe grammars of nine formats.\n\n{start_rows()}")
    parts.append("\n## Fields of the grammars\n")
    for kind in (Format, *dict.fromkeys(kind for _, kind, _ in GRAMMARS)):
        inherited = set(fields(kind.__base__)) if kind is NestedTags else set()
        rows = [row for row in fields(kind) if row not in inherited]
        parts.append(f"\n### {kind.__name__}\n\n{imports(kind, rows)}\n{table(rows)}")
        parts.append("\nThe other fields are those of `TagBlocks`.\n" if inherited else "")
    channels = ", ".join(f"`{channel}`" for channel in Channel)
    parts.append(f"\nThe channels are {channels}.\n")
    return "".join(parts)


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE.name} is out of date: run scripts/parsers_page.py")
    else:
        PAGE.write_text(text, encoding="utf-8")
        print(f"{PAGE} written: {len(list_parsers())} formats")
