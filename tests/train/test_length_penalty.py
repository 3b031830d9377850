"""A penalty for long rollouts is in the scores of the trainer, and in no figure of what was judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_testing.fake_server import FakeServer, Lengths, RandomWords
from lachesis_tokens.samples.advantages import overlong
from lachesis_tokens.samples.group_shapes import group_problems, samples_from_atropos
from lachesis_train.curves.metrics import step_metrics
from lachesis_train.curves.records import GroupRecord, SampleRecord, StepRecord
from lachesis_train.curves.rollouts import group_line
from lachesis_train.trainer.datums import prepare
from lachesis_train.trainer.settings import TrainingSettings
from tests.support.own_api import OwnApi, own_api
from tests.support.training_runs import CoinToss, serving, trained, with_tokens

__all__ = ["own_api"]


class Judged(CoinToss):
    """It knows the tokens of each reward that it gave."""

    async def setup(self) -> None:
        await super().setup()  # type: ignore[no-untyped-call]
        self.tokens: dict[float, int] = {}

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        reward = await super().compute_reward(item, result, ctx)
        self.tokens[reward] = result.tokens.completion_tokens
        return reward


@given(st.integers(0, 5000), st.integers(1, 4096), st.integers(1, 4096))
def test_the_penalty_is_that_of_the_paper(tokens: int, limit: int, buffer: int) -> None:
    free = np.float64(limit - buffer)
    wanted = 0.0 if tokens <= free else (free - tokens) / buffer if tokens <= limit else -1.0
    assert overlong(tokens, limit=limit, buffer=buffer) == pytest.approx(wanted, abs=1e-12)


def test_a_buffer_before_the_first_token_is_refused() -> None:
    CoinToss.env_config_cls(soft_length_limit=512)
    with pytest.raises(ValueError, match=r"soft_length_buffer 512 is more than soft_length_limit 256"):
        CoinToss.env_config_cls(soft_length_limit=256)


async def test_scores_carry_the_penalty_and_judged_scores_do_not(tmp_path: Path, own_api: OwnApi) -> None:
    async with own_api.wiped() as api, FakeServer(RandomWords(Lengths(4, 40))) as model:
        server = with_tokens(model, tmp_path)
        shape: dict[str, Any] = {"max_token_length": 48, "enabled_toolsets": [], "max_agent_turns": 1}
        plain = serving(tmp_path, api, server, soft_length_limit=30, soft_length_buffer=20, length_penalty=0.5, **shape)
        env = Judged(plain.config, plain.server_configs)
        env.console = plain.console
        groups = (await trained(env, api, groups=8, steps=4)).groups
    penalties, judged = [], []
    for group in groups:
        assert group_problems(group, samples_from_atropos(group)) == []
        for score, override in zip(group["scores"], group["overrides"], strict=True):
            wanted = 0.5 * overlong(env.tokens[override["judged_score"]], limit=30, buffer=20)
            assert override["length_penalty"] == pytest.approx(wanted)
            assert score == pytest.approx(override["judged_score"] + wanted)
            penalties.append(wanted)
            judged.append(override["judged_score"])
    assert len(set(penalties)) > 2
    # The trainer learns from the scores, and its figures are those of the judge.
    for each in prepare(groups, TrainingSettings()).samples:
        scores = groups[each.group]["scores"]
        assert each.advantages.tolist() == pytest.approx([scores[each.at] - np.mean(scores)] * each.advantages.size)
    records = [GroupRecord(body=group, samples=[SampleRecord()] * len(group["scores"])) for group in groups]
    step = StepRecord(step=1, version="v", groups=records)
    metrics = step_metrics(step)
    assert metrics["train/reward"] == pytest.approx(np.mean(judged))
    assert metrics["train/length_penalty"] == pytest.approx(np.mean(penalties))
    training = group_line(step, records[0], None)["training"]
    assert [each["judged_score"] for each in training] == judged[: len(training)]


async def test_without_a_limit_nothing_is_penalised(tmp_path: Path, own_api: OwnApi) -> None:
    async with own_api.wiped() as api, FakeServer(RandomWords(Lengths(4, 40))) as model:
        env = serving(tmp_path, api, with_tokens(model, tmp_path), max_token_length=48, enabled_toolsets=[])
        (group, *_) = (await trained(env, api, groups=2, steps=1)).groups
    assert not any("length_penalty" in override or "judged_score" in override for override in group["overrides"])
    metrics = step_metrics(StepRecord(step=1, version="v", groups=[GroupRecord(body=group)]))
    assert metrics["train/reward"] == pytest.approx(np.mean(group["scores"])) and "train/length_penalty" not in metrics
