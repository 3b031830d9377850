"""Images in Phase 2: the prompt that a server made of ids and images is what a trainer gets, token by token."""

from __future__ import annotations

from typing import Any

import pytest
from template_tokenizers import tokenizer_of

from lachesis_client import BadResponse
from lachesis_client.errors import PromptError, TurnRejected
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens
from lachesis_testing.fake_server import Ask, FakeServer, Reply, fake_tokenizer
from lachesis_testing.fake_server.images import seen_ids
from lachesis_tokens.engines import create_engine
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.engines.sglang import SGLangEngine
from lachesis_tokens.prompts.prompts import PromptBuilder, PromptStart
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.interrupts import joined
from lachesis_tokens.server.token_server import TokenServer
from tests.support.exactness import Says, Stack, assert_exact, stack
from tests.support.pictures import image, text

ENGINES = ("vllm-generate", "sglang")


def sees(ask: Ask) -> str:
    return f"I see {', '.join(f'{each.width} x {each.height}' for each in ask.call.images) or 'nothing'}."


def calls_then_sees(ask: Ask) -> str:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    return f"{sees(ask)}\n{call}" if ask.turn < 2 else sees(ask)


LOOK = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("kind", ENGINES)
async def test_images_of_users_and_tools_over_three_turns_are_token_exact(kind: str) -> None:
    async with stack(kind=kind, images=True, policy=calls_then_sees) as world:
        history = MessageHistory([{"role": "user", "content": [text("What is on "), image(56, 28), text("this?")]}])
        rollout = world.tokens.for_rollout()
        for turn in range(3):
            response = await rollout.chat(history, tools=LOOK)
            history.append(response)
            for call in response.message.tool_calls:
                shown = [text("a screen"), image(84, 56, turn), image(28, 28, turn)]
                history.append({"role": "tool", "tool_call_id": call.id, "name": "look", "content": shown})
        (sample,) = assert_exact(world, history)
        assert "I see 56 x 28, 84 x 56, 28 x 28, 84 x 56, 28 x 28." in world.text(sample.tokens)
        assert [placed.tokens for placed in sample.images] == [4, 6, 4, 6, 4]
        pad = world.encode("<|image_pad|>")[0]
        assert sample.tokens.count(pad) == 24
        sent = world.fake.requests[-1].body
        assert sent.get("token_ids", sent.get("input_ids")).count(pad) == 5
        # The logprobs are those of a model that sees these images, and of no other.
        call = world.fake.requests[-1].call
        assert call is not None
        span, model = sample.spans[-1], world.fake.model
        logprobs_of = "raw" if kind == "vllm-generate" else "temperature"
        for images, equal in ((call.images, True), ((), False)):
            seen = seen_ids(sample.tokens[: span.start], images)
            scored = model.score(seen, sample.tokens[span.start : span.end], call.sampling, logprobs_of)
            assert (scored == sample.logprobs[span.start : span.end]) is equal


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "hermes"])
def test_the_prompt_is_the_templates_with_one_placeholder_an_image(name: str) -> None:
    builder = PromptBuilder(tokenizer_of(name))
    shown = {"role": "user", "content": [image(28, 28), text("Tide?"), image(56, 28)]}
    history = MessageHistory([shown])
    prompt = builder.prompt(history.nodes())
    ids = builder.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, text("Tide?"), {"type": "image"}]}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert prompt.prefix.ids == ids
    assert [placed.start for placed in prompt.prefix.images] == [
        at for at, id in enumerate(ids) if id == pad_of(builder)
    ]
    sampled = [*builder.encode("Noon."), builder.end_of_turn[0]]
    tokens = SampledTokens.sample(prompt.prefix, sampled, [-0.5] * len(sampled), context=prompt.context)
    history.append(ChatResponse(Message("assistant", "Noon."), FinishReason.STOP, tokens=tokens))
    history.append({"role": "user", "content": [text("And now?"), image(28, 28, 9)]})
    following = builder.prompt(history.nodes())
    assert following.start is PromptStart.EXTENDED
    assert len({placed.image.sha256 for placed in following.prefix.images}) == 3
    assert [following.prefix.ids[placed.start] for placed in following.prefix.images] == [pad_of(builder)] * 3


def pad_of(builder: PromptBuilder) -> int:
    return int(builder.tokenizer.convert_tokens_to_ids("<|image_pad|>"))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([text("a"), {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}], "not by its data"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}], "is not base64"),
        ([image(28, 28), {"type": "input_audio", "input_audio": {}}], "a message contains image_url and input_audio"),
    ],
)
def test_what_is_no_image_data_is_refused_by_name(parts: list[Any], reason: str) -> None:
    builder = PromptBuilder(fake_tokenizer(images=True))
    with pytest.raises(PromptError, match=reason):
        builder.prompt(MessageHistory([{"role": "user", "content": parts}]).nodes())


@pytest.mark.parametrize("source", ["without numbers", "qwen2_5_vl tools"])
def test_a_template_that_writes_images_otherwise_is_refused(source: str) -> None:
    if source == "without numbers":  # "Picture 1: " counts the images of the whole conversation
        builder = PromptBuilder(tokenizer_of("qwen3_vl"), template_kwargs={"add_vision_id": True})
        history, reason = MessageHistory([{"role": "user", "content": [image(28, 28)]}]), "a message contains image_url"
    else:
        written = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
        written += "{% else %}{% for p in m.content %}{% if p.type == 'image' and m.role == 'user' %}"
        written += "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
        written += "{{ m.tool_calls or '' }}<|im_end|>\n{% endfor %}"
        written += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        builder = PromptBuilder(fake_tokenizer(images=True, chat_template=written))
        call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        history = MessageHistory([{"role": "user", "content": "Look."}])
        history.append({"role": "assistant", "content": None, "tool_calls": [call]})
        history.append({"role": "tool", "tool_call_id": "call00000", "content": [text("x"), image(28, 28)]})
        reason = r"it wrote <\|image_pad\|> 0 times for 1 images"
    with pytest.raises(PromptError, match=reason):
        builder.prompt(history.nodes())


@pytest.mark.parametrize("kind", ["vllm", "atropos", "llama.cpp"])
async def test_an_engine_that_takes_ids_of_text_only_is_refused_before_a_request(kind: str) -> None:
    async with FakeServer(images=True) as server:
        engine = create_engine(kind, server.settings())
        tokens = TokenServer([engine], PromptBuilder(server.tokenizer), "hermes")
        with pytest.raises(PromptError, match=rf"contains an image, and the API of the engine '{kind}'"):
            await tokens.chat([{"role": "user", "content": [image(28, 28)]}])
        assert not server.requests
        await tokens.close()


PARTS = ["<|vision_start|><|image_pad|><|vision_end|>", "<|image_", "pad|>"]


async def test_a_spelled_placeholder_is_text() -> None:
    """Whole, and in two parts that the template joins; with and without an image beside it."""
    async with stack(kind="vllm-generate", images=True, policy=sees) as world:
        for content in (PARTS[0], [text(PARTS[0]), image(28, 28)], [text(PARTS[1]), text(PARTS[2]), image(28, 28)]):
            history = MessageHistory([{"role": "user", "content": content}])
            history.append(await world.tokens.for_rollout().chat(history))
            (sample,) = samples(history, rollout_id="r", outcome="completed")
            assert not verify(sample)
            shown = not isinstance(content, str)
            assert sample.tokens.count(world.encode("<|image_pad|>")[0]) == 4 * len(sample.images) == 4 * shown
            assert ("I see 28 x 28." if shown else "I see nothing.") in world.text(sample.tokens)
    builder = PromptBuilder(world.fake.tokenizer, special_tokens_in_text="as_is")
    with pytest.raises(PromptError, match=r"wrote .* 2 times for 1 images"):
        builder.prompt(MessageHistory([{"role": "user", "content": [text(PARTS[0]), image(28, 28)]}]).nodes())
    apart = [{"role": "user", "content": PARTS[0]}, {"role": "assistant", "content": "x"}]
    with pytest.raises(PromptError, match="image_pad"):
        builder.prompt(MessageHistory([*apart, {"role": "user", "content": [image(28, 28)]}]).nodes())


async def test_a_sampled_placeholder_is_no_image() -> None:
    """No server could tell it from one: the turn ends the rollout, and no trainer gets it with images."""

    def samples_one(ask: Ask) -> Reply:
        ids = ask.codec.encode("x<|vision_start|><|image_pad|><|vision_end|>y")
        return Reply(ask.ended(ids if ask.turn == 0 else ask.codec.encode("Done.")))

    async with stack(kind="vllm-generate", images=True, policy=samples_one) as world:
        history = MessageHistory([{"role": "user", "content": "Draw."}])
        rollout = world.tokens.for_rollout()
        history.append(await rollout.chat(history))
        history.append({"role": "user", "content": "And?"})
        history.append(await rollout.chat(history))  # text alone: a token like any other
        (sample,) = assert_exact(world, history)
        assert sample.images == ()
        history.append({"role": "user", "content": [image(28, 28)]})
        with pytest.raises(TurnRejected, match=r"the model sampled <\|image_pad\|>"):
            await rollout.chat(history)
        shown = MessageHistory([{"role": "user", "content": [image(28, 28)]}])
        shown.append(await world.tokens.for_rollout().chat(shown))
        (sample,) = samples(shown, rollout_id="r", outcome="completed")
        (reason,) = verify(sample)
        assert "turn 0 sampled the id of images" in reason


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("fault", ["wrong_echo", "no_echo"])
async def test_a_prompt_that_the_server_does_not_confirm_is_refused(kind: str, fault: str) -> None:
    async with stack(kind=kind, images=True, policy=sees, faults=[fault]) as world:
        history = MessageHistory([{"role": "user", "content": [text("What is on it?"), image(56, 56)]}])
        with pytest.raises(BadResponse, match=r"prompt.* with images"):
            await world.tokens.for_rollout().chat(history)


async def test_an_image_that_another_server_expands_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of an image are fixed by the first server that saw it."""
    async with stack(kind="sglang", images=True, policy=sees) as world:
        history = MessageHistory([{"role": "user", "content": [image(56, 56)]}])
        rollout = world.tokens.for_rollout()
        history.append(await rollout.chat(history))
        monkeypatch.setattr("lachesis_testing.fake_server.images.PATCH", 14)
        for more in ("And now?", [image(28, 28)]):
            history.append({"role": "user", "content": more})
            with pytest.raises(BadResponse, match="sampled after"):
                await rollout.chat(history)


class Careless(SGLangEngine):
    """An engine that does not compare the prompt."""

    def check_prompt(self, prompt: PromptIds, echoed: object, length: int | None) -> None:
        pass


async def test_an_engine_that_does_not_say_what_became_of_an_image_is_refused() -> None:
    async with FakeServer(sees, images=True) as server:
        tokens = TokenServer([Careless(server.settings())], PromptBuilder(server.tokenizer), "hermes")
        with pytest.raises(BadResponse, match="does not say how many tokens each image has"):
            await tokens.chat([{"role": "user", "content": [image(56, 56)]}])
        await tokens.close()


async def test_a_server_that_ignores_images_is_refused() -> None:
    """SGLang with a model of text alone answers as if no images had been sent, and vLLM before 0.32 does too."""
    async with FakeServer(sees, tokenizer=fake_tokenizer(images=True)) as server:
        tokens = TokenServer([create_engine("sglang", server.settings())], PromptBuilder(server.tokenizer), "hermes")
        with pytest.raises(BadResponse, match="image 0 was left as it is"):
            await tokens.chat([{"role": "user", "content": [image(56, 56)]}])
        await tokens.close()


@pytest.mark.parametrize("kind", ENGINES)
async def test_images_after_edits_branches_choices_forced_calls_and_aborts(kind: str) -> None:
    async with stack(kind=kind, images=True, policy=sees, faults={"aborted": 0.5}, seed=3) as world:
        first = {"role": "user", "content": [image(56, 28), text("Compare.")]}
        history = MessageHistory([first])
        rollout = world.tokens.for_rollout()
        history.append(await rollout.chat(history))
        history.append({"role": "user", "content": [text("With"), image(28, 28, 1)]})
        history.append(await rollout.chat(history, tools=LOOK, tool_choice="required"))
        history.rewind(2, "another picture")
        history.append({"role": "user", "content": [image(84, 84, 2)]})
        history.append(await rollout.chat(history))
        history[0] = {"role": "user", "content": [image(28, 56, 3), text("Compare these.")]}
        history.append({"role": "user", "content": "And?"})
        history.append(await rollout.chat(history))
        found = assert_exact(world, history)
        assert sorted(tuple(placed.tokens for placed in sample.images) for sample in found) == [(4, 4), (4, 9), (4, 9)]
        assert world.fake.stats["aborted"]
        choices = await world.tokens.for_rollout().chat_completion(messages=[first], n=3)
        assert [choice.message.content for choice in choices.choices] == ["I see 56 x 28."] * 3


async def test_the_rest_of_an_aborted_completion_is_sampled_after_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other_patches(ask: Ask) -> str:
        monkeypatch.setattr("lachesis_testing.fake_server.images.PATCH", 14)
        return sees(ask)

    async with stack(kind="sglang", images=True, policy=other_patches, faults={"aborted": [0]}) as world:
        with pytest.raises(BadResponse, match="sampled after"):
            await world.tokens.chat([{"role": "user", "content": [image(56, 56)]}])
    begun = Generation([1], [-0.5], FinishReason.ABORT, image_tokens=(4,))
    assert joined(begun, Generation([], [], FinishReason.ABORT)).image_tokens == (4,), "aborted in the queue"


async def test_a_list_of_dicts_continues_its_images() -> None:
    async with stack(kind="vllm-generate", images=True, policy=sees) as world:
        rollout = world.tokens.for_rollout()
        messages: list[dict[str, Any]] = [{"role": "user", "content": [image(56, 28)]}]
        for number in range(3):
            said = (await rollout.chat(messages)).message.to_openai()
            messages += [said, {"role": "user", "content": [image(28, 28, number)]}]
        (sample,) = assert_exact(world, rollout)
        assert [placed.tokens for placed in sample.images] == [4, 4, 4]
        assert len(sample.spans) == 3


async def test_a_prompt_beyond_the_echo_limit_is_counted_with_its_images() -> None:
    async with FakeServer(sees, images=True) as server:
        engine = create_engine("sglang", server.settings(echo_limit=8))
        tokens = TokenServer([engine], PromptBuilder(server.tokenizer), "hermes")
        history, rollout = MessageHistory([{"role": "user", "content": [image(56, 56)]}]), tokens.for_rollout()
        history.append(await rollout.chat(history))
        history.append({"role": "user", "content": "And?"})
        history.append(await rollout.chat(history))
        (sample,) = assert_exact(Stack(server, tokens, Says()), history)
        assert [span.prompt_checked for span in sample.spans] == ["ids", "length"]
        await tokens.close()
