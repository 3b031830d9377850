"""The HTML report of a run: figures first, then every trajectory. One file, no network, model output escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from environments.records import rollout_messages
from environments.summary import summarise

HISTOGRAM_BINS = 10
TITLE_LENGTH = 110


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart: what it counts, how often, and its share of the tallest (0..1)."""

    label: str
    count: int
    share: float


def write_report(path: Path, *, title: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Write the report of group records to `path`, whole or not at all."""
    html = render_report(title=title, groups=groups)
    temporary = path.with_suffix(".html.tmp")
    temporary.write_text(html, encoding="utf-8")
    temporary.replace(path)


def render_report(*, title: str, groups: Sequence[Mapping[str, Any]]) -> str:
    """The report as HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["pretty"] = _pretty
    summary = summarise(groups)
    rewards = [rollout["reward"] for group in groups for rollout in group["rollouts"] if rollout["reward"] is not None]
    return environment.get_template("report.html.jinja").render(
        title=title,
        summary=summary,
        histogram=reward_histogram(rewards),
        outcomes=_bars(list(summary.outcomes.items())),
        tools=_tool_rows(groups),
        groups=[_group_view(number, group) for number, group in enumerate(groups, 1)],
    )


def reward_histogram(rewards: Sequence[float]) -> list[Bar]:
    """One bar a value while there are few distinct ones, equal bins between the extremes otherwise."""
    distinct = sorted(set(rewards))
    if len(distinct) <= HISTOGRAM_BINS:
        return _bars([(f"{value:g}", rewards.count(value)) for value in distinct])
    low, high = distinct[0], distinct[-1]
    width = (high - low) / HISTOGRAM_BINS
    counts = [0] * HISTOGRAM_BINS
    for value in rewards:
        counts[min(HISTOGRAM_BINS - 1, math.floor((value - low) / width))] += 1
    return _bars(
        [(f"{low + place * width:.2g} to {low + (place + 1) * width:.2g}", n) for place, n in enumerate(counts)]
    )


def _bars(counts: Sequence[tuple[str, int]]) -> list[Bar]:
    tallest = max((count for _, count in counts), default=1) or 1
    return [Bar(label, count, count / tallest) for label, count in counts]


def _tool_rows(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    rows: dict[str, list[int]] = {}
    for group in groups:
        for rollout in group["rollouts"]:
            for name, stats in rollout["tool_stats"].items():
                row = rows.setdefault(name, [0, 0])
                row[0] += stats["count"]
                row[1] += stats["failure"]
    return [(name, count, failed) for name, (count, failed) in sorted(rows.items())]


def _group_view(number: int, group: Mapping[str, Any]) -> dict[str, Any]:
    rollouts = [{**rollout, "messages": rollout_messages(group, rollout)} for rollout in group["rollouts"]]
    return {
        "number": number,
        "key": group["item_key"],
        "title": _title(rollouts),
        "item": group["item"],
        "rollouts": rollouts,
    }


def _title(rollouts: Sequence[Mapping[str, Any]]) -> str:
    for rollout in rollouts:
        for message in rollout["messages"]:
            if message["role"] == "user":
                text = " ".join(str(message["content"]).split())
                return text if len(text) <= TITLE_LENGTH else text[: TITLE_LENGTH - 1] + "…"
    return ""


def _pretty(value: Any) -> str:
    """JSON, or text that is JSON, indented; everything else as it is."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
        if not isinstance(value, dict | list):
            return str(value)
    if isinstance(value, dict) and set(value) == {"code"} and isinstance(value["code"], str):
        return value["code"]
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
