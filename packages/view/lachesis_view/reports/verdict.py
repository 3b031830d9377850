"""What the files of a training run say, in sentences: the beginning of its report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from backends.errors import LachesisError
from backends.text import counted
from lachesis.figures.intervals import shown
from lachesis_messages.records.jsonl import read_lines


def verdict(lines: Sequence[Mapping[str, Any]], evaluations: Mapping[str, Mapping[int, Any]]) -> list[str]:
    """How the reward, or without one the loss, changed, then that of held-out items; with their 95 % intervals."""
    found = [_change("Mean reward", lines, "train/reward") or _change("Loss", lines, "train/loss")]
    found += [_change("Loss on validation data", lines, "eval/loss")]
    for name, of_steps in sorted(evaluations.items()):
        ends = [{"step": step, **of_steps[step]} for step in sorted({min(of_steps), max(of_steps)})]
        found += [_change(f"Mean reward on held-out items{' of ' * bool(name)}{name}", ends, "eval/avg_reward")]
    return [sentence for sentence in found if sentence]


def _change(what: str, lines: Sequence[Mapping[str, Any]], name: str) -> str:
    """Of a figure from the first to the last fifth of the steps that have it."""
    if not (known := [line for line in lines if line.get(name) is not None]):
        return ""
    size = max(1, len(known) // 5)
    parts = [part for part in (known[:size], known[size:][-size:]) if part]
    means = [_mean(part, name) for part in parts]
    at = [f"at step {part[0]['step']}" for part in parts]
    at = [f"in the {end} {size} steps" for end in ("first", "last")] if size > 1 else at
    said = (f"{shown(mean)}{f' [{shown(low)}, {shown(high)}]' * (low == low)}" for mean, low, high in means)
    overlap = len(parts) > 1 and means[0][1] <= means[1][2] and means[1][1] <= means[0][2]
    return f"{what}: {', '.join(map(' '.join, zip(said, at, strict=True)))}{'; the intervals overlap' * overlap}."


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, float]:
    """The mean over steps, and the ends of its interval; these are nan where a step has none.

    Batches are independent, so the squares of the distances to their limits add up (Zou and Donner, Statistics in
    Medicine 2008).
    """
    mean = math.fsum(line[name] for line in lines) / len(lines)
    below, above = (
        math.hypot(*(math.nan if (of := line.get(f"{name}{end}")) is None else of - line[name] for line in lines))
        for end in ("_low", "_high")
    )
    return mean, mean - below / len(lines), mean + above / len(lines)


def circumstances(run_dir: Path, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What curves do not show: a warm start, where the run was resumed, groups that were not sent to the trainer."""
    found, reasons = [], Counter[str]()
    if warm := [line for line in _lines(run_dir / "warm-start" / "metrics.jsonl") if "train/loss" in line]:
        # Not the samples of its steps: an example counts in each epoch.
        said = (
            f"{counted(len(warm), 'step')} on rollouts of the reference policy. {_change('Loss', warm, 'train/loss')}"
        )
        found.append(f"Warm start: {said} See warm-start/report.html.")
    if resumed := [str(line["step"]) for line in lines if line.get("resumed")]:
        found.append(f"Resumed before step{'s' * (len(resumed) > 1)} {', '.join(resumed)}.")
    for path in (run_dir / "spool").glob("**/refused.jsonl"):
        reasons.update(str(line.get("reason"))[:100] for line in _lines(path))
    if reasons:
        said = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        found.append(f"Groups that were not sent to the trainer: {said}. See refused.jsonl in spool/.")
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Up to one that cannot be read: a report never ends a training run."""
    with suppress(OSError, LachesisError):
        yield from (line for line in read_lines(path, torn_tail=True) if isinstance(line, dict))
