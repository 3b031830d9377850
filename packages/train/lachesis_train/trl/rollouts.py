"""`rollout_func` for TRL's GRPOTrainer: rollouts of an environment, sampled from the model that is trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from backends.tasks import run_all
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.server.serving import prompts_of
from lachesis_train.trainers.agreement import SettingsDisagree, use_temperature
from lachesis_train.trainers.called import CalledEnvironment
from lachesis_train.trainers.rows import Row, count_calls, row_of
from lachesis_train.trl.items import DrawnKeys
from lachesis_train.trl.trainer_settings import check_trainer, require_trl

if TYPE_CHECKING:
    from datasets import Dataset

    from lachesis_train.trl.policy_engine import TrlPolicyEngine

REWARD: Final = "lachesis_reward"
"""The name of the reward function, and of the field of a row that it returns."""


class LachesisRollouts(CalledEnvironment):
    """An environment for `GRPOTrainer`: a context manager, and its `rollout_func`.

        with LachesisRollouts(MyEnv, tokenizer=tokenizer) as rollouts:
            trainer = GRPOTrainer(model, rollouts.reward_funcs, args, rollouts.dataset(256), rollout_func=rollouts)
            trainer.train()

    Args:
        env: the class of an environment, its name, or an environment that is not running.
        tokenizer: the model's, with its chat template; the same that the trainer gets as `processing_class`.
        settings: settings of the environment by name, if `env` is a class.
        on_branches: what happens to a rollout of several samples. "error": the training stops. "last": the path on
            which the conversation ended is trained. "longest": the sample with the most sampled tokens.

    Raises:
        LachesisError: a package is missing.
    """

    taker = "rollout_func of TRL"
    engine: TrlPolicyEngine

    def __init__(
        self,
        env: Any,
        *,
        tokenizer: Any,
        settings: Mapping[str, Any] | None = None,
        on_branches: str = "error",
    ) -> None:
        require_trl()
        from lachesis_train.trl.policy_engine import TrlPolicyEngine

        engine = TrlPolicyEngine(tokenizer)
        super().__init__(env, engine, tokenizer=tokenizer, settings=settings, on_branches=on_branches)
        self._items = DrawnKeys(self.env)
        self._trainer: Any = None

    # Datasets.

    def dataset(self, count: int) -> Dataset:
        """The next `count` items of the environment, or those that are left, with a column `prompt`.

        Each item is drawn once, in the order in which a run draws them. The order of epochs is the trainer's.
        """
        return self.running.call(lambda: self._items.draw(count))

    def eval_dataset(self) -> Dataset:
        """The items that `eval` plays (`env.eval_items`). Call it before `dataset`, so that they are the same."""
        return self.running.call(self._items.draw_for_evaluation)

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
        playing = self.running.submit(lambda: self._play(plan, evaluation=evaluation))
        try:
            with _policy(trainer) as model:
                self.engine.serve(model, playing)
        except BaseException:
            playing.cancel()
            raise
        rollouts = playing.result()
        padding, on_branches = trainer._tokenizer.pad_token_id, self.on_branches or "error"
        rows = [row_of(rollout, on_branches=on_branches, padding=padding) for rollout in rollouts]
        self._check_lengths(rows)
        if not evaluation:
            for at in range(0, len(rollouts), size):
                count_calls(self.repaired, rollouts[at : at + size], self.env.run_name)
        figures = [
            self.count(rollout, [row], evaluation=evaluation) for rollout, row in zip(rollouts, rows, strict=True)
        ]
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
            self.server.prompts = prompts_of(PromptBuilder, self.tokenizer, self.env.config, sorted(more))
        self.engine.ends = frozenset(self.server.prompts.end_of_turn)
        self.engine.room.after_first = trainer.max_completion_length
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
        room = self.engine.room.after_first
        if room is not None and longest > room:
            raise SettingsDisagree(
                f"a sample has {longest} tokens after its prompt and GRPOConfig.max_completion_length is {room}: a "
                "branch of its rollout began with a shorter prompt than the rollout; raise max_completion_length, or "
                "set on_branches='last'"
            )

    # Rollouts, on the loop of the environment.

    async def _play(self, plan: Sequence[tuple[str, int]], *, evaluation: bool) -> list[Any]:
        groups = await run_all(
            self.rollouts_of(self._items[key], key, size, evaluation=evaluation) for key, size in plan
        )
        return [rollout for group in groups for rollout in group]


def _groups(keys: Sequence[str], size: int) -> Iterator[tuple[str, int]]:
    """Equal keys in a row, as groups of `size` at most."""
    for key, same in itertools.groupby(keys):
        count = len(list(same))
        while count > 0:
            yield key, min(count, size)
            count -= size


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
