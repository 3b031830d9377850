"""ATIF: every rollout as a trajectory that Harbor's rules allow, with exactly the tokens of each completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.group_records import group_record
from lachesis_data.exports.atif import atif
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.records.export_lines import ExportLine
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import TokenPrefix
from tests.support.token_trees import END, UNTIMED, completion
from tests.tokens.trajectories.test_samples_of_histories import rollouts


def record(messages: MessageHistory | Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A group as a run writes it, with one rollout of this conversation."""
    history = messages if isinstance(messages, MessageHistory) else MessageHistory(messages)
    result = AgentResult(1, True, [], [], Outcome.COMPLETED, "the model answered", history)
    rollout = Rollout("r", "a-1", 0, Outcome.COMPLETED, "", 1.0, result)
    group = PlayedGroup({"secret": "the answer"}, "a-1", tools=[], rollouts=[rollout])
    return group_record(group, environment="e", model="m")


def only(group: dict[str, Any], **options: Any) -> ExportLine:
    (line,) = atif(group, **options)
    assert isinstance(line, ExportLine)
    return line


def agent_steps(line: ExportLine) -> list[dict[str, Any]]:
    return [step for step in line.content["steps"] if step["source"] == "agent"]


@UNTIMED
@given(rollouts())
def test_each_sampled_step_has_exactly_the_tokens_of_its_completion(
    drawn: tuple[MessageHistory, list[ChatResponse]],
) -> None:
    history, sampled = drawn
    line = only(record(history))
    nodes = [node for node in history.nodes() if node.message.role == "assistant"]
    for step, node in zip(agent_steps(line), nodes, strict=True):
        assert ("metrics" in step, "is_copied_context" in step) == (node.sampled, not node.sampled)
        if node.sampled:
            assert isinstance(node.origin, ChatResponse) and node.origin.tokens is not None
            metrics, tokens = step["metrics"], node.origin.tokens
            assert metrics["prompt_token_ids"] == tokens.prompt.ids
            assert metrics["completion_token_ids"] == tokens.ids
            assert metrics["logprobs"] == list(tokens.logprobs)
    counted = sum(step["metrics"]["completion_tokens"] for step in agent_steps(line) if "metrics" in step)
    elsewhere = line.content["final_metrics"].get("extra", {}).get("tokens_of_other_branches", 0)
    assert counted + elsewhere == sum(len(response.tokens) for response in sampled if response.tokens is not None)
    assert ("branches_omitted" in line.warnings) == bool(elsewhere)


def test_ids_of_prompts_can_be_left_out_and_all_ids() -> None:
    history = MessageHistory([{"role": "user", "content": "go"}])
    history.append(completion(TokenPrefix([1, 2]), [3, END]))
    group = record(history)
    (step,) = agent_steps(only(group, token_ids="completions"))
    assert step["metrics"]["completion_token_ids"] == [3, END] and "prompt_token_ids" not in step["metrics"]
    assert step["metrics"]["prompt_tokens"] == 2
    (step,) = agent_steps(only(group, token_ids="none"))
    assert "metrics" not in step


def test_a_record_that_does_not_name_the_completion_of_a_message_gets_no_tokens() -> None:
    history = MessageHistory([{"role": "user", "content": "go"}])
    history.append(completion(TokenPrefix([1, 2]), [3, END]))
    group = record(history)
    del group["rollouts"][0]["message_turns"]
    line = only(group)
    assert line.warnings == ("token_ids_without_message",)
    assert all("metrics" not in step and "llm_call_count" not in step for step in line.content["steps"])


def call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "terminal", "arguments": arguments}}


def test_results_belong_to_the_step_of_their_call() -> None:
    asked = [call("a", '{"command": "ls"}'), call("b", '{"command": "pwd"}')]
    line = only(
        record(
            [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": None, "tool_calls": asked, "reasoning": "Look."},
                {"role": "tool", "tool_call_id": "b", "content": "/"},
                {"role": "tool", "tool_call_id": "a", "content": "x"},
                {"role": "assistant", "content": "Done."},
            ]
        )
    )
    user, looked, done = line.content["steps"]
    assert (user["source"], looked["message"], looked["reasoning_content"]) == ("user", "", "Look.")
    assert [each["arguments"] for each in looked["tool_calls"]] == [{"command": "ls"}, {"command": "pwd"}]
    assert [(each["source_call_id"], each["content"]) for each in looked["observation"]["results"]] == [
        ("b", "/"),
        ("a", "x"),
    ]
    assert (done["step_id"], done["message"]) == (3, "Done.")


@pytest.mark.parametrize("arguments", ["{not json", "[1]", '{"a": NaN}', ""])
def test_arguments_that_are_no_object_are_kept_as_the_model_wrote_them(arguments: str) -> None:
    asked = {"role": "assistant", "content": "", "tool_calls": [call("a", arguments)]}
    line = only(record([{"role": "user", "content": "go"}, asked]))
    (written,) = line.content["steps"][1]["tool_calls"]
    assert (written["arguments"], written["extra"]) == ({}, {"arguments": arguments})
    assert line.warnings == ("arguments_replaced",)


def test_images_keep_their_address_and_what_the_format_does_not_know_is_named() -> None:
    picture = "data:image/png;base64,aGk="
    parts = [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.webp"}},
        {"type": "image_url", "image_url": {"url": "data:image/bmp;base64,aGk="}},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    ]
    line = only(record([{"role": "user", "content": parts}]))
    assert line.content["steps"][0]["message"] == [
        {"type": "text", "text": "Look"},
        {"type": "image", "source": {"media_type": "image/png", "path": picture}},
        {"type": "image", "source": {"media_type": "image/webp", "path": "https://example.org/a.webp"}},
        {"type": "text", "text": "[image_url]"},
        {"type": "text", "text": "[input_audio]"},
    ]
    assert line.warnings == ("part_omitted",)


def test_half_of_a_surrogate_pair_is_replaced_and_named() -> None:
    line = only(record([{"role": "user", "content": "odd \ud83d"}]))
    assert line.content["steps"][0]["message"] == "odd \ufffd"
    assert line.warnings == ("character_replaced",)


def test_an_example_in_the_prompt_is_context_and_the_item_is_not_in_the_trajectory() -> None:
    history = MessageHistory([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    history.append({"role": "user", "content": "3+3?"})
    history.append(ChatResponse(Message("assistant", "6"), FinishReason.STOP))  # without tokens, as in Phase 1
    line = only(record(history))
    assert [step.get("is_copied_context", False) for step in agent_steps(line)] == [True, False]
    assert agent_steps(line)[1]["llm_call_count"] == 1
    assert "the answer" not in str(line.content)
