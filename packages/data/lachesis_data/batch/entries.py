"""The line of a batch file, from the record of its group, and why a sample has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lachesis_data.batch.rows import IMAGE_FIELDS
from lachesis_messages.errors import MessageError
from lachesis_messages.markup import EMPTY_THINK
from lachesis_messages.records.dataset_entries import to_batch_entry
from lachesis_messages.records.groups import is_complete, stored_messages
from lachesis_messages.records.sharegpt import SystemTurn

NO_REASONING = "no reasoning"
NO_ANSWER = "no answer by the model"


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """The fields that all lines of a run have in common.

    Args:
        all_tools: names of all tools, each of which has a column in every line.
        prompt_field: the field of a row that is in the conversation and not in `metadata`.
        with_reward: an environment scores the samples: lines have `reward`.
        keep_without_reasoning: samples without any reasoning are lines as well.
    """

    all_tools: Iterable[str]
    system: SystemTurn
    prompt_field: str
    with_reward: bool
    keep_without_reasoning: bool

    def entry(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The line of a group of one rollout; the fields are those of `to_batch_entry`.

        Calls of tools that do not exist are in the groups file only: a column for each invented name would give every
        line another schema.

        Raises:
            MessageError: the conversation has no ShareGPT form.
        """
        (rollout,) = record["rollouts"]
        messages = stored_messages(record, rollout)
        completed = is_complete(rollout, messages)
        known = dict.fromkeys(self.all_tools)
        converted = to_batch_entry(
            messages,
            record["tools"],
            prompt_index=record["prompt_index"],
            metadata=self._metadata(record["item"]),
            completed=completed,
            of_program="program" in rollout,
            partial=not completed,
            api_calls=rollout["api_calls"],
            toolsets_used=record.get("toolsets") or (),
            tool_stats={name: stats for name, stats in rollout["tool_stats"].items() if name in known},
            all_tools=known,
            system=self.system,
            **({"reward": rollout["reward"]} if self.with_reward else {}),
        )
        return {**converted.entry, "partial": not converted.entry["completed"]}

    def _metadata(self, item: Any) -> dict[str, Any]:
        """The fields of a row that are nowhere else in the line, merged with those of its `metadata`."""
        if not isinstance(item, Mapping):
            return {"item": item}
        elsewhere = {"messages", "metadata", "cwd", *IMAGE_FIELDS}
        if item.get("messages") is None or item.get(self.prompt_field) is None:
            elsewhere.add(self.prompt_field)
        given = item.get("metadata")
        own = given if isinstance(given, Mapping) else {} if given is None else {"metadata": given}
        return {**{name: value for name, value in item.items() if name not in elsewhere}, **own}

    def entry_or_reason(self, record: dict[str, Any]) -> dict[str, Any] | str:
        """The line of a sample; or why it has none: `NO_REASONING`, `NO_ANSWER`, or what failed.

        Sets `reasoning` of the record: its assistant turns with reasoning, and all of them.
        """
        (rollout,) = record["rollouts"]
        if rollout["outcome"] == "infra_error" or rollout["traceback"] is not None:
            return str(rollout["reason"])
        try:
            entry = self.entry(record)
        except MessageError as error:
            return f"no valid conversation: {error}"
        row = record["item"] if isinstance(record["item"], Mapping) and not rollout.get("context_edits") else {}
        given = sum(each.get("role") == "assistant" for each in row.get("messages") or ())  # turns of the row
        sampled = [turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt"][given:]
        if not rollout["turns"] or not sampled:
            return str(rollout["reason"]) if rollout["outcome"] == "refused" else NO_ANSWER
        with_reasoning = sum(not value.startswith(EMPTY_THINK) for value in sampled)
        record["reasoning"] = [with_reasoning, len(sampled)]
        return entry if with_reasoning or self.keep_without_reasoning else NO_REASONING
