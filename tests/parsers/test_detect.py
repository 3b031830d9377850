from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tool_call_parsers.detect import RULES, detect_parser
from tool_call_parsers.reasoning import get_reasoning

NOTHING = (None, None)
HERMES = ("hermes", None)
QWEN3 = ("qwen3_json", "qwen3")
CODER = ("qwen3_coder", "qwen3")
NEMOTRON = ("nemotron_v3", "nemotron_v3")
NEMOTRON_ULTRA = ("nemotron_v3", "nemotron_3_ultra")
GEMMA4 = ("gemma4", "gemma4")

TRL = {
    "cohere": NOTHING,
    "cohere2": NOTHING,
    "deepseek_r1_distill": ("deepseek_v3", "deepseek_r1"),
    "deepseekv3": ("deepseek_v3", "deepseek_r1"),
    "diffusion_gemma": GEMMA4,
    "gemma": NOTHING,
    "gemma3": NOTHING,
    "gemma4": GEMMA4,
    "gemma4_v2": GEMMA4,
    "gemma4_v3": GEMMA4,
    "gemma4_v4": GEMMA4,
    "gemma4_v5": GEMMA4,
    "glm4moe": ("glm45", "glm45"),
    "gptoss": ("openai", "openai_gptoss"),
    "idefics3": NOTHING,
    "lfm2": ("lfm2", None),
    "lfm2_2_5": ("lfm2_5", "lfm2"),
    "lfm2_2_5_v2": ("lfm2_5", "lfm2"),
    "lfm2_2_5_vl": ("lfm2", "lfm2"),
    "lfm2_v2": ("lfm2", None),
    "llama3": NOTHING,
    "llama3_1": ("llama3_json", None),
    "llama3_2": ("llama3_json", None),
    "llava_next": NOTHING,
    "muse_glimmer": ("muse_glimmer", "muse_glimmer"),
    "nemotron_3_5_lightning": NEMOTRON_ULTRA,
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
    "nemotron_3_ultra": NEMOTRON_ULTRA,
    "phi3": NOTHING,
    "phi3_5": NOTHING,
    "qwen2_5": HERMES,
    "qwen2_5_vl": NOTHING,
    "qwen3": QWEN3,
    "qwen3_5_nothink": CODER,
    "qwen3_5_think": CODER,
    "qwen3_6": CODER,
    "qwen3_8": CODER,
    "qwen3_instruct_2507": HERMES,
    "qwen3_vl": HERMES,
    "smolvlm": NOTHING,
}


def _trl_templates() -> dict[str, str]:
    """Found without importing trl, which would load torch."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    folder = Path(spec.origin).parent / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


TRL_TEMPLATES = _trl_templates()
needs_trl = pytest.mark.skipif(not TRL_TEMPLATES, reason="trl with its chat templates is not installed")


@needs_trl
@pytest.mark.parametrize("name", TRL)
def test_real_templates(name: str) -> None:
    """A training variant adds no format of its own."""
    assert name in TRL_TEMPLATES
    for variant in (name, f"{name}_training"):
        if variant in TRL_TEMPLATES:
            found = detect_parser(TRL_TEMPLATES[variant])
            assert (found.tool_parser, found.reasoning) == TRL[name], found.why


@needs_trl
def test_every_known_template_has_an_expectation() -> None:
    assert {name.removesuffix("_training") for name in TRL_TEMPLATES} >= set(TRL)


CHATML = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}<|im_start|>assistant\n"
LLAMA = "{% if tools is not none %}{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n"
HEADER = "{% if tools is not none %}{% endif %}<|header_start|>assistant<|header_end|>\n\n"
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"
GLM_TIGHT = "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></tool_call>"
CODER_EXAMPLE = "<tool_call>\n<function=example>\n<parameter=p>\nvalue_1\n</parameter>\n</function>\n</tool_call>"
INLINE_EXAMPLE = "<tool_call>\n<function=example>\n<parameter=p>value_1</parameter>\n</function>\n</tool_call>"
DEEPSEEK = "{% if tools %}{% endif %}{{ '<｜Assistant｜>' }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DSML = "{%- set dsml_token = '｜DSML｜' -%}{% for t in message.tool_calls %}"

SYNTHETIC: dict[str, tuple[str, tuple[str | None, str | None]]] = {
    "hermes": (CHATML + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', HERMES),
    "qwen3": (CHATML + '<tool_call>\n{"name": "f"}\n</tool_call>{{ "<think>\\n" }}', QWEN3),
    "granite 4": ("<|start_of_role|>{{ tools }}<tool_call>\n{}\n</tool_call>", ("granite4", None)),
    "granite 4.2": ("<|start_of_role|>{{ tools }}<think>" + CODER_EXAMPLE, ("qwen3_coder", "granite_thinking_parser")),
    "granite 3.1": ("<|start_of_role|>{{ tools }}<|tool_call|>[..]", ("granite", None)),
    "granite 3.2": ("<|start_of_role|>{{ tools }} Here is my thought process: ..", ("granite", "granite")),
    "granite 20b": ("<|function_call_library|>{{ tools }}<function_call> {}", ("granite-20b-fc", None)),
    "ernie": (CHATML + "<think>\n</think>\n\n<response>\n</response><tool_call>\n{}", ("ernie45", "ernie45")),
    "qwen3-coder": (CHATML + CODER_EXAMPLE, ("qwen3_coder", None)),
    "qwen3.5": (CHATML + CODER_EXAMPLE + "<think>\n", CODER),
    "mimo": (CHATML + INLINE_EXAMPLE + "<think></think>", ("mimo", "mimo")),
    "step 3.7": (CHATML + CODER_EXAMPLE + "<|im_start|>tool_response\n<think>\n", ("step3p5", "step3p5")),
    "seed-oss": ("<seed:bos>{{ tools }}<seed:tool_call>\n<function=f>\n<parameter=p>v<seed:think>", ("seed_oss",) * 2),
    "nemotron": (CHATML + CODER_EXAMPLE + "{{ truncate_history_thinking }}<think>\n", NEMOTRON),
    "glm 4.5": ("[gMASK]<sop>{{ tools }}" + GLM + "<think>", ("glm45", "glm45")),
    "glm 4.7": ("[gMASK]<sop>{{ tools }}" + GLM_TIGHT + "<think>", ("glm47", "glm47")),
    "ling 3": ("<role>SYSTEM</role>{{ tools }}" + GLM_TIGHT + "<think>", ("ling3", "ling3")),
    "laguna": ("{{ tools }} unescaped XML-like object " + GLM + "<think>", ("poolside_v1", "poolside_v1")),
    "hunyuan 3": ("{{ tools }}<tool_calls><tool_call>f<tool_sep><arg_key>k</arg_key><arg_value>", ("hy_v3", None)),
    "hunyuan 4": ("{{ tools }}<tool_calls:x><tool_sep:x><arg_key:x><think:x>", ("hy_v4", "hy_v4")),
    "k2 horizon": ("{{ tools }}<ifm|tool_calls><ifm|tool_call>f<ifm|arg_key><ifm|think>", ("k2_horizon",) * 2),
    "longcat": ("{{ tools }}<longcat_tool_call>\n{}\n</longcat_tool_call><longcat_think>", ("longcat", "longcat")),
    "v3-0324": (DEEPSEEK + "function<｜tool▁sep｜>f\n```json\n{}\n```", ("deepseek_v3", None)),
    "r1-0528": (DEEPSEEK + "function<｜tool▁sep｜>f\n```json\n{}\n```<think>\n", ("deepseek_v3", "deepseek_r1")),
    "v3.1": (DEEPSEEK + "tool_call_name<｜tool▁sep｜>{}{{ '<think>' }}", ("deepseek_v31", "deepseek_v3")),
    "v3.2": (
        DSML + "<{{ dsml_token }}function_calls>\n<{{ dsml_token }}invoke <think>",
        ("deepseek_v32", "deepseek_v3"),
    ),
    "v4": (DSML + "<{{ dsml_token }}tool_calls>\n<{{ dsml_token }}invoke <think>", ("deepseek_v4", "deepseek_v4")),
    "v4.1": (DSML + "<｜DSML｜ calls>\n<｜DSML｜ invoke <think>", ("deepseek_v41", "deepseek_v41")),
    "mistral small": ("{{ tools }}[TOOL_CALLS]f[ARGS]{}", ("mistral", None)),
    "magistral": ("{{ tools }}[THINK]..[/THINK][TOOL_CALLS]f[ARGS]{}", ("mistral", "mistral")),
    "llama 3.1": (LLAMA + '{"name": function name, "parameters": ..}', ("llama3_json", None)),
    "llama 3.1 custom": (LLAMA + "<function=example>{}</function>", ("llama3_custom", None)),
    "llama 3.2 pythonic": (LLAMA + "[func_name1(params_name1=params_value1), func_name2(params)]", ("pythonic", None)),
    "llama 4": (HEADER + '{"name": function name, "parameters": ..}', ("llama4_json", None)),
    "llama 4 pythonic": (HEADER + "[func_name1(param1=value1), func_name2(...)]", ("llama4_pythonic", None)),
    "functionary": (LLAMA + "{{ '>>>all\\n' }}", ("functionary", None)),
    "kimi k2": ("{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>", ("kimi_k2", None)),
    "kimi k2 thinking": ("{{ tools }}<think></think><|tool_calls_section_begin|>", ("kimi_k2", "kimi_k2")),
    "kimi k3": (
        "{% macro open_tag(tag) %}<|open|>{{ tag }}<|sep|>{% endmacro %}<|close|>{{ open_tag('think') }}"
        "{{ open_tag('call', [('tool', fn.name)]) }}",
        ("kimi_k3", "kimi_k3"),
    ),
    "gpt-oss": ("<|start|>assistant to=functions.f<|channel|>commentary analysis", ("openai", "openai_gptoss")),
    "functiongemma": ("{{ tools }}<start_function_call>call:f{}<end_function_call>", ("functiongemma", None)),
    "command a": ("{{ tools }}<|START_ACTION|>[<|START_RESPONSE|><|START_THINKING|>", ("cohere_command3",) * 2),
    "command 4": ("{{ tools }}<|START_ACTION|>[<|START_TEXT|><|START_THINKING|>", ("cohere_command4",) * 2),
    "minimax m2": ("{{ tools }}<minimax:tool_call>\n<invoke name=<think>\n", ("minimax_m2", "minimax_m2")),
    "minimax m3": ("{{ tools }}]<]minimax[>[<tool_call>\n<mm:think>", ("minimax_m3", "minimax_m3")),
    "apertus": ("{{ tools }}<|tools_prefix|>[<|inner_prefix|>", ("apertus", "apertus")),
    "hunyuan a13b": ("<|startoftext|>{{ tools }}<tool_calls>[{}]</tool_calls>", ("hunyuan_a13b", None)),
    "minimax m1": (
        "<beginning_of_sentence>{{ tools }}<tool_calls>\n{}\n</tool_calls><end_of_sentence>",
        ("minimax_m1", None),
    ),
    "jamba": ("<|bom|>{{ tools }}<tool_calls>[{}]</tool_calls>", ("jamba", None)),
    "xlam": (CHATML + '[{"name": "tool_call_name", "arguments": {}}]', ("xlam", None)),
    "phi 4 mini": ("{{ tools }} functools[..]", ("phi4_mini_json", None)),
    "internlm": ("{{ tools }}<|action_start|><|plugin|>\n{}<|action_end|>", ("internlm", None)),
    "step 3": ('{{ tools }}<｜tool_calls_begin｜><steptml:invoke name="f"><think>\n', ("step3", "step3")),
    "gigachat": ("{{ tools }}<|message_sep|>\n\n<|function_call|>{}", ("gigachat3", None)),
    "minicpm": ('{{ tools }}<function name="f"><param name="k">v</param></function>', ("minicpm5", None)),
    "dots": ("{{ tools }}<dots_function_call>\n<invoke name=", ("dots", None)),
    "inkling": ("{{ tools }}<|content_invoke_tool_json|><|content_thinking|>", ("inkling", "inkling")),
    "olmo 3": (CHATML + "<function_calls>\nf(a='x')\n</function_calls>", ("olmo3", None)),
    "plamo 3": ("{{ tools }}<|plamo:begin_tool_requests:plamo|><|plamo:begin_think:plamo|>", ("plamo3", "plamo3")),
    "beam": (
        "<|start|>assistant<|channel|>analysis{{ tools }} to=f<|channel|>analysis <|constrain|>xml<rfl:parameter name=",
        ("beam", "beam"),
    ),
    "iquest q1": (
        "{{ tools }}<iquest_tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value><think>",
        ("iquest_q1", "qwen3"),
    ),
    "solar open": (
        "{{ tools }}<|tool_calls|><|tool_call:begin|><|tool_call:name|><|think|>",
        ("solar_open", "solar_open"),
    ),
    "gigachat 3.5": ("{{ tools }}<｜GCML｜tool_calls>\n<｜GCML｜invoke name=<think>", ("gigachat35", "deepseek_r1")),
    "nemotron nano v2": ("{{ tools }}<TOOLCALL>[{}]</TOOLCALL><think>\n", ("nemotron_json", "deepseek_r1")),
    "llama 4 with its marks": (
        HEADER + '<|python_start|>..<|python_end|>{"name": f, "parameters": ..}',
        ("llama4_json", None),
    ),
    "apriel 1.5": (CHATML + "in <tool_call></tool_call> tags: <tool_calls>[{}]</tool_calls>", ("hunyuan_a13b", None)),
    "hunyuan 3, formatted": (
        "{% set sep = '<tool_sep{}>'.format(sfx) %}{% set key = '<arg_key{}>'.format(sfx) %}{{ tools }}",
        ("hy_v3", None),
    ),
    "json in words": (
        '{% for c in message.tool_calls %}{"name": "{{ c.name }}", "arguments": {}}',
        ("bare_json", None),
    ),
    "qwq without tools": ("<|im_start|>assistant\n<think>\n", (None, "deepseek_r1")),
    "no tools": ("<|im_start|>assistant\n", NOTHING),
    "empty": ("", NOTHING),
}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_formats_by_what_their_templates_write(name: str) -> None:
    template, expected = SYNTHETIC[name]
    found = detect_parser(template)
    assert (found.tool_parser, found.reasoning) == expected, found.why
    assert found.why


def test_every_rule_is_reached_and_names_a_known_reasoning_format() -> None:
    for rule in RULES:
        assert rule.reasoning is None or get_reasoning(rule.reasoning).name == rule.reasoning
        assert rule.all_of or rule.any_of
    seen = {expected[0] for _, expected in SYNTHETIC.values()} | {expected[0] for expected in TRL.values()}
    assert {rule.tool_parser for rule in RULES} <= seen


def test_comments_are_ignored() -> None:
    assert (
        detect_parser("{# unlike <tool_call> #}{{ tools }}[TOOL_CALLS]{# <minimax:tool_call> #}").tool_parser
        == "mistral"
    )
    assert detect_parser("{# never closed [TOOL_CALLS]").tool_parser == "mistral"


@pytest.mark.parametrize(
    ("template", "vocabulary", "expected"),
    [
        ("{{ tools }}", {"[TOOL_CALLS]": 5}, "mistral"),
        ("{{ tools }}", ["<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>"], "glm45"),
        ("{{ tools }}", {"<tool_call>", "</tool_call>"}, "hermes"),
        ("{{ tools }}", {"<tool_call>"}, None),
        ("{{ messages }}", {"[TOOL_CALLS]"}, None),
        ("{{ tools }}<tool_call>", {"[TOOL_CALLS]"}, "hermes"),
        ("{{ tools }}<tool_calls{{ sfx }}><tool_sep{{ sfx }}>", {"<tool_sep:opensource>"}, "hy_v4"),
        ("{{ tools }}<tool_calls><tool_sep>", {"<tool_sep>"}, "hy_v3"),
    ],
)
def test_the_vocabulary_decides_what_the_template_leaves_open(
    template: str, vocabulary: Any, expected: str | None
) -> None:
    assert detect_parser(template, vocabulary).tool_parser == expected


@pytest.mark.parametrize(
    "sought",
    [
        "{% set parts = m.content.split('<tool_sep>') %}",
        '{{ m.content.replace("<minimax:tool_call>", "") }}',
        "{% if '[TOOL_CALLS]' in m.content %}{% endif %}",
        "{% if '<seed:tool_call>' not in m.content and not m.content.startswith('<|tool_call>') %}{% endif %}",
    ],
)
def test_tags_that_a_template_looks_for_in_messages_are_not_its_own(sought: str) -> None:
    assert detect_parser("{{ tools }}" + sought + '<function name="f"><param name="k">').tool_parser == "minicpm5"


def test_arguments_of_other_types_are_rejected() -> None:
    for template in (None, b"", {"default": ""}):
        with pytest.raises(TypeError, match="chat_template"):
            detect_parser(template)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="vocabulary"):
        detect_parser("", "<tool_call>")
    with pytest.raises(TypeError, match="vocabulary"):
        detect_parser("", 3)  # type: ignore[arg-type]
