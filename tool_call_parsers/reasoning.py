"""Reasoning formats as data: the markers around a model's reasoning, and the whitespace that belongs to them.

Names are vLLM's (`--reasoning-parser`); SGLang's are aliases. Framing is the whitespace that the models' chat templates
write around the text. It is part of neither the reasoning nor the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_THINK: Final = (("<think>",), ("</think>",))
_LINES: Final = ("\n", "\n")


class UnknownReasoning(ValueError):
    """No reasoning format has that name."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family of models marks its reasoning.

    The opening marker is often part of the prompt, so a completion may begin inside the block. Several opening and
    closing markers correspond by position.
    """

    name: str
    """vLLM's name, where it has one."""
    opens: tuple[str, ...]
    """Opening markers, the canonical one first. A marker comes before its own prefixes."""
    closes: tuple[str, ...]
    """Closing markers, the canonical one first."""
    inside: tuple[str, str] = ("", "")
    """Whitespace after the opening and before the closing marker, removed at most once each."""
    after: str = ""
    """Whitespace after the closing marker, before content or a call, removed at most once."""
    before: str = ""
    """Whitespace that the model writes before the opening marker."""
    empty: str | None = None
    """How the model writes empty reasoning, if not as markers with their framing."""
    aliases: tuple[str, ...] = ()
    """Other names, SGLang's among them."""
    keeps_markers: bool = False
    """The content keeps the block and its markers, and `reasoning` stays empty."""
    answer: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Opening and closing markers around the answer, which are removed as well."""
    answer_inside: tuple[str, str] = ("", "")
    """As `inside`, for the wrapper around the answer."""
    closes_alone: bool = False
    """Models that do not reason write the closing marker alone, before the answer."""
    channels: bool = False
    """Reasoning is one of several channels, which the format of the calls reads. The markers are documentation."""


_START_TEXT: Final = ("<|START_TEXT|>", "<|END_TEXT|>")
_START_RESPONSE: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_PLAMO: Final = ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>")
_MUSE: Final = (("<|start|>assistant to=self<|message|>", " to=self<|message|>"), ("<|eom|>",))

REASONING: Final[tuple[ReasoningFormat, ...]] = (
    # <think>, framed by lines and followed by an empty line.
    ReasoningFormat(
        "qwen3",
        *_THINK,
        _LINES,
        "\n\n",
        aliases=("qwen3-thinking", "qwen", "qwen35", "qwen36", "qwen38", "interns1", "iquest_q1", "nanbeige"),
    ),
    ReasoningFormat("deepseek_r1", *_THINK, _LINES, "\n\n", aliases=("deepseek_r1_distill", "gigachat35")),
    ReasoningFormat("holo2", *_THINK, _LINES, "\n\n"),
    ReasoningFormat("minicpmv", *_THINK, _LINES, "\n\n"),
    ReasoningFormat("minimax_m2", *_THINK, _LINES, "\n\n", aliases=("minimax",)),
    ReasoningFormat(
        "minimax_m2_append_think", *_THINK, _LINES, "\n\n", aliases=("minimax-append-think",), keeps_markers=True
    ),
    ReasoningFormat("step3", *_THINK, _LINES, "\n\n"),
    ReasoningFormat(
        "ernie45",
        *_THINK,
        _LINES,
        "\n\n",
        answer=(("<response>",), ("</response>",)),
        answer_inside=_LINES,
    ),
    # Framed by lines, followed by one newline.
    ReasoningFormat("step3p5", *_THINK, _LINES, "\n", aliases=("step3p7",)),
    ReasoningFormat("step5", *_THINK, _LINES, "\n"),
    ReasoningFormat("nemotron_v3", *_THINK, _LINES, "\n", empty="<think></think>", aliases=("nemotron_3",)),
    ReasoningFormat("granite_thinking_parser", *_THINK, _LINES, "\n", aliases=("granite_thinking",)),
    ReasoningFormat(
        "hunyuan_a13b", *_THINK, _LINES, "\n", answer=(("<answer>",), ("</answer>",)), answer_inside=_LINES
    ),
    # A newline after the opening marker only.
    ReasoningFormat(
        "nemotron_3_ultra", *_THINK, ("\n", ""), empty="<think></think>", aliases=("nemotron_3_5_lightning",)
    ),
    # Unframed.
    ReasoningFormat("glm45", *_THINK, after="\n", before="\n", aliases=("glm46",)),
    ReasoningFormat("poolside_v1", *_THINK, after="\n"),
    ReasoningFormat("deepseek_v3", *_THINK, aliases=("deepseek_v31", "deepseek_v32")),
    ReasoningFormat("glm47", *_THINK, aliases=("glm5",)),
    *(
        ReasoningFormat(name, *_THINK)
        for name in ("deepseek_v4", "deepseek_v41", "ling3", "kimi_k2", "mimo", "olmo3", "lfm2", "dots")
    ),
    # These two take their markers from the tokenizer's response template. Most templates have <think>.
    ReasoningFormat("hf", *_THINK, aliases=("response_template",)),
    # The released tokenizers carry a suffix on every tag.
    ReasoningFormat(
        "hy_v3", ("<think>", "<think:opensource>"), ("</think>", "</think:opensource>"), aliases=("hunyuan",)
    ),
    ReasoningFormat("hy_v4", ("<think>", "<think:opensource>"), ("</think>", "</think:opensource>")),
    # Other markers.
    ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), after="\n"),
    ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",), closes_alone=True),
    ReasoningFormat("longcat", ("<longcat_think>",), ("</longcat_think>",), _LINES, "\n"),
    ReasoningFormat(
        "k2_horizon",
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
    ),
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), aliases=("magistral",)),
    ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",)),
    ReasoningFormat("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",), aliases=("apertus2509",)),
    ReasoningFormat("plamo3", _PLAMO[:1], _PLAMO[1:]),
    ReasoningFormat(
        "cohere_command3",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        answer=((_START_RESPONSE[0], _START_TEXT[0]), (_START_RESPONSE[1], _START_TEXT[1])),
    ),
    ReasoningFormat(
        "cohere_command4",
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        answer=((_START_TEXT[0], _START_RESPONSE[0]), (_START_TEXT[1], _START_RESPONSE[1])),
    ),
    ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",), _LINES),
    ReasoningFormat(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    # Channels.
    ReasoningFormat(
        "openai_gptoss",
        ("<|channel|>analysis<|message|>",),
        ("<|end|>",),
        aliases=("gpt-oss", "openai", "harmony"),
        channels=True,
    ),
    ReasoningFormat("beam", ("<|channel|>analysis<|message|>",), ("<|end|>",), channels=True),
    ReasoningFormat("solar_open", ("<|think|>",), ("<|end|>",), aliases=("solar",), channels=True),
    ReasoningFormat("inkling", ("<|content_thinking|>",), ("<|end_message|>",), channels=True),
    ReasoningFormat(
        "kimi_k3",
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        answer=(("<|open|>response<|sep|>",), ("<|close|>response<|sep|>",)),
        channels=True,
    ),
    ReasoningFormat("muse", *_MUSE, channels=True),
    ReasoningFormat("musespark1x", *_MUSE, channels=True),
    ReasoningFormat("muse_glimmer", *_MUSE, channels=True),
)
"""Every reasoning format. Names and aliases stay distinct when folded."""


def _fold(name: str) -> str:
    return name.strip().casefold().translate({ord(character): None for character in "-_."})


_BY_NAME: Final = {_fold(name): row for row in REASONING for name in (row.name, *row.aliases)}


def get_reasoning(name: str) -> ReasoningFormat:
    """A reasoning format by name or alias; case, `-`, `_` and `.` make no difference.

    Raises TypeError if `name` is not a str, and `UnknownReasoning`, which lists similar names, for an unknown name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    found = _BY_NAME.get(_fold(name))
    if found is None:
        from difflib import get_close_matches  # imported here because only errors need it

        near = list(dict.fromkeys(_BY_NAME[key].name for key in get_close_matches(_fold(name), _BY_NAME, 5, 0.5)))
        raise UnknownReasoning(
            f"reasoning format {name!r} is unknown; "
            + (f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(list_reasoning())}")
        )
    return found


def list_reasoning() -> list[str]:
    """The canonical names, sorted."""
    return sorted(row.name for row in REASONING)
