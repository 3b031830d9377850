"""The JSON of a history, as requests carry it, is that of its messages, whatever was edited and sent before."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from backends.text import without_lone_surrogates
from lachesis_messages.encoded import NodeMessages
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.responses import ChatResponse, ToolResponse
from tests.support.token_trees import UNTIMED

WORDS = st.sampled_from(["", "hello", 'a "quoted"\n', "Zürich", "half \ud83d", "\0"])
EXTRA = st.sampled_from([{}, {"cached": True}, {"count": 2**70}, {"parts": [1, {"x": None}]}])
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "answer", "result", "edit", "rewind", "send", "read"]), st.integers(0, 9), WORDS),
    max_size=20,
)


def sent(encoded: Any) -> Any:
    return json.loads(b"".join(encoded.json_pieces()))


def plain(history: MessageHistory, field: str | None) -> Any:
    written = json.dumps(history.to_openai(field), ensure_ascii=False)
    return json.loads(without_lone_surrogates(written))


@UNTIMED
@given(STEPS, EXTRA, st.sampled_from([None, "reasoning", "reasoning_content"]))
def test_it_is_the_json_of_the_messages(steps: list[tuple[str, int, str]], extra: Any, field: str | None) -> None:
    history = MessageHistory([{"role": "user", "content": "go"}])
    earlier, in_flight = [], []
    for what, number, words in steps:
        if what == "ask":
            history.append({"role": "user", "content": words, **extra})
        elif what == "answer":
            call = ToolCall(f"call_{number}", words or "tool", '{"x": 1')
            message = Message("assistant", words or None, (call,), reasoning=words or None)
            history.append(ChatResponse(message, FinishReason.TOOL_CALLS))
        elif what == "result":
            history.append(ToolResponse(Message("tool", words, tool_call_id=f"call_{number}", name="tool"), "tool"))
        elif what == "edit":
            history[number % len(history)]["content"] = words
        elif what == "rewind":
            history.rewind(max(1, len(history) - number), "test")
        else:
            encoded = history.encoded(field)
            earlier.append((encoded, plain(history, field)))
            if what == "send":  # a request whose body is being written
                in_flight.append(encoded.json_pieces())
    assert sent(history.encoded(field)) == plain(history, field)
    assert all(sent(encoded) == said for encoded, said in earlier)


def test_a_turn_adds_to_the_text_of_the_turns_before() -> None:
    history = MessageHistory([{"role": "user", "content": "go"}])
    first: Any = history.encoded().json_pieces()[1].obj
    for turn in range(50):
        history.append({"role": "assistant", "content": f"turn {turn}"})
        assert len(history.encoded().json_pieces()) == 3
        assert history.encoded().json_pieces()[1].obj is first


def test_conversations_that_take_turns_are_encoded_as_they_are() -> None:
    history = MessageHistory([{"role": "system", "content": "s"}, {"role": "user", "content": "one"}])
    other = history.fork()
    other[1] = {"role": "user", "content": "two"}
    kept: dict[str | None, Any] = {}
    for _ in range(3):
        for each in (history, other):
            each.append({"role": "assistant", "content": "so"})
            messages = NodeMessages(each.nodes(), kept)
            assert sent(messages.encoded(None)) == each.to_openai()
            assert list(messages) == list(each)
