"""The resources that a run starts and ends: the dataset, sandboxes, model servers, and the player of rollouts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from backends import (
    Backend,
    BackendError,
    BackendUnavailable,
    ImageUnavailable,
    Lessor,
    SandboxSpec,
    SupportsClose,
    create_backend,
)
from backends.errors import ExitCode
from lachesis.loop.limits import LoopLimits
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.open_runs import OpenRun, opened
from lachesis.loop.rollout_player import RolloutPlayer
from lachesis.other_packages import DATA, TOKENS
from lachesis.runs import own_process
from lachesis.runs.prose import print_prose
from lachesis.runs.reference_policy import ReferencePolicy
from lachesis.runs.silence import SilenceWatch
from lachesis.settings.chosen import is_chosen
from lachesis.settings.class_settings import source_of, without_effect
from lachesis.settings.hooks import of_hook
from lachesis.settings.server_settings import plays_reference, token_engine
from lachesis.settings.setting_facts import LIMITS, with_settings
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client.model_server import tracks_tokens
from lachesis_tools import ToolSessions
from lachesis_tools.toolsets import ToolsetError, resolve_tools

if TYPE_CHECKING:
    from lachesis.loop.context_edits import Compression
    from lachesis.runs.environment import Environment
    from lachesis.runs.judge import Judge
    from lachesis_client.model_server import ModelServer

log = logging.getLogger(__name__)


class UnusableBackendSettings(BackendUnavailable):
    """The settings name no backend, an option that it does not have, or a sandbox that cannot be described."""

    exit_code = ExitCode.SETTINGS


@asynccontextmanager
async def run_resources(
    env: Environment, server: ModelServer | None, *, training: bool
) -> AsyncIterator[tuple[ModelServer, RolloutPlayer, Judge | None]]:
    """Start everything, in the order in which failures are cheapest, and end it again.

    Args:
        server: the one that exists already; None starts what `env.server_configs` name.
        training: it waits for servers that do not answer yet, and rollouts end before their group is given up.

    Raises:
        BackendUnavailable: the sandboxes cannot be used on this machine.
        InferenceError: no model server answers, or one rejects the key.
        ToolsetError: the toolsets name something that does not exist or is unavailable.
    """
    config = env.config
    for message in without_effect(env):
        log.warning(message)
    async with AsyncExitStack() as stack:
        try:
            backend = create_backend(config.terminal_backend, **config.backend_options())
        except ValueError as error:
            raise UnusableBackendSettings(f"terminal_backend {config.terminal_backend!r}: {error}") from error
        if isinstance(backend, SupportsClose):
            stack.push_async_callback(backend.close)
        try:
            spec = config.sandbox_spec({"environment": env.run_name})
        except ValueError as error:
            raise UnusableBackendSettings(f"the settings of the sandboxes: {with_settings(str(error))}") from error
        tools = _tools(env)
        if env.needs_sandboxes or (env.needs_sandboxes is None and (tools or config.mcp or env.prepares_sandboxes)):
            await _check_backend(backend, spec)
        lessor: Backend | Lessor = backend
        if config.terminal_warm:
            from backends.warm import WarmSandboxes

            lessor = WarmSandboxes(backend, config.terminal_warm)
            stack.push_async_callback(lessor.close)
        sessions = ToolSessions(lessor, spec, terminal_timeout=float(config.terminal_timeout))
        stack.push_async_callback(sessions.close_all)
        if config.mcp:
            from lachesis_tools.mcp.toolset import mcp_tools

            listed = await mcp_tools(config.mcp, sessions)
            env.__dict__["tools"] = env.tools.extended(*(tool for tool in listed if tool.name not in env.tools))
            tools = _tools(env)
        open_run = OpenRun(
            sessions,
            env.tools,
            asyncio.get_running_loop(),
            backend=config.terminal_backend,
            takes_images=config.terminal_backend not in ("local", "ssh"),
            walls=config.terminal_backend != "local" or config.sandbox != "none",
        )
        stack.enter_context(opened(open_run))
        await of_hook(env.setup())
        open_run.after_setup = dict(os.environ)
        _note_without_effect(env, training=training, chats=_only_chats(env, server))
        limits = loop_limits(config, training=training)
        lifetime = sandbox_lifetime(config, limits)  # `setup` may have set it
        sessions.spec = replace(sessions.spec, lifetime=lifetime)
        stack.push_async_callback(env.teardown)
        watch = SilenceWatch(env.console)
        watching = asyncio.create_task(watch.run())
        stack.callback(watching.cancel)

        async def check(clients: Sequence[Any]) -> None:
            from lachesis.runs.model_servers import check_models

            watch.add(env.server_configs, clients)
            if not env.testing:
                await check_models(env, clients, wait=training)

        if server is None and plays_reference(env.server_configs):
            server = ReferencePolicy(env.reference_policy(), env.server_configs[0])
        elif server is None:
            from lachesis.runs.model_servers import start_servers

            server = await start_servers(env.server_configs, settings=config, stack=stack, check=check)
        else:
            stack.push_async_callback(server.close)
            if clients := getattr(server, "servers", ()):
                await check(clients)
        if tracks_tokens(server):
            await TOKENS.load("check")(env, server, tools)
        compression: Compression | None = None
        if config.compress_context_at is not None:
            compression = await DATA.load("context_compression")(config, stack, watch)
        judge: Judge | None = None
        if config.judge_server is not None:
            from lachesis.runs.judge import start_judge

            judge = await start_judge(env, stack, watch, training=training)
        player = RolloutPlayer(
            make_loop=_loop_of_run(config, limits, compression),
            max_infra_retries=config.max_infra_retries,
            server=server,
            sessions=sessions,
            registry=env.tools,
            scorer=env.scorer(),
            budget=config.build_budget_config(),
            score_of_timeout=config.score_of_timeout,
            score_of_agent_fault=config.score_of_agent_fault,
        )
        own_process.started()
        yield server, player, judge


def _tools(env: Environment) -> list[dict[str, Any]]:
    """The environment's tools. An unknown name is an error that says where it is written."""
    try:
        return env.tool_definitions()
    except ToolsetError as error:
        config = env.config
        for field, names in (
            ("enabled", (config.enabled_toolsets, None)),
            ("disabled", (None, config.disabled_toolsets)),
        ):
            try:
                resolve_tools(*names, registry=env.tools)
            except ToolsetError:
                raise ToolsetError(f"{source_of(env, f'{field}_toolsets')}: {error}") from None
        raise


_REMOVED_VARIABLES = tuple(
    f"TERMINAL_{name}" for name in ("CONTAINER_", "CWD", "DAYTONA_", "DOCKER_", "MODAL_", "SINGULARITY_", "SSH_")
)
"""Beginnings of variables that set the sandboxes of the removed Hermes stack."""


def _only_chats(env: Environment, server: ModelServer | None) -> bool:
    """Whether model servers make the prompts, from messages."""
    configs = env.server_configs
    if server is not None:
        from lachesis.runs.reference_policy import ReferencePolicy  # most runs play none

        return not tracks_tokens(server) and not isinstance(server, ReferencePolicy)
    return not plays_reference(configs) and not any(map(token_engine, configs))


def _note_without_effect(env: Environment, *, training: bool, chats: bool) -> None:
    """Name the toolsets that are left out, those that a distribution hides, and what else is not what it seems."""
    notes = []
    config = env.config
    in_force = {
        "TERMINAL_ENV": config.terminal_backend,
        "TERMINAL_LIFETIME_SECONDS": str(config.terminal_lifetime),
        "TERMINAL_TIMEOUT": str(config.terminal_timeout),
    }
    variables = [
        name
        for name, value in sorted(os.environ.items())
        if name.startswith(_REMOVED_VARIABLES) or value != in_force.get(name, value)
    ]
    if variables:
        notes.append(
            f"variables of the removed stack, which settings replace: {', '.join(variables)}; see --env.terminal_*"
        )
    if unknown := sorted(set(config.tool_result_overrides or ()) - set(env.tools)):
        notes.append(f"env.tool_result_overrides names tools that do not exist: {', '.join(unknown)}")
    if lacking := env.agent_tools.left_out():
        named = "; ".join(f"{name!r}: {why}" for name, why in lacking.items())
        notes.append(f"skipped tools that are not available here: {named}")
    if missing := env.agent_tools.missing():
        advice = env.agent_tools.advice(missing)
        notes.append(f"skipped toolsets that have no tools here: {', '.join(missing)}{advice}")
    if config.compress_context_at is not None and training and config.split_rollouts != "all":
        notes.append(
            f"env.compress_context_at cuts rollouts into several contexts, and env.split_rollouts "
            f"{config.split_rollouts} sends one of them; set it to all (with lachesis api)"
        )
    if config.chat_template is not None and chats:
        notes.append(
            "env.chat_template is not used: over chat completions the model server writes the prompts with a template "
            "of its own; --openai.server_type vllm or sglang makes them here, and so does a model that runs here"
        )
    if config.distribution is not None and config.enabled_toolsets is not None:
        notes.append(f"env.enabled_toolsets is not read: env.distribution {config.distribution!r} draws the toolsets")
    for note in notes:
        print_prose(env.console, f"note: {note}", style="yellow")


def _loop_of_run(
    config: HermesAgentEnvConfig, limits: LoopLimits, compression: Compression | None
) -> partial[HermesAgentLoop]:
    return partial(
        HermesAgentLoop,
        max_turns=config.max_agent_turns,
        max_tokens=config.max_token_length,
        extra_body=config.extra_body,
        ephemeral_system_prompt=config.ephemeral_system_prompt,
        prefill_messages=config.prefill_messages,
        compression=compression,
        limits=limits,
    )


def loop_limits(config: HermesAgentEnvConfig, *, training: bool) -> LoopLimits:
    """The budgets of a rollout.

    Without `rollout_timeout`, the agent's time ends before the sandbox does: a sandbox that ends itself under an agent
    which is busy would look like one that failed.
    """
    seconds = config.rollout_timeout
    if seconds is None:
        seconds = max(config.terminal_lifetime / 2, config.terminal_lifetime - config.reward_timeout)
    if training and config.worker_timeout > 0:  # a rollout of `serve` ends itself before the group is given up
        seconds = min(float(config.worker_timeout), seconds)
    return LoopLimits(
        max_tool_calls=config.max_tool_calls,
        rollout_token_budget=config.rollout_token_budget,
        max_seconds=seconds,
        max_waiting=seconds,  # as long again: a server that hangs holds no rollout for ever
        max_resamples=config.max_resamples,
        max_faulty_turns=config.max_faulty_turns,
    )


def sandbox_lifetime(config: HermesAgentEnvConfig, limits: LoopLimits) -> float:
    """Seconds that a sandbox must live: `terminal_lifetime`, or longer if the agent's and the reward's time are.

    The agent could otherwise keep its sandbox busy until it ends.
    """
    own = float(config.terminal_lifetime)
    if config.rollout_timeout is None or limits.max_seconds is None:
        return own + 2 * (limits.max_waiting or 0.0) + config.setup_timeout
    needed = limits.max_seconds + config.reward_timeout
    if own < needed and is_chosen(config, "terminal_lifetime"):
        log.warning(
            "env.terminal_lifetime %g s is less than env.rollout_timeout %g s and env.reward_timeout %g s together: "
            "sandboxes live for these %g s, and for the time that servers take",
            *(own, limits.max_seconds, config.reward_timeout, needed),
        )
    # Twice the reward's time: that of the group comes after it.
    others = 2 * config.reward_timeout + config.setup_timeout
    return max(own, limits.max_seconds + 2 * (limits.max_waiting or 0.0) + others + 60.0)


async def _check_backend(backend: Backend, spec: SandboxSpec) -> None:
    """Check before the first group that the sandboxes can be made, and remove those that killed runs left.

    Raises: BackendUnavailable: with the missing requirement and the next step.
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
        except ImageUnavailable as error:
            raise UnusableBackendSettings(f"env.terminal_image: {error}") from error
        except BackendUnavailable as error:
            raise BackendUnavailable(with_settings(str(error))) from error
        except BackendError as error:
            await _blame_limits(backend, spec, error)
            log.warning("a first sandbox could not be made: %s", error)  # it may pass, and rollouts are retried
        else:
            await sandbox.close()


async def _blame_limits(backend: Backend, spec: SandboxSpec, error: BackendError) -> None:
    """Raises UnusableBackendSettings if a sandbox starts that is as `spec` but without its limits."""
    given = {name: getattr(spec, name) for name in LIMITS if getattr(spec, name) is not None}
    unlimited: dict[str, Any] = dict.fromkeys(given)
    try:
        sandbox = await backend.create(replace(spec, **unlimited))
    except BackendError:
        return
    await sandbox.close()
    if given:
        limits = " or ".join(f"{LIMITS[name]} ({name} is {value})" for name, value in given.items())
        raise UnusableBackendSettings(
            f"no sandbox starts within its limits, and one without them does: {error}; raise {limits}"
        ) from error
