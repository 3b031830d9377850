"""The data that the index keeps for a line: the row of each rollout, and the searchable text.

A line may hold anything. What is not of the usual shape raises one of `MISSHAPEN`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import orjson

from lachesis.figures.passes import PASS
from lachesis.figures.repaired_calls import NAME as REPAIRED_CALLS
from lachesis.figures.tool_failures import ToolFailures
from lachesis.loop.outcome import in_words
from lachesis.loop.rollout import DECLINED
from lachesis_messages.errors import MISSHAPEN
from lachesis_messages.records.groups import stored_messages
from lachesis_messages.records.split_rollouts import LARGEST_REWARD
from lachesis_view.html.rollout import COMPONENT, texts_of, title_of
from lachesis_view.metrics import metric_name

TEXT_LIMIT = 100_000
"""Characters of a rollout that can be searched for: half from its beginning, half from its end."""
NAME_LENGTH = 200
REASONS = 3
"""That an item or a sample fails, shown at most."""
METRICS = 50
"""Components and metrics of a rollout that are kept."""


def parsed(line: bytes | str) -> dict[str, Any]:
    """Not as `read_line` reads it: integers over 64 bits become floats, since no table can hold them."""
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError:  # halves of surrogate pairs
        content = json.loads(line)
    return dict(content)


def rollout_row(group: Mapping[str, Any], rollout: Mapping[str, Any]) -> tuple[Any, ...]:
    """From `title` to `rollout_id`."""
    verifier = rollout.get("verifier") or {}
    causes = (rollout.get("unscored_kind"), verifier.get("cause"), rollout.get("agent_fault"), rollout.get("skipped"))
    return (
        storable(title_of(group.get("item"), stored_messages(group, rollout))),
        None if rollout["reward"] is None else _number(rollout["reward"]),
        as_name(rollout["outcome"]),
        as_name(next(filter(None, causes), "")),
        as_count(rollout["turns"]),
        None if rollout["tool_stats"] is rollout["tool_calls"] is None else as_count(rollout["tool_calls"]),
        None
        if (counts := rollout["tool_stats"]) is None
        else sum(as_count(each["failure"]) for each in counts.values()),
        None if rollout.get("uncounted_requests") else as_count(rollout.get("completion_tokens", 0)),
        None if rollout["seconds"] is None else _number(rollout["seconds"]),
        _metrics(rollout),
        _tools(rollout),
        "\n".join(_why(group, rollout, as_name(next(filter(None, causes), "")))),
        as_name(str(rollout.get("rollout_id", ""))),
    )


def _why(group: Mapping[str, Any], rollout: Mapping[str, Any], cause: str) -> Iterator[str]:
    """Why it has no score or less than a pass, failed calls aside: how it ended, parts of the reward that are 0."""
    reward, outcome = rollout["reward"], as_name(rollout["outcome"])
    if cause == DECLINED or (reward is not None and reward >= PASS):
        return
    said = in_words(cause or outcome)
    if reward is None:
        yield f"no score: {said}"
        return
    if cause or outcome != "completed":
        yield said
    elif group.get("tools") and not rollout["tool_calls"]:
        yield "called no tool"
    metrics, weights = rollout.get("metrics") or {}, rollout.get("reward_weights") or {}
    if not isinstance(metrics, dict) or not isinstance(weights, dict):
        return
    parts = {name[len(COMPONENT) :]: value for name, value in metrics.items() if name.startswith(COMPONENT)}
    numbers = {name: value for name, value in parts.items() if isinstance(value, int | float)}
    zero = [as_name(name) for name, value in numbers.items() if value <= 0 and weights.get(name, 1)]
    if zero and len(metrics) > 1:
        yield f"{' and '.join(zero[:REASONS])} scored 0"


def _tools(rollout: Mapping[str, Any]) -> str | None:
    """JSON of the calls of each tool: how many, how many failed, and the reasons with their counts."""
    failures = ToolFailures()
    with suppress(*MISSHAPEN):
        stats = (rollout["tool_stats"] or {}).items()
        counts = {as_name(name): {kind: as_count(each[kind]) for kind in ("count", "failure")} for name, each in stats}
        said = rollout.get("tool_errors") or ()
        errors = [(as_name(each.get("tool") or ""), str(each.get("error") or "")) for each in said]
        failures.add(dict(islice(counts.items(), METRICS)), errors[:METRICS])
    found = {name: [*counts] for name, *counts in failures.to_rows()}
    return orjson.dumps(found).decode() if found else None


def _metrics(rollout: Mapping[str, Any]) -> str | None:
    """JSON of the components and metrics that are numbers a mean can take, and the share of calls that the parser
    repaired; None where there is none."""
    metrics = rollout.get("metrics") or {}
    if not isinstance(metrics, dict):
        return None
    repaired, parsed = rollout.get("repaired_calls") or (0, 0)
    if as_count(parsed):
        metrics = {REPAIRED_CALLS: as_count(repaired) / parsed, **metrics}
    if not metrics:
        return None
    known = {
        as_name(metric_name(name)): float(value)
        for name, value in islice(metrics.items(), METRICS)
        if isinstance(value, int | float) and abs(value) <= LARGEST_REWARD
    }
    return orjson.dumps(known).decode() if known else None


def searched_text(group: Mapping[str, Any], rollout: Mapping[str, Any]) -> str:
    chats = _conversations(rollout, stored_messages(group, rollout))
    parts = [part for messages in chats for message in messages for part in _said(message)]
    parts += [text for name in ("reason", "traceback") if isinstance(text := rollout.get(name), str)]
    text = "\n".join(parts)
    if len(text) > TEXT_LIMIT:
        text = f"{text[: TEXT_LIMIT // 2]}\n{text[-TEXT_LIMIT // 2 :]}"
    return storable(text)


def _conversations(record: Mapping[str, Any], messages: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """A conversation, then the branches that it left, and the conversations of its sub-agents."""
    yield messages
    yield from (dropped["messages"] for dropped in record.get("discarded") or ())
    for call in (record.get("calls") or {}).values():
        if (chat := call.get("subagent")) is not None:
            yield from _conversations(chat, chat["messages"])


def _said(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a message."""
    yield from texts_of(message.get("reasoning"))
    yield from texts_of(message.get("content"))
    for call in message.get("tool_calls") or ():
        yield from (call["function"]["name"], call["function"]["arguments"])


def _number(value: Any) -> float:
    """Of a line, which need not hold what a row and the sums over rows take."""
    if not isinstance(value, int | float) or not abs(value) <= LARGEST_REWARD:
        raise TypeError(f"{str(value)[:60]} is not a finite number")
    return float(value)


def as_count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise TypeError(f"{str(value)[:60]} is not a count")
    return value


def as_time(value: Any) -> float:
    """Seconds since 1970, in the years 1 to 9999."""
    if not -62135596800 <= (time := _number(value)) < 253402300800:
        raise ValueError(f"{value} is not a time")
    return time


def as_name(text: str) -> str:
    """`text` as a name that lists show and filter by."""
    return storable(text)[:NAME_LENGTH]


def storable(text: str) -> str:
    """Halves of surrogate pairs have no UTF-8, and SQLite reads a text up to its first NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ")
