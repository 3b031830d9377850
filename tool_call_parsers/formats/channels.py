"""Formats whose turns are sequences of messages with headers, including reasoning."""

from __future__ import annotations

from tool_call_parsers.channels import (
    Channel,
    Elements,
    Harmony,
    ListedCalls,
    NamespacedTags,
    ParameterMessages,
    Recipients,
    TaggedMessages,
    TypedMessages,
)
from tool_call_parsers.json_blocks import CallHeader, Given, JsonBlocks, NamedJson, Words
from tool_call_parsers.parser import Format
from tool_call_parsers.schema import ToolIndex
from tool_call_parsers.tag_blocks import Parameters


def read_solar_header(words: Words, tools: ToolIndex, arguments: Given) -> CallHeader | None:
    """The call's id and `NAME`."""
    return CallHeader(words[1], words[0]) if len(words) == 2 else None


FORMATS: tuple[Format, ...] = (
    Format(
        "openai",
        Harmony(
            start="<|start|>",
            message="<|message|>",
            ends=("<|end|>", "<|return|>", "<|call|>"),
            call_ends=("<|call|>", "<|return|>"),
            inner=("<|channel|>", "<|constrain|>"),
            channels={"analysis": Channel.REASONING, "commentary": Channel.PREAMBLE, "final": Channel.ANSWER},
            recipients={"user": Channel.ANSWER, "assistant": Channel.PREAMBLE, "all": Channel.PREAMBLE},
            types=frozenset({"json", "code", "text"}),
            namespace="functions.",
        ),
        models="gpt-oss 20B and 120B, gpt-oss-safeguard",
        aliases=("gpt_oss", "harmony", "openai_gptoss"),
        reasoning="openai_gptoss",
        channels=True,
    ),
    Format(
        "muse",
        TaggedMessages(
            start="<|start|>",
            message="<|message|>",
            ends=("<|eom|>", "<|eot|>"),
            call_ends=(),
            inner=(),
            channels={},
            recipients={"self": Channel.REASONING, "user": Channel.ANSWER, "commentary": Channel.PREAMBLE},
            types=frozenset(),
            tags=NamespacedTags(
                heads="attributes",
                calls=("<atem:invoke",),
                ends=("</atem:invoke>",),
                parameters=("<atem:parameter",),
                value_ends=("</atem:parameter>",),
                wraps=("<atem:function_calls>",),
                unwraps=("</atem:function_calls>",),
                around=("<atem:function_calls>\n", "\n</atem:function_calls>"),
                call='<atem:invoke name="{name}">\n{parameters}</atem:invoke>',
                parameter='<atem:parameter name="{key}">{value}</atem:parameter>\n',
            ),
        ),
        models="Muse Spark 1.x, Muse Glimmer",
        aliases=("musespark1x", "muse_spark", "muse_glimmer"),
        reasoning="muse",
        channels=True,
    ),
    Format(
        "beam",
        ParameterMessages(
            start="<|start|>",
            message="<|message|>",
            ends=("<|end|>", "<|return|>", "<|call|>"),
            call_ends=("<|call|>", "<|return|>"),
            inner=("<|channel|>", "<|constrain|>"),
            channels={"analysis": Channel.REASONING, "commentary": Channel.PREAMBLE, "final": Channel.ANSWER},
            recipients={"user": Channel.ANSWER, "assistant": Channel.PREAMBLE, "all": Channel.PREAMBLE},
            types=frozenset({"xml"}),
            parameters=Parameters(
                heads="attributes",
                calls=("<rfl:call",),
                ends=("<|end|>", "<|call|>", "<|return|>"),
                parameters=("<rfl:parameter",),
                header="<|start|>",
                value_ends=("</rfl:parameter>",),
                framed=True,
                open_end=True,
                call="{name}{parameters}",
                parameter='<rfl:parameter name="{key}">\n{value}\n</rfl:parameter>',
            ),
        ),
        models="Beam",
        reasoning="beam",
        channels=True,
        lossy="strings that hold the format's own tags may end early; the types of values are the schema's",
    ),
    Format(
        "functionary",
        Recipients(
            start=">>>",
            message="\n",
            ends=(),
            call_ends=(),
            inner=(),
            channels={},
            recipients={"all": Channel.PREAMBLE},
            types=frozenset(),
        ),
        models="Functionary v3.2",
        aliases=("functionary_v3", "functionary_v3.2"),
        lossy="content that holds a header",
    ),
    Format(
        "solar_open",
        ListedCalls(
            role="<|begin|>assistant",
            end="<|end|>",
            kinds={"<|content|>": Channel.PREAMBLE, "<|think|>": Channel.REASONING, "<|tool_calls|>": Channel.CALL},
            calls=NamedJson(
                opens=("<|tool_call:begin|>",),
                closes=("<|tool_call:end|>",),
                sections=("<|tool_calls|>",),
                section_closes=("<|calls|>",),
                marks=("<|tool_call:name|>", "<|tool_call:args|>"),
                argument_marks=("<|tool_call:args|>",),
                reading=read_solar_header,
                frame=("<|tool_calls|>", ""),
                call="<|tool_call:begin|>%(id)s<|tool_call:name|>%(name)s<|tool_call:args|>%(arguments)s"
                "<|tool_call:end|>",
            ),
        ),
        models="Solar Open",
        aliases=("solar",),
        reasoning="solar_open",
        channels=True,
        ends=("<|calls|>", "<|flush|>"),
    ),
    Format(
        "inkling",
        TypedMessages(
            role="<|message_model|>",
            end="<|end_message|>",
            kinds={
                "<|content_text|>": Channel.PREAMBLE,
                "<|content_thinking|>": Channel.REASONING,
                "<|content_invoke_tool_json|>": Channel.CALL,
            },
            calls=JsonBlocks(
                opens=("<|content_invoke_tool_json|>",),
                closes=("<|end_message|>",),
                frame=("<|content_invoke_tool_json|>", "<|end_message|>"),
                written='{"name":%(name)s,"args":%(arguments)s}',
                argument_keys=("args",),
                compact=True,
            ),
        ),
        models="Inkling, Inkling-Small",
        reasoning="inkling",
        channels=True,
        ends=("<|content_model_end_sampling|>",),
    ),
    Format("kimi_k3", Elements(), models="Kimi K3", reasoning="kimi_k3", channels=True, ends=("<|end_of_msg|>",)),
)
