"""Detects the parsers that a model needs from its chat template.

Strings in the template's source propose formats. Where the template can be rendered, a format is chosen only if it
reads back the calls that the template writes; see `tool_call_parsers.round_trip`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tool_call_parsers.reasoning import get_reasoning

if TYPE_CHECKING:
    from tool_call_parsers.parser import ToolCallParser
    from tool_call_parsers.round_trip import Render, TemplateCalls, Unread


@dataclass(frozen=True, slots=True)
class Detection:
    """The parsers that a chat template calls for."""

    tool_parser: str | None
    """The format of the calls. None if the template has no tools, or uses no known format."""
    reasoning: str | None
    """The format of the reasoning. None if the template shows no reasoning."""
    why: str
    """The reason for the choice, in words."""
    calls: TemplateCalls | None = None
    """The calls that the template writes. None if it was not rendered, or writes none."""
    unread: tuple[Unread, ...] = ()
    """What `tool_parser` does not read of them."""


@dataclass(frozen=True, slots=True)
class DetectionRule:
    """One row of the table: a format and the strings that its templates contain."""

    tool_parser: str
    reasoning: str | None = None
    """The reasoning format of these models, used if the template shows that the model reasons."""
    all_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()
    thinks: tuple[str, ...] = ()
    """Strings that show that the model reasons, if not the markers of the reasoning format."""
    vocabulary: tuple[str, ...] = ()
    """Tokens that identify the format if the template does not."""
    prefix: str = ""
    """The prefix of a token that the vocabulary must hold."""


_GLM: Final = ("<arg_key>", "<arg_value>")
_CODER: Final = ("<function=", "<parameter=")
_AFTER_TAG: Final = tuple(
    before + quoted for before in (">{", ">[{", ">\n{", ">\n[{", "]{", "][{") for quoted in ('"name"', '\\"name\\"')
)
"""JSON in tags that no format has."""

RULES: Final[tuple[DetectionRule, ...]] = (
    # Tags of a single format.
    DetectionRule("beam", "beam", any_of=("<rfl:parameter",), thinks=("analysis",)),
    DetectionRule("iquest_q1", "qwen3", any_of=("<iquest_tool_call>",), vocabulary=("<iquest_tool_call>",)),
    DetectionRule("solar_open", "solar_open", any_of=("<|tool_call:begin|>",), vocabulary=("<|tool_call:begin|>",)),
    DetectionRule("gigachat35", "deepseek_r1", any_of=("｜GCML｜",)),
    DetectionRule("nemotron_json", "deepseek_r1", any_of=("<TOOLCALL>",)),
    DetectionRule("plamo3", "plamo3", any_of=("plamo:begin_tool_request", "plamo:begin_tool_name")),
    DetectionRule("muse_glimmer", "muse_glimmer", any_of=("<atem:function_calls>",), thinks=("to=self", "'self'")),
    DetectionRule(
        "inkling",
        "inkling",
        any_of=("<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
        vocabulary=("<|content_invoke_tool_json|>",),
    ),
    DetectionRule(
        "openai", "openai_gptoss", all_of=("<|channel|>",), any_of=("functions.", "commentary"), thinks=("analysis",)
    ),
    DetectionRule(
        "kimi_k3",
        "kimi_k3",
        all_of=("<|open|>", "<|sep|>", "<|close|>"),
        any_of=("'call'", '"call"', "call tool="),
        thinks=("'think'", '"think"', "<|open|>think"),
    ),
    DetectionRule("gemma4", "gemma4", any_of=("<|tool_call>",), thinks=("<|channel>",), vocabulary=("<|tool_call>",)),
    DetectionRule("functiongemma", any_of=("<start_function_call>",), vocabulary=("<start_function_call>",)),
    DetectionRule("minimax_m3", "minimax_m3", any_of=("]<]minimax[>[", "<mm:think>"), vocabulary=("]<]minimax[>[",)),
    DetectionRule("minimax_m2", "minimax_m2", any_of=("<minimax:tool_call>",), vocabulary=("<minimax:tool_call>",)),
    DetectionRule("seed_oss", "seed_oss", any_of=("<seed:tool_call>",), vocabulary=("<seed:tool_call>",)),
    DetectionRule("k2_horizon", "k2_horizon", any_of=("<ifm|tool_call", "ifm|tool_calls"), thinks=("ifm|think",)),
    DetectionRule("longcat", "longcat", any_of=("<longcat_tool_call>",), vocabulary=("<longcat_tool_call>",)),
    DetectionRule("dots", "dots", any_of=("<dots_function_call>",), vocabulary=("<dots_function_call>",)),
    DetectionRule("step3", "step3", any_of=("<steptml:invoke", "steptml:", "<｜tool_calls_begin｜>")),
    DetectionRule("kimi_k2", "kimi_k2", any_of=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")),
    DetectionRule("apertus", "apertus", any_of=("<|tools_prefix|>",), vocabulary=("<|tools_prefix|>",)),
    DetectionRule("lfm2_5", "lfm2", ("<|tool_call_start|>", "elif arg_value is mapping -%}")),
    DetectionRule("lfm2", "lfm2", any_of=("<|tool_call_start|>", "<|tool_list_start|>")),
    DetectionRule("internlm", "deepseek_r1", any_of=("<|action_start|>", "<|plugin|>")),
    DetectionRule(
        "gigachat3",
        "deepseek_r1",
        any_of=("<|function_call|>", "function call<|role_sep|>", "function_call<|role_sep|>", "<|message_sep|>"),
    ),
    DetectionRule("cohere_command4", "cohere_command4", all_of=("<|START_ACTION|>", "<|START_TEXT|>")),
    DetectionRule("cohere_command3", "cohere_command3", any_of=("<|START_ACTION|>",), vocabulary=("<|START_ACTION|>",)),
    DetectionRule("phi4_mini_json", any_of=("functools", "<|/tool|>")),
    DetectionRule("mistral", "mistral", any_of=("[TOOL_CALLS]",), vocabulary=("[TOOL_CALLS]",)),
    # DeepSeek. A template may keep the DSML token in a variable, so the rules also look for its element names alone.
    DetectionRule("deepseek_v41", "deepseek_v41", all_of=("｜DSML｜",), any_of=(" calls>", "｜ invoke", "}} invoke")),
    DetectionRule("deepseek_v32", "deepseek_v3", all_of=("｜DSML｜", "function_calls>")),
    DetectionRule("deepseek_v4", "deepseek_v4", all_of=("｜DSML｜",)),
    DetectionRule("deepseek_v3", "deepseek_r1", all_of=("<｜tool▁calls▁begin｜>", "```json")),
    DetectionRule("deepseek_v31", "deepseek_v3", all_of=("<｜tool▁calls▁begin｜>",)),
    # <arg_key>.
    DetectionRule("hy_v3", "hy_v3", all_of=("<tool_sep{}>",), thinks=("<think",)),
    DetectionRule("hy_v4", "hy_v4", all_of=("tool_sep",), any_of=("<tool_sep:", "<tool_calls:"), thinks=("<think",)),
    DetectionRule("hy_v4", "hy_v4", all_of=("tool_sep",), prefix="<tool_sep:", thinks=("<think",)),
    DetectionRule("hy_v3", "hy_v3", any_of=("<tool_sep",), vocabulary=("<tool_sep>",)),
    DetectionRule("poolside_v1", "poolside_v1", _GLM, ("unescaped XML-like object", "<tool_call>function-name")),
    DetectionRule("ling3", "ling3", _GLM, ("<role>",)),
    DetectionRule("glm47", "glm47", _GLM, ("</arg_key><arg_value>", "{function-name}<arg_key>")),
    DetectionRule("glm45", "glm45", _GLM, vocabulary=_GLM),
    # <function=..><parameter=..>.
    DetectionRule("nemotron_v3", "nemotron_3_ultra", _CODER, ('reasoning_content ~ "</think>"',)),
    DetectionRule("nemotron_v3", "nemotron_v3", _CODER, ("truncate_history_thinking",)),
    DetectionRule("qwen3_coder", "granite_thinking_parser", _CODER, ("<|start_of_role|>",)),
    DetectionRule(
        "step3p5",
        "step3p5",
        _CODER,
        ("<|im_start|>tool_response", "<|im_start|>' + 'tool_response", "StepFun", "Step-3"),
    ),
    DetectionRule("mimo", "mimo", _CODER, (">value_1</parameter>", "MiMo")),
    DetectionRule("qwen3_coder", "qwen3", _CODER),
    DetectionRule("minicpm5", "qwen3", ("<function name=", "<param name=")),
    DetectionRule("llama3_custom", None, ("<function=", "</function>")),
    # JSON in tags.
    DetectionRule("granite-20b-fc", None, ("<function_call>",), none_of=("<function_calls>",)),
    DetectionRule(
        "granite4", "granite_thinking_parser", ("<tool_call>", "<|start_of_role|>"), none_of=("<|tool_call|>",)
    ),
    DetectionRule(
        "granite", "granite", ("<|start_of_role|>",), ("<|tool_call|>", "<tool_call>"), thinks=("thought process:",)
    ),
    DetectionRule(
        "granite",
        "granite",
        ("<|start_of_role|>", "tools"),
        thinks=("thought process:",),
        vocabulary=("<|tool_call|>",),
    ),
    DetectionRule("jamba", None, ("<tool_calls>",), ("<|bom|>", "<|eom|>", "<tool_definitions>")),
    DetectionRule(
        "hunyuan_a13b",
        "hunyuan_a13b",
        ("<tool_calls>",),
        ("<tool_calls>[", "<tool_calls>\n[", "<tool_calls>\\n[", "<tool_calls>' }}[", '<tool_calls>" }}['),
    ),
    DetectionRule("ernie45", "ernie45", ("<tool_call>", "<response>")),
    DetectionRule("qwen3_json", "qwen3", ("<tool_call>", "<think>")),
    DetectionRule("hermes", "qwen3", ("<tool_call>",), vocabulary=("<tool_call>", "</tool_call>")),
    DetectionRule("minimax_m1", "qwen3", all_of=("<tool_calls>", "<beginning_of_sentence>")),
    DetectionRule("hunyuan_a13b", "hunyuan_a13b", ("<tool_calls>",)),
    DetectionRule("olmo3", "olmo3", ("<function_calls>",)),
    # Without tags.
    DetectionRule("functionary", None, (">>>",), (">>>all", "'>>>'", '">>>"', ">>>${recipient}", ">>>' +")),
    DetectionRule(
        "llama4_json", None, ("<|python_start|>",), ('"parameters"', '\\"parameters\\"'), ("[func_name1(", "[func1(")
    ),
    DetectionRule("llama4_pythonic", None, any_of=("<|python_start|>",)),
    DetectionRule("llama4_pythonic", None, ("<|header_start|>",), ("func_name1(",)),
    DetectionRule("pythonic", None, any_of=("[func_name1(", "[func1(")),
    DetectionRule("llama4_json", None, ("<|header_start|>",), ('"parameters"', "<|python_tag|>")),
    DetectionRule("llama3_json", None, ("<|start_header_id|>",), ('"parameters"', "<|python_tag|>")),
    DetectionRule("xlam", None, any_of=("xLAM", '[{"name": "tool_call_name"', '[{\\"name\\": \\"tool_call_name\\"')),
    DetectionRule("bare_json", None, ("tool_calls", '"name"', '"arguments"'), none_of=_AFTER_TAG),
    DetectionRule("bare_json", None, ("tool_calls", '\\"name\\"', '\\"arguments\\"'), none_of=_AFTER_TAG),
)
"""The most specific first. The first match decides."""

_REASONING_ALONE: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|inner_prefix|>",), "apertus"),
    (("<|content_thinking|>",), "inkling"),
    (("<|channel>",), "gemma4"),
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("<mm:think>",), "minimax_m3"),
    (("<longcat_think>",), "longcat"),
    (("<ifm|think",), "k2_horizon"),
    (("plamo:begin_think",), "plamo3"),
    (("◁think▷",), "kimi"),
    (("thought process:",), "granite"),
    (("<think>", "<answer>"), "hunyuan_a13b"),
    (("<think>", "<response>"), "ernie45"),
    (("<think>", "enable_thinking"), "qwen3"),
    (("<think>",), "deepseek_r1"),
)


def detect_parser(
    chat_template: str,
    vocabulary: Collection[str] | Mapping[str, int] | None = None,
    *,
    render: Render | None = None,
) -> Detection:
    """The parsers for a model, from its chat template (Jinja source) and, where given, its vocabulary.

    The template decides; the vocabulary matters only if the template leaves the choice open. The names are those of the
    parsers and of `reasoning.REASONING`. Raises TypeError if `chat_template` is not a str (of a mapping of named
    templates, pass the one in use).

    render: renders messages with the template. If the template then writes calls of its own, the parser is the first
        that reads all of them back, or else most of them; None if none reads a plain one.
    """
    if not isinstance(chat_template, str):
        raise TypeError(f"chat_template must be a str, not {type(chat_template).__name__}")
    if isinstance(vocabulary, str) or not isinstance(vocabulary, Collection | None):
        raise TypeError(f"vocabulary must be a collection of tokens, not {type(vocabulary).__name__}")
    template = _without_comments(chat_template)
    proposed = _proposals(template, () if vocabulary is None else vocabulary)
    if render is not None:
        from tool_call_parsers.round_trip import TemplateCalls

        if (calls := TemplateCalls.of(render)).samples:
            return _by_round_trip(calls, template, proposed)
    for rule, why in proposed:
        return _detection(rule, template, why)
    reasoning = _reasoning_alone(template)
    why = "the template renders tools in no known format" if "tool" in template else "the template knows no tools"
    return Detection(None, reasoning, why)


def _proposals(template: str, tokens: Collection[str]) -> Iterator[tuple[DetectionRule, str]]:
    """The rules that match, and why, the most likely first."""
    written = _without_sought(template)
    for rule in RULES:
        if _matches(rule, written, tokens):
            shown = [needle for needle in (*rule.all_of, *rule.any_of) if needle in written]
            yield (
                rule,
                f"the template has {', '.join(shown)}" + (f", the vocabulary {rule.prefix}" if rule.prefix else ""),
            )
    if "tool" in template and tokens:
        for rule in RULES:
            if rule.vocabulary and all(token in tokens for token in rule.vocabulary):
                yield rule, f"the template knows tools, and the vocabulary has {', '.join(rule.vocabulary)}"


def _by_round_trip(calls: TemplateCalls, template: str, proposed: Iterator[tuple[DetectionRule, str]]) -> Detection:
    """The first format, those proposed before all others, that reads most of the calls that the template writes."""
    from tool_call_parsers.registry import list_formats, parser_named

    reasons: dict[str, str] = {}
    rules: dict[str, DetectionRule] = {}

    def parsers() -> Iterator[tuple[str, ToolCallParser]]:
        for rule, why in proposed:
            if rule.tool_parser not in rules:
                rules[rule.tool_parser], reasons[rule.tool_parser] = rule, why
                yield rule.tool_parser, parser_named(rule.tool_parser, "auto")
        for row in list_formats():
            if row.name not in rules:
                rules[row.name] = DetectionRule(row.name, row.reasoning)
                yield row.name, parser_named(row.name, "auto")

    best = calls.best(parsers())
    if best is None:
        sample = calls.samples[0].text.strip()
        shown = sample if len(sample) <= 160 else f"{sample[:160]}..."
        why = f"no format reads the calls that the template writes: {shown!r}"
        return Detection(None, _reasoning_alone(template), why, calls)
    name, unread = best
    why = reasons.get(name, "the template writes calls that it reads")
    if unread:
        why = f"{why}; of the calls that the template writes it reads all but: {'; '.join(map(str, unread))}"
    found = _detection(rules[name], template, why)
    return replace(found, calls=calls, unread=tuple(unread))


def _without_comments(template: str) -> str:
    """A template without `{# .. #}`, where comments may mention other formats."""
    out: list[str] = []
    at = 0
    while (begin := template.find("{#", at)) >= 0 and (end := template.find("#}", begin + 2)) >= 0:
        out.append(template[at:begin])
        at = end + 2
    out.append(template[at:])
    return "".join(out)


_SOUGHT: Final = re.compile(
    r"""(\.(?:r?split|r?partition|replace|startswith|endswith|count|r?find|r?index|removeprefix|removesuffix)\(\s*)"""
    r"""(?:'[^']*'|"[^"]*")|(?:'[^']*'|"[^"]*")(\s+(?:not\s+)?in\b)"""
)


def _without_sought(template: str) -> str:
    """A template without the strings that it looks for in messages: it may cut other formats' tags out of them."""
    return _SOUGHT.sub(r"\1\2", template)


def _matches(rule: DetectionRule, template: str, tokens: Collection[str]) -> bool:
    return (
        all(needle in template for needle in rule.all_of)
        and (not rule.any_of or any(needle in template for needle in rule.any_of))
        and not any(needle in template for needle in rule.none_of)
        and (not rule.prefix or any(isinstance(token, str) and token.startswith(rule.prefix) for token in tokens))
    )


def _detection(rule: DetectionRule, template: str, why: str) -> Detection:
    reasoning = None
    if rule.reasoning is not None:
        row = get_reasoning(rule.reasoning)
        if any(needle in template for needle in rule.thinks or row.opens):
            reasoning = row.name
    return Detection(rule.tool_parser, reasoning or _reasoning_alone(template), why)


def _reasoning_alone(template: str) -> str | None:
    """The reasoning format whose markers the template has."""
    return next((name for needles, name in _REASONING_ALONE if all(needle in template for needle in needles)), None)
