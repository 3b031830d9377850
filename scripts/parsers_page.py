"""Write docs/parsers.md: the text from this file, the tables and examples from the registry and the grammars.

.venv/bin/python scripts/parsers_page.py          # writes the page
.venv/bin/python scripts/parsers_page.py --check  # fails when the page is not what would be written
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
from pathlib import Path

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
from tool_call_parsers.channels import WordHeaders
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

3. Take the row of that format from `tool_call_parsers/formats/` and change its fields to your model's spelling. The
   fields are listed [below](#fields-of-the-grammars).
4. Compare `get_parser("my_format").render(content, reasoning, calls, tools)` with the model's text.
5. Write cases: at least one plain text, and one that is cut or malformed. The default tools of a case are `measure`,
   `note` and `ping` (`lachesis.testing.parser_suite.CASE_TOOLS`); set `tools` to offer others.
6. Run the suite. It checks the cases, whole and streamed in pieces, and properties of random turns and texts: a written
   turn is read back, a stream ends in the result for the whole text, no text raises or is lost, and a cut text loses no
   whole call and invents none. `limits = Limits(...)` excludes turns that the format cannot write.

In this repository, the row goes into the module of its family in `tool_call_parsers/formats/`, the cases into
`tests/tool_call_parsers/own_cases.jsonl`, and a rule for `name="auto"` into `tool_call_parsers/detect.py`. Then run
`scripts/parsers_page.py`, which writes this page, and `pytest tests/tool_call_parsers`.

A format that no grammar covers can be a class with a method `parse(text, tools=None) -> ParsedCompletion`, registered
with `@register_parser("my_format")`. It can neither stream nor write, and the suite does not apply to it.

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

GRAMMARS = (
    ('`<call>{"name": "f", "arguments": {"k": 1}}</call>`', JsonBlocks, "hermes"),
    ('`<call>f<sep>{"k": 1}</call>`', NamedJson, "deepseek_v31"),
    ("`<function=f><parameter=k>1</parameter></function>`", TagBlocks, "qwen3_coder"),
    ('`<invoke name="f"><parameter name="k">1</parameter></invoke>`', TagBlocks, "minimax_m2"),
    ("`<call>f<key>k</key><value>1</value></call>`", TagBlocks, "glm45"),
    ('`<invoke name="f"><k>1</k></invoke>`, nested', NestedTags, "minimax_m3"),
    ("`[f(k=1)]`", PythonCalls, "pythonic"),
    ("`call:f{k:<q>text<q>}`", Delimited, "gemma4"),
    ("messages with headers", WordHeaders, "openai"),
)
"""The form of a call, its grammar, and a format to start from."""


def module_of(grammar: type) -> str:
    """The package that exports a grammar."""
    package = grammar.__module__.rpartition(".")[0]
    return grammar.__module__ if package == "tool_call_parsers" else package


def grammars() -> str:
    """The table of grammars."""
    rows = [f"| {form} | `{module_of(kind)}.{kind.__name__}` | `{like}` |" for form, kind, like in GRAMMARS]
    return "\n".join(["| a call | grammar | start from |", "| --- | --- | --- |", *rows])


def fields(kind: type) -> list[str]:
    """A table row for each field of a dataclass, with the text below it, or below its declaration in a base class."""
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
                defaults[name] = f"`{ast.unparse(node.value)}`" if node.value is not None else "required"
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    meanings[name] = " ".join(str(following.value.value).split())
    names = [field.name for field in dataclasses.fields(kind)]
    return [f"| `{name}` | {defaults[name]} | {meanings[name]} |" for name in names]


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
    parts = [INTRODUCTION % {"statuses": statuses, "example": EXAMPLE, "grammars": grammars()}]
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
    parts.append("\n## Fields of the grammars\n")
    for kind in (Format, *dict.fromkeys(kind for _, kind, _ in GRAMMARS)):
        parts.append(f"\n### {kind.__name__}\n\n| field | default | meaning |\n| --- | --- | --- |\n")
        inherited = set(fields(kind.__base__)) if kind is NestedTags else set()
        parts.append("".join(f"{row}\n" for row in fields(kind) if row not in inherited))
        parts.append("\nThe other fields are those of `TagBlocks`.\n" if inherited else "")
    return "".join(parts)


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE.name} is out of date: run scripts/parsers_page.py")
    else:
        PAGE.write_text(text, encoding="utf-8")
        print(f"{PAGE} written: {len(list_parsers())} formats")
