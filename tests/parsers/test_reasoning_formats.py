from __future__ import annotations

import dataclasses

import pytest

from tool_call_parsers.reasoning import REASONING, ReasoningFormat, UnknownReasoning, get_reasoning, list_reasoning

VLLM = [
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "poolside_v1", "cohere_command3",
    "cohere_command4", "ernie45", "gemma4", "glm45", "glm47", "ling3", "openai_gptoss", "granite",
    "granite_thinking_parser", "hf", "beam", "holo2", "hunyuan_a13b", "hy_v3", "hy_v4", "kimi_k2", "kimi_k3",
    "k2_horizon", "mimo", "minicpmv", "minimax_m2", "minimax_m2_append_think", "minimax_m3", "mistral",
    "nemotron_v3", "olmo3", "plamo3", "muse", "musespark1x", "muse_glimmer", "qwen3", "seed_oss", "step3",
    "step3p5", "step5", "inkling",
]  # fmt: skip

SGLANG = [
    "apertus2509", "beam", "cohere_command4", "deepseek-r1", "deepseek-v3", "deepseek-v4", "deepseek-v41",
    "dots", "gemma4", "gigachat35", "glm45", "gpt-oss", "granite_thinking_parser", "hunyuan", "inkling",
    "interns1", "iquest_q1", "k2_horizon", "kimi", "kimi_k2", "kimi_k3", "ling3", "mimo", "minimax",
    "minimax-append-think", "minimax-m3", "mistral", "muse", "nanbeige", "nemotron_3", "poolside_v1", "qwen3",
    "qwen3-thinking", "response_template", "step3", "step3p5",
]  # fmt: skip


def test_the_lists_are_those_of_the_servers() -> None:
    assert (len(VLLM), len(SGLANG)) == (42, 36)


@pytest.mark.parametrize("name", VLLM)
def test_every_name_of_vllm_is_canonical(name: str) -> None:
    assert get_reasoning(name).name == name


@pytest.mark.parametrize("name", SGLANG)
def test_every_name_of_sglang_resolves(name: str) -> None:
    assert get_reasoning(name) in REASONING


def test_names_are_folded_and_distinct() -> None:
    assert get_reasoning(" DeepSeek-R1 ") is get_reasoning("deepseek_r1")
    assert get_reasoning("GLM-4.5") is get_reasoning("glm45")
    assert get_reasoning("kimi") is not get_reasoning("kimi_k2")
    names = [name for row in REASONING for name in (row.name, *row.aliases)]
    assert len({name.casefold().replace("-", "").replace("_", "").replace(".", "") for name in names}) == len(names)
    assert list_reasoning() == sorted(row.name for row in REASONING)


def test_an_unknown_name_names_its_neighbours() -> None:
    with pytest.raises(UnknownReasoning, match=r"'qwen33'.*qwen3"):
        get_reasoning("qwen33")
    with pytest.raises(UnknownReasoning, match=r"'\?\?'.*known: .*deepseek_r1"):
        get_reasoning("??")
    with pytest.raises(TypeError, match="name"):
        get_reasoning(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", REASONING, ids=lambda row: row.name)
def test_a_row_is_well_formed(row: ReasoningFormat) -> None:
    assert row.opens and row.closes
    assert all(marker for marker in (*row.opens, *row.closes))
    assert not set(row.opens) & set(row.closes)
    assert not (row.inside[0] + row.inside[1] + row.after + "".join(row.answer_inside)).strip()
    for k, marker in enumerate(row.opens):  # an earlier opener must not hide a longer, later one
        assert not any(later.startswith(marker) and later != marker for later in row.opens[k + 1 :])
    assert row.answer is not None or row.answer_inside == ("", "")
    assert hash(row) == hash(dataclasses.replace(row))


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "rest"),
    [
        ("qwen3", "<think>\nRR\n</think>\n\nCC", "RR", "CC"),
        ("qwen3", "<think>\n\n</think>\n\nCC", "", "CC"),
        ("deepseek_r1", "<think>\nRR\n</think>\n\nCC", "RR", "CC"),
        ("nemotron_v3", "<think>\nRR\n</think>\nCC", "RR", "CC"),
        ("nemotron_v3", "<think>\nRR</think>CC", "RR", "CC"),
        ("glm45", "<think>RR</think>\nCC", "RR", "CC"),
        ("glm47", "<think>RR</think>CC", "RR", "CC"),
        ("lfm2", "<think>\nRR\n</think>\nCC", "\nRR\n", "\nCC"),
        ("gemma4", "<|channel>thought\nRR\n<channel|>CC", "RR", "CC"),
        ("step3p5", "<think>\nRR\n</think>\nCC", "RR", "CC"),
        ("minimax_m2", "<think>\nRR\n</think>\n\n\nCC", "RR", "\nCC"),
        ("seed_oss", "<seed:think>RR</seed:think>\nCC", "RR", "CC"),
        ("k2_horizon", "<ifm|think_fast>RR</ifm|think_fast>CC", "RR", "CC"),
        ("granite", "Here's my thought process:RRHere is my response:CC", "RR", "CC"),
        ("hy_v3", "<think:opensource>RR</think:opensource>CC", "RR", "CC"),
    ],
)
def test_the_markers_and_framing_of_what_templates_render(name: str, text: str, reasoning: str, rest: str) -> None:
    row = get_reasoning(name)
    opener = next(marker for marker in row.opens if text.startswith(marker))
    closer = next(marker for marker in row.closes if marker in text)
    block, _, after = text.removeprefix(opener).partition(closer)
    assert block.removeprefix(row.inside[0]).removesuffix(row.inside[1]) == reasoning
    assert after.removeprefix(row.after) == rest


def test_features_of_some_formats() -> None:
    assert {row.name for row in REASONING if row.keeps_markers} == {"minimax_m2_append_think"}
    assert {row.name for row in REASONING if row.channels} == {
        "beam", "inkling", "kimi_k3", "muse", "muse_glimmer", "musespark1x", "openai_gptoss", "solar_open",
    }  # fmt: skip
    assert {row.name for row in REASONING if row.answer} == {
        "cohere_command3", "cohere_command4", "ernie45", "hunyuan_a13b", "kimi_k3",
    }  # fmt: skip
