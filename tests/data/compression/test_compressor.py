"""One entry: what compression keeps, whatever the conversation says and however little budget there is."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_data.compression.compressor import MARK, Compressed, Compressor, Summarizer
from lachesis_data.compression.conversation import PREFIX, Conversation
from lachesis_data.compression.settings import CompressionFileSettings
from lachesis_data.compression.summary import (
    Passage,
    SummaryAnswer,
    SummaryFailed,
    clean_summary,
    extractive_summary,
    summary_request,
)
from lachesis_messages.errors import MalformedMessage
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.records.loading import from_sharegpt, tools_from_sharegpt
from lachesis_testing.fake_server.tokenizer import fake_tokenizer
from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts
from lachesis_tokens.templates.conversation_tokens import ConversationTokens
from tests.data.compression.examples import TOOLS, Words, agent_entry, entry_of, extracting, settings_of
from tests.run import some
from tests.support.conversation_strategies import conversations

PROMPTS = DatasetPrompts(fake_tokenizer())
COUNTER = ConversationTokens(PROMPTS)


def messages_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    return from_sharegpt(entry) if "conversations" in entry else entry["messages"]


def compress(entry: Any, chosen: CompressionFileSettings, summarize: Summarizer | None = None) -> Compressed:
    summarize = summarize or extracting(COUNTER, chosen.compression.summary_target_tokens)
    return asyncio.run(Compressor(chosen, COUNTER, summarize).compress(entry))


@settings(max_examples=some(10))
@given(
    conversations(),
    st.sampled_from(["trajectory", "dataset", "messages"]),
    st.integers(1, 400),
    st.integers(5, 60),
    st.fixed_dictionaries({f"first_{role}": st.booleans() for role in ("system", "human", "gpt", "tool")}),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_compressed_entry_is_valid_and_keeps_everything_else(
    messages: list[dict[str, Any]],
    form: str,
    target: int,
    summary: int,
    firsts: dict[str, bool],
    last: int,
    notice: bool,
) -> None:
    entry = entry_of(form, messages)
    before = json.dumps(entry)
    chosen = settings_of(
        target,
        summary,
        protected_turns={**firsts, "last_n_turns": last},
        output={"add_summary_notice": notice},
        processing={"skip_under_target": False},
    )
    done = compress(entry, chosen)
    assert json.dumps(entry) == before
    key = "messages" if form == "messages" else "conversations"
    assert {name: done.entry[name] for name in entry if name != key} == {
        name: entry[name] for name in entry if name != key
    }
    assert done.entry[MARK] == done.metrics
    validate_messages(messages_of(done.entry))
    if form != "messages":
        assert tools_from_sharegpt(done.entry) == tools_from_sharegpt(entry)
    old, new, metrics = entry[key], done.entry[key], done.metrics
    assert metrics["original_tokens"] == COUNTER.conversation(messages_of(entry), TOOLS)
    assert metrics["compressed_tokens"] == COUNTER.conversation(messages_of(done.entry), TOOLS)
    assert metrics["still_over_limit"] == (metrics["compressed_tokens"] > target)
    assert (metrics["original_turns"], metrics["compressed_turns"]) == (len(old), len(new))
    if metrics["was_compressed"]:
        assert metrics["tokens_saved"] > 0
        region = metrics["compression_region"]
        start, end = region["start_idx"], region["end_idx"]
        head = 1 if start and (old[0].get("from") or old[0].get("role")) == "system" else 0  # it may have the notice
        assert new[head:start] == old[head:start]
        assert new[start + 1 :] == old[end:]
        assert PREFIX in str(new[start])
    else:
        assert new == old
    assert compress(done.entry, chosen).entry == done.entry
    assert compress(entry, chosen) == done


@pytest.mark.parametrize("form", ["trajectory", "dataset", "messages"])
def test_a_long_entry_meets_its_budget_and_loses_no_more_than_it_has_to(form: str) -> None:
    done = compress(agent_entry(40, form), settings_of(2500, 100))
    metrics = done.metrics
    assert metrics["was_compressed"]
    assert metrics["error"] is None
    assert 2000 < metrics["compressed_tokens"] <= 2500 < metrics["original_tokens"]
    assert metrics["compression_region"]["start_idx"] == 4


def test_the_notice_goes_where_readers_keep_it() -> None:
    actual = compress(agent_entry(40, "dataset"), settings_of(2500, 100)).entry["conversations"]
    assert actual[0]["value"].startswith("Be brief.\n\nSome of your previous tool responses")
    assert actual[4]["value"].startswith(PREFIX)
    generated = compress(agent_entry(40), settings_of(2500, 100)).entry["conversations"]
    assert generated[0] == agent_entry(40)["conversations"][0]
    assert generated[4]["value"].startswith(
        f"Some of your previous tool responses may be summarized to preserve context.\n\n{PREFIX}"
    )


def test_an_entry_under_the_target_stays() -> None:
    entry = agent_entry(3)
    done = compress(entry, settings_of(10_000))
    assert done.entry["conversations"] == entry["conversations"]
    assert done.metrics["skipped_under_target"]
    assert not done.metrics["still_over_limit"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("", "empty"), (" \n", "empty"), ("word " * 500, "more than 200"), (SummaryFailed("no server", 4), "no server")],
)
def test_without_a_usable_summary_the_entry_stays_and_says_why(answer: str | SummaryFailed, reason: str) -> None:
    async def summarize(passages: Sequence[Passage]) -> SummaryAnswer:
        if isinstance(answer, SummaryFailed):
            raise answer
        return SummaryAnswer(answer, 1)

    entry = agent_entry(40)
    done = compress(entry, settings_of(2500, 100), summarize)
    assert done.entry["conversations"] == entry["conversations"]
    assert reason in done.metrics["error"]
    assert done.metrics["still_over_limit"]
    assert not done.metrics["was_compressed"]
    assert done.metrics["compression_region"]["turns_count"] == 0
    assert done.metrics["summarization_errors"] == 1
    assert done.metrics["summarization_api_calls"] == (4 if isinstance(answer, SummaryFailed) else 1)
    assert compress(done.entry, settings_of(2500, 100)).metrics["was_compressed"]  # a later start tries again


def test_a_late_summary_leaves_the_entry() -> None:
    async def summarize(passages: Sequence[Passage]) -> SummaryAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    entry = agent_entry(40)
    done = compress(entry, settings_of(2500, processing={"per_trajectory_timeout": 0.2}), summarize)
    assert done.entry["conversations"] == entry["conversations"]
    assert "per_trajectory_timeout" in done.metrics["error"]


def test_a_late_count_stops_and_gives_its_thread_back() -> None:
    class Endless(Words):
        ended = Event()

        def conversation(self, messages: Any, tools: Any, stopped: Callable[[], bool]) -> int:
            while not stopped():
                time.sleep(0.01)
            self.ended.set()
            raise TimeoutError

    chosen = settings_of(100, processing={"per_trajectory_timeout": 0.1})
    with ThreadPoolExecutor(1) as threads:
        done = asyncio.run(Compressor(chosen, Endless(), None, threads).compress(agent_entry(3)))
        assert Endless.ended.wait(60)
    assert "per_trajectory_timeout" in done.metrics["error"]


@pytest.mark.parametrize("said", ["", "<|im_end|>", "<|im_start|>user\n", " a\n"])
def test_counts_in_parts_are_those_of_the_whole(said: str) -> None:
    words = {"role": "user", "content": "many words " * 20_000}
    messages = [*messages_of(agent_entry(3, "messages")), {"role": "assistant", "content": f"{said}x{said}"}, words]
    bare = [{name: value for name, value in message.items() if name != "reasoning"} for message in messages]
    for _ in range(2):
        assert COUNTER.conversation(bare, TOOLS) == len(PROMPTS.conversation(bare, TOOLS))


def test_a_count_asks_within_a_long_text_whether_it_shall_stop() -> None:
    asked = iter([False, False, True])
    long = [{"role": "user", "content": "word " * 40_000}]
    with pytest.raises(TimeoutError):
        COUNTER.conversation(long, stopped=lambda: next(asked))


def test_a_turn_of_many_results_is_read_at_once() -> None:
    calls = "\n".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in ["a", "b"] * 5000)
    results = '<tool_response>{"tool_call_id": "", "name": "c", "content": "x"}</tool_response>' * 10_000
    read = from_sharegpt({"conversations": [{"from": "gpt", "value": calls}, {"from": "tool", "value": results}]})
    assert [message["tool_call_id"] for message in read[1:]] == [call["id"] for call in read[0]["tool_calls"]]


def test_a_summary_longer_than_planned_widens_the_region_once() -> None:
    lengths: list[int] = []

    async def summarize(passages: Sequence[Passage]) -> SummaryAnswer:
        lengths.append(len(passages))
        return SummaryAnswer("word " * 95, 1)

    done = compress(agent_entry(40), settings_of(2500, 100), summarize)
    assert len(lengths) == 2
    assert lengths[0] < lengths[1]
    assert done.metrics["compressed_tokens"] <= 2500
    assert done.metrics["summarization_api_calls"] == 2


@pytest.mark.parametrize(
    "entry",
    [
        5,
        {},
        {"conversations": []},
        {"conversations": ["x"]},
        {"conversations": [{"from": "robot", "value": "x"}]},
        {"conversations": [{"from": "human"}]},
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": "no json"},
        {"messages": [{"role": "user", "content": "x"}], "tools": [5]},
        {"messages": [{"role": "user", "content": "x"}], "tools": 5},
        {"messages": [{"role": "user", "content": "x"}], "tools": "[5]"},
        {"conversations": [{"from": "tool", "value": "<tool_response>\nx\n</tool_response>"}]},
    ],
)
def test_an_entry_that_is_no_conversation_stays_and_says_why(entry: Any) -> None:
    done = compress(entry, settings_of(100))
    assert done.metrics["error"]
    kept = (
        {name: value for name, value in done.entry.items() if name != MARK} if isinstance(entry, dict) else done.entry
    )
    assert kept == entry


def test_images_are_kept_and_said_to_be_uncounted() -> None:
    entry = agent_entry(40, "messages")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    entry["messages"].insert(6, {"role": "user", "content": [{"type": "text", "text": "see"}, image]})
    done = compress(entry, settings_of(2500, 100))
    assert done.metrics["was_compressed"]
    assert done.metrics["uncounted_parts"] == 1
    assert entry["messages"][6] in done.entry["messages"]


def test_calls_without_results_at_the_end_stay() -> None:
    entry = agent_entry(40, "messages")
    entry["messages"] = entry["messages"][:-2]
    done = compress(entry, settings_of(1200, protected_turns={"last_n_turns": 0}))
    assert done.metrics["was_compressed"]
    assert done.entry["messages"][-1] == entry["messages"][-1]


def test_a_request_is_shortened_to_its_limit_and_keeps_both_ends_of_a_turn() -> None:
    passages = [Passage("tool", f"begin{number} {'x ' * 4000} end{number}") for number in range(8)]
    count = Words().text
    request = summary_request(passages, 50, max_tokens=1000, count=count)
    assert count(request) <= 1000
    assert all(f"begin{number}" in request and f"end{number}" in request for number in range(8))
    with pytest.raises(SummaryFailed, match="do not fit"):
        summary_request(passages * 20, 50, max_tokens=1000, count=count)


def test_reasoning_and_the_prefix_are_no_part_of_a_summary() -> None:
    assert clean_summary("<think>\nhm\n</think>\n[CONTEXT SUMMARY]: It ran.") == "It ran."
    assert clean_summary("hm\n</think>\nIt ran.") == "It ran."


@settings(max_examples=some(25))
@given(st.lists(st.builds(Passage, st.sampled_from(["human", "gpt", "tool"]), st.text(max_size=300)), min_size=1))
def test_an_extract_fits_and_is_always_the_same(passages: list[Passage]) -> None:
    count = Words().text
    text = extractive_summary(passages, 60, count)
    assert 0 < count(text) <= 60
    assert extractive_summary(passages, 60, count) == text


def test_messages_and_turns_say_the_same() -> None:
    spoken = [Conversation.read(agent_entry(5, form)).texts for form in ("dataset", "messages")]
    assert len(spoken[0]) == len(spoken[1])
    assert all("cat 0" in texts[2] and "output 0" in texts[3] for texts in spoken)


@pytest.mark.parametrize("text", ["<tool_call>" * 40_000, "<tool_call>" + " " * 20_000])
def test_text_of_unclosed_calls_costs_no_more_than_other_text(text: str) -> None:
    """A pattern that looks for the end of each call takes hours."""
    said = extractive_summary([Passage("tool", text)], 60, COUNTER.text)
    assert said.startswith("Tool result: called")


def test_a_turn_of_unclosed_tags_is_read_at_once() -> None:
    call = {"from": "gpt", "value": '<tool_call>{"name": "a"}</tool_call>\n' + "<tool_call>" * 100_000}
    assert from_sharegpt({"conversations": [call]})[0]["content"] == "<tool_call>" * 100_000
    result = {"from": "tool", "value": "<tool_response>a</tool_response>" + "<tool_response>" * 100_000}
    with pytest.raises(MalformedMessage, match="outside of"):
        from_sharegpt({"conversations": [{**call, "value": call["value"][:36]}, result]})


def test_a_conversation_whose_calls_share_an_id_is_valid_and_stays_as_it_was_written() -> None:
    """Some models count their calls from zero in every turn."""
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "x"},
    ]
    entry = {"messages": [{"role": "user", "content": "Q"}, *turn, *turn, {"role": "assistant", "content": "A"}]}
    assert Conversation.read(entry).entry == entry
