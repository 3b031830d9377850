"""The records of groups and rollouts: plain dicts, complete without the process that made them.

A group is one JSON object in the shape of Atropos' groups (`scores`, `messages`, ... of the scored rollouts, side by
side), plus `rollouts`: what happened in every rollout, including those that were left out. `tokens` and `masks` are
null, since a rollout may have several samples: Phase 2 has them under `samples`, Phase 1 has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any

from lachesis.agent.outcome import Outcome
from lachesis.agent.result import AgentResult
from lachesis.agent.rollout import Rollout
from lachesis.runs.group_player import PlayedGroup
from lachesis.runs.item_keys import plain
from lachesis.trajectories import ChatResponse, MessageHistory, ToolResponse
from lachesis.trajectories.export_lines import NO_ANSWER, ExportLine, trajectory
from lachesis.trajectories.images import image_data
from lachesis.trajectories.nodes import Discarded, Node
from lachesis.trajectories.sharegpt import SystemTurn

log = logging.getLogger(__name__)

SCHEMA = "lachesis.group/1"

_ATROPOS_NULLS = (
    "tokens",
    "masks",
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "generation_params",
    "group_overrides",
    "overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)


def group_record(
    group: PlayedGroup, *, environment: str, model: str, with_samples: bool = True, of_unscored: bool = False
) -> dict[str, Any]:
    """One group, ready for JSON. CPU-bound where there are samples.

    `of_unscored`: with the samples of rollouts without a score too, for runs that score nothing.
    """
    scored = [rollout for rollout in group.rollouts if rollout.reward is not None and rollout.result is not None]
    places = {rollout.rollout_id: place for place, rollout in enumerate(scored)}
    return {
        "schema": SCHEMA,
        "environment": environment,
        "item_key": group.item_key,
        "item": plain(group.item),
        "model": model,
        "timestamp": datetime.now().isoformat(),
        "tools": list(group.tools),
        **({} if group.toolsets is None else {"toolsets": list(group.toolsets)}),
        "scores": [rollout.reward for rollout in scored],
        "messages": [_messages(rollout.result) for rollout in scored],
        **dict.fromkeys(_ATROPOS_NULLS),
        **_extras(group, scored),
        "samples": _samples(list(group.rollouts) if of_unscored else scored) if with_samples else [],
        "rollouts": [rollout_record(rollout, places.get(rollout.rollout_id)) for rollout in group.rollouts],
        **({} if group.beside is None else {"beside": _beside(group.beside)}),
    }


def _samples(scored: list[Rollout]) -> list[dict[str, Any]]:
    """The records of the samples. The data of an image is in the first sample that has it."""
    found = [sample for rollout in scored for sample in rollout.samples]
    records = [sample.to_record() for sample in found]
    for record, data in zip(records, image_data(sample.images for sample in found) or (), strict=False):
        record.pop("image_data", None)
        record |= {"image_data": data} if data else {}
    return records


def _beside(beside: Rollout) -> dict[str, Any]:
    """The record of what was sampled beside the rollouts."""
    agent = _agent_record(beside.result)
    kept = ("completion_tokens", "uncounted_requests", "discarded")
    return {
        "reason": beside.left_out,
        "completions": agent["turns"],
        "lost_completion_tokens": beside.lost_completion_tokens,
        **{name: agent[name] for name in kept},
        "messages": _messages(beside.result),
    }


def _extras(group: PlayedGroup, scored: list[Rollout]) -> dict[str, Any]:
    """Fields that an environment which collects its own groups gave them."""
    given = [group.extras.get(rollout.rollout_id, {}) for rollout in scored]
    lists = {
        name: [plain(extras.get(name)) for extras in given] for name in {name for extras in given for name in extras}
    }
    return {**lists, **({"group_overrides": plain(group.group_overrides)} if group.group_overrides else {})}


def rollout_record(rollout: Rollout, place: int | None) -> dict[str, Any]:
    """The record of one rollout. `place` is its index in the group's `scores`; None keeps its messages here."""
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
        "attempts": rollout.attempts,
        "retried_after": list(rollout.retried_after),
        "lost_completion_tokens": rollout.lost_completion_tokens,
        "seconds": round(rollout.seconds, 3),
        "metrics": dict(rollout.metrics),
        **({"reward_weights": dict(rollout.reward_weights)} if rollout.reward_weights else {}),
        "reward_calls": [call.to_record() for call in rollout.reward_calls],
        **_agent_record(result),
    }
    if place is None:
        record["messages"] = _messages(result)
    return record


def _messages(result: AgentResult | None) -> list[dict[str, Any]]:
    """The conversation as it was, even if a reward has edited `result.messages`."""
    return result.recorded_messages if result is not None else []


def _agent_record(result: AgentResult | None) -> dict[str, Any]:
    if result is None:
        return {"turns": 0, "api_calls": 0, "tool_calls": 0, "tool_stats": {}, "tool_errors": [], "discarded": []}
    sampled = {_identity(response): turn for turn, response in enumerate(result.history.completions())}
    return {
        **({"program": result.program.to_record()} if result.program is not None else {}),
        **({"verifier": plain(result.verifier)} if result.verifier is not None else {}),
        **({"refusal": True} if result.refusal else {}),
        "turns": result.turns_used,
        "api_calls": result.api_calls,
        "prompt_tokens": result.tokens.prompt_tokens,
        "cached_tokens": result.tokens.cached_tokens,
        "completion_tokens": result.tokens.completion_tokens,
        "uncounted_requests": result.tokens.uncounted_requests,
        "message_turns": _message_turns(result.history.nodes(), sampled),
        "completions": _completions(result.history, sampled),
        **({"context_edits": [edit.to_record() for edit in result.context_edits]} if result.context_edits else {}),
        "seconds_in_model": round(result.seconds_in_model, 3),
        "seconds_in_tools": round(result.seconds_in_tools, 3),
        "seconds_own": round(result.seconds_own, 3),
        "seconds_waiting": round(result.seconds_waiting, 3),
        **_weights(result),
        "tool_calls": result.tool_calls,
        "tool_stats": {name: count.to_dict() for name, count in result.tool_counts.items()},
        "tool_errors": [
            {"turn": error.turn, "tool": error.tool_name, "arguments": error.arguments, "error": error.error}
            for error in result.tool_errors
        ],
        "repaired_calls": list(result.repaired_calls),
        "calls": _calls(result.history, sampled, {id(result.history)}),
        "discarded": _discarded(result.history, sampled),
    }


def _completions(history: MessageHistory, sampled: Mapping[int, int]) -> dict[str, Any]:
    """What was reported of the completions, in the order of sampling. The spans of the samples say the same, so that a
    change of either is noticed."""
    found = history.completions()
    tokens = [each.tokens for each in found if each.tokens is not None]
    tracked = len(tokens) == len(found)
    ranges = [(name, end - start) for each in tokens for name, start, end in each.versions or [(None, 0, len(each))]]
    reported = ((each.model, each.model_version) for each in found)
    return {
        "finish_reasons": [str(each.finish_reason) for each in found],
        "models": [[*names, len(list(same))] for names, same in groupby(reported)],
        "tokens": list(map(len, tokens)) if tracked else None,
        "versions": [[name, sum(count for _, count in same)] for name, same in groupby(ranges, itemgetter(0))],
        "replaced_attempts": sorted(sampled[_identity(each)] for each in history.replaced_attempts()),
    }


def _calls(history: MessageHistory, sampled: Mapping[int, int], seen: set[int]) -> dict[str, dict[str, Any]]:
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


def _discarded(history: MessageHistory, sampled: Mapping[int, int]) -> list[dict[str, Any]]:
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
        sampled.get(_identity(node.origin)) if node.sampled and isinstance(node.origin, ChatResponse) else None
        for node in nodes
    ]


def _identity(response: ChatResponse) -> int:
    """What `MessageHistory.completions` tells completions apart by."""
    return id(response if response.tokens is None else response.tokens.after)


def _weights(result: AgentResult) -> dict[str, Any]:
    """Which versions of the weights sampled the rollout, in order, and how often an update interrupted a completion."""
    tokens = [response.tokens for response in result.history.completions() if response.tokens is not None]
    return {
        "policy_versions": list(dict.fromkeys(name for each in tokens for name, _, _ in each.versions)),
        "interrupts": sum(each.interrupts for each in tokens),
    }


def trajectories_of(group: Mapping[str, Any], *, system: SystemTurn) -> list[dict[str, Any]]:
    """The ShareGPT trajectories of a group; rollouts without a single answer have none."""
    entries = []
    for line in trajectory(group, system=system):
        if isinstance(line, ExportLine):
            entries.append(dict(line.content))
        elif line.reason != NO_ANSWER:
            log.warning("rollout %s has no trajectory: %s", line.rollout_id, line.reason)
    return entries
