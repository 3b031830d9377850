r"""GSM8K with tools: grade-school problems, a Python REPL in a sandbox, an answer in `\boxed{}`.

    python environments/gsm8k_agent_env.py process --env.total_steps 8
    python environments/gsm8k_agent_env.py evaluate --env.dataset_name path/to/gsm8k --openai.model_name reference

`dataset_name` is `gsm_symbolic` (made here by the package reasoning-gym, no download), `word_problems` (made here, and
easier), `openai/gsm8k` from the hub, a JSON Lines file with `question` and `answer` (`... #### 18`), or a folder with
such files named by split.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig, ServerConfig, load_rows
from lachesis.runs.dataset_rows import is_local
from lachesis_envs.gsm8k.math_answer import MathVerifier, as_number, boxed, last_number, without_separators
from lachesis_envs.gsm8k.symbolic import gsm_symbolic
from lachesis_envs.gsm8k.word_problems import WordProblems
from lachesis_envs.gsm8k.worked_solutions import (
    WorkedSolution,
    WorkedSolutionPolicy,
    arithmetic_steps,
    gsm8k_steps,
)
from lachesis_envs.server_variables import server_of_variables
from lachesis_messages.messages import Message

if TYPE_CHECKING:
    from lachesis import AgentResult, Policy

GSM_SYMBOLIC, WORD_PROBLEMS = "gsm_symbolic", "word_problems"
EVAL_SEED = 1_000_003
"""Added to `dataset_seed` for evaluation, so that it has no problem of training."""

SYSTEM_PROMPT = (
    "You solve math word problems. Compute with the python tool: write code that prints the result. When you know the "
    "answer, write it as \\boxed{answer}, for example \\boxed{42}. Do not put units into the box."
)


class GSM8kEnvConfig(HermesAgentEnvConfig):
    """Settings of GSM8K."""

    dataset_seed: int = Field(default=0, description="Seed of the problems that are made here.")
    dataset_size: int = Field(default=10_000, ge=1, description="Number of the problems that are made here.")
    accept_last_number: bool = Field(
        default=False, description="Whether the last number of an answer without a box counts as the answer."
    )
    dataset_name: str | None = Field(
        default=GSM_SYMBOLIC,
        description="gsm_symbolic, word_problems, a name on the hub (openai/gsm8k), a .jsonl file or a folder of them.",
    )


class GSM8kAgentEnv(HermesAgentBaseEnv):
    """Math word problems with a Python REPL; 1.0 for the right boxed answer, else 0.0."""

    name = "gsm8k"
    env_config_cls = GSM8kEnvConfig
    # Defaults that a small model can follow.
    toolsets = ("python",)
    max_turns = 8
    max_token_length = 512
    system_prompt = SYSTEM_PROMPT

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[ServerConfig]]:
        """The embedded model, or the server that `ATROPOS_SERVER_{BASE_URL,MODEL,API_KEY}` name, as variables or in a
        `.env` in the folder."""
        config = cls.env_config_cls()
        if tokenizer := os.environ.get("ATROPOS_TOKENIZER_NAME"):
            config.tokenizer_name = tokenizer
        return config, [server_of_variables() or ServerConfig(model_name="embedded")]

    async def setup(self) -> None:
        self.verifier = MathVerifier()
        self.train: Sequence[Mapping[str, Any]] = self.load(self.config.dataset_split)
        self.next_row = 0
        self.asked: dict[str, dict[str, str]] = {}

    async def teardown(self) -> None:
        await self.verifier.close()

    def load(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Rows with `question` and `answer`."""
        config: Any = self.config
        name = config.dataset_name or GSM_SYMBOLIC
        if name in (GSM_SYMBOLIC, WORD_PROBLEMS):
            seed = config.dataset_seed + (0 if split == config.dataset_split else EVAL_SEED)
            made = gsm_symbolic if name == GSM_SYMBOLIC else WordProblems
            problems: Sequence[Mapping[str, Any]] = made(config.dataset_size, seed)
            return problems
        return load_rows(name, split, config=None if is_local(name) else "main", required=("question", "answer"))

    async def get_next_item(self) -> dict[str, str] | None:
        if self.next_row >= len(self.train):
            self.next_row = 0
        row = self.train[self.next_row]
        self.next_row += 1
        return self.hand_out(row)

    async def get_eval_items(self) -> list[dict[str, str]]:
        rows = self.load("test")
        return [self.hand_out(rows[place]) for place in range(min(self.config.eval_items, len(rows)))]

    def hand_out(self, row: Mapping[str, Any]) -> dict[str, str]:
        worked, answer = _solution(row)
        item = {"question": row["question"], "answer": answer, "solution": worked}
        self.asked[item["question"]] = item
        return item

    def format_prompt(self, item: Mapping[str, str]) -> str:
        return item["question"]

    async def compute_reward(self, item: Mapping[str, str], result: AgentResult, ctx: Any) -> float:
        config: Any = self.config
        answer = final_answer(result.final_response, accept_last_number=config.accept_last_number)
        return float(answer is not None and await self.verifier.equal(answer, item["answer"]))

    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
        if reward is None:
            return {}
        answer = boxed(result.final_response)
        return {
            "percent_correct": float(reward == 1.0),
            "boxed_answer_rate": float(answer is not None),
            "plain_answer_rate": float(answer is not None and as_number(answer) is not None),
        }

    def reference_policy(self) -> Policy:
        """Replays the worked solutions of the dataset: a check of the whole path, not a model."""

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            question = next((message["content"] for message in messages if message["role"] == "user"), "")
            item = self.asked.get(question)
            known = {question: worked_solution(item)} if item else {}
            return WorkedSolutionPolicy(known)(messages, tools)

        return policy


def worked_solution(item: Mapping[str, str]) -> WorkedSolution:
    """The dataset's solution: GSM8K marks its arithmetic, gsm_symbolic writes it in prose."""
    text = item["solution"]
    return gsm8k_steps(text) if "<<" in text else arithmetic_steps(text)


def final_answer(text: str, *, accept_last_number: bool = False) -> str | None:
    """The boxed answer, or by a setting the last number of a text without one."""
    return boxed(text) or (last_number(text) if accept_last_number else None)


def _solution(row: Mapping[str, Any]) -> tuple[str, str]:
    """(worked solution, final answer) of a row of GSM8K, which has both in one field, or of gsm_symbolic."""
    given = str(row["answer"])  # users' files hold plain numbers as well
    metadata = row.get("metadata")
    worked = metadata.get("answer_cot") if isinstance(metadata, Mapping) else None
    return str(worked or given), without_separators(given.rpartition("####")[2].strip())
