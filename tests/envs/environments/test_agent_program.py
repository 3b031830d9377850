"""An agent program plays rollouts in sandboxes without a network: exact tokens, and failures that are never scores."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from backends.errors import SettingsError
from lachesis.settings.server_settings import ServerConfig
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tokens.endpoint.agent_program import AgentProgramEnv
from lachesis_tokens.samples.verification import verify_records
from tests.support import training_runs
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import ManyWords, asked_words, lines, rollouts, sandboxes
from tests.support.stock_run_api import StockRunApi, Trainer, run_api
from tests.support.training_runs import proven, take, with_tokens

__all__ = ["run_api"]

AGENT = Path(__file__).parents[2] / "support" / "bash_agent.py"


class SortsByProgram(AgentProgramEnv, ManyWords):
    """The task of `ManyWords`, which a program solves with its own tool."""

    name = "sorts-by-program"
    command = f"python3 {AGENT}"
    terminal_options = {"mounts": [str(AGENT)]}  # noqa: RUF012

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        assert (await ctx.terminal("tail -n +2 /proc/net/route"))["output"] == "", "there is no network"
        assert (result.program.exit_code is None) == (result.outcome == "timeout")
        written = await ctx.read_file("sorted.txt")
        return float(written.split() == sorted(item.split()))


def sorts(ask: Ask) -> str:
    """A model that solves the task with one call of `bash`."""
    if ask.turn > 0:
        return "Done."
    words = sorted(ask.prompt.rpartition("the words of '")[2].partition("'")[0].split())
    command = json.dumps({"name": "bash", "arguments": {"command": f"printf '%s\\n' {' '.join(words)} > sorted.txt"}})
    return f"<tool_call>\n{command}\n</tool_call>"


def make(folder: Path, server: ServerConfig, env_cls: type[SortsByProgram] = SortsByProgram, **settings: Any) -> Any:
    return training_runs.environment(env_cls, folder, server, **settings)


async def played(folder: Path, policy: Any = sorts, faults: tuple[str, ...] = (), **settings: Any) -> Any:
    return await training_runs.played(SortsByProgram, folder, policy, faults, **settings)


async def test_every_token_that_a_program_samples_is_delivered_exactly(tmp_path: Path) -> None:
    async with FakeServer(sorts) as model:
        env = make(tmp_path, with_tokens(model, tmp_path), total_steps=6, group_size=4, max_num_workers=6)
        await env.process_manager()
        sampled = Counter(
            (tuple(seen.call.prompts[made.prompt]), tuple(made.ids), tuple(made.logprobs))
            for seen in model.requests
            if seen.call is not None
            for made in seen.completions
        )
    groups = lines(tmp_path / "groups.jsonl")
    samples = [sample for group in groups for sample in group["samples"]]
    assert [group["scores"] for group in groups] == [[1.0] * 4] * 6
    totals = verify_records(samples)
    assert (totals.delivered, totals.duplicated, totals.problem_count) == (totals.sampled, 0, 0)
    delivered = Counter(
        (
            tuple(sample["tokens"][: span["start"]]),
            tuple(sample["tokens"][span["start"] : span["end"]]),
            tuple(sample["logprobs"][span["start"] : span["end"]]),
        )
        for sample in samples
        for span in sample["spans"]
    )
    assert delivered == sampled
    trajectories = lines(tmp_path / "trajectory_samples.jsonl")
    assert {turns["conversations"][0]["value"] for turns in trajectories} == {"Use the tool bash."}
    assert len(samples) == 24, "what goes on from an answer is one sample with it"
    assert sum(delivered.values()) == 48
    for rollout in rollouts(tmp_path / "groups.jsonl"):
        assert (rollout["outcome"], rollout["turns"]) == ("completed", 2)
        assert rollout["program"]["exit_code"] == 0
        assert rollout["program"]["stdout"] == "the model said: Done.\n"


async def test_a_program_that_crashes_is_scored_by_what_it_left(tmp_path: Path) -> None:
    for rollout in await played(tmp_path, command=f"python3 {AGENT} --crash-after 1"):
        assert (rollout["outcome"], rollout["reward"]) == ("completed", 1.0)
        assert rollout["reason"] == "the program ended with exit code 1"
        assert "RuntimeError: too many turns" in rollout["program"]["stderr"]
    completed = lines(tmp_path / "trajectory_samples.jsonl")
    assert [entry["conversations"][-1]["from"] for entry in completed] == ["gpt", "gpt"], "its call has no result"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"python3 {AGENT} --crash", "exit code 1 before the model had answered anything: .*RuntimeError"),
        ("no-such-program", "exit code 127 before the model had answered anything: .*command not found"),
        ("curl -s http://example.org || true", "exit code 0 before the model had answered anything"),
    ],
)
async def test_a_program_that_never_asked_the_model_is_no_score(tmp_path: Path, command: str, words: str) -> None:
    for rollout in await played(tmp_path, command=command, max_infra_retries=1):
        assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 2)
        assert re.search(words, rollout["reason"], re.DOTALL), rollout["reason"]


async def test_a_program_that_hangs_runs_out_of_time_and_leaves_nothing(tmp_path: Path) -> None:
    for rollout in await played(tmp_path, command=f"python3 {AGENT} --hang", rollout_timeout=1.5):
        assert (rollout["outcome"], rollout["reward"]) == ("timeout", 0.0), "the reward of the sandbox as it stands"
        assert rollout["seconds_own"] >= 1.5 > rollout["seconds_waiting"]
        assert re.fullmatch(r"the program was stopped after \d\.\d s", rollout["reason"])
        assert rollout["program"]["exit_code"] is None
    assert sandboxes() == set()


async def test_a_model_server_that_fails_is_no_score(tmp_path: Path) -> None:
    for rollout in await played(tmp_path, faults=("server_error",)):
        assert (rollout["outcome"], rollout["reward"]) == ("infra_error", None)
        assert "the program's request failed" in rollout["reason"]
        assert rollout["program"]["exit_code"] == 1


async def test_a_sandbox_that_is_killed_under_a_program_is_played_again(tmp_path: Path) -> None:
    killed: set[int] = set()

    def deadly(ask: Ask) -> str:
        if not killed:
            killed.update(sandboxes())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return sorts(ask)

    (rollout,) = await played(tmp_path, deadly, group_size=1, max_infra_retries=1)
    assert killed
    assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("completed", 1.0, 2)


async def test_a_program_that_does_not_stop_asking_is_stopped(tmp_path: Path) -> None:
    def goes_on(_: Ask) -> str:
        return '<tool_call>\n{"name": "bash", "arguments": {"command": "true"}}\n</tool_call>'

    for rollout in await played(tmp_path, goes_on, max_agent_turns=3):
        assert (rollout["outcome"], rollout["reward"], rollout["turns"]) == ("max_turns", 0.0, 3)
        assert "403" in rollout["program"]["stderr"]


async def test_without_tokens_messages_are_recorded(tmp_path: Path) -> None:
    def sorts_by_messages(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        words = " ".join(sorted(asked_words(request)))
        return call(("bash", {"command": f"printf '%s\\n' {words} > sorted.txt"}))

    async with ScriptedServer(sorts_by_messages) as server:
        one = ServerConfig(base_url=server.base_url, model_name="scripted", api_key="x", max_retries=0)
        env = make(tmp_path, one, eval_items=3)
        await env.process_manager()
        (group,) = lines(tmp_path / "groups.jsonl")
        assert group["scores"] == [1.0, 1.0]
        roles = [message["role"] for message in group["messages"][0]]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
        env = make(tmp_path, one, eval_items=3)
        evaluated = await env._run_evaluate()
    assert evaluated.summary.reward.mean == 1.0


async def test_what_a_program_sampled_is_sent_to_the_trainer(tmp_path: Path, run_api: StockRunApi) -> None:
    class Uneven(SortsByProgram):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return random.random()

    async with run_api.wiped() as api, FakeServer(sorts) as model:
        settings = {"rollout_server_url": api.url, "spool_path": str(tmp_path / "spool"), "steps_per_eval": 0}
        env = make(tmp_path, with_tokens(model, tmp_path), Uneven, **settings, total_steps=-1, include_messages=True)
        trainer = Trainer(api.url, batch_size=4, num_steps=1)
        await trainer.register()
        await trainer.poll()
        run = asyncio.create_task(env.env_manager())
        await take(trainer, 2)
        await run
    samples = proven(trainer)
    assert len(samples) == 4
    assert all(len(sample.spans) == 2 for sample in samples)


ASK_ONCE = (
    'python3 -c "import json, os, urllib.request as u; k = os.environ; '
    "u.urlopen(u.Request(k['OPENAI_BASE_URL'] + '/chat/completions', "
    "json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}).encode()))\""
)


async def test_a_prompt_of_any_size_reaches_the_program(tmp_path: Path) -> None:
    class Long(SortsByProgram):
        def format_prompt(self, item: Any) -> str:
            return "x" * 300_000 + super().format_prompt(item)

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(result.program.stdout == f"{len(self.format_prompt(item))} unset Be brief. ")

    command = (
        'echo -n "$(wc -c < "$LACHESIS_PROMPT_FILE") ${LACHESIS_PROMPT-unset} $LACHESIS_SYSTEM_PROMPT "; '
        f"python3 {AGENT} --crash-after 0 2> /dev/null; {ASK_ONCE}"
    )
    async with FakeServer("Done.") as model:
        env = make(tmp_path, with_tokens(model, tmp_path), Long, command=command, system_prompt="Be brief.")
        env.get_next_item = _one("b a")
        await env.process_manager()
    assert lines(tmp_path / "groups.jsonl")[0]["scores"] == [1.0, 1.0]


async def test_a_prompt_with_half_of_a_surrogate_pair_reaches_the_program_as_utf_8(tmp_path: Path) -> None:
    class Halved(SortsByProgram):
        def format_prompt(self, item: Any) -> str:
            return "\ud83d and \U0001f600 of " + super().format_prompt(item)

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            text = super().format_prompt(item)
            beginnings = "\ufffd and \U0001f600 of ", "\ufffd and \U0001f600 of ", "\ud83d and \U0001f600 of "
            return float(json.loads(result.program.stdout) == [beginning + text for beginning in beginnings])

    shown = (
        "import json, os, pathlib as p; k = os.environ; "
        "f = p.Path(k['LACHESIS_PROMPT_FILE']).read_text('utf-8'); "
        "m = json.loads(p.Path(k['LACHESIS_MESSAGES_FILE']).read_text('utf-8')); "
        "print(json.dumps([k['LACHESIS_PROMPT'], f, m[-1]['content']]))"
    )
    async with FakeServer("Done.") as model:
        command = f'python3 -X utf8 -c "{shown}"; {ASK_ONCE}'
        env = make(tmp_path, with_tokens(model, tmp_path), Halved, command=command)
        env.get_next_item = _one("b a")
        await env.process_manager()
    assert lines(tmp_path / "groups.jsonl")[0]["scores"] == [1.0, 1.0]


async def test_a_prompt_with_nul_starts_its_program_once_and_is_whole_in_the_file(tmp_path: Path) -> None:
    class Nul(SortsByProgram):
        def format_prompt(self, item: Any) -> str:
            return "before\0after"

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(json.loads(result.program.stdout) == ["before\ufffdafter", "before\0after"])

    read = "[k['LACHESIS_PROMPT'], open(k['LACHESIS_PROMPT_FILE']).read()]"
    shown = f"import json, os; k = os.environ; print(json.dumps({read}))"
    async with FakeServer("Done.") as model:
        command = f'python3 -X utf8 -c "{shown}"; {ASK_ONCE}'
        env = make(tmp_path, with_tokens(model, tmp_path), Nul, command=command)
        await env.process_manager()
    (group,) = lines(tmp_path / "groups.jsonl")
    assert (group["scores"], [rollout["attempts"] for rollout in group["rollouts"]]) == ([1.0, 1.0], [1, 1])


@pytest.mark.parametrize("turn", [1, 2])
async def test_a_program_that_fails_at_a_refused_conversation_is_refused_and_scored(tmp_path: Path, turn: int) -> None:
    def moderated(request: dict[str, Any]) -> Any:
        if len([message for message in request["messages"] if message["role"] == "assistant"]) == turn - 1:
            return web.json_response({"error": {"message": "flagged by moderation"}}, status=403)
        return call(("bash", {"command": "true"}))

    async with ScriptedServer(moderated) as server:
        env = make(tmp_path, ServerConfig(base_url=server.base_url, model_name="scripted", api_key="x"))
        await env.process_manager()
    for rollout in rollouts(tmp_path / "groups.jsonl"):
        assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("refused", 0.0, 1), rollout["reason"]
        assert rollout["turns"] == turn - 1 and rollout["program"]["exit_code"] != 0


def _one(item: str) -> Any:
    async def get_next_item() -> str:
        return item

    return get_next_item


async def test_a_program_on_the_host_reaches_the_endpoint_as_well(tmp_path: Path) -> None:
    class OnTheHost(SortsByProgram):
        terminal_options = {}  # noqa: RUF012

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float((await ctx.read_file("sorted.txt")).split() == sorted(item.split()))

    async with FakeServer(sorts) as model:
        await make(tmp_path, with_tokens(model, tmp_path), OnTheHost, sandbox="none").process_manager()
    assert lines(tmp_path / "groups.jsonl")[0]["scores"] == [1.0, 1.0]


async def test_an_environment_without_a_command_says_what_to_set(tmp_path: Path) -> None:
    async with FakeServer(sorts) as model:
        with pytest.raises(SettingsError, match=r"sorts-by-program has no agent program; set --env.command"):
            await make(tmp_path, with_tokens(model, tmp_path), command="").process_manager()
