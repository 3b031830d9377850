"""Samples that are easily mistaken for each other get their own tokens and scores, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from lachesis_testing.fake_server import FakeServer
from lachesis_testing.fake_server.policies import Lengths, RandomTokens, RandomWords, Scripted
from lachesis_tokens.samples.verification import verify_records
from tests.envs.environments.test_atropos_player import failures_of, fake, groups_of, played, player
from tests.support import hostile_envs as hostile
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.training_runs import proven, trained

__all__ = ["run_api"]


def sampled(server: FakeServer) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, completion) of everything that the server sampled, from its own record."""
    return {
        (tuple(seen.call.prompts[made.prompt]), tuple(made.ids))
        for seen in server.requests
        if seen.call is not None
        for made in seen.completions
    }


async def refusals(env_cls: Any, folder: Path, **how: Any) -> list[str]:
    """Why the samples of the first item were refused; none of them was written."""
    async with fake(**how) as server:
        await player(env_cls, server, folder).process_manager()
    assert groups_of(folder) == []
    return [rollout["reason"] for rollout in failures_of(folder)[0]["rollouts"]]


async def test_one_text_after_two_prompts_is_told_apart_by_the_prompt(tmp_path: Path) -> None:
    async with fake(policy="Yes") as server:
        await player(hostile.TwoPrompts, server, tmp_path).process_manager()
        decode = server.tokenizer.decode
    for group in groups_of(tmp_path):
        assert group["scores"] == [2.0, 1.0]
        prompts = [decode(sample["tokens"][: sample["spans"][0]["start"]]) for sample in group["samples"]]
        assert "Prompt B" in prompts[0] and "Prompt A" in prompts[1]


async def test_one_text_after_two_prompts_is_refused_where_the_sample_shows_neither(tmp_path: Path) -> None:
    class Blind(hostile.TwoPrompts):
        shows_prompt = False

    reasons = await refusals(Blind, tmp_path, policy="Yes")
    assert all("text that the model wrote in several conversations" in reason for reason in reasons), reasons


@pytest.mark.sample(4)
@pytest.mark.parametrize("policy", [RandomTokens(), None, "Yes"], ids=["tokens", "words", "yes"])
@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_the_environment_decides_which_turns_are_trained(tmp_path: Path, kept: int, policy: Any) -> None:
    class Kept(hostile.OneTurn):
        pass

    Kept.kept = kept
    async with fake(policy=policy) as server:
        await player(Kept, server, tmp_path).process_manager()
        decode = server.tokenizer.decode
    groups = groups_of(tmp_path)
    assert len(groups) == 2
    for group in groups:
        (sample,) = group["samples"]
        (span,) = sample["spans"]
        assert decode(sample["tokens"][: span["start"]]).count("<|im_start|>assistant") == kept + 1
        assert [place for place, mask in enumerate(sample["masks"]) if mask != -100] == [
            *range(span["start"], span["end"])
        ]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("env_cls", "count"), [(hostile.HalfATurn, 1), (hostile.Everything, 1), (hostile.FewShot, 1), (hostile.Edited, 3)]
)
@pytest.mark.parametrize("policy", [None, "Yes, of course"])
async def test_what_was_not_said_as_it_is_trained_is_refused(
    tmp_path: Path, env_cls: Any, count: int, policy: str | None
) -> None:
    if env_cls is hostile.FewShot and policy is not None:
        policy = "Yes"  # the example's answer
    reasons = await refusals(env_cls, tmp_path, policy=policy)
    assert len(reasons) == count
    assert all("is refused: it trains text that the model did not say" in reason for reason in reasons), reasons


async def test_equal_turns_of_one_conversation_are_all_trained(tmp_path: Path) -> None:
    class Shown(hostile.SameTurns):
        as_chat = True

    groups = await played(Shown, tmp_path, policy="Yes")
    assert [len(sample["spans"]) for group in groups for sample in group["samples"]] == [3, 3]


async def test_equal_turns_without_their_conversation_are_refused_and_not_counted_as_one(tmp_path: Path) -> None:
    (reason,) = await refusals(hostile.SameTurns, tmp_path, policy="Yes")
    assert "wrote in several conversations" in reason


async def test_an_answer_and_its_cut_twin_are_refused_with_different_scores_and_trained_once_each_with_one(
    tmp_path: Path,
) -> None:
    class OneScore(hostile.CutTwin):
        scores = (1.0, 1.0)

    reasons = await refusals(hostile.CutTwin, tmp_path / "two", policy="Yes")
    assert len(reasons) == 2 and all("other samples with its text have other scores" in reason for reason in reasons)
    for group in await played(OneScore, tmp_path / "one", policy="Yes"):
        assert len({tuple(sample["tokens"]) for sample in group["samples"]}) == 2
        assert "beside" not in group


@pytest.mark.sample(4)
@pytest.mark.parametrize("env_cls", [hostile.Observed, hostile.ObservedMessage])
@pytest.mark.parametrize("turns", [2, 4])
@pytest.mark.parametrize("between", ["<obs>3</obs>", " ", ""])
async def test_all_turns_within_one_trained_text_are_trained(
    tmp_path: Path, env_cls: Any, turns: int, between: str
) -> None:
    env_cls = type("Env", (env_cls,), {"turns": turns, "between": between})
    async with fake(policy=RandomWords(Lengths(12, 16))) as server:
        await player(env_cls, server, tmp_path).process_manager()
        made = sampled(server)
    groups = groups_of(tmp_path)
    records = [rollout for group in groups for rollout in group["rollouts"]]
    assert [rollout["turns"] for rollout in records] == [turns] * 6
    assert all(not rollout["discarded"] for rollout in records)
    assert all("beside" not in group for group in groups)
    totals = verify_records(groups)
    assert totals.ok and totals.delivered == sum(len(ids) for _, ids in made), totals.problems


async def test_turns_that_go_on_from_their_exact_tokens_are_one_sequence(tmp_path: Path) -> None:
    async with fake(policy=RandomWords(Lengths(40, 40))) as server:  # the limit of the request ends each
        await player(hostile.Observed, server, tmp_path).process_manager()
    samples = [sample for group in groups_of(tmp_path) for sample in group["samples"]]
    assert [len(sample["spans"]) for sample in samples] == [2] * 6


@pytest.mark.parametrize(
    "env_cls",
    [
        *(hostile.ObservedCut, hostile.ObservedWithoutItsBeginning, hostile.ObservedFromTheMiddle),
        *(hostile.ObservedElsewhere, hostile.WholeChat),
    ],
)
async def test_a_trained_text_with_an_answer_that_was_given_otherwise_is_refused(tmp_path: Path, env_cls: Any) -> None:
    async with fake(policy=RandomWords(Lengths(12, 16))) as server:
        await player(env_cls, server, tmp_path).process_manager()
    assert groups_of(tmp_path) == [] and failures_of(tmp_path)
    for group in failures_of(tmp_path):
        assert {rollout["unscored_kind"] for rollout in group["rollouts"]} == {"not_sampled"}
        assert all("is refused: it trains" in rollout["reason"] for rollout in group["rollouts"])


async def test_equal_answers_that_are_continued_are_each_trained_once(tmp_path: Path) -> None:
    class Stopped(hostile.Observed):
        stop: ClassVar[list[str]] = ["</call>"]
        between = "</call><obs>3</obs>"

    def policy(ask: Any) -> str:
        return "so it is 3" if "<obs>" in ask.prompt else "I compute <call>1+2</call>"

    groups = await played(Stopped, tmp_path, policy=policy)
    assert [rollout["turns"] for group in groups for rollout in group["rollouts"]] == [2] * 6
    assert all("beside" not in group for group in groups)


async def test_a_mask_over_several_turns_with_calls_is_refused(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = call, call.replace("1", "2")
    reasons = await refusals(hostile.WholeCalls, tmp_path, policy=Scripted(*said, by_turn=True))
    assert all("it trains text that the model did not say" in reason for reason in reasons), reasons


async def test_answers_that_the_environment_dropped_stop_no_sample_that_goes_on_from_another(tmp_path: Path) -> None:
    class BestOfThree(hostile.Observed):
        async def collect_trajectories(self, item: Any) -> Any:
            prompt = "Think: "
            given = await self.server.completion(prompt=prompt, n=3, max_tokens=32)
            text = f"{prompt}{given.choices[1].text}<obs>3</obs>"
            text += (await self.server.completion(prompt=text, n=1, max_tokens=32)).choices[0].text
            ids, masks = self.sample(prompt, text)
            return {"tokens": [ids], "masks": [masks], "scores": [1.0]}, []

    policy = Scripted(*(f"think it over carefully, {number}" for number in range(3)), "so it is 3")
    groups = await played(BestOfThree, tmp_path, policy=policy)
    assert [rollout["turns"] for group in groups for rollout in group["rollouts"]] == [2, 2]


async def test_one_answer_has_one_score(tmp_path: Path) -> None:
    reasons = await refusals(hostile.Gold, tmp_path, policy="Yes")
    assert len(reasons) == 2 and all("other samples with its text have other scores" in reason for reason in reasons)


@pytest.mark.sample(4)
@pytest.mark.parametrize("policy", [None, "Yes"], ids=["words", "yes"])
@pytest.mark.parametrize("env_cls", [hostile.Twice, hostile.NodesTwice])
@pytest.mark.parametrize("as_groups", [False, True], ids=["one group", "two groups"])
async def test_a_completion_that_is_returned_twice_is_trained_once(
    tmp_path: Path, env_cls: Any, as_groups: bool, policy: str | None
) -> None:
    class Returned(env_cls):
        pass

    Returned.as_groups = as_groups
    async with fake(policy=policy) as server:
        env = player(Returned, server, tmp_path)
        await env.process_manager()
        made = sampled(server)
    records = groups_of(tmp_path) + failures_of(tmp_path)
    refused = [each["reason"] for group in records for each in group["rollouts"] if each["reward"] is None]
    which = "sample 0 of group 0 of its item trains" if as_groups else "sample 0 trains"
    assert len(refused) == env.drift_totals.refused == 2
    assert all(f"is refused: it trains an answer that {which}, and each answer" in reason for reason in refused)
    totals = verify_records(groups_of(tmp_path))
    assert totals.ok, totals.problems
    assert totals.delivered == sum(len(ids) for _, ids in made) or policy == "Yes"
    assert len({span["completion_id"] for group in records for one in group["samples"] for span in one["spans"]}) == 4


async def test_one_completion_with_two_scores_is_refused_both_times(tmp_path: Path) -> None:
    class TwoScores(hostile.NodesTwice):
        scores = (1.0, 0.0, 0.5)

    groups = await played(TwoScores, tmp_path)
    assert [group["scores"] for group in groups] == [[0.5], [0.5]]
    refused = [each["reason"] for group in groups for each in group["rollouts"] if each["reward"] is None]
    assert len(refused) == 4 and all("other samples with its text have other scores" in reason for reason in refused)


async def test_a_turn_that_two_samples_share_is_trained_in_the_first(tmp_path: Path) -> None:
    groups = await played(hostile.SharedTurn, tmp_path)
    for group in groups:
        kept, refused = group["rollouts"]
        assert (kept["reward"], kept["turns"], refused["reward"]) == (1.0, 2, None)
        assert "it trains an answer that sample 0 trains" in refused["reason"]
        assert group["beside"]["completions"] == 1, "the other answer of the refused sample"


async def test_a_completion_of_an_earlier_item_is_not_trained_again(tmp_path: Path) -> None:
    async with fake() as server:
        await player(hostile.Kept, server, tmp_path, "--env.max_num_workers", "1").process_manager()
    (first,) = groups_of(tmp_path)
    (later,) = failures_of(tmp_path)
    assert len(first["samples"]) == 1
    assert all("it trains text that the model did not say" in each["reason"] for each in later["rollouts"])


async def test_equal_answers_in_other_tokens_are_each_trained_once(tmp_path: Path) -> None:
    """The environment encodes the text again, so the ids tell nothing: the first turn of all conversations is equal."""

    def policy(ask: Any) -> str:
        return "Think" if ask.prompt.count("<|im_start|>assistant") == 1 else f"so it is {ask.number}"

    async with fake(policy=policy) as server:
        await player(hostile.Reencoded, server, tmp_path).process_manager()
        made = [each for seen in server.requests if seen.call is not None for each in seen.completions]
    groups = groups_of(tmp_path)
    assert [rollout["turns"] for group in groups for rollout in group["rollouts"]] == [2] * 6
    totals = verify_records(groups)
    assert totals.ok and totals.delivered == sum(len(each.ids) for each in made), totals.problems


async def test_serve_says_which_turns_it_did_not_send(tmp_path: Path, run_api: StockRunApi) -> None:
    async with run_api.wiped() as api, fake(policy=RandomWords(Lengths(12, 16))) as model:
        flags = {"env.rollout_server_url": api.url, "env.spool_path": tmp_path / "spool", "env.steps_per_eval": 0}
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        env = player(hostile.Observed, model, tmp_path, *given, "--env.group_size", "2", "--env.max_num_workers", "2")
        env.config.total_steps = -1
        serve, ended = env.env_manager, []

        async def noted() -> Any:
            ended.append(await serve())
            return ended[-1]

        env.env_manager = noted  # type: ignore[method-assign]
        trainer = await trained(env, api, groups=4, steps=1)
    sent = sum(sample.trained for sample in proven(trainer))
    assert 0 < sent < sum(sample.sampled for sample in proven(trainer))
    rows = dict(ended[0].rows())
    assert "of this start, in additional samples of rollouts (--env.split_rollouts all sends them)" in rows["not sent"]


async def test_serve_sends_the_sampled_tokens_of_a_foreign_environment(tmp_path: Path, run_api: StockRunApi) -> None:
    async with run_api.wiped() as api, fake() as model:
        flags = {
            "env.rollout_server_url": api.url,
            "env.spool_path": tmp_path / "spool",
            "env.group_size": 2,
            "env.ensure_scores_are_not_same": False,
            "env.steps_per_eval": 0,
            "env.max_num_workers": 2,
        }
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        env = player(hostile.Sorted, model, tmp_path, *given)
        env.config.total_steps = -1
        trainer = await trained(env, api, groups=4, steps=2)
        said = sampled(model)
    samples = proven(trainer)
    assert len(samples) == 2 * len(trainer.groups) >= 8
    assert len({sample.rollout_id for sample in samples}) == len(samples)
    for sample in samples:
        for span in sample.spans:
            assert (tuple(sample.tokens[: span.start]), tuple(sample.tokens[span.start : span.end])) in said
    for group in trainer.groups:
        for score, masks in zip(group["scores"], group["masks"], strict=True):
            text = model.tokenizer.decode([each for each in masks if each != -100], skip_special_tokens=True)
            assert score == hostile.value(text)
