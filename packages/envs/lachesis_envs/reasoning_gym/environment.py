"""The generators of reasoning-gym: puzzles of 106 kinds, made here, each scored by its own rules.

python environments/reasoning_gym_env.py process --env.dataset_name reasoning_gym:countdown
python environments/reasoning_gym_env.py evaluate --env.dataset_name reasoning_gym:maze,sudoku
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig, ServerConfig
from lachesis.runs.dataset_rows import WrongDataset
from lachesis_envs.reasoning_gym.generators import PREFIX, Generators
from lachesis_messages.messages import Message

if TYPE_CHECKING:
    from lachesis import AgentResult, Policy

EVAL_SEED = 1_000_003
"""Added to `dataset_seed` for evaluation, so that it has other problems than training."""

SYSTEM_PROMPT = (
    "You solve puzzles. Where it helps, compute with the python tool: write code that prints the result. When you know "
    "the answer, write it between <answer> and </answer>, in the form that the puzzle asks for, and nothing else there."
)


class ReasoningGymEnvConfig(HermesAgentEnvConfig):
    """Settings of reasoning-gym."""

    dataset_name: str | None = Field(
        default=f"{PREFIX}chain_sum",
        description="reasoning_gym:NAME, a generator of reasoning-gym, or several: reasoning_gym:NAME,NAME.",
    )
    dataset_seed: int = Field(default=0, ge=0, description="Seed of the problems.")
    dataset_size: int = Field(default=10_000, ge=1, description="Problems of each generator.")
    generator_config: dict[str, Any] = Field(
        default_factory=dict, description="The generator's own settings, such as min_terms; all generators get them."
    )


class ReasoningGymEnv(HermesAgentBaseEnv):
    """Puzzles with a Python REPL; the reward is the score that the generator gives the answer, 1.0 for a right one."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymEnvConfig
    toolsets = ("python",)
    max_turns = 8
    max_token_length = 1024
    system_prompt = SYSTEM_PROMPT

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[ServerConfig]]:
        """The embedded model."""
        return cls.env_config_cls(), [ServerConfig(model_name="embedded")]

    async def setup(self) -> None:
        config: Any = self.config
        name = config.dataset_name or ""
        self.generators = Generators()
        self.names = [each.strip() for each in name.removeprefix(PREFIX).split(",")]
        if not name.startswith(PREFIX):
            raise WrongDataset(f"the dataset {name!r} is not a generator: use --env.dataset_name {PREFIX}NAME")
        for each in self.names:
            await self.generators.check(each)
        self.next_row = 0
        self.answers: dict[str, str] = {}

    async def teardown(self) -> None:
        await self.generators.close()

    async def problem(self, row: int, seed: int) -> dict[str, Any]:
        """The problem of a row: the generators take turns."""
        config: Any = self.config
        generator, index = self.names[row % len(self.names)], row // len(self.names) % config.dataset_size
        about = {"generator": generator, "seed": seed, "index": index}
        made = await self.generators.problem(generator, self.settings(seed), index)
        self.answers[made["question"]] = made["answer"]
        return {**about, **made}

    def settings(self, seed: int) -> dict[str, Any]:
        config: Any = self.config
        return {**config.generator_config, "seed": seed, "size": config.dataset_size}

    async def get_next_item(self) -> dict[str, Any] | None:
        config: Any = self.config
        row, self.next_row = self.next_row, self.next_row + 1
        return await self.problem(row, config.dataset_seed)

    async def get_eval_items(self) -> Sequence[dict[str, Any]]:
        config: Any = self.config
        count = min(config.eval_items, config.dataset_size * len(self.names))
        return [await self.problem(row, config.dataset_seed + EVAL_SEED) for row in range(count)]

    def format_prompt(self, item: Mapping[str, Any]) -> str:
        question: str = item["question"]
        return question

    async def compute_reward(self, item: Mapping[str, Any], result: AgentResult, ctx: Any) -> float:
        answer = final_answer(result.final_response)
        if answer is None:
            return 0.0
        return await self.generators.score(item["generator"], self.settings(item["seed"]), item["index"], answer)

    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
        if reward is None:
            return {}
        answered = float(final_answer(result.final_response) is not None)
        return {"percent_correct": float(reward >= 1.0), "answer_rate": answered}

    def reference_policy(self) -> Policy:
        """Gives the generator's own answer: a check of the whole path, not a model."""

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            question = next((message["content"] for message in messages if message["role"] == "user"), "")
            answer = self.answers.get(question)
            return Message("assistant", content="I do not know." if answer is None else f"<answer>{answer}</answer>")

        return policy


def final_answer(text: str) -> str | None:
    """The text between the last <answer> and its </answer>, without the spaces around it; None without one."""
    found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None
