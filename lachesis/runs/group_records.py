"""The records of groups: plain dicts, complete without the process that made them.

A group is one JSON object in the shape of Atropos' groups (`scores`, `messages`, ... of the scored rollouts, side by
side), plus `rollouts`: what happened in every rollout, including those that were left out. `tokens` and `masks` are
null, since a rollout may have several samples: Phase 2 has them under `samples`, Phase 1 has none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from lachesis.figures.item_keys import plain
from lachesis.figures.rollout_records import agent_record, lost_record, recorded_messages, rollout_record
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis_messages.records.export_lines import NO_ANSWER, ExportLine, trajectory
from lachesis_messages.records.sharegpt import SystemTurn

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
    if any(rollout.tree is not None for rollout in group.rollouts):
        from lachesis.loop.trees import scored_first  # few groups have trees

        group = replace(group, rollouts=scored_first(group.rollouts))
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
        "messages": [recorded_messages(rollout.result) for rollout in scored],
        **dict.fromkeys(_ATROPOS_NULLS),
        **_extras(group, scored),
        "samples": _samples(list(group.rollouts) if of_unscored else scored) if with_samples else [],
        "rollouts": [rollout_record(rollout, places.get(rollout.rollout_id)) for rollout in group.rollouts],
        **({} if group.beside is None else {"beside": _beside(group.beside)}),
    }


def _samples(scored: list[Rollout]) -> list[dict[str, Any]]:
    """The records of the samples. The data of an image is in the first sample that has it."""
    found = [sample for rollout in scored for sample in rollout.samples]
    if not found:
        return []
    from lachesis_messages.images import with_data_once

    return with_data_once(sample.to_record() for sample in found)


def _beside(beside: Rollout) -> dict[str, Any]:
    """The record of completions outside the rollouts."""
    agent = agent_record(beside.result)
    kept = ("prompt_tokens", "cached_tokens", "completion_tokens", "uncounted_requests", "discarded")
    return {
        "reason": beside.left_out,
        "completions": agent["turns"],
        **lost_record(beside),
        **{name: agent[name] for name in kept},
        "messages": recorded_messages(beside.result),
    }


def _extras(group: PlayedGroup, scored: list[Rollout]) -> dict[str, Any]:
    """Fields that an environment which collects its own groups gave them."""
    given = [group.extras.get(rollout.rollout_id, {}) for rollout in scored]
    lists = {
        name: [plain(extras.get(name)) for extras in given] for name in {name for extras in given for name in extras}
    }
    return {**lists, **({"group_overrides": plain(group.group_overrides)} if group.group_overrides else {})}


def trajectories_of(group: Mapping[str, Any], *, system: SystemTurn) -> list[dict[str, Any]]:
    """The ShareGPT trajectories of a group; rollouts without a single answer have none."""
    entries = []
    for line in trajectory(group, system=system):
        if isinstance(line, ExportLine):
            entries.append(dict(line.content))
        elif line.reason != NO_ANSWER:
            log.warning("rollout %s has no trajectory: %s", line.rollout_id, line.reason)
    return entries
