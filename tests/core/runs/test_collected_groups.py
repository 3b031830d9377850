"""Environments of our own base class that override Atropos' hooks."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from environments.tool_context import ToolContext
from lachesis.runs.group_records import group_record
from lachesis.runs.registration import Registration
from lachesis_messages.records.digests import certified
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tokens.samples.decision import ANY_TRAINER, decide_for_training
from lachesis_tokens.samples.group_shapes import samples_from_atropos
from lachesis_tokens.samples.verification import verify, verify_records
from tests.support.small_envs import ManyWords
from tests.support.training_runs import with_tokens


def make(env_cls: Any, server: FakeServer, folder: Path, **settings: Any) -> Any:
    chosen = {
        "group_size": 2,
        "total_steps": 2,
        "max_token_length": 24,
        "max_agent_turns": 2,
        "max_resamples": 1,
        "enabled_toolsets": [],
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
        **settings,
    }
    env = env_cls(env_cls.env_config_cls(**chosen), [with_tokens(server, folder)])
    env.console = Console(file=(folder / "console.txt").open("a"), width=200)
    return env


class Enriched(ManyWords):
    """Changes the scores of its own group, and adds a field with an entry for each token."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(len(result.final_response))

    async def collect_trajectories(self, item: Any) -> Any:
        group, backlog = await super().collect_trajectories(item)
        if group is not None:
            await self.server.chat_completion(messages=[{"role": "user", "content": "a hint?"}], n=1, max_tokens=8)
            group["scores"] = [float(place) for place in range(len(group["scores"]))]
            group["distill_token_ids"] = [[[1]] * len(tokens) for tokens in group["tokens"]]
        return group, backlog


class OneByOne(ManyWords):
    """Plays by our loop, and scores each trajectory by itself."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 0.0

    async def collect_trajectory(self, item: Any) -> Any:
        trajectory, backlog = await super().collect_trajectory(item)
        trajectory["scores"] = float(len(trajectory["tokens"]))
        return trajectory, backlog


class EnrichedEach(Enriched):
    """The same with the field in each trajectory."""

    collect_trajectories = ManyWords.collect_trajectories

    async def collect_trajectory(self, item: Any) -> Any:
        trajectory, backlog = await super().collect_trajectory(item)
        trajectory["distill_token_ids"] = [[1]] * len(trajectory["tokens"])
        return trajectory, backlog


class ByItself(ManyWords):
    """Asks the model without our loop."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 0.0

    async def collect_trajectory(self, item: Any) -> Any:
        messages = [{"role": "user", "content": self.format_prompt(item)}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=messages, n=1, max_tokens=24)
            (node,) = managed.get_state()["nodes"]
        return {"tokens": node.tokens, "masks": node.masked_tokens, "scores": 1.0}, []


async def process(env_cls: Any, folder: Path, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    async with FakeServer() as server:
        env = make(env_cls, server, folder, **settings)
        await env.process_manager()
    groups = list(read_lines(folder / "groups.jsonl"))
    totals = verify_records(groups)
    assert totals.ok, totals.problems
    return env, groups


async def test_an_override_of_collect_trajectories_changes_scores_and_samples_keep_their_certificates(
    tmp_path: Path,
) -> None:
    _, groups = await process(Enriched, tmp_path)
    assert [group["scores"] for group in groups] == [[0.0, 1.0], [0.0, 1.0]]
    for group in groups:
        by_rollout = {sample["rollout_id"]: sample for sample in group["samples"]}
        assert [len(each) for each in group["distill_token_ids"]] == [
            len(sample["tokens"]) for sample in by_rollout.values()
        ]
        assert len(group["rollouts"]) == 2
        hint = group["beside"]
        assert hint["completions"] == 1 and hint["completion_tokens"] > 0
        assert hint["reason"] == "1 completion is in no sample that the environment returned"


async def test_serve_sends_the_fields_that_an_override_added(tmp_path: Path) -> None:
    async with FakeServer() as server:
        env = make(Enriched, server, tmp_path, ensure_scores_are_not_same=False)
        async with env.running(training=True):
            item = await env.get_next_item()
            (group,) = await env.collect_groups(item, "key")
            decision = await asyncio.to_thread(decide_for_training, group, env.config, ANY_TRAINER)
    sent = decision.content
    assert sent["scores"] == [0.0, 1.0]
    assert [len(each) for each in sent["distill_token_ids"]] == [len(tokens) for tokens in sent["tokens"]]
    assert [verify(sample) for sample in samples_from_atropos(sent)] == [[], []]
    json.dumps(sent)


@pytest.mark.parametrize(
    ("env_cls", "settings", "counts", "with_field"),
    [
        (EnrichedEach, {}, [1, 1], True),
        (EnrichedEach, {"split_rollouts": "longest", "discarded_attempts": "rollout"}, [1, 1], False),
        (Enriched, {}, [1, 1], True),
        (Enriched, {"split_rollouts": "all", "discarded_attempts": "rollout"}, [2, 2], False),
    ],
)
async def test_a_field_of_tokens_goes_with_no_other_sample_of_its_rollout(
    tmp_path: Path, env_cls: Any, settings: dict[str, Any], counts: list[int], with_field: bool
) -> None:
    asked: list[Ask] = []

    def cut_first(ask: Ask) -> str:
        asked.append(ask)
        cut = '<tool_call>\n{"name": "todo", "arguments": {"todos": "' + "tide " * 90
        return cut if len(asked) <= 2 else "Done."

    async with FakeServer(cut_first, weight_version="v2+lora") as server:
        settings = {"enabled_toolsets": ["todo"], "sandbox": "none", **settings}
        env = make(env_cls, server, tmp_path, ensure_scores_are_not_same=False, **settings)
        async with env.running(training=True):
            (group,) = await env.collect_groups(await env.get_next_item(), "key")
            sent = (await asyncio.to_thread(decide_for_training, group, env.config, ANY_TRAINER)).content
    found = samples_from_atropos(sent)
    of_rollouts = Counter(sample.rollout_id for sample in found)
    assert list(of_rollouts.values()) == counts and sum(rollout.samples[0].count for rollout in group.rollouts) == 4
    assert all(sample.discarded == (sample.index == 1) for sample in found)
    assert sent["group_overrides"]["model_versions"] == ["v2+lora"]
    lengths = [len(each) for each in sent.get("distill_token_ids") or []]
    assert lengths == ([len(sample.tokens) for sample in found] if with_field else [])
    record = group_record(group, environment="e", model="m")
    assert verify_records([certified(record)]).ok and record["rollouts"][0]["index"] == 0


async def test_an_override_of_collect_trajectory_scores_our_own_rollouts(tmp_path: Path) -> None:
    _, groups = await process(OneByOne, tmp_path)
    assert len(groups) == 2
    for group in groups:
        assert [rollout["index"] for rollout in group["rollouts"]] == [0, 1]
        assert all(score > 1 for score in group["scores"])


async def test_an_override_may_ask_the_model_by_itself(tmp_path: Path) -> None:
    _, groups = await process(ByItself, tmp_path)
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2


async def test_histories_are_postprocessed(tmp_path: Path) -> None:
    class Halved(ManyWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 3.0

        async def postprocess_histories(self, trajectories: Any) -> Any:
            return {**trajectories, "scores": [score / 2 for score in trajectories["scores"]]}

    _, groups = await process(Halved, tmp_path, ensure_scores_are_not_same=False)
    assert [group["scores"] for group in groups] == [[1.5, 1.5]] * 2


class Twice(ManyWords):
    """Returns its own group twice, or one of its sequences twice within the group."""

    within = False

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(len(result.final_response))

    async def collect_trajectories(self, item: Any) -> Any:
        group, backlog = await super().collect_trajectories(item)
        if not self.within:
            return [group, group], backlog
        names = [name for name, values in group.items() if isinstance(values, list)]
        return {**group, **{name: [*group[name], *group[name][:1]] for name in names}}, backlog


@pytest.mark.parametrize("within", [False, True], ids=["two groups", "one group"])
async def test_a_rollout_that_is_returned_twice_is_trained_once(tmp_path: Path, within: bool) -> None:
    _, groups = await process(type("Returned", (Twice,), {"within": within}), tmp_path)
    assert len(groups) == 2
    failed = [*read_lines(tmp_path / "groups.failed.jsonl")]
    refused = [each["reason"] for group in (*groups, *failed) for each in group["rollouts"] if each["reward"] is None]
    assert len(refused) == (2 if within else 4)
    assert all("is refused: group 0 of its item has rollout" in reason for reason in refused), refused
    totals = verify_records(groups)
    assert totals.ok and totals.delivered == totals.sampled > 0, totals.problems


async def test_rollouts_for_wandb_are_shown_by_an_override(tmp_path: Path) -> None:
    class Shown(ManyWords):
        seen: tuple[Any, ...] = ()

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 1.0

        async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
            Shown.seen += ((scored_data, item),)

    _, groups = await process(Shown, tmp_path)
    assert sorted(map(str, (item for _, item in Shown.seen))) == sorted(str(group["item"]) for group in groups)
    for shown, _ in Shown.seen:
        assert len(shown["tokens"]) == len(shown["masks"]) == len(shown["scores"]) == 2


async def test_state_is_saved_where_the_trainer_saves_and_loaded_where_it_starts(tmp_path: Path) -> None:
    class Stateful(ManyWords):
        place = 0

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 1.0

        def save_checkpoint(self, step: int, data: Any = None) -> None:
            super().save_checkpoint(step, {"place": self.place})

    async with FakeServer() as server:
        registration = Registration(0, 0, 10, str(tmp_path), 5)
        env = make(Stateful, server, tmp_path)
        env.at_step(0, registration)
        env.place = 7
        env.at_step(4, registration)
        assert not (tmp_path / "env_checkpoints").exists()
        env.at_step(11, registration)
        (saved,) = (tmp_path / "env_checkpoints").rglob("*.json")
        assert (saved.name, json.loads(saved.read_text())) == ("step-10.json", {"place": 7})
        again = make(Stateful, server, tmp_path)
        again.at_step(10, registration)
        assert again.place == 7


async def test_an_override_reads_the_messages_of_its_group_also_where_they_are_not_sent(tmp_path: Path) -> None:
    class Reads(Enriched):
        async def collect_trajectories(self, item: Any) -> Any:
            group, backlog = await super().collect_trajectories(item)
            assert [messages[-1]["role"] for messages in group["messages"]] == ["assistant"] * 2
            return group, backlog

    async with FakeServer() as server:
        env = make(Reads, server, tmp_path, ensure_scores_are_not_same=False)
        assert env.config.include_messages is False
        async with env.running(training=True):
            (group,) = await env.collect_groups(await env.get_next_item(), "key")
            decision = await asyncio.to_thread(decide_for_training, group, env.config, ANY_TRAINER)
    assert decision.content["messages"] is None
    assert group.beside is not None and group.beside.result is not None
    assert decision.undelivered == group.beside.result.tokens.completion_tokens > 0


async def test_what_a_judge_says_is_no_rollout_and_no_trajectory(tmp_path: Path) -> None:
    await process(Enriched, tmp_path)
    written = [*read_lines(tmp_path / "trajectory_samples.jsonl"), *read_lines(tmp_path / "failed_trajectories.jsonl")]
    assert len(written) == 4 and "a hint?" not in json.dumps(written)


async def test_a_context_may_be_called_without_await_in_overrides(tmp_path: Path) -> None:
    class Measured(ManyWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 0.0

        async def collect_trajectory(self, item: Any) -> Any:
            trajectory, backlog = await super().collect_trajectory(item)
            ctx = ToolContext(f"measured-{id(trajectory)}")
            trajectory["scores"] = float(ctx.terminal("echo 7")["output"])  # type: ignore[index]
            ctx.cleanup()
            return trajectory, backlog

    _, groups = await process(Measured, tmp_path, enabled_toolsets=["terminal"], terminal_backend="local")
    assert [group["scores"] for group in groups] == [[7.0, 7.0]] * 2


async def test_an_override_that_hangs_ends_by_its_time_limit(tmp_path: Path) -> None:
    class Hangs(ManyWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 0.0

        async def collect_trajectories(self, item: Any) -> Any:
            await asyncio.Event().wait()

    limits = {"rollout_timeout": 0.2, "reward_timeout": 0.2, "max_infra_retries": 0}
    async with FakeServer() as server:
        env = make(Hangs, server, tmp_path, total_steps=1, **limits)
        result = await env.process_manager()
    assert result.failed_groups == 1
    (cause,) = result.figures.causes
    assert "took longer than 1.2 s; see env.rollout_timeout" in cause.example


async def test_a_method_that_no_run_calls_is_named(tmp_path: Path) -> None:
    class Sends(ManyWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 0.0

        async def handle_send_to_api(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

    await process(Sends, tmp_path)
    assert "Sends overrides handle_send_to_api: not called" in (tmp_path / "console.txt").read_text()
