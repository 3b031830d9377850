"""Which rollouts a page lists, and in which order: the query of its address."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlencode

from lachesis.loop.rollout import DECLINED

SORTS = {
    **{name: name for name in ("reward", "outcome", "turns", "calls", "errors", "tokens", "seconds", "time", "title")},
    "run": "run",
}
"""By the name in an address: the column."""
BOUNDED = ("reward", "turns", "tokens")
"""Columns of which a filter has `min_NAME` and `max_NAME`."""
_TYPED_TAG = re.compile(r"(?:^|(?<=\s))tag:(\S+)")


@dataclass(frozen=True, slots=True)
class Filter:
    """All fields empty let every rollout through, the latest first."""

    runs: tuple[str, ...] = ()
    outcome: str = ""
    cause: str = ""
    item: str = ""
    tag: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_turns: float | None = None
    max_turns: float | None = None
    min_tokens: float | None = None
    max_tokens: float | None = None
    tool_error: bool | None = None
    scored: bool | None = None
    q: str = ""
    sort: str = "-time"
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        """The filter of an address. What it does not understand lets everything through: people type."""
        run = query.get("run", "")
        sort = query.get("sort", "")
        page = query.get("page", "")
        words = query.get("q", "")[:400].replace("\0", " ")  # SQLite's full-text search ends a string there
        if typed := _TYPED_TAG.search(words):
            words = " ".join(_TYPED_TAG.sub(" ", words).split())
        return cls(
            runs=(run,) if run else (),
            outcome=query.get("outcome", ""),
            cause=query.get("cause", ""),
            item=query.get("item", ""),
            tag=typed[1] if typed else query.get("tag", ""),
            min_reward=_number(query.get("min_reward", "")),
            max_reward=_number(query.get("max_reward", "")),
            min_turns=_number(query.get("min_turns", "")),
            max_turns=_number(query.get("max_turns", "")),
            min_tokens=_number(query.get("min_tokens", "")),
            max_tokens=_number(query.get("max_tokens", "")),
            tool_error=_flag(query.get("tool_error", "")),
            scored=_flag(query.get("scored", "")),
            q=words,
            sort=sort if sort.removeprefix("-") in SORTS else "-time",
            page=max(1, int(page)) if page.isdecimal() and len(page) < 8 else 1,
        )

    @property
    def order(self) -> str:
        """For `ORDER BY`. Rollouts without a value come last; those of one group stay together."""
        column, way = SORTS[self.sort.removeprefix("-")], "DESC" if self.sort.startswith("-") else "ASC"
        if column == "time":
            return f"time {way}, run, number {way}, n"
        return f"{column} {way} NULLS LAST, time DESC, run, number DESC, n"

    def where(self) -> tuple[str, list[Any]]:
        """For `WHERE`, with the values of its marks."""
        parts, values = ["1"], list[Any]()
        if self.runs:
            parts.append(f"run IN ({', '.join('?' * len(self.runs))})")
            values += self.runs
        for column in ("outcome", "cause", "item"):
            if value := getattr(self, column):
                parts.append(f"{column} = ?")
                values.append(value)
        if self.tag:
            parts.append(
                "EXISTS (SELECT 1 FROM notes WHERE notes.run = rollouts.run AND notes.number = rollouts.number "
                "AND notes.n = rollouts.n AND tag = ?)"
            )
            values.append(self.tag)
        for column in BOUNDED:
            for end, comparison in (("min", ">="), ("max", "<=")):
                if (bound := getattr(self, f"{end}_{column}")) is not None:
                    parts.append(f"{column} {comparison} ?")
                    values.append(bound)
        if self.tool_error is not None:
            parts.append("errors > 0" if self.tool_error else "errors = 0")
        if self.scored is not None:
            parts.append("reward IS NOT NULL" if self.scored else f"reward IS NULL AND cause != '{DECLINED}'")
        if query := self.full_text():
            parts.append("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
            values.append(query)
        return " AND ".join(parts), values

    def full_text(self) -> str:
        """The query in FTS5's language: all words, the last one as a beginning; what is in quotes stays together.

        A single letter begins too many words: it is one by itself.
        """
        found = [quoted or word for quoted, word in re.findall(r'"([^"]*)"|([^\s"]+)', self.q)]
        words = [f'"{word}"' for word in found if any(map(str.isalnum, word))]
        return " ".join(words) + ("*" if words and len(words[-1]) > 3 and not self.q.endswith('"') else "")

    def to_query(self, **changes: Any) -> str:
        """The query of the address, with some fields changed; the page is the first one unless it is given."""
        other = replace(self, **{"page": 1, **changes})
        fields = {
            "run": other.runs[0] if other.runs else "",
            **{name: getattr(other, name) for name in ("outcome", "cause", "item", "tag")},
            **{f"{end}_{name}": getattr(other, f"{end}_{name}") for name in BOUNDED for end in ("min", "max")},
            **{name: _written(getattr(other, name)) for name in ("tool_error", "scored")},
            "q": other.q,
            "sort": "" if other.sort == "-time" else other.sort,
            "page": "" if other.page == 1 else other.page,
        }
        return urlencode({name: value for name, value in fields.items() if value not in ("", None)}, errors="replace")


FLAGS = ("tool_error", "scored")
_FREE = ("item", "q", "page", "token")


def ignored(query: Mapping[str, str], known: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong with the query of an address, each with what is allowed; `known` are the values that occur."""
    found = []
    bounds = [f"{end}_{name}" for name in BOUNDED for end in ("min", "max")]
    names = [*known, *bounds, *FLAGS, "sort", *_FREE[:3]]
    for name, value in query.items():
        if name in BOUNDED:
            found.append(f"{name} is no filter: use min_{name} and max_{name}, with numbers")
        elif name not in (*names, *_FREE):
            found.append(f"{name} is no filter; the filters are {', '.join(names)}")
        elif name in bounds and value and _number(value) is None:
            found.append(f"{name}={value} is not a number, and is ignored")
        elif name in FLAGS and value and _flag(value) is None:
            found.append(f"{name}={value} is ignored: it is yes or no")
        elif name == "sort" and value and value.removeprefix("-") not in SORTS:
            found.append(
                f"sort={value} is ignored: it is one of {', '.join(SORTS)}, with - before it for the other way"
            )
        elif name in known and name != "tag" and value and value not in known[name]:
            some = [each for each in known[name] if each][:12]
            found.append(f"there is no {name} {value}" + (f"; there are {', '.join(some)}" if some else ""))
    return [each[:400] for each in found]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return int(value) if abs(value) < 1e15 and value.is_integer() else value


def _flag(text: str) -> bool | None:
    return {"yes": True, "no": False}.get(text)


def _written(flag: bool | None) -> str:
    return "" if flag is None else "yes" if flag else "no"
