"""`rollout_func` for TRL's GRPOTrainer: rollouts of an environment, sampled from the model that is trained."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from backends.errors import LachesisError
from backends.tasks import run_all
from lachesis.figures.repaired_calls import RepairedCalls
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.templates.chat_template import read_template
from lachesis_train.trl.env_thread import EnvThread
from lachesis_train.trl.items import DrawnKeys, environment_of
from lachesis_train.trl.rows import ON_BRANCHES, OnBranches, Row, call_figures, count_calls, row_of
from lachesis_train.trl.trainer_settings import SettingsDisagree, check_trainer, require_trl, use_temperature

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

REWARD: Final = "lachesis_reward"
"""The name of the reward function, and of the field of a row that it returns."""


class LachesisRollouts:
    """An environment for `GRPOTrainer`: a context manager, and its `rollout_func`.

        with LachesisRollouts(MyEnv, tokenizer=tokenizer) as rollouts:
            trainer = GRPOTrainer(model, rollouts.reward_funcs, args, rollouts.dataset(256), rollout_func=rollouts)
            trainer.train()

    Args:
        env: the class of an environment, or an environment that is not running.
        tokenizer: the model's, with its chat template; the same that the trainer gets as `processing_class`.
        settings: settings of the environment by name, if `env` is a class.
        on_branches: what happens to a rollout of several samples. "error": the training stops. "final": the path on
            which the conversation ended is trained. "longest": the sample with the most sampled tokens.
        sample_batch: completions that are sampled at once, at most.

    Raises:
        LachesisError: a package is missing.
    """

    def __init__(
        self,
        env: Any,
        *,
        tokenizer: Any,
        settings: Mapping[str, Any] | None = None,
        on_branches: OnBranches = "error",
        sample_batch: int = 64,
    ) -> None:
        require_trl()
        if on_branches not in ON_BRANCHES:
            raise ValueError(f"on_branches is {on_branches!r}; it is one of {', '.join(ON_BRANCHES)}")
        from lachesis_train.trl.policy_engine import TrlPolicyEngine

        self.env = environment_of(env, settings)
        self.tokenizer = tokenizer
        self.on_branches = on_branches
        self.run_id = uuid.uuid4().hex[:8]
        self.engine = TrlPolicyEngine(tokenizer, batch=sample_batch)
        self.server = TokenServer(
            [self.engine],
            self._prompts(),
            self.env.config.tool_call_parser,
            max_tokens=self.env.config.max_token_length,
            tokenizer=(getattr(tokenizer, "name_or_path", ""), "tokenizer of LachesisRollouts"),
            rows=ANY_ROW,
        )
        self.totals: Counter[str] = Counter()
        """Rollouts, and how many of them were not scored or had several samples; tokens sampled and trained."""
        self.repaired = RepairedCalls()
        """The calls of training rollouts that the parser read, and those that it repaired."""
        self._items = DrawnKeys(self.env)
        self._thread: EnvThread | None = None
        self._trainer: Any = None
        self._failed_groups = 0

    def _prompts(self, end_of_turn: Sequence[int] = ()) -> PromptBuilder:
        config = self.env.config
        file = config.chat_template
        return PromptBuilder(
            self.tokenizer,
            chat_template=None if file is None else read_template(file),
            template_kwargs=config.chat_template_kwargs,
            when_unextendable=config.when_unextendable,
            end_of_turn=end_of_turn,
            special_tokens_in_text=config.special_tokens_in_text,
        )

    # A run of the environment.

    def start(self) -> None:
        """Set up the environment: its dataset and its sandboxes. `with` does this, and so does the first use."""
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
    def _run(self) -> EnvThread:
        self.start()
        assert self._thread is not None
        return self._thread

    # Datasets.

    def dataset(self, count: int) -> Dataset:
        """The next `count` items of the environment, or those that are left, with a column `prompt`.

        Each item is drawn once, in the order in which a run draws them. The order of epochs is the trainer's.
        """
        return self._run.call(lambda: self._items.draw(count))

    def eval_dataset(self) -> Dataset:
        """The items that `evaluate` plays (`env.eval_items`). Call it before `dataset`, so that they are the same."""
        return self._run.call(self._items.draw_for_evaluation)

    # What the trainer calls.

    @property
    def reward_funcs(self) -> list[Any]:
        return [self.lachesis_reward]

    def lachesis_reward(
        self, lachesis_reward: Sequence[float | None], lachesis_figures: Sequence[Mapping[str, float]], **given: Any
    ) -> list[float | None]:
        """The rewards of the environment; None for rollouts that have none. Logs the figures of the rollouts."""
        if log_metric := given.get("log_metric"):
            for figures in lachesis_figures:
                for name, value in figures.items():
                    log_metric(f"lachesis/{name}", value)
        return list(lachesis_reward)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """See `rollout_func` of `GRPOTrainer`: one rollout for each prompt, in their order.

        Beside TRL's fields, reward functions get `lachesis_reward`, `lachesis_sample` (the `TokenSample` of the row,
        None where there is none) and `lachesis_figures`.

        Raises:
            SettingsDisagree: settings of the trainer contradict those of the environment.
            BranchedRollout: see `on_branches`.
            LachesisError: no rollout of several groups in a row was scored (`env.max_failed_groups`).
        """
        self._bind(trainer)
        evaluation = not trainer.model.training
        self.engine.version = f"{self.run_id}:{trainer.state.global_step}"
        size = trainer.num_generations_eval if evaluation else trainer.num_generations
        plan = list(_groups(self._items.keys_of(prompts), size))
        self._check_plan(plan, size)
        playing = self._run.submit(lambda: self._play(plan, evaluation=evaluation))
        try:
            with _policy(trainer) as model:
                self.engine.serve(model, playing)
        except BaseException:
            playing.cancel()
            raise
        rollouts = playing.result()
        rows = [
            row_of(rollout, on_branches=self.on_branches, padding=trainer._tokenizer.pad_token_id)
            for rollout in rollouts
        ]
        self._check_lengths(rows)
        if not evaluation:
            for at in range(0, len(rollouts), size):
                count_calls(self.repaired, rollouts[at : at + size], self.env.run_name)
        figures = [self._figures(rollout, row) for rollout, row in zip(rollouts, rows, strict=True)]
        return {
            "prompt_ids": [list(row.prompt_ids) for row in rows],
            "completion_ids": [list(row.completion_ids) for row in rows],
            "logprobs": [list(row.logprobs) for row in rows],
            "env_mask": [list(row.env_mask) for row in rows],
            REWARD: [row.reward for row in rows],
            "lachesis_sample": [row.sample for row in rows],
            "lachesis_figures": figures,
        }

    def _bind(self, trainer: Any) -> None:
        """Take over the trainer's settings at the first call, or refuse them."""
        if trainer is self._trainer:
            return
        check_trainer(trainer, self.env, self.server.prompts.end_of_turn, self.tokenizer)
        use_temperature(self.env.config, float(trainer.args.temperature), where="GRPOConfig")
        if more := set(trainer.eos_token_ids).difference(self.server.prompts.end_of_turn):
            self.server.prompts = self._prompts(sorted(more))
        self.engine.stop = frozenset(self.server.prompts.end_of_turn)
        self.engine.room = trainer.max_completion_length
        self._trainer = trainer

    def _check_plan(self, plan: Sequence[tuple[str, int]], size: int) -> None:
        if self.env.compute_group_reward is None and not self.env.collects:
            return
        if any(count < size for _, count in plan):
            raise SettingsDisagree(
                f"{self.env.run_name} scores the rollouts of an item together, but this process has only some of its "
                f"{size} (GRPOConfig.num_generations): set per_device_train_batch_size and per_device_eval_batch_size "
                "to multiples of it"
            )

    def _check_lengths(self, rows: Sequence[Row]) -> None:
        longest = max(len(row.completion_ids) for row in rows)
        if self.engine.room is not None and longest > self.engine.room:
            raise SettingsDisagree(
                f"a sample has {longest} tokens after its prompt and GRPOConfig.max_completion_length is "
                f"{self.engine.room}: a branch of its rollout began with a shorter prompt than the rollout; raise "
                "max_completion_length, or set on_branches='final'"
            )

    # Rollouts, on the loop of the environment.

    async def _play(self, plan: Sequence[tuple[str, int]], *, evaluation: bool) -> list[Any]:
        gate = asyncio.Semaphore(max(1, self.env.max_num_workers))

        async def play(key: str, size: int) -> list[Any]:
            async with gate:
                return await self._rollouts(key, size, evaluation=evaluation)

        groups = await run_all(play(key, size) for key, size in plan)
        return [rollout for group in groups for rollout in group]

    async def _rollouts(self, key: str, size: int, *, evaluation: bool) -> list[Any]:
        """Exactly `size` rollouts of an item, the scored ones first."""
        rounds = 1 if evaluation else 1 + self.env.config.max_infra_retries
        groups = await self.env.play_item(self._items[key], key, size=size, rounds=rounds, evaluation=evaluation)
        found = [rollout for group in groups for rollout in group.rollouts]
        self._note(key, found)
        scored = [rollout for rollout in found if rollout.reward is not None]
        chosen = (scored + [rollout for rollout in found if rollout.reward is None])[:size]
        if len(chosen) < size or len(scored) > size:
            raise SettingsDisagree(
                f"{self.env.run_name} made {len(found)} rollouts of item {key}, and GRPOConfig asks for {size}: an "
                "environment that collects its own groups must return groups of num_generations"
            )
        return chosen

    def _note(self, key: str, rollouts: Sequence[Any]) -> None:
        """Count groups without a score; too many in a row end the training. Exceptions are shown."""
        left_out = [rollout for rollout in rollouts if rollout.reward is None]
        for rollout in left_out:
            log.warning("%s: rollout %s of item %s: %s", self.env.run_name, rollout.rollout_id, key, _why(rollout))
        if len(left_out) < len(rollouts) or all(rollout.left_to_agent for rollout in rollouts):
            self._failed_groups = 0
            return
        self._failed_groups += 1
        if self._failed_groups >= self.env.config.max_failed_groups:
            raise LachesisError(
                f"{self.env.run_name}: no rollout of the last {self._failed_groups} groups was scored "
                f"(env.max_failed_groups); the last one: {_why(left_out[-1])}"
            )

    def _figures(self, rollout: Any, row: Row) -> dict[str, float]:
        """What is logged of a rollout, and counted in the totals. TRL shows the means of a step."""
        unscored, branched = row.reward is None, row.branches > 1
        trained = sum(row.env_mask)
        self.totals.update(
            rollouts=1, unscored=unscored, branched=branched, trained=trained, undelivered=row.undelivered
        )
        figures: dict[str, float] = {
            "unscored": float(unscored),
            "branched": float(branched),
            "undelivered_tokens": float(row.undelivered),
            **rollout.metrics,
        }
        if rollout.result is not None:
            figures["turns"] = float(rollout.result.turns_used)
            figures["tool_errors"] = float(len(rollout.result.tool_errors))
            figures |= call_figures(rollout)
        return figures


def _groups(keys: Sequence[str], size: int) -> Iterator[tuple[str, int]]:
    """Equal keys in a row, as groups of `size` at most."""
    for key, same in itertools.groupby(keys):
        count = len(list(same))
        while count > 0:
            yield key, min(count, size)
            count -= size


def _why(rollout: Any) -> str:
    return str(rollout.tracebacks or rollout.unscored_because)


@contextmanager
def _policy(trainer: Any) -> Iterator[Any]:
    """The model that is trained, ready to sample: unwrapped, in evaluation mode, and as it was afterwards."""
    from trl.models import unwrap_model_for_generation

    with unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    ) as model:
        before = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            yield model
        finally:
            for module, training in before:
                module.training = training
