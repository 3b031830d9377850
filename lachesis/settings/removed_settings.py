"""Settings of the removed Hermes stack and of Atropos for what does not exist here.

Those of the stack's thread pool and pools of sandboxes, and those of Atropos that would change nothing, are accepted,
so that old settings and old code work; a note names those that are given. Four of Atropos are rejected.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from lachesis.settings.setting_facts import IGNORED, REMOVED, Facts


class RemovedSettings(BaseModel):
    """Nothing reads them but the environment's own code."""

    tool_pool_size: Annotated[int, REMOVED] = 128

    tool_pool_mode: Annotated[str, REMOVED] = "default"
    allow_network: Annotated[bool, REMOVED] = True
    require_sandbox: Annotated[bool, REMOVED] = False
    purge_job_on_start: Annotated[bool, REMOVED] = False
    purge_job_on_shutdown: Annotated[bool, REMOVED] = True
    acquire_timeout_s: Annotated[float, REMOVED] = 30.0

    nomad_address: Annotated[str, REMOVED] = "http://localhost:4646"
    sandbox_job_id: Annotated[str, REMOVED] = "atropos-sandbox"
    sandbox_image: Annotated[str, REMOVED] = "atropos-sandbox:local"
    slots_per_container: Annotated[int, REMOVED] = 10
    min_containers: Annotated[int, REMOVED] = 1
    max_containers: Annotated[int, REMOVED] = 10
    privileged: Annotated[bool, REMOVED] = False
    driver: Annotated[str, REMOVED] = "docker"
    singularity_image: Annotated[str | None, REMOVED] = None

    modal_app_name: Annotated[str, REMOVED] = "atropos-sandbox"
    modal_image: Annotated[str, REMOVED] = "python:3.11"
    modal_gpu: Annotated[str | None, REMOVED] = None
    modal_cpu: Annotated[float, REMOVED] = 1.0
    modal_memory: Annotated[int, REMOVED] = 2048
    modal_slots_per_sandbox: Annotated[int, REMOVED] = 10
    modal_min_sandboxes: Annotated[int, REMOVED] = 1
    modal_max_sandboxes: Annotated[int, REMOVED] = 5
    modal_idle_timeout: Annotated[int, REMOVED] = 120
    modal_max_lifetime: Annotated[int, REMOVED] = 3600
    modal_acquire_timeout: Annotated[float, REMOVED] = 60.0
    modal_execution_timeout: Annotated[float, REMOVED] = 30.0
    modal_secrets: Annotated[Any, REMOVED] = None
    modal_env_vars: Annotated[Any, REMOVED] = None
    modal_workspace_base: Annotated[str, REMOVED] = "/data"

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
