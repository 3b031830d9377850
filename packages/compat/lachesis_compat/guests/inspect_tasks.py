"""Tasks of Inspect (`inspect-ai`): one sample of the task's dataset is an item, the value of a scorer is the reward.

    python -m lachesis_compat.guests.inspect_tasks process --env.task my_task.py@my_task --env.task_args '{hard: true}'

Inspect runs the rollout: solvers, tools, sandboxes, limits and scorers are the task's own. One eval runs as long as
Lachesis' run does, and each rollout is a sample that is added to it. Requests to the model while a scorer runs are not
recorded.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from backends.errors import SettingsError
from lachesis.loop.outcome import Outcome
from lachesis.rewards.reward import Reward
from lachesis.settings.chosen import is_chosen
from lachesis.settings.setting_facts import HOW
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_compat.guests.guest_env import GuestEnv, GuestFailed, GuestVerdict
from lachesis_compat.guests.inspect_feed import Feed

if TYPE_CHECKING:
    from lachesis.loop.loop import HermesAgentLoop
    from lachesis_tokens.endpoint import Recording

VERSION = "0.3.285"
_OUTCOMES = {
    "message": Outcome.MAX_TURNS,
    "turn": Outcome.MAX_TURNS,
    "token": Outcome.CONTEXT_EXHAUSTED,
    "context": Outcome.CONTEXT_EXHAUSTED,
    "cost": Outcome.CONTEXT_EXHAUSTED,
    "time": Outcome.TIMEOUT,
    "working": Outcome.TIMEOUT,
}
"""By the kind of limit that ended a sample."""
_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_AT_ONCE = 1_000_000
"""Inspect's limits of samples and requests at once: those of the run hold."""


class InspectConfig(HermesAgentEnvConfig):
    """Settings of `InspectEnv`."""

    task: str = Field(default="", description="The task as Inspect names it: FILE.py@TASK, or PACKAGE/TASK.")
    task_args: dict[str, Any] = Field(default_factory=dict, description="Arguments of the task.")
    scorer: str | None = Field(
        default=None, description="Scorer that gives the reward, NAME or NAME.KEY; default: the task's only one."
    )
    model_roles: dict[str, str] = Field(
        default_factory=dict, description="Inspect's models by role, for example '{grader: openai/gpt-4o}'."
    )
    inspect_log_dir: Annotated[str | None, HOW] = Field(
        default=None, description="Folder of Inspect's own log; default: none is kept."
    )


class InspectEnv(GuestEnv):
    """A task of Inspect 0.3.285."""

    name = "inspect"
    env_config_cls = InspectConfig
    config: InspectConfig

    @property
    def run_name(self) -> str:
        return f"inspect-{self.config.task.rpartition('@')[2].rpartition('/')[2].removesuffix('.py')}"

    def guest_modules(self) -> list[str]:
        file = self.config.task.partition("@")[0]
        return [file] if file.endswith(".py") else []

    async def setup(self) -> None:
        self._task = load(self.config.task, self.config.task_args)
        scorers = self._task.scorer or []
        if not scorers:
            raise SettingsError(f"env.task {self.config.task} has no scorer, so there is no reward")
        if len(scorers) > 1 and self.config.scorer is None:
            raise SettingsError(f"env.task {self.config.task} has {len(scorers)} scorers; choose one with --env.scorer")
        self._samples = {str(sample.id): sample for sample in _with_ids(self._task.dataset)}
        self._items = [_item(sample) for sample in self._samples.values()]

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        async with super().running(training=training):
            seconds = self.config.rollout_timeout or math.inf
            if training and self.config.worker_timeout > 0:
                seconds = min(seconds, self.config.worker_timeout)
            self._feed = Feed()
            self._feed.evaluation = asyncio.create_task(self._eval(seconds))
            try:
                yield
            finally:
                await self._feed.end()

    async def _eval(self, seconds: float) -> None:
        """Inspect's eval, which lasts until the feed ends."""
        from inspect_ai import eval_async, task_with
        from inspect_ai.util._display import init_display_type
        from openai import AsyncOpenAI

        from lachesis_compat.guests.inspect_model import begin, policy

        config = self.config
        init_display_type("none")
        seconds = min(seconds, self._task.time_limit or math.inf)
        limits: dict[str, Any] = {} if math.isinf(seconds) else {"time_limit": math.ceil(seconds)}
        if is_chosen(config, "max_agent_turns"):
            limits["turn_limit"] = min(config.max_agent_turns, self._task.turn_limit or _AT_ONCE)
        if config.rollout_token_budget is not None:
            limits["token_limit"] = f"output:{config.rollout_token_budget}"
        with tempfile.TemporaryDirectory() as none:
            # A failed request makes the rollout invalid, so nobody tries it again: the model server's client does.
            async with AsyncOpenAI(base_url="http://none", api_key="none", max_retries=0, timeout=None) as client:
                model = policy(self.server_configs[0].model_name, self.endpoint, client)
                own = self._task.setup or []
                setup = [begin(self._feed.recording_of), *(own if isinstance(own, list) else [own])]
                logs = await eval_async(
                    task_with(self._task, dataset=self._feed.source(), setup=setup, model=model, epochs=1),
                    model=model,
                    model_roles=dict(config.model_roles),
                    log_dir=config.inspect_log_dir or none,
                    log_samples=config.inspect_log_dir is not None,
                    log_realtime=False,
                    score_display=False,
                    ctl_server=False,
                    fail_on_error=False,
                    max_samples=_AT_ONCE,
                    max_connections=_AT_ONCE,
                    max_retries=0,
                    **limits,
                )
        for log in logs:
            if log.error is not None:  # Inspect writes it into its log, and raises nothing
                raise GuestFailed(f"Inspect's eval has ended: {log.error.message}\n{log.error.traceback.rstrip()}")

    def rows(self) -> Sequence[Any]:
        return self._items

    def eval_rows(self) -> Sequence[Any]:
        return self._items

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        given = item["input"]
        return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)

    async def play(self, item: Any, recording: Recording, settings: HermesAgentLoop) -> GuestVerdict:
        """One sample of the eval, scored."""
        try:
            sample = await self._feed.play(self._samples[str(item["id"])], recording)
        except GuestFailed as failed:
            return GuestVerdict(Outcome.COMPLETED, str(failed), failure=failed)
        if sample.error is not None:
            failure = GuestFailed(f"the sample ended with an error\n{sample.error.traceback.rstrip()}")
            return GuestVerdict(Outcome.COMPLETED, f"the sample ended with an error: {sample.error.message}", failure)
        if sample.limit is not None:
            reason = sample.limit.reason or f"{sample.limit.type} limit of {sample.limit.limit:g}"
            if sample.limit.type == "operator":
                return GuestVerdict(Outcome.COMPLETED, reason, GuestFailed(f"the sample was ended: {reason}"))
            return GuestVerdict(_OUTCOMES.get(sample.limit.type, Outcome.COMPLETED), reason, state=sample)
        stopped = sample.output.stop_reason
        if stopped == "content_filter":
            return GuestVerdict(Outcome.REFUSED, stopped, state=sample)
        cut_off = stopped in ("max_tokens", "model_length")
        return GuestVerdict(Outcome.CONTEXT_EXHAUSTED if cut_off else Outcome.COMPLETED, stopped, state=sample)

    async def score(self, item: Any, verdict: GuestVerdict) -> Reward | None:
        values = _values(verdict.state.scores or {})
        name = self.config.scorer
        if name is None and len(values) == 1:
            (name,) = values
        if name is None or name not in values:
            wanted = "it is not clear which value is the reward" if name is None else f"no scorer gave {name!r}"
            raise GuestFailed(f"{wanted}; there are {', '.join(values) or 'none'}: set --env.scorer")
        numbers = {of: number for of, value in values.items() if (number := _number(value)) is not None}
        if name not in numbers:
            if values[name] is None or (isinstance(values[name], float) and math.isnan(values[name])):
                return None
            raise GuestFailed(f"the value of scorer {name!r} is not a score: {values[name]!r}")
        return Reward(numbers[name], numbers)


def load(spec: str, arguments: Mapping[str, Any]) -> Any:
    """The `inspect_ai.Task` that a spec names. Raises `SettingsError`."""
    if not spec:
        raise SettingsError("no task is named; set --env.task to FILE.py@TASK")
    try:
        import inspect_ai
        from inspect_ai._eval.loader import load_tasks
    except ImportError as error:
        raise SettingsError(f"Inspect is not installed here ({error}); pip install inspect-ai=={VERSION}") from error
    if not hasattr(inspect_ai, "SampleSource"):
        raise SettingsError(f"inspect-ai {inspect_ai.__version__} is too old; pip install inspect-ai=={VERSION}")
    try:
        tasks = load_tasks([spec], dict(arguments))
    except Exception as error:
        raise SettingsError(f"env.task {spec} cannot be loaded: {type(error).__name__}: {error}") from error
    if len(tasks) != 1:
        names = ", ".join(task.name for task in tasks) or "none"
        raise SettingsError(f"env.task {spec} names {len(tasks)} tasks ({names}); write FILE.py@TASK")
    return tasks[0]


def _with_ids(dataset: Any) -> list[Any]:
    samples = list(dataset)
    for number, sample in enumerate(samples, 1):
        if sample.id is None:
            sample.id = number
    return samples


def _item(sample: Any) -> dict[str, Any]:
    given = sample.input
    if not isinstance(given, str):
        given = [message.model_dump(include={"role", "content"}, mode="json") for message in given]
    return {"id": sample.id, "input": given, "target": sample.target}


def _values(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all scorers; those of a scorer with several as NAME.KEY."""
    values: dict[str, Any] = {}
    for name, score in scores.items():
        value = score.value
        parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
        values |= {name: value} if parts is None else {f"{name}.{key}": part for key, part in parts}
    return values


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _LETTERS.get(value)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


if __name__ == "__main__":
    InspectEnv.cli()
