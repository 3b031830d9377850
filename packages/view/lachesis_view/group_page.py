"""Rollouts side by side, turn by turn, and where they diverge: those of a group, or any two."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from lachesis_messages.records.groups import stored_messages
from lachesis_view.html import pretty
from lachesis_view.html.rollout import rollout_view, short_line, texts_of, title_of, tool_views
from lachesis_view.metrics import of_siblings
from lachesis_view.rollout_page import advantages, common_prefix
from lachesis_view.token_text import TokenTexts
from lachesis_view.trees import tree_drawing

_WIDTH, _LANE = 520, 26
Shown = tuple[Mapping[str, Any], dict[str, Any]]
"""A message, and what the page shows of it."""
Side = tuple[Mapping[str, Any], int]
"""A group, and the number of a rollout in it."""


def group_context(
    group: Mapping[str, Any], vocabulary: TokenTexts | None = None, only: Collection[int] = ()
) -> dict[str, Any]:
    """The values for the template of a group. `only` are the rollouts to compare; all of them if it is empty.

    A row is a turn, a cell a rollout; cells with the same letter have the same conversation up to there.
    """
    rollouts = group["rollouts"]
    chosen = [n for n in range(len(rollouts)) if not only or n in only] or list(range(len(rollouts)))
    rewards = {n: rollout["reward"] for n, rollout in enumerate(rollouts) if rollout["reward"] is not None}
    ends = [max(rewards.values()), min(rewards.values())] if len({*rewards.values()}) > 1 else []
    at_ends = [[n for n in rewards if rewards[n] == end] for end in ends]
    tags = {of[0]: name for of, name in zip(at_ends, ("best", "worst"), strict=False) if len(of) == 1}
    gains = advantages(group)
    tree = tree_drawing(group)
    tokens = None if tree and tree["forked"] and not only else _tokens(_last_samples(group, chosen), vocabulary)
    return {
        "group": {name: group.get(name) for name in ("environment", "item_key", "model", "run", "number", "timestamp")},
        "title": title_of(group.get("item"), stored_messages(group, rollouts[0]) if rollouts else ()),
        "item": pretty(group.get("item")),
        "tools": tool_views(group),
        "count": len(rollouts),
        "columns": [
            {
                "n": n,
                "is": tags.get(n, ""),  # one of several with the same reward is neither
                **_facts(rollouts[n], gains[n]),
            }
            for n in chosen
        ],
        "pair": [at_ends[0][0], at_ends[1][-1]] if at_ends else None,
        "chosen": bool(only),
        **_side_by_side([(group, rollouts[n]) for n in chosen]),
        "tree": tree,
        "tokens": tokens,
        "ends": {n: _facts(rollout, gains[n]) for n, rollout in enumerate(rollouts)},
    }


def diff_context(
    a: Side, b: Side, vocabulary: TokenTexts | None = None, *, same_vocabulary: bool = False
) -> dict[str, Any]:
    """The values for the template of two rollouts, of one group or of two; columns and lines have the numbers 0 and 1.

    Their tokens are compared if both runs have the `same_vocabulary`. Raises IndexError if a group has no such rollout.
    """
    rollouts = [group["rollouts"][n] for group, n in (a, b)]
    gains = [advantages(group)[n] if a[0] is b[0] else None for group, n in (a, b)]
    facts = [
        {**_facts(*pair), "model": side[0].get("model")} for side, *pair in zip((a, b), rollouts, gains, strict=True)
    ]
    rewards = [rollout["reward"] for rollout in rollouts]
    if a[0] is not b[0] and None not in rewards:  # no advantage has a sign
        for of, gain in zip(facts, (rewards[0] - rewards[1], rewards[1] - rewards[0]), strict=True):
            of["sign"] = _sign(gain)
    samples = {at: each for at, (group, n) in enumerate((a, b)) for each in _last_samples(group, [n]).values()}
    return {
        "columns": [{"n": at, "is": "", **of} for at, of in enumerate(facts)],
        # Trainers do not keep items.
        "same_item": a[0]["item"] == b[0]["item"] if "item" in a[0] and "item" in b[0] else a[0] is b[0] or None,
        **_side_by_side([(a[0], rollouts[0]), (b[0], rollouts[1])]),
        "tokens": _tokens(samples, vocabulary) if same_vocabulary else None,
        "ends": dict(enumerate(facts)),
    }


def partings(group: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
    """Where each other rollout of the group parts from rollout `n`: the `turn` (None: not at all), what it says there,
    its reward, and by how much that is more; those that stay longest with it come first."""
    rollouts = group["rollouts"]
    asked = stored_messages(group, rollouts[n])
    own = [_said(message) for message in asked]
    mine = rollouts[n]["reward"]
    found = []
    for m, other in enumerate(rollouts):
        if m == n:
            continue
        messages = stored_messages(group, other)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == _said(pair[1]), zip(own, messages, strict=False)))
        kept = same < max(len(own), len(messages))
        # What was sampled and not kept, as an answer that could not be read, is in no conversation.
        parts = kept or rollouts[n].get("completion_tokens") != other.get("completion_tokens")
        parting = [each[same].get("role") == "assistant" for each in (asked, messages) if same < len(each)]
        answers = sum(message.get("role") == "assistant" for message in messages[:same])
        turn = max(0, answers - (not all(parting)))  # what follows an answer is of its turn
        gain = None if mine is None or other["reward"] is None else other["reward"] - mine
        said = _brief(messages[same]) if same < len(messages) else "it ends" if kept else "an answer that was not kept"
        found.append(
            {"n": m, "same": same, "turn": turn if parts else None, "said": said * parts, **_facts(other, gain)}
        )
    return sorted(found, key=lambda each: (-each["same"], each["n"]))


def _brief(message: Mapping[str, Any]) -> str:
    """What a message says, in a line: the beginning of its text, and its calls."""
    calls = map(_function, message.get("tool_calls") or ())
    called = ", ".join(" ".join(map(str, call)) if isinstance(call, tuple) else str(call) for call in calls)
    return short_line(" → ".join(filter(None, ("".join(texts_of(message.get("content"))), called))), 100)


def _facts(rollout: Mapping[str, Any], gain: float | None) -> dict[str, Any]:
    """What the head of a column and the end of a line show; `sign` is the class of the colour of `gain`."""
    names = ("reward", "outcome", "reason", "turns", "completion_tokens", "seconds")
    return {
        **{name: rollout.get(name) for name in names},
        "advantage": gain,
        "sign": _sign(gain),
        "failed": len(rollout.get("tool_errors") or ()),
    }


def _sign(gain: float | None) -> str:
    return "good" if (gain or 0) > 0 else "bad" if (gain or 0) < 0 else ""


def _side_by_side(sides: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Rollouts, each with its group, in rows of turns."""
    turns = [_turns(_shown(group, rollout)) for group, rollout in sides]
    prompts = [prompt for prompt, _ in turns]
    rows, parted = _rows([cells for _, cells in turns])
    return {
        "metrics": of_siblings([rollout for _, rollout in sides]),
        "prompts": [[view for _, view in prompt] for prompt in prompts],
        "same_prompt": all(prompt == prompts[0] for prompt in prompts),
        "rows": rows,
        "parted": parted,
    }


def _shown(group: Mapping[str, Any], rollout: Mapping[str, Any]) -> list[Shown]:
    """The conversation of a rollout, without places and times: a row may be that of several siblings."""
    views = rollout_view(group, rollout)["branches"][0]["messages"]
    for view in views:
        view |= {"anchor": "", "turn": None, "context": False, "of": view["of"] and {**view["of"], "took": ""}}
    return list(zip(stored_messages(group, rollout), views, strict=True))


def _turns(messages: Sequence[Shown]) -> tuple[list[Shown], list[list[Shown]]]:
    """The messages before the first answer; then, for each answer, the answer and what follows it."""
    prompt: list[Shown] = []
    turns: list[list[Shown]] = []
    for message in messages:
        if message[0]["role"] == "assistant":
            turns.append([])
        (turns[-1] if turns else prompt).append(message)
    return prompt, turns


def _rows(columns: Sequence[Sequence[Sequence[Shown]]]) -> tuple[list[dict[str, Any]], int | None]:
    """The rows, and the first one whose cells differ."""
    rows: list[dict[str, Any]] = []
    parted = None
    classes = [0] * len(columns)
    for at in range(max(map(len, columns), default=0)):
        found: dict[Any, int] = {}
        cells: list[dict[str, Any] | None] = []
        for number, column in enumerate(columns):
            turn = column[at] if at < len(column) else None
            # Ids of calls are drawn at random and say nothing.
            said = None if turn is None else [_said(message) for message, _ in turn]
            classes[number] = found.setdefault((classes[number], repr(said)), len(found))
            same = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[classes[number]] if classes[number] < 26 else str(classes[number])
            cells.append(None if turn is None else {"messages": [view for _, view in turn], "same": same})
        differ = len(found) > 1
        if differ and parted is None:
            parted = at
            _mark([cell["messages"][0] for cell in cells if cell])
        rows.append({"turn": at, "cells": cells, "differ": differ})
    return rows, parted


def _said(message: Mapping[str, Any]) -> Any:
    names = ("role", "name", "content", "reasoning")
    return *(message.get(name) for name in names), [_function(call) for call in message.get("tool_calls") or ()]


def _function(call: Any) -> Any:
    """A call without its id. Environments of others write calls as they like."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else call


def _mark(messages: Sequence[dict[str, Any]]) -> None:
    """Split the texts of the first answers that differ: `same` is what all begin with."""
    for name in ("reasoning", "text"):
        texts = [message[name] for message in messages]
        shared = common_text(texts)
        for message in messages:
            message[f"{name}_same"] = shared
        if len(set(texts)) > 1:
            return


def common_text(texts: Sequence[str]) -> int:
    """How many characters all texts begin with."""
    low, high = min(texts, default=""), max(texts, default="")
    return next(
        (at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), min(len(low), len(high))
    )


@dataclass(slots=True)
class _Fork:
    """Rollouts whose tokens are the same up to `at`."""

    members: list[int]
    at: int
    children: list[_Fork] = field(default_factory=list)


def _last_samples(group: Mapping[str, Any], chosen: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """By rollout, the sample of the path on which it ended; rollouts without tokens have none."""
    names = {group["rollouts"][n]["rollout_id"]: n for n in chosen}
    return {
        names[sample["rollout_id"]]: sample
        for sample in reversed(group.get("samples") or ())
        if sample["rollout_id"] in names and sample["spans"]
    }


def _tokens(samples: Mapping[int, Mapping[str, Any]], vocabulary: TokenTexts | None) -> dict[str, Any] | None:
    """Where samples part, token by token; how many tokens they share if none does; None with less than two samples."""
    if len(samples) < 2:
        return None
    root = _fork(sorted(samples), {n: sample["tokens"] for n, sample in samples.items()})
    if not root.children:
        return {
            "same": sum(span["end"] - span["start"] for span in samples[root.members[0]]["spans"]),
            "of": len(samples),
        }
    start = min(sample["spans"][0]["start"] for sample in samples.values())
    longest = max(len(sample["tokens"]) for sample in samples.values())
    scale = (_WIDTH - 110) / math.log1p(max(1, longest - start))

    def x(place: int) -> float:
        """The first tokens, in which most siblings part, get most of the room."""
        return round(12 + scale * math.log1p(max(0, place - start)), 1)

    first = root.at
    forks = [_fork_view(fork, samples, vocabulary) for fork in _forks(root)]
    lines = list(_lines(root, 0, start, x, {n: len(sample["tokens"]) for n, sample in samples.items()}))
    before = next(iter(samples.values()))["tokens"][max(start, first - 24) : first]
    return {
        "first": first,
        "sampled": first - start,
        "before": vocabulary.decode(before) if vocabulary is not None else " ".join(map(str, before)),
        "forks": forks,
        "lines": lines,
        "ticks": [(x(start + tokens), tokens) for tokens in _ticks(longest - start)],
        "width": _WIDTH,
        "height": _LANE * len(samples) + 28,
    }


def _forks(root: _Fork) -> Iterator[_Fork]:
    if root.children:
        yield root
        for child in root.children:
            yield from _forks(child)


def _fork_view(fork: _Fork, samples: Mapping[int, Mapping[str, Any]], vocabulary: TokenTexts | None) -> dict[str, Any]:
    """The tokens with which each side goes on."""
    sides = []
    for child in fork.children:
        sample = samples[child.members[0]]
        token = sample["tokens"][fork.at] if fork.at < len(sample["tokens"]) else None
        text = "" if token is None or vocabulary is None else vocabulary.decode([token])
        known = token is not None and sample["masks"][fork.at] != -100
        sides.append(
            {
                "members": child.members,
                "sample": sample["index"],
                "id": token,
                "shown": json.dumps(text, ensure_ascii=False) if text else token,
                "logprob": sample["logprobs"][fork.at] if known else None,
            }
        )
    return {"at": fork.at, "sides": sides}


def _fork(members: list[int], ids: Mapping[int, Sequence[int]]) -> _Fork:
    one = ids[members[0]]
    at = min((common_prefix(one, ids[other]) for other in members[1:]), default=len(one))
    parts: dict[int | None, list[int]] = {}
    for member in members:
        parts.setdefault(ids[member][at] if at < len(ids[member]) else None, []).append(member)
    if len(members) == 1 or len(parts) == 1:  # equal to the end
        return _Fork(members, at)
    return _Fork(members, at, [_fork(part, ids) for part in parts.values()])


def _lines(fork: _Fork, lane: int, begin: int, x: Any, lengths: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """A line for each stretch that is shared by the same rollouts, and one down to each that leaves."""
    y = _LANE * lane + _LANE // 2
    if not fork.children:
        for place, n in enumerate(fork.members):
            end = lengths[n]
            yield {"n": n, "x1": x(begin), "x2": max(x(end), x(begin) + 6), "y": y + _LANE * place, "end": True}
        return
    yield {"x1": x(begin), "x2": x(fork.at), "y": y, "shared": len(fork.members)}
    for child in fork.children:
        if (top := _LANE * lane + _LANE // 2) > y:
            yield {"x": x(fork.at), "y": y, "y2": top}
        yield from _lines(child, lane, fork.at, x, lengths)
        lane += len(child.members)


def _ticks(length: int) -> Iterator[int]:
    tick = 1
    while tick <= length:
        yield tick
        tick *= 4 if tick < 1000 else 2
