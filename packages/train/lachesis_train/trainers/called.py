"""An environment that a trainer calls for rollouts: it runs on a thread, and the trainer's own engine samples."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Self

from backends.errors import LachesisError
from lachesis.figures.item_keys import item_digest, part_key
from lachesis.figures.repaired_calls import RepairedCalls
from lachesis.loop.result import TokenCount
from lachesis_tokens.engines.base import TokenEngine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_tokens.server.serving import prompts_of
from lachesis_tokens.server.token_server import TokenServer
from lachesis_train.trainers.agreement import SettingsDisagree, use_sampling
from lachesis_train.trainers.env_thread import EnvThread
from lachesis_train.trainers.items import environment_of
from lachesis_train.trainers.rows import OnBranches, Row, branches_setting, call_figures, rows_of
from lachesis_train.trainers.sampler_engine import TrainerSamplerEngine

log = logging.getLogger(__name__)


class CalledEnvironment:
    """An environment, its thread, and the server over the trainer's engine: a context manager.

    Args:
        env: the class of an environment, its name as `--env` takes it, or an environment that is not running.
        engine: samples with the trainer's model.
        tokenizer: the trainer's.
        settings: settings of the environment by name, if `env` is a class.
        on_branches: see `OnBranches`. None: the trainer takes several rows a rollout, and gets each sample.
        one_by_one: the trainer asks for each rollout of an item on its own.

    Raises:
        SettingsDisagree: the environment scores the rollouts of an item together, and they come one by one.
    """

    taker: ClassVar[str] = "the trainer"
    """What takes the rows, for messages."""

    def __init__(
        self,
        env: Any,
        engine: TokenEngine,
        *,
        tokenizer: Any,
        settings: Mapping[str, Any] | None = None,
        on_branches: str | None = "error",
        one_by_one: bool = False,
    ) -> None:
        self.env = environment_of(env, settings)
        self.engine = engine
        self.tokenizer = tokenizer
        self.on_branches: OnBranches | None = None if on_branches is None else branches_setting(on_branches)
        if one_by_one and (self.env.compute_group_reward is not None or self.env.collects):
            raise SettingsDisagree(
                f"{self.env.run_name} scores the rollouts of an item together, and {self.taker} asks for them one by "
                "one; give each rollout its reward in compute_reward, or train with SkyRL, TRL or lachesis train"
            )
        self.run_id = uuid.uuid4().hex[:8]
        self.server = TokenServer(
            [engine],
            prompts_of(PromptBuilder, tokenizer, self.env.config),
            self.env.config.tool_call_parser,
            max_tokens=self.env.config.max_token_length,
            tokenizer=(getattr(tokenizer, "name_or_path", ""), f"tokenizer of {type(self).__name__}"),
            rows=ANY_ROW,
        )
        if isinstance(engine, TrainerSamplerEngine):
            engine.ends = frozenset(self.server.prompts.end_of_turn)
        self.totals: Counter[str] = Counter()
        """Rollouts, and how many of them were not scored or had several samples; the attempts that they replaced; and
        every sampled token once: `trained`, `undelivered`, or of an attempt that was replaced (`replaced_tokens`)."""
        self.repaired = RepairedCalls()
        """The calls of training rollouts that the parser read, and those that it repaired."""
        self._own_limit = self.env.config.max_token_length
        self._thread: EnvThread | None = None
        self._starting = threading.Lock()
        self._gate = asyncio.Semaphore(max(1, self.env.max_num_workers) * (self.env.config.group_size**one_by_one))
        self._failed_groups = 0

    def limit_tokens(self, limit: int) -> None:
        """A completion has no more tokens than this limit of the trainer, and that of the environment."""
        self.server.max_tokens = self.env.config.max_token_length = min(self._own_limit, limit)

    def use_sampling(self, given: Mapping[str, Any], *, evaluation: bool, where: str) -> None:
        """See `use_sampling` of `agreement`. Raises SettingsDisagree also for another limit than that of the training,
        as an evaluation may have one: its rollouts would be cut off there."""
        use_sampling(self.env.config, given, evaluation=evaluation, where=where)
        asked, limit = given.get("max_tokens") or given.get("max_new_tokens"), self.env.config.max_token_length
        if asked and min(self._own_limit, asked) != limit:
            raise SettingsDisagree(
                f"{where} of {'an evaluation' if evaluation else 'the training'} has {asked} tokens for a completion, "
                f"and all rollouts of this environment have {limit}: set the limits of training and evaluation to the "
                "same number"
            )

    # A run of the environment.

    def start(self) -> None:
        """Set up the environment: its dataset and its sandboxes. `with` does this, and so does the first use."""
        with self._starting:
            if self._thread is None:
                self.env.use_server(self.server)
                self._thread = EnvThread(self.env)

    def close(self) -> None:
        """End the environment and remove its sandboxes."""
        if self._thread is not None:
            self._thread.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> EnvThread:
        self.start()
        assert self._thread is not None
        return self._thread

    @property
    def padding(self) -> int:
        """The id of rows in which nothing is trained."""
        return int(self.tokenizer.pad_token_id or 0)

    # On the event loop of the trainer.

    async def play(self, item: Any, *, size: int = 1, first: int = 0, evaluation: bool = False) -> list[Any]:
        """`size` finished rollouts of an item, the scored ones first. `first` is the number of the first one."""
        await asyncio.to_thread(self.start)
        if isinstance(self.engine, TrainerSamplerEngine):
            self.engine.caller = asyncio.get_running_loop()
        key = part_key(f"{item_digest(item)}-1", first)
        call = self.running.submit(lambda: self.rollouts_of(item, key, size, evaluation=evaluation))
        return await asyncio.wrap_future(call)

    async def rows(
        self, rollout: Any, *, several: bool = False, evaluation: bool = False, totals: Counter[str] | None = None
    ) -> list[Row]:
        """The verified rows of a rollout, which are counted in the totals; none if it is left out.

        `several`: a row of each sample, whatever `on_branches` says. `totals`: others than those of all rollouts.
        """
        # The trainer's sampler repeats no prompts: they are its own, and the certificate says that nobody checked them.
        own = isinstance(self.engine, TrainerSamplerEngine)
        rows = await asyncio.to_thread(
            rows_of,
            rollout,
            on_branches=None if several else self.on_branches,
            taker=self.taker,
            unchecked_prompts="allow" if own else self.env.config.unchecked_prompts,
            evaluation=evaluation,
            padding=self.padding,
        )
        self.count(rollout, rows, totals, evaluation=evaluation)
        return rows

    def count(
        self, rollout: Any, rows: Sequence[Row], totals: Counter[str] | None = None, *, evaluation: bool = False
    ) -> dict[str, float]:
        """Count a rollout in the totals. Returns its figures, of which a trainer shows the means.

        No token of an `evaluation` is trained, and none is missing from a training.
        """
        unscored, branched = rollout.reward is None, any(row.branches > 1 for row in rows)
        undelivered = rows[0].undelivered if rows else sum(sample.trained for sample in rollout.samples)
        trained = sum(sum(row.env_mask) for row in rows)
        replaced, lost = rollout.attempts - 1, rollout.lost.completion_tokens
        if evaluation:
            trained = undelivered = replaced = lost = 0
        (self.totals if totals is None else totals).update(
            rollouts=1,
            unscored=unscored,
            branched=branched,
            trained=trained,
            undelivered=undelivered,
            replaced=replaced,
            replaced_tokens=lost,
        )
        figures: dict[str, float] = {
            "unscored": float(unscored),
            "branched": float(branched),
            "undelivered_tokens": float(undelivered),
            "replaced": float(replaced),
            "replaced_tokens": float(lost),
            **rollout.metrics,
        }
        if rollout.result is not None:
            figures["turns"] = float(rollout.result.turns_used)
            figures["tool_errors"] = float(len(rollout.result.tool_errors))
            figures |= call_figures(rollout)
        return figures

    # On the event loop of the environment.

    async def rollouts_of(self, item: Any, key: str, size: int, *, evaluation: bool) -> list[Any]:
        """Exactly `size` rollouts of an item, the scored ones first. Those that others replaced are attempts of these.

        Raises:
            LachesisError: no rollout of several groups in a row was scored (`env.max_failed_groups`).
        """
        rounds = 1 + self.env.config.max_infra_retries
        async with self._gate:
            groups = await self.env.play_item(item, key, size=size, rounds=rounds, evaluation=evaluation)
        found = [rollout for group in groups for rollout in group.rollouts]
        self._note(key, found)
        scored = [rollout for rollout in found if rollout.reward is not None]
        chosen = (scored + [rollout for rollout in found if rollout.reward is None])[:size]
        if len(chosen) < size or len(scored) > size:
            raise SettingsDisagree(
                f"{self.env.run_name} made {len(found)} rollouts of item {key}, and {self.taker} asks for {size}: an "
                "environment that collects its own groups must return groups of that size"
            )
        kept = set(map(id, chosen))
        for at, rollout in enumerate(rollout for rollout in found if id(rollout) not in kept):
            chosen[at % size] = _in_place_of(chosen[at % size], rollout)
        return chosen

    def _note(self, key: str, rollouts: Sequence[Any]) -> None:
        """Count groups without a score; too many in a row end the training. Exceptions are shown."""
        left_out = [rollout for rollout in rollouts if rollout.reward is None]
        for rollout in left_out:
            log.warning("%s: rollout %s of item %s: %s", self.env.run_name, rollout.rollout_id, key, why(rollout))
        if len(left_out) < len(rollouts) or all(rollout.left_to_agent for rollout in rollouts):
            self._failed_groups = 0
            return
        self._failed_groups += 1
        if self._failed_groups >= self.env.config.max_failed_groups:
            raise LachesisError(
                f"{self.env.run_name}: no rollout of the last {self._failed_groups} groups was scored "
                f"(env.max_failed_groups); the last one: {why(left_out[-1])}"
            )


def _in_place_of(rollout: Any, replaced: Any) -> Any:
    """The rollout, with the starts and the sampled tokens of another one as its earlier attempts."""
    lost = TokenCount(completion_tokens=sum(sample.trained for sample in replaced.samples))
    for earlier in (rollout.lost, replaced.lost):
        lost.include(earlier)
    reasons = [*replaced.retried_after, replaced.unscored_because, *rollout.retried_after]
    return replace(rollout, attempts=rollout.attempts + replaced.attempts, retried_after=reasons, lost=lost)


def why(rollout: Any) -> str:
    """Why it has no score."""
    return str(rollout.tracebacks or rollout.unscored_because)
