"""Rollouts from the samples that an environment returned."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult, TokenCount
from lachesis.loop.rollout import Rollout
from lachesis.rewards.reward import Reward
from lachesis_compat.collecting.earlier_turns import place_in
from lachesis_compat.collecting.recording import RecordedCompletion
from lachesis_messages.errors import MessageError
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason
from lachesis_messages.responses import ChatResponse


def rollout_of(
    completions: Sequence[RecordedCompletion], *, item_key: str, index: int, score: float | None, left_out: str = ""
) -> Rollout:
    """A rollout that trains exactly these completions.

    Args:
        score: None leaves it out, for the reason `left_out`.
    """
    cut = bool(completions) and completions[-1].response.finish_reason is FinishReason.LENGTH
    outcome = Outcome.CONTEXT_EXHAUSTED if cut else Outcome.COMPLETED
    reason = "the last completion was cut off by its limit" if cut else "the environment returned it"
    rollout = Rollout(
        rollout_id=uuid.uuid4().hex,
        item_key=item_key,
        index=index,
        outcome=outcome,
        reason=left_out or reason,
        reward=None,
        result=result_of(completions, outcome, left_out or reason) if completions else None,
        seconds=sum(completion.response.latency for completion in completions),
        left_out=left_out,
    )
    return rollout.rewarded(None if score is None else Reward(score))


def result_of(
    completions: Sequence[RecordedCompletion], outcome: Outcome, reason: str, error: Exception | None = None
) -> AgentResult:
    """The result of a rollout with these completions."""
    responses = [completion.response for completion in completions]
    counts = TokenCount()
    for response in responses:
        counts.add(response.usage)
    return AgentResult(
        turns_used=len(responses),
        finished_naturally=outcome is Outcome.COMPLETED,
        reasoning_per_turn=[response.message.reasoning for response in responses],
        turn_responses=responses,
        tool_errors=[],
        outcome=outcome,
        reason=reason,
        history=history_of(completions),
        tokens=counts,
        api_calls=len(responses),
        seconds_in_model=sum(response.latency for response in responses),
        error=error,
    )


def history_of(completions: Sequence[RecordedCompletion]) -> MessageHistory:
    """A conversation that ends with the last completion, and holds each of the others once.

    The messages that an earlier completion continued are on the path to it; the others are branches that were left. An
    assistant message that is none of these completions is context, and not sampled.
    """
    history = MessageHistory()
    left = list(completions)
    paths: list[list[Any]] = []
    while left:
        last = left.pop()
        pieces = {id(piece) for piece in last.tokens.prompt.lineage()} if last.tokens is not None else set()
        earlier = [each for each in left if each.tokens is not None and id(each.tokens.after) in pieces]
        if last.tokens is None:  # Phase 1: what it was asked after is known by its messages only
            earlier = [each for each in left if any(_is(message, each) for message in last.messages or ())]
        path = _text_path(last, left) if last.messages is None else _path(last, earlier)
        taken = {id(message) for message in path if isinstance(message, ChatResponse)}
        left = [each for each in left if id(each.response) not in taken]
        paths.append(path)
    for path in reversed(paths):
        history.rewind(0, "another conversation of the same sample")
        history.extend(path)
    return history


def _path(last: RecordedCompletion, earlier: Sequence[RecordedCompletion]) -> list[Any]:
    """The messages of a request with the completions among them, and its answer."""
    path: list[Any] = []
    waiting = list(earlier)
    for message in last.messages or ():
        found = next((each for each in waiting if _is(message, each)), None)
        if found is not None:
            waiting.remove(found)
            path.append(found.response)
        else:
            path.append(message)
    try:
        MessageHistory(path)
    except (MessageError, ValueError):  # roles of the environment's own, content that is no message
        text = "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in last.messages or ())
        path = [{"role": "user", "content": text}]
    return [*path, last.response]


def _text_path(last: RecordedCompletion, others: Sequence[RecordedCompletion]) -> list[Any]:
    """A text completion with those that stand in its prompt, and the text before each as a message of the user."""
    path: list[Any] = []
    at = 0
    places = [(place, each) for each in others if (place := place_in(each, last.prompt)) is not None]
    for (start, end), each in sorted(places, key=lambda found: found[0]):
        if start >= at:
            path += [{"role": "user", "content": last.prompt[at:start]}, each.response]
            at = end
    return [*path, {"role": "user", "content": last.prompt[at:]}, last.response]


def _is(message: Mapping[str, Any], completion: RecordedCompletion) -> bool:
    return message.get("role") == "assistant" and (message.get("content") or "") == completion.said


def renumbered(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with their places in the group."""
    return [replace(rollout, index=index) for index, rollout in enumerate(rollouts)]
