"""Formats that write the name of a call in a header before its arguments, which are JSON."""

from __future__ import annotations

import re
from dataclasses import replace

from tool_call_parsers.engine.grammar import RenderCall
from tool_call_parsers.json_blocks.after_text import JsonAfterText
from tool_call_parsers.json_blocks.blocks import JsonBlocks
from tool_call_parsers.json_blocks.named import CallHeader, Given, NamedJson, Words, read_name
from tool_call_parsers.parser import Format
from tool_call_parsers.schema import ToolIndex

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
