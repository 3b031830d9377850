"""The examples of `lachesis train --warm-start`: the reference policy of an environment plays, with tokens.

python -m lachesis_train.verbs.warm_start ENVIRONMENT process [--config FILE] [--env.NAME VALUE ...]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from backends.errors import SettingsError
from backends.text import counted
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.runs import commands
from lachesis.runs.atropos_base import overrides
from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts
from lachesis_tokens.server.serving import load_tokenizer, prompts_of
from lachesis_train.sft.reference_tokens import ReferenceTokens
from lachesis_train.verbs import train_environment


def main(argv: Sequence[str] | None = None) -> int:
    """Play and record; the exit code."""
    return train_environment.main(argv, run=play)


async def play(env: Any) -> Any:
    """`process` of an environment, with its reference policy in the place of the model that its settings name.

    Items that `serve` holds out for evaluations are no examples.
    """
    policy = env.reference_policy() if hasattr(env, "reference_policy") else None
    if policy is None:
        raise SettingsError(
            f"{type(env).__name__} has no reference_policy() to play the examples of a warm start; write one, or train "
            "on files first (lachesis train --sft FILE) and set --training.init_from to the folder of that run"
        )
    env.use_server(ReferenceTokens(policy, await asyncio.to_thread(_prompts, env)))
    own_items = overrides(env, HermesAgentBaseEnv, "get_eval_items") or env.evaluates_itself
    result = await commands.process(env, hold_out=env.config.steps_per_eval > 0 and not own_items)
    if result.exit_code:
        return result  # its table says why
    what = f"warm start: {counted(result.summary.rollouts, 'example')} by the reference policy, which earned"
    line = f"{what} {result.summary.reward.mean:.3f} on average: {result.files.groups}"
    env.console.print(line, markup=False, highlight=False, soft_wrap=True)
    return None


def _prompts(env: Any) -> DatasetPrompts:
    tokenizer, _, _ = load_tokenizer(env.server_configs[0], env.config, None)
    return prompts_of(DatasetPrompts, tokenizer, env.config)


if __name__ == "__main__":
    sys.exit(main())
