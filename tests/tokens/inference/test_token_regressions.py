"""Token errors of other stacks, by name: real requests to the fake server, checked against its record."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from lachesis_client.chat_format import read_message
from lachesis_client.errors import BadResponse
from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ToolResponse
from lachesis_messages.tokens import MASKED
from lachesis_testing.fake_server import Reply, fake_tokenizer
from lachesis_tokens.prompts.prompts import PromptStart
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.completion_reader import CompletionReader
from lachesis_tokens.server.managed_server import ManagedServer
from lachesis_tokens.templates.forced_calls import ToolChoiceError
from tests.support.exactness import Stack, assert_exact, stack
from tool_call_parsers import get_parser, register_parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    for name in ("search", "ping")
]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query":  "Zürich"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "When is the tide high?"}


def result(call_id: str, content: str = "noon") -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


async def turn(
    world: Stack, managed: ManagedServer, history: MessageHistory, said: Any, *following: str, **more: Any
) -> Any:
    """A completion and what follows it: results for its calls, or user messages."""
    world.says.next = [said]
    response = await managed.chat(history, **more)
    history.append(response)
    for call in response.message.tool_calls:
        history.append(result(call.id))
    history.extend({"role": "user", "content": text} for text in following)
    return response


def canonical(world: Stack, history: MessageHistory, tools: Any = None, *, prompted: bool = True) -> list[int]:
    """The ids of the template's own rendering of the conversation as kept."""
    prepare = world.prompts._template.prepare
    messages = [prepare(message) for message in history.to_openai("reasoning")]
    return list(
        world.fake.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompted, tokenize=True, return_dict=False
        )
    )


# The suffix of a turn


async def test_the_end_of_turn_is_never_doubled_and_never_missing() -> None:
    async with stack() as world:
        end = world.fake.tokenizer.eos_token_id
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        words = world.encode("The tide is high.")
        for number in range(20):
            said = [Reply([*words, end], "stop"), Reply(words, "stop"), Reply(words, "length")][number % 3]
            await turn(world, managed, history, said, "Go on.")
            prompt = world.last_prompt
            assert prompt.count(end) == number * 2 + 1  # each message before this one ended once
            assert (end, end) not in pairwise(prompt)
        (sample,) = assert_exact(world, history)
        assert sample.trained == 7 * (len(words) + 1) + 13 * len(words)
        assert sample.masks.count(end) == 7  # trained where it was sampled, and nowhere else


async def test_the_newline_after_the_end_of_turn_is_not_dropped() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for text in ("At noon.", CALL, "Zürich 東京 🙂\n", "x"):
            await turn(world, managed, history, text, *([] if text == CALL else ["And then?"]), tools=TOOLS)
        await turn(world, managed, history, "Done.", tools=TOOLS)
        after = history.nodes()[1].origin.tokens.after
        assert world.text(world.last_prompt[after.length :]).startswith("\n<|im_start|>user\nAnd then?<|im_end|>\n")
        assert len(assert_exact(world, history)) == 1


async def test_twenty_turns_are_one_sample_and_the_templates_own_ids() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for number in range(20):
            await turn(world, managed, history, f"Turn {number}: the tide is high.", f"Question {number}?")
        (sample,) = assert_exact(world, history)
        newline = world.encode("\n")
        assert sample.tokens == world.last_prompt + history.nodes()[-2].origin.tokens.ids
        whole = MessageHistory(history[:-1])
        assert sample.tokens + newline == canonical(world, whole, prompted=False)
        assert sample.trained == sum(len(ids) for _, ids, _ in world.sampled())


async def test_trailing_whitespace_stays_as_it_was_sampled() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for text in ("noon ", "noon\n\n", "  noon \n ", " ", "\n", "noon\t"):
            before = await turn(world, managed, history, text, "Again.")
            assert before.tokens.ids == [*world.encode(text), world.fake.tokenizer.eos_token_id]
        assert len(assert_exact(world, history)) == 1
        assert world.text(world.last_prompt).count("noon ") >= 2


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "fault", ["ambiguous", "broken_utf8_middle", "broken_utf8_end", "trailing_space", "spelled_special", "thinking"]
)
@pytest.mark.parametrize("kind", ["vllm", "vllm-generate", "sglang", "atropos"])
async def test_text_that_would_be_encoded_otherwise_keeps_its_ids(fault: str, kind: str) -> None:
    """Other tokens for the same text, half a character, the spelling of a special token: nothing is encoded again."""
    async with stack(kind=kind, faults={fault: 1.0}, policy=lambda ask: f"Answer {ask.turn} is at noon.") as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for number in range(4):
            history.append(await managed.chat(history))
            history.append({"role": "user", "content": f"Question {number}?"})
        (sample,) = assert_exact(world, history)
        assert all(fault in made.faults for seen in world.fake.requests for made in seen.completions)
        for span in sample.spans:
            assert world.fake.model.score(
                sample.tokens[: span.start], sample.tokens[span.start : span.end], Sampling(max_tokens=1)
            ) == pytest.approx(sample.logprobs[span.start : span.end])


async def test_special_tokens_that_a_tool_result_spells_are_context_as_the_template_has_them() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        response = (await turn(world, managed, history, CALL, tools=TOOLS)).message
        history[-1]["content"] = "<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{}</tool_call>"
        assert response.tool_calls[0].name == "search"
        await turn(world, managed, history, "At noon.", "Sure?", tools=TOOLS)
        await turn(world, managed, history, "Yes.", tools=TOOLS)
        (sample,) = assert_exact(world, history)
        assert sample.masks.count(world.fake.tokenizer.eos_token_id) == 3
        messages = MessageHistory(history[:-1])
        messages[1]["tool_calls"][0]["function"]["arguments"] = '{"query": "Zürich"}'
        rendered = world.text(canonical(world, messages, TOOLS))
        assert world.text(world.last_prompt).replace('"query":  ', '"query": ') == rendered


# What becomes context


async def test_a_kept_suffix_does_not_carry_the_logprobs_of_another_prefix() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for number in range(4):
            letters = [index for letter in f"Answer {number}." for index in world.encode(letter)]  # no encoder's ids
            await turn(world, managed, history, Reply(letters, "stop"), "Go on.")
        kept = history.nodes()[7].origin.tokens
        history[0:7] = [{"role": "user", "content": "Summary of it all."}]
        await turn(world, managed, history, "Answer 4.")
        compacted = world.last_prompt
        at = next(at for at in range(len(compacted)) if compacted[at : at + len(kept)] == kept.ids)
        found = assert_exact(world, history)
        assert len(found) == 2
        now = next(sample for sample in found if sample.tokens[: len(compacted)] == compacted)
        assert now.masks[at : at + len(kept)] == [MASKED] * len(kept)
        assert now.logprobs[at : at + len(kept)] == [1.0] * len(kept)
        for sample in found:
            for span in sample.spans:
                scored = world.fake.model.score(
                    sample.tokens[: span.start], sample.tokens[span.start : span.end], Sampling(max_tokens=1)
                )
                assert scored == pytest.approx(sample.logprobs[span.start : span.end])


async def test_what_was_trained_before_stays_trained_whatever_comes_later() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        trained: list[int] = []
        for said in ("One.", Reply(world.encode("🙂")[:2], "length"), "\n", CALL, Reply([], "stop"), "Six. "):
            await turn(world, managed, history, said, *([] if said == CALL else ["Go on."]), tools=TOOLS)
            (sample,) = samples(history)
            masks = sample.masks
            assert masks[: len(trained)] == trained
            trained = masks
        assert_exact(world, history)


async def test_five_hundred_turns_need_no_recursion() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for _ in range(500):
            await turn(world, managed, history, "a", "b")
        (sample,) = assert_exact(world, history)
        assert len(sample.spans) == 500
        assert samples(history.fork()) == samples(history)
        assert history.to_mermaid().count("-->") >= 1000
        history[0]["content"] = "Otherwise."
        await turn(world, managed, history, "c")
        assert len(assert_exact(world, history)) == 2


async def test_siblings_where_one_is_the_beginning_of_another_are_two_samples() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        ids = world.encode("The tide is high at noon.")
        world.says.next = [Reply(ids[:3], "length"), Reply(ids, "length"), Reply([*ids, *world.fake.codec.end_ids])]
        responses = await managed.chat_n(history, 3, sampling=Sampling(max_tokens=64))
        for response in responses[1:]:
            history.branch(response, "n > 1")
        history.append(responses[0])
        history.append({"role": "user", "content": "Go on."})
        await turn(world, managed, history, "Yes.")
        found = assert_exact(world, history)
        assert [sample.trained for sample in found][1:] == [len(ids), len(ids) + 1]
        nodes = managed.get_state()["nodes"]
        assert [node.tokens[nodes[0].tokens.index(ids[0]) :][:3] for node in nodes] == [ids[:3]] * 3


async def test_identical_siblings_are_trained_once_each() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        world.says.next = ["The same."]
        responses = await managed.chat_n(history, 3, sampling=Sampling(max_tokens=64))
        history.append(responses[1])
        history.branch(responses[0], "n > 1")
        history.branch(responses[2], "n > 1")
        history.append({"role": "user", "content": "Go on."})
        await turn(world, managed, history, "Yes.")
        found = assert_exact(world, history)
        assert [len(sample.spans) for sample in found] == [2, 1, 1]
        assert sum(world.sampled().values()) == 4


async def test_a_template_that_strips_thinking_leaves_sampled_thoughts_in_their_place() -> None:
    template_tokenizers = pytest.importorskip("template_tokenizers")
    if "qwen3" not in template_tokenizers.sources():
        pytest.skip("trl with its chat templates is not installed")
    async with stack(template_tokenizers.tokenizer_of("qwen3"), parser="qwen3_json") as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for number in range(4):
            response = await turn(
                world, managed, history, f"<think>\nThought {number}.\n</think>\n\nAnswer {number}.", "Go on."
            )
            assert response.message.reasoning == f"Thought {number}."
        (sample,) = assert_exact(world, history)
        text = world.text(sample.tokens)
        assert [text.count(f"Thought {number}.") for number in range(4)] == [1] * 4
        trained = world.text(token for token in sample.masks if token != MASKED)
        assert [trained.count(f"Thought {number}.") for number in range(4)] == [1] * 4


async def test_prompts_that_were_rendered_anew_are_continued() -> None:
    """Other tools make another prompt, once: what is sampled from there on is one sample again."""
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for number in range(6):
            await turn(world, managed, history, f"Answer {number}.", "Go on.", tools=TOOLS if number > 1 else None)
        found = assert_exact(world, history)
        assert [len(sample.spans) for sample in found] == [4, 2]
        assert [node.sampled for node in history.nodes() if node.item["role"] == "assistant"] == [True] * 6


async def test_turns_after_a_branch_that_the_template_forces_are_one_sample() -> None:
    template_tokenizers = pytest.importorskip("template_tokenizers")
    if "deepseekv3" not in template_tokenizers.sources():
        pytest.skip("trl with its chat templates is not installed")
    call = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{"query": "x"}\n```'
    call += "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    async with stack(template_tokenizers.tokenizer_of("deepseekv3"), parser="deepseek_v3") as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        await turn(world, managed, history, call, tools=TOOLS)
        assert world.prompts.prompt(history.nodes(), TOOLS).start is PromptStart.BRANCH
        for number in range(4):
            await turn(world, managed, history, f"Answer {number}.", "Go on.", tools=TOOLS)
        assert [len(sample.spans) for sample in assert_exact(world, history)] == [4, 1]


@pytest.mark.parametrize("name", ["hermes", "qwen2_5", "gptoss", "llama3_1"])
async def test_a_turn_that_says_nothing_does_not_make_a_template_reject_the_conversation(name: str) -> None:
    """Templates read the content of a turn without calls, be it there or not."""
    template_tokenizers = pytest.importorskip("template_tokenizers")
    if name not in template_tokenizers.sources():
        pytest.skip("trl with its chat templates is not installed")
    async with stack(template_tokenizers.tokenizer_of(name)) as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        response = await turn(world, managed, history, "", "Are you there?", tools=TOOLS)
        assert not response.message.content
        await turn(world, managed, history, "Yes.", "Good.")
        assert len(assert_exact(world, history)) == 2


async def test_a_turn_of_several_messages_is_one_turn() -> None:
    """gpt-oss ends its reasoning with `<|end|>`, which its template writes at the end of earlier turns as well."""
    template_tokenizers = pytest.importorskip("template_tokenizers")
    if "gptoss" not in template_tokenizers.sources():
        pytest.skip("trl with its chat templates is not installed")
    thought = "<|channel|>analysis<|message|>Tides.<|end|>"
    answer = f"{thought}<|start|>assistant<|channel|>final<|message|>At noon.<|return|>"
    async with stack(template_tokenizers.tokenizer_of("gptoss"), parser="openai") as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for text, finish in ((answer, "stop"), (thought, "length"), (answer, "stop")):
            world.says.next = [Reply(world.encode(text), finish, as_is=True)]
            response = await managed.chat(history, tools=TOOLS)
            history.append(response)
            history.append({"role": "user", "content": "And tomorrow?"})
        assert (response.message.reasoning, response.message.content) == ("Tides.", "At noon.")
        [sample] = assert_exact(world, history)
        assert "<|end|><|end|>" not in world.text(sample.tokens)


@pytest.mark.parametrize("name", ["openai", "kimi_k3", "inkling", "muse"])
def test_markup_around_an_answer_is_no_part_of_it_also_where_no_tools_are_offered(name: str) -> None:
    tokenizer = fake_tokenizer()
    parser = get_parser(name, reasoning="auto", tokenizer=tokenizer)
    reader = CompletionReader(tokenizer, parser)
    ids = tokenizer.encode(parser.render("At noon.", "Tides."), add_special_tokens=False)
    message = reader.read(ids, None)[0]
    assert (message.reasoning, message.content) == ("Tides.", "At noon.")
    call = {"id": "call_00001", "function": {"name": "search", "arguments": {"query": "tide"}}}
    ids = tokenizer.encode(parser.render(None, None, [call]), add_special_tokens=False)
    message = reader.read(ids, None)[0]
    assert not message.tool_calls and "tide" in message.text, "without tools, a call is text"


async def test_a_third_partys_engine_may_omit_its_url_but_no_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack() as world:
        (engine,) = world.tokens.servers
        generate = engine.generate

        async def careless(prompt: Any, sampling: Sampling, *, n: int = 1, **options: Any) -> list[Any]:
            answers = await generate(prompt, sampling, n=n, **options)
            return [replace(answer, server="") for answer in answers[:1]]

        monkeypatch.setattr(engine, "generate", careless)
        prompt = world.encode("Hello")
        (answer,) = await world.tokens.generate(prompt, Sampling(2))
        assert answer.server == engine.base_url
        with pytest.raises(BadResponse, match="2 completions were requested and 1 came"):
            await world.tokens.generate(prompt, Sampling(2), n=2)


def test_a_registered_class_reads_messages_and_tokens_without_the_options_of_our_parsers() -> None:
    @register_parser("upper_hermes")
    class Upper:
        def parse(self, text: str, tools: Any = None) -> Any:
            return get_parser("hermes").parse(text.replace("<CALL>", "<tool_call>"), tools)

    tokenizer = fake_tokenizer()
    parser = get_parser("upper_hermes", reasoning="auto", tokenizer=tokenizer)
    text = 'I look.<CALL>{"name": "search", "arguments": {"query": "tide"}}</tool_call>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    from_tokens, _ = CompletionReader(tokenizer, parser).read(ids, TOOLS)
    from_text, _ = read_message({"content": text}, parser, TOOLS)
    for message in (from_tokens, from_text):
        assert message.content == "I look."
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("search", '{"query": "tide"}')]


@pytest.mark.parametrize("where", ["user", "system", "tool", "call", "tools"])
async def test_half_a_surrogate_pair_breaks_no_prompt(where: str) -> None:
    r"""JSON has them: a model that begins an emoji as `\ud83d` and never ends it, a row of a dataset, a tool."""
    half = "a\ud83db"
    async with stack() as world:
        history = MessageHistory([{"role": "system", "content": "Be brief."}, QUESTION])
        if where in ("user", "system"):
            history[("system", "user").index(where)]["content"] = half
        tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "description": half}}] if where == "tools" else TOOLS
        managed = world.tokens.for_rollout()
        response = await turn(world, managed, history, CALL.replace("Zürich", "a\\ud83db"), tools=tools)
        if where == "tool":
            history[-1]["content"] = half
        if where == "call":  # an edited turn is written by the template
            history[len(history) - 2]["content"] = "Let me look."
        await turn(world, managed, history, "At noon.", tools=tools)
        assert response.message.tool_calls and "a\ufffdb" in world.text(world.last_prompt)
        assert_exact(world, history)


async def test_a_sub_agents_tokens_belong_to_the_rollout() -> None:
    async with stack() as world:
        managed, history, inner = world.tokens.for_rollout(), MessageHistory([QUESTION]), MessageHistory([QUESTION])
        world.says.next = [CALL]
        outer = await managed.chat(history, tools=TOOLS)
        history.append(outer)
        await turn(world, managed, inner, "Inner one.", "Go on.")
        await turn(world, world.tokens.for_rollout(), inner, "Inner two.")
        call = outer.message.tool_calls[0]
        history.append(ToolResponse(Message("tool", "noon", tool_call_id=call.id), "search", chat=inner))
        await turn(world, managed, history, "Done.", tools=TOOLS)
        found = assert_exact(world, history)
        assert [len(sample.spans) for sample in found] == [2, 2]


async def test_an_edited_turn_is_context_and_its_original_is_trained() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        await turn(world, managed, history, CALL, tools=TOOLS)
        history[1]["tool_calls"][0]["function"]["arguments"] = '{"query": "Bern"}'
        await turn(world, managed, history, "In Bern at noon.", "Sure?", tools=TOOLS)
        await turn(world, managed, history, "Yes.", tools=TOOLS)
        found = assert_exact(world, history)
        assert [len(sample.spans) for sample in found] == [2, 1]
        trained = [world.text(token for token in sample.masks if token != MASKED) for sample in found]
        assert "Zürich" in trained[1] and "Bern" in world.text(found[0].tokens)
        assert '"Bern"' not in trained[0] and "Zürich" not in world.text(found[0].tokens)


# Settings of a request


@pytest.mark.parametrize("stop", [["noon"], "noon", ["high", "noon"], [" at"], ["."]])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_stop_text_ends_the_message_and_its_tokens_are_trained(stop: Any, kind: str) -> None:
    async with stack(kind=kind) as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        response = await turn(world, managed, history, "High at noon. And low at six.", "Go on.", stop=stop)
        said = world.text(response.tokens.ids)
        markers = [stop] if isinstance(stop, str) else stop
        marker = next(marker for marker in markers if marker in said)
        assert response.message.content == said[: said.index(marker)] and response.finish_reason is FinishReason.STOP
        await turn(world, managed, history, "Yes.")
        (sample,) = assert_exact(world, history)
        suffix = world.text(world.last_prompt[response.tokens.after.length :])
        assert suffix.startswith("<|im_end|>\n<|im_start|>user\nGo on.")
        assert len(sample.spans[0]) == len(response.tokens)


@pytest.mark.parametrize(
    "choice, opening",
    [
        ("required", '<tool_call>\n{"name": "'),
        ({"type": "function", "function": {"name": "search"}}, '<tool_call>\n{"name": "search'),
    ],
)
@pytest.mark.parametrize("stop", [None, ["\n"], ["</tool_call>"]])
async def test_the_opening_of_a_forced_call_is_context_and_the_rest_is_sampled(
    choice: Any, opening: str, stop: Any
) -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        rest = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'.removeprefix(opening)
        response = await turn(world, managed, history, rest, tools=TOOLS, tool_choice=choice, stop=stop)
        assert world.text(world.last_prompt).endswith(opening)
        (call,) = response.message.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("search", {"query": "x"})
        assert response.finish_reason is FinishReason.TOOL_CALLS and not response.malformed_calls
        await turn(world, managed, history, "At noon.", "Sure?", tools=TOOLS)
        (sample,) = assert_exact(world, history)
        assert opening not in world.text(token for token in sample.masks if token != MASKED)
        history[0]["content"] = "Otherwise."
        await turn(world, managed, history, "Done.", tools=TOOLS)
        assert world.text(world.last_prompt).count(opening + world.text(response.tokens.ids)) == 1
        assert len(assert_exact(world, history)) == 2


async def test_tool_choice_none_leaves_calls_in_the_text() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        response = await turn(world, managed, history, CALL, "Go on.", tools=TOOLS, tool_choice="none")
        assert response.message.content == CALL and response.finish_reason is FinishReason.STOP
        await turn(world, managed, history, "Done.", tools=TOOLS)
        assert len(assert_exact(world, history)) == 1
        for wrong in ("any", {"type": "function", "function": {"name": "no_such"}}):
            with pytest.raises(ToolChoiceError):
                await managed.chat(history, tools=TOOLS, tool_choice=wrong)
        with pytest.raises(ToolChoiceError, match="without tools"):
            await managed.chat(history, tool_choice="required")
        assert len(managed.completions()) == 2


@pytest.mark.parametrize("cut", [1, 8, 20])
async def test_a_call_that_max_tokens_cut_off_finishes_with_length(cut: int) -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        response = await turn(world, managed, history, CALL, "Go on.", tools=TOOLS, max_tokens=cut)
        assert len(response.tokens) == cut and response.finish_reason is FinishReason.LENGTH
        assert not response.message.tool_calls and response.malformed_calls
        await turn(world, managed, history, CALL, tools=TOOLS)
        await turn(world, managed, history, "Done.", tools=TOOLS)
        (sample,) = assert_exact(world, history)
        assert [span.finish_reason for span in sample.spans] == ["length", "tool_calls", "stop"]


async def test_weights_that_change_in_mid_rollout_are_on_the_spans() -> None:
    async with stack(kind="sglang") as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for version in ("one", "two", "three"):
            world.fake.update_weights(version, seed=len(version))
            await turn(world, managed, history, "At noon.", "Go on.")
        (sample,) = assert_exact(world, history)
        assert [span.model_version for span in sample.spans] == ["one", "two", "three"]


async def test_logprobs_of_another_distribution_are_rejected_by_the_certificate() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        await turn(world, managed, history, "At noon.", top_p=0.9)
        (sample,) = samples(history)
        (reason,) = verify(sample)
        assert "top_p" in reason


async def test_a_failed_request_leaves_no_trace() -> None:
    faults = {"cut_body": [1], "server_error": [3], "rate_limited": [4], "disconnect": [6]}
    async with stack(faults=faults, retry_after=0.01) as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        for number in range(5):
            await turn(world, managed, history, f"Answer {number}.", "Go on.")
        (sample,) = assert_exact(world, history)
        assert len(sample.spans) == 5 < len(world.fake.requests)


async def test_a_message_that_the_caller_replaced_keeps_the_tokens_of_its_completion() -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([QUESTION])
        world.says.next = [CALL]
        response = await managed.chat(history, tools=TOOLS)
        calls = tuple(replace(call, id="renamed") for call in response.message.tool_calls)
        history.append(replace(response, message=replace(response.message, tool_calls=calls)))
        history.append(result("renamed"))
        await turn(world, managed, history, "Done.", tools=TOOLS)
        assert len(assert_exact(world, history)) == 1
