"""The items of an environment as rows of a trainer's dataset: the item travels in its row, as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from backends.errors import LachesisError
from lachesis.figures.item_keys import first_items, plain
from lachesis.runs.failures import UnusableSettings
from lachesis.runs.group_player import plays_trees
from lachesis.settings.checked import reject_unknown
from lachesis.settings.hooks import of_hook
from lachesis_train.trainers.agreement import SettingsDisagree

log = logging.getLogger(__name__)

ITEM_COLUMN: Final = "lachesis_item"
"""The column of a dataset that has an item as JSON text."""
NAME: Final = "lachesis"
"""What selects us in a row: SkyRL's `env_class`, verl's `agent_name`."""


_OF_SERVE: Final = {"credit": ("rollout",), "soft_length_limit": (None,), "item_sampling": ("uniform",)}
"""Settings that only `serve` carries out, and the value of each that leaves items, scores and advantages alone."""


def environment_of(
    env: Any,
    settings: Mapping[str, Any] | None,
    servers: Sequence[Any] | None = None,
    *,
    attempts: Sequence[str] = ("none",),
) -> Any:
    """The environment: `env` itself, or one of that class with its own defaults, these settings and these servers.

    `env` may also be the name or the place of a class, as `--env` of `lachesis train` takes it. `attempts` are the
    values of `env.discarded_attempts` that the caller carries out.

    Raises:
        SettingsDisagree: a setting of it would have no effect.
        SettingsError: it has no such setting, or there is no such environment.
        UnusableSettings: its rollouts branch, and these trainers credit whole rollouts.
    """
    made = _environment(env, settings, servers)
    if plays_trees(made):
        raise UnusableSettings(
            f"{made.run_name}: this trainer gives all turns of a rollout one advantage, so its rollouts cannot branch: "
            "unset tree_at, or use lachesis train"
        )
    for name, taken in {**_OF_SERVE, "discarded_attempts": attempts}.items():
        if (value := getattr(made.config, name)) not in taken:
            raise SettingsDisagree(
                f"{made.run_name}: env.{name} is {value}, which has no effect with this trainer: set it to "
                f"{taken[0] or 'null'}, or use lachesis train"
            )
    return made


def _environment(env: Any, settings: Mapping[str, Any] | None, servers: Sequence[Any] | None) -> Any:
    if isinstance(env, str):
        from lachesis.cli.environment_classes import environment_class

        env = environment_class(env)
    if not isinstance(env, type):
        if settings or servers:
            raise ValueError("settings are for a class of environments; this environment has its settings already")
        return env
    defaults, own_servers = env.config_init()  # type: ignore[attr-defined]
    reject_unknown(f"{env.__name__}: env.", settings or (), type(defaults).model_fields)
    chosen = {name: getattr(defaults, name) for name in defaults.model_fields_set}
    return env(type(defaults)(**{**chosen, **(settings or {})}), servers or own_servers)


def write_items(env: Any, path: str | Path, count: int, *, settings: Mapping[str, Any] | None = None) -> int:
    """Write the next `count` items of an environment, or those that are left, as JSON Lines.

    The rows are a dataset for SkyRL, verl and slime: `prompt` has the first messages, which are shown and measured
    there; the item itself is what is played, as JSON keeps it. A warning shows the first item that JSON changes.
    Returns the number of rows.

    Raises:
        LachesisError: there are no items, or one cannot become JSON.
    """
    played = environment_of(env, settings)

    async def draw() -> list[Any]:
        await of_hook(played.setup())
        try:
            return await first_items(played.get_next_item, count)
        finally:
            await of_hook(played.teardown())

    items = asyncio.run(draw())
    if not items:
        raise LachesisError(f"{played.run_name} has no items: get_next_item returned None")
    if changed := next(filter(_changes, items), None):
        log.warning(
            "%s: JSON changes its items (tuples and sets become lists, keys text, objects dicts). Rollouts get %.300r "
            "instead of %.300r; let get_next_item return plain data if the reward compares them",
            *(played.run_name, plain(changed), changed),
        )
    with Path(path).open("w") as file:
        for index, item in enumerate(items):
            text = json.dumps(plain(item))
            row = {
                "prompt": shown_messages(played, item),
                ITEM_COLUMN: text,
                "env_class": NAME,
                "agent_name": NAME,
                "data_source": played.run_name,
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
                "metadata": {ITEM_COLUMN: text},
            }
            file.write(json.dumps(row) + "\n")
    return len(items)


def _changes(item: Any) -> bool:
    """Whether JSON makes another value of it."""
    try:
        return bool(plain(item) != item)
    except ValueError:  # arrays have no single answer
        return True


def item_of(row: Mapping[str, Any] | None) -> Any:
    """The item of a row.

    Raises:
        LachesisError: it is not a row of `write_items`.
    """
    text = (row or {}).get(ITEM_COLUMN)
    if not isinstance(text, str):
        raise LachesisError(
            f"a row of the dataset has no column {ITEM_COLUMN!r} (its columns: {', '.join(row or ()) or 'none'}); make "
            "the file with lachesis_train.write_items"
        )
    return json.loads(text)


def shown_messages(env: Any, item: Any) -> list[dict[str, Any]]:
    """What tables show of an item: its first messages as text, unless only the session of a rollout knows them."""
    try:
        messages = list(env.initial_messages(item))
    except Exception:
        if env.scorer().session is None:
            raise
        return [{"role": "user", "content": "(the session of each rollout writes it)"}]
    return [{"role": said["role"], "content": _text(said["content"])} for said in messages]


def _text(content: Any) -> str:
    """What a trainer's tables show of a message. The model gets the message itself."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content or ())
