"""Research over generated pages: every question can be solved, nothing else earns, and everything can be repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.web_research import WebResearchConfig, WebResearchEnv, address, last_line, pages, questions, world
from lachesis_tools import ToolSession, call_tool
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import lines, make


def environment(folder: Path, **settings: Any) -> WebResearchEnv:
    chosen = {"group_size": 1, "data_path_to_save_groups": str(folder / "groups.jsonl"), **settings}
    return WebResearchEnv(WebResearchConfig(**chosen), [ServerConfig(model_name="reference")])


def test_the_world_of_a_seed_is_always_the_same_and_its_answers_are_on_its_pages() -> None:
    facts = world(3)
    assert facts == world(3) != world(4)
    by_url = {page.url: page for page in pages(facts)}
    assert len(by_url) == len(facts) == 150
    items = list(questions(facts))
    assert {len(item["path"]) for item in items} == {2, 3}
    for item in items:
        assert item["path"][0] in item["question"] and item["answer"] not in item["question"]
        assert f" {item['answer']}." in by_url[address(item["path"][-1])].text
        for name, following in zip(item["path"], item["path"][1:], strict=False):
            assert f" {following}." in by_url[address(name)].text


@pytest.mark.slow
async def test_the_reference_policy_solves_every_question_and_calls_give_the_same_results_again(tmp_path: Path) -> None:
    held_out = len(environment(tmp_path, dataset_seed=5).held_out)
    count = len(list(questions(world(5)))) - held_out
    env = environment(tmp_path, dataset_seed=5, total_steps=count)
    result = await env.process_manager()
    assert (result.summary.rollouts, result.summary.reward.mean) == (count, 1.0)
    again, session = environment(tmp_path, dataset_seed=5).tools, ToolSession("again", no_sandbox)
    for group in lines(result.files.groups)[::20]:
        (messages,) = group["messages"]
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert len(calls) == len(results) >= 4
        for call, read in zip(calls, results, strict=True):
            function = call["function"]
            repeated = await call_tool(function["name"], function["arguments"], session, registry=again)
            assert repeated.content == read


async def no_sandbox() -> Any:
    raise AssertionError("research needs no sandbox")


@pytest.mark.parametrize(
    ("answer", "earned"),
    [
        ("I would rather not.", 0.0),
        ("Answer: {answer}\nSources: {sources}", 1.0),
        ("So.\nAnswer:  {answer} \nSources: {sources}", 1.0),
        ("Answer: {answer}", 0.75),
        ("Answer: {answer}\nSources: {sources}, https://almanac.example/more", 0.75),
        ("Answer: {answer} or 1800\nSources: {sources}", 0.0),
        ("Answer: {answer}\nAnswer: 1\nSources: {sources}", 0.0),
        ("The answer is {answer}.", 0.0),
    ],
)
async def test_the_answer_and_exactly_its_pages_count(tmp_path: Path, answer: str, earned: float) -> None:
    item = environment(tmp_path).held_out[0]
    sources = ", ".join(reversed([address(name) for name in item["path"]]))
    async with ScriptedServer([say(answer.format(answer=item["answer"], sources=sources))]) as server:
        env = make(WebResearchEnv, server, tmp_path, eval_items=1, enabled_toolsets=["web"])
        result = await env._run_evaluate()
    assert result.summary.reward.mean == earned


async def test_questions_of_evaluation_are_not_trained_on(tmp_path: Path) -> None:
    env = environment(tmp_path)
    trained = [json.dumps(await env.get_next_item()) for _ in range(500)]
    held_out = {json.dumps(item) for item in env.held_out}
    assert held_out and not held_out & set(trained)
    assert len(set(trained)) + len(held_out) == len(list(questions(world(0))))


def test_the_last_line_of_a_label_counts() -> None:
    assert last_line("Answer: 1\nAnswer: 2\n", "Answer") == "2" and last_line("x Answer: 1", "Answer") == ""
