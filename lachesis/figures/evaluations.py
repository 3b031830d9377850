"""The items of `eval`, and the figures of the table that it ends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from backends.text import counted
from lachesis.figures.intervals import mean_over_items
from lachesis.figures.item_keys import plain
from lachesis.figures.summary import Summary

MAX_CATEGORIES = 20
FEW_ITEMS = 20

Row = tuple[str, str]


class EvaluatedItems:
    """The items of an evaluation.

    Args:
        digests: of each.
        category: the field of an item, or of its `metadata`, that is its category.
    """

    def __init__(self, digests: Sequence[str], category: str) -> None:
        self.digests = digests
        self._category = category

    def about(self, item: Any) -> dict[str, str]:
        """The category of a sample's item, if its record has one."""
        item = plain(item)
        for holder in (item, item.get("metadata")) if isinstance(item, dict) else ():
            if isinstance(holder, dict) and isinstance(found := holder.get(self._category), str | int | float):
                return {"category": str(found)}
        return {}


def invalid(summary: Summary) -> str:
    """How many samples have no score, and why."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(summary.exclusion.unscored.items()))
    without = summary.rollouts - summary.scored
    share = f" ({100 * without / summary.rollouts:.1f} %): {kinds}" if without else ""
    return f"{without} of {summary.rollouts}{share}"


def tokens(summary: Summary) -> str:
    """Completion tokens."""
    return "not counted by the server" if summary.uncounted_requests else f"{summary.completion_tokens:,}"


def figure_rows(summary: Summary) -> Iterator[Row]:
    """The figures of an evaluation, for the table at its end."""
    without = summary.rollouts - summary.scored
    if not summary.scored:
        yield "mean reward", "undefined: no rollout has a score"
        yield "invalid", invalid(summary)
        return
    for name, (mean, worst, best) in summary.figures().items():
        cases = f"; {worst:.3f} to {best:.3f} if the invalid ones had scores" if without else ""
        yield "mean reward" if name == "avg_reward" else name, f"{mean}{cases}"
    if without:
        yield "invalid", invalid(summary)
    from lachesis.figures.passes import samples_needed

    # From a few items nobody can tell how many more it takes.
    more = samples_needed(list(summary.scores.values())) if summary.items >= FEW_ITEMS else None
    if more is not None:
        yield (
            "for ±1 point",
            f"{counted(more, 'more rollout')} on new items" if more else "there are enough rollouts",
        )
    for name, scores in list(summary.categories.items())[:MAX_CATEGORIES]:
        yield f"mean of {name}", f"{mean_over_items(scores)} ({counted(len(scores), 'item')})"
    if (hidden := len(summary.categories) - MAX_CATEGORIES) > 0:
        yield "categories", f"{hidden} more; see metrics.json"
