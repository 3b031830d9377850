"""Settings of the removed Hermes stack for what does not exist here: its thread pool and its pools of sandboxes.

Accepted, so that old settings and old code work; a note names those that are given.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel

from lachesis.runs.setting_facts import IGNORED


class RemovedSettings(BaseModel):
    """Nothing reads them but the environment's own code."""

    tool_pool_size: Annotated[int, IGNORED] = 128

    tool_pool_mode: Annotated[str, IGNORED] = "default"
    allow_network: Annotated[bool, IGNORED] = True
    require_sandbox: Annotated[bool, IGNORED] = False
    purge_job_on_start: Annotated[bool, IGNORED] = False
    purge_job_on_shutdown: Annotated[bool, IGNORED] = True
    acquire_timeout_s: Annotated[float, IGNORED] = 30.0

    nomad_address: Annotated[str, IGNORED] = "http://localhost:4646"
    sandbox_job_id: Annotated[str, IGNORED] = "atropos-sandbox"
    sandbox_image: Annotated[str, IGNORED] = "atropos-sandbox:local"
    slots_per_container: Annotated[int, IGNORED] = 10
    min_containers: Annotated[int, IGNORED] = 1
    max_containers: Annotated[int, IGNORED] = 10
    privileged: Annotated[bool, IGNORED] = False
    driver: Annotated[str, IGNORED] = "docker"
    singularity_image: Annotated[str | None, IGNORED] = None

    modal_app_name: Annotated[str, IGNORED] = "atropos-sandbox"
    modal_image: Annotated[str, IGNORED] = "python:3.11"
    modal_gpu: Annotated[str | None, IGNORED] = None
    modal_cpu: Annotated[float, IGNORED] = 1.0
    modal_memory: Annotated[int, IGNORED] = 2048
    modal_slots_per_sandbox: Annotated[int, IGNORED] = 10
    modal_min_sandboxes: Annotated[int, IGNORED] = 1
    modal_max_sandboxes: Annotated[int, IGNORED] = 5
    modal_idle_timeout: Annotated[int, IGNORED] = 120
    modal_max_lifetime: Annotated[int, IGNORED] = 3600
    modal_acquire_timeout: Annotated[float, IGNORED] = 60.0
    modal_execution_timeout: Annotated[float, IGNORED] = 30.0
    modal_secrets: Annotated[Any, IGNORED] = None
    modal_env_vars: Annotated[Any, IGNORED] = None
    modal_workspace_base: Annotated[str, IGNORED] = "/data"
