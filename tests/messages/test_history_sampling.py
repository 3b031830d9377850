"""Which completions count as sampled in their place, and that every one of them stays on record."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse, ToolResponse, Usage
from lachesis_messages.tokens import SampledTokens, TokenPrefix

USER = {"role": "user", "content": "hello"}


def sampled(prompt: TokenPrefix, text: str = "answer", context: str = "") -> ChatResponse:
    tokens = SampledTokens.sample(prompt, (1, 2), (-0.5, -0.5), context=context)
    return ChatResponse(Message("assistant", text), FinishReason.STOP, tokens=tokens)


def following(response: ChatResponse, *ids: int) -> TokenPrefix:
    return response.tokens.after.extend(ids or (7,))


def result(text: str = "out", chat: MessageHistory | None = None) -> ToolResponse:
    return ToolResponse(Message("tool", text, tool_call_id="c"), "terminal", chat=chat)


def flags(history: MessageHistory) -> list[bool]:
    return [node.sampled for node in history.nodes()]


def played(turns: int) -> MessageHistory:
    history = MessageHistory([USER])
    prompt = TokenPrefix([5, 6])
    for turn in range(turns):
        response = sampled(prompt, f"turn {turn}")
        history.append(response)
        history.append(result(f"result {turn}"))
        prompt = following(response, 8, turn)
    return history


def test_turns_that_follow_each_other_are_sampled_in_place():
    history = played(3)
    assert flags(history) == [False, True, False, True, False, True, False]
    assert list(history.completions()) == list(history.responses())


def test_completions_after_an_edit_are_context():
    history = played(4)
    before = history.completions()
    history[4]["content"] = "shortened"
    assert flags(history) == [False, True, False, True, False, False, False, False, False]
    assert [node.origin for node in history.nodes() if node.message.role == "assistant"] == list(before)
    assert history.completions() == before
    assert [node.sampled for node in history.discarded[0].nodes] == [False, True, False, True, False]
    # The next prompt continues the last sampled one that is left; inserted context comes in separate pieces.
    splices = before[1].tokens.after.extend([9]).extend([1, 2]).extend([9]).extend([1, 2]).extend([9])
    history.append(sampled(splices, "after the edit"))
    assert flags(history)[-1]
    history.append(result())
    history.append(sampled(following(history.completions()[-1])))
    assert flags(history)[-1]


def test_an_edited_completion_is_context_and_the_original_stays():
    history = played(1)
    (original,) = history.completions()
    node = history.nodes()[1]
    history[1]["content"] = "what I would rather have heard"
    edited = history.nodes()[1]
    assert (edited.origin, edited.sampled, edited.source) == (None, False, node)
    assert history.completions() == (original,)
    assert list(history.responses()) == []


def test_a_compaction_leaves_the_middle_as_a_branch():
    history = played(6)
    before = history.completions()
    history[3:-4] = [{"role": "user", "content": "summary"}]
    assert len(history) == 8
    assert flags(history) == [False, True, False, False, False, False, False, False]
    (dropped,) = history.discarded
    assert dropped.reason == "replacement of messages 3 to 8"
    assert [node.origin for node in dropped.nodes if node.sampled] == list(before[1:])
    assert history.completions() == before
    assert history.nodes()[3].source is dropped.nodes[0]


def test_a_completion_is_not_recognised_by_its_text():
    history = played(3)
    completions = history.completions()
    history.append(completions[1])
    assert not history.head.sampled, "it is on the path already"
    assert history.completions() == completions
    history.rewind(1, "again")
    history.append(completions[2])
    assert not history.head.sampled, "its prompt holds turns that are not on this path"
    history.rewind(1, "again")
    history.append(completions[0])
    assert history.head.sampled, "the very context that it was sampled in"
    assert history.completions() == completions


def test_the_same_text_by_another_completion_is_another_context():
    prompt = TokenPrefix([5])
    one, other = sampled(prompt), sampled(prompt)
    history = MessageHistory([USER, one, USER])
    second = sampled(following(one))
    history.append(second)
    assert history.head.sampled
    history.rewind(1, "the other one")
    history.extend([other, USER])
    history.append(second)
    assert flags(history) == [False, True, False, False]
    assert history.completions() == (one, second, other)


def test_siblings_share_a_prompt_and_each_counts_as_sampled():
    prompt = TokenPrefix([5])
    first, second, third = (sampled(prompt, text) for text in ("a", "a", "b"))
    history = MessageHistory([USER])
    node = history.branch(first, "1 of 3")
    history.append(second)
    history.append(USER)
    assert node.sampled
    assert flags(history) == [False, True, False]
    history.append(third)
    assert not history.head.sampled, "it was sampled two messages earlier"
    assert history.completions() == (first, second, third)
    assert [(dropped.reason, dropped.at, dropped.nodes) for dropped in history.discarded] == [("1 of 3", 1, (node,))]
    history.rewind(1, "the first one after all")
    history.append(first)
    assert history.head.sampled
    assert history.head.source is node
    assert history.completions() == (first, second, third)


def test_a_recorded_prompt_shows_edits_between_sampling_and_appending():
    history = MessageHistory([USER, sampled(TokenPrefix([5])), USER])
    prompt = following(history.completions()[0])
    history.record_prompt(prompt)
    history[2]["content"] = "edited meanwhile"
    history.append(sampled(prompt))
    assert not history.head.sampled
    unedited = MessageHistory([USER, history.completions()[0], USER])
    unedited.record_prompt(prompt)
    unedited.append(history.completions()[1])
    assert unedited.head.sampled


def test_a_prompt_that_shares_nothing_counts_only_on_record():
    history = played(1)
    anew = TokenPrefix([5, 6, 1, 2, 3])
    history.append(sampled(anew, "from another conversation"))
    assert not history.head.sampled
    history.rewind(3, "again")
    rendered = TokenPrefix([5, 6, 1, 2, 3])
    history.record_prompt(rendered)
    history.append(sampled(rendered, "the template rendered it all anew"))
    assert history.head.sampled
    history.append(result())
    history.append(sampled(following(history.completions()[-1])))
    assert history.head.sampled


def test_turns_with_other_tools_start_anew_and_are_continued_later():
    history = MessageHistory([USER])
    first = sampled(TokenPrefix([5]), context="two tools")
    other = sampled(TokenPrefix([5, 9, 1, 2]), context="no tools")
    third = sampled(following(first), context="two tools")
    fourth = sampled(following(other), context="two tools")
    for response in (first, other, third, fourth):
        history.append(response)
        history.append(USER)
    assert [node.sampled for node in history.nodes()[1::2]] == [True, True, True, False]


def test_turns_of_another_history_come_over_whole_and_not_with_a_gap():
    history = played(8)
    turns = [node.origin or node.item for node in history.nodes()]
    assert flags(MessageHistory(turns)) == flags(history)
    gap = MessageHistory([*turns[:2], {"role": "user", "content": "summary"}, *turns[-2:]])
    assert flags(gap) == [False, True, False, False, False]
    headless = MessageHistory([USER, {"role": "user", "content": "summary"}, *turns[-2:]])
    assert flags(headless) == [False] * 4


def test_an_answer_whose_opening_was_forced_counts_as_sampled():
    history = played(1)
    prompt = following(history.completions()[0]).extend([3])
    history.append(sampled(prompt))
    assert history.head.sampled


def test_completions_without_tokens_are_known_by_identity():
    answer = ChatResponse(Message("assistant", "a"), FinishReason.STOP)
    history = MessageHistory([USER, answer])
    assert history.head.sampled
    history.append(answer)
    assert not history.head.sampled
    assert history.completions() == (answer,)
    history[0]["content"] = "edited"
    assert flags(history) == [False] * 3


def test_a_response_whose_message_was_replaced_is_the_same_completion():
    response = sampled(TokenPrefix([5]))
    renamed = replace(response, message=Message("assistant", "renamed"))
    history = MessageHistory([USER])
    history.branch(response, "malformed call")
    history.append(renamed)
    assert history.head.sampled
    assert history.completions() == (response,)


def test_sub_agents_count_where_their_result_came_in_each_once():
    inner = played(2)
    deeper = MessageHistory([USER, sampled(TokenPrefix([1]), "deepest")])
    inner.append(result("nested", deeper))
    inner.rewind(1, "the sub-agent gave up")
    ask = sampled(TokenPrefix([5]), "ask")
    answer = sampled(following(ask), "answer")
    history = MessageHistory([USER, ask, result("sub", inner), answer])
    expected = [ask, *inner.completions(), answer]
    assert [response.message.text for response in expected] == ["ask", "turn 0", "turn 1", "deepest", "answer"]
    assert list(history.completions()) == expected
    history[2]["content"] = "shortened"
    history.append(result("once more", inner))
    history.append(inner.completions()[0])
    assert list(history.completions()) == expected
    assert flags(history)[-1] is False, "a sub-agent's answer is no turn of this conversation"
    inner.append(result("of itself", history))
    assert list(history.completions()) == expected


def test_a_fork_shares_earlier_records_and_grows_independently():
    history = played(2)
    history.rewind(3, "again")
    before = history.completions()
    fork = copy.copy(history)
    prompt = following(before[0], 8, 0)
    mine, other = sampled(prompt), sampled(following(before[0], 9))
    history.append(mine)
    fork.append(other)
    assert history.head.sampled
    assert fork.head.sampled
    assert history.completions() == (*before, mine)
    assert fork.completions() == (*before, other)
    fork[0]["content"] = "edited"
    assert history[0]["content"] == "hello"
    fork.append(before[1])
    assert not fork.head.sampled


def rich_history() -> MessageHistory:
    """Branches, edits, siblings, and two sub-agents that share a prompt with each other and with their parent."""
    root = TokenPrefix([5, 6])
    ask = sampled(root, "ask")
    chats = [MessageHistory([USER, sampled(root.extend([7]), f"sub {n}")]) for n in range(2)]
    history = MessageHistory([USER, ask, result("a", chats[0]), result("b", chats[1])])
    shared = following(ask)
    history.branch(sampled(shared, "sibling"), "1 of 2")
    history.append(replace(sampled(shared, "answer"), usage=Usage(3, 2), model="m", sampling={"temperature": 1.0}))
    history[2]["content"] = "edited"
    history.append(chats[0].completions()[0])
    return history


def test_a_history_is_not_pickled_by_accident():
    with pytest.raises(TypeError, match="to_openai"):
        pickle.dumps([rich_history()])


def test_a_thousand_turns_with_edits_need_no_recursion():
    history = played(1000)
    history[0]["content"] = "edited"
    chat = played(1000)
    history.append(result("long", chat))
    assert len(history.completions()) == 2000
    assert history.head.digest
    assert history.to_mermaid()
    assert len(history.fork().all_nodes()) == 4003
    del history


def test_a_fork_for_another_rollout_has_its_own_completions_only():
    history = played(2)
    attempt = sampled(following(history.completions()[-1]), "discarded")
    history.append(attempt)
    history.rewind(len(history) - 1, "unusable", attempt=True)
    history.append(result("below", played(1)))
    other = history.fork(own=False)
    assert other == history and flags(other) == flags(history)
    assert other.completions() == other.replaced_attempts() == other.discarded == ()
    answer = sampled(following(history.completions()[1], 9), "its own")
    other.append(answer)
    assert other.completions() == (answer,) and other.nodes()[-1].sampled
    other[2]["content"] = "edited"  # copies what is not its own
    assert other.completions() == (answer,)
    third = other.fork(own=False).fork()
    assert third.completions() == () and len(third) == len(other)
    assert len(history.completions()) == 4 and history.replaced_attempts() == (attempt,)


def test_sub_agents_below_sub_agents_need_no_recursion():
    history = played(1)
    for _ in range(2000):
        history = MessageHistory([USER, result("below", history)])
    assert len(history.completions()) == 1
    _unravel(history)


def _unravel(history: MessageHistory) -> None:
    """Frees a deep nest one by one: the interpreter's own deallocation is not what is tested here."""
    chats = [history]
    while isinstance(chats[-1].head.origin, ToolResponse) and chats[-1].head.origin.chat is not None:
        chats.append(chats[-1].head.origin.chat)
    while chats:
        del chats[0]
