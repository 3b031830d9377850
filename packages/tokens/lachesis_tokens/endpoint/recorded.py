"""Environments whose agent is not our loop: it asks a recording model endpoint, and every token of it is kept."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from backends.errors import SettingsError
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.settings.chosen import is_chosen

if TYPE_CHECKING:
    from lachesis.loop.loop import HermesAgentLoop
    from lachesis.loop.rollout_player import Agent, RolloutPlayer
    from lachesis_tokens.endpoint import Recording, RecordingEndpoint
    from lachesis_tools import ToolSession

log = logging.getLogger(__name__)


class RecordedEnv(HermesAgentBaseEnv):
    """A subclass writes `agent_for`, and the rest as for any environment."""

    without_effect: ClassVar[Sequence[str]] = (
        *("enabled_toolsets", "disabled_toolsets", "ephemeral_system_prompt", "prefill_messages"),
        *("max_tool_calls", "max_resamples", "max_faulty_turns"),
        *("compress_context_at", "compress_context_to", "compress_context_keep", "compress_context_with"),
    )
    """Settings of the agent loop that the agent has in its own way, or not at all."""
    takes_follow_ups = False
    _endpoint: RecordingEndpoint | None = None

    @abstractmethod
    def agent_for(self, item: Any, settings: HermesAgentLoop, session: ToolSession) -> Agent:
        """The program that plays one rollout. `settings` is the loop that it replaces, with the limits of the run."""

    @property
    def endpoint(self) -> RecordingEndpoint:
        """It lives as long as the run."""
        if self._endpoint is None:
            raise RuntimeError("the endpoint is not running; use the environment inside `async with env.running()`")
        return self._endpoint

    def tool_definitions(self) -> list[dict[str, Any]]:
        """None: the agent brings its own tools."""
        return []

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        """See `HermesAgentBaseEnv.running`."""
        from lachesis_tokens.endpoint import RecordingEndpoint

        if type(self).tools_for is not HermesAgentBaseEnv.tools_for or self.step_rewards:
            raise SettingsError(
                f"{self.run_name}: tools_for and step_rewards have no effect here: the agent brings its own tools. "
                "Remove them, and score in compute_reward"
            )
        for name in self.without_effect:
            if is_chosen(self.config, name):
                log.warning("%s: env.%s has no effect: the agent is not Lachesis' loop", self.run_name, name)
        async with super().running(training=training), RecordingEndpoint(self.server) as endpoint:
            self._endpoint = endpoint
            try:
                yield
            finally:
                self._endpoint = None

    def player_for(self, item: Any) -> RolloutPlayer:
        player = super().player_for(item)
        return replace(player, make_loop=partial(self._agent, player, item))

    def _agent(self, player: RolloutPlayer, item: Any, *args: Any, task_id: str, **kwargs: Any) -> Agent:
        settings: Any = player.make_loop(*args, task_id=task_id, **kwargs)
        return self.agent_for(item, settings, player.sessions.get(task_id))


def open_recording(
    endpoint: RecordingEndpoint,
    settings: HermesAgentLoop,
    *,
    max_requests: int | None = None,
    rollout_token_budget: int | None = None,
) -> Recording:
    """A recording with the sampling parameters of the run."""
    return endpoint.open(
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        extra_body=settings.extra_body,
        split=settings.split,
        max_requests=max_requests,
        rollout_token_budget=rollout_token_budget,
        affinity=getattr(settings.server, "affinity", None),
        finish_abandoned=True,
    )
