"""The conformance suite of doors: of environments of other standards, or of any environment with sessions.

    class TestMyDoor(DoorSuite):
        target = "sums:easy"

        def model(self, request):
            return call(("add", {"by": 2}))

`model` answers requests to OpenAI's chat route, by what is in them only, and plays an item to its end. It needs pytest
and pytest-asyncio; `docs/doors.md` has an example.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lachesis import HermesAgentBaseEnv, ServerConfig
from lachesis.cli.environment_classes import environment_class
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import FakeServer, Policy, ToolUser
from lachesis_testing.scripted_server import Answer, ScriptedServer, call, say
from lachesis_tokens.samples.verification import verify_records

_ENOUGH = 120.0
"""Seconds in which a run has to end after it is cancelled."""


class Sessions:
    """Counts the sessions of a class's rollouts, and waits for one to be open."""

    def __init__(self, env_cls: type[HermesAgentBaseEnv]) -> None:
        self.opened = self.open = 0
        self.envs: list[Any] = []
        sessions: Sessions = self
        method: Any = env_cls.session

        @asynccontextmanager
        async def session(env: Any, item: Any, tools: Any) -> AsyncIterator[Any]:
            async with method(env, item, tools) as value:
                sessions.opened += 1
                sessions.open += 1
                sessions.envs.append(env)
                try:
                    yield value
                finally:
                    sessions.open -= 1

        given = {"__module__": env_cls.__module__, "__doc__": env_cls.__doc__, "session": session}
        self.env_cls: type[HermesAgentBaseEnv] = type(env_cls.__name__, (env_cls,), given)


class DoorSuite:
    """The tests that every door passes. Subclass it, and set `target` and `model`."""

    target: ClassVar[str]
    """As on the command line: `SCHEME:NAME?argument=value`, or `FILE.py:CLASS`."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Of the environment, such as `terminal_backend`."""
    tokens: ClassVar[Policy] = ToolUser(turns=2)
    """What the fake server says where tokens are tested."""
    pytestmark = pytest.mark.asyncio

    def model(self, request: dict[str, Any]) -> Answer:
        raise NotImplementedError("answer so that an item is played to its end")

    @pytest.fixture
    def environment(self) -> type[HermesAgentBaseEnv]:
        """The class of `target`. Override it for a target that a fixture makes, such as the address of a server."""
        env_cls: type[HermesAgentBaseEnv] = environment_class(self.target)
        return env_cls

    @pytest.fixture
    def kill(self) -> Callable[[Any], Awaitable[None]] | None:
        """Kills what plays the sessions of an environment, or None if that is not for a test to kill."""

        async def kill(env: Any) -> None:
            os.kill(env._guest._process.pid, signal.SIGKILL)

        return kill

    # --- what is offered

    async def test_items_are_json_and_their_number_decides_them(
        self, environment: type[HermesAgentBaseEnv], tmp_path: Path
    ) -> None:
        found: list[list[Any]] = []
        for time in range(2):
            async with _set_up(_made(environment, tmp_path / str(time), **self.settings)) as env:
                found.append([item async for item in _first_items(env, 3)])
        assert found[0], "there are no items"
        assert json.loads(json.dumps(found[0], allow_nan=False)) == found[0], "an item is not JSON"
        assert found[0] == found[1], "the same number gives another item"

    async def test_models_can_call_the_tools(self, environment: type[HermesAgentBaseEnv], tmp_path: Path) -> None:
        async with _set_up(_made(environment, tmp_path, **self.settings)) as env:
            for item in [item async for item in _first_items(env, 3)]:
                tools = list(env.tools_for(item))
                assert len({tool.name for tool in tools}) == len(tools), "two tools have one name"
                for tool in tools:
                    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", tool.name), tool.name
                    schema = json.loads(json.dumps(tool.parameters, allow_nan=False))
                    assert schema["type"] == "object", f"{tool.name}: its arguments are no object"
                    missing = set(schema.get("required", ())) - set(schema.get("properties", {}))
                    assert not missing, f"{tool.name}: it requires {sorted(missing)}, which it does not have"

    # --- a rollout, however it ends

    async def test_the_model_plays_to_an_end_with_a_score(
        self, environment: type[HermesAgentBaseEnv], tmp_path: Path
    ) -> None:
        sessions = Sessions(environment)
        played = await self._play(sessions, tmp_path, self.model, total_steps=2, group_size=2)
        assert len(played) == 4
        for rollout in played:
            assert rollout["outcome"] == "completed", rollout["reason"]
            assert rollout["reward"] is not None, rollout["reason"]
            assert math.isfinite(rollout["reward"])
        assert (sessions.opened, sessions.open) == (4, 0)

    async def test_the_session_of_a_rollout_that_is_cut_off_is_closed(
        self, environment: type[HermesAgentBaseEnv], tmp_path: Path
    ) -> None:
        sessions = Sessions(environment)
        (rollout,) = await self._play(sessions, tmp_path, self.model, max_agent_turns=1)
        assert rollout["outcome"] in ("completed", "max_turns", "truncated"), rollout["outcome"]
        assert (sessions.opened, sessions.open) == (1, 0)

    async def test_a_model_that_fails_is_no_score_and_its_session_is_closed(
        self, environment: type[HermesAgentBaseEnv], tmp_path: Path
    ) -> None:
        sessions = Sessions(environment)
        (rollout,) = await self._play(sessions, tmp_path, lambda _: 500)
        assert rollout["reward"] is None
        assert sessions.opened >= 1
        assert sessions.open == 0

    async def test_a_cancelled_run_closes_its_sessions(
        self, environment: type[HermesAgentBaseEnv], tmp_path: Path
    ) -> None:
        asked = asyncio.Event()

        async def waits(_: dict[str, Any]) -> Answer:
            asked.set()
            await asyncio.sleep(_ENOUGH)
            return say("")

        sessions = Sessions(environment)
        run = asyncio.create_task(self._play(sessions, tmp_path, waits))
        await asyncio.wait({run, asyncio.create_task(asked.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert sessions.open == 1
        run.cancel()
        await asyncio.wait({run}, timeout=_ENOUGH)
        assert run.done() and sessions.open == 0

    @pytest.mark.parametrize(
        "mistake",
        [
            call(("no_such_tool", {})),
            call(("", {})),
            say(""),
            say("\x00\ud83d </tool_call>" * 50),
            say("x" * 100_000),
        ],
        ids=["unknown tool", "no name", "nothing", "odd characters", "long"],
    )
    async def test_what_the_agent_gets_wrong_is_a_score(
        self, environment: type[HermesAgentBaseEnv], tmp_path: Path, mistake: Answer
    ) -> None:
        (rollout,) = await self._play(Sessions(environment), tmp_path, lambda _: mistake, max_agent_turns=4)
        assert rollout["reward"] is not None, f"{rollout['reason']}\n{rollout['traceback']}"

    async def test_arguments_that_do_not_fit_are_a_score(
        self, environment: type[HermesAgentBaseEnv], tmp_path: Path
    ) -> None:
        numbers = itertools.count()
        wrong = ['{"a": ', "[]", '{"no_such_argument": [1]}', "{}", json.dumps({"x": {"y": None}})]

        def model(request: dict[str, Any]) -> Answer:
            if not (tools := request.get("tools")):
                return say("")
            number = next(numbers)
            return call((tools[number % len(tools)]["function"]["name"], wrong[number % len(wrong)]))

        (rollout,) = await self._play(Sessions(environment), tmp_path, model, max_agent_turns=8)
        assert rollout["reward"] is not None, f"{rollout['reason']}\n{rollout['traceback']}"

    async def test_what_plays_the_sessions_is_killed_and_that_is_no_score(
        self,
        environment: type[HermesAgentBaseEnv],
        tmp_path: Path,
        kill: Callable[[Any], Awaitable[None]] | None,
    ) -> None:
        if kill is None:
            pytest.skip("it is not for a test to kill")
        sessions, kills = Sessions(environment), iter([kill])

        async def model(request: dict[str, Any]) -> Answer:
            for each in kills:
                await each(sessions.envs[-1])
            return self.model(request)

        (rollout,) = await self._play(sessions, tmp_path / "first", model)
        assert (rollout["reward"], rollout["outcome"]) == (None, "infra_error")
        kills = iter([kill])
        (rollout,) = await self._play(sessions, tmp_path / "again", model, max_infra_retries=2)
        assert (rollout["outcome"], rollout["attempts"]) == ("completed", 2)
        assert sessions.open == 0

    # --- rollouts beside each other

    async def test_rollouts_at_once_do_not_meet(self, environment: type[HermesAgentBaseEnv], tmp_path: Path) -> None:
        def talks(groups: Path) -> dict[str, Any]:
            return {
                json.dumps(group["item"], sort_keys=True): sorted(json.dumps(each) for each in group["messages"])
                for group in read_lines(groups)
            }

        found = []
        for at_once in (1, 64):
            folder = tmp_path / str(at_once)
            await self._play(Sessions(environment), folder, self.model, total_steps=6, max_num_workers=at_once)
            found.append(talks(folder / "groups.jsonl"))
        assert found[0] == found[1]

    # --- tokens

    async def test_every_sampled_token_is_in_a_valid_sample_once(
        self, environment: type[HermesAgentBaseEnv], tmp_path: Path
    ) -> None:
        async with FakeServer(self.tokens) as server:
            server.tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
            one: dict[str, Any] = {"base_url": server.base_url, "model_name": "fake", "server_type": "vllm"}
            servers = [ServerConfig(**one, tokenizer_name=str(tmp_path / "tokenizer"))]
            env = _made(environment, tmp_path, servers, total_steps=2, max_agent_turns=4, **self.settings)
            await env.process_manager()
            sampled = sum(len(made.ids) for seen in server.requests for made in seen.completions)
        totals = verify_records(list(read_lines(tmp_path / "groups.jsonl")))
        assert not totals.problems, totals.problems
        assert sampled > 0
        assert (totals.delivered, totals.duplicated, totals.wrong_prefix) == (sampled, 0, 0)

    async def _play(
        self,
        sessions: Sessions,
        folder: Path,
        model: Callable[[dict[str, Any]], Any],
        **settings: Any,
    ) -> list[dict[str, Any]]:
        """The rollouts of a run, those without a score too."""
        async with ScriptedServer(model) as server:
            servers = [ServerConfig(base_url=server.base_url, model_name="scripted", api_key="x", max_retries=0)]
            result = await _made(sessions.env_cls, folder, servers, **{**self.settings, **settings}).process_manager()
        files = [path for path in (result.files.groups, result.files.failures) if path.exists()]
        return [rollout for path in files for group in read_lines(path) for rollout in group["rollouts"]]


def _made(
    env_cls: type[HermesAgentBaseEnv], folder: Path, servers: list[ServerConfig] | None = None, **settings: Any
) -> HermesAgentBaseEnv:
    chosen = {
        "total_steps": 1,
        "group_size": 1,
        "max_agent_turns": 40,
        "max_infra_retries": 0,
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
        "use_wandb": False,
        **settings,
    }
    return env_cls(env_cls.env_config_cls(**chosen), servers or [ServerConfig(model_name="reference")])


@asynccontextmanager
async def _set_up(env: HermesAgentBaseEnv) -> AsyncIterator[HermesAgentBaseEnv]:
    async with env.running():
        yield env


async def _first_items(env: HermesAgentBaseEnv, count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        if (item := await env.get_next_item()) is None:
            return
        yield item
