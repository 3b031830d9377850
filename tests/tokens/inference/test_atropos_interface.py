"""`managed_server` as environments written for Atropos use it: chat_completion, completion, get_state, plain dicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lachesis_client import ServerSettings
from lachesis_messages.history import MessageHistory
from lachesis_messages.tokens import MASKED, MASKED_LOGPROB
from lachesis_testing.fake_server import FakeServer, Reply, fake_tokenizer
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.server.token_source import SettingsDiffer
from tests.support.exactness import Stack, assert_exact, stack

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query":  "Zürich"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "When is the tide high?"}


def trained(node: Any) -> list[int]:
    return [token for token in node.masked_tokens if token != MASKED]


def assert_nodes(world: Stack, managed: Any) -> list[Any]:
    """The nodes are what the server sampled, and each has lists of one length in Atropos' conventions."""
    assert_exact(world, managed)
    nodes: list[Any] = managed.get_state()["nodes"]
    for node in nodes:
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
        for token, mask, logprob in zip(node.tokens, node.masked_tokens, node.logprobs, strict=True):
            assert (mask == token and logprob <= 0) or (mask == MASKED and logprob == MASKED_LOGPROB)
        assert node.full_text == world.text(node.tokens) and node["tokens"] is node.tokens
    return nodes


async def test_twenty_turns_are_one_node_with_the_ids_of_the_template() -> None:
    async with stack() as world, world.tokens.managed_server(tokenizer=world.fake.tokenizer) as managed:
        messages: list[dict[str, Any]] = [QUESTION]
        for number in range(20):
            world.says.next = [f"Turn {number}: the tide is high."]
            completion = await managed.chat_completion(messages=messages, max_tokens=100, temperature=1.0)
            choice = completion.choices[0]
            assert choice.finish_reason == "stop" and choice.message["content"] == choice.message.content
            messages += [
                {"role": "assistant", "content": choice.message.content},
                {"role": "user", "content": "Go on."},
            ]
        (node,) = assert_nodes(world, managed)
        assert trained(node) == [
            token for seen in world.fake.requests for made in seen.completions for token in made.ids
        ]
        rendered = world.fake.tokenizer.apply_chat_template(messages[:-1], tokenize=True, return_dict=False)
        assert node.tokens + world.encode("\n") == rendered
        assert node.metadata["finish_reason"] == "stop" and node.metadata["turns"] == 20


def as_objects(message: Any) -> Any:
    return {"role": "assistant", "content": message.content, "tool_calls": message.tool_calls}


def itself(message: Any) -> Any:
    return message


def dumped(message: Any) -> Any:
    return message.model_dump()


def without_reasoning(message: Any) -> Any:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {name: call["function"][name] for name in ("name", "arguments")},
        }
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": message["content"] or "", "tool_calls": calls}


def without_content(message: Any) -> Any:
    plain = without_reasoning(message)
    del plain["content"]
    return plain


def reserialised(message: Any) -> Any:
    plain = without_reasoning(message)
    for call in plain["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    return plain


def as_mappings(message: Any) -> Any:
    plain = without_reasoning(message)
    for call in plain["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return plain


@pytest.mark.parametrize(
    "sent_back", [as_objects, itself, dumped, without_reasoning, without_content, reserialised, as_mappings]
)
async def test_a_caller_of_dicts_goes_on_from_the_sampled_ids(sent_back: Callable[[Any], Any]) -> None:
    """Clients may rewrite a message that still says the same: the model sees what it sampled, and it is one node."""
    async with stack() as world, world.tokens.managed_server() as managed:
        messages: list[Any] = [QUESTION]
        for _ in range(3):
            world.says.next = [f"<think>\nLook it up.\n</think>\n\n{CALL}"]
            choice = (await managed.chat_completion(messages=messages, tools=TOOLS)).choices[0]
            assert choice.finish_reason == "tool_calls"
            call = choice.message.tool_calls[0]
            assert call.function.name == call["function"]["name"] == "search"
            assert json.loads(call.function.arguments) == {"query": "Zürich"}
            messages += [sent_back(choice.message), {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
        world.says.next = ["At noon."]
        await managed.chat_completion(messages=messages, tools=TOOLS)
        assert world.text(world.last_prompt).count("Look it up.") == 3 + 1  # the tool's description is one
        (node,) = assert_nodes(world, managed)
        assert node.metadata["turns"] == 4


async def test_a_changed_message_is_context_and_what_was_sampled_is_trained() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        world.says.next = ["noon \n"]
        choice = (await managed.chat_completion(messages=[QUESTION])).choices[0]
        messages = [QUESTION, {"role": "assistant", "content": choice.message.content.strip()}, QUESTION]
        await managed.chat_completion(messages=messages)
        first, second = assert_nodes(world, managed)
        assert world.text(trained(first)) == "noon \n<|im_end|>" and world.text(trained(second)) == "noon \n<|im_end|>"
        assert "noon<|im_end|>" in second.full_text


async def test_choice_and_node_have_the_same_place() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        texts = ["First.", "Second, longer.", "Second", "First."]
        world.says.next = texts
        completion = await managed.chat_completion(messages=[QUESTION], n=4, tools=TOOLS)
        assert [choice.message.content for choice in completion.choices] == texts
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        nodes = assert_nodes(world, managed)
        assert [world.text(trained(node)) for node in nodes] == [f"{text}<|im_end|>" for text in texts]


async def test_a_choice_that_was_continued_keeps_its_place() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        world.says.next = ["First.", "Second.", "Third."]
        await managed.chat_completion(messages=[QUESTION], n=3)
        for said in ("Second.", "First."):
            world.says.next = [f"After {said}"]
            await managed.chat_completion(messages=[QUESTION, {"role": "assistant", "content": said}, QUESTION])
        nodes = assert_nodes(world, managed)
        assert [world.text(trained(node)).partition("<")[0] for node in nodes] == ["First.", "Second.", "Third."]
        assert [node.metadata["turns"] for node in nodes] == [2, 2, 1]


async def test_identical_choices_are_nodes_of_their_own() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        world.says.next = ["The same."]
        await managed.chat_completion(messages=[QUESTION], n=3)
        await managed.chat_completion(messages=[QUESTION, {"role": "assistant", "content": "The same."}, QUESTION])
        assert [node.metadata["turns"] for node in assert_nodes(world, managed)] == [2, 1, 1]


async def test_other_tools_and_other_system_prompts_are_other_nodes() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        answer = {"role": "assistant", "content": "Yes."}
        world.says.next = ["Yes."]
        await managed.chat_completion(messages=[QUESTION])
        for tools in (TOOLS, None, TOOLS):
            messages = [QUESTION, answer, QUESTION]
            await managed.chat_completion(messages=messages, tools=tools)
        await managed.chat_completion(messages=[{"role": "system", "content": "Be brief."}, *messages])
        nodes = assert_nodes(world, managed)
        assert sum(len(trained(node)) for node in nodes) == 5 * len([*world.encode("Yes."), 0])
        assert [node.metadata["turns"] for node in nodes] == [2, 1, 1, 1]


async def test_a_completion_of_text_goes_on_from_its_tokens() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        text = "The tide is"
        for said in (" high at", " noon and low", " at six."):
            ids = world.encode(said)
            last = world.text(ids[-1:])
            split = [*ids[:-1], *world.encode(last[:1]), *world.encode(last[1:])]  # as no encoder splits it
            world.says.next = [Reply(split, "length")]
            completion = await managed.completion(prompt=text, max_tokens=64, n=1)
            assert completion.choices[0].text == said and completion.choices[0].finish_reason == "length"
            text += said
        (node,) = assert_nodes(world, managed)
        assert node.full_text == text and node.metadata["turns"] == 3


async def test_completions_of_text_with_n_are_nodes_in_their_order() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        world.says.next = [Reply(world.encode(" noon"), "length"), " noon and six", " midnight"]
        completion = await managed.completion(prompt="The tide is high at", n=3)
        assert [choice.text for choice in completion.choices] == [" noon", " noon and six", " midnight"]
        nodes = assert_nodes(world, managed)
        assert [world.text(trained(node)).partition("<")[0] for node in nodes] == [
            choice.text for choice in completion.choices
        ]


async def test_what_has_no_effect_is_rejected_by_name() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        with pytest.raises(TypeError, match="logit_processors"):
            await managed.chat_completion(messages=[QUESTION], logit_processors=[1])
        with pytest.raises(ValueError, match="another tokenizer"):
            async with world.tokens.managed_server(tokenizer=_Other()):
                pass
        assert managed.get_state() == {"nodes": []} and not world.fake.requests


class _Other:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


async def test_two_rollouts_of_one_server_share_nothing() -> None:
    async with stack() as world, world.tokens.managed_server() as one, world.tokens.managed_server() as other:
        world.says.next = ["At noon."]
        await one.chat_completion(messages=[QUESTION])
        await other.chat(MessageHistory([QUESTION]))
        assert len(one.get_state()["nodes"]) == len(other.get_state()["nodes"]) == 1
        one.reset()
        assert one.get_state() == {"nodes": []} and len(other.completions()) == 1


async def test_the_settings_of_a_server_count_where_a_call_says_nothing() -> None:
    """As in Phase 1: `openai.extra_body` goes with every request, and the arguments of a call win over it."""
    async with FakeServer("one two STOP three") as fake:
        said = {"top_p": 0.5, "top_k": 20, "stop": ["STOP"], "priority": 1}
        engine = create_engine("vllm", replace(fake.settings(), extra_body=said))
        async with TokenServer([engine], PromptBuilder(fake_tokenizer()), "hermes") as server:
            response = await server.chat([QUESTION], temperature=1.0, top_p=0.9)
            assert response.message.text == "one two "
            sent = {name: fake.requests[-1].body[name] for name in ("top_p", "top_k", "stop", "priority")}
            assert sent == {"top_p": 0.9, "top_k": 20, "stop": ["STOP"], "priority": 1}
            # Fields that do not change the sampling may be secrets, so no sample holds them.
            assert {name: response.sampling.get(name) for name in sent} == {**sent, "priority": None}
            response = await server.chat([QUESTION], extra_body={"top_k": 5, "stop": None})
            assert (response.sampling["top_p"], response.sampling["top_k"]) == (0.5, 5)
            assert response.message.text == "one two STOP three" and "stop" not in response.sampling


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.5), ("regex", "x"), ("stop_token_ids", [2])])
def test_servers_of_one_model_that_sample_differently_are_rejected(name: str, value: Any) -> None:
    engines = [
        create_engine("vllm", ServerSettings(f"http://{host}/v1", "m", extra_body=said))
        for host, said in (("a", {name: value}), ("b", {"priority": 1, "of_a_proxy": 1}))
    ]
    with pytest.raises(SettingsDiffer, match=rf"{name} to .* for http://a/v1 and to None for http://b/v1"):
        TokenServer(engines, PromptBuilder(fake_tokenizer()), "hermes")


NAMES_AND_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m.name or '-' }}{{ m.hint or '' }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant -\n{% endif %}"
)


@pytest.mark.parametrize("of", ["name", "hint", "reasoning_content"])
async def test_the_model_is_shown_the_conversation_that_is_passed_and_no_other_like_it(of: str) -> None:
    """Two players of a game may say the same, and so may two examples with different thoughts."""
    prompts = PromptBuilder(fake_tokenizer(), chat_template=NAMES_AND_THOUGHTS)
    async with stack(prompts=prompts) as world, world.tokens.managed_server() as managed:
        for value in ("alice", "bob", "alice"):
            world.says.next = ["Hello."]
            role = "assistant" if of == "reasoning_content" else "user"
            messages = [QUESTION, {"role": role, "content": "Hi.", of: value}, QUESTION]
            await managed.chat_completion(messages=messages)
            shown = world.text(world.last_prompt)
            assert value in shown and shown.count("alice") + shown.count("bob") == 1
        assert_nodes(world, managed)


async def test_reasoning_shows_which_of_several_completions_is_continued() -> None:
    async with stack() as world, world.tokens.managed_server() as managed:
        thoughts = ["Six sevens.", "40 + 2."]
        world.says.next = [f"<think>\n{thought}\n</think>\n\n42" for thought in thoughts]
        done = await managed.chat_completion(messages=[QUESTION], n=2)
        assert [choice.message.content for choice in done.choices] == ["42", "42"]
        for choice, thought in zip(done.choices, thoughts, strict=True):
            world.says.next = ["Yes."]
            await managed.chat_completion(messages=[QUESTION, choice.message, {"role": "user", "content": "Sure?"}])
            assert f"<think>\n{thought}\n</think>" in world.text(world.last_prompt)
        assert len(assert_nodes(world, managed)) == 2
