"""A session for each rollout, tools of an item, and rewards that come with the answers of tools."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import BackendError, SettingsError
from lachesis import HermesAgentBaseEnv, Tool, ToolResult, rollout_session
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import Ask, Reply
from lachesis_testing.fake_server.policies import as_reply
from lachesis_tokens.endpoint.agent_program import AgentProgramEnv
from lachesis_tokens.samples.verification import verify_records
from lachesis_tools import ToolRegistry, call_tool
from lachesis_tools.tool_session import ToolSession
from tests.support.scripted_server import call, say
from tests.support.small_envs import does_nothing, lines, process, rollouts
from tests.support.training_runs import played

GUESS = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}


@dataclass
class Game:
    """A number to guess."""

    secret: int
    log: list[str]
    guesses: list[int] = field(default_factory=list)
    task: Any = None

    def step(self, number: int) -> ToolResult:
        self.guesses.append(number)
        if number == self.secret:
            return ToolResult("right", reward=1.0, done=True)
        return ToolResult("higher" if number < self.secret else "lower", reward=-0.25)


class Guess(HermesAgentBaseEnv):
    """The agent guesses a number. The environment is the simulator: it has no sandbox."""

    name = "guess"
    toolsets = ()
    step_rewards = "sum"
    log: ClassVar[list[str]]

    async def setup(self) -> None:
        self.items = iter(range(2, 10))

    async def get_next_item(self) -> Any:
        return next(self.items, None)

    def format_prompt(self, item: Any) -> str:
        return "Guess a number from 1 to 9."

    @asynccontextmanager
    async def session(self, item: int) -> AsyncIterator[Game]:
        game = Game(item, self.log)
        task = asyncio.current_task()
        self.log.append("opened")
        try:
            yield game
        finally:
            assert asyncio.current_task() is task, "libraries with task groups need one task"
            self.log.append("closed")

    def tools_for(self, item: int) -> list[Tool]:
        async def guess(arguments: Mapping[str, Any], game: Game) -> ToolResult:
            assert rollout_session() is game
            return game.step(arguments["number"])

        return [Tool.from_schema("guess", f"Guess. Not {item}0.", GUESS, guess)]


async def play(env_cls: type[HermesAgentBaseEnv], folder: Path, model: Any, **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return await process(env_cls, folder, model, enabled_toolsets=[], **settings)


def conversations(groups: Path) -> list[list[dict[str, Any]]]:
    """The messages of every scored rollout of a groups file."""
    return [messages for group in lines(groups) for messages in group["messages"]]


@pytest.fixture
def log() -> list[str]:
    Guess.log = []
    return Guess.log


def guesses(request: dict[str, Any]) -> Any:
    """A model that halves the interval, with the hints of the game."""
    assert [tool["function"]["name"] for tool in request["tools"]] == ["guess"]
    low, high = 1, 9
    for message in request["messages"]:
        if message["role"] == "tool":
            middle = (low + high) // 2
            low, high = (middle + 1, high) if message["content"] == "higher" else (low, middle - 1)
    return call(("guess", {"number": (low + high) // 2}))


async def test_a_game_is_an_environment_whose_tools_score_and_end_it(tmp_path: Path, log: list[str]) -> None:
    result = await play(Guess, tmp_path, guesses, total_steps=4, group_size=2)
    found = rollouts(result.files.groups)
    assert {(each["outcome"], each["reason"]) for each in found} == {("completed", "the tool guess ended the task")}
    for each in found:
        steps = each["step_rewards"]
        assert [step["turn"] for step in steps] == list(range(1, each["turns"] + 1))
        assert each["reward"] == sum(step["reward"] for step in steps) == 1.0 - 0.25 * (each["turns"] - 1)
        assert each["metrics"]["reward/guess"] == each["reward"]
        assert each["turn_rewards"] == [step["reward"] for step in steps]
    assert len({each["turns"] for each in found}) > 1
    assert {messages[-1]["content"] for messages in conversations(result.files.groups)} == {"right"}
    assert log.count("opened") == log.count("closed") == 8


async def test_no_reward_of_a_tool_is_zero_and_the_last_one_may_count(tmp_path: Path, log: list[str]) -> None:
    class Last(Guess):
        step_rewards = "last"

    (each,) = rollouts((await play(Last, tmp_path, does_nothing, total_steps=1, group_size=1)).files.groups)
    assert (each["reward"], each.get("step_rewards")) == (0.0, None)
    found = rollouts((await play(Last, tmp_path / "played", guesses, total_steps=2, group_size=1)).files.groups)
    assert [each["reward"] for each in found] == [1.0, 1.0]


@pytest.mark.parametrize("rule", ["sum", "last"])
async def test_rewards_of_the_user_and_of_tools_are_added_up_in_one_way(
    tmp_path: Path, log: list[str], rule: Any
) -> None:
    class Asked(Guess):
        step_rewards = rule

        def follow_up(self, item: Any, messages: Any) -> Any:
            if len(messages) > 6:
                return ToolResult("not read", reward=0.5, done=True)
            return ToolResult("Guess again.", reward=-0.125) if len(messages) > 2 else "Guess."

    said = iter([say("Hm."), call(("guess", {"number": 1})), say("Hm."), say("Bye.")])
    (each,) = rollouts((await play(Asked, tmp_path, lambda _: next(said), total_steps=1, group_size=1)).files.groups)
    assert each["reward"] == {"sum": -0.25 - 0.125 + 0.5, "last": 0.5}[rule]
    assert each["turn_rewards"] == [0.0, -0.25, -0.125, 0.5]
    assert (each["metrics"]["reward/guess"], each["metrics"]["reward/follow_up"]) == (-0.25, 0.375)
    assert [step["tool"] for step in each["step_rewards"]] == ["guess", "follow_up", "follow_up"]
    (messages,) = conversations(tmp_path / "groups.jsonl")
    assert [message["content"] for message in messages if message["role"] == "user"][1:] == ["Guess.", "Guess again."]
    assert messages[-1]["content"] == "Bye."


async def test_calls_after_the_one_that_ends_the_task_are_not_run(tmp_path: Path, log: list[str]) -> None:
    def at_once(request: dict[str, Any]) -> Any:
        return call(*(("guess", {"number": number}) for number in (1, 2, 3, 4)))

    result = await play(Guess, tmp_path, at_once, total_steps=1, group_size=1)
    assert [each["reward"] for each in rollouts(result.files.groups)] == [0.75]
    (messages,) = conversations(result.files.groups)
    assert [message["content"] for message in messages[-4:-2]] == ["higher", "right"]
    assert all("the task is over" in message["content"] for message in messages[-2:])


async def test_rewards_and_the_user_have_the_session_and_group_rewards_have_all(tmp_path: Path, log: list[str]) -> None:
    class Both(Guess):
        step_rewards = None

        def follow_up(self, item: Any, messages: Any) -> str | None:
            game = rollout_session()
            return "Go on." if len(game.guesses) < 2 and len(messages) < 8 else None

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            assert ctx.session is rollout_session() and ctx.session.secret == item
            return float(len(ctx.session.guesses))

        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> list[float]:
            assert log.count("closed") == 0
            assert len({id(ctx.session) for ctx in ctxs}) == 3
            return [result.reward.value + len(ctx.session.guesses) for result, ctx in zip(results, ctxs, strict=True)]

    def model(request: dict[str, Any]) -> Any:
        return say("Well.") if request["messages"][-1]["role"] != "user" else call(("guess", {"number": 1}))

    found = rollouts((await play(Both, tmp_path, model, total_steps=1, group_size=3)).files.groups)
    assert [each["reward"] for each in found] == [4.0, 4.0, 4.0]
    assert log == ["opened"] * 3 + ["closed"] * 3


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [(KeyError("board"), "environment", 1), (BackendError("the game server is gone"), "infra_error", 3)],
)
async def test_a_session_that_does_not_open_is_no_score(
    tmp_path: Path, log: list[str], error: Exception, kind: str, attempts: int
) -> None:
    class Broken(Guess):
        @asynccontextmanager
        async def session(self, item: int) -> AsyncIterator[Game]:
            log.append("opened")
            raise error
            yield

    settings = {"total_steps": 1, "group_size": 1, "max_infra_retries": 2}
    (each,) = rollouts((await play(Broken, tmp_path, guesses, **settings)).files.failures)
    assert (each["reward"], each["unscored_kind"], each["attempts"]) == (None, kind, attempts)
    assert len(log) == attempts


async def test_a_lost_session_is_the_infrastructures_and_each_attempt_has_its_own(
    tmp_path: Path, log: list[str]
) -> None:
    lost = iter([True])

    class Lossy(Guess):
        def tools_for(self, item: int) -> list[Tool]:
            async def guess(arguments: Mapping[str, Any], game: Game) -> ToolResult:
                if next(lost, False):
                    raise BackendError("the game server is gone")
                return game.step(arguments["number"])

            return [Tool.from_schema("guess", "Guess.", GUESS, guess)]

    settings = {"total_steps": 1, "group_size": 1, "max_infra_retries": 1}
    (each,) = rollouts((await play(Lossy, tmp_path, guesses, **settings)).files.groups)
    assert (each["attempts"], len(each["step_rewards"])) == (2, each["turns"])
    assert log == ["opened", "closed"] * 2


async def test_a_session_is_closed_when_its_rollout_is_cancelled_or_it_does_not_end_itself(
    tmp_path: Path, log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(Guess):
        @asynccontextmanager
        async def session(self, item: int) -> AsyncIterator[Game]:
            log.append("opened")
            try:
                yield Game(item, log)
            finally:
                log.append("closed")
                raise OSError("the board fell")

        def tools_for(self, item: int) -> list[Tool]:
            async def guess(arguments: Mapping[str, Any], game: Game) -> ToolResult:
                running.set()
                await asyncio.sleep(1000)
                raise AssertionError

            return [Tool.from_schema("guess", "Guess.", GUESS, guess)]

    running = asyncio.Event()
    run = asyncio.create_task(play(Slow, tmp_path, guesses, total_steps=1, group_size=1))
    await running.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert log == ["opened", "closed"]
    assert "could not be closed: OSError: the board fell" in caplog.text


@pytest.mark.parametrize("at", ["tool", "reward"])
@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [(KeyError("board"), "environment", 1), (BackendError("the game server is gone"), "infra_error", 3)],
)
async def test_a_session_that_breaks_in_between_is_no_score_and_nobody_waits_for_it(
    tmp_path: Path, log: list[str], at: str, error: Exception, kind: str, attempts: int
) -> None:
    class Falls(Guess):
        @asynccontextmanager
        async def session(self, item: int) -> AsyncIterator[Game]:
            game = Game(item, self.log)
            game.task = fallen = asyncio.Event()

            async def watch() -> None:
                await fallen.wait()
                raise error

            async with asyncio.TaskGroup() as group:  # as the clients of MCP have one
                group.create_task(watch())
                yield game

        def tools_for(self, item: int) -> list[Tool]:
            async def guess(arguments: Mapping[str, Any], game: Game) -> ToolResult:
                if at == "reward":
                    return ToolResult("", done=True)
                game.task.set()
                await asyncio.Event().wait()
                raise AssertionError

            return [Tool.from_schema("guess", "Guess.", GUESS, guess, time_limit=None)]

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            ctx.session.task.set()
            await asyncio.sleep(0.01)
            return 1.0

    settings = {"total_steps": 1, "group_size": 1, "max_infra_retries": 2}
    async with asyncio.timeout(60):
        (each,) = rollouts((await play(Falls, tmp_path, guesses, **settings)).files.failures)
    assert (each["reward"], each["unscored_kind"], each["attempts"]) == (None, kind, attempts)
    assert str(error) in (each["traceback"] or each["reason"])


async def test_what_a_faulty_turn_pays_and_ends_counts(tmp_path: Path, log: list[str]) -> None:
    def model(request: dict[str, Any]) -> Any:
        if len(request["messages"]) == 1:
            return call(("guess", {"number": 1}), ("no_such_tool", {}))
        return call(("no_such_tool", {}), ("guess", {"number": 2}))

    settings = {"total_steps": 1, "group_size": 1, "max_faulty_turns": 2, "max_agent_turns": 2}
    (each,) = rollouts((await play(Guess, tmp_path, model, **settings)).files.groups)
    assert (each["reward"], each["outcome"], each["turn_rewards"]) == (0.75, "completed", [-0.25, 1.0])


async def test_steps_of_turns_that_are_rolled_back_stay_where_they_were(tmp_path: Path, log: list[str]) -> None:
    def model(request: dict[str, Any]) -> Any:
        return call(("guess", {"number": 9}), ("no_such_tool", {}))

    (each,) = rollouts(
        (await play(Guess, tmp_path, model, total_steps=1, group_size=1, max_faulty_turns=3)).files.groups
    )
    assert (each["outcome"], each["turns"], each["turn_rewards"]) == ("model_error", 3, [-0.25] * 3)


async def test_plain_rewards_of_old_environments_have_the_session(tmp_path: Path, log: list[str]) -> None:
    from environments.hermes_base_env import HermesAgentBaseEnv as OldEnv

    class Old(Guess, OldEnv):
        step_rewards = None

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            assert rollout_session() is ctx.session
            return float(len(ctx.session.guesses))

    class Plain(Guess):
        step_rewards = None

        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            assert rollout_session() is ctx.session
            return float(len(ctx.session.guesses))

    for env_cls in (Old, Plain):
        folder = tmp_path / env_cls.__name__
        (each,) = rollouts((await play(env_cls, folder, guesses, total_steps=1, group_size=1)).files.groups)
        assert each["reward"] == float(each["turns"]) > 0


async def test_an_attribute_of_an_instance_is_no_session(tmp_path: Path) -> None:
    class Http(HermesAgentBaseEnv):
        toolsets = ()

        async def setup(self) -> None:
            self.session = object()

        async def get_next_item(self) -> Any:
            return 1

        def format_prompt(self, item: Any) -> str:
            return "Hello."

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(ctx.session is None and rollout_session() is None)

    (each,) = rollouts((await play(Http, tmp_path, does_nothing, total_steps=1, group_size=1)).files.groups)
    assert each["reward"] == 1.0


async def test_an_error_in_tools_for_is_one_of_the_environment(tmp_path: Path, log: list[str]) -> None:
    class Broken(Guess):
        def tools_for(self, item: int) -> list[Tool]:
            raise KeyError("tools")

    (each,) = rollouts((await play(Broken, tmp_path, guesses, total_steps=1, group_size=1)).files.failures)
    assert (each["reward"], each["unscored_kind"]) == (None, "environment")
    assert "KeyError: 'tools'" in each["traceback"]


async def test_the_session_may_start_something_in_the_sandbox(tmp_path: Path) -> None:
    class InSandbox(Guess):
        @asynccontextmanager
        async def session(self, item: int, tools: ToolSession) -> AsyncIterator[Any]:
            sandbox = await tools.sandbox()
            await sandbox.write_bytes("secret.txt", b"%d" % item)
            yield sandbox
            assert (await sandbox.exec("cat secret.txt", timeout=10)).stdout == b"%d" % item
            (tmp_path / "closed").touch()

        def tools_for(self, item: int) -> list[Tool]:
            async def guess(arguments: Mapping[str, Any], sandbox: Any) -> ToolResult:
                done = await sandbox.exec(f"test {arguments['number']} = $(cat secret.txt)", timeout=10)
                return ToolResult("", reward=float(done.exit_code == 0), done=True)

            return [Tool.from_schema("guess", "Guess.", GUESS, guess)]

    def model(request: dict[str, Any]) -> Any:
        return call(("guess", {"number": 2}))

    (each,) = rollouts((await play(InSandbox, tmp_path, model, total_steps=1, group_size=1)).files.groups)
    assert each["reward"] == 1.0
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("what", ["tools_for", "step_rewards"])
async def test_an_agent_with_tools_of_its_own_refuses_those_of_the_item(tmp_path: Path, what: str) -> None:
    class Program(AgentProgramEnv):
        async def get_next_item(self) -> Any:
            return 1

        def format_prompt(self, item: Any) -> str:
            return "Guess."

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 1.0

    setattr(Program, what, Guess.__dict__[what])
    with pytest.raises(SettingsError, match="tools_for and step_rewards have no effect here"):
        await play(Program, tmp_path, guesses, command="true")


async def test_a_second_parameter_with_a_default_is_the_environments_own(tmp_path: Path, log: list[str]) -> None:
    class Easier(Guess):
        @asynccontextmanager
        async def session(self, item: int, by: int = 1, **more: Any) -> AsyncIterator[Game]:
            assert not more
            yield Game(item - by, log)

    (each,) = rollouts((await play(Easier, tmp_path, guesses, total_steps=1, group_size=1)).files.groups)
    assert each["outcome"] == "completed" and each["reward"] is not None


async def test_what_a_simulator_says_at_length_is_cut_and_needs_no_sandbox(
    tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Talks(Guess):
        def tools_for(self, item: int) -> list[Tool]:
            async def guess(arguments: Mapping[str, Any], game: Game) -> ToolResult:
                return ToolResult("x" * 49_000, reward=1.0, done=arguments["number"] == 6)

            return [Tool.from_schema("guess", "Guess.", GUESS, guess)]

    async def no_sandbox(self: Any) -> Any:
        raise BackendError("no sandboxes on this machine")

    monkeypatch.setattr(ToolSession, "sandbox", no_sandbox)

    def model(request: dict[str, Any]) -> Any:
        return call(*(("guess", {"number": number}) for number in range(1, 7)))

    result = await play(Talks, tmp_path, model, total_steps=1, group_size=1)
    (each,) = rollouts(result.files.groups)
    assert (each["reward"], each["outcome"]) == (6.0, "completed")
    (messages,) = conversations(result.files.groups)
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    cut = [content for content in answers if "its middle is missing" in content]
    assert 0 < len(cut) < 6 and max(map(len, cut)) < 2000


class GuessingPolicy:
    """It guesses 1, 2, ..., two numbers a turn, and never answers in words."""

    def reply(self, ask: Ask) -> Reply:
        numbers = (2 * ask.turn + 1, 2 * ask.turn + 2)
        calls = (json.dumps({"name": "guess", "arguments": {"number": number}}) for number in numbers)
        return as_reply(ask, "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls))


@pytest.mark.slow
async def test_samples_of_rollouts_that_a_tool_ended_are_exact_and_every_export_has_them(
    tmp_path: Path, log: list[str]
) -> None:
    settings = {"total_steps": 3, "max_token_length": 400, "enabled_toolsets": []}
    found = await played(Guess, tmp_path, GuessingPolicy(), **settings)
    assert [each["outcome"] for each in found] == ["completed"] * 6
    groups = list(read_lines(tmp_path / "groups.jsonl"))
    totals = verify_records(groups)
    assert totals.ok, totals.problems
    for group in groups:
        assert [messages[-1]["role"] for messages in group["messages"]] == ["tool", "tool"]
        for sample, rollout in zip(group["samples"], group["rollouts"], strict=True):
            trained = sum(mask != -100 for mask in sample["masks"])
            assert trained == rollout["completion_tokens"] > 0
    for name in ("hermes", "sharegpt-tools", "openai", "trl", "parquet", "samples", "atif", "inspect", "trajectory"):
        out = tmp_path / f"{name}.eval"
        done = await asyncio.to_thread(
            subprocess.run,
            [
                sys.executable,
                "-m",
                "lachesis",
                "export",
                str(tmp_path / "groups.jsonl"),
                "--format",
                name,
                "--out",
                out,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and out.stat().st_size > 0, (name, done.stdout, done.stderr)


# --- tools with a schema

SENT = st.dictionaries(st.sampled_from(["number", "text", "list", "other", "copy", "json"]), st.integers(), max_size=4)


@given(SENT, st.booleans())
async def test_a_tool_gets_the_arguments_as_they_were_sent(sent: dict[str, Any], closed: bool) -> None:
    got: list[dict[str, Any]] = []

    async def keep(arguments: dict[str, Any], session: Any) -> str:
        got.append(arguments)
        return "kept"

    schema: dict[str, Any] = {"type": "object", "properties": {"number": {"type": "integer"}, "copy": {}, "json": {}}}
    if closed:
        schema["additionalProperties"] = False
    keep_tool = Tool.from_schema("keep", "Keep.", schema, keep)
    assert keep_tool.definition()["function"]["parameters"] == schema
    result = await _called(keep_tool, sent)
    strangers = closed and not sent.keys() <= schema["properties"].keys()
    assert (result.error is None) is not strangers
    assert got == ([] if strangers else [sent])


async def test_what_a_schema_requires_and_the_types_at_its_top_are_checked() -> None:
    async def never(arguments: dict[str, Any], session: Any) -> str:
        raise AssertionError

    tool = Tool.from_schema("guess", "Guess.", GUESS, never)
    for sent, problem in (({}, "'number' is required"), ({"number": [1]}, "'number'"), ("[1]", "JSON object")):
        assert problem in ((await _called(tool, sent)).error or "")


@pytest.mark.parametrize(
    ("name", "schema", "problem"),
    [("a b", GUESS, "use letters"), ("fine", {"type": "array"}, "must be that of an object")],
)
def test_a_tool_that_no_model_can_call_is_named(name: str, schema: dict[str, Any], problem: str) -> None:
    async def never(arguments: dict[str, Any], session: Any) -> str:
        raise AssertionError

    with pytest.raises((TypeError, ValueError), match=problem):
        Tool.from_schema(name, "", schema, never)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_is_an_error_of_the_tool(reward: float) -> None:
    async def wrong(arguments: dict[str, Any], session: Any) -> ToolResult:
        return ToolResult("", reward=reward)

    with pytest.raises(Exception, match="its reward is"):
        await _called(Tool.from_schema("wrong", "", {}, wrong), {})


async def _called(tool: Tool, arguments: Any) -> ToolResult:
    async def none() -> Any:
        raise AssertionError("no sandbox")

    session = ToolSession(f"task-{random.random()}", none)
    return await call_tool(tool.name, arguments, session, registry=ToolRegistry([tool]))
