"""The record of one rollout: a plain dict, complete without the process that made it.

Everything that is counted of rollouts is counted from it (`lachesis.figures.figures`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from lachesis.figures.item_keys import plain
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult, StepReward, TokenCount
from lachesis.loop.rollout import Rollout
from lachesis_messages.graph_walks import identity
from lachesis_messages.history import MessageHistory
from lachesis_messages.responses import ChatResponse, Discarded, MessageGraph, Node, ToolResponse


def rollout_record(rollout: Rollout, place: int | None, *, whole: bool = True) -> dict[str, Any]:
    """The record of one rollout.

    Args:
        place: its index in the group's `scores`; None keeps its messages here.
        whole: False leaves out its conversations, which take milliseconds: for those who count.
    """
    result = rollout.result
    record: dict[str, Any] = {
        "rollout_id": rollout.rollout_id,
        "index": rollout.index,
        "place": place,
        "outcome": rollout.outcome.value,
        "reason": rollout.reason,
        "completed": rollout.outcome is Outcome.COMPLETED,
        "reward": rollout.reward,
        "unscored_kind": rollout.unscored_kind,
        "turn_rewards": None if rollout.turn_rewards is None else list(rollout.turn_rewards),
        "agent_fault": rollout.agent_fault,
        **({"fault_traceback": rollout.fault_traceback} if rollout.fault_traceback else {}),
        "traceback": rollout.tracebacks,
        **({} if rollout.tree is None else {"tree": rollout.tree.to_record()}),
        "attempts": rollout.attempts,
        "retried_after": list(rollout.retried_after),
        **lost_record(rollout),
        "seconds": round(rollout.seconds, 3),
        "metrics": dict(rollout.metrics),
        **({"reward_weights": dict(rollout.reward_weights)} if rollout.reward_weights else {}),
        "reward_calls": [call.to_record() for call in rollout.reward_calls] if whole else [],
        **agent_record(result, whole=whole),
    }
    if place is None and whole:
        record["messages"] = recorded_messages(result)
    return record


def lost_record(rollout: Rollout) -> dict[str, int]:
    """The tokens of its earlier starts."""
    lost = {f"lost_{name}": getattr(rollout.lost, name) for name in TokenCount.__slots__}
    return {name: count for name, count in lost.items() if count or name == "lost_completion_tokens"}


def counted_record(item_key: str, rollouts: Iterable[Rollout]) -> dict[str, Any]:
    """What `Figures` takes of a group or a part of it, without conversations."""
    return {"item_key": item_key, "rollouts": [rollout_record(rollout, None, whole=False) for rollout in rollouts]}


def recorded_messages(result: AgentResult | None) -> list[dict[str, Any]]:
    """The conversation as it was, even if a reward has edited `result.messages`."""
    return result.recorded_messages if result is not None else []


def agent_record(result: AgentResult | None, *, whole: bool = True) -> dict[str, Any]:
    """What the agent did; see `rollout_record`."""
    if result is None:
        return {"turns": 0, "api_calls": 0, "tool_calls": 0, "tool_stats": {}, "tool_errors": [], "discarded": []}
    cost = result.cost
    sampled = {identity(response): turn for turn, response in enumerate(result.history.completions() if whole else ())}
    return {
        **({"program": result.program.to_record()} if result.program is not None else {}),
        **({"verifier": plain(result.verifier)} if result.verifier is not None else {}),
        **({"refusal": True} if result.refusal else {}),
        "turns": result.turns_used,
        "api_calls": cost.api_calls,
        "prompt_tokens": cost.tokens.prompt_tokens,
        "cached_tokens": cost.tokens.cached_tokens,
        "completion_tokens": cost.tokens.completion_tokens,
        "uncounted_requests": cost.tokens.uncounted_requests,
        **({} if result.inherited is None else {"inherited_tokens": result.inherited.tokens.completion_tokens}),
        **(_turns(result.history, sampled) if whole else {}),
        **({"context_edits": [edit.to_record() for edit in result.context_edits]} if result.context_edits else {}),
        "seconds_in_model": round(cost.seconds_in_model, 3),
        "seconds_in_tools": round(cost.seconds_in_tools, 3),
        "seconds_own": round(cost.seconds_own, 3),
        "seconds_waiting": round(cost.seconds_waiting, 3),
        **(_weights(result) if whole else {}),
        "tool_calls": result.tool_calls,
        "tool_stats": {name: count.to_dict() for name, count in result.tool_counts.items()},
        **(_step_rewards(result.step_rewards) if result.step_rewards else {}),
        "tool_errors": [
            {"turn": error.turn, "tool": error.tool_name, "arguments": error.arguments, "error": error.error}
            for error in result.tool_errors
        ],
        "repaired_calls": list(result.repaired_calls),
        "calls": _calls(result.history, sampled, {id(result.history)}) if whole else {},
        "discarded": _discarded(result.history, sampled) if whole else [],
    }


def _step_rewards(rewards: Sequence[StepReward]) -> dict[str, Any]:
    return {"step_rewards": [{"turn": each.turn, "tool": each.tool_name, "reward": each.value} for each in rewards]}


def _turns(history: MessageHistory, sampled: Mapping[int, int]) -> dict[str, Any]:
    """Which completion is which message, and what was reported of each."""
    return {"message_turns": _message_turns(history.nodes(), sampled), "completions": _completions(history, sampled)}


def _completions(history: MessageHistory, sampled: Mapping[int, int]) -> dict[str, Any]:
    """What was reported of the completions, in the order of sampling, and how long each took. The spans of the samples
    say the same of their tokens, so that a change of either is noticed."""
    found = history.completions()
    tokens = [each.tokens for each in found if each.tokens is not None]
    tracked = len(tokens) == len(found)
    ranges = [(name, end - start) for each in tokens for name, start, end in each.versions or [(None, 0, len(each))]]
    reported = ((each.model, each.model_version) for each in found)
    return {
        "finish_reasons": [str(each.finish_reason) for each in found],
        "models": [[*names, len(list(same))] for names, same in groupby(reported)],
        "tokens": list(map(len, tokens)) if tracked else None,
        "seconds": [round(each.latency, 3) for each in found],
        "usage": [[each.usage.prompt_tokens, each.usage.completion_tokens] for each in found],
        "versions": [[name, sum(count for _, count in same)] for name, same in groupby(ranges, itemgetter(0))],
        "replaced_attempts": sorted(sampled[identity(each)] for each in history.replaced_attempts()),
    }


def _calls(history: MessageGraph, sampled: Mapping[int, int], seen: set[int]) -> dict[str, dict[str, Any]]:
    """What is known of each tool call beside its result, by its id: with what the parser repaired in it, and the
    conversation of a sub-agent."""
    calls: dict[str, dict[str, Any]] = {}
    for node in history.all_nodes():
        result = node.origin
        if isinstance(result, ChatResponse):
            for asked in result.message.tool_calls:
                if asked.status == "repaired":
                    calls.setdefault(asked.id, {})["repaired"] = asked.error or ""
        if not isinstance(result, ToolResponse) or result.message.tool_call_id is None:
            continue
        call = calls.setdefault(result.message.tool_call_id, {})
        call.setdefault("seconds", round(result.duration, 3))  # an edit copies nodes: the first one has the sub-agent
        if result.error is not None:
            call["failed"] = True
        if (chat := result.chat) is not None and id(chat) not in seen:
            seen.add(id(chat))
            call["subagent"] = {
                "messages": chat.to_openai("reasoning"),
                "message_turns": _message_turns(chat.nodes(), sampled),
                "calls": _calls(chat, sampled, seen),
                "discarded": _discarded(chat, sampled),
            }
    return calls


def _discarded(history: MessageGraph, sampled: Mapping[int, int]) -> list[dict[str, Any]]:
    if not history.discarded:  # of most rollouts
        return []
    branches = [history.nodes(), *(dropped.nodes for dropped in history.discarded)]
    places = {
        id(node): [number - 1, place] for number, nodes in enumerate(branches) for place, node in enumerate(nodes)
    }
    return [
        {
            "reason": dropped.reason,
            "at": dropped.at,
            "attempt": dropped.attempt,
            "edit": dropped.edit or _is_summary(dropped),
            "after": places.get(id(dropped.nodes[0].parent)),
            "messages": [node.message.to_openai("reasoning") for node in dropped.nodes],
            "message_turns": _message_turns(dropped.nodes, sampled),
        }
        for dropped in history.discarded
    ]


def _is_summary(dropped: Discarded) -> bool:
    """Whether it is where a summary was sampled that is in the conversation now."""
    origins = [node.origin for node in dropped.nodes if isinstance(node.origin, ChatResponse)]
    return not dropped.attempt and any(origin.purpose == "summary" for origin in origins)


def _message_turns(nodes: Iterable[Node], sampled: Mapping[int, int]) -> list[int | None]:
    """For each message the number of the completion, in the order of sampling, that was sampled as it in its place."""
    return [
        sampled.get(identity(node.origin)) if node.sampled and isinstance(node.origin, ChatResponse) else None
        for node in nodes
    ]


def _weights(result: AgentResult) -> dict[str, Any]:
    """Which versions of the weights sampled the rollout, in order, and how often an update interrupted a completion."""
    tokens = [response.tokens for response in result.history.completions() if response.tokens is not None]
    return {
        "policy_versions": list(dict.fromkeys(name for each in tokens for name, _, _ in each.versions)),
        "interrupts": sum(each.interrupts for each in tokens),
    }
