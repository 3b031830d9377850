"""Settings of the removed Hermes stack and of Atropos for what does not exist here.

Those of the stack's thread pool, and those of Atropos that would change nothing, are accepted, so that old settings and
old code work; a note names those that are given. Four of Atropos are rejected.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lachesis.settings.pool_settings import PoolSettings
from lachesis.settings.setting_facts import IGNORED, REMOVED, Facts


class RemovedSettings(PoolSettings):
    """Nothing reads them but the environment's own code."""

    tool_pool_size: Annotated[int, REMOVED] = 128

    batch_size: Annotated[int, IGNORED] = -1
    min_items_sent_before_logging: Annotated[int, IGNORED] = 2
    num_rollouts_per_group_for_logging: Annotated[int, IGNORED] = 1
    thinking_mode: Annotated[bool, Facts(use_instead="--openai.extra_body")] = False
    reasoning_effort: Annotated[
        str | None, Facts(use_instead="--openai.extra_body, for example '{reasoning_effort: high}'")
    ] = None
    max_reasoning_tokens: Annotated[int | None, Facts(use_instead="--openai.extra_body")] = Field(
        default=None, ge=1024, le=32000
    )
    custom_thinking_prompt: Annotated[str | None, Facts(use_instead="--env.ephemeral_system_prompt")] = None
