"""A server refuses a conversation: that rollout ends as refused, is scored, and the run goes on, in both phases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lachesis.base_env import HermesAgentBaseEnv
from lachesis.cli import main
from lachesis.runs.results import RunFiles
from lachesis_messages.records.entries import load_trajectories
from lachesis_testing.fake_server import FakeServer, ToolUser
from tests.support.scripted_server import Answer, ScriptedServer, call, say
from tests.support.small_envs import lines, make
from tests.support.training_runs import with_tokens


class Questions(HermesAgentBaseEnv):
    """Four questions, answered after a call; half a point for each, whatever the answer."""

    name = "questions"

    async def setup(self):
        self.items = iter(range(4))

    async def get_next_item(self):
        return next(self.items, None)

    async def get_eval_items(self):
        return range(4)

    def format_prompt(self, item):
        return f"Question number {item}, please."

    async def compute_reward(self, item, result, ctx):
        return 0.5


def error(status: int, **fields: Any) -> web.Response:
    return web.json_response({"error": fields}, status=status)


def in_the_second_turn(trouble: Callable[[], Any]) -> Callable[[dict[str, Any]], Answer]:
    """A model that calls a tool and answers; the server has the trouble in the second turn of question 2."""

    def policy(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] != "tool":
            return call(("todo", {}))
        return trouble() if "number 2" in json.dumps(request["messages"]) else say("Done.")

    return policy


REFUSALS: dict[str, Callable[[], Any]] = {
    "moderation": lambda: error(403, code=403, message="Your input was flagged"),
    "403 without words": lambda: error(403, message="Forbidden"),
    "routing": lambda: error(404, message="No endpoints found that can handle this request."),
    "451": lambda: error(451, message="unavailable"),
    "400 of a content filter": lambda: error(400, code="content_filter", message="The prompt was filtered."),
    "finish reason of a content filter": lambda: say("half an ans", finish_reason="content_filter"),
    "finish reason sensitive": lambda: say("", finish_reason="sensitive"),
    "a blocked prompt": lambda: web.json_response({"choices": [], "promptFeedback": {"blockReason": "SAFETY"}}),
}


async def play(folder: Path, trouble: Callable[[], Any], **settings: Any) -> Any:
    async with ScriptedServer(in_the_second_turn(trouble)) as server:
        chosen = {"total_steps": 4, "group_size": 1, "enabled_toolsets": ["todo"], **settings}
        return await make(Questions, server, folder, **chosen).process_manager()


def of_item(folder: Path, item: int) -> list[dict[str, Any]]:
    groups = [*lines(folder / "groups.jsonl"), *lines(folder / "groups.failed.jsonl")]
    return [rollout for group in groups if group["item"] == item for rollout in group["rollouts"]]


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_one_refused_conversation_ends_as_refused_and_is_scored(tmp_path: Path, refusal: str) -> None:
    result = await play(tmp_path, REFUSALS[refusal])
    assert result.summary.outcomes == {"completed": 3, "refused": 1}
    (rollout,) = of_item(tmp_path, 2)
    assert (rollout["outcome"], rollout["reward"], rollout["turns"], rollout["attempts"]) == ("refused", 0.5, 1, 1)
    assert rollout["unscored_kind"] == "" and not rollout["completed"]
    assert "refused 1" in (tmp_path / "console.txt").read_text()
    assert "api_key" not in (tmp_path / "console.txt").read_text()
    assert "refused" in RunFiles(tmp_path / "groups.jsonl").report.read_text()


async def test_what_lists_outcomes_has_the_refused_ones(tmp_path: Path) -> None:
    await play(tmp_path, REFUSALS["moderation"])
    files = RunFiles(tmp_path / "groups.jsonl")
    kept, failed = (list(load_trajectories(path)) for path in (files.samples, files.failed_samples))
    assert ([line["completed"] for line in kept], [line["completed"] for line in failed]) == ([True] * 3, [False])
    for name in ("inspect", "atif", "hermes", "openai", "batch"):
        out = tmp_path / f"{name}.eval"
        option = ["--options", "{keep_without_reasoning: true}"] if name == "batch" else []
        assert main(["export", str(files.groups), "--format", name, "--out", str(out), *option]) == 0, name


async def test_a_refusal_of_the_first_prompt_is_scored_as_well(tmp_path: Path) -> None:
    def policy(request: dict[str, Any]) -> Any:
        flagged = "number 1" in json.dumps(request["messages"])
        return error(403, message="flagged by moderation") if flagged else say("Done.")

    async with ScriptedServer(policy) as server:
        env = make(Questions, server, tmp_path, total_steps=4, group_size=2, enabled_toolsets=[])
        result = await env.process_manager()
    assert result.summary.outcomes == {"completed": 6, "refused": 2}
    assert [rollout["reward"] for rollout in of_item(tmp_path, 1)] == [0.5, 0.5]


async def test_an_evaluation_counts_it(tmp_path: Path) -> None:
    async with ScriptedServer(in_the_second_turn(REFUSALS["routing"])) as server:
        env = make(Questions, server, tmp_path, enabled_toolsets=["todo"], eval_items=4)
        await env._run_evaluate()
    metrics = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert "eval/outcome/refused" in json.dumps(metrics)
    assert "refused" in (tmp_path / "eval" / "samples.html").read_text()


@pytest.mark.parametrize(
    ("status", "words"), [(400, "The prompt holds more tokens than the maximum of 4096."), (413, "Too much.")]
)
async def test_a_conversation_that_fills_the_context_is_scored_whatever_the_words(
    tmp_path: Path, status: int, words: str
) -> None:
    await play(tmp_path, lambda: error(status, message=words))
    (rollout,) = of_item(tmp_path, 2)
    assert (rollout["outcome"], rollout["reward"]) == ("context_exhausted", 0.5)


async def test_a_completion_that_filled_the_context_is_no_answer(tmp_path: Path) -> None:
    await play(tmp_path, lambda: say("half an ans", finish_reason="model_context_window_exceeded"))
    assert of_item(tmp_path, 2)[0]["outcome"] == "context_exhausted"


@pytest.mark.parametrize("word", ["insufficient_system_resource", "network_error", "a_word_of_tomorrow"])
async def test_a_server_that_broke_off_is_no_score(tmp_path: Path, word: str) -> None:
    await play(tmp_path, lambda: say("half an ans", finish_reason=word))
    (rollout,) = of_item(tmp_path, 2)
    assert (rollout["outcome"], rollout["reward"], rollout["unscored_kind"]) == ("infra_error", None, "model_server")


async def test_a_refusal_in_words_is_completed_and_marked(tmp_path: Path) -> None:
    await play(tmp_path, lambda: say(None, refusal="I cannot help with that."))
    (group,) = [group for group in lines(tmp_path / "groups.jsonl") if group["item"] == 2]
    assert (group["rollouts"][0]["outcome"], group["rollouts"][0]["refusal"]) == ("completed", True)
    assert group["messages"][0][-1]["content"] == "I cannot help with that."
    assert "refusal" not in of_item(tmp_path, 1)[0]


class Moderated(FakeServer):
    """A gateway in front of it refuses prompts of more than one turn about question 2."""

    refused = 0

    def routes(self) -> Iterable[web.RouteDef]:
        def guarded(route: web.RouteDef) -> web.RouteDef:
            async def handler(request: web.Request) -> web.StreamResponse:
                prompt = self.tokenizer.decode((await request.json()).get("prompt") or [])
                if "number 2" in prompt and "tool_response>" in prompt.rpartition("number 2")[2]:
                    self.refused += 1
                    return error(403, message="Forbidden")
                answer: web.StreamResponse = await route.handler(request)
                return answer

            return web.post(route.path, handler)

        return [guarded(route) if route.path.endswith("/completions") else route for route in super().routes()]


async def test_a_refused_conversation_keeps_the_tokens_that_it_had(tmp_path: Path) -> None:
    async with Moderated(ToolUser(turns=1)) as model:
        settings = make(Questions, model.base_url, tmp_path, total_steps=4, group_size=1, enabled_toolsets=["todo"])
        env = Questions(settings.config, [with_tokens(model, tmp_path)])
        result = await env.process_manager()
    assert result.summary.outcomes == {"completed": 3, "refused": 1} and model.refused == 1
    (rollout,) = of_item(tmp_path, 2)
    assert len(rollout["completions"]["tokens"]) == 1 and rollout["reward"] == 0.5
