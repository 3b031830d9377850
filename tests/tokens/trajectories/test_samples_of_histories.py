"""Samples of real histories: edits, compactions, retries, n > 1, sub-agents and forks lose no token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify, verify_records
from tests.support.token_trees import END, UNTIMED, completion

_words = st.integers(0, 3)
_some = st.lists(_words, max_size=3)
_said = st.lists(_words, min_size=1, max_size=3)
_answers = st.tuples(_said, st.booleans()).map(lambda pair: pair[0] + [END] * pair[1])
_KINDS = ["answer", "answer", "answer", "n > 1", "retry", "edit", "compaction", "sub-agent"]


def prompt(history: MessageHistory, following: list[int]) -> TokenPrefix:
    """Continue the last completion that is still in its context; else render everything anew."""
    for node in reversed(history.nodes()):
        if isinstance(node.origin, ChatResponse):
            if node.sampled and node.origin.tokens is not None:
                return node.origin.tokens.after.extend(following)
            break
    return TokenPrefix([1, *following])


@st.composite
def rollouts(draw: st.DrawFn, *, nested: bool = True) -> tuple[MessageHistory, list[ChatResponse]]:
    """A history, and what was sampled in it, in order."""
    history = MessageHistory([{"role": "user", "content": "go"}])
    sampled: list[ChatResponse] = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(_KINDS))
        if kind in ("answer", "n > 1", "retry"):
            before = prompt(history, draw(_some))
            answers = [completion(before, draw(_answers)) for _ in range(3 if kind == "n > 1" else 1)]
            sampled += answers
            if kind == "retry":
                history.append(answers[0])
                history.rewind(len(history) - 1, "malformed", attempt=True)
                continue
            history.append(answers[0])
            for other in answers[1:]:
                history.branch(other, "n > 1")
            history.append({"role": "user", "content": "go on"})
        elif kind == "edit":
            place = draw(st.integers(0, len(history) - 1))
            history[place]["content"] = draw(st.sampled_from(["edited", "edited again"]))
        elif kind == "compaction" and len(history) > 3:
            history[1 : draw(st.integers(2, len(history) - 1))] = [{"role": "user", "content": "what was said"}]
        elif kind == "sub-agent" and nested:
            below, of_below = draw(rollouts(nested=False))
            sampled += of_below
            history.append(ToolResponse(Message("tool", "done", tool_call_id="c"), "delegate", chat=below))
    return history, sampled


@UNTIMED
@given(rollouts())
def test_every_token_of_a_real_history_is_delivered_once(drawn: tuple[MessageHistory, list[ChatResponse]]) -> None:
    history, sampled = drawn
    found = samples(history, rollout_id="r")
    count = sum(len(response.tokens) for response in sampled if response.tokens is not None)
    totals = verify_records([sample.to_record() for sample in found])
    assert [reason for sample in found for reason in verify(sample)] == []
    assert (totals.sampled, totals.delivered, totals.duplicated, totals.lost) == (count, count, 0, 0)
    turns = {span.turn: (sample, span) for sample in found for span in sample.spans}
    for turn, response in enumerate(sampled):
        assert response.tokens is not None
        sample, span = turns[turn]
        assert sample.tokens[: span.end] == response.tokens.after.ids
        assert sample.masks[span.start : span.end] == response.tokens.ids


@UNTIMED
@given(rollouts())
def test_a_sample_trains_discarded_attempts_only_or_none_and_the_first_one_none(
    drawn: tuple[MessageHistory, list[ChatResponse]],
) -> None:
    history, sampled = drawn
    replaced = set(map(id, history.replaced_attempts()))
    found = samples(history, rollout_id="r")
    for sample in found:
        assert {id(sampled[span.turn]) in replaced for span in sample.spans} == {sample.discarded}
    assert [sample.discarded for sample in found] == sorted(sample.discarded for sample in found)


@UNTIMED
@given(rollouts())
def test_samples_do_not_change_when_a_history_is_forked(
    drawn: tuple[MessageHistory, list[ChatResponse]],
) -> None:
    history, _ = drawn
    found = samples(history)
    assert samples(history.fork()) == found


def test_an_edited_completion_keeps_its_tokens_and_its_copies_are_context() -> None:
    history = MessageHistory([{"role": "user", "content": "go"}])
    start = TokenPrefix([1, 2])
    first = completion(start, [3, END])
    history.append(first)
    history.append({"role": "user", "content": "on"})
    assert first.tokens is not None
    second = completion(first.tokens.after.extend([4]), [5, END])
    history.append(second)
    history[1]["content"] = "what it should have said"
    # The new prompt: the edited answer, then the copy of the second one as context.
    third = completion(TokenPrefix([1, 2, 7, END, 4, 5, END, 8]), [6, END])
    history.append(third)
    head, before = samples(history, rollout_id="r")
    assert head.masks == [*[-100] * 8, 6, END]
    assert before.masks == [-100, -100, 3, END, -100, 5, END]
    assert verify(head) == verify(before) == []
    assert (head.weight, before.weight) == (1 / 3, 2 / 3)


def test_an_attempt_that_a_retry_replaced_is_a_sample_of_its_own() -> None:
    history = MessageHistory([{"role": "user", "content": "go"}])
    start = TokenPrefix([1, 2])
    cut, call = completion(start, [3, 3, 3, 3]), completion(start, [4, END])
    history.append(cut)
    history.rewind(1, "tool call cut off by the token limit", attempt=True)
    assert history.replaced_attempts() == ()  # nothing replaced it yet: the conversation ended with it
    assert [(sample.masks, sample.discarded) for sample in samples(history)] == [([-100, -100, 3, 3, 3, 3], False)]
    history.append(call)
    assert history.replaced_attempts() == (cut,)
    main, left = samples(history, rollout_id="r")
    assert (main.masks, main.discarded) == ([-100, -100, 4, END], False)
    assert (left.masks, left.discarded) == ([-100, -100, 3, 3, 3, 3], True)
    assert left.to_record()["discarded"] is True and verify(left) == []


def _ended() -> dict[str, tuple[MessageHistory, list[int]]]:
    """By name: a history, and the ids on whose path it ended."""
    start = TokenPrefix([1, 2])

    def begun() -> tuple[MessageHistory, TokenPrefix]:
        history = MessageHistory([{"role": "user", "content": "go"}])
        first = completion(start, [3, END])
        history.append(first)
        history.append({"role": "user", "content": "on"})
        assert first.tokens is not None
        return history, first.tokens.after.extend([4])

    def attempt(history: MessageHistory, prompt: TokenPrefix, *ids: int, reason: str = "malformed") -> None:
        length = len(history)
        history.append(completion(prompt, ids))
        history.rewind(length, reason, attempt=reason == "malformed")

    found: dict[str, tuple[MessageHistory, list[int]]] = {}

    history, on = begun()
    attempt(history, on, 6, 6, 6)
    history.append(completion(on, [5, END]))
    found["a retry"] = history, [1, 2, 3, END, 4, 5, END]

    history, on = begun()
    attempt(history, on, 6, 6, 6)
    attempt(history, on, 7, 7)
    found["retries until it gave up"] = history, [1, 2, 3, END, 4, 7, 7]

    history, on = begun()
    attempt(history, on, 6, 6, 6)
    faulty = completion(on, [8, END])
    assert faulty.tokens is not None
    history.append(faulty)
    history.append({"role": "user", "content": "unknown tool"})
    history.append(completion(faulty.tokens.after.extend([0]), [8, 8]))
    history.rewind(3, "faulty turns in a row")
    found["faulty turns, taken back"] = history, [1, 2, 3, END, 4, 8, END, 0, 8, 8]

    history, on = begun()
    attempt(history, on, 5, END, reason="unfinished turn")
    found["out of time"] = history, [1, 2, 3, END, 4, 5, END]

    history, on = begun()
    history.branch(completion(on, [6, 6, 6]), "n > 1")
    history.append(completion(on, [5, END]))
    history.branch(completion(on, [7, 7, 7]), "n > 1")
    found["n > 1"] = history, [1, 2, 3, END, 4, 5, END]

    history, on = begun()
    history[:2] = [{"role": "user", "content": "so far"}]
    history.append(completion(TokenPrefix([0, 4]), [5, END]))
    found["a compaction"] = history, [0, 4, 5, END]

    history, on = begun()
    history[:2] = [{"role": "user", "content": "so far"}]
    attempt(history, TokenPrefix([0, 4]), 6, 6)
    attempt(history, TokenPrefix([0, 4]), 7, END)
    found["a compaction, and retries until it gave up"] = history, [0, 4, 7, END]

    history, on = begun()
    history[0]["content"] = "edited"
    found["an edit at the end"] = history, [1, 2, 3, END]

    history, on = begun()
    call = completion(on, [5, END])
    assert call.tokens is not None
    below = history.fork()
    below.append(call)
    below.append(completion(call.tokens.after.extend([0]), [8, 8, END]))
    below.append({"role": "user", "content": "more"})
    history.append(call)
    history.append(ToolResponse(Message("tool", "done", tool_call_id="c"), "delegate", chat=below))
    history.append(completion(call.tokens.after.extend([1]), [6, END]))
    found["a sub-agent that went on from the conversation"] = history, [1, 2, 3, END, 4, 5, END, 1, 6, END]

    history, on = begun()
    history.rewind(0, "another conversation of the same sample")
    history.extend([{"role": "user", "content": "other"}, completion(TokenPrefix([0]), [7, END])])
    found["two conversations, as in collected groups"] = history, [0, 7, END]
    return found


@pytest.mark.parametrize("name", _ended())
def test_the_first_sample_is_the_path_on_which_the_conversation_ended(name: str) -> None:
    history, ids = _ended()[name]
    found = samples(history, rollout_id="r")
    assert found[0].tokens == ids
    assert not found[0].discarded
    assert verify_records([sample.to_record() for sample in found]).ok
