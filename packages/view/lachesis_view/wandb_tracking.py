"""The figures and rollouts of a run in Weights & Biases. The core loads this if `use_wandb` is set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from lachesis.figures.exclusion import WINDOW, Exclusion, Exclusions
from lachesis.figures.figures import Figures
from lachesis.figures.repaired_calls import NAME, RepairedCalls
from lachesis.figures.rollout_records import counted_record
from lachesis.figures.summary import Summary
from lachesis.loop.rollout import Rollout
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_messages.records.groups import stored_messages
from lachesis_view.wandb_run import TrackingError
from lachesis_view.wandb_sender import Sender

CONTENT_LIMIT, CALL_LIMIT, RESULT_LIMIT = 300, 200, 500
"""Characters of reasoning and text, of a call's arguments, and of a tool's result in the rollout table."""
ITEM_LIMIT = 100
"""Items in the table of those with rollouts that were left out."""


class Tracker:
    """Collects the figures of finished groups between two logs, and sends them and a table of rollouts to W&B.

    No group is kept: while a trainer makes no step, nothing is logged for hours.
    """

    def __init__(self) -> None:
        self.exclusions = Exclusions(WINDOW)
        """All rollouts that the run played; with W&B also those of earlier starts that are in its file of groups."""
        self.repaired = RepairedCalls()
        """Of the groups that `serve` has finished."""
        self._shown: Exclusion | None = None
        self._alarmed: set[str] = set()
        self._finished = Figures()
        self._sender: Sender | None = None
        self._rollouts: list[tuple[str, float | None]] = []
        self._keep = 0

    @property
    def on(self) -> bool:
        """Whether there is a W&B run: the only one may have failed, or ended."""
        return self._sender is not None and not self._sender.gone

    @property
    def lost(self) -> bool:
        """Whether W&B failed meanwhile."""
        return self._sender is not None and self._sender.gone

    @asynccontextmanager
    async def tracking(
        self, config: HermesAgentEnvConfig, *, project: str, group: str | None, job: str
    ) -> AsyncIterator[None]:
        """A W&B run around the block; it is finished however the block ends.

        Raises:
            TrackingError: no login; says how to log in, or to do without.
        """
        run = await asyncio.to_thread(_open_run, config, project, group, job)
        self._sender, self._keep = Sender(run), config.num_rollouts_to_keep
        exit_code = 1
        try:
            yield
            exit_code = 0
        finally:
            await self._sender.finished(exit_code)
            if not self._sender.gone:
                self._sender = None

    def count(self, item_key: str, rollouts: Iterable[Rollout]) -> None:
        """Note which rollouts of a played group have a score."""
        self.exclusions.add_group(counted_record(item_key, rollouts))

    def add(self, group: Mapping[str, Any]) -> None:
        """Note a finished group for the next log."""
        self._finished.add(group)
        if self.on:
            for rollout in group["rollouts"]:
                self._rollouts.append((readable(stored_messages(group, rollout)), rollout["reward"]))
            del self._rollouts[: -self._keep or None]

    def take(self) -> Summary:
        """The figures of the groups since the last call; from now on others are collected."""
        taken, self._finished = self._finished, Figures()
        return taken.summary(tests=False)

    async def exclusion_metrics(self) -> dict[str, Any]:
        """Whether being left out depends on something, as of the last look (`Exclusions.latest`); W&B alerts once."""
        if not self.on:
            return {}
        import wandb

        seen = await asyncio.to_thread(self.exclusions.latest)
        metrics: dict[str, Any] = {f"train/{name}": value for name, value in seen.test_metrics().items()}
        if seen is not self._shown and seen.items:
            kinds = [*seen.unscored, *(f"scored: {rule}" for rule in seen.by_rule)]
            rows = [
                [each.key, each.rollouts, each.share]
                + [each.unscored[kind] / each.rollouts for kind in seen.unscored]
                + [each.by_rule[rule] / each.rollouts for rule in seen.by_rule]
                for each in seen.items[:ITEM_LIMIT]
            ]
            metrics["train/unscored_items"] = wandb.Table(columns=["item", "rollouts", "left out", *kinds], data=rows)
        self._alert("a biased selection of rollouts", seen.alarm)
        if self.repaired.parsed:
            metrics["train/repaired_calls_alarm"] = int(bool(self.repaired.alarm))
            self._alert(NAME, self.repaired.alarm)
        self._shown = seen
        return metrics

    def _alert(self, title: str, alarm: str) -> None:
        if alarm and title not in self._alarmed:
            self._alarmed.add(title)
            self._send(lambda run: run.alert(title=title, text=alarm))

    def log(self, metrics: Mapping[str, Any], step: int, *, prefix: str | None = None) -> None:
        """Send the figures, if W&B is on."""
        if not self.on:
            return
        import wandb

        shown = dict(metrics)
        if self._rollouts:
            shown["train/rollouts"] = wandb.Table(columns=["text", "score"], data=[list(row) for row in self._rollouts])
            self._rollouts = []
        if prefix:
            shown = {name if name.startswith("server/") else f"{prefix}_{name}": value for name, value in shown.items()}
        self._send(lambda run: run.log(shown, step=step))

    def _send(self, line: Callable[[Any], object]) -> None:
        if self._sender is not None:
            self._sender.send(line)

    async def hook(self, call: Awaitable[Any]) -> None:
        """Await a hook of an environment that logs to W&B by itself. What W&B raises there ends no run either."""
        try:
            await call
        except Exception as error:
            of_wandb = type(error).__module__.startswith("wandb") or isinstance(error, ConnectionError)
            if self._sender is None or not of_wandb:
                raise
            self._sender.lose(error)


def _open_run(config: HermesAgentEnvConfig, project: str, group: str | None, job: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise TrackingError("use_wandb is set, but wandb is not installed: pip install wandb") from error
    from lachesis_view.wandb_run import waiting_is_said

    try:
        # Checked here: wandb.init would ask a person at the terminal, and wait.
        if wandb.setup().settings.mode in ("online", "run", "shared") and not wandb.api.api_key:
            raise TrackingError(_no_login("there is no API key"))
        with waiting_is_said():
            return wandb.init(
                project=project,
                group=group,
                name=config.wandb_name,
                job_type=job,
                config=config.public(),
            )
    except (wandb.errors.Error, OSError) as error:
        raise TrackingError(_no_login(str(error))) from error


def _no_login(reason: str) -> str:
    return (
        f"use_wandb is set, but W&B cannot start: {reason}; run `wandb login`, set WANDB_MODE=offline, "
        "or --env.use_wandb false"
    )


def readable(messages: list[dict[str, Any]]) -> str:
    """A conversation as plain text, long parts cut."""
    lines = []
    for message in messages:
        if message.get("reasoning"):
            lines.append(f"[thinks] {_cut(message['reasoning'], CONTENT_LIMIT)}")
        if message.get("content"):
            limit = RESULT_LIMIT if message["role"] == "tool" else CONTENT_LIMIT
            lines.append(f"[{message['role']}] {_cut(str(message['content']), limit)}")
        calls = (call["function"] for call in message.get("tool_calls") or ())
        lines += [f"[calls {call['name']}] {_cut(call['arguments'], CALL_LIMIT)}" for call in calls]
    return "\n".join(lines)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more)"
