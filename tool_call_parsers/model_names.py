"""Formats by the names of models, as people type them from model cards.

A card's name has an owner, sizes, dates, quantizations and words like `Instruct` around the part that decides the
format. `shortened` leaves them out. Generations are listed and never guessed: the next one may write another format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tool_call_parsers.formats import fold

MODELS: Final[dict[str, str]] = {
    "hermes": """hermes_2_pro hermes_2_pro_llama_3 hermes_2_pro_mistral hermes_3 hermes_3_llama_3.1 hermes_3_llama_3.2
        hermes_4 hermes_4.3 deephermes_3 deephermes_3_llama_3 deephermes_3_mistral qwen2.5_coder qwen2.5_vl qwq smollm3
        exaone_4 exaone_4.0 exaone_4.0.1 exaone_4.5 k_exaone falcon_h1 mimo_vl internvl3 kat_v1 vibethinker
        tongyi_deepresearch""",
    "qwen3_json": "qwen3_instruct qwen3_thinking qwen3_next qwen3_omni baichuan_m2 bielik_v3.0 reka_edge",
    "ernie45": "ernie_4.5_thinking",
    "granite": "granite_3.0 granite_3.1 granite_3.2 granite_3.3",
    "granite4": "granite_4.0 granite_4.0_h granite_4.1",
    "llama3_json": "llama_3.1_instruct llama_3.2_instruct llama_3.3_instruct",
    "llama3_custom": "functionary_v3.1",
    "llama4_json": "llama_4_scout llama_4_maverick",
    "internlm": "internlm2.5 intern_s1_pro",
    "hunyuan_a13b": "apriel_1.5 apriel_1.6 apriel_1.5_thinker apriel_1.6_thinker",
    "nemotron_json": """nemotron_nano_v2_vl llama_3.1_nemotron_nano_v1 llama_3.1_nemotron_nano_v1.1
        llama_3.1_nemotron_ultra_v1 llama_3.3_nemotron_super_v1""",
    "jamba": "jamba_1.5 jamba_1.6 jamba_1.7",
    "xlam": "xlam_1 llama_xlam_2",
    "cohere_command3": "command_a command_r7b c4ai_command_a",
    "cohere_command4": "command_a_reasoning",
    "gigachat3": "gigachat_3.0",
    "mistral": """mistral_small mistral_small_3.1 mistral_small_3.2 mistral_small_4 mistral_medium mistral_medium_3
        mistral_medium_3.1 mistral_medium_3.5 mistral_large mistral_large_3 devstral_2 devstral_small devstral_small_1.1
        devstral_small_2 devstral_medium magistral_small magistral_small_1.2 magistral_medium pixtral ministral""",
    "mistral_v3": "mistral_v0.3 mixtral_8x22b_v0.1",
    "deepseek_v3": "deepseek_v2.5 deepseek_r1_qwen3 deepseek_prover_v2",
    "deepseek_v31": "deepseek_v3.2_exp",
    "kimi_k2": "kimi_k2_thinking kimi_k2.5 kimi_k2.6 kimi_linear",
    "plamo3": "plamo_3.0",
    "openai": "gpt_oss_safeguard",
    "qwen3_coder": "qwen3_coder_next qwen3.7 intellect_3 nex_n2 ornith_1.0 ornith_1.5",
    "nemotron_v3": "nemotron_3_nano nemotron_3_super nemotron_3.5",
    "mimo": "mimo_v2 mimo_v2.5",
    "step3p5": "step_3.5 step_3.7 stepfun_3.5",
    "glm45": "glm_4.5v glm_4.6v glm4_moe",
    "glm47": "glm_5.1 glm_5.2 glm_5.3",
    "ling3": "ling_2 ling_2.0 ling_2.5 ling_2.6 ling_3.0 ring_2 ring_2.0 ring_2.5 ring_2.6 ring_3.0",
    "poolside_v1": "laguna_s_2.1 laguna_xs_2.1 laguna_xs.2",
    "hy_v3": "hy3 hunyuan_3 hunyuan_3.0",
    "hy_v4": "hy4 hunyuan_4 hunyuan_4.0",
    "longcat": "longcat_flash_chat longcat_flash_thinking longcat_flash_lite",
    "minimax_m2": "minimax_m2.1 minimax_m2.5 minimax_m2.7",
    "deepseek_v4": "deepseek_v4_flash deepseek_v4_pro",
    "muse": "muse_spark_1 muse_spark_1.0 muse_spark_1.1",
    "functionary": "functionary_medium functionary_small",
    "pythonic": "toolace_2 toolace_2_llama_3.1 toolace_2.5 watt_tool",
    "olmo3": "olmo_3.1",
    "lfm2": "lfm2_vl lfm2.5_vl",
    "solar_open": "solar_open_1",
}
"""The names of models by their format, separated by blanks, besides the aliases of the format."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


EXACT: Final = _words(
    """dots ernie gigachat glm granite hermes hunyuan internlm kimi llama llama3 mimo minimax mistral mixtral muse
    nanbeige openai phi4 qwen solar step xlam"""
)
"""Folded names of families whose generations write several formats: only found as typed, and not behind more words."""
_OWNERS: Final = _words(
    """ai21 ai21labs baidu bytedance c4ai cohere cohereforai google ibm inclusionai lgai lgaiexploration lmsys meetkai
    meta microsoft mistralai moonshotai nousresearch nvidia openai openbmb poolside salesforce stepfunai tencent thudm
    unsloth upstage xiaomi zai"""
)
_KINDS: Final = _words(
    """autoround awq base bf16 bnb chat dynamic exl2 exl3 fc fp16 fp4 fp8 free gguf gptq hf instruct int4 int8 it
    latest mlx mxfp4 nvfp4 preview quantized r rl sft smoothquant static tool w4a16 w8a8"""
)
_TIERS: Final = _words(
    """air fast flash h large lightning lite max medium micro mini nano omni plus pro reasoning small super tiny think
    thinking turbo ultra"""
)
_SIZE: Final = re.compile(r"[ae]?\d+(?:\.\d+)?[bmt]|\d+x\d+(?:\.\d+)?b|\d+e|\d+bit|i?q\d\w*|k|m|s|xs|xxs")
_DATE: Final = re.compile(r"\d{4}|\d{6}|\d{8}")
_MONTH: Final = re.compile(r"0[1-9]|1[0-2]")


def shortened(name: str) -> Iterator[str]:
    """The folded name, and shorter ones for the lists of names, the least shortened first.

    Left out are, in this order: the owner and words like `Instruct`, dates, sizes, and the tier (`Flash`, `Thinking`).
    """
    yield fold(name)
    words = [word for word in re.split(r"[-_\s:@]+", name.rpartition("/")[2].casefold()) if word]
    if len(words) > 1 and fold(words[0]) in _OWNERS:
        yield fold("".join(words := words[1:]))
    for keeps in (_is_name, _is_no_date, _is_no_size, _is_no_tier):
        words = [word for index, word in enumerate(words) if not index or keeps(words, index)]
        yield fold("".join(words))


def _is_name(words: list[str], index: int) -> bool:
    return words[index] not in _KINDS


def _is_no_date(words: list[str], index: int) -> bool:
    following = words[index + 1] if index + 1 < len(words) else ""
    return not (_DATE.fullmatch(words[index]) or (_MONTH.fullmatch(words[index]) and _DATE.fullmatch(following)))


def _is_no_size(words: list[str], index: int) -> bool:
    return not _SIZE.fullmatch(words[index])


def _is_no_tier(words: list[str], index: int) -> bool:
    return words[index] not in _TIERS
