"""An environment that a random model learns within a dozen steps: answer in ASCII."""

from __future__ import annotations

import random
from typing import Any

from lachesis import HermesAgentBaseEnv
from lachesis_messages.tokens import MASKED


class AsciiEnv(HermesAgentBaseEnv):
    """The reward is the share of sampled tokens of a byte tokenizer that are ASCII: about 0.45 for random ones."""

    name = "ascii"
    enabled_toolsets = ()
    max_turns = 1
    max_token_length = 16
    max_resamples = 0

    async def setup(self) -> None:
        self.drawn = 0

    async def get_next_item(self) -> int:
        self.drawn += 1
        return self.drawn

    def format_prompt(self, item: int) -> str:
        return f"Item {item}."

    async def compute_reward(self, item: int, result: Any, ctx: Any) -> float:
        sampled = [
            token
            for sample in result.samples()
            for token, mask in zip(sample.tokens, sample.masks, strict=True)
            if mask != MASKED
        ]
        return sum(token < 128 for token in sampled) / len(sampled)


class EndingConfig(AsciiEnv.env_config_cls):
    """When it ends."""

    items: int = 1_000_000
    solved_after: int = 1_000_000


class EndingEnv(AsciiEnv):
    """Has so many items, and none that teaches anything after so many."""

    env_config_cls = EndingConfig

    async def get_next_item(self) -> int | None:
        return await super().get_next_item() if self.drawn < self.config.items else None

    async def compute_reward(self, item: int, result: Any, ctx: Any) -> float:
        return random.random() if item <= self.config.solved_after else 1.0
