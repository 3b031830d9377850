"""The reference policy: whole rollouts without a model, and the sources of its steps."""

from __future__ import annotations

import asyncio

import pytest

from lachesis.runs.reference_policy import MODEL_NAME, ReferencePolicy
from lachesis.settings.server_settings import REFERENCE, ServerConfig, ServerConfigError
from lachesis_client import RequestRejected, ServerUnavailable
from lachesis_envs.gsm8k.worked_solutions import (
    UNKNOWN_PROBLEM,
    WorkedSolution,
    WorkedSolutionPolicy,
    arithmetic_steps,
    evaluate,
    gsm8k_steps,
)
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message, ToolCall

TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
QUESTION = "Natalia sold clips to 48 of her friends in April, and half as many in May. How many altogether?"
GSM8K = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72"
)


async def test_a_whole_rollout_is_played_step_by_step():
    policy = WorkedSolutionPolicy({QUESTION: gsm8k_steps(GSM8K), "Natalia sold clips": WorkedSolution(["1"], "0")})
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": f"Solve:\n\n{QUESTION}\nUse tools."}]
    reference = ReferencePolicy(policy)
    played = []
    for _ in range(5):
        response = await reference.chat(messages, tools=TOOLS)
        assert (response.model, response.usage.prompt_tokens) == (MODEL_NAME, None)
        messages.append(response.message.to_openai())
        if not response.message.tool_calls:
            break
        assert response.finish_reason is FinishReason.TOOL_CALLS
        (call,) = response.message.tool_calls
        played.append(call.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "24"})
    assert played == ['{"code": "print(48/2)"}', '{"code": "print(48+24)"}']
    assert response.message.text.endswith("\\boxed{72}")
    assert response.finish_reason is FinishReason.STOP
    assert reference.requests == 3


async def test_an_unknown_problem_is_answered_honestly():
    policy = WorkedSolutionPolicy({QUESTION: gsm8k_steps(GSM8K)})
    for asked in ("What is love?", "", QUESTION[:-1]):
        assert policy([{"role": "user", "content": asked}], TOOLS) == Message("assistant", UNKNOWN_PROBLEM)
    assert WorkedSolutionPolicy({})([], None).content == UNKNOWN_PROBLEM


async def test_without_the_tool_only_the_answer_is_given():
    policy = WorkedSolutionPolicy({QUESTION: gsm8k_steps(GSM8K)})
    message = policy([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}], None)
    assert (message.tool_calls, message.text) == ((), "The result is \\boxed{72}")


async def test_a_policy_may_be_async_and_its_failure_is_no_retry():
    async def policy(messages, tools):
        if messages[0]["content"] == "fail":
            raise KeyError("oops")
        return Message("assistant", messages[0]["content"].upper(), reasoning="why")

    reference = ReferencePolicy(policy)
    response = await reference.chat([{"role": "user", "content": "abc"}])
    assert (response.message.text, response.message.reasoning) == ("ABC", "why")
    with pytest.raises(RequestRejected, match=r"^the policy failed: KeyError") as raised:
        await reference.chat([{"role": "user", "content": "fail"}])
    assert "test_reference_policy.py, line" in str(raised.value) and "correct reference_policy" in str(raised.value)
    assert reference.requests == 2


async def test_what_a_policy_gets_and_gives_is_its_own():
    tools = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]
    asked = MessageHistory([{"role": "user", "content": "abc"}])
    parts = ({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
    given = Message("assistant", parts, (ToolCall("c1", "python", "{}"),), extra={"field": {"of": "the author"}})

    def policy(messages, tools):
        seen.append((messages, tools))
        messages[0]["content"] = "changed"
        tools[0]["function"]["name"] = "changed"
        return given

    seen = []
    reference = ReferencePolicy(policy)
    response = await reference.chat(asked, tools=tools, temperature=0.5)
    assert seen == [([{"role": "user", "content": "changed"}], seen[0][1])] and seen[0][1] != tools
    assert asked[0]["content"] == "abc" and tools[0]["function"]["name"] == "python"
    assert response.message == Message("assistant", "ab", (ToolCall("c1", "python", "{}"),))
    assert (response.raw_finish_reason, response.sampling) == ("tool_calls", {"temperature": 0.5})
    assert await reference.chat([*asked, response.message.to_openai()], tools=TOOLS)


async def test_a_call_without_an_id_gets_one_and_an_empty_text_stays_one():
    said = Message("assistant", "", (ToolCall("", "python", "{}"),))
    message = (await ReferencePolicy(lambda messages, tools: said).chat([{"role": "user", "content": "x"}])).message
    assert message.tool_calls[0].id and message.content == ""


@pytest.mark.parametrize("answer", ["text", None, Message("assistant", tool_calls=(ToolCall("c1", "", "{}"),))])
async def test_an_answer_that_is_no_message_is_the_policys_failure(answer):
    with pytest.raises(RequestRejected, match="the policy failed"):
        await ReferencePolicy(lambda messages, tools: answer).chat([{"role": "user", "content": "x"}])


async def test_an_async_policy_has_the_requests_at_once_that_the_settings_allow_and_its_times_are_metrics():
    playing, most = set(), 0

    async def policy(messages, tools):
        nonlocal most
        playing.add(id(messages))
        most = max(most, len(playing))
        await asyncio.sleep(0)
        playing.discard(id(messages))
        return Message("assistant", "x")

    config = ServerConfig(model_name=REFERENCE, num_max_requests_at_once=3, num_requests_for_eval=2)
    reference = ReferencePolicy(policy, config)
    ask = [{"role": "user", "content": "x"}]
    await asyncio.gather(*(reference.chat(ask) for _ in range(9)))
    assert most == 3
    most = 0
    await asyncio.gather(*(reference.chat(ask, split="eval") for _ in range(9)))
    assert most == 2
    names = ["request_time_avg", "request_time_std", "request_time_99p", "average_num_attempts"]
    names += ["eval_request_time_avg", "eval_request_time_std", "eval_request_time_99p", "eval_retry_rate"]
    assert set(reference.wandb_metrics({"mine": 1.0})) == {"mine", *(f"server/server_0_{name}" for name in names)}


async def test_a_policy_that_never_answers_is_given_up():
    async def policy(messages, tools):
        await asyncio.Event().wait()

    config = ServerConfig(model_name=REFERENCE, timeout=1)
    with pytest.raises(ServerUnavailable, match="no answer within 1 s"):
        await ReferencePolicy(policy, config).chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("policy", [None, "solve"])
def test_what_is_no_policy_is_an_error_of_the_settings(policy):
    with pytest.raises(ServerConfigError, match=r"reference.policy"):
        ReferencePolicy(policy)


@pytest.mark.parametrize(
    ("prose", "steps"),
    [
        ("David spent 6 x €9.5 = €57 for the notebooks.", ["6 * 9.5"]),
        ("pay 240 * 1/2 = €120 for it", ["240 * 1 / 2"]),
        ("19 roses x £2 = £38", ["19 * 2"]),
        ("2 * €5 = €10", ["2 * 5"]),
        ("earns $155/day * 16 days/month = $2480/month", ["155 * 16"]),
        ("length: 385 meters / 55 meters/minute = 7 minutes", ["385 / 55"]),
        ("each serving has 40 oz/5 = 8 oz", ["40 / 5"]),
        ("Her 3 friends ate 3 + 9 = 12 slices. Then 12 + 1,000 = 1,012.", ["3 + 9", "12 + 1000"]),
        ("There are 25% of 80 = 20 left", ["(25 / 100) * 80"]),
        ("Warm water mile = 5+2(16)=37.0 minutes", ["5 + 2 * (16)"]),
        ("56 + 26 = 82\n56 + 26 = 82\n82 − 2 = 80", ["56 + 26", "82 - 2"]),
        ("he had 16.833333333333336 - 2 - 1/3 = 14.500000000000002 hours", ["16.833333333333336 - 2 - 1 / 3"]),
        ("48=48 emails", []),
        ("wrong: 2 + 2 = 5", []),
        ("x + 100 = 184, 1/0 = 0, = 5, 3 =", []),
    ],
)
def test_arithmetic_in_prose_is_taken_only_where_it_holds(prose, steps):
    solution = arithmetic_steps(prose + "\n#### 1,057.0")
    assert solution.answer == "1057"
    assert list(solution.steps) == [f"print({step})" for step in steps or ["1057"]]


def test_gsm8k_annotations_that_are_no_arithmetic_are_left_out():
    solution = gsm8k_steps("a <<x*2=4>> b <<20*.5=10>> c <<__import__('os')=1>> d <<2**9**9=1>>\n#### 10")
    assert (list(solution.steps), solution.answer) == (["print(20*.5)"], "10")
    assert list(gsm8k_steps("no steps\n#### 1,234").steps) == ["print(1234)"]


@pytest.mark.parametrize("text", ["", "(" * 300, "1/0", "a", "2**3", "True", "1e999", "[1]", "9" * 5000, "1 or 2"])
def test_the_evaluator_knows_arithmetic_only(text):
    assert evaluate(text) is None
