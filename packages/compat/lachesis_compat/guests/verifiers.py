"""Environments of `verifiers` before its version 1: modules with `load_environment`, as the Environments Hub has them.

    python -m lachesis_compat.guests.verifiers process --env.module my_env --env.module_args '{difficulty: hard}'

The package is verifiers 0.1.14, the last one with this interface. Its environment makes the requests, runs its tools
and its rubric; its own judges are called as usual, and are not recorded. Rewards are the rubric's, components its
metrics.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from backends.errors import SettingsError
from lachesis.loop.outcome import Outcome
from lachesis.rewards.reward import Reward
from lachesis.settings.chosen import is_chosen
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_compat.guests.guest_env import GuestEnv, GuestFailed, GuestVerdict

if TYPE_CHECKING:
    from lachesis.loop.loop import HermesAgentLoop
    from lachesis.loop.result import AgentResult
    from lachesis_tokens.endpoint import Recording

log = logging.getLogger(__name__)

VERSION = "0.1.14"
_OUTCOMES = {
    "max_turns_reached": Outcome.MAX_TURNS,
    "prompt_too_long": Outcome.CONTEXT_EXHAUSTED,
    "max_total_completion_tokens_reached": Outcome.CONTEXT_EXHAUSTED,
    "timeout_reached": Outcome.TIMEOUT,
}
"""By the name of the stop condition; others are completed."""


class VerifiersConfig(HermesAgentEnvConfig):
    """Settings of `VerifiersEnv`."""

    module: str = Field(default="", description="Module with load_environment, a file of one, or an id of the hub.")
    module_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of load_environment.")


class VerifiersEnv(GuestEnv):
    """An environment of verifiers 0.1.14."""

    name = "verifiers"
    env_config_cls = VerifiersConfig
    config: VerifiersConfig
    guest: Any
    """The `verifiers.Environment`."""

    @property
    def run_name(self) -> str:
        return f"verifiers-{_module(self.config.module)}"

    def guest_modules(self) -> list[str]:
        name = self.config.module
        return [name if name.endswith(".py") else _module(name)]

    async def setup(self) -> None:
        self.guest = load(self.config.module, self.config.module_args)
        self._limit("max_agent_turns", "max_turns")
        self._limit("rollout_token_budget", "max_total_completion_tokens")
        if self.guest.requires_group_rollouts:
            self.compute_group_reward = self._score_group
        logger = logging.getLogger("verifiers.rubrics")
        logger.setLevel(min(logging.ERROR, logger.level or logging.ERROR))
        if not any(isinstance(handler, _SwallowedErrors) for handler in logger.handlers):
            logger.addHandler(_SwallowedErrors())

    def _limit(self, setting: str, attribute: str) -> None:
        """Lower a limit of the guest to a setting that somebody chose."""
        chosen = getattr(self.config, setting)
        if chosen is None or not is_chosen(self.config, setting):
            return
        if not hasattr(self.guest, attribute):
            log.warning("%s: env.%s has no effect: this kind of environment has no such limit", self.run_name, setting)
            return
        own = getattr(self.guest, attribute)
        setattr(self.guest, attribute, min(own, chosen) if own > 0 else chosen)

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        async with super().running(training=training):
            from openai import AsyncOpenAI

            # A failed request makes the rollout invalid, so the client does not try it again: the model server's does.
            async with AsyncOpenAI(base_url="http://none", api_key="none", max_retries=0, timeout=None) as self._openai:
                yield

    def rows(self) -> Sequence[Any]:
        if self.guest.dataset is None and self.guest.dataset_source is None:
            raise SettingsError(f"{self.run_name} has no dataset to train on; it can be played with `evaluate`")
        rows: Sequence[Any] = self.guest.get_dataset()
        return rows

    def eval_rows(self) -> Sequence[Any]:
        if self.guest.eval_dataset is None and self.guest.eval_dataset_source is None:
            log.warning("%s has no evaluation dataset: its training items are evaluated", self.run_name)
        rows: Sequence[Any] = self.guest.get_eval_dataset()
        return rows

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        prompt = item["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    async def play(self, item: Any, recording: Recording, settings: HermesAgentLoop) -> GuestVerdict:
        """One rollout of the guest, without its rubric."""
        from verifiers.clients import OpenAIChatCompletionsClient
        from verifiers.errors import InfraError, InvalidModelResponseError

        client = self._openai.with_options(base_url=f"{recording.base_url}/v1", api_key=recording.key)
        sampling = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
        seconds = settings.limits.max_seconds
        try:
            async with asyncio.timeout(seconds) as clock:
                state = await self.guest.rollout(
                    item, OpenAIChatCompletionsClient(client), self.server_configs[0].model_name, sampling
                )
        except Exception as raised:
            if clock.expired():
                return GuestVerdict(Outcome.TIMEOUT, f"the rollout took longer than {seconds:g} s")
            return GuestVerdict(Outcome.COMPLETED, f"the environment raised {type(raised).__name__}", failure=raised)
        error, condition = state.get("error"), state.get("stop_condition") or "no stop condition"
        if isinstance(error, InvalidModelResponseError):
            return GuestVerdict(Outcome.MODEL_ERROR, str(error), state=state)
        if isinstance(error, InfraError):
            return GuestVerdict(Outcome.INFRA_ERROR, _error_chain(error), error=error, state=state)
        if error is not None:
            failure = error if isinstance(error, Exception) else GuestFailed(str(error))
            return GuestVerdict(Outcome.COMPLETED, _error_chain(error), failure=failure, state=state)
        if condition == "max_turns_reached" and _is_single_turn(self.guest, state):
            condition = "answered"
        if condition not in _OUTCOMES and state.get("is_truncated"):
            return GuestVerdict(Outcome.CONTEXT_EXHAUSTED, f"{condition}, after an answer was cut off", state=state)
        return GuestVerdict(_OUTCOMES.get(condition, Outcome.COMPLETED), condition, state=state)

    async def discard(self, verdict: GuestVerdict) -> None:
        if verdict.state is not None:
            await self.guest.rubric.cleanup(verdict.state)

    async def score(self, item: Any, verdict: GuestVerdict) -> Reward:
        """The rubric's score. Of an environment that compares whole groups, it comes with the group."""
        state = verdict.state
        if self.compute_group_reward is not None:
            return Reward(0.0)
        try:
            with _swallowed_errors():
                await self.guest.rubric.score_rollout(state)
        finally:
            await self.guest.rubric.cleanup(state)
        return _reward(state)

    async def _score_group(self, item: Any, results: Sequence[AgentResult], ctxs: Any) -> list[Reward]:
        states = [result.verdict.state for result in results]
        try:
            with _swallowed_errors():
                await self.guest.rubric.score_group(states)
        finally:
            for state in states:
                await self.guest.rubric.cleanup(state)
        return [_reward(state) for state in states]


def _is_single_turn(guest: Any, state: Mapping[str, Any]) -> bool:
    """Whether the environment has one turn by its nature: its end is not a limit."""
    import verifiers

    route = (state.get("info") or {}).get("env_id") or ()  # of a group of environments, one name for each level
    for name in [route] if isinstance(route, str) else route:
        guest = guest.env_map.get(name) if isinstance(guest, verifiers.EnvGroup) else guest
    return isinstance(guest, verifiers.SingleTurnEnv)


def load(module: str, arguments: Mapping[str, Any]) -> Any:
    """The `verifiers.Environment` of a module. Raises `SettingsError`."""
    if not module:
        raise SettingsError("no environment is named; set --env.module to a module with load_environment")
    try:
        import verifiers
    except ImportError as error:
        raise SettingsError(f"verifiers is not installed here ({error}); pip install verifiers=={VERSION}") from error
    if verifiers.__version__ != VERSION:
        raise SettingsError(
            f"verifiers {verifiers.__version__} is installed, and {VERSION} is needed, the last version with this "
            f"interface; pip install verifiers=={VERSION}"
        )
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise SettingsError(f"env.module: there is no file {module}")
        sys.path.insert(0, str(Path(module).resolve().parent))
    # Its environments take these signals, which are Lachesis' here.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        guest = verifiers.load_environment(_module(module), **arguments)
    except (ValueError, RuntimeError) as error:
        raise SettingsError(f"env.module {module}: {error}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if isinstance(guest, verifiers.Env):
        raise SettingsError(f"env.module {module} has the interface of verifiers 1 (Taskset), which is not played yet")
    if not guest.score_rollouts:
        raise SettingsError(f"env.module {module} does not score rollouts (score_rollouts=False)")
    return guest


def _module(name: str) -> str:
    """The name of the module that a file, a hub id or a module's name refers to."""
    return Path(name).stem if name.endswith(".py") else name.rpartition("/")[2].replace("-", "_")


def _reward(state: Mapping[str, Any]) -> Reward:
    metrics = state.get("metrics") or {}
    return Reward(state["reward"], {name: value for name, value in metrics.items() if math.isfinite(value)})


def _error_chain(error: Any) -> str:
    """The error and its causes, in one line."""
    parts = []
    while isinstance(error, BaseException):
        parts.append(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        error = error.__cause__
    return " <- ".join(parts) or str(error)


# A rubric logs what a reward function raises, and makes 0.0 of it. That would be a failure as a score.

_swallowed: ContextVar[list[BaseException] | None] = ContextVar("swallowed", default=None)


@contextmanager
def _swallowed_errors() -> Iterator[None]:
    """Raise at the end the first exception of a reward function that a rubric has caught."""
    errors: list[BaseException] = []
    token = _swallowed.set(errors)
    try:
        yield
    finally:
        _swallowed.reset(token)
    if errors:
        raise errors[0]


class _SwallowedErrors(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error, errors = sys.exc_info()[1], _swallowed.get()
        if error is not None and errors is not None and record.funcName.endswith("_reward_func"):
            errors.append(error)


if __name__ == "__main__":
    VerifiersEnv.cli()
