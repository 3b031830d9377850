"""Environments of verifiers play unmodified: exact tokens, their rewards, and failures that are never scores."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis.settings.server_settings import ServerConfig
from lachesis_compat.guests import guest
from lachesis_compat.guests.verifiers import VerifiersEnv, load
from lachesis_testing.fake_server import Ask, FakeServer
from tests.compat.guests.support import EXAMPLES, assert_exact, make, needed, played, run_page, served, written
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import ROOT, lines
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.training_runs import with_tokens

__all__ = ["run_api"]

needed("verifiers", "verifiers")
SHOP, DEBATE = str(EXAMPLES / "fruit_prices.py"), str(EXAMPLES / "debate.py")
PRICES = {"pear": 3, "fig": 5, "apple": 2, "plum": 4}
NO_TOOLS = {"task.with_tools": False}
"""Each server of tools is a process that imports verifiers."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What tool servers import, as if it was installed."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    yield


def answer(ask: Ask) -> str:
    number, one, other = re.findall(r"What do (\d+) x (\w+) and 2 x (\w+)", ask.prompt)[-1]
    return str(int(number) * PRICES[one] + 2 * PRICES[other])


def shops(ask: Ask) -> str:
    """A model that looks both prices up at once, and thinks before it answers."""
    if ask.turn:
        return answer(ask)
    fruits = re.findall(r"What do \d+ x (\w+) and 2 x (\w+)", ask.prompt)[-1]
    calls = [json.dumps({"name": "shop_price", "arguments": {"fruit": fruit}}) for fruit in fruits]
    return "I look them up.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def always_calls(_: Ask) -> str:
    return '<tool_call>\n{"name": "shop_price", "arguments": {"fruit": "fig"}}\n</tool_call>'


async def shop(folder: Path, policy: Any = answer, faults: Any = (), **settings: Any) -> list[dict[str, Any]]:
    arguments = {
        "taskset." + name if name.startswith("task.") else name: value
        for name, value in {**NO_TOOLS, **settings.pop("args", {})}.items()
    }
    return await played(VerifiersEnv, folder, policy, faults, **{"module": SHOP, "module_args": arguments, **settings})


async def test_many_rollouts_at_once_deliver_every_token_exactly(tmp_path: Path) -> None:
    async with FakeServer(shops) as model:
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=SHOP, total_steps=2, group_size=4)
        await env.process_manager()
    assert assert_exact(tmp_path, model) == 8, "what goes on from an answer is one sample with it"
    for group in lines(tmp_path / "groups.jsonl"):
        assert group["scores"] == [1.5] * 4
    for rollout in written(tmp_path):
        assert (rollout["outcome"], rollout["reason"], rollout["turns"]) == ("completed", "agent_completed", 2)
        assert rollout["metrics"] == {"reward/right": 1.0, "reward/short": 1.0, "reward/lookups": 2.0}


async def test_a_rollout_of_the_chat_loop_is_cheap_and_two_at_once_never_meet(tmp_path: Path) -> None:
    async with FakeServer(answer) as model:
        settings = {"module_args": {"taskset.task.with_tools": False}, "total_steps": 12, "group_size": 8}
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=SHOP, **settings)
        await env.process_manager()
    assert assert_exact(tmp_path, model) == 96
    assert {rollout["reward"] for rollout in written(tmp_path)} == {1.5}, "each question has another answer"


@pytest.mark.parametrize("harness", ["null", "bash"])
async def test_harnesses_of_verifiers_stream_and_are_exact(tmp_path: Path, harness: str) -> None:
    arguments = {"agent.harness.id": harness}
    async with FakeServer(shops) as model:
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=SHOP, module_args=arguments)
        await env.process_manager()
    assert assert_exact(tmp_path, model) == 2
    for rollout in written(tmp_path):
        assert (rollout["outcome"], rollout["reward"], rollout["turns"]) == ("completed", 1.5, 2), rollout["reason"]


async def test_wrong_answers_and_wrong_calls_are_scored(tmp_path: Path) -> None:
    def policy(ask: Ask) -> str:
        calls = ["not json", "[]", '{"fruit": "melon"}', '{"fruit": "fig"}']
        if ask.turn == len(calls):
            return "I do not know, sorry."
        name = "shop_price" if ask.turn < 3 else "shop_cost"
        return f'<tool_call>\n{{"name": "{name}", "arguments": {calls[ask.turn]}}}\n</tool_call>'

    (rollout,) = await shop(tmp_path, policy, args={"task.with_tools": True}, group_size=1)
    assert (rollout["outcome"], rollout["reward"]) == ("completed", 0.0)
    assert rollout["metrics"]["reward/lookups"] == 0.0


async def test_evaluate_plays_the_tasks(tmp_path: Path) -> None:
    async with FakeServer(answer) as model:
        arguments = {"taskset.task.with_tools": False}
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=SHOP, module_args=arguments)
        async with env.running():
            result = await env.evaluate()
    assert result.summary.reward.mean == 1.5
    names = [line["item"]["name"] for line in lines(tmp_path / "eval" / "samples.jsonl")]
    assert sorted(names) == ["sum 0", "sum 1", "sum 2"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("reward", "TaskError: .*RuntimeError: the reward is out of order"),
        ("setup", "TaskError: task setup: ValueError: the row cannot be read"),
    ],
)
async def test_an_error_of_the_environment_is_no_score(tmp_path: Path, broken: str, words: str) -> None:
    for rollout in await shop(tmp_path, args={"task.broken": broken}, max_infra_retries=2):
        assert (rollout["reward"], rollout["attempts"]) == (None, 1)
        assert re.search(words, rollout["reason"]), rollout["reason"]
        assert words.rpartition(": ")[2] in rollout["traceback"]


async def test_a_reward_that_nobody_gave_is_no_score(tmp_path: Path) -> None:
    module = tmp_path / "unscored.py"
    module.write_text(
        "import verifiers.v1 as vf\n\n\n"
        "class T(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):\n"
        "    async def finalize(self, trace):\n"
        "        trace.rewards.update({'skipped': None} if self.data.name == 'none' else {})\n\n\n"
        "class Config(vf.TasksetConfig):\n"
        "    kind: str = 'none'\n\n\n"
        "class S(vf.Taskset[T, Config]):\n"
        "    def load(self):\n"
        "        yield T(vf.TaskData(name=self.config.kind, prompt='Hello.'), self.config.task)\n\n\n"
        "__all__ = ['S']\n"
    )
    for name, words in (("none", ""), ("never", "nothing scores this rollout")):
        settings = {"module": str(module), "module_args": {"kind": name}}
        for rollout in await played(VerifiersEnv, tmp_path / name, lambda ask: "Hi.", (), **settings):
            assert rollout["reward"] is None
            assert words in (rollout["traceback"] or "")


async def test_a_sandbox_of_the_environment_that_fails_is_tried_again(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, args={"task.broken": "sandbox"}, max_infra_retries=1):
        assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 2)
        assert rollout["reason"] == "SandboxError: no sandbox could be made"


async def test_a_model_server_that_fails_is_no_score_and_is_tried_again(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, faults=("server_error",), max_infra_retries=1):
        assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 2)
    found = await shop(tmp_path / "again", faults={"server_error": {1, 3}}, group_size=6, max_infra_retries=1)
    assert [rollout["reward"] for rollout in found] == [1.5] * 6
    assert sum(rollout["attempts"] for rollout in found) == 8


async def test_a_model_that_says_nothing_is_scored(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, lambda ask: ""):
        assert (rollout["outcome"], rollout["reward"]) == ("completed", 0.5)


async def test_limits_and_stop_conditions_end_a_rollout_and_are_scored(tmp_path: Path) -> None:
    for number, (settings, outcome, reason, turns) in enumerate(
        [
            ({"max_agent_turns": 9, "args": {"agent.max_turns": 3}}, "max_turns", "max_turns", 3),
            ({"max_agent_turns": 2}, "max_turns", "max_turns", 2),
            ({"rollout_token_budget": 30}, "context_exhausted", "max_output_tokens", None),
            ({"args": {"task.enough": 2}}, "completed", "asked_enough", 2),
            ({"fake": {"context_length": 600}, "max_token_length": 40}, "context_exhausted", None, None),
            ({"max_token_length": 4}, "context_exhausted", None, 1),
        ]
    ):
        settings["args"] = {"task.with_tools": True, **settings.get("args", {})}
        (rollout,) = await shop(tmp_path / str(number), always_calls, group_size=1, **settings)
        assert (rollout["outcome"], rollout["reward"] in (0.0, 0.5)) == (outcome, True), rollout["reason"]
        assert reason is None or rollout["reason"] == reason
        assert turns is None or rollout["turns"] == turns


async def test_a_rollout_that_takes_too_long_is_no_score(tmp_path: Path) -> None:
    for rollout in await shop(tmp_path, faults=("hang",), rollout_timeout=4):
        assert (rollout["outcome"], rollout["reward"]) == ("infra_error", None)
        assert "the model server took" in rollout["reason"]


def debates(ask: Ask) -> str:
    number = re.findall(r"What is (\d+) \+ 1\?", ask.prompt)[-1]
    if "the answer to:" in ask.prompt:
        return "doubtful"
    return str(int(number) + 1) if ask.turn else "perhaps 7"


async def test_of_several_agents_only_the_policy_is_trained(tmp_path: Path) -> None:
    async with FakeServer(debates) as model:
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=DEBATE, total_steps=3)
        await env.process_manager()
    assert len(model.requests) == 3 * 2 * 3
    for rollout in written(tmp_path):
        assert (rollout["outcome"], rollout["reward"], rollout["turns"]) == ("completed", 1.0, 2), rollout["reason"]
    samples = [sample for group in lines(tmp_path / "groups.jsonl") for sample in group["samples"]]
    sampled = {tuple(made.ids) for seen in model.requests for made in seen.completions}
    trained = [tuple(s["tokens"][span["start"] : span["end"]]) for s in samples for span in s["spans"]]
    assert len(trained) == 12
    assert len(sampled - set(trained)) == 1, "the critic's"


async def test_which_of_several_agents_is_trained_has_to_be_clear(tmp_path: Path) -> None:
    settings = {"module": DEBATE, "module_args": {"env.fixed_critic": False}}
    for rollout in await played(VerifiersEnv, tmp_path / "both", debates, (), **settings):
        assert rollout["reward"] is None
        assert "2 agents are to be trained of critic, solver; name one with --env.trained_agent" in rollout["reason"]
    more = {"trained_agent": "solver", "module_args": {"env.fixed_critic": False, "env.attempts": 2}}
    for rollout in await played(VerifiersEnv, tmp_path / "one", debates, (), **{**settings, **more}):
        assert rollout["reward"] == 1.0


async def test_another_agent_that_fails_by_the_server_is_no_score(tmp_path: Path) -> None:
    settings = {"module": DEBATE, "faults": {"server_error": {1}}, "group_size": 1, "total_steps": 1}
    (rollout,) = await played(VerifiersEnv, tmp_path, debates, **settings)
    assert (rollout["outcome"], rollout["reward"]) == ("infra_error", None)


async def test_without_tokens_messages_are_recorded(tmp_path: Path) -> None:
    def by_messages(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("42")
        return call(("shop_price", {"fruit": "fig"}))

    async with ScriptedServer(by_messages) as model:
        server = ServerConfig(base_url=model.base_url, model_name="scripted", api_key="x", max_retries=0)
        await make(VerifiersEnv, tmp_path, server, module=SHOP, group_size=1).process_manager()
    (group,) = lines(tmp_path / "groups.jsonl")
    roles = [message["role"] for message in group["messages"][0]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_loading_an_environment_leaves_the_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    load(SHOP, {})
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_cannot_be_loaded_is_an_error_that_says_why(tmp_path: Path) -> None:
    old = tmp_path / "older.py"
    old.write_text("def load_environment():\n    ...\n")
    for module, words in [
        ("", "no environment is named; set --env.module"),
        ("no/such/file.py", "there is no file or folder"),
        ("no-such-module", "'no_such_module' not found"),
        (str(old), "load_environment is of verifiers before version 1"),
    ]:
        with pytest.raises(SettingsError, match=words):
            load(module, {})
    with pytest.raises(SettingsError, match="wrong"):
        load(SHOP, {"wrong": 1})


async def test_tools_that_their_processes_cannot_import_are_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    async with FakeServer(shops) as model:
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=SHOP)
        with pytest.raises(SettingsError, match=rf"install it as a package, or set PYTHONPATH={EXAMPLES}"):
            await env.process_manager()


async def test_tasks_in_containers_need_a_runtime_for_them(tmp_path: Path) -> None:
    module = tmp_path / "boxed.py"
    module.write_text(
        "import verifiers.v1 as vf\n\n\n"
        "class S(vf.Taskset[vf.Task, vf.TasksetConfig]):\n"
        "    def load(self):\n"
        "        yield vf.Task(vf.TaskData(prompt='Hello.', image='debian:12'), self.config.task)\n\n\n"
        "__all__ = ['S']\n"
    )
    async with FakeServer("Hi.") as model:
        for name, words in (
            (str(module), r"run in containers \(debian:12\)"),
            ("harbor", "its tasks cannot be loaded"),
        ):
            env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), module=name)
            with pytest.raises(SettingsError, match=words):
                await env.process_manager()
    env = load("harbor", {"dataset": "org/name", "agent.runtime.type": "podman"})
    assert (env.config.agent.runtime.type, env.config.agent_harnesses()["agent"].id) == ("podman", "bash")


async def test_a_game_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TextArena's games read the word lists of NLTK, which nobody downloads here: two small ones stand in."""
    lists = tmp_path / "nltk" / "corpora" / "words"
    lists.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (lists / name).write_text("apple\npear\nplum\ngrape\nmelon\n")
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("textarena")
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])

    def guesses(ask: Ask) -> str:
        return f"[{'eplamrugno'[ask.turn]}]"

    settings = {"module": "textarena", "module_args": {"game": "Hangman-v0"}, "total_steps": 2}
    async with FakeServer(guesses) as model:
        env = make(VerifiersEnv, tmp_path, with_tokens(model, tmp_path), **settings)
        await env.process_manager()
    assert assert_exact(tmp_path, model) >= 4
    found = written(tmp_path)
    assert {rollout["outcome"] for rollout in found} == {"completed"}
    assert max(rollout["reward"] for rollout in found) == 1.0, [rollout["reward"] for rollout in found]


async def test_a_target_is_a_class_with_its_settings(tmp_path: Path) -> None:
    env_cls = guest(f"verifiers:{SHOP}?count=3&agent.max_turns=2")
    assert env_cls is not None
    async with FakeServer(always_calls) as model:
        env = make(env_cls, tmp_path, with_tokens(model, tmp_path))
        assert env.run_name == "verifiers-fruit_prices"
        await env.process_manager()
    assert {rollout["turns"] for rollout in written(tmp_path)} == {2}


async def test_what_was_played_is_sent_to_the_trainer(tmp_path: Path, run_api: StockRunApi) -> None:
    arguments = {"taskset.task.with_tools": False}
    await served(VerifiersEnv, tmp_path, run_api, answer, lambda ask: "1", module=SHOP, module_args=arguments)


async def test_a_run_that_is_killed_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    async with FakeServer(shops, faults={"hang": {3}}) as model:
        server = with_tokens(model, tmp_path)
        flags = {
            "env.total_steps": 3,
            "env.group_size": 2,
            "env.data_path_to_save_groups": tmp_path / "groups.jsonl",
            "openai.base_url": server.base_url,
            "openai.model_name": server.model_name,
            "openai.server_type": "vllm",
            "openai.tokenizer_name": server.tokenizer_name,
        }
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "lachesis", "play", f"verifiers:{SHOP}", "process", *given]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{EXAMPLES}", "VF_TEST": str(tmp_path)}
        none = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        first = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=env, **none)
        while len(model.requests) < 4:
            assert first.returncode is None
            await asyncio.sleep(0.05)
        first.kill()
        await first.wait()
        for _ in range(100):
            left = [path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path) in _read(path)]
            # verifiers' own look for a tool server that it has started; it gives up by itself after minutes.
            left = [path for path in left if "urlopen(sys.argv[1]" not in _read(path.with_name("cmdline"))]
            if not left:
                break
            await asyncio.sleep(0.1)
        assert left == []
        again = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [group["scores"] for group in lines(tmp_path / "groups.jsonl")] == [[1.5, 1.5]] * 3


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize("command", ["python -m lachesis_compat.guests.verifiers ", "lachesis process 'verifiers:"])
async def test_the_commands_of_the_page_play_its_example(tmp_path: Path, command: str) -> None:
    def shops(ask: Ask) -> str:
        number, fruit = re.findall(r"What do (\d) x (\w+) cost", ask.prompt)[-1]
        return str(int(number) * PRICES[fruit])

    model = await run_page(command, tmp_path, shops)
    assert assert_exact(tmp_path, model) == 16
    assert {rollout["reward"] for rollout in written(tmp_path)} == {1.0}
