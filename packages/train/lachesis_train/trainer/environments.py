"""`environments:` of the settings file: several environments in one run, each with its share of the batches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from backends.errors import SettingsError
from lachesis.settings.checked import reject_unknown, validate_settings

OF_LOSS: Final = ("loss", "clip_low", "clip_high", "delta_low", "delta_high", "max_importance_ratio")
"""Settings of `training:` that an environment may have of its own, beside the items of its warm start."""
OF_RUN: Final = (
    *("rollout_server_url", "batch_size", "total_steps", "tokenizer_name", "spool_path", "data_dir_to_save_evals"),
    *("wandb_name", "inference_weight", "min_batch_allocation"),
)
"""Settings of `env:` that an environment may not: the run has one of each, or sets them from name and weight."""
TAKEN: Final = frozenset(
    {"api", "trainer", "lachesis", "staleness", "completions", "outcome", "skipped", "sampling", "clip_ratio"}
)
"""Names of other processes, and of other figures."""


class RunEnvironment(BaseModel):
    """One entry."""

    model_config = ConfigDict(extra="forbid")

    env: str = Field(min_length=1, description="As after --env.")
    name: str = Field(pattern=r"^[\w.-]*[\w-][\w.-]*$", description="Of its process, folders and figures.")
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="Its share, relative to the others.")
    settings: dict[str, Any] = Field(default={}, description="Its own settings of env:.")
    training: dict[str, Any] = Field(default={}, description="Its own loss, and warm_start.")


def read_environments(given: Any) -> list[RunEnvironment]:
    """The entries, each with a name of its own.

    Raises:
        SettingsError: names the entry, the setting and the problem.
    """
    if not isinstance(given, list) or not all(isinstance(entry, dict) for entry in given):
        raise SettingsError("environments: must be a list of entries such as {env: tool_call, weight: 2}")
    found: dict[str, RunEnvironment] = {}
    for at, entry in enumerate(given):
        values = {"name": _free(str(entry.get("env")), found), **entry}
        read = validate_settings(RunEnvironment, values, f"environments.{at}")
        reject_unknown(f"environments.{at}.training.", read.training, (*OF_LOSS, "warm_start"))
        if of_run := [name for name in read.settings if name in OF_RUN]:
            raise SettingsError(f"environments.{at}.settings.{of_run[0]}: it is one for the whole run, so remove it")
        if read.name in TAKEN or read.name in found:
            raise SettingsError(f"environments.{at}.name: {read.name} is the name of something else; choose another")
        found[read.name] = read
    return list(found.values())


def chosen_environments(entries: Sequence[RunEnvironment], names: Sequence[str]) -> list[RunEnvironment]:
    """The entries that are named by `env` or `name`, all without names; names without an entry become one."""
    chosen = [entry for entry in entries if not names or {entry.env, entry.name} & {*names}]
    known = {entry.name: entry for entry in entries}
    for name in names:
        if not any(name in (entry.env, entry.name) for entry in entries):
            own = known[_free(name, known)] = RunEnvironment(env=name, name=_free(name, known))
            chosen.append(own)
    return chosen


def _free(env: str, taken: Mapping[str, RunEnvironment]) -> str:
    """The name of an environment without one: that of its class or plug-in, numbered where there are several."""
    name, number = re.sub(r"[^\w.-]+", "-", env.rpartition(":")[2]), 1
    while (numbered := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return numbered
