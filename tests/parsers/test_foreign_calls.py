"""Calls in markup that the format does not read leave an attempt; text about calls leaves none."""

from __future__ import annotations

import re

import pytest

from lachesis_testing.parser_checks import INTEGER, STRING, facts, pieces_of, streamed, tool
from tool_call_parsers import CallStatus, get_parser, list_parsers

TOOLS = [tool("bash", command=STRING, timeout=INTEGER), tool("write_file", path=STRING, content=STRING), tool("ping")]
CALLS = [
    {"name": "bash", "arguments": {"command": "ls -la", "timeout": 3}},
    {"name": "write_file", "arguments": {"path": "a.py", "content": "x\ny"}},
    {"name": "ping", "arguments": {}},
]
_SPECIAL = re.compile(r"<[|｜][^<>\n]*?[|｜]>|\[[A-Z_]{4,}\]|\]<\]minimax\[>\[")
_FIRST_MARKER = re.compile(r"[<\[][^<>\[\]\n]*[>\]]")


@pytest.mark.sample(80)
@pytest.mark.parametrize("writer", list_parsers())
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call["name"])
def test_a_call_in_the_markup_of_another_format_leaves_an_attempt(writer: str, call: dict[str, object]) -> None:
    text = get_parser(writer).render(None, None, [call], TOOLS)
    for reader in list_parsers():
        parser = get_parser(reader)
        whole = parser.parse(text, TOOLS)
        assert whole.attempts, (reader, text)
        assert all(attempt.raw in text for attempt in whole.attempts)
        found, _ = streamed(parser, pieces_of(text, range(5, len(text), 5)), TOOLS)
        assert facts(found) == facts(whole)


@pytest.mark.parametrize("writer", sorted(set(list_parsers()) - {"kimi_k3", "solar_open"}))  # they leave words alone
def test_a_call_whose_special_tokens_were_stripped_leaves_an_attempt(writer: str) -> None:
    text = get_parser(writer).render(None, None, CALLS[:1], TOOLS)
    for spelled in (_SPECIAL.sub("", text), text.replace("｜", "|"), text.replace("｜", "｜｜")):
        assert get_parser(writer).parse(spelled, TOOLS).attempts, spelled
        assert get_parser("hermes").parse(spelled, TOOLS).attempts, spelled


@pytest.mark.parametrize(
    "text",
    [
        '<tools>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tools>',
        '<function_calls>\n<invoke name="bash">\n<parameter name="command">ls</parameter>\n</invoke>',
        '<invoke name="no_such_tool">\n<parameter name="command">ls</parameter>\n</invoke>',
        "bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>",
        'I will look.\n{"name": "bash", "parameters": {"command": "ls"}}',
        'commentary to=functions.bash json{"command": "ls"}',
        '<|channel|>functions.bash<|message|>{"command": "ls"}<|call|>',
        'bash{"command": "ls"}',
        '[bash(command="ls")]',
        "<bash>\n<command>ls</command>\n</bash>",
        '```json\n{"name": "bash", "arguments": {"command": "ls"}}\n```',
        '{"tool": "bash", "tool_input": {"command": "ls"}}',
        '{"arguments": {"command": "ls"}, "name": "bash"}',
    ],
)
@pytest.mark.parametrize("reader", ["glm47", "deepseek_v32", "minimax_m3", "qwen3_coder"])
def test_what_a_reader_would_call_an_attempt_is_one(reader: str, text: str) -> None:
    found = get_parser(reader).parse(text, TOOLS)
    assert found.attempts
    if not found.tool_calls:
        (attempt,) = found.attempts
        assert attempt.status is CallStatus.MALFORMED
        assert attempt.raw in text
        assert found.content is not None
        assert attempt.raw in found.content  # nothing is lost


@pytest.mark.sample(150)
@pytest.mark.parametrize(
    "text",
    [
        "I used bash to list the files: there are 3 of them.",
        'Use `<tool_call>` tags to call bash, or `bash{"command": "ls"}`.',
        "The tools are bash, write_file and ping.",
        "In Python:\n```python\nbash(command='ls')\n```\nruns it.",
        'The file holds {"name": "bash", "version": 3}.',
        "Pass --tool=bash to the program, and see <https://example.org/tool/bash>.",
        "Both bash(1) and ping(8) have manual pages.",
        'Its package.json says {"name": "ping", "scripts": {"input": "x"}}.',
        "<b>bash</b> is a shell; <code>ping</code> sends packets.",
        "The answer is 42.",
    ],
)
@pytest.mark.parametrize("reader", list_parsers())
def test_prose_about_tools_is_no_attempt(reader: str, text: str) -> None:
    found = get_parser(reader).parse(text, TOOLS)
    assert not found.attempts
    assert found.content == text


def test_without_tools_there_is_nothing_to_call() -> None:
    assert not get_parser("hermes").parse('<invoke name="bash">\n<parameter name="command">ls</parameter>').attempts
