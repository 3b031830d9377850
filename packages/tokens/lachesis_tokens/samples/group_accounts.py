"""Token counts in the record of a group, apart from its samples, so that removed samples are noticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lachesis_messages.records.digests import LINE_DIGEST
from lachesis_tokens.samples.cross_checks import says_sampled


@dataclass(slots=True)
class GroupAccount:
    """The tokens of one group, according to its `rollouts` and `beside`."""

    sampled: dict[str, int] = field(default_factory=dict)
    """By the id of each rollout with a score, whose samples the group holds."""
    completed: set[str] = field(default_factory=set)
    """Of these, those whose record names a completion."""
    left_out: int = 0
    """Tokens of the others, of broken starts, and of completions outside the rollouts."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """The id of a rollout, or "", and a reason."""


def account_of(group: Mapping[str, Any]) -> GroupAccount | None:
    """None for a group without `rollouts`."""
    rollouts = group.get("rollouts")
    if not isinstance(rollouts, list):
        return None
    found = GroupAccount()
    for at, rollout in enumerate(rollouts):
        if not isinstance(rollout, Mapping) or not isinstance(rollout.get("rollout_id"), str):
            found.problems.append(("", f"rollouts[{at}] has no rollout_id"))
            continue
        sampled, lost = _tokens(rollout, rollout["rollout_id"], f"rollouts[{at}]", found)
        found.left_out += lost
        if rollout.get("place") is None:
            found.left_out += sampled
        else:
            found.sampled[rollout["rollout_id"]] = sampled
            if says_sampled(rollout):
                found.completed.add(rollout["rollout_id"])
    if isinstance(beside := group.get("beside"), Mapping):
        found.left_out += sum(_tokens(beside, "", "beside", found))
    scores = group.get("scores")
    if isinstance(scores, list) and len(scores) != len(found.sampled):
        named = f"rollouts[] names {len(found.sampled)} with a score"
        found.problems.append(("", f"scores of {len(scores)} rollouts, but {named}"))
    for rollout_id in dict.fromkeys(_sample_ids(group)):
        if rollout_id not in found.sampled:
            found.problems.append((rollout_id, "has samples, but is not in rollouts[] with a score"))
    undelivered = group.get("undelivered")
    for rollout_id in undelivered if isinstance(undelivered, Mapping) else ():
        if rollout_id not in found.sampled:
            reason = "undelivered names it, but it is not in rollouts[] with a score"
            found.problems.append((str(rollout_id), reason))
    return found


_OF_RUN: Final = ("environment", "model", "evaluation")
"""Fields that are the same in all lines of a run."""


class Runs:
    """The fields that the lines of each run have in common, and the places of its groups in its file (`number`)."""

    def __init__(self) -> None:
        self._seen: dict[str, set[int]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._certified: set[str] = set()
        self._keys: set[tuple[str, str]] = set()

    def add(self, group: Mapping[str, Any]) -> str | None:
        """The problem with the run or the number of a group, if there is one. A group without has none."""
        run, number = group.get("run"), group.get("number")
        if not isinstance(run, str):
            return None
        if problem := self.of_sample(group):
            return problem
        if LINE_DIGEST in group:
            self._certified.add(run)
        elif run in self._certified:  # an older version may have begun it, but does not continue it
            return f"its {LINE_DIGEST} is missing, and an earlier line of run {run} has one"
        has = isinstance(group.get("rollouts"), list)
        if LINE_DIGEST in group and self._facts[run].setdefault("rollouts", has) != has:
            return f"one line of run {run} has rollouts, and another one has none to compare its samples with"
        if number is None:
            return None
        if type(number) is not int or number < 0:
            return f"number is {number!r}, not the place of a group in its file"
        seen = self._seen.setdefault(run, set())
        if number in seen:
            return f"group {number} of run {run} occurs twice"
        seen.add(number)
        key = (run, str(group.get("item_key")))
        if "item_key" in group and key in self._keys:
            return f"item {key[1]} of run {run} is in two groups"
        self._keys.add(key)
        return None

    def of_sample(self, record: Mapping[str, Any]) -> str | None:
        """How a sample contradicts an earlier line of its run, or None. A sample without a run contradicts nothing."""
        run = record.get("run")
        if not isinstance(run, str):
            return None
        facts = self._facts.setdefault(run, {})
        for name in _OF_RUN:
            if name in record and facts.setdefault(name, record[name]) != record[name]:
                return f"{name} is {record[name]!r}, but {facts[name]!r} in another line of run {run}"
        return None

    def missing(self) -> Iterator[str]:
        """A problem for each run with a gap. Groups after the last one that is there leave none."""
        for run, seen in self._seen.items():
            gaps = max(seen) + 1 - len(seen)
            if gaps:
                first: list[str] = []
                number = 0
                while len(first) < min(gaps, 5):
                    first += [] if number in seen else [str(number)]
                    number += 1
                more = f" and {gaps - len(first)} more" if gaps > len(first) else ""
                which, are = ("groups", "are") if gaps > 1 else ("group", "is")
                yield f"{which} {', '.join(first)}{more} of run {run} {are} missing"


def _tokens(record: Mapping[str, Any], rollout_id: str, where: str, found: GroupAccount) -> tuple[int, int]:
    """`completion_tokens` and `lost_completion_tokens`; those that a record does not have are 0."""
    counts = []
    for name in ("completion_tokens", "lost_completion_tokens"):
        value = record.get(name, 0)
        if type(value) is not int or value < 0:
            found.problems.append((rollout_id, f"{where}: {name} is {value!r}, not a number of tokens"))
            value = 0
        counts.append(value)
    return counts[0], counts[1]


def _sample_ids(group: Mapping[str, Any]) -> Iterator[str]:
    for sample in group["samples"]:
        if isinstance(sample, Mapping) and isinstance(rollout_id := sample.get("rollout_id"), str) and rollout_id:
            yield rollout_id
