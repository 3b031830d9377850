"""The items of evaluations, kept out of the stream of training."""

from __future__ import annotations

from typing import Any

from backends.text import counted
from lachesis.figures.item_keys import item_digest, or_none
from lachesis.runs.environment import Environment
from lachesis.runs.failures import UnusableSettings
from lachesis.runs.pipeline import NextItem
from lachesis.settings.hooks import of_hook


async def without_eval_items(env: Environment) -> NextItem:
    """`get_next_item` without the items that `get_eval_items` has taken from it, also where it begins again. A stream
    that has no others gives them all the same, and this is said.

    Raises:
        UnusableSettings: the stream ends with them.
    """
    wanted = env.config.eval_items
    items = await of_hook(env.get_eval_items())
    if len(items) < wanted:
        raise UnusableSettings(
            f"evaluation would take all {counted(len(items), 'item')} (env.eval_items is {wanted}) and leave none to "
            "train on: write get_eval_items, or set --env.eval_items lower or --env.steps_per_eval 0"
        )
    held_out = set(map(item_digest, items))

    async def next_item() -> Any:
        for _ in range(2 * len(items) + 100 if held_out else 0):
            if (item := await or_none(env.get_next_item)) is None or item_digest(item) not in held_out:
                return item
        if held_out:
            held_out.clear()
            env.console.print(
                "the run trains on the items of its evaluations, because get_next_item has no others: write "
                "get_eval_items, or set --env.eval_items lower",
                style="yellow",
                soft_wrap=True,
            )
        return await or_none(env.get_next_item)

    return next_item
