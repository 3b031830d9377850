"""The Hermes chat template: what the model gets to see, and that a longer conversation only adds to it."""

from __future__ import annotations

import json

import jinja2
import pytest

from lachesis_tokens.engines.embedded import HERMES_TEMPLATE

TOOLS = [
    {"type": "function", "function": {"name": "python", "description": "Run <code> & print", "parameters": {}}},
    {"type": "function", "function": {"name": "bash", "parameters": {}}},
]


def call(name, arguments):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "3*4?"},
    {"role": "assistant", "content": None, "tool_calls": [call("python", '{"code": "3*4"}'), call("bash", {"a": "<"})]},
    {"role": "tool", "tool_call_id": "c", "content": "12"},
    {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "ok"}]},
    {"role": "assistant", "content": "12", "tool_calls": []},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "One more.", "tool_calls": [call("python", "")]},
    {"role": "tool", "tool_call_id": "c", "content": ""},
]


@pytest.fixture
def render():
    environment = jinja2.Environment(undefined=jinja2.ChainableUndefined)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as transformers does
    template = environment.from_string(HERMES_TEMPLATE.read_text())
    return lambda messages, tools=None, prompt=True: template.render(
        messages=messages, tools=tools, add_generation_prompt=prompt
    )


def test_tools_are_in_the_system_turn(render):
    for messages in (CONVERSATION[:2], CONVERSATION[1:2]):
        text = render(messages, TOOLS)
        system = text.split("<|im_end|>")[0]
        assert text.count("<|im_start|>system\n") == 1 and text.startswith("<|im_start|>system\n")
        assert all(json.dumps(tool) in system for tool in TOOLS)
    assert "Be brief.\n\n# Tools" in render(CONVERSATION[:2], TOOLS)
    assert render(CONVERSATION[1:2]) == "<|im_start|>user\n3*4?<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_is_rendered_exactly(render):
    assert render(CONVERSATION, prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3*4?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "python", "arguments": {"code": "3*4"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"a": "<"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\nok\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n12<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n"
        '<|im_start|>assistant\nOne more.\n<tool_call>\n{"name": "python", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n"
    )


def test_a_longer_conversation_only_adds_to_the_prompt(render):
    whole = render(CONVERSATION, TOOLS)
    for end, message in enumerate(CONVERSATION):
        if message["role"] == "assistant":
            assert whole.startswith(render(CONVERSATION[:end], TOOLS))
