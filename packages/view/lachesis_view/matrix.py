"""The items of a run by their samples, beside those of a run that it is compared with, and why samples fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import orjson

from lachesis.figures.intervals import Mean
from lachesis.figures.passes import PASS, pass_at_k
from lachesis.figures.tool_failures import ToolFailures
from lachesis_view.index import Index
from lachesis_view.pairs import Difference, paired
from lachesis_view.rows import REASONS

ITEMS = 50
"""Of a page."""
SAMPLES = 64
"""Of an item that are shown."""
ORDERS = {
    "changed": "abs(mean - other) DESC NULLS LAST, mean",
    "fell": "mean - other NULLS LAST",
    "rose": "mean - other DESC NULLS LAST",
    "worst": "mean NULLS FIRST",
    "mixed": "high - low DESC NULLS LAST, mean",
    "first": "first",
    "latest": "latest DESC",
}
"""By the name in an address. The first three need a run to compare with."""
_MEANS = (
    "SELECT item, avg(reward) AS mean, min(reward) AS low, max(reward) AS high, count(reward) AS scored, "
    f"count(*) FILTER (WHERE reward >= {PASS}) AS passed, min(id) AS first, max(id) AS latest "
    "FROM rollouts WHERE run = ? GROUP BY item"
)
_SAMPLES = (
    "SELECT number, n, item, title, reward, outcome, cause, turns, calls, errors, tools, why FROM rollouts "
    "WHERE run = ? AND item IN ({}) ORDER BY number < 0, number, n"
)


def orders(against: str, trained: bool, scored: bool = True) -> list[str]:
    """The names of the orders that a page offers, its own one first; where nothing is `scored`, none is by reward."""
    names = list(ORDERS)[0 if against else 3 if scored else 5 :]
    return sorted(names, key=lambda name: name != "latest") if trained else names


def matrix(index: Index, run: str, against: str = "", order: str = "worst", page: int = 1) -> dict[str, Any]:
    """One page of the items of a run.

    `rows` have the item's key and title, the numbers of its groups, the samples of both runs, the `change` of the mean
    reward from `against`, `why` it fails in words, and what it `did`: its turns, calls and failed calls, None where
    they are unknown; `total` counts all items. Asks for no more than the page shows: a run may have 10,000 groups.
    """
    total = index.ask("SELECT count(DISTINCT item) FROM rollouts WHERE run = ?", run)[0][0]
    items = index.ask(
        f"SELECT mine.item, mean, other FROM ({_MEANS}) AS mine LEFT JOIN (SELECT item, avg(reward) AS other "
        "FROM rollouts WHERE run = ? GROUP BY item) AS theirs ON theirs.item = mine.item "
        f"ORDER BY {ORDERS[order]}, first LIMIT ? OFFSET ?",
        *(run, against, ITEMS, ITEMS * (page - 1)),
    )
    keys = [row["item"] for row in items]
    mine, theirs = (_samples(index, name, keys) if name else {} for name in (run, against))
    rows = []
    for key, mean, other in items:
        samples = mine[key]
        rows.append(
            {
                "item": key,
                "title": next((each["title"] for each in samples if each["title"]), key),
                "numbers": sorted({each["number"] for each in samples}),
                "name": index.name_of(run, samples[0]["number"]).partition(", rollout ")[0],
                "samples": [_cell(each) for each in samples[:SAMPLES]],
                "others": [_cell(each) for each in theirs.get(key, ())[:SAMPLES]],
                "more": max(0, len(samples) - SAMPLES),
                "change": None if mean is None or other is None else mean - other,
                "why": sorted(_why(samples), key=lambda each: -each[1])[:REASONS],
                "did": [_total(each[name] for each in samples) for name in ("turns", "calls", "errors")],
            }
        )
    return {"rows": rows, "total": total, "page": page, "pages": -(-total // ITEMS), "against": against, "order": order}


def _samples(index: Index, run: str, keys: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in index.ask(_SAMPLES.format(", ".join("?" * len(keys))), run, *keys):
        found.setdefault(row["item"], []).append(dict(row))
    return found


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _cell(row: Mapping[str, Any]) -> tuple[float | None, int, int, str]:
    return row["reward"], row["number"], row["n"], "; ".join(why for why, _ in _why([row]))


def _why(samples: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """Why samples fail, with counts: how they ended, parts of the reward that are 0, the commonest failure of each
    tool."""
    counts, failures = Counter[str](), ToolFailures()
    for row in samples:
        if row["why"] or (row["reward"] is not None and row["reward"] < PASS):
            counts.update(filter(None, row["why"].split("\n")))
            of_tools = orjson.loads(row["tools"] or "{}").items() if row["reward"] is not None else ()
            for tool, (_, failed, reasons) in of_tools:
                if failed:
                    said, _ = max(reasons, key=itemgetter(1), default=("", 1))
                    failures.add_rows([(tool, 1, 1, [(said, 1)])])
    yield from counts.items()
    yield from (
        (f"{tool} failed{said and f': {said}'}", count) for tool, _, _, reasons in failures for said, count in reasons
    )


def passes(index: Index, run: str) -> tuple[int, Mean] | None:
    """k and pass@k for the samples of an item, of the items that have as many with a score; None with less than two."""
    counts = index.ask(f"SELECT scored, passed FROM ({_MEANS}) WHERE scored", run)
    k = max((row["scored"] for row in counts), default=0)
    if k < 2:
        return None
    return k, pass_at_k([[1.0] * row["passed"] + [0.0] * (row["scored"] - row["passed"]) for row in counts], k)


def difference(index: Index, run: str, against: str) -> Difference | None:
    """The mean reward of a run minus that of another one over their common items; None where there is none."""
    found = index.ask(
        "SELECT theirs.mean, mine.mean, min(theirs.low, mine.low), max(theirs.high, mine.high) "
        f"FROM ({_MEANS}) AS mine JOIN ({_MEANS}) AS theirs ON theirs.item = mine.item "
        "WHERE mine.mean IS NOT NULL AND theirs.mean IS NOT NULL ORDER BY mine.first",
        *(run, against),
    )
    return _paired(tuple(map(tuple, found))) if found else None


@lru_cache(maxsize=8)
def _paired(items: tuple[tuple[float, float, float, float], ...]) -> Difference:
    """A page asks again each time that a run grows, and its test takes a second for 10,000 items."""
    ends = [end for _, _, low, high in items for end in (low, high)]
    return paired([[one] for one, *_ in items], [[other] for _, other, *_ in items], others=ends)


def comparable(index: Index, run: str, others: Sequence[str]) -> list[str]:
    """Those of the runs that share an item with one."""
    has = (
        "SELECT 1 FROM rollouts AS mine WHERE run = ? AND EXISTS "
        "(SELECT 1 FROM rollouts WHERE run = ? AND item = mine.item) LIMIT 1"
    )
    return [other for other in others if other != run and index.ask(has, run, other)]
