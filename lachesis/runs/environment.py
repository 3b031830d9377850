"""The part of an environment that the code of runs uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from backends import SandboxSpec
    from lachesis.agent.result import AgentResult
    from lachesis.agent.rollout import Rollout, RolloutPlayer
    from lachesis.errors import SettingsError
    from lachesis.inference import Router, TokenServer
    from lachesis.runs.results import RunResult, ServeResult
    from lachesis.runs.settings import HermesAgentEnvConfig
    from lachesis.runs.wandb_tracking import Tracker
    from lachesis.testing.reference_server import Policy
    from lachesis.tools import ToolRegistry


class Environment(Protocol):
    """See `HermesAgentBaseEnv` for what each of these means."""

    name: ClassVar[str | None]
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]]
    config: Any
    server_configs: list[Any]
    testing: bool
    console: Console
    tools: ClassVar[ToolRegistry]
    tracker: Tracker
    max_num_workers: int
    n_groups_to_process: int
    group_size_to_process: int
    curr_step: int
    wandb_project: str | None
    wandb_group: str | None
    _class_error: ClassVar[SettingsError | None]
    compute_group_reward: Callable[..., Any] | None
    needs_sandboxes: ClassVar[bool]

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None: ...
    @classmethod
    def config_init(cls) -> tuple[Any, list[Any]]: ...

    # Commands.

    async def env_manager(self) -> ServeResult: ...
    async def process_manager(self) -> RunResult: ...
    async def _run_evaluate(self) -> Any: ...

    # Parts of a run.

    @property
    def run_name(self) -> str: ...
    @property
    def server(self) -> Router | TokenServer: ...
    @property
    def player(self) -> RolloutPlayer: ...

    async def setup(self) -> None: ...
    async def teardown(self) -> None: ...
    async def get_next_item(self) -> Any: ...
    async def get_eval_items(self) -> Sequence[Any]: ...
    async def compute_reward(self, item: Any, result: AgentResult, ctx: Any) -> Any: ...
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...
    async def evaluate_log(self, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> None: ...
    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None: ...
    def sandbox_for(self, item: Any, spec: SandboxSpec) -> SandboxSpec: ...
    def reference_policy(self) -> Policy | None: ...
    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]: ...
    def initial_messages(self, item: Any) -> list[dict[str, Any]]: ...
    def tool_definitions(self) -> list[dict[str, Any]]: ...
    def running(self, *, training: bool = False) -> AbstractAsyncContextManager[None]: ...
    async def play_rollout(
        self, item: Any, item_key: str, index: int, tools: Sequence[Mapping[str, Any]], *, evaluation: bool = False
    ) -> Rollout: ...
