"""What a run starts and ends: the dataset, the sandboxes, the model servers, and the player of rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from backends import Backend, BackendError, BackendUnavailable, SandboxSpec, create_backend
from lachesis.agent.loop import LoopLimits
from lachesis.agent.rollout import RolloutPlayer, RolloutSettings
from lachesis.agent.scorer import Scorer
from lachesis.inference import Router, TokenServer
from lachesis.runs.environment import Environment
from lachesis.runs.model_servers import ServerConfigError, start_servers
from lachesis.runs.settings import HermesAgentEnvConfig
from lachesis.tools import ToolSessions

log = logging.getLogger(__name__)


@asynccontextmanager
async def run_resources(
    env: Environment, server: Router | TokenServer | None, *, training: bool
) -> AsyncIterator[tuple[Router | TokenServer, RolloutPlayer]]:
    """Start everything, in the order in which failures are cheapest, and end it again.

    Args:
        server: the one that exists already; None starts what `env.server_configs` name.
        training: a model that is started here is used with exact tokens.

    Raises:
        BackendUnavailable: the sandboxes cannot be used on this machine.
        InferenceError: no model server answers, or one rejects the key.
        ToolsetError: the toolsets name something that does not exist or is unavailable.
    """
    config: HermesAgentEnvConfig = env.config
    async with AsyncExitStack() as stack:
        try:
            backend = create_backend(config.terminal_backend, **config.backend_options())
        except ValueError as error:
            raise BackendUnavailable(f"terminal_backend {config.terminal_backend!r}: {error}") from error
        try:
            spec = config.sandbox_spec({"environment": env.run_name})
        except ValueError as error:
            raise BackendUnavailable(f"the settings of the sandboxes: {error}") from error
        if env.tool_definitions():
            await _check_backend(backend, spec)
        sessions = ToolSessions(backend, spec, terminal_timeout=float(config.terminal_timeout))
        stack.push_async_callback(sessions.close_all)
        await env.setup()
        stack.push_async_callback(env.teardown)
        if server is None:
            server = await start_servers(
                env.server_configs, settings=config, policy=env.reference_policy(), stack=stack, training=training
            )
        else:
            stack.push_async_callback(server.close)
        if not env.testing:
            await server.check()
        if isinstance(server, TokenServer):
            await _check_template(env, server)
        player = RolloutPlayer(
            _rollout_settings(config, training=training),
            server=server,
            sessions=sessions,
            registry=env.tools,
            scorer=Scorer(env.run_name, env.compute_reward, env.compute_group_reward, timeout=config.reward_timeout),
        )
        yield server, player


def _rollout_settings(config: HermesAgentEnvConfig, *, training: bool) -> RolloutSettings:
    seconds = config.rollout_timeout
    if training and config.worker_timeout > 0:  # a rollout of `serve` ends itself before the group is given up
        seconds = min(float(config.worker_timeout), seconds or float(config.worker_timeout))
    return RolloutSettings(
        max_turns=config.max_agent_turns,
        max_tokens=config.max_token_length,
        extra_body=config.extra_body,
        ephemeral_system_prompt=config.ephemeral_system_prompt,
        prefill_messages=config.prefill_messages,
        limits=LoopLimits(
            max_tool_calls=config.max_tool_calls,
            max_total_tokens=config.rollout_token_budget,
            max_seconds=seconds,
            max_resamples=config.max_resamples,
            max_faulty_turns=config.max_faulty_turns,
        ),
        max_infra_retries=config.max_infra_retries,
    )


async def _check_template(env: Environment, server: TokenServer) -> None:
    """Print how the chat template continues conversations; a template that hides the tools is an error."""
    template = await asyncio.to_thread(lambda: server.prompts.verdict)
    env.console.print(template.describe(), markup=False, highlight=False, soft_wrap=True)
    if env.tool_definitions() and not template.shows_tools:
        raise ServerConfigError(
            "the model's chat template does not show it the tools; set --env.chat_template to one that does "
            "(lachesis/inference/templates/hermes.jinja fits models that speak ChatML), or "
            "--env.enabled_toolsets '[]'"
        )


async def _check_backend(backend: Backend, spec: SandboxSpec) -> None:
    """Check before the first group that the sandboxes can be made, and remove those that killed runs left.

    Raises:
        BackendUnavailable: what is missing, and the next step.
    """
    available = await backend.check()
    if not available.ok:
        raise BackendUnavailable(f"backend {backend.name!r}: {available.detail}; {available.fix}")
    try:
        for info in await backend.reap():
            log.warning("removed %s sandbox %s of run %s, which was killed", info.backend, info.id, info.run_id or "?")
    except BackendError as error:
        log.warning("the sandboxes of killed runs could not be removed: %s", error)
    if spec != SandboxSpec(lifetime=spec.lifetime, env=spec.env, network=spec.network, labels=spec.labels):
        try:  # an image or a limit that was never tried
            sandbox = await backend.create(spec)
        except BackendUnavailable:
            raise
        except BackendError as error:  # it may pass, and rollouts are retried
            log.warning("a first sandbox could not be made: %s", error)
        else:
            await sandbox.close()
