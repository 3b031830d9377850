"""Formats that write calls as JSON objects."""

from __future__ import annotations

from dataclasses import replace

from tool_call_parsers.json_blocks.blocks import JsonBlocks
from tool_call_parsers.parser import Format

_HERMES = JsonBlocks(
    opens=("<tool_call>",), closes=("</tool_call>",), separators=("\n",), frame=("<tool_call>\n", "\n</tool_call>")
)
_TOOL_CALLS = JsonBlocks(
    opens=("<tool_calls>",),
    closes=("</tool_calls>",),
    frame=("<tool_calls>[", "]</tool_calls>"),
    between=", ",
    in_list=True,
)
_PARAMETERS = '{"name": %(name)s, "parameters": %(arguments)s}'

FORMATS: tuple[Format, ...] = (
    Format("hermes", _HERMES, "Hermes 2 Pro to 4, Qwen2.5, QwQ", ("qwen25", "qwen2.5"), reasoning="qwen3"),
    Format("qwen3_json", _HERMES, "Qwen3, Qwen3-VL", ("qwen", "qwen3", "qwen3_vl", "trinity"), reasoning="qwen3"),
    Format("ernie45", _HERMES, "ERNIE 4.5 Thinking", ("ernie",), reasoning="ernie45"),
    Format("granite4", _HERMES, "Granite 4", reasoning="granite_thinking_parser"),
    Format(
        "granite",
        JsonBlocks(opens=("<|tool_call|>", "<tool_call>"), frame=("<|tool_call|>[", "]"), between=", ", in_list=True),
        "Granite 3.0, 3.1",
        ("granite3",),
        reasoning="granite",
    ),
    Format(
        "granite-20b-fc",
        JsonBlocks(opens=("<function_call>",), separators=(" ",), frame=("<function_call> ", ""), between=" "),
        "granite-20b-functioncalling",
        ("granite_20b_functioncalling",),
    ),
    Format(
        "phi4_mini_json",
        JsonBlocks(opens=("functools",), frame=("functools[", "]"), between=", ", in_list=True),
        "Phi-4-mini",
        ("phi4_mini", "phi4"),
        ends=("<|end|>",),
    ),
    Format(
        "internlm",
        JsonBlocks(
            opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
            closes=("<|action_end|>",),
            frame=("<|action_start|><|plugin|>\n", "<|action_end|>"),
            between="",
            written=_PARAMETERS,
            argument_keys=("parameters", "arguments"),
        ),
        "InternLM 2.5, Intern-S1",
        ("interns1", "internlm2", "intern_s1"),
        reasoning="qwen3",
    ),
    Format("hunyuan_a13b", _TOOL_CALLS, "Hunyuan-A13B", reasoning="hunyuan_a13b", ends=("<|eos|>",)),
    Format(
        "minimax_m1",
        JsonBlocks(
            opens=("<tool_calls>",),
            closes=("</tool_calls>",),
            separators=("\n",),
            frame=("<tool_calls>\n", "\n</tool_calls>"),
            together=True,
        ),
        "MiniMax M1",
        ("minimax_m1_40k", "minimax_m1_80k"),
        reasoning="qwen3",
        ends=("<end_of_sentence>",),
    ),
    Format(
        "nemotron_json",
        replace(
            _TOOL_CALLS,
            opens=("<TOOLCALL>",),
            closes=("</TOOLCALL>",),
            separators=("\n",),
            frame=("<TOOLCALL>[", "]</TOOLCALL>"),
        ),
        "Nemotron Nano v2, Llama Nemotron Super v1.5",
        ("nemotron_nano_v2", "nemotron_nano_2", "nemotron_v2", "llama_nemotron_json", "llama_3.3_nemotron_super_v1.5"),
        reasoning="deepseek_r1",
        ends=("<SPECIAL_12>",),
    ),
    Format(
        "jamba",
        replace(_TOOL_CALLS, frame=("<tool_calls>[\n    ", "\n]</tool_calls>"), between=",\n    "),
        "Jamba 1.5, 1.6",
    ),
    Format(
        "xlam",
        JsonBlocks(
            opens=("<tool_call>", "<tool_calls>", "[TOOL_CALLS]"),
            closes=("</tool_call>", "</tool_calls>"),
            frame=("[", "]"),
            between=", ",
            in_list=True,
            bare=True,
        ),
        "xLAM 1, 2",
        ("xlam2",),
        reasoning="qwen3",
        lossy="calls are written without a marker, so that content before them hides them",
    ),
    Format(
        "bare_json",
        JsonBlocks(
            opens=("<tool_call>",),
            closes=("</tool_call>",),
            separators=("\n",),
            argument_keys=("arguments", "parameters"),
            bare=True,
            bare_offered=True,
        ),
        "small models that forget the tags",
        lossy="only offered tools are called",
    ),
    Format(
        "apertus",
        JsonBlocks(
            opens=("<|tools_prefix|>",),
            closes=("<|tools_suffix|>",),
            frame=("<|tools_prefix|>[", "]<|tools_suffix|>"),
            between=", ",
            in_list=True,
            written="{%(name)s: %(arguments)s}",
            single_key=True,
            stops=True,
        ),
        "Apertus",
        ("apertus2509",),
        reasoning="apertus",
        ends=("<|assistant_end|>",),
    ),
    *(
        Format(
            name,
            JsonBlocks(
                opens=("<|START_ACTION|>",),
                closes=("<|END_ACTION|>",),
                frame=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
                between=",\n    ",
                in_list=True,
                written='{"tool_call_id": "%(index)d", "tool_name": %(name)s, "parameters": %(arguments)s}',
                name_key="tool_name",
                argument_keys=("parameters", "arguments"),
                id_key="tool_call_id",
                drops=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
                around_content=around,
            ),
            models,
            reasoning=name,
            ends=("<|END_OF_TURN_TOKEN|>",),
        )
        for name, models, around in (
            ("cohere_command3", "Command A, Command R7B", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
            ("cohere_command4", "Command A Reasoning and later", ("<|START_TEXT|>", "<|END_TEXT|>")),
        )
    ),
    Format(
        "gigachat3",
        JsonBlocks(
            opens=(
                "<|message_sep|>\n\n<|function_call|>",
                "<|function_call|>",
                "<|message_sep|>\n\nfunction call<|role_sep|>\n",
                "function call<|role_sep|>\n",
                "function call<|role_sep|>",
            ),
            frame=("<|function_call|>", ""),
            between="",
        ),
        "GigaChat 3, 3.1",
        ("gigachat", "gigachat3.1"),
        ends=("<|message_sep|>",),
    ),
)
