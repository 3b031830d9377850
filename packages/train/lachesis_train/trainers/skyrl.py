"""The generator of SkyRL: `GeneratorInterface.generate` of SkyRL 0.4 by an environment of ours."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from backends.tasks import run_all
from lachesis_client.sampling import LogprobsKind
from lachesis_train.trainers.agreement import SettingsDisagree
from lachesis_train.trainers.called import CalledEnvironment, why
from lachesis_train.trainers.items import item_of
from lachesis_train.trainers.rows import Row, UnscoredRollout
from lachesis_train.trainers.sampler_engine import TokenRoom, TrainerCompletion, TrainerSamplerEngine

_COLUMNS: Final = (
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs"),
    *("trajectory_ids", "is_last_step"),
)
"""Fields of `GeneratorOutput` that have an entry for each row."""
_OF_THEIRS: Final = ("zero_reward_on_non_stop", "apply_overlong_filtering")
"""Settings that only SkyRL's own generators carry out."""
_UNUSED: Final = (
    *("trajectory_generation_times", "trajectory_time_splits", "rollout_expert_indices", "rollout_sample_support"),
    *("env_metrics", "pixel_values", "image_grid_thw"),
)


class LachesisGenerator(CalledEnvironment):
    """SkyRL's `GeneratorInterface`, of which it calls `generate`. It imports nothing of SkyRL.

    With `generator.step_wise_trajectories`, each sample of a rollout is a row, and SkyRL gives all of them the
    advantage of the rollout; without it, a rollout has one row (`on_branches`).

    Args:
        env: the class of an environment, or its name as `--env` takes it.
        config: SkyRL's `cfg.generator`.
        client: SkyRL's inference client, which samples.
        tokenizer: SkyRL's.
        model: the name under which the client knows the policy, where it serves adapters.
        time_limit: seconds for a completion.

    Raises:
        SettingsDisagree: sampling parameters of SkyRL's contradict those of the environment.
    """

    taker = "SkyRL without generator.step_wise_trajectories"

    def __init__(
        self,
        env: Any,
        config: Any,
        *,
        client: Any,
        tokenizer: Any,
        settings: Mapping[str, Any] | None = None,
        on_branches: str = "error",
        model: str | None = None,
        logprobs: LogprobsKind = "processed",
        time_limit: float = 1800.0,
    ) -> None:
        if chosen := [name for name in _OF_THEIRS if getattr(config, name, False)]:
            raise SettingsDisagree(
                f"generator.{chosen[0]} is set, which only SkyRL's own generators carry out; switch it off, and give a "
                "rollout that was cut off its reward in compute_reward"
            )
        room = TokenRoom("skyrl://inference", "generator.max_input_length")
        room.prompt = config.max_input_length
        engine = TrainerSamplerEngine(
            self._sample, tokenizer=tokenizer, url=room.url, logprobs=logprobs, room=room, time_limit=time_limit
        )
        self.step_wise = bool(config.step_wise_trajectories)
        super().__init__(
            env, engine, tokenizer=tokenizer, settings=settings, on_branches=None if self.step_wise else on_branches
        )
        self.limit_tokens(config.sampling_params.max_generate_length)
        self.client = client
        self.model = model
        self.version = ""

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """See `GeneratorInterface.generate`: a `GeneratorOutput`, in the order of the input.

        A rollout without a score is left out of its group: its baseline and its advantages are those of the others.
        Where SkyRL's training needs a row, as without step-wise rows or in a group without any score, the whole group
        is masked, as SkyRL's own generators do.

        Raises:
            UnscoredRollout: in an evaluation, where it would count as 0.
            BranchedRollout: a rollout has several samples, and SkyRL takes one row of it.
            RejectedRollout: a sample fails its verification.
        """
        metadata = input_batch.get("batch_metadata")
        evaluation = metadata is not None and metadata.training_phase == "eval"
        if metadata is not None:
            self.version = f"{self.run_id}:{metadata.global_step}"
        parameters = input_batch.get("sampling_params") or {}
        self.use_sampling(parameters, evaluation=evaluation, where="generator.sampling_params")
        ids = input_batch.get("trajectory_ids") or [None] * len(input_batch["prompts"])
        extras = input_batch.get("env_extras") or [{}] * len(ids)
        groups = [(item_of(extras[places[0]]), [ids[place] for place in places]) for places in _groups(ids)]
        played = await run_all(self.play(item, size=len(names), evaluation=evaluation) for item, names in groups)
        output: dict[str, Any] = {name: [] for name in _COLUMNS} | dict.fromkeys(_UNUSED)
        counted: Counter[str] = Counter()
        for (_, names), rollouts in zip(groups, played, strict=True):
            rows = [await self.rows(rollout, evaluation=evaluation, totals=counted) for rollout in rollouts]
            if not evaluation:
                rows = self._masked(rows)
            elif not self.step_wise and not all(rows):
                raise UnscoredRollout(_unscored(rollouts, "set generator.step_wise_trajectories, which leaves it out"))
            for name, of_rollout in zip(names, rows, strict=True):
                for row in of_rollout:
                    _add(output, row, name, last=row is of_rollout[-1])
        if not output["response_ids"]:
            raise UnscoredRollout(_unscored(rollouts, "see why; no rollout of this evaluation has one"))
        lost = 0 if evaluation else counted["trained"] - sum(map(sum, output["loss_masks"]))
        counted.update(trained=-lost, undelivered=lost)  # with a group that was masked
        self.totals.update(counted)
        figures = {f"lachesis/{name}": float(count) for name, count in counted.items()}
        if not self.step_wise:
            output["is_last_step"] = None
        return {**output, "rollout_metrics": figures}

    def _masked(self, rows: list[list[Row]]) -> list[list[Row]]:
        """The rows of a group, with one in which no token is trained where SkyRL needs it."""
        nothing = Row([self.padding], [self.padding], [0], [0.0], 0.0, None)
        if not any(rows):
            return [[nothing], *([] if self.step_wise else [nothing] for _ in rows[1:])]
        return rows if self.step_wise or all(rows) else [[nothing]] * len(rows)

    async def _sample(self, prompt_ids: list[int], session: str, most: int, temperature: float) -> TrainerCompletion:
        parameters: dict[str, Any] = {"max_tokens": most, "temperature": temperature, "logprobs": 1}
        # The model's own settings may name another end, as those of base models do.
        parameters |= {
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "stop_token_ids": sorted(self.server.prompts.end_of_turn),
        }
        version = self.version
        asked = {"prompt_token_ids": [prompt_ids], "sampling_params": parameters, "session_ids": [session]}
        given = await self.client.generate(asked, **({} if self.model is None else {"model": self.model}))
        logprobs = given.get("response_logprobs")
        return TrainerCompletion(
            given["response_ids"][0],
            logprobs[0] if logprobs else None,
            given["stop_reasons"][0],
            [version, self.version],
        )


def _groups(ids: Sequence[Any]) -> list[list[int]]:
    """The places of the trajectories of each instance, which follow each other; without ids, each on its own."""
    keys = [at if name is None else name.instance_id for at, name in enumerate(ids)]
    return [list(places) for _, places in itertools.groupby(range(len(ids)), key=lambda at: keys[at])]


def _unscored(rollouts: Sequence[Any], step: str) -> str:
    left = next(rollout for rollout in rollouts if rollout.reward is None)
    return f"rollout {left.rollout_id} of item {left.item_key} has no score and would count as 0 ({why(left)}); {step}"


def _add(output: dict[str, Any], row: Row, name: Any, *, last: bool) -> None:
    """Append a row. The reward of a rollout is at the end of its last row."""
    ended = row.sample.spans[-1].finish_reason if row.sample is not None else "error"
    output["prompt_token_ids"].append(list(row.prompt_ids))
    output["response_ids"].append(list(row.completion_ids))
    output["rewards"].append([0.0] * (len(row.completion_ids) - 1) + [float(row.reward or 0.0) if last else 0.0])
    output["loss_masks"].append(list(row.env_mask))
    output["stop_reasons"].append(ended)
    output["rollout_logprobs"].append(list(row.logprobs))
    output["trajectory_ids"].append(name)
    output["is_last_step"].append(last)
