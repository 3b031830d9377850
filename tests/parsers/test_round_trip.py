"""A format is chosen for a template only if it reads back the calls that the template writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lachesis_testing.fake_server.tokenizer import fake_tokenizer
from tool_call_parsers import UnknownParser, detect_parser, get_parser
from tool_call_parsers.round_trip import PLAIN, PROBES, TemplateCalls

HEAD = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
)
TAIL = (
    "{% endfor %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def raises(words: str) -> None:
    raise TemplateError(words)


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def renderer(source: str) -> Callable[..., str]:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raises
    template = environment.from_string(source)

    def render(messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        return template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)

    return render


def found(source: str) -> tuple[str | None, str]:
    detection = detect_parser(source, render=renderer(source))
    return detection.tool_parser, detection.why


HERMES = '<tool_call>\n{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
PAIRS = (
    "<tool_call>{{ f.name }}{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
)
TAGS = (
    '<function name="{{ f.name }}">{% for k, v in f.arguments | items %}<param name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</param>{% endfor %}</function>"
)


def test_what_a_template_writes_counts_and_not_what_its_source_mentions() -> None:
    misleading = "{% set unused = '<minimax:tool_call> [TOOL_CALLS] <tool_calls>[' %}"
    for body, name in ((HERMES, "hermes"), (PAIRS, "glm47"), (TAGS, "minicpm5")):
        source = misleading + HEAD + body + TAIL
        assert detect_parser(source).tool_parser == "minimax_m2"
        parser, why = found(source)
        assert parser is not None
        calls = TemplateCalls.of(renderer(source))
        assert len(calls.samples) == len(PROBES)
        assert not calls.unread(get_parser(parser)), why
        assert not calls.unread(get_parser(name))


def test_a_form_that_no_format_reads_is_named_and_not_guessed() -> None:
    source = HEAD + "<tool_call>@@ {{ f.name }} <- {{ f.arguments | tojson }}" + TAIL
    assert detect_parser(source).tool_parser == "hermes"
    parser, why = found(source)
    assert parser is None
    assert "@@ probe_search <- {" in why


def test_a_template_that_writes_no_calls_is_judged_by_its_source() -> None:
    source = HEAD.replace("{% for c", "{% for c in [] %}{% endfor %}{% for c", 1) + TAIL + "{# #}[TOOL_CALLS]"
    assert not TemplateCalls.of(renderer(source)).samples
    assert found(source)[0] == "mistral"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (HERMES.replace("f.arguments | tojson", "f.arguments"), "arguments as text"),
        ("{% if m.content is none %}" + HERMES + "{% endif %}", "content that is none"),
        ("{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}" + HERMES, "ids of nine characters"),
        (HERMES.replace("f.", "c."), "the name beside the function"),
        ("{% if not loop.first %}{{ raise_exception('one call only') }}{% endif %}" + HERMES, "one call"),
        ("{% if m == messages[-1] %}{{ raise_exception('results?') }}{% endif %}" + HERMES, "results after the calls"),
    ],
)
def test_a_template_gets_the_messages_that_it_needs(body: str, why: str) -> None:
    source = HEAD + body + TAIL
    calls = TemplateCalls.of(renderer(source))
    assert PLAIN in [sample.probe.name for sample in calls.samples], why
    assert found(source)[0] == "hermes", why


def test_ids_that_hold_the_name_are_given() -> None:
    call = "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    body = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    assert found(HEAD + body + TAIL)[0] == "kimi_k2"


def test_values_that_the_template_spoils_are_named() -> None:
    body = '<tool_call>\n{"name": "{{ f.name }}", "arguments": { ' + (
        '{% for k, v in f.arguments | items %}"{{ k }}": {% if v is string %}"{{ v }}"{% else %}{{ v | tojson }}'
        "{% endif %}{{ '' if loop.last else ', ' }}{% endfor %}}}\n</tool_call>"
    )
    source = HEAD + body + TAIL
    detection = detect_parser(source, render=renderer(source))
    assert detection.tool_parser == "hermes"
    assert [unread.sample.probe.name for unread in detection.unread] == ["quotes, lines and backslashes"]
    assert "all but: quotes, lines and backslashes: " in detection.why


def test_reasoning_that_the_prompt_opens_is_left_out() -> None:
    source = (
        (HEAD + HERMES + TAIL)
        .replace("<|im_start|>assistant\n{{ m.content", "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ m.content")
        .replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    )
    detection = detect_parser(source, render=renderer(source))
    assert (detection.tool_parser, detection.reasoning, detection.unread) == ("qwen3_json", "qwen3", ())


def test_auto_reads_what_the_tokenizer_renders() -> None:
    misleading = "{% set unused = '[TOOL_CALLS]' %}" + HEAD
    source = misleading + PAIRS + TAIL
    assert detect_parser(source).tool_parser == "mistral"
    assert get_parser("auto", tokenizer=fake_tokenizer(chat_template=source)).name == "glm47"
    unknown = misleading + "@@{{ f.name }}{{ f.arguments | tojson }}" + TAIL
    with pytest.raises(UnknownParser, match=r"no format reads the calls that the template writes: '@@probe_search"):
        get_parser("auto", tokenizer=fake_tokenizer(chat_template=unknown))
