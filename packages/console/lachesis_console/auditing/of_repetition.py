"""Findings about rollouts that are played again: whether the same play earns and reads the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from backends.text import counted
from lachesis_console.auditing.findings import Findings
from lachesis_console.auditing.records import AuditPlay, map_shown, shown
from lachesis_console.replaced import without_volatile

MARK = re.compile(r"mark-[0-9a-f]{10}")
REPEATED = ("again", "later", "reversed", "interleaved")
"""Blocks in which a policy plays an item after others, that it had played before."""

PACES = {"slow": "with pauses before its messages", "fast": "without its own pauses"}
"""Blocks in which the reference is played at another pace."""


def judge_repetition(first: Sequence[AuditPlay], second: Sequence[AuditPlay], findings: Findings) -> None:
    """Whether equal plays are equal: in a second start with the same history, and after others.

    Where histories are equal and plays are not, something is drawn. Where the beginnings of two starts are equal, what
    differs later depends on what was played before.
    """
    name = {"fresh": "first", "fresh again": "again"}
    begun = {(play.policy, play.item, play.block): play for play in first}
    drawn = []
    for play in second:
        before = begun.get((play.policy, play.item, name.get(play.block, "")))
        if before is not None and _differs(before, play):
            drawn.append((before, play))
    if drawn:
        _add_differences(findings, drawn, "not-deterministic", "in a second start, with the same plays before it")
    for play in first:
        before = begun.get((play.policy, play.item, "first"))
        if play.block in PACES and before is not None and before.reward != play.reward and not drawn:
            _add_differences(findings, [(before, play)], "not-deterministic", PACES[play.block])
    own = [play for play in first if play.block == "first"]
    known = {(play.policy, play.item): play for play in [*second, *own] if play.block in ("fresh", "first")}
    later = [
        (known[play.policy, play.item], play)
        for play in [*first, *second]
        if play.block in REPEATED and (play.policy, play.item) in known
    ]
    differing = [(before, play) for before, play in later if _differs(before, play)]
    if differing and not drawn:
        # One start alone, or one item directly after itself, cannot tell which of both it is.
        code = "state-leaks" if second and any(play.block != "again" for _, play in differing) else "not-deterministic"
        _add_differences(findings, differing, code, "after other rollouts")
    unseeded = [play for before, play in later if before.drew and play.drew not in ("", before.drew)]
    if unseeded and not (differing or drawn):
        said = f"{counted(len(unseeded), 'rollout')} drew other numbers of the module random than an equal one: "
        said += "no seed decides what is drawn"
        findings.add("not-deterministic", "warning", said, map_shown(unseeded))
    leaked = _marks_of_others([*first, *second])
    if leaked:
        said = f"{counted(len(leaked), 'rollout')} read what another rollout had written"
        findings.add("state-leaks", "error", said, leaked)


def _differs(before: AuditPlay, play: AuditPlay) -> bool:
    return (before.kind == play.kind == "" and before.signature != play.signature) or before.kind != play.kind


def _add_differences(findings: Findings, pairs: Sequence[tuple[AuditPlay, AuditPlay]], code: str, when: str) -> None:
    rewards = [pair for pair in pairs if pair[0].reward != pair[1].reward]
    prompts = [pair for pair in pairs if pair[0].prompt != pair[1].prompt]
    texts = [pair for pair in pairs if _texts(pair[0]) != _texts(pair[1])]
    for found, what, severity in (
        (rewards, "reward", "error"),
        (prompts, "prompt", "error"),
        (texts, "texts", "warning"),
    ):
        if not found:
            continue
        before, play = found[0]
        if what == "reward":
            listed = " and ".join("none" if each.reward is None else f"{each.reward:g}" for each in (before, play))
            said = (
                f"{play.policy}: the same play of item {play.item} earns {listed}: the reward depends on something else"
            )
            evidence = [shown(before), shown(play)]
        else:
            was, now = _first_difference(before, play)
            said = f"{play.policy}: the same play of item {play.item} reads another {what}"
            evidence = [shown(before, was), shown(play, now)]
        said += f" ({len(found)} of the rollouts that were played again {when}, the first in the block {play.block!r})"
        findings.add(code, severity, said, evidence)  # type: ignore[arg-type]
        return
    if pairs:
        before, play = pairs[0]
        was, now = _first_difference(before, play)
        said = f"{play.policy}: the same play of item {play.item} reads texts that differ in numbers only"
        findings.add(code, "note", said, [shown(before, was), shown(play, now)])


def _texts(play: AuditPlay) -> list[str]:
    return [without_volatile(text) for text in (play.prompt, *play.seen)]


def _first_difference(before: AuditPlay, play: AuditPlay) -> tuple[str, str]:
    for was, now in zip((before.prompt, *before.seen), (play.prompt, *play.seen), strict=False):
        if was != now:
            at = next((at for at, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
            return was[max(0, at - 60) : at + 120], now[max(0, at - 60) : at + 120]
    return f"{len(before.seen)} answers", f"{len(play.seen)} answers"


def _marks_of_others(plays: Sequence[AuditPlay]) -> list[dict[str, Any]]:
    found = []
    for play in plays:
        said = (text for turn in play.turns for text in (turn["text"], *(call["arguments"] for call in turn["calls"])))
        own = {mark for text in said for mark in MARK.findall(text)}
        for text in (play.prompt, *play.seen):
            if foreign := sorted({*MARK.findall(text)} - own):
                at = text.index(foreign[0])
                found.append(shown(play, text[max(0, at - 100) : at + 100]))
                break
    return found
