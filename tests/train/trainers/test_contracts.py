"""Rollouts of every kind through every adapter: each sampled token arrives once, after its exact prompt and with its
mask, logprob, version and reward, or the rollout is refused or left out by name. The table is that of docs/trainers.md.

verl's and slime's own types are used where they are installed (`make test-trainers`); else models of them that refuse
unknown fields, after `AgentLoopOutput` of verl 0.9.1 and `Sample` of slime of 2026-08-21.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from lachesis_client.client_settings import ServerSettings
from lachesis_testing.fake_server import FakeServer
from lachesis_tokens.engines.sglang import SGLangEngine
from lachesis_train import BranchedRollout, RejectedRollout, SettingsDisagree, UnscoredRollout
from lachesis_train.trainers import slime
from lachesis_train.trainers.called import CalledEnvironment
from lachesis_train.trainers.rows import row_of
from lachesis_train.trainers.verl import LachesisLoop
from tests.support.small_envs import Shows
from tests.support.trainer_cases import CASES, Cases, SlimeSample, Speaks, VerlClient, Weights, columns
from tests.train.trainers.test_skyrl import SAMPLING, SETTINGS, batch, generator

CASES_ENV = "tests.support.trainer_cases:Cases"
SKY_FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards", "trajectory_ids")


@dataclass
class Arrived:
    """One row, as the trainer got it."""

    rollout: int
    prompt: list[int]
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float | None
    versions: list[str] | None = None


@dataclass
class Taken:
    rows: list[Arrived]
    played: CalledEnvironment
    weights: Weights


Adapter = Callable[[str, Weights], Any]


async def skyrl_steps(case: str, weights: Weights) -> Taken:
    return await _skyrl(case, weights, step_wise=True)


async def skyrl_one(case: str, weights: Weights, on_branches: str = "error") -> Taken:
    return await _skyrl(case, weights, step_wise=False, on_branches=on_branches)


async def _skyrl(case: str, weights: Weights, **settings: Any) -> Taken:
    with generator(weights, **settings) as made:
        output = await made.generate(batch((case,)))
    rows = []
    for prompt, ids, mask, logprobs, rewards, name in zip(*(output[each] for each in SKY_FIELDS), strict=True):
        last = [each for each, tid in zip(output["rewards"], output["trajectory_ids"], strict=True) if tid is name][-1]
        assert sum(rewards) in (0, sum(last)), "on the last row of the rollout"
        reward = sum(last) if any(mask) else None
        rows.append(Arrived(name.repetition_id, prompt, ids, mask, logprobs, reward))
    return Taken(rows, made, weights)


async def trl_one(case: str, weights: Weights, on_branches: Any = "error") -> Taken:
    """Rows of `rollout_func`, whose engine samples from the ids themselves."""
    async with slime_args() as (_, model):
        engine = SGLangEngine(ServerSettings(base_url=model.base_url, model_name="fake"))
        made = CalledEnvironment(Cases, engine, tokenizer=model.tokenizer, settings=SETTINGS)
        rollouts = await made.play({"case": case}, size=2)
        await asyncio.to_thread(made.close)
        rows = [row_of(rollout, on_branches=on_branches, padding=0) for rollout in rollouts]
        for rollout, row in zip(rollouts, rows, strict=True):
            made.count(rollout, [row])
        weights.given = sampled_by(model)
    arrived = [
        Arrived(at, list(row.prompt_ids), list(row.completion_ids), list(row.env_mask), list(row.logprobs), row.reward)
        for at, row in enumerate(rows)
    ]
    return Taken(arrived, made, weights)


async def verl_one(case: str, weights: Weights, on_branches: str = "error") -> Taken:
    return await _verl(case, weights, on_branches)


async def verl_several(case: str, weights: Weights) -> Taken:
    return await _verl(case, weights, "error", session_id=True)


async def _verl(case: str, weights: Weights, on_branches: str, *, session_id: bool = False) -> Taken:
    client, rows = VerlClient(weights), []
    for number in range(2):  # verl makes a loop for each rollout
        loop = verl_loop(client, on_branches=on_branches)
        row = {"raw_prompt": "shown", **columns(case), **({"session_id": number} if session_id else {})}
        first = {} if session_id else {"first": number}
        with _numbered(loop, **first):
            given = await loop.run({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}, **row)
        for output in given if session_id else [given]:
            assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
            if hasattr(output, "as_dict"):  # verl's own
                assert output.as_dict()["rm_scores"].tolist()[-1] == output.reward_score
            steps = sorted({output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]})
            rows.append(
                Arrived(
                    number,
                    output.prompt_ids,
                    output.response_ids,
                    output.response_mask,
                    output.response_logprobs,
                    output.reward_score,
                    list(map(str, steps)),
                )
            )
    await asyncio.to_thread(loop.shared.close)
    return Taken(rows, loop.shared, weights)


class _numbered:
    """The rewards of `Cases` depend on the number of a rollout, which this trainer of verl does not say."""

    def __init__(self, loop: LachesisLoop, first: int | None = None) -> None:
        self.shared, self.first = loop.shared, first

    def __enter__(self) -> None:
        if self.first is not None:
            play = type(self.shared).play
            self.shared.play = lambda item, **more: play(self.shared, item, **{**more, "first": self.first})  # type: ignore[method-assign,assignment]

    def __exit__(self, *_: object) -> None:
        self.shared.__dict__.pop("play", None)


async def slime_several(case: str, weights: Weights, *, rewards: str | None = slime._REWARDS) -> Taken:
    async with slime_args(rewards) as (args, model):
        rows = []
        for number in range(2):
            sample = SlimeSample(group_index=4, index=number, metadata=columns(case))
            given = await slime.generate(args, sample, {**SAMPLING, "max_new_tokens": 100})
            for each in given if isinstance(given, list) else [given]:
                assert each.rollout_id == number
                assert each.response_length == len(each.loss_mask) == len(each.rollout_log_probs)
                at = len(each.tokens) - each.response_length
                if each.remove_sample:
                    assert each.status is SlimeSample.Status.ABORTED
                    assert "a reward returned None" in each.metadata["lachesis_unscored"]
                    continue
                assert each.status is SlimeSample.Status.COMPLETED
                rows.append(
                    Arrived(
                        number,
                        each.tokens[:at],
                        each.tokens[at:],
                        each.loss_mask,
                        each.rollout_log_probs,
                        each.reward,
                        sorted(set(each.weight_versions)),
                    )
                )
        shared = args.state.lachesis
        await asyncio.to_thread(shared.close)
        weights.given = sampled_by(model)
    return Taken(rows, shared, weights)


# What each adapter makes of the two rollouts of a case: rows of each, or the error that refuses them.
ONE = {"plain": (1, 1), "discarded": (1, 1)}
TABLE: dict[Adapter, dict[str, Any]] = {
    skyrl_steps: {**ONE, "edited": (2, 2), "sub_agent": (2, 2), "unscored": (1, 0), "declined": (0, 0)},
    skyrl_one: {
        **ONE,
        **dict.fromkeys(("edited", "sub_agent"), BranchedRollout),
        "unscored": (0, 0),
        "declined": (0, 0),
    },
    trl_one: {**ONE, **dict.fromkeys(("edited", "sub_agent"), BranchedRollout), "unscored": (1, 0), "declined": (0, 0)},
    verl_one: {
        **ONE,
        **dict.fromkeys(("edited", "sub_agent"), BranchedRollout),
        **dict.fromkeys(("unscored", "declined"), UnscoredRollout),
    },
    verl_several: {**ONE, "edited": (2, 2), "sub_agent": (2, 2), "unscored": (1, 0), "declined": (0, 0)},
    slime_several: {**ONE, "edited": (2, 2), "sub_agent": (2, 2), "unscored": (1, 0), "declined": (0, 0)},
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("adapter", TABLE, ids=lambda adapter: adapter.__name__)
async def test_every_token_arrives_once_or_its_rollout_is_refused_by_name(
    adapter: Adapter, case: str, types: None
) -> None:
    expected, weights = TABLE[adapter][case], Weights()
    if isinstance(expected, type):
        with pytest.raises(expected, match=r"rollout \w+ of item \S+ has"):
            await adapter(case, weights)
        return
    taken = await adapter(case, weights)
    rows = [row for row in taken.rows if any(row.mask)]
    assert tuple(sum(row.rollout == number for row in rows) for number in range(2)) == expected
    left = account(rows, weights)
    assert left == taken.played.totals["undelivered"], "what does not arrive is counted"
    assert left > 0 if case in ("discarded", "unscored", "declined") else left == 0
    assert all(row.reward == 0.25 * (row.rollout + 1) for row in rows)
    version = {"slime_several": ["default"], "verl_one": ["3"], "verl_several": ["3"]}.get(adapter.__name__)
    assert all(row.versions == version for row in rows)


@pytest.mark.parametrize("on_branches", ["last", "longest"])
@pytest.mark.parametrize("adapter", [skyrl_one, trl_one, verl_one])
async def test_of_a_branched_rollout_one_row_is_chosen_and_the_rest_is_counted(
    adapter: Any, on_branches: str, types: None
) -> None:
    taken = await adapter("edited", Weights(), on_branches)
    assert [row.rollout for row in taken.rows] == [0, 1]
    left = account(taken.rows, taken.weights)
    totals = taken.played.totals
    assert (totals["branched"], totals["undelivered"], totals["trained"]) == (2, left, taken.weights.sampled - left)
    assert left > 0
    again = ["again" in taken.weights.tokenizer.decode(row.prompt) for row in taken.rows]
    assert again == [on_branches == "last"] * 2 or on_branches == "longest"


async def test_each_entry_of_the_file_of_loops_has_its_own_environment(types: None) -> None:
    client = VerlClient(Weights())
    first = verl_loop(client)
    other = verl_loop(client, env="tests.support.trainer_cases:Others", on_branches="last")
    assert (first.shared.env.name, other.shared.env.name) == ("cases", "others")
    assert verl_loop(client).shared is first.shared


async def test_tokens_of_a_completion_that_goes_on_after_an_update_have_their_versions(types: None) -> None:
    weights = Weights(abort_at=4)
    loop = verl_loop(VerlClient(weights))
    (rollout,) = await loop.shared.play({"case": "plain"})
    await asyncio.to_thread(loop.shared.close)
    (sample,) = rollout.samples
    assert [span.versions for span in sample.spans] == [
        (("3", 0, 4), ("4", 4, len(sample.spans[0]))),
        (("4", 0, 4), ("5", 4, len(sample.spans[1]))),
    ]
    (row,) = await loop.shared.rows(rollout)
    extra = loop._output(row, rollout).extra_fields
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (3, 5)


async def test_a_completion_of_several_versions_without_borders_has_none_by_token(types: None) -> None:
    class Merging(VerlClient):
        async def generate(self, request_id: str, **asked: Any) -> SimpleNamespace:
            given = await super().generate(request_id, **asked)
            return SimpleNamespace(**{**vars(given), "extra_fields": {"min_global_steps": 3, "max_global_steps": 5}})

    loop = verl_loop(Merging(Weights()))
    output = await loop.run({"temperature": 1.0}, **columns("plain"))
    await asyncio.to_thread(loop.shared.close)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 5)


class Base(Weights):
    """A base model: its engine knows no end of a turn but the one that a request names."""

    async def sample(self, prompt_ids: list[int], parameters: dict[str, Any]) -> SimpleNamespace:
        made = await super().sample(prompt_ids, parameters)
        ids = made.ids if made.ids[-1] in parameters.get("stop_token_ids", ()) else [*made.ids, 5, 6]
        return SimpleNamespace(**{**vars(made), "ids": ids, "logprobs": [-0.5] * len(ids)})


@pytest.mark.parametrize("adapter", [skyrl_steps, verl_one])
async def test_a_completion_ends_with_its_turn_also_where_the_model_knows_no_such_end(
    adapter: Adapter, types: None
) -> None:
    taken = await adapter("plain", Base())
    assert [row.reward for row in taken.rows] == [0.25, 0.5]
    assert account(taken.rows, taken.weights) == 0


class Silent(Weights):
    async def sample(self, prompt_ids: list[int], parameters: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(ids=[], logprobs=[], reason="stop", step=self.step)


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["train", "eval"])
@pytest.mark.parametrize("step_wise", [True, False])
async def test_the_score_of_a_rollout_without_a_token_counts(step_wise: bool, phase: str, types: None) -> None:
    with generator(Silent(), step_wise=step_wise) as made:
        output = await made.generate(batch(("plain",), phase=phase))
    assert output["rewards"] == [[0.25], [0.5]]
    assert output["loss_masks"] == [[0], [0]]
    assert made.totals["unscored"] == 0
    for temperature in (1.0, 0.0):
        loop = verl_loop(VerlClient(Silent()))
        found = await loop.run({"temperature": temperature}, **columns("plain"))
        assert (found.reward_score, found.response_mask) == (0.25, [0])
        await asyncio.to_thread(loop.shared.close)


async def test_an_engine_that_never_answers_ends_the_rollout_by_our_own_time_limit(types: None) -> None:
    class Unplaced(VerlClient):
        async def generate(self, request_id: str, **asked: Any) -> SimpleNamespace:
            return await asyncio.Event().wait()  # type: ignore[return-value]

    loop = verl_loop(Unplaced(Weights()), time_limit=0.1)
    with pytest.raises(UnscoredRollout, match=r"gave no answer in 0.1 s; is its engine placed and awake"):
        await loop.run({"temperature": 1.0}, **columns("plain"))
    await asyncio.to_thread(loop.shared.close)


async def test_a_rollout_that_outgrows_the_response_of_verl_ends_and_is_scored(types: None) -> None:
    weights = Weights()
    loop = verl_loop(VerlClient(weights), response_length=60)
    output = await loop.run({"temperature": 1.0}, **columns("plain"))
    await asyncio.to_thread(loop.shared.close)
    assert output.reward_score == 0.25
    assert len(output.response_ids) <= 60


async def test_slime_needs_our_baselines_where_its_own_count_samples(types: None) -> None:
    for case in ("edited", "declined"):
        with pytest.raises(SettingsDisagree, match=r"--custom-reward-post-process-path lachesis_train.trainers.slime"):
            await slime_several(case, Weights(), rewards=None)
    async with slime_args() as (args, _):
        with pytest.raises(UnscoredRollout, match="an evaluation of slime would count it as 0"):
            await slime.generate(args, SlimeSample(index=0, metadata=columns("declined")), SAMPLING, evaluation=True)
        await asyncio.to_thread(args.state.lachesis.close)


def test_baselines_of_slime_count_a_rollout_once_and_not_without_a_score() -> None:
    def sample(group: int, rollout: int, reward: float, *, removed: bool = False) -> SlimeSample:
        return SlimeSample(group_index=group, rollout_id=rollout, reward=reward, remove_sample=removed)

    samples = [sample(0, 0, 1.0), sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, 0.0, removed=True)]
    samples += [sample(1, 3, 5.0), sample(1, 4, 2.0), sample(2, 5, 1.0)]

    def advantages(estimator: str = "grpo", *, centred: bool = True, divided: bool = True) -> list[float]:
        args = {"rewards_normalization": centred, "grpo_std_normalization": divided}
        return slime.rewards(SimpleNamespace(advantage_estimator=estimator, **args), samples)[1]

    baselines = pytest.approx([0.5, 0.5, -0.5, 0.0, 1.5, -1.5, 0.0], abs=1e-9)
    assert advantages(divided=False) == advantages("reinforce_plus_plus_baseline") == baselines
    for plain in (advantages("ppo"), advantages("reinforce_plus_plus"), advantages(centred=False)):
        assert plain == [1.0, 1.0, 0.0, 0.0, 5.0, 2.0, 1.0], "as slime, which has baselines only where they are set"
    divided = advantages()
    half = 0.5**0.5 / (1 + 1e-6 / 0.5**0.5)  # (1 - 0.5) / deviation of [1, 0]
    assert divided[:4] == pytest.approx([half, half, -half, 0.0], abs=1e-9)


async def test_group_rewards_need_a_trainer_that_asks_for_groups(types: None) -> None:
    class Compared(Cases):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:
            return [0.0 for _ in results]

    weights = Weights()
    with pytest.raises(SettingsDisagree, match="scores the rollouts of an item together, and this trainer of verl"):
        verl_loop(VerlClient(weights), env=Compared)


@pytest.mark.parametrize("package", ["verl", "slime"])
async def test_without_the_trainer_the_error_names_the_next_step(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.errors import LachesisError

    place = {"verl": "verl.experimental.agent_loop.agent_loop", "slime": "slime.rollout.sglang_rollout"}[package]
    monkeypatch.setitem(sys.modules, place, None)
    with pytest.raises(LachesisError, match=rf"{package} is not usable here .*install"):
        if package == "slime":
            await slime.generate(SimpleNamespace(), SlimeSample(metadata=columns("plain")), SAMPLING)
        else:
            await verl_one("plain", Weights())


def account(rows: Sequence[Arrived], weights: Weights) -> int:
    """Take what the rows train from what was sampled. Returns the number of tokens that are left."""
    kept = Counter(weights.given)
    for row in rows:
        assert len(row.ids) == len(row.mask) == len(row.logprobs)
        assert row.mask[0] == row.mask[-1] == 1 or not any(row.mask)
        assert all((value < 0) == bool(on) for value, on in zip(row.logprobs, row.mask, strict=True))
        whole, at = [*row.prompt, *row.ids], len(row.prompt)
        while at < len(whole):
            if not row.mask[at - len(row.prompt)]:
                at += 1
                continue
            spans = [ids for (prompt, ids), count in kept.items() if count > 0 and prompt == tuple(whole[:at])]
            span = next(ids for ids in spans if tuple(whole[at : at + len(ids)]) == ids)
            kept[tuple(whole[:at]), span] -= 1
            at += len(span)
            assert at == len(whole) or not row.mask[at - len(row.prompt)]
    return sum(len(ids) * count for (_, ids), count in kept.items())


def sampled_by(model: FakeServer) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The completions of a server, each with its prompt."""
    return Counter(
        (tuple(seen.call.prompts[made.prompt]), tuple(made.ids)) for seen in model.requests for made in seen.completions
    )


def verl_loop(
    client: VerlClient, *, env: Any = CASES_ENV, response_length: int = 4000, settings: Any = SETTINGS, **more: Any
) -> LachesisLoop:
    rollout = {"temperature": 1.0, "prompt_length": 4000, "response_length": response_length}
    rollout |= {"calculate_log_probs": True, "logprobs_mode": "processed_logprobs"}
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=Settings(rollout)))
    return LachesisLoop(
        trainer_config=SimpleNamespace(config=config),
        server_manager=client,
        tokenizer=client.weights.tokenizer,
        env=env,
        settings=settings,
        **more,
    )


class Settings(dict[str, Any]):
    """A section of verl's configuration."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@asynccontextmanager
async def slime_args(rewards: str | None = slime._REWARDS) -> AsyncIterator[tuple[SimpleNamespace, FakeServer]]:
    """The arguments of slime beside an SGLang server, on the wire."""
    async with FakeServer(Speaks()) as model:
        host, port = model.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        args = SimpleNamespace(
            sglang_router_ip=host,
            sglang_router_port=port,
            rollout_max_response_len=100,
            custom_reward_post_process_path=rewards,
            lachesis_env=CASES_ENV,
            lachesis_settings=SETTINGS,
        )
        args.state = SimpleNamespace(tokenizer=model.tokenizer)
        yield args, model


@pytest.fixture
def types(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types of verl and slime, or models of them."""
    state = ModuleType("slime.rollout.sglang_rollout")
    state.GenerateState = lambda args: args.state  # type: ignore[attr-defined]
    for name in ("slime", "slime.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "slime.rollout.sglang_rollout", state)
    if importlib.util.find_spec("verl") is not None:
        return

    class AgentLoopMetrics(BaseModel):
        generate_sequences: float = 0.0

    class AgentLoopOutput(BaseModel):
        model_config = ConfigDict(extra="forbid")
        prompt_ids: list[int]
        response_ids: list[int]
        response_mask: list[int]
        response_logprobs: list[float] | None = None
        reward_score: float | None = None
        num_turns: int = 0
        metrics: AgentLoopMetrics
        extra_fields: dict[str, Any] = {}

    made = ModuleType("verl.experimental.agent_loop.agent_loop")
    made.AgentLoopMetrics, made.AgentLoopOutput = AgentLoopMetrics, AgentLoopOutput  # type: ignore[attr-defined]
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)


async def test_a_rollout_with_images_for_which_rows_have_no_place_is_refused_by_name() -> None:
    async with FakeServer(lambda ask: f"I see {len(ask.call.images)}.", images=True) as model:
        engine = SGLangEngine(ServerSettings(base_url=model.base_url, model_name="fake"))
        made = CalledEnvironment(Shows, engine, tokenizer=model.tokenizer, settings=SETTINGS)
        (rollout,) = await made.play("an item")
        with pytest.raises(RejectedRollout, match=f"rollout {rollout.rollout_id} .*it has images"):
            await made.rows(rollout)
        assert len(await made.rows(rollout, evaluation=True)) == 1
        await asyncio.to_thread(made.close)
