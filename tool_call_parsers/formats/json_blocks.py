"""Formats that write arguments as JSON."""

from __future__ import annotations

import re
from dataclasses import replace

from tool_call_parsers.engine import RenderCall
from tool_call_parsers.json_blocks import CallHeader, Given, JsonAfterText, JsonBlocks, NamedJson, Words, read_name
from tool_call_parsers.parser import Format
from tool_call_parsers.schema import ToolIndex

_HERMES = JsonBlocks(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    separators=("\n",),
    frame=("<tool_call>\n", "\n</tool_call>"),
)
_TOOL_CALLS = JsonBlocks(
    opens=("<tool_calls>",),
    closes=("</tool_calls>",),
    frame=("<tool_calls>[", "]</tool_calls>"),
    between=", ",
    in_list=True,
)
_PARAMETERS = '{"name": %(name)s, "parameters": %(arguments)s}'

_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+):(\d+)")
_KIMI_NAME = re.compile(r"(?:functions[._]+)?(?!functions[._]*\Z)([A-Za-z][\w.\-]*?)(?:_\d+)?")
_COUNTER = re.compile(r"[\W_]*\d*")


def read_kimi_header(words: Words, tools: ToolIndex, arguments: Given) -> CallHeader | None:
    """`functions.NAME:COUNTER` is name and id. Some models write other ids, which clients put into histories: such
    an id names an offered tool, or only the arguments identify the tool."""
    if not words:
        return None
    native = words[0]
    if (match := _KIMI_ID.fullmatch(native)) is not None and match[1] != "functions.":
        name, plain = match[1], re.sub(r"^functions[_-]", "", match[1])
        if name not in tools.names() and plain in tools.names():
            return CallHeader(plain, native, error=f"the id is {native!r}")
        return CallHeader(name, native)
    if arguments is None:
        return None
    candidates = [name for name in tools.names() if native == name or _spells(native, name)]
    if candidates:
        return CallHeader(max(candidates, key=len), error=f"the id is {native!r}")
    inside = arguments.get("name")
    if isinstance(inside, str) and inside in tools.names():
        return CallHeader(inside, error=f"the id is {native!r}, the name is among the arguments")
    if arguments and (inferred := tools.infer(arguments)) is not None:
        return CallHeader(inferred, error=f"the id is {native!r}, the arguments fit no other tool")
    if not tools.names() and (match := _KIMI_NAME.fullmatch(native)) is not None:
        return CallHeader(match[1], error=f"the id is {native!r}")
    return None


def _spells(native: str, name: str) -> bool:
    """Whether an id consists of `functions`, the name and a counter, with any separators."""
    rest = native.removeprefix("functions").lstrip("._:-")
    return rest.startswith(name) and _COUNTER.fullmatch(rest, len(name)) is not None


def write_kimi_id(call: RenderCall) -> str:
    """The call's own id if it has the form of the format's ids."""
    return call.id if _KIMI_ID.fullmatch(call.id) else f"functions.{call.name}:{call.index}"


def read_mistral_header(words: Words, tools: ToolIndex, arguments: Given) -> CallHeader | None:
    """`NAME`, or `NAME[CALL_ID]ID`."""
    if not words or not re.fullmatch(r"[^\s\[\]{}]{1,256}", words[0]):
        return None
    return CallHeader(words[0], words[1] if len(words) > 1 else None)


def read_typed_header(words: Words, tools: ToolIndex, arguments: Given) -> CallHeader | None:
    """`NAME`, after the word `function` or alone."""
    if words and (name := words[0].removeprefix("function")) != words[0] and name in tools.names():
        return CallHeader(name, error=f"the header is {words[0]!r}")
    return None if words == ("function",) else read_name(words, tools, arguments)


def read_plamo_header(words: Words, tools: ToolIndex, arguments: Given) -> CallHeader | None:
    """`NAME` and the type of the arguments, which is always `json`."""
    if words == ("json",) and "json" not in tools.names():
        return None
    return read_name(words, tools, arguments)


_MISTRAL = JsonBlocks(
    opens=("[TOOL_CALLS]",),
    in_list=True,
    id_key="id",
    named=NamedJson(
        opens=("[TOOL_CALLS]",),
        marks=("[CALL_ID]", "[ARGS]"),
        argument_marks=("[ARGS]",),
        reading=read_mistral_header,
        next_mark="[ARGS]",
        call="[TOOL_CALLS]%(name)s[ARGS]%(arguments)s",
        also=("[TOOL_CALLS]%(name)s[CALL_ID]%(id)s[ARGS]%(arguments)s",),
    ),
    writes_named=True,
)
_DEEPSEEK_V31 = NamedJson(
    opens=("<｜tool▁call▁begin｜>",),
    closes=("<｜tool▁call▁end｜>",),
    sections=("<｜tool▁calls▁begin｜>",),
    section_closes=("<｜tool▁calls▁end｜>",),
    marks=("<｜tool▁sep｜>",),
    argument_marks=("<｜tool▁sep｜>",),
    fillers=("function",),
    frame=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call="<｜tool▁call▁begin｜>%(name)s<｜tool▁sep｜>%(arguments)s<｜tool▁call▁end｜>",
)

FORMATS: tuple[Format, ...] = (
    Format("hermes", _HERMES, "Hermes 2 Pro to 4, Qwen2.5, QwQ", ("qwen25", "qwen2.5"), reasoning="qwen3"),
    Format("qwen3_json", _HERMES, "Qwen3, Qwen3-VL", ("qwen", "qwen3", "qwen3_vl", "trinity"), reasoning="qwen3"),
    Format("ernie45", _HERMES, "ERNIE 4.5 Thinking", ("ernie",), reasoning="ernie45"),
    Format("granite4", _HERMES, "Granite 4", reasoning="granite_thinking_parser"),
    Format(
        "granite",
        JsonBlocks(
            opens=("<|tool_call|>", "<tool_call>"),
            frame=("<|tool_call|>[", "]"),
            between=", ",
            in_list=True,
        ),
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
        "llama3_json",
        JsonBlocks(
            opens=("<|python_tag|>",),
            frame=("", ""),
            between="; ",
            written=_PARAMETERS,
            argument_keys=("parameters", "arguments"),
            bare=True,
            named=NamedJson(
                opens=("<function=",),
                closes=("</function>",),
                marks=(">",),
                call="<function=%(name)s>%(arguments)s</function>",
            ),
        ),
        "Llama 3.1, 3.2, 3.3",
        ("llama3", "llama", "llama3.1", "llama3.2", "llama3.3"),
        lossy="a call after content needs the marker, which these models seldom write",
    ),
    Format(
        "llama4_json",
        JsonAfterText(
            opens=("<|python_start|>", "<|python_tag|>"),
            closes=("<|python_end|>",),
            between="",
            written=_PARAMETERS,
            argument_keys=("parameters", "arguments"),
            bare=True,
            named=NamedJson(opens=("<function=",), closes=("</function>",), marks=(">",)),
        ),
        "Llama 4",
        ("llama4",),
        lossy="content beside calls that begins like a JSON object",
    ),
    Format(
        "llama3_custom",
        NamedJson(
            opens=("<function=",),
            closes=("</function>",),
            marks=(">",),
            call="<function=%(name)s>%(arguments)s</function>",
        ),
        "Llama 3.1 with custom tools",
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
    Format(
        "hunyuan_a13b",
        _TOOL_CALLS,
        "Hunyuan-A13B",
        reasoning="hunyuan_a13b",
        ends=("<|eos|>",),
    ),
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
    Format(
        "mistral",
        _MISTRAL,
        "Mistral Small 3.1 and later, Magistral, Devstral 2, Ministral 3",
        ("mistral_v11", "magistral", "devstral", "ministral3"),
        reasoning="mistral",
    ),
    Format(
        "mistral_v3",
        replace(_MISTRAL, frame=("[TOOL_CALLS] [", "]"), between=", ", writes_named=False),
        "Mistral 7B v0.3, Mixtral, Nemo, Ministral 8B 2410",
        ("mistral_pre_v11", "mixtral", "mistral_nemo"),
        reasoning="mistral",
    ),
    Format(
        "deepseek_v3",
        replace(
            _DEEPSEEK_V31,
            argument_marks=(),
            open_section=True,  # the template of DeepSeek R1 closes it after the second call only
            reading=read_typed_header,
            call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%(name)s\n```json\n%(arguments)s\n```<｜tool▁call▁end｜>",
            between="\n",
        ),
        "DeepSeek V3, R1-0528",
        ("deepseek_r1", "deepseek"),
        reasoning="deepseek_r1",
        ends=("<｜end▁of▁sentence｜>",),
    ),
    Format(
        "deepseek_v31",
        _DEEPSEEK_V31,
        "DeepSeek V3.1",
        ("deepseek_v3.1", "deepseek_v3.1_terminus"),
        reasoning="deepseek_v3",
        ends=("<｜end▁of▁sentence｜>",),
    ),
    Format(
        "kimi_k2",
        NamedJson(
            opens=("<|tool_call_begin|>",),
            closes=("<|tool_call_end|>",),
            sections=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
            section_closes=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
            marks=("<|tool_call_argument_begin|>",),
            argument_marks=("<|tool_call_argument_begin|>",),
            reading=read_kimi_header,
            frame=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call="<|tool_call_begin|>%(id)s<|tool_call_argument_begin|>%(arguments)s<|tool_call_end|>",
            writing=write_kimi_id,
        ),
        "Kimi K2 to K2.6",
        ("kimi",),
        reasoning="kimi_k2",
    ),
    Format(
        "plamo3",
        NamedJson(
            opens=("<|plamo:begin_tool_request:plamo|>",),
            closes=(
                "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
                "<|plamo:end_tool_request:plamo|>",
            ),
            sections=("<|plamo:begin_tool_requests:plamo|>",),
            section_closes=("<|plamo:end_tool_requests:plamo|>",),
            marks=(
                "<|plamo:begin_tool_name:plamo|>",
                "<|plamo:end_tool_name:plamo|>",
                "<|plamo:begin_tool_arguments:plamo|>",
                "<|plamo:constrain|>",
                "<|plamo:msg|>",
            ),
            argument_marks=("<|plamo:begin_tool_arguments:plamo|>", "<|plamo:msg|>"),
            reading=read_plamo_header,
            separators=("\n",),
            frame=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
            call="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>%(name)s<|plamo:end_tool_name:plamo|>"
            "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>%(arguments)s"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        ),
        "PLaMo 3",
        reasoning="plamo3",
    ),
)
