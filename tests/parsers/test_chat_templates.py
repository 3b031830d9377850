"""Parsers write what the models' chat templates write, and read it back.

For each of trl's chat templates with tool calls, an assistant turn is rendered as the last of a conversation. The text
between the generation prompt and the end-of-turn token is the text that the model would sample. Where a template
omits or changes part of its input, `TEMPLATES` says so; everything else must agree exactly.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from lachesis_testing import parser_checks as cases
from tool_call_parsers import ToolCallParser, detect_parser, get_parser
from tool_call_parsers.detect import Detection

Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Turn:
    """An assistant turn."""

    content: str | None = None
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()


INTEGER, NUMBER, STRING, BOOLEAN = cases.INTEGER, cases.NUMBER, cases.STRING, cases.BOOLEAN
ARRAY, OBJECT = {"type": "array"}, {"type": "object"}
TOOLS: list[dict[str, Any]] = [
    cases.tool("search", query=STRING, limit=INTEGER),
    cases.tool("ping"),
    cases.tool("write_file", path=STRING, text=STRING),
    cases.tool("measure", count=INTEGER, big=INTEGER, scale=NUMBER, tiny=NUMBER),
    cases.tool("configure", options=OBJECT, stages=ARRAY, ids=ARRAY),
    cases.tool("toggle", on=BOOLEAN, off=BOOLEAN),
    cases.tool("reset", label={"anyOf": [INTEGER, {"type": "null"}]}),
]
for offered in TOOLS:  # some templates require a description
    offered["function"]["description"] = "A tool."
SEARCH: Call = ("search", {"query": "tide tables", "limit": 3})
PING: Call = ("ping", {})
UNICODE: Call = ("search", {"query": "Zürich 東京 🙂 naïve"})
QUOTES: Call = ("search", {"query": """it's a "quoted" word"""})
LINES: Call = ("write_file", {"path": "C:\\notes\\a.txt", "text": "first line\n\n  third, indented"})
NUMBERS: Call = ("measure", {"count": -7, "big": 2**80 + 1, "scale": 0.1, "tiny": 1.5e-07})
NESTED: Call = (
    "configure",
    {
        "options": {"depth": {"x": [1, {"y": "z"}]}, "empty": {}},
        "stages": ["warm-up", {"on": True}, []],
        "ids": [1, 2.5],
    },
)
JSON_LITERALS: Call = ("configure", {"options": {"on": True, "none": None}, "stages": [True, False, None, "s"]})
BOOLEANS: Call = ("toggle", {"on": True, "off": False})
NULL: Call = ("reset", {"label": None})
QUESTION = "When is the tide high?"
REASONING = "The tide matters, so look it up first."

TURNS = {
    "content": Turn("The tide is high at noon."),
    "content in lines": Turn("The tide is high:\n\n- at noon,\n- at midnight.", None),
    "call": Turn(calls=(SEARCH,)),
    "content, call": Turn("Let me look.", calls=(SEARCH,)),
    "two calls": Turn(calls=(SEARCH, PING)),
    "content, two calls": Turn("Let me look.", calls=(SEARCH, UNICODE)),
    "no arguments": Turn(calls=(PING,)),
    "reasoning, content": Turn("The tide is high at noon.", REASONING),
    "reasoning in lines, content": Turn("High at noon.\n\nLow at six.", "First this.\n\nThen that."),
    "reasoning, call": Turn(None, REASONING, (SEARCH,)),
    "reasoning, two calls": Turn(None, REASONING, (PING, SEARCH)),
    "reasoning, content, call": Turn("Let me look.", REASONING, (SEARCH,)),
    "unicode": Turn(calls=(UNICODE,)),
    "quotes": Turn(calls=(QUOTES,)),
    "lines": Turn(calls=(LINES,)),
    "numbers": Turn(calls=(NUMBERS,)),
    "nested": Turn(calls=(NESTED,)),
    "literals inside": Turn(calls=(JSON_LITERALS,)),
    "booleans": Turn(calls=(BOOLEANS,)),
    "null": Turn(calls=(NULL,)),
}

Shown = Callable[[Turn], Turn]


def without_reasoning(turn: Turn) -> Turn:
    return replace(turn, reasoning=None)


def without_reasoning_unless_calls(turn: Turn) -> Turn:
    return turn if turn.calls else replace(turn, reasoning=None)


def without_calls(turn: Turn) -> Turn:
    return replace(turn, calls=())


def first_call(turn: Turn) -> Turn:
    return replace(turn, calls=turn.calls[:1])


def content_unless_calls(turn: Turn) -> Turn:
    return replace(turn, content=None) if turn.calls else turn


def content_unless_reasoning_and_calls(turn: Turn) -> Turn:
    return replace(turn, content=None) if turn.calls and turn.reasoning else turn


def content_before_calls_as_reasoning(turn: Turn) -> Turn:
    return replace(turn, content=None, reasoning=turn.content) if turn.calls and turn.content else turn


@dataclass(frozen=True)
class Template:
    """How a template changes the turns that it writes."""

    ends: tuple[str, ...] = ("<|im_end|>\n",)
    """The end of the turn, with the text that the template writes after it."""
    refuses: tuple[Shown, ...] = ()
    """What must be removed from a turn for which the template raises an exception."""
    shows: tuple[Shown, ...] = ()
    """What the template omits or moves."""
    forgets: str = ""
    """The opener in the generation prompt that the template omits from the history, with the reasoning."""
    leads: str = ""
    """Whitespace before content where the prompt closed the reasoning. The model must sample it."""
    spelling: Mapping[str, str] = field(default_factory=dict)
    """Turns with values that no parser writes like this, and their spelling. They are read all the same."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Turns that cannot be read back, and the reason."""
    argument_text: bool = False
    """The template needs arguments as JSON text."""


DEEPSEEK = Template(("<｜end▁of▁sentence｜>",), shows=(without_reasoning,), forgets="<think>\n", argument_text=True)
GEMMA4 = Template(
    ("<|tool_response>", "<turn|>\n"),
    shows=(without_reasoning_unless_calls,),
    spelling={"null": "None", "literals inside": "None beside true"},
)
GEMMA4_V5 = Template(GEMMA4.ends)
LFM2 = Template(shows=(without_reasoning, without_calls))
LFM2_V2 = Template(shows=(without_reasoning,))
LFM2_5 = Template(
    spelling={"lines": "strings unescaped", "quotes": "strings unescaped"},
    unreadable={"lines": "`\\n` of `C:\\notes` is read as an escape", "quotes": "the first quote ends the string"},
)
PYTHON_LITERALS = {"booleans": "True, False", "null": "None"}  # JSON, and its literals, only inside containers
NEMOTRON = Template(spelling=PYTHON_LITERALS)
QWEN3_5 = Template(spelling=PYTHON_LITERALS)
LLAMA = Template(("<|eot_id|>",), refuses=(first_call,), shows=(without_reasoning, content_unless_calls))
HERMES = Template(shows=(without_reasoning,))

TEMPLATES: dict[str, Template] = {
    "deepseek_r1_distill": replace(DEEPSEEK, shows=(without_reasoning, without_calls)),
    "deepseekv3": DEEPSEEK,
    "deepseekv3_training": replace(DEEPSEEK, argument_text=False),
    "diffusion_gemma": GEMMA4_V5,
    "gemma4": GEMMA4,
    "gemma4_v2": replace(GEMMA4, shows=(without_reasoning,)),
    "gemma4_v3": GEMMA4,
    "gemma4_v4": GEMMA4,
    "gemma4_v5": GEMMA4_V5,
    "glm4moe": Template(("<|observation|>", "<|user|>", ""), leads="\n"),
    "gptoss": Template(
        ("<|return|>", "<|call|>"),
        refuses=(content_unless_reasoning_and_calls,),
        shows=(first_call, content_before_calls_as_reasoning),
    ),
    "lfm2": LFM2,
    "lfm2_2_5": LFM2_5,
    "lfm2_2_5_v2": LFM2_5,
    "lfm2_2_5_vl": Template(),
    "lfm2_v2": LFM2_V2,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "muse_glimmer": Template(("<|eot|>",), shows=(content_unless_calls,)),
    "nemotron_3_5_lightning": NEMOTRON,
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
    "nemotron_3_ultra": NEMOTRON,
    "qwen2_5": HERMES,
    "qwen3": Template(),
    "qwen3_5_nothink": QWEN3_5,
    "qwen3_5_think": QWEN3_5,
    "qwen3_6": Template(),
    "qwen3_8": Template(),
    "qwen3_instruct_2507": HERMES,
    "qwen3_vl": HERMES,
}


@dataclass(frozen=True)
class Sample:
    """A turn as a template writes it."""

    turn: Turn
    """The part of the turn that the template shows."""
    opener: str
    """The end of the generation prompt, from its reasoning opener on."""
    text: str
    """The text that the model would sample after the prompt, without the end of the turn."""


def trl_templates() -> dict[str, tuple[str, Detection]]:
    """The templates with tool calls, and their detected formats. trl is found without an import, which would
    load torch."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    sources = {path.stem: path.read_text(encoding="utf-8") for path in Path(spec.origin).parent.rglob("*.jinja")}
    detected = {name: (source, detect_parser(source)) for name, source in sorted(sources.items())}
    return {name: (source, found) for name, (source, found) in detected.items() if found.tool_parser is not None}


TRL = trl_templates()
CASES = [(name, turn) for name in TRL for turn in TURNS]
needs_trl = pytest.mark.skipif(not TRL, reason="trl with its chat templates is not installed")


def template_of(name: str) -> Template:
    """A training variant writes the same as its original, unless it has its own row."""
    return TEMPLATES.get(name) or TEMPLATES[name.removesuffix("_training")]


def parser_of(name: str) -> ToolCallParser:
    detection = TRL[name][1]
    assert detection.tool_parser is not None
    return get_parser(detection.tool_parser, reasoning=detection.reasoning)


def message(turn: Turn, *, argument_text: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": "assistant", "content": turn.content or ""}
    if turn.reasoning is not None:
        fields["reasoning_content"] = turn.reasoning
    if turn.calls:
        fields["tool_calls"] = openai_calls(turn, argument_text=argument_text)
    return fields


def openai_calls(turn: Turn, *, argument_text: bool = False) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False) if argument_text else arguments,
            },
        }
        for index, (name, arguments) in enumerate(turn.calls)
    ]


def render(name: str, messages: list[dict[str, Any]], *, thinking: bool, prompt: bool = False) -> str:
    (text,), _ = render_jinja_template(
        [[{"role": "user", "content": QUESTION}, *messages]],
        tools=TOOLS,
        chat_template=TRL[name][0],
        add_generation_prompt=prompt,
        enable_thinking=thinking,
        bos_token="<s>",
        eos_token="</s>",
    )
    return str(text)


@cache
def sample(name: str, turn_name: str) -> Sample:
    """A turn as the template writes it at the end of a conversation."""
    template, turn = template_of(name), TURNS[turn_name]
    for reduce in template.refuses:
        reduced = reduce(turn)
        if reduced != turn:
            with pytest.raises(TemplateError):
                render(name, [message(turn, argument_text=template.argument_text)], thinking=True)
        turn = reduced
    shown = turn
    for show in template.shows:
        shown = show(shown)
    thinking = turn.reasoning is not None
    prompt = render(name, [], thinking=thinking, prompt=True).removesuffix(template.forgets)
    whole = render(name, [message(turn, argument_text=template.argument_text)], thinking=thinking)
    reasoning = parser_of(name).reasoning
    opener = ""
    if reasoning is not None and (at := prompt.rfind(reasoning.opens[0], prompt.rfind(QUESTION))) >= 0:
        opener = prompt[at - len(reasoning.before) * prompt.endswith(reasoning.before, 0, at) :]
    assert whole.startswith(prompt), f"{whole!r} does not begin with {prompt!r}"
    end = next(end for end in template.ends if whole.endswith(end))
    return Sample(shown, opener, whole[len(prompt) : len(whole) - len(end)])


@pytest.mark.sample(200)
@needs_trl
@pytest.mark.parametrize(("name", "turn"), CASES)
def test_written_as_the_template_writes(name: str, turn: str) -> None:
    """Exactly, with the reasoning that the prompt opened, or opened and closed."""
    made, template, parser = sample(name, turn), template_of(name), parser_of(name)
    calls = openai_calls(made.turn)
    reasoning = made.turn.reasoning if made.turn.reasoning is not None or not made.opener else ""
    written = parser.render(made.turn.content, reasoning, calls, TOOLS)
    assert (written == made.opener + made.text) is (turn not in template.spelling), (written, made)
    if made.turn.reasoning is None and turn not in template.spelling:
        assert parser.render(made.turn.content, None, calls, TOOLS) == made.text.removeprefix(template.leads)


@pytest.mark.sample(200)
@needs_trl
@pytest.mark.parametrize(("name", "turn"), CASES)
def test_read_as_the_template_wrote(name: str, turn: str) -> None:
    """Whole and as a stream, strictly."""
    made, template, parser = sample(name, turn), template_of(name), parser_of(name)
    opened = bool(made.opener) and made.turn.reasoning is not None
    found = parser.parse(made.text, TOOLS, prompt_opened_reasoning=opened, strict=True)
    called = [(call.name, cases.typed(call.arguments)) for call in found.tool_calls]
    wanted = [(called_name, cases.typed(arguments)) for called_name, arguments in made.turn.calls]
    if turn in template.unreadable:
        assert called != wanted
    else:
        lead = template.leads if made.turn.reasoning is None else ""
        assert found.content == (made.turn.content and lead + made.turn.content)
        assert found.reasoning == made.turn.reasoning
        assert called == wanted
        assert found.attempts == found.tool_calls
    stream = parser.stream(TOOLS, prompt_opened_reasoning=opened, strict=True)
    for character in made.text:
        stream.feed(character)
    assert stream.finish() == found


@needs_trl
def test_nothing_is_left_out() -> None:
    """Every template with tool calls has a row, every row a template, and few turns are excepted."""
    assert {name if name in TEMPLATES else name.removesuffix("_training") for name in TRL} == set(TEMPLATES)
    rows = [template_of(name) for name in TRL]
    for row in rows:
        assert row.spelling.keys() | row.unreadable.keys() <= TURNS.keys()
    assert len(CASES) - sum(len(row.spelling) for row in rows) >= 960
    assert len(CASES) - sum(len(row.unreadable) for row in rows) >= 990
