"""The exports that come with Lachesis: the three lines of Hermes Agent's trajectory format, and token samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any

from lachesis_messages.markup import EMPTY_THINK
from lachesis_messages.records.dataset_entries import to_batch_entry, to_dataset_entry
from lachesis_messages.records.digests import copies_of
from lachesis_messages.records.export_lines import (
    Chat,
    ExportLine,
    LeftOutRollout,
    Unsuitable,
    _answered,
    _written,
    check_wanted,
    of_rollouts,
)
from lachesis_messages.records.groups import GroupRecord, rollout_samples
from lachesis_messages.records.sharegpt import SystemTurn, WarningKind


def dataset_line(
    chat: Chat, *, source: str = "hermes-agent", min_reward: float | None = None, completed_only: bool = True
) -> dict[str, Any]:
    """`{conversations, tools, source}`."""
    check_wanted(chat, min_reward, completed_only)
    converted = to_dataset_entry(
        _answered(chat),
        chat.tools,
        completed=chat.facts.get("completed", True),
        source=source,
        of_program=chat.of_program,
    )
    if any(warning.kind is WarningKind.ARGUMENTS_REPLACED for warning in converted.warnings):
        raise Unsuitable("arguments that are not a JSON object")
    return _written(chat, converted)


dataset = of_rollouts(dataset_line)


class BatchExport:
    """The lines of a batch run. Where the group has no `prompt_index`, it is its place in the file, from 0.

    Every tool that was offered or is one of `all_tools` has a column. A sample without any reasoning is left out, as a
    batch run does, unless `keep_without_reasoning`.
    """

    all_tools: Collection[str] = ()
    """`lachesis export` names the built-in tools here."""

    def __init__(
        self, toolsets: Sequence[str] = (), system: SystemTurn = "generated", keep_without_reasoning: bool = False
    ) -> None:
        self.toolsets = toolsets
        self.system = system
        self.keep_without_reasoning = keep_without_reasoning
        self.numbers = count()

    def __call__(self, group: GroupRecord) -> Iterator[ExportLine | LeftOutRollout]:
        place = next(self.numbers)
        rollouts = {rollout["rollout_id"]: rollout for rollout in group["rollouts"]}

        def line(chat: Chat) -> dict[str, Any]:
            metadata = {name: value for name, value in chat.facts.items() if name not in ("model", "timestamp")}
            completed, rollout = metadata.pop("completed"), rollouts[chat.facts["rollout_id"]]
            names = dict.fromkeys([*self.all_tools, *(tool["function"]["name"] for tool in chat.tools)])
            entry = _written(
                chat,
                to_batch_entry(
                    _answered(chat),
                    chat.tools,
                    prompt_index=group.get("prompt_index", place),
                    metadata=metadata,
                    completed=completed,
                    of_program=chat.of_program,
                    partial=not completed,
                    api_calls=rollout["api_calls"],
                    toolsets_used=self.toolsets or group.get("toolsets") or (),
                    tool_stats={name: row for name, row in rollout["tool_stats"].items() if name in names},
                    all_tools=names,
                    system=self.system,
                ),
            )
            said = [turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt"]
            if not self.keep_without_reasoning and all(value.startswith(EMPTY_THINK) for value in said):
                raise Unsuitable("no reasoning")
            return entry

        yield from of_rollouts(line)(group)


def token_samples(group: GroupRecord) -> Iterator[ExportLine | LeftOutRollout]:
    """A line for each token sample, with the reward of its rollout, which says nothing about a discarded attempt: None.
    `lachesis verify` reads the file."""
    own = {name: group[name] for name in ("run", "evaluation", "environment", "item_key") if name in group}
    copied = copies_of(group)
    for rollout in group["rollouts"]:
        found = rollout_samples(group, rollout)
        if not found:
            reason = "not scored" if rollout["place"] is None else "no token samples"
            yield LeftOutRollout(rollout["rollout_id"], reason)
        for sample in found:
            reward = None if sample.get("discarded") else rollout["reward"]
            yield ExportLine(copied({**sample, **own, "reward": reward}), (rollout["rollout_id"],))
