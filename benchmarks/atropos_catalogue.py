"""Environments of the atroposlib source distribution that play without the network, and what each needs.

Datasets of the hub are replaced by folders of the same names with a few rows of our own: `load_dataset` looks for such
a folder before it asks the hub.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.testing.fake_server.completions import Ask
from lachesis.testing.fake_server.policies import WORDS


@dataclass(frozen=True, slots=True)
class Case:
    """One environment."""

    path: str
    """Under `environments/` of the distribution."""
    cls: str
    answer: Callable[[Ask], str]
    """What the fake server says."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of files in the folder that it runs in."""
    copied: Sequence[str] = ()
    """Files of the distribution that it looks for below that folder."""
    packages: Sequence[str] = ()
    """Modules that it imports, beside what Lachesis itself needs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".") + f".{self.cls}"

    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def words(ask: Ask, least: int = 20, most: int = 40) -> str:
    """Prose of random words."""
    rng = ask.rng()
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def saying(*texts: str) -> Callable[[Ask], str]:
    """Prose that ends with one of the texts, each completion of a group with the next one."""

    def answer(ask: Ask) -> str:
        return f"{words(ask)} {texts[(ask.index + ask.number) % len(texts)]}"

    return answer


def exactly(*texts: str) -> Callable[[Ask], str]:
    """One of the texts and nothing else."""

    def answer(ask: Ask) -> str:
        return texts[(ask.index + ask.number) % len(texts)]

    return answer


def thinking(*texts: str) -> Callable[[Ask], str]:
    """Thoughts in `<think>` tags, and one of the texts."""

    def answer(ask: Ask) -> str:
        return f"<think>\n{words(ask)}\n</think>\n{texts[(ask.index + ask.number) % len(texts)]}"

    return answer


def dataset(name: str, config: str | None = None, **splits: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The files of a folder that `datasets.load_dataset(name, config, split=...)` reads."""
    listed = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files:\n{listed}---\n"
    lines = {f"{name}/{split}.jsonl": "\n".join(map(json.dumps, rows)) + "\n" for split, rows in splits.items()}
    return {f"{name}/README.md": card, **lines}


_SUMS = [{"question": f"What is {n} plus {8 - n}?", "answer": f"They add up.\n#### 8"} for n in range(8)]
_GSM8K = dataset("gsm8k", "main", train=_SUMS, test=_SUMS[:2])
_GSM8K_OPENAI = dataset("openai/gsm8k", "main", train=_SUMS, test=_SUMS[:2])
_BOXED = saying(r"The answer is \boxed{8}", r"The answer is \boxed{9}")

_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_CALLS = [
    {
        "conversations": [
            {"from": "system", "value": f"You have tools. <tools>{json.dumps(_TOOL)}</tools>"},
            {"from": "human", "value": f"Look at {n}."},
            {"from": "gpt", "value": '<tool_call>\n{"name": "look", "arguments": {"at": 8}}\n</tool_call>'},
        ]
    }
    for n in range(120)
]
_CALLING = thinking(
    '<tool_call>\n{"name": "look", "arguments": {"at": 8}}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"at": 9}}\n</tool_call>',
)
_XLAM = dataset("NousResearch/XLAM-Atropos", train=_CALLS)

_CHOICES = [
    {
        "prompt": f"Which number is {n}?",
        "answer": "B",
        "ground_truth": str(n),
        "options": [str(n + 1), str(n), str(n + 2), str(n + 3)],
    }
    for n in range(120)
]

_FRUIT = [{"prompt": [{"role": "user", "content": f"Reverse: fruit {n}"}], "answer": f"{n} tiurf"} for n in range(8)]

CASES: Sequence[Case] = (
    Case("gsm8k_server.py", "GSM8kEnv", _BOXED, files=_GSM8K),
    Case("gsm8k_server_axolotl.py", "GSM8kEnv", _BOXED, files=_GSM8K),
    Case("community/cat_behavior_env/catbot_arena.py", "GSM8kEnv", _BOXED, files=_GSM8K),
    Case(
        "community/cat_behavior_env/cat_server.py",
        "GSM8kEnv",
        _BOXED,
        copied=["environments/community/cat_behavior_env/cat_scenarios.json",
                "environments/community/cat_behavior_env/cat_behaviors.json"],
    ),
    Case("community/goofy_math/goofy_math_server.py", "GoofyMathEnv", _BOXED, files=_GSM8K),
    Case("tool_calling_server.py", "SingleToolCallingEnv", _CALLING, files=_XLAM),
    Case("community/wikipedia_research/tool_calling_server.py", "SingleToolCallingEnv", _CALLING, files=_XLAM),
    Case(
        "mcqa_thinking_env.py",
        "MCQAThinkingEnv",
        thinking("The best answer is B", "The best answer is A"),
        files=dataset("NousResearch/AcademicMCQA", train=_CHOICES),
    ),
    Case("community/metric_card_generator/metric_card_generator.py", "MetricCardEnv", saying("{}")),
    Case("community/regex_generation/regex_env.py", "RegexEnv", saying("a")),
    Case("community/sanskrit_poetry/sanskrit_poetry_env.py", "SanskritPoetryEnv", words),
    Case("community/word_hunt/word_hunt_env.py", "WordHuntEnv", saying("CAT, DOG", "TEA")),
    Case("community/dynastai/dynastai_server.py", "DynastAIEnv", words),
    Case("community/dynastai/src/dynastai_env.py", "DynastAIEnv", words),
    Case(
        "community/conversational_style_dpo/gsmk8k_conversational_style_dpo_env.py",
        "GSM8KConversationalStyleDPOEnv",
        words,
        files=_GSM8K,
    ),
    Case("community/meteorology_forecast/meteorology_env.py", "MeteorologyForecastRLEnv", words),
    Case("game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py", "BlackjackEnvNoThinking", words),
    Case("game_environments/gymnasium/blackjack/blackjack_env_thinking.py", "BlackjackEnv", words),
    Case("game_environments/gymnasium/gym_taxi.py", "GymTaxiEnv", words),
    Case("reasoning_gym_environment/reasoning_gym_environment.py", "ReasoningGymEnv", thinking("<answer>8</answer>")),
    Case("infinimath/infinimath_env.py", "InfiniteMathEnv", thinking(r"\boxed{8}")),
    Case("letter_counting_environment/letter_counting_environment.py", "LetterCountingEnv", thinking("<answer>1</answer>", "<answer>2</answer>")),
    Case("rlaif_server.py", "RLAIFEnv", words),
)
