"""A completion ends with the token that completes a stop text, whatever the server lists after it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason
from lachesis_testing.fake_server import Reply, fake_tokenizer
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.server.stop_texts import StopTexts
from tests.run import some
from tests.support.exactness import assert_exact, stack

TOKENIZER = fake_tokenizer()
ASKED = {"role": "user", "content": "When is the tide high?"}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {
    "type": "object", "properties": {"query": {"type": "string"}}}}}]  # fmt: skip
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "tide"}}\n</tool_call>'


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def text_of(ids: Any) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False))


def made(ids: list[int], **fields: Any) -> Generation:
    return Generation(ids, [-0.5 - at for at in range(len(ids))], FinishReason.STOP, "stop", **fields)


def stops(*texts: str, **extra: Any) -> StopTexts:
    return StopTexts.of(Sampling(64, stop=texts, extra=extra), {}, text_of)


@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", ["vllm", "vllm-generate", "sglang", "atropos"])
@pytest.mark.parametrize(
    ("said", "stop", "content"),
    [
        ("The answer is 4. STOP and then junk", ["STOP"], "The answer is 4. "),
        ("The answer is 4. END extra ids", ["END", "STOP"], "The answer is 4. "),
        ("One.\nObservation: two", ["Observation:"], "One.\n"),
        ("High at noon.", ["oo"], "High at n"),
        ("🙂 é 東京 done", ["東"], "🙂 é "),
    ],
)
async def test_ids_behind_a_stop_text_are_neither_trained_nor_in_the_next_prompt(
    kind: str, said: str, stop: list[str], content: str
) -> None:
    async with stack(kind=kind, faults={"behind_stop": 1.0}) as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([ASKED])
        for _ in range(3):
            world.says.next = [said]
            history.append(response := await managed.chat(history, stop=stop, max_tokens=64))
            history.append({"role": "user", "content": "Go on."})
            sampled = text_of(response.tokens.ids)
            assert any(marker in sampled for marker in stop)
            assert not any(marker in text_of(response.tokens.ids[:-1]) for marker in stop)
            assert response.message.content == content and response.finish_reason is FinishReason.STOP
            assert response.usage.completion_tokens == len(response.tokens)
        world.says.next = ["Yes."]
        history.append(await managed.chat(history))
        assert_exact(world, history)
        assert 3 <= world.tokens.wandb_metrics()["server/tokens_after_stop"] <= 12


async def test_a_stop_text_in_the_reasoning_ends_the_completion_there() -> None:
    async with stack(faults={"behind_stop": 1.0}) as world:
        world.says.next = ["<think>\nWait. STOP now\n</think>\n\nNoon."]
        response = await world.tokens.for_rollout().chat([ASKED], stop=["STOP"], max_tokens=64)
        assert (response.message.reasoning, response.message.content) == ("Wait. ", "")
        assert text_of(response.tokens.ids).endswith("STOP")


async def test_a_call_before_a_stop_text_is_read_from_its_tokens() -> None:
    """A spelled-out marker is text with a stop text, too."""
    async with stack(faults={"behind_stop": 1.0}) as world:
        quoted = [number for letter in CALL for number in ids_of(letter)]
        world.says.next = [Reply([*quoted, *ids_of(CALL), *ids_of("STOP here")])]
        response = await world.tokens.for_rollout().chat([ASKED], tools=TOOLS, stop=["STOP"], max_tokens=400)
        assert len(response.message.tool_calls) == 1
        assert response.message.content.strip() == CALL
        world.says.next = [Reply([*ids_of(CALL[:-14]), TOKENIZER.pad_token_id, *ids_of(CALL[-14:] + "STOP")])]
        response = await world.tokens.for_rollout().chat([ASKED], tools=TOOLS, stop=["STOP"], max_tokens=400)
        assert not response.message.tool_calls and response.malformed_calls


async def test_a_stop_text_that_closes_a_call_is_part_of_it() -> None:
    async with stack() as world:
        world.says.next = [Reply(ids_of(CALL))]
        response = await world.tokens.for_rollout().chat([ASKED], tools=TOOLS, stop=["</tool_call>"], max_tokens=400)
        (call,) = response.message.tool_calls
        assert (call.status, response.message.content) == ("ok", None)
        world.says.next = [Reply(ids_of(CALL[:-13] + "STOP"))]
        stop = ["STOP", "</tool_call>"]
        response = await world.tokens.for_rollout().chat([ASKED], tools=TOOLS, stop=stop, max_tokens=400)
        assert [call.status for call in response.message.tool_calls] == ["repaired"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_experts_and_versions_end_with_the_ids(kind: str) -> None:
    async with stack(kind=kind, faults={"behind_stop": 1.0}) as world:
        world.fake.update_weights("one", seed=1)
        world.says.next = ["High at noon. And low."]
        response = await world.tokens.for_rollout().chat([ASKED], stop=["noon"], max_tokens=64)
        assert response.tokens.versions == (("one", 0, len(response.tokens)),)


def test_what_a_server_cut_well_stays_as_it_is() -> None:
    for said in ("High at noon", "High at", ""):
        generation = made(ids_of(said))
        assert stops("noon").cut(generation) is generation
    assert not stops() and stops("x") and stops(stop_token_ids=[3])


def test_a_stop_text_among_the_least_tokens_of_vllm_does_not_count() -> None:
    ids = ids_of("STOP one STOP two")
    first = stops("STOP").end(ids)
    later = stops("STOP", min_tokens=first).end(ids)
    assert text_of(ids[:first]) == "STOP" and text_of(ids[:later]) == "STOP one STOP"
    assert stops("STOP", min_new_tokens=first).end(ids) == first, "SGLang ends at any"


async def test_a_message_goes_on_over_a_stop_text_among_the_least_tokens() -> None:
    """The text and the ids of a message are of the same length."""
    async with stack() as world:
        ids = ids_of("STOP one STOP two")
        world.says.next = [Reply(ids[: stops("STOP", min_tokens=4).end(ids)], "stop", as_is=True)]
        response = await world.tokens.for_rollout().chat(
            [ASKED], stop=["STOP"], max_tokens=64, extra_body={"min_tokens": 4}
        )
        assert response.message.content == "STOP one "


def test_ids_behind_a_stop_token_go_too() -> None:
    generation = made([5, 6, 7, 8], versions=(("a", 0, 3), ("b", 3, 4)))
    cut = stops(stop_token_ids=[6]).cut(generation)
    assert (cut.ids, cut.logprobs, cut.versions) == ([5, 6], [-0.5, -1.5], (("a", 0, 2),))


@settings(max_examples=some(300), deadline=None)
@given(
    st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=24),
    st.lists(st.text("abenot <|🙂é", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_the_last_id_completes_the_first_stop_text(ids: list[int], texts: list[str]) -> None:
    end = stops(*texts).end(ids)
    ends = [count for count in range(1, len(ids) + 1) if any(text in text_of(ids[:count]) for text in texts)]
    assert end == (ends[0] if ends else None)
