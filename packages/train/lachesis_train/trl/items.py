"""The items of an environment as a dataset of TRL: a prompt names its item, and the item itself stays here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from backends.errors import LachesisError
from lachesis.figures.item_keys import first_items
from lachesis_messages.responses import ChatResponse
from lachesis_train.trainers.items import shown_messages

if TYPE_CHECKING:
    from datasets import Dataset

    from lachesis.loop.result import AgentResult

ITEM: Final = "item"
"""The field of a prompt's messages that has the key of its item."""


class DrawnKeys(dict[str, Any]):
    """The items that were drawn, by their keys, in the order of drawing."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self._env = env
        self._keys = env.item_keys()

    async def draw(self, count: int) -> Dataset:
        """A dataset of the next `count` items, or of those that are left."""
        if count < 1:
            raise ValueError(f"a dataset of {count} items; draw at least one")
        return self._dataset(await first_items(self._env.get_next_item, count))

    async def draw_for_evaluation(self) -> Dataset:
        return self._dataset(list(await self._env.get_eval_items()))

    def _dataset(self, items: Sequence[Any]) -> Dataset:
        from datasets import Dataset

        if not items:
            raise LachesisError(f"{self._env.run_name} has no more items: get_next_item returned None")
        rows = []
        for item in items:
            key = self._keys.key(item)
            self[key] = item
            rows.append([{**said, ITEM: key} for said in shown_messages(self._env, item)])
        return Dataset.from_dict({"prompt": rows})

    def keys_of(self, prompts: Sequence[Any]) -> list[str]:
        """The keys of the items of these prompts.

        Raises:
            LachesisError: a prompt that is not of a dataset that was drawn here.
        """
        keys = [str(prompt[-1].get(ITEM)) if isinstance(prompt, list) and prompt else "" for prompt in prompts]
        for key, prompt in zip(keys, prompts, strict=True):
            if key not in self:
                raise LachesisError(
                    f"the prompt {str(prompt)[:200]!r} names no item that was drawn here; train and evaluate on "
                    "LachesisRollouts.dataset() and eval_dataset() of the same object"
                )
        return keys


def parted(result: AgentResult) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages of a rollout before the first one that was sampled, and the rest."""
    messages = result.recorded_messages
    sampled = (at for at, node in enumerate(result.history.nodes()) if isinstance(node.origin, ChatResponse))
    start = next(sampled, len(messages))
    return messages[:start], messages[start:]
