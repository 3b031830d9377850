"""Environments of `verifiers` 1 (0.4.0): modules that export a `Taskset`, and may export an `Env` and a `Harness`.

    python -m lachesis_compat.guests.verifiers process --env.module my_tasks --env.module_args '{difficulty: hard}'

Its environment makes the requests, serves its tools and scores; judges with clients of their own are called as usual,
and are not recorded. A task is an item, the trace's reward the score, its parts and metrics the components.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, overload

from pydantic import Field

from backends.errors import SettingsError, cannot_read
from lachesis.loop.outcome import Outcome
from lachesis.rewards.reward import Reward
from lachesis.settings.chosen import is_chosen
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_compat.guests.guest_env import GuestEnv, GuestFailed, GuestVerdict
from lachesis_tokens.endpoint.recorded import open_recording

if TYPE_CHECKING:
    from lachesis.loop.loop import HermesAgentLoop
    from lachesis_tokens.endpoint import Recording

log = logging.getLogger(__name__)

VERSION = "0.4.0"
_OUTCOMES = {
    "max_turns": Outcome.MAX_TURNS,
    "max_input_tokens": Outcome.CONTEXT_EXHAUSTED,
    "max_output_tokens": Outcome.CONTEXT_EXHAUSTED,
    "max_total_tokens": Outcome.CONTEXT_EXHAUSTED,
    "agent_timeout": Outcome.TIMEOUT,
}
"""By the trace's stop condition; others are completed."""
_INFRA = frozenset({"ProviderError", "SandboxError", "TunnelError", "InterceptionError"})
"""Errors of verifiers that say nothing about the agent, and that another try may not meet."""
_NO_RETRIES = {"max_retries": 0, "rules": []}


class VerifiersConfig(HermesAgentEnvConfig):
    """Settings of `VerifiersEnv`."""

    module: str = Field(default="", description="Module that exports a Taskset, a file of one, or an id of the hub.")
    module_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the taskset; a name with a dot is one of the environment, such as agent.harness.id.",
    )
    trained_agent: str | None = Field(
        default=None, description="The agent whose tokens and reward count; default: the only one that is trainable."
    )


class VerifiersEnv(GuestEnv):
    """An environment of verifiers 0.4.0."""

    name = "verifiers"
    env_config_cls = VerifiersConfig
    config: VerifiersConfig
    guest: Any
    """The `verifiers.v1.Env`."""

    @property
    def run_name(self) -> str:
        return f"verifiers-{_module(self.config.module)}"

    def guest_modules(self) -> list[str]:
        name = self.config.module
        return [name if name.endswith(".py") else _module(name)]

    async def setup(self) -> None:
        limits = {"max_turns": "max_agent_turns", "max_output_tokens": "rollout_token_budget"}
        chosen = {
            own: getattr(self.config, name)
            for own, name in limits.items()
            if is_chosen(self.config, name) and getattr(self.config, name) is not None
        }
        self.guest = load(self.config.module, self.config.module_args, chosen)
        _check_tool_servers(self.config.module, self.guest)
        for name, harness in self.guest.config.agent_harnesses().items():
            if harness.id != "lachesis":
                log.warning("%s: the agent %r is run by verifiers' harness %r", self.run_name, name, harness.id)
        try:
            self._tasks = _Tasks(self.guest.taskset)
            first = self._tasks.task(0) if len(self._tasks) else None
        except Exception as error:
            reason = f"its tasks cannot be loaded: {type(error).__name__}: {error}"
            raise SettingsError(f"env.module {self.config.module}: {reason}") from error
        runtimes = {getattr(getattr(value, "runtime", None), "type", None) for _, value in self.guest.config}
        if first is not None and (first.data.image or first.NEEDS_CONTAINER) and runtimes <= {None, "subprocess"}:
            raise SettingsError(
                f"env.module {self.config.module}: its tasks run in containers ({first.data.image or 'any image'}). "
                "Next step: choose a runtime of verifiers, for example --env.module_args '{agent.runtime.type: docker}'"
            )

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        async with super().running(training=training):
            from verifiers.v1 import EvalClientConfig

            # One client for all rollouts: verifiers keeps those that it makes. It names the trace in each request.
            url = f"{self.endpoint.root_url}/v1"
            self._client = EvalClientConfig(base_url=url, api_key_var="LACHESIS_RECORDING_HAS_NO_KEY")
            async with self.guest.serving():
                yield

    def rows(self) -> Sequence[Any]:
        return self._tasks

    def eval_rows(self) -> Sequence[Any]:
        return self._tasks

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        system, prompt = item.get("system_prompt"), item.get("prompt") or []
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return [{"role": "system", "content": system}, *messages] if system else messages

    async def play(self, item: Any, recording: Recording, settings: HermesAgentLoop) -> GuestVerdict:
        """One episode, with its scores."""
        from verifiers.v1 import ModelContext, SamplingConfig

        traces: list[Any] = []
        others: list[Recording] = []

        def begin(trace: Any) -> None:
            agent = trace.agent
            if agent.trainable if self.config.trained_agent is None else agent.name == self.config.trained_agent:
                traces.append(trace)
                self.endpoint.accept_session(trace.id, recording)
                return
            others.append(open_recording(self.endpoint, settings))  # the model answers it, and nothing is trained
            self.endpoint.accept_session(trace.id, others[-1])

        context = ModelContext(self.server_configs[0].model_name, self._client, SamplingConfig())
        seconds = settings.limits.max_seconds
        try:
            # The agent's own time is limited in its task, so that what it did in it is scored.
            async with asyncio.timeout(None if seconds is None else seconds + self.config.reward_timeout) as clock:
                slot = self.guest.slots(self._tasks.task(item["idx"], seconds))[0]
                episode = await self.guest.run_slot(slot, context, on_trace=begin)
        except Exception as raised:
            acting = any(trace.timing.agent.start and not trace.timing.agent.end for trace in traces)
            if clock.expired() and acting:
                return GuestVerdict(Outcome.TIMEOUT, f"the rollout took longer than {seconds:g} s")
            what = "took too long to set up or to score" if clock.expired() else f"raised {type(raised).__name__}"
            return GuestVerdict(Outcome.COMPLETED, f"the environment {what}", failure=raised)
        finally:
            for other in others:
                await other.close()
        return self._verdict(episode, [trace for trace in traces if trace in episode.traces], recording, others)

    def _verdict(
        self, episode: Any, traces: list[Any], recording: Recording, others: Sequence[Recording]
    ) -> GuestVerdict:
        error = next((other.error for other in others if other.error is not None), None)
        if error is not None:
            return GuestVerdict(Outcome.INFRA_ERROR, f"another agent's request failed: {error}", error=error)
        if not self.guest.complete(episode):
            return _failed(episode, recording)
        names = sorted({trace.agent.name for trace in traces})
        if len(names) != 1:
            agents = ", ".join(names or sorted({trace.agent.name for trace in episode.traces}))
            reason = f"{len(names)} agents are to be trained of {agents}; name one with --env.trained_agent"
            return GuestVerdict(Outcome.COMPLETED, reason, failure=GuestFailed(reason))
        last, condition = traces[-1], traces[-1].stop_condition or "no stop condition"
        if last.is_timeout and condition not in _OUTCOMES:
            failure = GuestFailed(f"the environment's time for its {condition.partition('_')[0]} was over")
            return GuestVerdict(Outcome.COMPLETED, condition, failure=failure)
        if recording.limit is not None:
            return GuestVerdict(Outcome.CONTEXT_EXHAUSTED, recording.limit, state=traces)
        if condition not in _OUTCOMES and last.calls and last.calls[-1].finish_reason == "length":
            return GuestVerdict(Outcome.CONTEXT_EXHAUSTED, f"{condition}, after an answer was cut off", state=traces)
        return GuestVerdict(_OUTCOMES.get(condition, Outcome.COMPLETED), condition, state=traces)

    async def score(self, item: Any, verdict: GuestVerdict) -> Reward | None:
        """The reward of the agent's trace; the mean where it ran several times in one episode."""
        parts = []
        for trace in verdict.state:
            if not trace.rewards:
                raise GuestFailed("nothing scores this rollout: the task has no @reward, and its environment gave none")
            if None in trace.rewards.values():
                return None
            metrics = {name: value for name, value in trace.metrics.items() if value is not None}
            parts.append({**metrics, **{name: reward.score for name, reward in trace.rewards.items()}})
        values = {
            name: [part[name] for part in parts if name in part] for name in dict.fromkeys(k for p in parts for k in p)
        }
        means = {name: fmean(numbers) for name, numbers in values.items()}
        components = {name: value for name, value in means.items() if math.isfinite(value)}
        return Reward(fmean(trace.reward for trace in verdict.state), components)


class _Tasks(Sequence[dict[str, Any]]):
    """The tasks as items, read when they are needed: a taskset may have no end."""

    def __init__(self, taskset: Any) -> None:
        self._more: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []
        self._length = sys.maxsize if not taskset.bounded else 0
        if taskset.bounded:
            self._read = list(self._more)
            self._length = len(self._read)

    def __len__(self) -> int:
        return self._length

    def task(self, place: int, seconds: float | None = None) -> Any:
        """A task. Its agent has at most `seconds`."""
        while len(self._read) <= place:
            self._read.append(next(self._more))
        task = self._read[place]
        if seconds is None:
            return task
        limits = task.data.timeout
        agent = seconds if limits.agent is None else min(seconds, limits.agent)
        return task.with_data(timeout=limits.model_copy(update={"agent": agent}))

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return self.task(place).data.model_dump(mode="json", exclude_defaults=True)


def _failed(episode: Any, recording: Recording) -> GuestVerdict:
    """Of an episode that verifiers calls no result."""
    if episode.is_timeout:
        return GuestVerdict(Outcome.TIMEOUT, episode.errors[-1].message)
    errors = [trace.errors[-1] for trace in episode.traces if not trace.ok and trace.errors] + episode.errors
    if not errors:
        return GuestVerdict(Outcome.COMPLETED, "no error", failure=GuestFailed("the episode failed without an error"))
    found = next((error for error in errors if error.type in _INFRA), errors[-1])
    reason = f"{found.type}: {found.message}"
    refused = found.type == "ProviderError" and 400 <= (found.status_code or 0) < 500
    if refused and recording.limit is not None:
        return GuestVerdict(Outcome.CONTEXT_EXHAUSTED, recording.limit)
    failure = GuestFailed(f"{reason}\n{found.traceback or ''}".rstrip())
    if found.type in _INFRA and not refused:
        return GuestVerdict(Outcome.INFRA_ERROR, reason, error=failure)
    return GuestVerdict(Outcome.COMPLETED, reason, failure=failure)


def load(module: str, arguments: Mapping[str, Any], limits: Mapping[str, int] | None = None) -> Any:
    """The `verifiers.v1.Env` of a module. Raises `SettingsError`.

    Args:
        arguments: see `VerifiersConfig.module_args`.
        limits: the most that the settings of its agents may allow.
    """
    if not module:
        raise SettingsError("no environment is named; set --env.module to a module that exports a Taskset")
    try:
        import verifiers
    except ImportError as error:
        raise SettingsError(f"verifiers is not installed here ({error}); pip install verifiers=={VERSION}") from error
    if verifiers.__version__ != VERSION:
        raise SettingsError(
            f"verifiers {verifiers.__version__} is installed, and {VERSION} is needed; pip install verifiers=={VERSION}"
        )
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise SettingsError(f"env.module: {cannot_read(module)}")
        sys.path.insert(0, str(Path(module).resolve().parent))
    # Its environments may take these signals, which are Lachesis' here.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        return load_environment(resolve_env_config(_settings(_module(module), arguments, limits or {})))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        old = hasattr(sys.modules.get(_module(module)), "load_environment")
        reason = "load_environment is of verifiers before version 1; export a Taskset instead" if old else str(error)
        raise SettingsError(f"env.module {module}: {reason}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _settings(module: str, arguments: Mapping[str, Any], limits: Mapping[str, int]) -> dict[str, Any]:
    """The settings of verifiers' environment, with a runtime and a harness of this machine where none are chosen."""
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    from lachesis_compat.guests.verifiers_harness import ID

    settings: dict[str, Any] = {"taskset": {"id": module}, "interception": {"type": "server"}, "retries": _NO_RETRIES}
    for name, value in arguments.items():
        *parents, last = name.removeprefix("env.").split(".") if "." in name else ("taskset", name)
        place = settings
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    for name, field in env_config_type(module, settings.get("id", "")).model_fields.items():
        own = field.default
        if not hasattr(own, "harness"):
            continue  # no agent
        agent = settings.setdefault(name, {})
        agent["retries"] = _NO_RETRIES  # a rollout is tried again as a whole
        if "runtime" not in own.model_fields_set:  # verifiers' own default is a cloud
            agent.setdefault("runtime", {}).setdefault("type", "subprocess")
        # Its `null` does what ours does. `bash`, where nobody chose it, is a shell, which is this machine's here.
        harness = default_harness_id(module) if own.harness is None else own.harness.id
        on_this_machine = agent.get("runtime", {}).get("type") == "subprocess"
        if harness == "null" or (harness == "bash" and own.harness is None and on_this_machine):
            agent.setdefault("harness", {}).setdefault("id", ID)
        for limit, most in limits.items():
            given = agent.get(limit, getattr(own, limit))
            agent[limit] = most if given is None else min(given, most)
    return settings


def _check_tool_servers(module: str, env: Any) -> None:
    """Raise `SettingsError` if the processes of the tool servers could not import their modules."""
    taskset = env.taskset
    servers = [*taskset.toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)]
    for name in {type(server).__module__ for server in servers if not server.config.url}:
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        if subprocess.run([sys.executable, "-c", find, name], cwd="/", capture_output=True, check=False).returncode:
            folder = Path(sys.modules[name].__file__ or "").resolve().parent
            raise SettingsError(
                f"env.module {module}: its tools are processes of their own, which cannot import {name}. "
                f"Next step: install it as a package, or set PYTHONPATH={folder}"
            )


def _module(name: str) -> str:
    """The name of the module that a file, a hub id or a module's name refers to."""
    return Path(name).stem if name.endswith(".py") else name.rpartition("/")[2].partition("@")[0].replace("-", "_")


if __name__ == "__main__":
    VerifiersEnv.cli()
