"""The exports that come with Lachesis: the three lines of Hermes Agent's trajectory format, and token samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from lachesis.trajectories.entries import ConvertedEntry, to_batch_entry, to_dataset_entry, to_trajectory_entry
from lachesis.trajectories.errors import MessageError
from lachesis.trajectories.exports import (
    BRANCHES_OMITTED,
    NOT_SAMPLED,
    ExportLine,
    GroupRecord,
    LeftOut,
    RolloutRecord,
    has_other_branches,
    not_sampled,
    rollout_samples,
    stored_messages,
)
from lachesis.trajectories.sharegpt import SystemTurn, WarningKind

NO_ANSWER = "no answer by the model"
"""Why a rollout has no line where the model said nothing."""


def trajectory(group: GroupRecord, *, system: SystemTurn = "generated") -> Iterator[ExportLine | LeftOut]:
    """A line for each rollout with an answer, as `process` writes them to `trajectory_samples.jsonl`."""
    for rollout, messages in _answered(group):
        if messages is None:
            yield LeftOut(rollout["rollout_id"], NO_ANSWER)
            continue
        yield _converted(
            to_trajectory_entry,
            rollout,
            messages,
            group["tools"],
            model=group["model"],
            completed=is_complete(rollout, messages),
            timestamp=group["timestamp"],
            system=system,
            **_provenance(group, rollout),
        )


class Batch:
    """The lines of a batch run. Where the group has no `prompt_index`, it is its place in the file, from 0."""

    def __init__(self, toolsets: Sequence[str] = (), system: SystemTurn = "generated") -> None:
        self.toolsets = toolsets
        self.system = system
        self.numbers = count()

    def __call__(self, group: GroupRecord) -> Iterator[ExportLine | LeftOut]:
        place = next(self.numbers)
        for rollout, messages in _answered(group):
            if messages is None:
                yield LeftOut(rollout["rollout_id"], NO_ANSWER)
                continue
            completed = is_complete(rollout, messages)
            yield _converted(
                to_batch_entry,
                rollout,
                messages,
                group["tools"],
                prompt_index=group.get("prompt_index", place),
                metadata=_provenance(group, rollout),
                completed=completed,
                partial=not completed,
                api_calls=rollout["api_calls"],
                toolsets_used=self.toolsets or group.get("toolsets") or (),
                tool_stats=rollout["tool_stats"],
                all_tools=[tool["function"]["name"] for tool in group["tools"]],
                system=self.system,
            )


def dataset(
    group: GroupRecord, *, source: str = "hermes-agent", min_reward: float | None = None
) -> Iterator[ExportLine | LeftOut]:
    """`{conversations, tools, source}` of the completed rollouts, with `min_reward` of those that reach it."""
    for rollout in group["rollouts"]:
        reward = rollout["reward"]
        if not rollout["completed"]:
            yield LeftOut(rollout["rollout_id"], "not completed")
            continue
        if min_reward is not None and (reward is None or reward < min_reward):
            yield LeftOut(rollout["rollout_id"], f"reward below {min_reward:g}")
            continue
        messages = stored_messages(group, rollout)
        line = _converted(to_dataset_entry, rollout, messages, group["tools"], source=source)
        if isinstance(line, ExportLine) and str(WarningKind.ARGUMENTS_REPLACED) in line.warnings:
            yield LeftOut(rollout["rollout_id"], "arguments that are not a JSON object")
        else:
            yield line


def token_samples(group: GroupRecord) -> Iterator[ExportLine | LeftOut]:
    """A line for each token sample, with the reward of its rollout, which says nothing about a discarded attempt: None.
    `lachesis verify` reads the file."""
    for rollout in group["rollouts"]:
        found = rollout_samples(group, rollout)
        if not found:
            reason = "not scored" if rollout["place"] is None else "no token samples"
            yield LeftOut(rollout["rollout_id"], reason)
        for sample in found:
            reward = None if sample.get("discarded") else rollout["reward"]
            yield ExportLine({**sample, **_of_group(group), "reward": reward}, (rollout["rollout_id"],))


def _answered(group: GroupRecord) -> Iterable[tuple[RolloutRecord, list[dict[str, Any]] | None]]:
    """Each rollout with its messages; None where the model said nothing."""
    for rollout in group["rollouts"]:
        messages = stored_messages(group, rollout)
        yield rollout, messages if any(message["role"] == "assistant" for message in messages) else None


def is_complete(rollout: RolloutRecord, messages: Sequence[Mapping[str, Any]]) -> bool:
    """An agent program need not send the results of its last calls; anywhere else they are missing."""
    return bool(rollout["completed"]) and ("program" in rollout or not messages[-1].get("tool_calls"))


def _provenance(group: GroupRecord, rollout: RolloutRecord) -> dict[str, Any]:
    return _of_group(group) | {key: rollout[key] for key in ("rollout_id", "outcome", "reward")}


def _of_group(group: GroupRecord) -> dict[str, Any]:
    """Which run a group is of, and whether it was an evaluation. Older records do not say."""
    return {key: group[key] for key in ("run", "evaluation", "environment", "item_key") if key in group}


def _converted(
    convert: Callable[..., ConvertedEntry], rollout: RolloutRecord, *conversation: Any, **settings: Any
) -> ExportLine | LeftOut:
    """The line of a rollout. What agent programs and foreign environments send may break the rules of the format."""
    try:
        converted = convert(*conversation, of_program="program" in rollout, **settings)
    except MessageError as error:
        return LeftOut(rollout["rollout_id"], f"no valid conversation ({type(error).__name__})")
    warnings = [str(warning.kind) for warning in converted.warnings]
    warnings += [NOT_SAMPLED] if not_sampled(rollout, conversation[0]) else []
    warnings += [BRANCHES_OMITTED] if has_other_branches(rollout) else []
    return ExportLine(converted.entry, (rollout["rollout_id"],), tuple(warnings))
