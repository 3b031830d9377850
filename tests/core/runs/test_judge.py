"""`self.judge`: a second model server that scores, asked at the wire of the fake server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from aiohttp import web
from pydantic import BaseModel, Field

from lachesis import reward
from lachesis.base_env import NotRunning
from lachesis.runs.failures import UnusableSettings
from lachesis.runs.judge import _form
from lachesis.settings.server_settings import ServerConfigError
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_testing.fake_server import FakeServer, Scripted
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import SortWords, does_nothing, lines, make, process, rollouts

ASKED = "Is this an answer? "


class Verdict(BaseModel):
    """What the judge says."""

    good: bool
    points: int = Field(ge=0, le=10)


GOOD = '{"good": true, "points": 5}'


class Judged(SortWords):
    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        verdict = await self.judge(ASKED + result.final_response, Verdict)
        return verdict.points / 10 if verdict.good else 0.0


def judge_at(server: FakeServer | ScriptedServer, **settings: Any) -> dict[str, Any]:
    name = "fake" if isinstance(server, FakeServer) else "scripted"
    return {"judge_server": {"base_url": server.base_url, "model_name": name, "max_retries": 0, **settings}}


async def test_its_answer_is_a_value_of_the_schema_and_equal_questions_of_a_run_have_one_answer(tmp_path: Path) -> None:
    async with FakeServer(Scripted(GOOD, '{"good": false, "points": 0}')) as server:
        result = await process(Judged, tmp_path, does_nothing, total_steps=2, **judge_at(server))
        again = await process(Judged, tmp_path, does_nothing, total_steps=3, **judge_at(server))
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [0.5] * 6
    assert again.files.groups == result.files.groups
    (request,) = (seen.body for seen in server.requests if seen.completions)
    assert request["temperature"] == 0.0
    assert request["response_format"]["json_schema"]["schema"] == Verdict.model_json_schema()
    (kept,) = lines(tmp_path / "groups.judge.jsonl")
    assert (kept["prompt"], kept["answer"]) == (f"{ASKED}I would rather not.", GOOD)


async def test_an_answer_that_does_not_fit_is_asked_for_again_with_the_reason(tmp_path: Path) -> None:
    async with FakeServer(Scripted("Sure!", '{"good": true, "points": 50}', f"```json\n{GOOD}\n```")) as server:
        result = await process(Judged, tmp_path, does_nothing, total_steps=1, group_size=1, **judge_at(server))
    (rollout,) = rollouts(result.files.groups)
    assert rollout["reward"] == 0.5
    last = [seen.body["messages"] for seen in server.requests if seen.completions][-1]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert "points: Input should be less than or equal to 10" in last[-1]["content"]


class Careless(Judged):
    """It makes a low score of every failure."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        try:
            return await super().compute_reward(item, result, ctx)
        except Exception:
            return 0.0


@pytest.mark.parametrize("kind", [Judged, Careless])
@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        ({}, "the judge fake gave 3 answers that do not fit the schema, the last one 'Never.'"),
        ({"unavailable": 1.0}, "unavailable after 1 attempt, last cause: status 503"),
        ({"not_json": 1.0}, "failed"),
    ],
)
async def test_failure_is_not_zero_without_the_judge_a_rollout_has_no_score(
    tmp_path: Path, kind: type[Judged], faults: dict[str, float], problem: str
) -> None:
    async with FakeServer(Scripted("Never."), faults=faults) as server:
        result = await process(kind, tmp_path, does_nothing, total_steps=1, group_size=1, **judge_at(server))
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["reward"], rollout["unscored_kind"], rollout["traceback"]) == (None, "model_server", None)
    assert problem in rollout["reason"]
    assert not (tmp_path / "groups.judge.jsonl").exists()


async def test_a_judge_that_is_slower_than_the_reward_may_be_is_no_error_of_the_reward(tmp_path: Path) -> None:
    async with FakeServer(Scripted(GOOD), faults={"hang": 1.0}) as server:
        settings = {"total_steps": 1, "group_size": 1, "reward_timeout": 2, **judge_at(server)}
        result = await process(Judged, tmp_path, does_nothing, **settings)
    (rollout,) = rollouts(result.files.failures)
    assert (rollout["unscored_kind"], rollout["traceback"]) == ("model_server", None)
    assert "did not answer before the reward was stopped" in rollout["reason"]


async def test_an_error_that_a_later_equal_question_made_good_is_none(tmp_path: Path) -> None:
    class Repeats(Judged):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            try:
                return await super().compute_reward(item, result, ctx)
            except Exception:
                return await super().compute_reward(item, result, ctx)

    async with FakeServer(Scripted(GOOD), faults={"unavailable": [0]}) as server:
        result = await process(Repeats, tmp_path, does_nothing, total_steps=1, group_size=1, **judge_at(server))
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [0.5]


class Own(SortWords):
    """The judge is asked by a client of the author's."""

    judge_url = ""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        async with openai.AsyncOpenAI(base_url=self.judge_url, api_key="none", max_retries=0) as client:
            asked = [{"role": "user", "content": ASKED + result.final_response}]
            answer = await client.chat.completions.create(model="scripted", messages=asked)  # type: ignore[arg-type]
        return float(answer.choices[0].message.content == GOOD)


def an_error(status: int, message: str, **more: Any) -> web.Response:
    return web.json_response({"error": {"message": message, **more}}, status=status)


FORBIDDEN = {
    "a moderation": lambda: an_error(403, "The request was flagged by our moderation."),
    "a content filter": lambda: an_error(400, "The prompt was filtered.", code="content_filter"),
    "too long": lambda: an_error(400, "The maximum context length is 10 tokens.", code="context_length_exceeded"),
}
OF_OUR_CLIENT = {
    **FORBIDDEN,
    "a bare 403": lambda: an_error(403, "Forbidden"),
    "a finish reason": lambda: say("", finish_reason="content_filter"),
    "a refusal": lambda: say(None, refusal="I cannot help with that."),
}
BROKEN = {
    "down": lambda: an_error(503, "overloaded"),
    "the limit": lambda: an_error(429, "Too many requests"),
    "its key": lambda: an_error(401, "Incorrect API key"),
}


class Moderated:
    """A judge that refuses what contains a word, until `closed`: then it refuses or fails for everybody."""

    def __init__(self, refusal: Callable[[], Any], *, closed: bool = False) -> None:
        self.refusal = refusal
        self.closed = closed

    def __call__(self, request: dict[str, Any]) -> Any:
        return self.refusal() if self.closed or "BOMB" in str(request["messages"]) else say(GOOD)


async def judged_by(
    folder: Path, kind: type[SortWords], moderated: Moderated, words: Iterable[str], **more: Any
) -> Any:
    """Play one rollout a group; the agent says each of `words` in turn, and the last one again and again."""
    left = itertools.chain(words, itertools.repeat("BOMB"))
    async with ScriptedServer(moderated) as judge:
        if issubclass(kind, Own):
            kind = type("Own", (kind,), {"judge_url": judge.base_url})
        settings = {"group_size": 1, "max_num_workers": 1, "max_infra_retries": 0, **judge_at(judge), **more}
        return await process(kind, folder, lambda _: say(next(left)), **settings)


CASES = [(Judged, name) for name in OF_OUR_CLIENT] + [(Own, name) for name in FORBIDDEN]


@pytest.mark.parametrize(("kind", "name"), CASES)
async def test_what_the_judge_refuses_and_others_are_answered_is_the_agents_fault(
    tmp_path: Path, kind: type[SortWords], name: str
) -> None:
    moderated = Moderated(OF_OUR_CLIENT[name])
    result = await judged_by(tmp_path, kind, moderated, ["good", "fine", "BOMB"], total_steps=3)
    scores = [(rollout["reward"], bool(rollout["agent_fault"])) for rollout in rollouts(result.files.groups)]
    assert [fault for _, fault in scores] == [False, False, True] and scores[2][0] == 0.0
    assert scores[0][0] > 0
    assert result.failed_groups == 0


@pytest.mark.parametrize("kind", [Judged, Careless, Own])
@pytest.mark.parametrize("name", FORBIDDEN)
async def test_a_judge_that_refuses_everybody_scores_nobody(tmp_path: Path, kind: type[SortWords], name: str) -> None:
    moderated = Moderated(FORBIDDEN[name], closed=True)
    settings = {"total_steps": 1, "max_failed_groups": 2}
    with contextlib.suppress(Exception):
        await judged_by(tmp_path, kind, moderated, ["good"], **settings)
    assert [rollout for rollout in rollouts(tmp_path / "groups.jsonl") if rollout["reward"] is not None] == []


@pytest.mark.parametrize("kind", [Judged, Own])
@pytest.mark.parametrize("name", BROKEN)
async def test_a_judge_that_fails_after_it_answered_is_never_the_agents_fault(
    tmp_path: Path, kind: type[SortWords], name: str
) -> None:
    moderated = Moderated(BROKEN[name])
    with contextlib.suppress(Exception):
        await judged_by(tmp_path, kind, moderated, ["good", "fine", "BOMB"], total_steps=3, max_failed_groups=1)
    scored = [rollout for rollout in rollouts(tmp_path / "groups.jsonl") if rollout["reward"] is not None]
    assert [bool(rollout["agent_fault"]) for rollout in scored] == [False, False]


class Plainly(SortWords):
    """The judge in named rewards, in a thread and with `await`."""

    compute_reward = None

    @reward(weight=0.5)
    def plain(self, item: Any, result: Any, ctx: Any) -> float:
        return float(self.judge("Plain?", Literal["yes", "no"]) == "yes")

    @reward
    async def awaited(self, item: Any, result: Any, ctx: Any) -> float:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        found = await self.judge("How many?", schema)
        return float(found["n"])


async def test_rewards_ask_it_in_threads_and_with_json_schemas(tmp_path: Path) -> None:
    async def answers(request: dict[str, Any]) -> Any:
        return say('"yes"' if "Plain?" in request["messages"][0]["content"] else '{"n": 3, "why": "counted"}')

    async with ScriptedServer(answers) as server:
        result = await process(Plainly, tmp_path, does_nothing, total_steps=1, group_size=3, **judge_at(server))
        assert len(server.requests) == 2
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [3.5] * 3


async def test_a_question_that_nobody_waits_for_leaves_the_rollout_unscored(tmp_path: Path) -> None:
    class Forgets(Judged):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            asyncio.gather(self.judge("Is it?", bool))
            return 1.0

    async with FakeServer(Scripted("true")) as server:
        result = await process(Forgets, tmp_path, does_nothing, total_steps=1, group_size=1, **judge_at(server))
    (rollout,) = rollouts(result.files.failures)
    assert rollout["reward"] is None and "self.judge" in rollout["traceback"]


async def test_a_wrong_key_stops_the_run_before_its_first_rollout(tmp_path: Path) -> None:
    async with FakeServer(Scripted(GOOD), api_key="right") as server:
        with pytest.raises(Exception, match="api_key"):
            await process(Judged, tmp_path, does_nothing, **judge_at(server, api_key="wrong"))
    assert not (tmp_path / "groups.jsonl").exists() or lines(tmp_path / "groups.jsonl") == []


async def test_a_judge_without_a_server_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    class OfGroup(SortWords):
        async def compute_group_reward(self, item: Any, results: Any, ctxs: Any) -> Any:  # type: ignore[override]
            return [await self.judge(ASKED, bool) for _ in results]

    asked: list[Any] = []
    for env_cls in (Judged, OfGroup):
        with pytest.raises(UnusableSettings, match=r"name it with --env\.judge_server") as stopped:
            await process(env_cls, tmp_path, lambda request: asked.append(request) or does_nothing(request))
        assert stopped.value.exit_code == 2 and len(asked) <= 4, "at the first group"
        asked.clear()
    async with ScriptedServer(does_nothing) as server:
        with pytest.raises(NotRunning, match="judge_server"):
            make(Judged, server, tmp_path, **judge_at(server)).judge("Outside of a run?", bool)
    with pytest.raises(ServerConfigError, match=r"env.judge_server: bas_url: .*takes the settings of openai"):
        await process(Judged, tmp_path, does_nothing, judge_server={"bas_url": "http://127.0.0.1:1/v1"})


def test_its_key_is_not_written_and_its_address_may_change_between_starts() -> None:
    server = {"base_url": "http://me:secret@host/v1", "model_name": "judge", "api_key": "secret"}
    config = HermesAgentEnvConfig(judge_server=server)
    for shown in (config.about_content(evaluation=False), config.public()):
        assert "secret" not in str(shown) and shown["judge_server"]["model_name"] == "judge"
    assert "base_url" not in config.about_content(evaluation=False)["judge_server"]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": ["a", "b"]}, ['"a"'], ['"c"', "1"]),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["0.5", "1"], ["2", '"0.5"', "true"]),
        ({"type": ["integer", "null"]}, ["1", "null"], ["1.5", '"1"']),
        ({"anyOf": [{"const": 1}, {"type": "string", "maxLength": 2}]}, ["1", '"ab"'], ["2", '"abc"']),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1}, ["[true]"], ["[]", "[1]", "true"]),
        (
            {
                "type": "object",
                "title": "Found",
                "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
                "required": ["a", "c"],
                "additionalProperties": False,
            },
            ['{"a": "x", "c": [1]}', '{"a": "x", "b": 2, "c": null}'],
            ['{"a": "x"}', '{"a": 1, "c": 1}', '{"a": "x", "c": 1, "d": 1}', "[]"],
        ),
        ({}, ["1", "{}"], ["x"]),
    ],
)
def test_json_schemas_are_checked(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    adapter, sent = _form(schema)
    assert sent == schema
    for text in good:
        assert adapter.validate_json(text) is not ...
    for text in bad:
        with pytest.raises(ValueError, match="validation error"):
            adapter.validate_json(text)


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/x"}, {"type": "text"}, {"type": "object", "additionalProperties": {"type": "string"}}]
)
def test_a_keyword_that_would_not_be_checked_is_an_error(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="which is not checked here; pass a pydantic model"):
        _form(schema)
