"""Rollouts of every kind through `LachesisGenerator`, in the form that SkyRL's trainer takes."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from backends import BackendError
from lachesis_train import BranchedRollout, SettingsDisagree, UnscoredRollout
from lachesis_train.trainers.skyrl import LachesisGenerator
from tests.support.trainer_cases import CASES, Cases, SkyClient, Weights, columns, trained

SETTINGS = {"max_infra_retries": 0, "max_resamples": 2}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 100, "stop": None}
SAMPLING |= {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "logprobs": 1}


@dataclass
class TrajectoryID:
    """SkyRL's, where SkyRL is not installed."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def config(*, step_wise: bool = True) -> Any:
    """The settings that are read of `cfg.generator`."""
    sampling = SimpleNamespace(max_generate_length=100)
    return SimpleNamespace(step_wise_trajectories=step_wise, max_input_length=4000, sampling_params=sampling)


def batch(cases: Any = CASES, *, size: int = 2, phase: str = "train", step: int = 7, **sampling: Any) -> dict[str, Any]:
    names = [TrajectoryID(case, number) for case in cases for number in range(size)]
    return {
        "prompts": [[{"role": "user", "content": "shown"}] for _ in names],
        "env_classes": ["lachesis"] * len(names),
        "env_extras": [columns(name.instance_id) for name in names],
        "sampling_params": SAMPLING | sampling,
        "trajectory_ids": names,
        "batch_metadata": SimpleNamespace(global_step=step, training_phase=phase),
    }


def generator(weights: Weights, *, env: Any = Cases, step_wise: bool = True, **more: Any) -> LachesisGenerator:
    more = {"settings": SETTINGS, **more}
    return LachesisGenerator(
        env, config(step_wise=step_wise), client=SkyClient(weights), tokenizer=weights.tokenizer, **more
    )


async def test_every_sampled_token_of_a_scored_rollout_arrives_once_in_rows_in_the_order_of_the_input() -> None:
    weights = Weights()
    made = generator(weights)
    given = batch()
    output = await made.generate(given)
    order = [name.to_string() for name in given["trajectory_ids"]]
    names = [name.to_string() for name in output["trajectory_ids"]]
    assert names == sorted(names, key=order.index)
    rows = Counter(names)
    assert [rows[name] for name in order] == [1, 1, 2, 2, 2, 2, 1, 1, 1, 0, 1, 0]
    kept = Counter(weights.given)
    for prompt, ids, mask, logprobs in zip(
        *(output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")), strict=True
    ):
        whole, at = [*prompt, *ids], len(prompt)
        assert len(mask) == len(ids) == len(logprobs)
        for on, run in _runs(mask):
            if on:
                span = tuple(whole[at : at + run]) if run else ()
                kept[tuple(whole[:at]), span] -= 1
                assert kept[tuple(whole[:at]), span] >= 0, "sampled after exactly this prompt, and delivered once"
            at += run
        assert all((value < 0) == bool(on) for value, on in zip(logprobs, mask, strict=True))
    left = sum(len(ids) * count for (_, ids), count in kept.items())
    assert left == made.totals["undelivered"] > 0
    assert made.totals["trained"] + left == weights.sampled
    assert output["rollout_metrics"]["lachesis/unscored"] == 3
    assert weights.loops == {asyncio.get_running_loop()}, "the client is called where the trainer runs"
    await asyncio.to_thread(made.close)


async def test_the_reward_is_on_the_last_token_of_the_last_row() -> None:
    weights = Weights()
    with generator(weights) as made:
        output = await made.generate(batch(("edited", "declined")))
    rewards = [(sum(each), each[-1]) for each in output["rewards"]]
    assert rewards == [(0, 0), (0.25, 0.25), (0, 0), (0.5, 0.5), (0, 0)]
    assert output["is_last_step"] == [False, True, False, True, True]
    assert output["loss_masks"][-1] == [0], "a group without any score is one row that trains nothing"


async def test_one_row_a_rollout_is_chosen_or_refused_and_a_group_with_a_failure_is_masked() -> None:
    weights = Weights()
    refused = r"2 samples.*without generator.step_wise_trajectories takes one row"
    with generator(weights, step_wise=False) as made, pytest.raises(BranchedRollout, match=refused):
        await made.generate(batch())
    for choice in ("last", "longest", "final"):
        weights = Weights()
        with generator(weights, step_wise=False, on_branches=choice) as made:
            output = await made.generate(batch())
        assert len(output["response_ids"]) == 12
        assert output["is_last_step"] is None
        masked = [not any(mask) for mask in output["loss_masks"]]
        assert masked == [False] * 8 + [True] * 4
        kept = sum(map(sum, output["loss_masks"]))
        assert (made.totals["trained"], made.totals["trained"] + made.totals["undelivered"]) == (kept, weights.sampled)
        assert made.totals["branched"] == 4


async def test_an_aborted_completion_goes_on_and_each_token_has_the_version_that_sampled_it() -> None:
    weights = Weights(abort_at=4)
    with generator(weights) as made:
        (rollout,) = await made.play({"case": "plain"})
        assert rollout.reward is not None
        (row,) = await made.rows(rollout)
    assert row.sample is not None
    assert [span.interrupts for span in row.sample.spans] == [1, 1]
    assert trained(list(row.completion_ids), list(row.env_mask)) == [
        token for (_, ids), count in weights.given.items() for token in ids * count
    ]


async def test_an_evaluation_may_be_greedy_and_an_unscored_rollout_is_left_out_of_it() -> None:
    weights = Weights()
    with generator(weights) as made:
        output = await made.generate(batch(("plain", "declined"), size=1, phase="eval", temperature=0.0))
        assert [name.instance_id for name in output["trajectory_ids"]] == ["plain"]
        assert (made.totals["rollouts"], made.totals["trained"], made.totals["undelivered"]) == (2, 0, 0)
        assert made.env.config.agent_temperature == 1.0
        with pytest.raises(UnscoredRollout, match="would count as 0"):
            await made.generate(batch(("declined",), phase="eval"))
    with generator(weights, step_wise=False, on_branches="last") as made, pytest.raises(UnscoredRollout):
        await made.generate(batch(("plain", "declined"), phase="eval"))


async def test_a_training_has_its_temperature_after_an_evaluation_that_had_another() -> None:
    with generator(Weights()) as made:
        await made.generate(batch(("plain",), size=1, phase="eval", temperature=0.0))
        output = await made.generate(batch(("plain",), size=1, temperature=0.7))
        await made.generate(batch(("plain",), size=1, phase="eval", temperature=0.0))
        assert made.env.config.agent_temperature == 0.7
    assert any(output["loss_masks"][0])


class Unlucky(Cases):
    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float | None:
        reward = await super().compute_reward(item, result, ctx)
        if reward == 0.25:
            raise BackendError("the sandbox of the first rollout is gone")
        return reward


@pytest.mark.parametrize("phase", ["train", "eval"])
async def test_a_failure_of_the_infrastructure_is_made_up_for_by_another_rollout(phase: str) -> None:
    settings = {**SETTINGS, "max_infra_retries": 1}
    with generator(Weights(), env=Unlucky, step_wise=False, settings=settings) as made:
        output = await made.generate(batch(("plain",), phase=phase))
    assert sorted(each[-1] for each in output["rewards"]) == [0.5, 0.75]


class Spoilt(Cases):
    """Of its attempts, one loses its sandbox, and one has no score."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float | None:
        self.attempts = [*getattr(self, "attempts", []), result]
        if len(self.attempts) == 1:
            raise BackendError("the sandbox is gone")
        return None if len(self.attempts) == 3 else 1.0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "discarded", "sub_agent"])
async def test_the_tokens_of_attempts_that_others_replaced_are_counted(case: str) -> None:
    weights = Weights()
    with generator(weights, env=Spoilt, settings={**SETTINGS, "max_infra_retries": 2}) as made:
        output = await made.generate(batch((case,)))
        totals = made.totals
        assert (totals["rollouts"], totals["unscored"], totals["replaced"]) == (2, 0, 2)
        assert totals["trained"] + totals["undelivered"] + totals["replaced_tokens"] == weights.sampled
        figures = output["rollout_metrics"]
        assert figures["lachesis/replaced_tokens"] == totals["replaced_tokens"] > 0
        made.env.attempts = []
        await made.generate(batch((case,), phase="eval"))  # nothing is trained on it
        assert (totals["replaced"], totals["replaced_tokens"]) == (2, figures["lachesis/replaced_tokens"])


async def test_a_failing_engine_leaves_rollouts_without_a_score() -> None:
    with generator(Weights(fails=True)) as made:
        output = await made.generate(batch(("plain",)))
        assert output["loss_masks"] == [[0]]
        assert made.totals["unscored"] == 2
        (rollout,) = await made.play({"case": "plain"})
    assert "the trainer's sampler raised ConnectionError: the engine is gone" in rollout.unscored_because


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"top_k": 20}, "top_k is 20"),
        ({"stop": ["x"]}, "stop is"),
        ({"min_tokens": 5}, "min_tokens is 5"),
        ({"logit_bias": {"3": -100}}, "logit_bias is .* no effect"),
    ],
)
async def test_sampling_that_trains_another_distribution_is_refused_by_name(
    sampling: dict[str, Any], message: str
) -> None:
    made = generator(Weights())
    with pytest.raises(SettingsDisagree, match=rf"generator.sampling_params.{message}"):
        await made.generate(batch(**sampling))


@pytest.mark.parametrize("limit", [50, 110, 1024])
async def test_an_evaluation_with_another_limit_of_tokens_than_the_training_is_refused(limit: int) -> None:
    with generator(Weights()) as made:
        with pytest.raises(SettingsDisagree, match=rf"evaluation has {limit} tokens .* rollouts .* have 100: set the"):
            await made.generate(batch(("plain",), phase="eval", max_tokens=limit))
        made.limit_tokens(200)  # more than the environment's own
        await made.generate(batch(("plain",), phase="eval", max_tokens=1024))
        assert made.env.config.max_token_length == Cases.max_token_length == 120


@pytest.mark.parametrize("name", ["zero_reward_on_non_stop", "apply_overlong_filtering"])
def test_what_only_skyrls_own_generators_carry_out_is_refused(name: str) -> None:
    weights, settings = Weights(), config()
    setattr(settings, name, True)
    with pytest.raises(SettingsDisagree, match=rf"generator.{name} is set"):
        LachesisGenerator(Cases, settings, client=SkyClient(weights), tokenizer=weights.tokenizer)


async def test_two_temperatures_are_refused() -> None:
    made = generator(Weights(), settings={**SETTINGS, "agent_temperature": 0.7})
    with pytest.raises(SettingsDisagree, match=r"env.agent_temperature is 0.7 and generator.sampling_params"):
        await made.generate(batch())


@pytest.mark.skipif("LACHESIS_NEED_TRAINERS" not in os.environ, reason="make test-trainers installs SkyRL")
@pytest.mark.parametrize("step_wise", [True, False])
async def test_skyrl_accepts_and_merges_what_it_gets(step_wise: bool) -> None:
    from skyrl.train.generators.base import BatchMetadata, GeneratorInput, GeneratorOutput
    from skyrl.train.generators.base import TrajectoryID as Theirs
    from skyrl.train.generators.utils import concatenate_generator_outputs, merge_stepwise_output
    from skyrl.train.utils.trainer_utils import validate_generator_output

    weights = Weights()
    given = batch()
    given["trajectory_ids"] = [Theirs(name.instance_id, name.repetition_id) for name in given["trajectory_ids"]]
    given["batch_metadata"] = BatchMetadata(global_step=7, training_phase="train")
    assert set(given) == set(GeneratorInput.__annotations__)
    with generator(weights, step_wise=step_wise, on_branches="last") as made:
        output = await made.generate(given)
    assert set(output) == set(GeneratorOutput.__annotations__)
    validate_generator_output(len(given["prompts"]), output, step_wise=step_wise)
    concatenate_generator_outputs([output, output] if not step_wise else [output], step_wise=step_wise)
    if step_wise:
        merged = merge_stepwise_output(output)
        assert sum(map(sum, merged["loss_masks"])) == made.totals["trained"]


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    """(value, length) of equal values in a row; two completions in a row would be one run."""
    runs: list[list[int]] = []
    for on in mask:
        if runs and runs[-1][0] == on:
            runs[-1][1] += 1
        else:
            runs.append([on, 1])
    return [(on, count) for on, count in runs]
