"""Environments on atroposlib's BaseEnv, played by our runs: what they return becomes what was sampled."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from backends.errors import SettingsError
from lachesis.cli.environment_files import load_env
from lachesis.runs.command_line import read_settings
from lachesis.settings.server_settings import ServerConfigError
from lachesis_compat.atropos.player import AtroposPlayer, EvaluationFailed, player_for, prepare_imports
from lachesis_compat.collecting.matching import Matcher
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import FakeServer, Scripted
from lachesis_testing.fake_server.policies import RandomTokens
from lachesis_tokens.samples.verification import verify_records
from tests.support.recipes import shown

prepare_imports()  # before the module of the environments, as `lachesis play` does
from tests.support import stock_envs as stock  # noqa: E402


def player(stock_cls: Any, server: FakeServer, folder: Path, *flags: str, phase: int = 2) -> AtroposPlayer:
    """A run's environment, with settings as the command line reads them."""
    tokenizer = folder / "tokenizer"
    server.tokenizer.save_pretrained(str(tokenizer))
    given = [
        *("--openai.base_url", server.base_url, "--openai.model_name", "fake", "--openai.api_key", "x"),
        *("--openai.logprobs_mode", "processed", "--openai.max_retries", "0"),
        *("--env.data_path_to_save_groups", str(folder / "groups.jsonl")),
        *("--env.data_dir_to_save_evals", str(folder / "eval"), "--env.tokenizer_name", str(tokenizer)),
    ]
    if phase == 2:
        given += ["--openai.server_type", "vllm", "--openai.tokenizer_name", str(tokenizer)]
    cls = player_for(stock_cls)
    cls.drift = "json"
    _, settings = read_settings(cls, ["process", *given, *flags])
    return cls(**settings)


def fake(**how: Any) -> FakeServer:
    return FakeServer(**{"logprobs_mode": "processed", "vary": True, **how})


def groups_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "groups.jsonl"
    return list(read_lines(path)) if path.exists() else []


def failures_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "groups.failed.jsonl"
    return list(read_lines(path)) if path.exists() else []


async def played(stock_cls: Any, folder: Path, *flags: str, **how: Any) -> list[dict[str, Any]]:
    """The groups that `process` wrote, each sample with a certificate."""
    async with fake(**how) as server:
        await player(stock_cls, server, folder, *flags).process_manager()
    groups = groups_of(folder)
    totals = verify_records(groups)
    assert totals.ok, totals.problems
    scored = [rollout for group in groups for rollout in group["rollouts"] if rollout["reward"] is not None]
    assert totals.delivered == sum(rollout["completion_tokens"] for rollout in scored)
    return groups


async def test_answers_of_a_chat_get_their_sampled_tokens_and_keep_their_scores(tmp_path: Path) -> None:
    groups = await played(stock.ChatEnv, tmp_path)
    assert len(groups) == 2
    for group in groups:
        assert group["scores"] == [0.0, 1.0, 2.0]
        said = [messages[-1]["content"] for messages in group["messages"]]
        assert len(set(said)) == 3
        assert [len(sample["spans"]) for sample in group["samples"]] == [1, 1, 1]


async def test_the_environment_of_the_page_plays_unmodified(tmp_path: Path) -> None:
    (tmp_path / "capitals_of_page.py").write_text(shown("from-atropos.md")["capitals.py"])
    cls = load_env(str(tmp_path / "capitals_of_page.py"))
    (group,) = await played(cls, tmp_path, "--env.total_steps", "1", policy=Scripted("Lima"))
    assert group["scores"] == [1.0] * 4


async def test_scores_follow_the_text_and_not_the_order_of_sampling(tmp_path: Path) -> None:
    groups = await played(stock.ShuffledEnv, tmp_path)
    for group in groups:
        assert len(group["scores"]) == 2
        for score, messages in zip(group["scores"], group["messages"], strict=True):
            assert score == len(messages[-1]["content"])


async def test_a_completion_that_no_sample_contains_is_counted_and_kept_as_a_record(tmp_path: Path) -> None:
    for group in await played(stock.ShuffledEnv, tmp_path):
        assert all(rollout["reward"] is not None for rollout in group["rollouts"])
        left = group["beside"]
        assert left["reason"] == "1 completion is in no sample that the environment returned"
        assert left["completion_tokens"] > 0 and left["messages"][-1]["content"]


async def test_overrides_are_kept_and_fields_for_other_tokens_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = await played(stock.ShuffledEnv, tmp_path)
    assert groups[0]["overrides"] == [{"set_advantage_to_zero": True}, {"set_advantage_to_zero": False}]
    assert groups[0]["group_overrides"] == {"group_size": 2}
    assert groups[0]["advantages"] is None
    assert "advantages of the environment belong to other tokens than were sampled" in capsys.readouterr().err


async def test_turns_of_a_conversation_become_one_sample_with_exact_prefixes(tmp_path: Path) -> None:
    groups = await played(stock.TurnsEnv, tmp_path)
    assert [len(sample["spans"]) for group in groups for sample in group["samples"]] == [3] * 6
    assert all(rollout["turns"] == 3 for group in groups for rollout in group["rollouts"])


async def test_nodes_of_a_managed_server_are_known_by_their_ids_and_keep_what_belongs_to_tokens(tmp_path: Path) -> None:
    groups = await played(stock.NodesEnv, tmp_path)
    for group in groups:
        assert group["scores"] == [1.0, 0.0, 0.5]
        assert [len(each) for each in group["advantages"]] == [len(sample["tokens"]) for sample in group["samples"]]


async def test_a_prefill_counts_as_prompt(tmp_path: Path) -> None:
    groups = await played(stock.CompletionEnv, tmp_path)
    sample = groups[0]["samples"][0]
    assert sum(mask != -100 for mask in sample["masks"]) == groups[0]["rollouts"][0]["completion_tokens"]


async def test_ids_that_the_environment_encoded_by_itself_are_known_by_the_text_of_what_they_train(
    tmp_path: Path,
) -> None:
    groups = await played(stock.RawIdsEnv, tmp_path)
    assert [group["scores"] for group in groups] == [[1.0, 0.0, 0.5]] * 2


async def test_backlog_items_are_played(tmp_path: Path) -> None:
    groups = await played(stock.BacklogEnv, tmp_path, "--env.total_steps", "5")
    assert sorted(group["item"][1] for group in groups) == [1, 10, 11]


async def test_all_groups_of_an_item_are_written(tmp_path: Path) -> None:
    groups = await played(stock.ListEnv, tmp_path)
    assert len(groups) == 4
    keys = [group["item_key"] for group in groups]
    assert sorted(key.partition("+")[2] for key in keys) == ["", "", "1", "1"]
    assert len({sample["rollout_id"] for group in groups for sample in group["samples"]}) == 12
    before = (tmp_path / "groups.jsonl").read_bytes()
    await played(stock.ListEnv, tmp_path)
    assert (tmp_path / "groups.jsonl").read_bytes() == before, "a second start plays nothing again"


async def test_a_run_that_was_killed_between_the_groups_of_an_item_loses_and_doubles_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "groups.jsonl"
    await played(stock.ListEnv, tmp_path, "--env.total_steps", "1")
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:100])
    groups = await played(stock.ListEnv, tmp_path, "--env.total_steps", "1")
    assert path.read_bytes().startswith(first)
    assert len({group["item_key"] for group in groups}) == len(groups) == 2
    assert len({sample["rollout_id"] for group in groups for sample in group["samples"]}) == 6
    assert "+1: an earlier start wrote this group; the new result of its item is left out" in capsys.readouterr().err


async def test_a_method_of_the_environment_that_no_run_calls_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sends(stock.ChatEnv):
        async def handle_send_to_api(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    await played(Sends, tmp_path)
    assert "Sends overrides handle_send_to_api: not called" in capsys.readouterr().err


async def test_an_answer_that_comes_after_the_item_is_no_silent_loss(tmp_path: Path) -> None:
    class Leaves(stock.ChatEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            self.task = asyncio.create_task(self.answers(item))
            await asyncio.sleep(0.1)
            return None, []

    async with fake(latency=(0.5, 0.6)) as server:
        env = player(Leaves, server, tmp_path, "--env.total_steps", "1")
        async with env.running():
            await env.collect_groups(await env.get_next_item(), "key")
            with pytest.raises(RuntimeError, match="an answer of the model after the groups"):
                await env.stock.task


async def test_text_that_the_model_did_not_say_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = await played(stock.EditedEnv, tmp_path)
    assert [group["scores"] for group in groups] == [[0.0], [0.0]]
    refused = [rollout["reason"] for rollout in groups[0]["rollouts"] if rollout["reward"] is None]
    assert refused[0].startswith("sample 0 is refused: it trains text that the model did not say: '")
    assert "'As a person I would say this.'" in refused[1]
    assert groups[0]["beside"]["reason"] == "2 completions are in no sample that the environment returned"
    assert '"refused": 4' in capsys.readouterr().out


async def test_an_item_without_a_group_is_no_failure_and_no_data(tmp_path: Path) -> None:
    async with fake() as server:
        env = player(stock.NoneEnv, server, tmp_path, "--env.total_steps", "5", "--env.max_failed_groups", "1")
        result = await env.process_manager()
    assert (result.declined, result.failed_groups, result.exit_code) == (5, 0, 1)
    assert failures_of(tmp_path)[0]["beside"]["completion_tokens"] > 0 and result.tokens > 0


async def test_an_exception_of_the_environment_is_shown_with_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fake() as server:
        result = await player(stock.RaisingEnv, server, tmp_path).process_manager()
    assert result.failed and result.exceptions == 2
    assert "no such key in my data" in capsys.readouterr().err
    (rollout,) = failures_of(tmp_path)[0]["rollouts"]
    assert "in collect_trajectories" in rollout["traceback"] and rollout["completion_tokens"] > 0


async def test_a_failure_of_the_server_is_no_score_also_if_the_environment_swallows_it(tmp_path: Path) -> None:
    async with fake(faults={"server_error": 1.0}) as server:
        env = player(stock.SwallowingEnv, server, tmp_path, "--env.max_infra_retries", "1")
        result = await env.process_manager()
    assert result.failed_groups == 2 and not groups_of(tmp_path)
    (rollout,) = failures_of(tmp_path)[0]["rollouts"]
    assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 2)


async def test_an_item_that_met_a_failure_is_played_again(tmp_path: Path) -> None:
    groups = await played(stock.SwallowingEnv, tmp_path, faults={"server_error": [1]})
    attempts = [group["rollouts"][0]["attempts"] for group in groups]
    assert sorted(attempts) == [1, 2]
    assert all(group["scores"] == [1.0, 1.0, 1.0] for group in groups)
    again = next(group["rollouts"][0] for group in groups if group["rollouts"][0]["attempts"] == 2)
    assert again["lost_completion_tokens"] > 0 and again["retried_after"]


async def test_threads_of_an_item_ask_for_it(tmp_path: Path) -> None:
    groups = await played(stock.ThreadEnv, tmp_path)
    assert len(groups) == 4


async def test_the_event_loop_has_its_own_threads_again_after_the_last_of_two_players(tmp_path: Path) -> None:
    loop: Any = asyncio.get_running_loop()
    await asyncio.to_thread(int)
    before = loop._default_executor
    assert before is not None
    async with fake() as server:
        envs = [player(stock.ThreadEnv, server, tmp_path / name) for name in "ab"]
        async with envs[0].running():
            async with envs[1].running():
                threads = loop._default_executor
            assert loop._default_executor is threads is not before, "one player goes on"
        assert loop._default_executor is before


async def test_items_that_are_collected_at_once_are_told_apart(tmp_path: Path) -> None:
    groups = await played(
        stock.TurnsEnv, tmp_path, "--env.total_steps", "8", "--env.max_num_workers", "8", latency=(0.0, 0.02)
    )
    for group in groups:
        asked = {messages[0]["content"] for messages in group["messages"]}
        assert asked == {f"Question {group['item'][1]}"}


async def test_hooks_get_the_groups_with_the_sampled_tokens(tmp_path: Path) -> None:
    async with fake() as server:
        env = player(stock.ChatEnv, server, tmp_path)
        await env.process_manager()
    groups = {json.dumps(group["item"]): group for group in groups_of(tmp_path)}
    assert len(env.stock.shown) == 2 and len(env.stock.logged) == 2
    for sent, item in env.stock.shown:
        assert item[1] in (1, 2)
        assert sent["tokens"] in [[sample["tokens"] for sample in group["samples"]] for group in groups.values()]
    assert env.stock.curr_step == 2


async def test_its_own_evaluation_runs_and_writes(tmp_path: Path) -> None:
    async with fake() as server:
        await player(stock.ChatEnv, server, tmp_path)._run_evaluate()
    assert json.loads((tmp_path / "eval/metrics.json").read_text())["results"]["all"]["eval/length"] > 0


async def test_an_evaluation_with_a_failed_server_writes_nothing(tmp_path: Path) -> None:
    async with fake(faults={"server_error": 1.0}) as server:
        with pytest.raises(EvaluationFailed, match="a model server failed during the evaluation"):
            await player(stock.ChatEnv, server, tmp_path)._run_evaluate()
    assert not (tmp_path / "eval/metrics.json").exists()


async def test_a_chat_server_gives_messages_without_tokens(tmp_path: Path) -> None:
    async with fake() as server:
        await player(stock.ChatEnv, server, tmp_path, phase=1).process_manager()
    groups = groups_of(tmp_path)
    assert [group["scores"] for group in groups] == [[0.0, 1.0, 2.0]] * 2
    assert all(group["samples"] == [] and len(group["messages"]) == 3 for group in groups)


async def test_a_managed_server_needs_tokens(tmp_path: Path) -> None:
    async with fake() as server:
        result = await player(stock.NodesEnv, server, tmp_path, phase=1).process_manager()
    assert result.exceptions == 2
    assert "Phase 2" in failures_of(tmp_path)[0]["rollouts"][0]["traceback"]


async def test_settings_of_the_environment_are_settings_of_the_command(tmp_path: Path) -> None:
    async with fake() as server:
        env = player(stock.ChatEnv, server, tmp_path, "--env.flavour", "sour", "--env.group_size", "2")
        async with env.running():
            assert type(env.stock.config) is stock.StockConfig
            assert (env.stock.config.flavour, env.stock.config.group_size) == ("sour", 2)
            assert env.stock.config.use_wandb is False and env.stock.server.servers[0].config.model_name == "fake"
        with pytest.raises(SystemExit):
            player(stock.ChatEnv, server, tmp_path, "--env.flavor", "sour")
        with pytest.raises(SettingsError, match=r"env.max_agent_turns: a setting of Lachesis' agent loop"):
            player(stock.ChatEnv, server, tmp_path, "--env.max_agent_turns", "3")


async def test_sampling_parameters_that_no_trainer_can_use_can_be_replaced(tmp_path: Path) -> None:
    class Nucleus(stock.ChatEnv):
        async def answers(self, item: Any, **how: Any) -> Any:
            return await super().answers(item, top_p=0.5)

    async with fake(policy=RandomTokens()) as server:
        await player(Nucleus, server, tmp_path / "as-it-is").process_manager()
        await player(Nucleus, server, tmp_path / "one", "--env.override_sampling", "{top_p: 1.0}").process_manager()
    assert not verify_records(groups_of(tmp_path / "as-it-is")).ok
    assert verify_records(groups_of(tmp_path / "one")).ok


@pytest.mark.parametrize(
    ("mode", "how", "fix"),
    [
        ("raw", {"temperature": 0.8}, "{temperature: 1.0}"),
        ("processed", {"temperature": 0.8, "top_p": 0.9}, "{top_p: 1.0}"),
        ("raw", {"temperature": 0.0, "frequency_penalty": 0.5}, "{temperature: 1.0, frequency_penalty: 0.0}"),
    ],
)
async def test_sampling_that_no_trainer_can_use_is_said_with_the_setting_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, how: dict[str, Any], fix: str
) -> None:
    env_cls = type("Env", (stock.WarmEnv,), {"how": how})
    flags = ["--openai.logprobs_mode", mode]
    async with fake(logprobs_mode=mode, policy=RandomTokens()) as server:
        await player(env_cls, server, tmp_path, *flags).process_manager()
    assert not verify_records(groups_of(tmp_path)).ok
    said = capsys.readouterr().err
    assert said.count("the environment's samples cannot be trained") == 1
    assert f"--env.override_sampling '{fix}'" in said
    async with fake(logprobs_mode=mode, policy=RandomTokens()) as server:
        again = player(env_cls, server, tmp_path / "again", *flags, "--env.override_sampling", fix)
        await again.process_manager()
    assert verify_records(groups_of(tmp_path / "again")).ok
    assert "cannot be trained" not in capsys.readouterr().err


@pytest.mark.parametrize("as_list", [False, True])
async def test_a_trajectory_that_is_a_group_of_one_is_a_trajectory(tmp_path: Path, as_list: bool) -> None:
    env_cls = type("Env", (stock.GroupsOfOneEnv,), {"as_list": as_list})
    groups = await played(env_cls, tmp_path)
    assert [len(group["scores"]) for group in groups] == [3, 3]
    assert {len(sample["spans"]) for group in groups for sample in group["samples"]} == {3}
    assert groups[0]["overrides"] == [{"set_advantage_to_zero": True}] * 3


async def test_a_trajectory_may_come_without_a_backlog_and_may_be_none(tmp_path: Path) -> None:
    groups = await played(stock.BareEnv, tmp_path)
    assert sum(len(group["scores"]) for group in groups) == 3


async def test_code_that_ends_its_program_ends_no_run_with_its_exit_code(tmp_path: Path) -> None:
    async with fake() as server:
        result = await player(stock.ExitingEnv, server, tmp_path).process_manager()
    assert result.exit_code == 1 and not groups_of(tmp_path)
    assert {failure["rollouts"][0]["reason"] for failure in failures_of(tmp_path)} == {
        "exception in the environment: SystemExit: 0"
    }


@pytest.mark.parametrize("name", ["wandb_log", "add_rollouts_for_wandb"])
async def test_a_hook_that_ends_its_program_ends_no_run(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ending(*_: Any, **__: Any) -> None:
        sys.exit(0)

    ending.__name__ = name
    groups = await played(type("Ending", (stock.ChatEnv,), {name: ending}), tmp_path)
    assert len(groups) == 2
    printed = capsys.readouterr().err
    assert printed.count(f"exception in {name} (the groups are not touched)") == 1
    assert "SystemExit: 0; an environment's method does not end the run" in printed


async def test_a_run_without_data_is_no_success(tmp_path: Path) -> None:
    class NoItems(stock.ChatEnv):
        async def get_next_item(self) -> None:
            return None

    for number, env_cls in enumerate((NoItems, stock.NoneEnv, stock.ChatEnv)):
        async with fake() as server:
            result = await player(env_cls, server, tmp_path / str(number)).process_manager()
        assert result.exit_code == int(env_cls is not stock.ChatEnv)


async def test_an_environment_without_an_evaluation_plays(tmp_path: Path) -> None:
    groups = await played(stock.PlaysOnly, tmp_path)
    assert [len(group["scores"]) for group in groups] == [3, 3]
    async with fake() as server:
        with pytest.raises(SettingsError, match=r"PlaysOnly has no evaluate\(\)"):
            await player(stock.PlaysOnly, server, tmp_path)._run_evaluate()


def test_a_method_that_is_missing_is_named() -> None:
    own = dict(vars(stock.PlaysOnly))
    for name, said in (
        ("setup", "has no setup"),
        ("get_next_item", r"has no get_next_item, .* did you mean that by get_next_items\?"),
        ("collect_trajectories", r"has no collect_trajectory \(or collect_trajectories\)"),
    ):
        body = {key: value for key, value in own.items() if key not in (name, "__dict__", "__weakref__")}
        if name == "get_next_item":
            body["get_next_items"] = own[name]
        with pytest.raises(SettingsError, match=said):
            player_for(type("Lacking", (stock.BaseEnv,), body))


@pytest.mark.parametrize("way", ["eval_metrics", "wandb_log", "added", "returned"])
async def test_figures_of_an_evaluation_are_printed_and_written_however_they_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    async with fake() as server:
        await player(type("Env", (stock.FiguresEnv,), {"way": way}), server, tmp_path)._run_evaluate()
    written = json.loads((tmp_path / "eval" / "metrics.json").read_text())["results"]["all"]
    assert written == {"eval/percent_correct": 0.25, **({"eval/other": 1} if way == "wandb_log" else {})}
    shown = capsys.readouterr()
    assert "percent correct" in shown.out and "0.25" in shown.out
    assert f"metrics  {tmp_path / 'eval' / 'metrics.json'}" in shown.err


OLD_FILE = """
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class OldEnv(BaseEnv):
    name = "old"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(tokenizer_name="unused", use_wandb=True)
        return config, [APIServerConfig(model_name="fake", base_url="URL")]

    async def setup(self):
        self.rows = ["one", "two"]

    async def get_next_item(self):
        return None

    async def collect_trajectories(self, item):
        return None, []

    async def evaluate(self, *args, **kwargs):
        asked = [{"role": "user", "content": row} for row in self.rows]
        answers = [await self.server.chat_completion(messages=[each], n=1, max_tokens=8) for each in asked]
        self.right = sum(answer.choices[0].message.content == "yes" for answer in answers) / len(answers)
        await self.wandb_log()

    async def wandb_log(self, wandb_metrics=None):
        await super().wandb_log({**(wandb_metrics or {}), "eval/percent_correct": self.right})


if __name__ == "__main__":
    OldEnv.cli()
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [["play", "old_env.py", "evaluate"], ["eval", "old_env.py"]])
def test_the_evaluation_of_a_file_that_knows_atropos_only_is_printed_and_written(
    tmp_path: Path, command: list[str]
) -> None:
    async def run(url: str) -> tuple[int | None, str]:
        (tmp_path / "old_env.py").write_text(OLD_FILE.replace("URL", url))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lachesis", *command),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 120)
        return process.returncode, output.decode()

    async def all_of_it() -> tuple[int | None, str]:
        async with fake(policy=Scripted("yes", "no"), vary=False) as server:
            return await run(server.base_url)

    code, output = asyncio.run(all_of_it())
    assert code == 0, output
    assert "percent_correct" in output.replace(" ", "_")
    (written,) = tmp_path.rglob("metrics.json")
    assert json.loads(written.read_text())["results"]["all"] == {"eval/percent_correct": 0.5}
    assert str(written.relative_to(tmp_path)) in output


async def test_an_evaluation_without_figures_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fake() as server:
        await player(type("Env", (stock.FiguresEnv,), {"way": "none"}), server, tmp_path)._run_evaluate()
    assert "evaluate() returned no metrics" in capsys.readouterr().err


async def test_a_request_after_the_item_is_refused(tmp_path: Path) -> None:
    class Late(stock.ChatEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            async def later() -> Any:
                await asyncio.sleep(0.2)
                return await self.answers(item)

            self.task = asyncio.create_task(later())
            return await super().collect_trajectories(item)

    async with fake() as server:
        env = player(Late, server, tmp_path, "--env.total_steps", "1")
        await env.process_manager()
        with pytest.raises(RuntimeError, match="after the groups of its item were returned"):
            await env.stock.task


async def test_two_players_at_once_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two know their items by the conversations that were encoded for them; the first ends while the others play."""
    async with fake() as server:
        players = [
            player(stock.RawIdsEnv, server, tmp_path / "short", "--env.total_steps", "1"),
            player(stock.RawIdsEnv, server, tmp_path / "long", "--env.total_steps", "4"),
            player(stock.TurnsEnv, server, tmp_path / "turns", "--env.total_steps", "3"),
        ]
        await asyncio.gather(*(each.process_manager() for each in players))
    for name, count, spans in (("short", 1, 1), ("long", 4, 1), ("turns", 3, 3)):
        groups = groups_of(tmp_path / name)
        assert len(groups) == count
        totals = verify_records(groups)
        assert totals.ok, totals.problems
        scored = [rollout for group in groups for rollout in group["rollouts"] if rollout["reward"] is not None]
        assert len(scored) == 3 * count and not failures_of(tmp_path / name)
        assert totals.delivered == sum(rollout["completion_tokens"] for rollout in scored), "no token of the other one"
        assert [len(sample["spans"]) for group in groups for sample in group["samples"]] == [spans] * 3 * count


async def test_samples_are_matched_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    match = Matcher.match

    def noted(self: Matcher, *given: Any) -> Any:
        threads.append(threading.get_ident())
        return match(self, *given)

    monkeypatch.setattr(Matcher, "match", noted)
    await played(stock.ChatEnv, tmp_path)
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_a_tokenizer_that_cannot_be_loaded_is_tried_once_before_anything_is_sampled(tmp_path: Path) -> None:
    class Tokenizes(stock.ChatEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            self.tokenizer.encode("x")
            return await super().collect_trajectories(item)

    console = io.StringIO()
    async with fake() as server:
        env = player(Tokenizes, server, tmp_path, "--env.tokenizer_name", str(tmp_path / "nowhere"), phase=1)
        env.console = Console(file=console)
        with pytest.raises(ServerConfigError, match=r"nowhere' cannot be loaded .*; set --env.tokenizer_name to"):
            await env.process_manager()
        assert not server.requests
    assert console.getvalue().count("loading the tokenizer") == 1
