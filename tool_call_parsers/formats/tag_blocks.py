"""Formats that write calls and their parameters as tags."""

from __future__ import annotations

from dataclasses import replace

from tool_call_parsers.json_blocks import JsonBlocks
from tool_call_parsers.parser import Format
from tool_call_parsers.tag_blocks import NestedTags, SuffixedTags, TagBlocks

_LOSSY = (
    "nothing is escaped: strings that hold the format's own tags may end early, names cannot hold them at all; the "
    "types of values are the schema's, and without one everything is a string"
)

_QWEN3_CODER = TagBlocks(
    heads="equals",
    wraps=("<tool_call>",),
    unwraps=("</tool_call>",),
    calls=("<function=",),
    ends=("</function>",),
    parameters=("<parameter=",),
    value_ends=("</parameter>",),
    framed=True,
    call="<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
    parameter="<parameter={key}>\n{value}\n</parameter>\n",
)
_MIMO = replace(_QWEN3_CODER, framed=False, parameter="<parameter={key}>{value}</parameter>\n")

_GLM45 = TagBlocks(
    heads="pairs",
    calls=("<tool_call>",),
    ends=("</tool_call>",),
    parameters=("<arg_key>",),
    pair=("</arg_key>", "<arg_value>"),
    value_ends=("</arg_value>",),
    open_end=True,
    separators=("\n",),
    call="<tool_call>{name}\n{parameters}</tool_call>",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
)
_GLM47 = replace(
    _GLM45,
    separators=(),
    between="",
    call="<tool_call>{name}{parameters}</tool_call>",
    parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
)
_IQUEST_Q1 = replace(
    _GLM45,
    calls=("<iquest_tool_call>",),
    ends=("</iquest_tool_call>",),
    call="<iquest_tool_call>{name}\n{parameters}</iquest_tool_call>",
)
_LING3 = replace(
    _GLM47,
    # Ling and Ring 2 write the calls of Hermes.
    json=JsonBlocks(opens=("<tool_call>",), closes=("</tool_call>",), separators=("\n",)),
)
_HY_V3 = replace(
    _GLM45,
    open_end=False,
    wraps=("<tool_calls>",),
    unwraps=("</tool_calls>",),
    name_end="<tool_sep>",
    around=("<tool_calls>\n", "\n</tool_calls>"),
    call="<tool_call>{name}<tool_sep>\n{parameters}</tool_call>",
)
_HY_V4 = replace(
    _HY_V3,
    separators=(),
    around=("<tool_calls>", "</tool_calls>"),
    between="",
    call=_GLM47.call,
    parameter=_GLM47.parameter,
)
_LONGCAT = TagBlocks(
    heads="pairs",
    calls=("<longcat_tool_call>",),
    ends=("</longcat_tool_call>",),
    parameters=("<longcat_arg_key>",),
    pair=("</longcat_arg_key>", "<longcat_arg_value>"),
    value_ends=("</longcat_arg_value>",),
    open_end=True,
    separators=("\n",),
    json=JsonBlocks(
        opens=("<longcat_tool_call>",),
        closes=("</longcat_tool_call>",),
        separators=("\n",),
        frame=("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    ),
    writes_json=True,
)
_K2_HORIZON = TagBlocks(
    heads="pairs",
    wraps=("<ifm|tool_calls>",),
    unwraps=("</ifm|tool_calls>",),
    calls=("<ifm|tool_call>",),
    ends=("</ifm|tool_call>",),
    parameters=("<ifm|arg_key>",),
    pair=("</ifm|arg_key>", "<ifm|arg_value>"),
    key_type=("<ifm|arg_type>", "</ifm|arg_type>"),
    value_ends=("</ifm|arg_value>",),
    json=JsonBlocks(opens=("<ifm|tool_call>",), closes=("</ifm|tool_call>",), separators=("\n",)),
    separators=("\n",),
    around=("<ifm|tool_calls>", "</ifm|tool_calls>"),
    between="",
    call="<ifm|tool_call>{name}{parameters}</ifm|tool_call>",
    parameter="<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_value>{value}</ifm|arg_value>",
)

_MINIMAX_M2 = TagBlocks(
    heads="attributes",
    # M2 sometimes writes its predecessor's wrapper.
    wraps=("<minimax:tool_call>", "<tool_calls>"),
    unwraps=("</minimax:tool_call>", "</tool_calls>"),
    calls=("<invoke",),
    ends=("</invoke>",),
    parameters=("<parameter",),
    value_ends=("</parameter>",),
    separators=("\n",),
    separates=True,
    around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    call='<invoke name="{name}">\n{parameters}</invoke>',
    parameter='<parameter name="{key}">{value}</parameter>\n',
)
_M3 = "]<]minimax[>["
_MINIMAX_M3 = NestedTags(
    heads="attributes",
    marker=_M3,
    wraps=(f"{_M3}<tool_call>", "<tool_call>"),  # models leave the first marker out
    unwraps=(f"{_M3}</tool_call>",),
    calls=(f"{_M3}<invoke",),
    ends=(f"{_M3}</invoke>",),
    parameters=(f"{_M3}<",),
    value_ends=(f"{_M3}</",),
    separators=("\n",),
    around=(f"{_M3}<tool_call>\n", f"\n{_M3}</tool_call>"),
    call=f'{_M3}<invoke name="{{name}}">{{parameters}}{_M3}</invoke>',
)
_DOTS = replace(
    _MINIMAX_M2,
    wraps=("<dots_function_call>",),
    unwraps=("</dots_function_call>",),
    separates=False,
    around=("<dots_function_call>\n", "\n</dots_function_call>"),
)
_STEP3 = TagBlocks(
    heads="attributes",
    wraps=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
    unwraps=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    fillers=("function", "<｜tool_sep｜>"),
    calls=("<steptml:invoke",),
    ends=("</steptml:invoke>",),
    parameters=("<steptml:parameter",),
    value_ends=("</steptml:parameter>",),
    open_end=True,
    separators=(),
    around=("<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>"),
    call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{parameters}</steptml:invoke>'
    "<｜tool_call_end｜>",
    parameter='<steptml:parameter name="{key}">{value}</steptml:parameter>',
)
_MINICPM5 = TagBlocks(
    heads="attributes",
    calls=("<function",),
    ends=("</function>",),
    parameters=("<param",),
    value_ends=("</param>",),
    cdata=True,
    open_end=True,
    separators=("\n",),
    call='<function name="{name}">{parameters}</function>',
    parameter='<param name="{key}">{value}</param>',
)


def _dsml(wrapper: str, blank: str = "", *, word: str = "DSML") -> TagBlocks:
    """DeepSeek's tags. Models confuse the name of the wrapper, and the blank after the bar."""
    tag = f"｜{word}｜"
    blanks = (blank, "" if blank else " ")
    names = dict.fromkeys((wrapper, "function_calls", "tool_calls", "toolcalls", "tool", "calls"))
    return TagBlocks(
        heads="attributes",
        wraps=tuple(f"<{tag}{space}{name}>" for name in names for space in blanks),
        unwraps=tuple(f"</{tag}{space}{name}>" for name in names for space in blanks),
        calls=tuple(f"<{tag}{space}invoke" for space in blanks),
        ends=tuple(f"</{tag}{space}invoke>" for space in blanks),
        parameters=tuple(f"<{tag}{space}parameter" for space in blanks),
        value_ends=tuple(f"</{tag}{space}parameter>" for space in blanks),
        unwrapped="arguments",
        separators=("\n\n",),
        separates=True,
        around=(f"<{tag}{blank}{wrapper}>\n", f"\n</{tag}{blank}{wrapper}>"),
        call=f'<{tag}{blank}invoke name="{{name}}">\n{{parameters}}</{tag}{blank}invoke>',
        parameter=f'<{tag}{blank}parameter name="{{key}}" string="{{string}}">{{value}}</{tag}{blank}parameter>\n',
        empty="\n",
    )


FORMATS: tuple[Format, ...] = (
    Format(
        "qwen3_coder",
        _QWEN3_CODER,
        "Qwen3-Coder, Qwen3.5 to 3.8",
        aliases=("qwen3_xml", "nanbeige", "qwen3.5", "qwen3.6", "qwen3.8"),
        reasoning="qwen3",
        lossy=_LOSSY,
    ),
    Format(
        "nemotron_v3",
        replace(_QWEN3_CODER, separators=("\n",), separates=True, trail="\n"),
        "Nemotron 3",
        aliases=("nemotron_3", "nemotron_3_ultra", "nemotron_3.5_lightning"),
        reasoning="nemotron_v3",
        lossy=_LOSSY,
    ),
    Format("mimo", _MIMO, "MiMo", reasoning="mimo", lossy=_LOSSY),
    Format(
        "seed_oss",
        replace(
            _MIMO,
            wraps=("<seed:tool_call>",),
            unwraps=("</seed:tool_call>",),
            call="<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
        ),
        "Seed-OSS",
        reasoning="seed_oss",
        ends=("<seed:eos>",),
        lossy=_LOSSY,
    ),
    Format(
        "step3p5",
        replace(_QWEN3_CODER, separators=(), between=""),
        "Step 3.5, Step 3.7",
        aliases=("step3p7",),
        reasoning="step3p5",
        lossy=_LOSSY,
    ),
    Format("step5", replace(_QWEN3_CODER, separators=(), between=""), "Step 5", reasoning="step5", lossy=_LOSSY),
    Format(
        "glm45",
        _GLM45,
        "GLM-4.5, GLM-4.6",
        aliases=("glm", "glm46", "spark25"),
        reasoning="glm45",
        ends=("<|observation|>", "<|user|>"),
        lossy=_LOSSY,
    ),
    Format(
        "glm47",
        _GLM47,
        "GLM-4.7, GLM-5",
        aliases=("glm5",),
        reasoning="glm47",
        ends=("<|observation|>", "<|user|>"),
        lossy=_LOSSY,
    ),
    Format(
        "iquest_q1",
        _IQUEST_Q1,
        "IQuest-Q1",
        aliases=("iquest",),
        reasoning="iquest_q1",
        ends=("<|iquest_end|>",),
        lossy=_LOSSY,
    ),
    Format(
        "ling3",
        _LING3,
        "Ling and Ring 3; reads those of 2 too",
        aliases=("ling", "ring", "ring3"),
        reasoning="ling3",
        ends=("<|role_end|>",),
        lossy=_LOSSY,
    ),
    Format("poolside_v1", _GLM45, "Laguna", aliases=("laguna",), reasoning="poolside_v1", lossy=_LOSSY),
    Format(
        "hy_v3", SuffixedTags(_HY_V3), "Hunyuan 3", aliases=("hunyuan", "hunyuan_v3"), reasoning="hy_v3", lossy=_LOSSY
    ),
    Format("hy_v4", SuffixedTags(_HY_V4), "Hunyuan 4", aliases=("hunyuan_v4",), reasoning="hy_v4", lossy=_LOSSY),
    Format(
        "longcat", _LONGCAT, "LongCat-Flash", aliases=("longcat_flash",), reasoning="longcat", ends=("</longcat_s>",)
    ),
    Format("k2_horizon", _K2_HORIZON, "K2 Horizon", reasoning="k2_horizon", lossy=_LOSSY),
    Format(
        "minimax_m2",
        _MINIMAX_M2,
        "MiniMax M2 to M2.7",
        aliases=("minimax",),
        reasoning="minimax_m2",
        ends=("[e~[",),
        lossy=_LOSSY,
    ),
    Format("minimax_m3", _MINIMAX_M3, "MiniMax M3", reasoning="minimax_m3", ends=("[e~[",), lossy=_LOSSY),
    Format("dots", _DOTS, "dots", reasoning="dots", lossy=_LOSSY),
    Format("step3", _STEP3, "Step 3", reasoning="step3", lossy=_LOSSY),
    Format("minicpm5", _MINICPM5, "MiniCPM 5", reasoning="qwen3", lossy=_LOSSY),
    *(
        Format(name, tags, models, reasoning=reasoning, ends=("<｜end▁of▁sentence｜>",), lossy=_LOSSY)
        for name, tags, models, reasoning in (
            ("deepseek_v32", _dsml("function_calls"), "DeepSeek V3.2", "deepseek_v3"),
            ("deepseek_v4", _dsml("tool_calls"), "DeepSeek V4", "deepseek_v4"),
            ("deepseek_v41", _dsml("calls", " "), "DeepSeek V4.1", "deepseek_v41"),
        )
    ),
    Format(
        "gigachat35",
        _dsml("tool_calls", word="GCML"),
        "GigaChat 3.5",
        reasoning="gigachat35",
        ends=("<|message_sep|>",),
        lossy=_LOSSY,
    ),
)
