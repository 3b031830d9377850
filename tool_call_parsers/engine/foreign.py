"""Calls in markup that the format does not read: another model's tags, special tokens that were stripped, bare JSON.

Nothing is recovered from them. They are looked for only in completions without any attempt, so that a model which
tries and fails is never taken for one that did not try.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

_SIGNS = re.compile(r"[<{(\[]|to=|tool=")
"""One of these is in every call."""
_CODE = re.compile(r"```(?!json|tool).*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]++`", re.DOTALL)
"""Code, in which calls are quoted. A fence around JSON alone is one that models put around calls."""
FOREIGN = "a call in markup that the format does not read"
"""The error of such an attempt."""
_CLOSES = "}]>`"
_NAMES = 256
"""How many offered names are looked for."""
_KEYS = r"""["'](?:name|tool|tool_name|function|function_name|action|recipient_name)["']\s*+:\s*+"""
_ARGUMENTS = (
    r"""["'](?:arguments|parameters|params|args|input|tool_args|tool_input|action_input|kwargs)["']\s*+:"""
    r"""(?!\s*+\{\s*+["'](?:type|properties|\$\w+)["'])"""  # as in the definition of a tool
)
_LITERAL = r"\s*+(?:[\"'\[{\d\-]|True|False|None|true|false|null)"
_WORD = r"(?:tool|call|function|invoke|action)"
_LINE = r"(?:^|(?<=[\n>\]|}]))[ \t]*+"


class ForeignCall(NamedTuple):
    """Where it begins in the text, and the name of its tool."""

    start: int
    name: str


def find_foreign(text: str, offered: Collection[str]) -> ForeignCall | None:
    """The first call in foreign markup in `text`, of a tool that was offered, or in tags that can be nothing else."""
    if not offered or _SIGNS.search(text) is None:
        return None
    code = [match.span() for match in _CODE.finditer(text) if not _is_plain_fence(match.group(), text)]
    for match in _pattern(tuple(offered)[:_NAMES]).finditer(text):
        if match.group().startswith("{") and not (_begins_line(text, match.start()) or text.rstrip()[-1] in _CLOSES):
            continue  # JSON in a sentence
        if not any(start <= match.start() < end for start, end in code):
            return ForeignCall(match.start(), next(filter(None, match.groups()), ""))
    return None


def _is_plain_fence(code: str, text: str) -> bool:
    """Whether the code is the whole text, in no language: models put such fences around calls."""
    return code.startswith("```\n") and code == text.strip()


def _begins_line(text: str, position: int) -> bool:
    return not text[text.rfind("\n", 0, position) + 1 : position].strip(" \t`[")


@lru_cache(maxsize=64)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """The ways to write a call, each with the name in a group."""
    name = f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})"
    some = r"([\w.\-]{1,64}+)"
    function = r"(?:functions?[.:=]?|call:)?"
    ways = (
        # <invoke name="f">, <function=f>, <tool_call name='f'>, whatever is around the word, and then a tag or JSON
        rf"<[^<>\n/]{{0,40}}{_WORD}[^<>\n]{{0,24}}[=:\s][\"']?{function}{name}[\"']?[^<>\n]{{0,40}}>?\s*+(?=[<{{\]])",
        rf"<[^<>\n/]{{0,40}}(?:invoke|tool_call) name=[\"']{some}[\"']>\s*+<[^<>\n/]{{0,40}}param[^<>\n]*+>",
        # <tool_call>f<arg_key>, [TOOL_CALLS]f{{, <|tool_call_begin|>functions.f:0<|, <tool_call>f(
        rf"[<\[][^<>\[\]\n]{{0,30}}{_WORD}[^<>\[\]\n]{{0,30}}[>\]]\s*+(?:{_WORD}[^\n]{{0,24}}?)?{function}{name}"
        r"(?>(?::\d++)?)\s*+[<{(\[`]",
        # call tool="f"
        rf"{_WORD} (?:tool|name)=[\"']{name}[\"']",
        # <f><key>
        rf"<{name}>\s*+<[\w:]++>",
        # to=functions.f, <|channel|>functions.f<|message|>
        rf"(?:to={function}|<\|channel\|>[^<\n]{{0,20}}functions\.){name}[^{{<]{{0,40}}[{{<]",
        # {{"name": "f", "arguments": ...}} with these or other keys, in either order
        rf"\{{[^{{}}\n]{{0,80}}{_KEYS}[\"']{function}{name}[\"'][^{{}}]{{0,80}}{_ARGUMENTS}",
        rf"\{{\s*+{_ARGUMENTS}[^\n]{{0,400}}?{_KEYS}[\"']{function}{name}[\"']",
        # f{{"key":, {{"f": {{, f(key=, f<arg_key>, f</tool_call>
        rf"{_LINE}{function}{name}(?:\[\w++\]|:\d++|json|>)?\s*+(?:```json\s*+)?\{{\s*+(?:[\"']\w++[\"']\s*+:|\w++:[^\s\w]|\}})",
        rf"{name}\[ARGS\]\s*+\{{",
        rf"{_LINE}[\[{{]{{1,2}}\s*+[\"']{name}[\"']\s*+:\s*+\{{",
        rf"(?:^|(?<=[>\]|])|(?<=tool_code\n))\s*+\[?{function}{name}(?:\.call)?\((?:\w++\s*+={_LITERAL}[^\n]*\)|\{{|\))"
        r"\s*+\]?\s*+(?:[<`]|\Z)",
        rf"\[{function}{name}(?:\.call)?\((?:[\"']|\w++\s*+={_LITERAL})[^\n]*\]\s*+(?:<|\Z)",
        rf"{_LINE}\[{function}{name}\(\w++\s*+={_LITERAL}[^\n]*\)\][ \t]*+(?:\n|\Z)",
        rf"<\W?(?:{_WORD}_?){{1,2}}s?{name}\s*+<",
        r"(?:^)\s*+<[^<>\n/]{0,16}param(?:eter)?[ =][^<>\n]++>[^<]*+</()",
        rf"{_LINE}{name}\s*+<[^<>\n]{{0,20}}(?:arg|param|key|/[^<>\n]{{0,20}}{_WORD})",
    )
    return re.compile("|".join(ways), re.IGNORECASE)
