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
from lachesis.figures.repaired_calls import ERRORS
from lachesis_messages.records.jsonl import read_lines

REWARD = "train/reward"
PARTS = 5
"""The means of the first and of the last one of as many parts of the steps are compared."""


def verdict(lines: Sequence[Mapping[str, Any]], evaluations: Mapping[str, Mapping[int, Any]]) -> list[str]:
    """How the reward, or without one the loss, changed, then that of held-out items; with their 95 % intervals."""
    found = [_change("Mean reward", lines, REWARD) or _change("Loss", lines, "train/loss")]
    found += [_change("Loss on validation data", lines, "eval/loss")]
    for name, of_steps in sorted(evaluations.items()):
        ends = [{"step": step, **of_steps[step]} for step in sorted({min(of_steps), max(of_steps)})]
        found += [_change(f"Mean reward on held-out items{' of ' * bool(name)}{name}", ends, "eval/avg_reward")]
    return [sentence for sentence in found if sentence]


def between(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """How the mean rewards of two runs' last steps differ; empty where one of them has none."""
    ends = [(f"{at} of {name}", mean) for name, lines in runs.items() for at, mean in _ends(lines, REWARD)[-1:]]
    return _said("Mean reward", ends) if len(ends) == 2 else ""


def _change(what: str, lines: Sequence[Mapping[str, Any]], name: str) -> str:
    return _said(what, _ends(lines, name))


def _ends(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[str, tuple[float, float, float]]]:
    """The means of a figure in the first and the last fifth of the steps that have it, each with which steps these are;
    of one step alone, one."""
    known = [line for line in lines if line.get(name) is not None]
    size = max(1, len(known) // PARTS)
    parts = [part for part in (known[:size], known[size:][-size:]) if part]
    at = [f"at step {part[0]['step']}" for part in parts]
    at = [f"in the {end} {size} steps" for end in ("first", "last")] if size > 1 else at
    return list(zip(at, (mean_of_steps(part, name) for part in parts), strict=True))


def _said(what: str, means: Sequence[tuple[str, tuple[float, float, float]]]) -> str:
    """Empty where there is none."""
    said = (f"{shown(mean)}{f' [{shown(low)}, {shown(high)}]' * (low == low)} {at}" for at, (mean, low, high) in means)
    return f"{what}: {', '.join(said)}{_difference(*(mean for _, mean in means))}." if means else ""


def _difference(*means: tuple[float, float, float]) -> str:
    """The second mean minus the first in words; empty where there is one mean, or no interval."""
    if len(means) < 2 or math.isnan((found := difference(*means))[1]):
        return ""
    mean, low, high = (shown(value, "+") for value in found)
    return f"; the difference is {mean} [{low}, {high}]{', which includes 0' * (found[1] <= 0 <= found[2])}"


def difference(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    """Of two independent means with the ends of their intervals: b - a and its ends, as in `mean_of_steps`."""
    mean = b[0] - a[0]
    return mean, mean - math.hypot(b[0] - b[1], a[2] - a[0]), mean + math.hypot(b[2] - b[0], a[0] - a[1])


def mean_of_steps(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, float]:
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


FREQUENT = 0.2
"""The share of its steps in which a figure has to be bad: a single step may be chance."""
ABOVE, BELOW = 1, -1
OUTCOMES = "train/outcome/"
MODEL_ERRORS = f"{OUTCOMES}model_error"
"""Here as a share of the rollouts of a step."""
TROUBLES = (
    (  # the update is as noisy as that of a fifth of the batch
        *("train/sampling/effective_sample_size", BELOW, 0.2, "the effective sample size is below 0.2"),
        "few tokens decide the update; lower training.learning_rate or env.max_staleness",
    ),
    (  # ratios are off by a factor of about exp(sqrt(2 KL)), which is 1.6
        *("train/sampling/kl_k3", ABOVE, 0.1, "the KL of sampler and trainer is above 0.1 nats per token"),
        "the rollouts are of another policy; lower training.learning_rate or env.max_staleness",
    ),
    (
        *("train/frac_reward_zero_std", ABOVE, 0.5, "most groups have equal rewards"),
        "they train nothing; choose items that are neither solved nor too hard, or raise env.group_size",
    ),
    (
        *("train/completions/clipped_ratio", ABOVE, 0.5, "most rollouts were cut off by a limit on tokens"),
        "their rewards say little; raise env.max_token_length",
    ),
    (
        *(MODEL_ERRORS, ABOVE, 0.25, "more than a quarter of the rollouts ended in a model error"),
        "the model writes no calls or answers that can be read; begin with a longer warm start (--warm-start N), or "
        "check env.tool_call_parser and the chat template",
    ),
    (  # half of what env.max_staleness allows by default
        *("train/staleness/mean", ABOVE, 4.0, "samples are more than 4 versions of the weights old"),
        "the policy has moved on; lower env.max_staleness, or play fewer rollouts at once",
    ),
)
"""A figure, on which side of its threshold it is bad, what is said then, and what to change."""


def troubles(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What figures say is wrong, with the steps and what to change."""
    found, lines = [], [{**line, **_shares(line)} for line in lines]
    for name, side, limit, said, change in TROUBLES:
        known = [line for line in lines if line.get(name) is not None]
        bad = [line["step"] for line in known if side * line[name] > side * limit]
        if len(bad) > FREQUENT * len(known):
            of = f"{len(bad)} of {counted(len(known), 'step')}, {bad[0]} to {bad[-1]}"
            found.append(f"In {of if len(bad) > 1 else f'step {bad[0]}'}, {said}: {change}.")
    return found + _unlearned(lines)


def _shares(line: Mapping[str, Any]) -> dict[str, float]:
    rollouts = sum(count for name, count in line.items() if name.startswith(OUTCOMES))
    return {MODEL_ERRORS: line.get(MODEL_ERRORS, 0) / rollouts} if rollouts else {}


JUMP = 0.1
"""By how much the share of repaired calls in the last steps is above that of the steps before, at least."""


def _unlearned(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the parser repairs more calls at last. An alarm of `RepairedCalls` looks at a third at each end."""
    known = [line for line in lines if line.get("repaired_calls")]
    size = max(1, len(known) // PARTS)
    (some, of), (more, of_last) = (_repaired(part) for part in (known[:-size], known[-size:]))
    if not (of and of_last):
        return []
    before, last, share = some / of, more / of_last, (some + more) / (of + of_last)
    if last - before <= max(JUMP, ERRORS * math.sqrt(share * (1 - share) * (1 / of + 1 / of_last))):
        return []
    at = f"In the last {size} steps" if size > 1 else f"In step {known[-1]['step']}"
    return [
        f"{at}, the parser repaired {last:.0%} of the tool calls, and {before:.0%} before: the model unlearns the form "
        "of its calls; have the reward count `result.ok_calls` only, or lower training.learning_rate."
    ]


def _repaired(lines: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many calls the parser repaired, and how many it read."""
    groups = [counts for line in lines for counts in line["repaired_calls"]]
    return sum(repaired for repaired, _ in groups), sum(parsed for _, parsed in groups)


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
