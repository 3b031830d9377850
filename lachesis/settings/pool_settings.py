"""Settings of pools of sandboxes, with those of the removed Hermes stack.

With `tool_pool_mode` nomad or modal, a run has a pool of its own (the backend `pool`), made of what the latter say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from lachesis.settings.setting_facts import HOW, REMOVED


class PoolSettings(BaseModel):
    """All but the first are read only with `tool_pool_mode` nomad or modal, and by the environment's own code."""

    pool_url: Annotated[str | None, HOW] = Field(
        default=None, description="Address of the pool, for the backend 'pool'; null: the pool of this machine."
    )

    tool_pool_mode: Annotated[Literal["default", "nomad", "modal"], REMOVED] = "default"
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

    @model_validator(mode="after")
    def _use_pool(self) -> Self:
        for name, value in self.of_pool().items():
            if name in type(self).model_fields and (name not in self.model_fields_set or name == "terminal_backend"):
                setattr(self, name, value)
        return self

    def of_pool_url(self) -> dict[str, Any]:
        """Options of the backend."""
        named = self.pool_url is not None and getattr(self, "terminal_backend", "") == "pool"
        return {"url": self.pool_url} if named else {}

    def of_pool(self) -> dict[str, Any]:
        """The settings of today that those of the removed stack are; none with `tool_pool_mode` default.

        Raises:
            ValueError: one cannot be kept.
        """
        if self.tool_pool_mode == "default":
            return {}
        from lachesis.settings.old_pools import of_pool

        return of_pool(self)
