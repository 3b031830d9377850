"""The agent loop against a real server at the wire: every end has a name, every retry a bound."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends import SandboxLost
from lachesis.loop.limits import LoopLimits
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.open_runs import NoOpenRun
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult
from lachesis_client import OpenAIServer, ServerSettings
from lachesis_data.files.validation import validate_entry
from lachesis_messages.errors import RoleOrder
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.messages import ToolCall
from lachesis_messages.records.entries import to_trajectory_entry
from lachesis_tools import ToolResult
from tests.run import some
from tests.support.scripted_server import Answer, ScriptedServer, call, say

ECHO = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Say it back.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Go."}]


async def echo(calls: Sequence[ToolCall]) -> list[ToolResult]:
    """A tool that works: its text comes back."""
    return [ToolResult(content=json.dumps({"echo": json.loads(c.arguments or "{}").get("text")})) for c in calls]


async def play(
    script: Sequence[Answer] | Callable[[dict[str, Any]], Any],
    *,
    messages: Sequence[dict[str, Any]] = ASK,
    execute: Any = echo,
    tools: Sequence[dict[str, Any]] = (ECHO, OTHER),
    server_settings: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[AgentResult, ScriptedServer]:
    """Run the loop against a server that plays `script`."""
    async with ScriptedServer(script) as server:
        chosen = {"max_retries": 0, **(server_settings or {})}
        client = OpenAIServer(ServerSettings(base_url=server.base_url, model_name="scripted", **chosen))
        try:
            loop = HermesAgentLoop(_Split(client), tools, execute=execute, **options)
            result = await loop.run(messages)
        finally:
            await client.close()
    validate_messages(result.messages, complete=False)
    return result, server


class _Split:
    """One server with the router's signature: the loop names a split, a single server has none."""

    def __init__(self, server: OpenAIServer) -> None:
        self.server = server

    async def chat(self, messages: Any, *, split: str = "train", **options: Any) -> Any:
        return await self.server.chat(messages, **options)


async def test_a_conversation_with_tools_ends_completed() -> None:
    result, _ = await play([call(("echo", {"text": "hi"})), say("done")])
    assert result.outcome is Outcome.COMPLETED
    assert result.finished_naturally
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert json.loads(result.messages[3]["content"]) == {"echo": "hi"}
    assert result.final_response == "done"
    assert (result.turns_used, result.api_calls, result.tool_calls) == (2, 2, 1)
    assert result.tool_counts["echo"].to_dict() == {"count": 1, "success": 1, "failure": 0}
    assert result.tokens.completion_tokens == 10


async def test_tools_always_travel_as_tools() -> None:
    _, server = await play([call(("echo", {"text": "hi"})), say("done")])
    assert [request["tools"] for request in server.requests] == [[ECHO, OTHER]] * 2
    assert "echo" not in server.requests[0]["messages"][0]["content"]


async def test_results_keep_the_order_of_the_calls() -> None:
    async def slow_first(calls: Sequence[ToolCall]) -> list[ToolResult]:
        async def one(index: int) -> ToolResult:
            await asyncio.sleep(0.02 * (len(calls) - index))
            return ToolResult(content=str(index))

        return list(await asyncio.gather(*(one(index) for index in range(len(calls)))))

    calls = [("echo", {"text": str(number)}) for number in range(5)]
    result, _ = await play([call(*calls), say("done")], execute=slow_first)
    answers = [message for message in result.messages if message["role"] == "tool"]
    assert [answer["content"] for answer in answers] == ["0", "1", "2", "3", "4"]
    assert [answer["tool_call_id"] for answer in answers] == [c["id"] for c in result.messages[2]["tool_calls"]]


async def test_max_turns_is_an_outcome_with_every_call_answered() -> None:
    result, server = await play([call(("echo", {"text": "again"}))], max_turns=3)
    assert result.outcome is Outcome.MAX_TURNS
    assert (result.turns_used, len(server.requests)) == (3, 3)
    validate_messages(result.messages)


async def test_an_unknown_tool_is_answered_with_near_names_and_its_siblings_run() -> None:
    result, _ = await play([call(("ecko", {"text": "a"}), ("echo", {"text": "b"})), say("done")])
    error_text = json.loads(result.messages[3]["content"])["error"]
    assert "ecko" in error_text
    assert "Did you mean echo?" in error_text
    assert "Available tools: echo, other" in error_text
    assert json.loads(result.messages[4]["content"]) == {"echo": "b"}
    assert [error.tool_name for error in result.tool_errors] == ["ecko"]
    assert result.outcome is Outcome.COMPLETED


async def test_missing_required_arguments_are_named_to_the_model() -> None:
    result, _ = await play([call(("echo", {})), call(("echo", {"text": "x"})), say("done")])
    assert "'text'" in result.messages[3]["content"]
    assert result.outcome is Outcome.COMPLETED
    assert result.tool_counts["echo"].to_dict() == {"count": 2, "success": 1, "failure": 1}


@pytest.mark.parametrize(
    ("flawed", "reason"),
    [
        (call(("echo", '{"text": "unfin')), "arguments are not JSON"),
        (call(("echo", "[1, 2]")), "not a JSON object"),
        (call(("echo", "null")), "not a JSON object"),
        (call(("echo", '"text"')), "not a JSON object"),
        (call(("echo", '{"text": NaN}')), "arguments are not JSON"),
        (call(("echo", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}")), "arguments are not JSON"),
        (call(("", {})), "text that starts a tool call and is none"),
        ({"content": None, "tool_calls": [{"id": "a", "type": "function"}]}, "text that starts a tool call"),
        (say("half a ca", finish_reason="malformed_function_call"), "text that starts a tool call and is none"),
        (say("I wonder\n</think>\n"), "nothing after the reasoning"),
        (say(None), "empty answer"),
        (say("   \n"), "empty answer"),
        (say("<think>I wonder</think>\n"), "nothing after the reasoning"),
        (say("<think>I wonder and wonder"), "nothing after the reasoning"),
        (say(None, reasoning_content="I wonder"), "nothing after the reasoning"),
        (call(("echo", '{"text": "unfin'), finish_reason="length"), "cut off by the token limit"),
    ],
)
async def test_an_unusable_turn_is_sampled_again_and_still_recorded(flawed: dict[str, Any], reason: str) -> None:
    result, server = await play([flawed, say("done")])
    assert result.outcome is Outcome.COMPLETED
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant"]
    assert server.requests[0]["messages"] == server.requests[1]["messages"], "the flawed turn is not in the context"
    (dropped,) = result.history.discarded
    assert reason in dropped.reason
    assert dropped.nodes[0].message.role == "assistant"
    assert (result.turns_used, result.api_calls) == (1, 2)


async def test_unusable_turns_end_in_model_error_at_the_last_valid_state() -> None:
    script = [call(("echo", {"text": "good"})), say(None)]
    result, server = await play(script, limits=LoopLimits(max_resamples=2))
    assert result.outcome is Outcome.MODEL_ERROR
    assert "empty answer" in result.reason
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "tool"]
    assert len(server.requests) == 1 + 3
    assert len(result.history.discarded) == 3


async def test_faulty_turns_are_bounded_and_rolled_back_to_before_the_first() -> None:
    script = [call(("echo", {"text": "good"})), call(("nothing", {}))]
    result, server = await play(script, limits=LoopLimits(max_faulty_turns=3))
    assert result.outcome is Outcome.MODEL_ERROR
    assert len(server.requests) == 1 + 3
    assert len(result.messages) == 4
    (dropped,) = result.history.discarded
    assert [node.message.role for node in dropped.nodes] == ["assistant", "tool"] * 3


async def test_a_good_turn_forgives_faulty_ones() -> None:
    script = [call(("nothing", {})), call(("echo", {"text": "a"}))] * 4
    result, _ = await play([*script, say("done")], limits=LoopLimits(max_faulty_turns=2))
    assert result.outcome is Outcome.COMPLETED


async def test_a_duplicate_call_runs_once_and_is_answered_twice() -> None:
    ran: list[str] = []

    async def counting(calls: Sequence[ToolCall]) -> list[ToolResult]:
        ran.extend(c.arguments for c in calls)
        return await echo(calls)

    twice = call(("echo", {"text": "a"}), ("echo", {"text": "a"}), ("echo", {"text": "b"}))
    for number, entry in enumerate(twice["tool_calls"]):
        entry["id"] = f"call_{number}"
    result, _ = await play([twice, say("done")], execute=counting)
    assert len(ran) == 2
    validate_messages(result.messages)
    assert "call_0" in result.messages[4]["content"]


async def test_a_duplicate_of_a_call_beyond_the_budget_was_not_run_either() -> None:
    calls = call(("echo", {"text": "a"}), ("echo", {"text": "b"}), ("echo", {"text": "b"}))
    for number, entry in enumerate(calls["tool_calls"]):
        entry["id"] = f"call_{number}"
    result, _ = await play([calls], limits=LoopLimits(max_tool_calls=1))
    assert result.tool_counts["echo"].to_dict() == {"count": 3, "success": 1, "failure": 2}
    assert all("Not run" in message["content"] for message in result.messages[4:6])


@pytest.mark.parametrize(
    "broken", ['{"name": "echo", "arguments": {"text":}}\n</tool_call>', '{"name": "echo", "argum']
)
async def test_a_broken_call_beside_a_good_one_is_not_dropped_without_a_word(broken: str) -> None:
    good = '<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>'
    result, _ = await play(
        [say(f"{good}\n<tool_call>\n{broken}"), say("done")], server_settings={"tool_call_parser": "hermes"}
    )
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant"]
    assert "starts a tool call" in result.history.discarded[0].reason


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a_completion_that_the_server_broke_off_is_no_answer_of_the_model(reason: str) -> None:
    half = say("half an ans", finish_reason=reason)
    result, _ = await play([half])
    assert result.outcome is Outcome.INFRA_ERROR
    retried, _ = await play([half, say("whole")], server_settings={"max_retries": 1})
    assert (retried.outcome, retried.final_response) == (Outcome.COMPLETED, "whole")


async def test_an_example_in_the_prompt_is_never_taken_for_the_models_answer() -> None:
    examples = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    ask = [*examples, {"role": "user", "content": "2+0?"}]
    result, _ = await play([say(None)], messages=ask, limits=LoopLimits(max_resamples=0))
    assert (result.outcome, result.final_response) == (Outcome.MODEL_ERROR, "")


async def test_an_invalid_prompt_is_refused_before_the_model_is_asked() -> None:
    with pytest.raises(RoleOrder):
        await play([say("x")], messages=[*ASK, {"role": "system", "content": "late"}])


async def test_what_a_provider_says_of_a_call_goes_back_with_it() -> None:
    signed = call(("echo", {"text": "a"}))
    signed["tool_calls"][0] |= {"index": 0, "extra_content": {"google": {"thought_signature": "SIG"}}}
    _, server = await play([signed, say("done")])
    (sent,) = server.requests[1]["messages"][2]["tool_calls"]
    assert sent["extra_content"] == {"google": {"thought_signature": "SIG"}}
    assert "index" not in sent


async def test_an_ephemeral_prompt_joins_a_system_message_of_parts() -> None:
    parts = [{"type": "text", "text": "S"}]
    ask = [{"role": "system", "content": parts}, ASK[1]]
    _, server = await play([say("x")], messages=ask, ephemeral_system_prompt="EPHEMERAL")
    assert server.requests[0]["messages"][0]["content"] == [*parts, {"type": "text", "text": "\n\nEPHEMERAL"}]


async def test_call_ids_of_the_prefill_are_taken() -> None:
    prefill = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": call(("echo", {}))["tool_calls"]},
        {"role": "tool", "tool_call_id": "call_0_echo", "content": "r"},
    ]
    _, server = await play([call(("echo", {"text": "a"})), say("done")], prefill_messages=prefill)
    ids = [c["id"] for m in server.requests[-1]["messages"] for c in m.get("tool_calls", ())]
    assert len(ids) == len(set(ids)) == 2


async def test_a_call_id_that_comes_again_is_renamed_and_keeps_its_length() -> None:
    repeats = call(("echo", {"text": "a"}))
    repeats["tool_calls"][0]["id"] = "abcdefgh0"  # Mistral's templates accept ids of 9 characters only
    result, server = await play([*[repeats] * 12, say("done")], max_turns=13)
    sent = server.requests[-1]["messages"]
    ids = [each["id"] for message in sent for each in message.get("tool_calls", ())]
    assert len(ids) == len(set(ids)) == 12 and {len(each) for each in ids} == {9}
    assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == ids
    assert result.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("parser", ["hermes", None])
async def test_a_thought_that_stands_apart_and_in_the_text_is_kept_and_sent_back_once(parser: str | None) -> None:
    thinks = call(("echo", {"text": "a"}), content="<think>I ponder</think>\n", reasoning_content="I ponder")
    in_text = say('<think>I ponder</think>\n<tool_call>{"name": "echo", "arguments": {"text": "a"}}</tool_call>')
    answer = {**in_text, "reasoning_content": "I ponder"} if parser else thinks
    result, server = await play([answer, say("done")], server_settings={"tool_call_parser": parser})
    assert result.reasoning_per_turn == ["I ponder", None]
    assert server.requests[1]["messages"][2]["reasoning_content"] == "I ponder"
    written = to_trajectory_entry(result.messages, [ECHO], model="m", completed=True).entry["conversations"]
    assert written[2]["value"].count("I ponder") == 1


async def test_ids_that_a_server_uses_again_become_new_ones() -> None:
    same = call(("echo", {"text": "a"}))
    result, server = await play([same, same, same, say("done")])
    ids = [message["tool_calls"][0]["id"] for message in result.messages if message.get("tool_calls")]
    assert len(set(ids)) == 3
    sent = [m["tool_call_id"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert sent == ids


async def test_empty_arguments_mean_no_arguments() -> None:
    result, _ = await play([call(("other", "")), say("done")])
    assert result.outcome is Outcome.COMPLETED
    assert result.tool_errors == []


async def test_an_answer_cut_off_by_the_limit_is_not_a_natural_end() -> None:
    result, _ = await play([say("The answer is", finish_reason="length")])
    assert result.outcome is Outcome.CONTEXT_EXHAUSTED
    assert not result.finished_naturally
    assert result.final_response == "The answer is"


SCRATCHPAD = "<REASONING_SCRATCHPAD>\nplan\n</REASONING_SCRATCHPAD>\n"


@pytest.mark.parametrize("settings", [{}, {"tool_call_parser": "hermes"}, {"tool_call_parser": "llama3_json"}])
@pytest.mark.parametrize("tools", [(), (ECHO, OTHER)])
@pytest.mark.parametrize(
    ("said", "thought", "answer"),
    [
        (f"{SCRATCHPAD}answer", "plan", "answer"),
        (f"\n\n{SCRATCHPAD}\nanswer", "plan", "answer"),
        ("plan\n</REASONING_SCRATCHPAD>\n\nanswer", "plan", "answer"),
        (f"The tag is {SCRATCHPAD}", None, f"The tag is {SCRATCHPAD}"),
    ],
)
async def test_a_scratchpad_is_reasoning(
    said: str, thought: str | None, answer: str, tools: Any, settings: Any
) -> None:
    result, _ = await play([say(said)], tools=tools, server_settings=settings)
    assert result.outcome is Outcome.COMPLETED
    assert result.reasoning_per_turn == [thought]
    assert result.final_response.strip() == answer.strip()
    assert result.messages[-1]["content"].strip() == answer.strip()


async def test_a_scratchpad_alone_is_no_answer_and_one_before_a_call_is_no_text() -> None:
    result, _ = await play([say(SCRATCHPAD), call(("echo", {"text": "a"}), content=SCRATCHPAD), say("done")])
    assert (result.outcome, result.api_calls) == (Outcome.COMPLETED, 3)
    assert result.reasoning_per_turn == ["plan", None]
    assert [message["content"] for message in result.messages[2:]] == ["", '{"echo": "a"}', "done"]
    assert "nothing after the reasoning: plan" in result.history.discarded[0].reason


@pytest.mark.parametrize(
    ("parser", "draft"),
    [
        ("hermes", '<tool_call>\n{"name": "echo", "arguments": {"text": "no"}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"name": "echo", "arguments": {"text": "no"}}]'),
    ],
)
async def test_a_call_that_is_drafted_in_a_scratchpad_is_not_run(parser: str, draft: str) -> None:
    text = f"<REASONING_SCRATCHPAD>\n{draft}\n</REASONING_SCRATCHPAD>\nNo call."
    result, _ = await play([say(text)], server_settings={"tool_call_parser": parser})
    assert (result.outcome, result.tool_calls, result.final_response) == (Outcome.COMPLETED, 0, "No call.")
    assert result.reasoning_per_turn == [draft]


@pytest.mark.parametrize("opener", ["<think>", "<REASONING_SCRATCHPAD>", ""])
async def test_reasoning_that_the_token_limit_cut_off_is_one_think_block(opener: str) -> None:
    native = {} if opener else {"reasoning_content": "so far"}
    result, _ = await play([say(f"{opener}so far" if opener else "", finish_reason="length", **native)], tools=())
    assert (result.outcome, result.api_calls) == (Outcome.CONTEXT_EXHAUSTED, 1)
    entry = to_trajectory_entry(result.messages, model="m", completed=False).entry
    assert entry["conversations"][-1]["value"] == "<think>\nso far\n</think>"
    assert validate_entry(entry) == []


async def test_a_prompt_that_no_longer_fits_is_context_exhausted() -> None:
    def too_long(_: Any) -> web.Response:
        error = {"message": "This model's maximum context length is 10 tokens", "code": "context_length_exceeded"}
        return web.json_response({"error": error}, status=400)

    result, _ = await play([call(("echo", {"text": "a"})), too_long])
    assert result.outcome is Outcome.CONTEXT_EXHAUSTED
    assert len(result.messages) == 4


@pytest.mark.parametrize("status", [500, 503, 429, 401, 400])
async def test_a_server_that_fails_is_infra_error_and_not_the_models(status: int) -> None:
    result, _ = await play([call(("echo", {"text": "a"})), status])
    assert result.outcome is Outcome.INFRA_ERROR
    assert result.error is not None
    assert not result.outcome.scored


async def test_a_lost_sandbox_is_infra_error_and_leaves_a_valid_conversation() -> None:
    async def lost(calls: Sequence[ToolCall]) -> list[ToolResult]:
        raise SandboxLost("the sandbox is gone")

    result, _ = await play([call(("echo", {"text": "a"})), say("done")], execute=lost)
    assert result.outcome is Outcome.INFRA_ERROR
    assert isinstance(result.error, SandboxLost)
    assert [message["role"] for message in result.messages] == ["system", "user"]
    assert "unfinished turn" in result.history.discarded[0].reason


async def test_an_agent_that_is_busy_at_the_end_of_its_time_is_a_timeout() -> None:
    async def forever(calls: Sequence[ToolCall]) -> list[ToolResult]:
        await asyncio.sleep(60)
        return []

    result, _ = await play([call(("echo", {"text": "a"}))], execute=forever, limits=LoopLimits(max_seconds=0.3))
    assert result.outcome is Outcome.TIMEOUT and result.outcome.scored
    assert "longer than 0.3 s" in result.reason and result.seconds_own >= 0.3 > result.seconds_waiting
    validate_messages(result.messages, complete=False)


async def test_the_tool_budget_is_kept_exactly() -> None:
    ran: list[ToolCall] = []

    async def counting(calls: Sequence[ToolCall]) -> list[ToolResult]:
        ran.extend(calls)
        return await echo(calls)

    batch = [("echo", {"text": str(number)}) for number in range(3)]
    result, _ = await play([call(*batch)], execute=counting, limits=LoopLimits(max_tool_calls=4))
    assert len(ran) == 4
    assert result.outcome is Outcome.MAX_TURNS
    assert "budget of tool calls" in result.messages[-1]["content"]


async def test_the_token_budget_ends_the_rollout() -> None:
    result, server = await play([call(("echo", {"text": "a"}))], limits=LoopLimits(rollout_token_budget=12))
    assert result.outcome is Outcome.CONTEXT_EXHAUSTED
    assert len(server.requests) == 3, "5 tokens a turn: the third one crosses the budget of 12"


async def test_a_token_budget_without_counts_is_refused_not_ignored() -> None:
    script = [call(("echo", {"text": "a"}), usage=None)]
    result, _ = await play(script, limits=LoopLimits(rollout_token_budget=12))
    assert result.outcome is Outcome.INFRA_ERROR
    assert "reports no token usage" in result.reason


async def test_ephemeral_prompt_and_prefill_reach_the_model_and_no_trajectory() -> None:
    prefill = [{"role": "user", "content": "PREFILL q"}, {"role": "assistant", "content": "PREFILL a"}]
    result, server = await play(
        [call(("echo", {"text": "hi"})), say("done")],
        ephemeral_system_prompt="EPHEMERAL",
        prefill_messages=prefill,
    )
    for request in server.requests:
        assert request["messages"][0]["content"] == "You are helpful.\n\nEPHEMERAL"
        assert [m["content"] for m in request["messages"][1:3]] == ["PREFILL q", "PREFILL a"]
    kept = json.dumps(result.messages)
    assert "EPHEMERAL" not in kept
    assert "PREFILL" not in kept


async def test_an_ephemeral_prompt_without_a_system_message_becomes_one() -> None:
    result, server = await play([say("done")], messages=ASK[1:], ephemeral_system_prompt="EPHEMERAL")
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "EPHEMERAL"}
    assert [message["role"] for message in result.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    ],
)
@pytest.mark.parametrize("sent_as", ["reasoning_content", "reasoning", None])
async def test_reasoning_is_kept_per_turn_and_sent_back_as_the_server_takes_it(
    field: dict[str, Any], sent_as: str | None
) -> None:
    result, server = await play(
        [call(("echo", {"text": "hi"}), **field), say("done")], server_settings={"reasoning_field": sent_as}
    )
    assert result.reasoning_per_turn == ["hm", None]
    assert result.messages[2]["reasoning"] == "hm"
    sent = server.requests[1]["messages"][2]
    given = {key: sent[key] for key in ("reasoning_content", "reasoning", "reasoning_details") if key in sent}
    assert given == ({sent_as: "hm"} if sent_as else {})


async def test_calls_left_in_the_text_are_parsed_and_their_text_is_not_kept_twice() -> None:
    raw = '<tool_call>\n{"name": "echo", "arguments": {"text": "hi"}}\n</tool_call>'
    result, server = await play([say(raw), say("done")], server_settings={"tool_call_parser": "hermes"})
    assert result.tool_calls == 1
    assert "<tool_call>" not in json.dumps(server.requests[1]["messages"])


async def test_a_call_in_the_text_that_is_cut_off_is_sampled_again() -> None:
    raw = '<tool_call>\n{"name": "echo", "arguments": {"text": "h'
    result, _ = await play(
        [say(raw, finish_reason="length"), say("done")], server_settings={"tool_call_parser": "hermes"}
    )
    assert result.outcome is Outcome.COMPLETED
    assert "cut off" in result.history.discarded[0].reason


async def test_cancelling_the_loop_cancels_the_tool() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def forever(calls: Sequence[ToolCall]) -> list[ToolResult]:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return []

    task = asyncio.create_task(play([call(("echo", {"text": "a"}))], execute=forever))
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


async def test_tools_outside_a_run_are_refused_before_the_first_request() -> None:
    with pytest.raises(NoOpenRun, match="use it inside a run"):
        await HermesAgentLoop(None, [ECHO]).run(ASK)  # type: ignore[arg-type]


ANSWERS = st.one_of(
    st.builds(say, st.sampled_from(["done", "", "<think>x</think>", "<think>", "fine <think>y</think>"])),
    st.builds(lambda text: say(text, finish_reason="length"), st.sampled_from(["cut", ""])),
    st.lists(
        st.tuples(
            st.sampled_from(["echo", "other", "ghost"]),
            st.sampled_from(['{"text": "a"}', "{}", "null", "[]", '{"text', "", '{"text": "b"}']),
        ),
        min_size=1,
        max_size=4,
    ).map(lambda calls: call(*calls)),
    st.sampled_from([500, 400]),
)


@settings(max_examples=some(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ANSWERS, min_size=1, max_size=8))
def test_whatever_the_model_says_the_conversation_is_valid_and_every_sample_is_reachable(script: list[Answer]) -> None:
    result, _ = asyncio.run(play([*script, say("the end")], max_turns=6))
    validate_messages(result.messages, complete=False)
    reached = [node.origin for node in result.history.nodes() if node.message.role == "assistant"]
    for dropped in result.history.discarded:
        reached += [node.origin for node in dropped.nodes if node.message.role == "assistant"]
    assert len(reached) == result.api_calls
    assert all(origin is not None for origin in reached)
    assert isinstance(result.outcome, Outcome)
