"""Samples of real histories: edits, compactions, retries, n > 1, sub-agents and forks lose no token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lachesis.trajectories import (
    ChatResponse,
    Message,
    MessageHistory,
    TokenPrefix,
    ToolResponse,
    samples,
    verify,
    verify_records,
)
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
                history.branch(answers[0], "malformed")
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
