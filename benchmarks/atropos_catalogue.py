"""Environments of the atroposlib source distribution that play without the network, and what each needs.

Datasets of the hub are replaced by folders of the same names with a few rows of our own: `load_dataset` looks for such
a folder before it asks the hub.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis_testing.fake_server.completions import Ask
from lachesis_testing.fake_server.policies import WORDS


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
    older: Mapping[str, str] = field(default_factory=dict)
    """Package -> the version that it has to be older than."""
    servers: int = 1
    """Model servers that its `config_init` names."""

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".") + f".{self.cls}"

    def missing(self) -> list[str]:
        """Modules that are not installed."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return absent + [f"{name} < {limit}" for name, limit in self.older.items() if not _older(name, limit)]


def _older(name: str, limit: str) -> bool:
    def parts(text: str) -> list[int]:
        return [int(part) for part in text.split(".")[:2]]

    return parts(importlib.metadata.version(name)) < parts(limit)


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


_SUMS = [{"question": f"What is {n} plus {8 - n}?", "answer": "They add up.\n#### 8"} for n in range(8)]
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
        "answer": 1,
        "ground_truth": "B",
        "options": [str(n + 1), str(n), str(n + 2), str(n + 3)],
    }
    for n in range(120)
]
_MCQA = dataset("NousResearch/AcademicMCQA", train=_CHOICES)

_CHAT = [{"role": "user", "content": "Which way is the river?"}, {"role": "assistant", "content": "Down."}]
_WILDCHAT = dataset("allenai/WildChat", train=[{"conversation": _CHAT} for _ in range(1000)])

_FUNDAMENTALS = dataset(
    "NousResearch/company-fundamentals-prediction-lite",
    train=[
        {"context": f"Report {n}", "answer": "raised", "magnitude": "8", "fundamental_metric": "eps"} for n in range(40)
    ],
)
_MATH = {
    **dataset("zwhe99/DeepMath-103K", train=[{"question": f"{n}+{8 - n}?", "final_answer": "8"} for n in range(8)]),
    **dataset("HuggingFaceH4/aime_2024", train=[{"problem": "4+4?", "answer": "8"}]),
    **dataset("HuggingFaceH4/math-500", test=[{"problem": "4+4?", "answer": "8"}]),
    **dataset("math-ai/amc23", test=[{"question": "4+4?", "answer": "8"}]),
    **dataset("math-ai/minervamath", test=[{"question": "4+4?", "answer": "8"}]),
    **dataset("math-ai/olympiadbench", test=[{"question": "4+4?", "final_answer": ["8"]}]),
}
_WIKISQL = {
    f"wikisql/data/{split}{kind}.jsonl": json.dumps(row) + "\n"
    for split in ("train", "dev", "test")
    for kind, row in (
        ("", {"question": "Which is first?", "table_id": "1", "sql": {"sel": 0, "agg": 0, "conds": [[1, 0, "one"]]}}),
        (".tables", {"id": "1", "header": ["name", "place"], "rows": [["tree", "one"], ["river", "two"]]}),
    )
}
_WIKISQL |= {f"wikisql/data/{split}.db": "" for split in ("train", "dev", "test")}
_CALL = '<tool_call>\n{{"name":"look","arguments":{{"at":{0}}}}}\n</tool_call>'
_STEPS = [
    {
        "conversations": [
            {"from": "system", "value": f"You have tools. <tools>{json.dumps(_TOOL)}</tools>"},
            {"from": "human", "value": f"Look at {n}, then at 8."},
            {"from": "gpt", "value": "<think>\nLook.\n</think>\n" + _CALL.format(8)},
            {"from": "tool", "value": '<tool_response>\n{"seen": 8}\n</tool_response>'},
            {"from": "gpt", "value": "<think>\nAgain.\n</think>\n" + _CALL.format(8)},
            {"from": "tool", "value": '<tool_response>\n{"seen": 8}\n</tool_response>'},
            {"from": "gpt", "value": "<think>\nDone.\n</think>\nIt is 8."},
        ]
    }
    for n in range(60)
]


def _stepping(ask: Ask) -> str:
    """Calls the tool as it should in its first turns; every other completion goes wrong later."""
    at = 8 if ask.turn == 0 or (ask.index + ask.number) % 2 == 0 else 9
    return f"<think>\n{words(ask)}\n</think>\n{_CALL.format(at)}"


def _in_its_format(ask: Ask) -> str:
    """An answer in the format that the prompt shows; every other completion leaves it out."""
    shown = re.findall(r"Example: (.{0,60})your response here(.*)", ask.prompt)
    before, after = shown[-1] if shown and ask.index % 2 else ("", "")
    return f"<think>\n{words(ask)}\n</think>\n{before}8{after}"


def _calculating(ask: Ask) -> str:
    """The value of the last sum of the prompt, or, every other time, a wrong one."""
    sums = re.findall(r"((?:\d+ [+-] )+\d+) =", ask.prompt)
    terms = sums[-1].split() if sums else ["0"]
    value = sum(
        int(term) * (-1 if before == "-" else 1) for before, term in zip(["+", *terms[1::2]], terms[::2], strict=True)
    )
    return f"<think>\n{words(ask)}\n</think>\n<answer>{value + ask.index % 2}</answer>"


def _judging(ask: Ask) -> str:
    """Prose; as a judge, the first answer in the first order and the second in the other."""
    return f"{words(ask)} \\boxed{{{'AB'[ask.number % 2]}}}"


CASES: Sequence[Case] = (
    Case("gsm8k_server.py", "GSM8kEnv", _BOXED, files=_GSM8K),
    Case("gsm8k_server_axolotl.py", "GSM8kEnv", _BOXED, files=_GSM8K),
    Case("community/cat_behavior_env/catbot_arena.py", "GSM8kEnv", _BOXED, files=_GSM8K),
    Case("community/goofy_math/goofy_math_server.py", "GoofyMathEnv", _BOXED, files=_GSM8K),
    Case("math_server.py", "MathEnv", thinking(r"\boxed{8}", r"\boxed{9}"), {"env.total_steps": 8}, _MATH),
    Case(
        "math_server_zero.py",
        "MathEnv",
        thinking(r"<answer>\boxed{8}</answer>", r"<answer>\boxed{9}</answer>"),
        files=_MATH,
    ),
    Case("tool_calling_server.py", "SingleToolCallingEnv", _CALLING, files=_XLAM),
    Case(
        "community/wikipedia_research/tool_calling_server.py",
        "SingleToolCallingEnv",
        _CALLING,
        files=_XLAM,
        servers=2,
    ),
    Case(
        "mcqa_thinking_env.py",
        "MCQAThinkingEnv",
        thinking("The best answer is: B", "The best answer is: A"),
        files=_MCQA,
    ),
    Case(
        "fundamental_prediction_environment.py",
        "FundamentalPredictionEnv",
        thinking(
            "The eps will be: raised and the magnitude will be: 8%",
            "The eps will be: reduced and the magnitude will be: 1%",
        ),
        files=_FUNDAMENTALS,
    ),
    Case("rlaif_server.py", "RLAIFEnv", _judging, files=_WILDCHAT),
    Case("community/philosophical_rlaif_env.py", "PhilosophicalRLAIFEnv", _judging, files=_WILDCHAT),
    Case(
        "community/humor_generation/humor_env.py",
        "HumorEnv",
        saying("Score: 1", "Score: 2"),
        flags={"env.data_path": "jokes.jsonl"},
        files={
            "jokes.jsonl": "\n".join(
                json.dumps({"question": f"A joke about {n}?", "format": "haiku", "comedian": "anybody"})
                for n in range(8)
            )
        },
    ),
    Case(
        "community/cybersecurity_sigma/llm_judge_env.py",
        "SigmaRuleEnv",
        lambda ask: f"{words(ask)} \\boxed{{detection: {ask.index}}}" if ask.call.n > 1 else "01"[ask.number % 2],
        files=dataset(
            "mmaisel1/nous-rl-hackathon-sigma",
            train=[{"prompt": f"Find {n}", "rule": "detection: 0"} for n in range(8)],
            test=[{"prompt": "Find 8", "rule": "detection: 0"}],
        ),
    ),
    Case(
        "community/cybersecurity_sigma/jaccard_reward_env.py",
        "SigmaRuleEnv",
        lambda ask: f"{words(ask)} \\boxed{{detection:\n  selection:\n    a: {ask.index}\n}}",
        files=dataset(
            "mmaisel1/nous-rl-hackathon-sigma",
            train=[{"prompt": f"Find {n}", "rule": "detection:\n  selection:\n    a: 0\n"} for n in range(8)],
            test=[{"prompt": "Find 8", "rule": "detection:\n  selection:\n    a: 0\n"}],
        ),
        packages=["sklearn"],
    ),
    Case(
        "community/sql_query_env/sql_query_env.py",
        "SQLQueryEnv",
        saying(r"\boxed{SELECT name FROM data WHERE place = 'one'}", r"\boxed{SELECT place FROM data}"),
        files=_WIKISQL,
        environment={"WIKISQL_CACHE_DIR": "wikisql"},
    ),
    Case(
        "text_reversal_environment.py",
        "TextReversalEnv",
        thinking("<reversed_text>eert</reversed_text>", "<reversed_text>tree</reversed_text>"),
        flags={
            "env.train_dataset": "texts.jsonl",
            "env.eval_dataset": "texts.jsonl",
            "env.thinking_mode": "true",
            "env.eval_split": "train",
        },
        files={"texts.jsonl": '{"text": "tree"}\n' * 8},
    ),
    Case(
        "answer_format_environment/answer_format_environment.py",
        "AnswerFormatEnv",
        _in_its_format,
        flags={"env.total_steps": 12},
        files={**_GSM8K, **_MCQA},
    ),
    Case(
        "tool_use_multiturn_server.py",
        "MultiTurnToolCallingEnv",
        thinking(_CALL.format(8), _CALL.format(9)),
        flags={"env.scenario_category": "single"},
        files=dataset("interstellarninja/toolace_hermes_sequential_tool_use", train=_STEPS),
    ),
    Case(
        "tool_use_turnlevel_advantage_server.py",
        "MultiTurnToolUseTurnLevelAdvantageEnv",
        _stepping,
        files=dataset("interstellarninja/hermes_reasoning_tool_use", train=_STEPS),
    ),
    Case(
        "community/lean_proof_env/lean_env.py",
        "LeanEnv",
        saying("simple_theorem_correct", "sorry"),
        files=dataset(
            "brando/minif2f-lean4",
            validation=[{"id": str(n), "header": "import Mathlib", "formal_statement": f"{n}"} for n in range(8)],
            test=[{"id": "8", "header": "import Mathlib", "formal_statement": "8"}],
        ),
    ),
    Case(
        "community/quantum_hybrid/atopos_quant.py",
        "QuantumHybridEnv",
        words,
        flags={"env.dataset_name": "lines", "env.dataset_config": "plain"},
        files=dataset(
            "lines",
            "plain",
            train=[{"text": " ".join(WORDS[n : n + 40])} for n in range(20)],
            validation=[{"text": " ".join(WORDS[:40])}],
        ),
        packages=["pennylane"],
    ),
    Case("community/metric_card_generator/metric_card_generator.py", "MetricCardEnv", saying("{}")),
    Case(
        "community/regex_generation/regex_env.py",
        "RegexEnv",
        saying(r"<answer>\d+</answer>", "<answer>.*</answer>", "<answer>[a-z]+</answer>", "<answer>(</answer>"),
    ),
    Case(
        "reasoning_gym_environment/reasoning_gym_environment.py",
        "ReasoningGymEnv",
        _calculating,
        flags={"env.total_steps": 30},
        packages=["reasoning_gym", "bfi", "pycosat"],
    ),
    Case("community/word_hunt/word_hunt_env.py", "WordHuntEnv", saying("TEA, TREE, SEAT", "ZZZ", "EAT, ATE", "no")),
    Case(
        "game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py",
        "BlackjackEnvNoThinking",
        exactly("hit", "stick", "stick"),
    ),
    Case(
        "game_environments/gymnasium/gym_taxi.py",
        "GymTaxiEnv",
        exactly(*map(str, range(6))),
        older={"gymnasium": "1.2"},
    ),
    Case(
        "letter_counting_environment/letter_counting_environment.py",
        "LetterCountingEnv",
        thinking("<answer>1</answer>", "<answer>2</answer>", "<answer>0</answer>"),
        files={"nltk/corpora/words/en": "\n".join(WORDS), "nltk/corpora/words/README": "words"},
        environment={"NLTK_DATA": "nltk"},
    ),
    Case(
        "instruction_following_algorithm_environment.py",
        "InstructionFollowingEnv",
        thinking('{"data": "example"}', "nothing"),
        packages=["langdetect"],
    ),
)
