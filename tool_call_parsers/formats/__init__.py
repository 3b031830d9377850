"""The table of formats. A new model is a new row in the module of its family, and a line in the list of names here.

A family's lexers are loaded when one of its formats is asked for, so that a run loads those of its own model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tool_call_parsers.parser import Format

_NAMES: Final = """
json_blocks hermes qwen25 qwen2.5
json_blocks qwen3_json qwen qwen3 qwen3_vl trinity
json_blocks ernie45 ernie
json_blocks granite4
json_blocks granite granite3
json_blocks granite-20b-fc granite_20b_functioncalling
named_json llama3_json llama3 llama llama3.1 llama3.2 llama3.3
named_json llama4_json llama4
named_json llama3_custom
json_blocks phi4_mini_json phi4_mini phi4
json_blocks internlm interns1 internlm2 intern_s1
json_blocks hunyuan_a13b
json_blocks minimax_m1 minimax_m1_40k minimax_m1_80k
json_blocks nemotron_json nemotron_nano_v2 nemotron_nano_2 nemotron_v2 llama_nemotron_json llama_3.3_nemotron_super_v1.5
json_blocks jamba
json_blocks xlam xlam2
json_blocks bare_json
json_blocks apertus apertus2509
json_blocks cohere_command3
json_blocks cohere_command4
json_blocks gigachat3 gigachat gigachat3.1
named_json mistral mistral_v11 magistral devstral ministral3
named_json mistral_v3 mistral_pre_v11 mixtral mistral_nemo
named_json deepseek_v3 deepseek_r1 deepseek
named_json deepseek_v31 deepseek_v3.1 deepseek_v3.1_terminus
named_json kimi_k2 kimi
named_json plamo3
tag_blocks qwen3_coder qwen3_xml nanbeige qwen3.5 qwen3.6 qwen3.8
tag_blocks nemotron_v3 nemotron_3 nemotron_3_ultra nemotron_3.5_lightning
tag_blocks mimo
tag_blocks seed_oss
tag_blocks step3p5 step3p7
tag_blocks step5
tag_blocks glm45 glm glm46 spark25
tag_blocks glm47 glm5
tag_blocks iquest_q1 iquest
tag_blocks ling3 ling ring ring3
tag_blocks poolside_v1 laguna
tag_blocks hy_v3 hunyuan hunyuan_v3
tag_blocks hy_v4 hunyuan_v4
tag_blocks longcat longcat_flash
tag_blocks k2_horizon
tag_blocks minimax_m2 minimax
tag_blocks minimax_m3
tag_blocks dots
tag_blocks step3
tag_blocks minicpm5
tag_blocks deepseek_v32
tag_blocks deepseek_v4
tag_blocks deepseek_v41
tag_blocks gigachat35
python_calls pythonic toolace
python_calls llama4_pythonic
python_calls olmo3
python_calls lfm2
python_calls lfm2_5
channels openai gpt_oss harmony openai_gptoss
channels muse musespark1x muse_spark muse_glimmer
channels beam
channels functionary functionary_v3 functionary_v3.2
channels solar_open solar
channels inkling
channels kimi_k3
delimited gemma4
delimited functiongemma
"""
"""The module of each format, its name and its aliases. Detection tries them in this order."""

_LINES: Final = [line.split() for line in _NAMES.strip().splitlines()]
NAMES: Final[Mapping[str, tuple[str, ...]]] = {name: (name, *aliases) for _, name, *aliases in _LINES}
"""All names of each format, by its own, in the order of detection."""
_MODULES: Final[Mapping[str, str]] = {name: module for module, name, *_ in _LINES}


def load_format(name: str) -> Format:
    """The row of a format, by its own name. Raises ImportError if the list of names differs from the rows."""
    module = _MODULES[name]
    rows: tuple[Format, ...] = import_module(f"{__name__}.{module}").FORMATS
    found = {row.name: (row.name, *row.aliases) for row in rows}
    listed = {each: NAMES[each] for each, home in _MODULES.items() if home == module}
    if listed != found:
        lines = sorted(" ".join((module, *names)) for names in set(found.values()) - set(listed.values()))
        surplus = sorted(listed.keys() - found.keys())
        raise ImportError(f"{__name__}: the list of names lacks the lines {lines}, and has {surplus} without a row")
    return next(row for row in rows if row.name == name)


def fold(name: str) -> str:
    """The name without case, `-`, `_`, `.` and blanks, so that spellings of one name are equal."""
    return re.sub(r"[-_.\s]", "", name).casefold()


FOLDED: Final[Mapping[str, str]] = {fold(each): name for name, names in NAMES.items() for each in names}
"""The own name of a format by each of its names, folded."""
