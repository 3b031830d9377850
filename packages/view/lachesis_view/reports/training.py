"""The HTML report of a training run, from its folder: curves, and the rollouts of its steps to read.

One file without scripts or network. A page of some megabytes can be read, one of a gigabyte cannot: of many steps some
are shown, spread evenly, and of a step as many groups as its share of the page takes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

from backends.errors import LachesisError, SettingsError
from backends.text import duration
from lachesis.figures.repaired_calls import NAME, RepairedCalls
from lachesis_messages.errors import MISSHAPEN
from lachesis_messages.records.jsonl import read_lines
from lachesis_messages.records.split_rollouts import LARGEST_REWARD
from lachesis_messages.records.step_files import SCHEMA, step_files
from lachesis_view.files import manifest_of
from lachesis_view.html import Templates, ended, write_page
from lachesis_view.html.rollout import message_view
from lachesis_view.reports.charts import Chart, Line, bar_chart, line_chart, number
from lachesis_view.reports.verdict import circumstances, troubles, verdict
from lachesis_view.rows import parsed

FILES_OF_RUNS = ("groups.jsonl", "samples.jsonl", "metrics.jsonl")
NEXT_COMMANDS = "next.json"
"""In the folder of a run: arguments of `lachesis` with which one goes on, and what each does."""
MAX_STEPS = 60
"""Steps whose rollouts are shown."""
MAX_CHARACTERS = 12_000_000
"""Of rollouts in the page."""
MAX_TEXT = 40_000
"""Characters of one text."""
_SHARE = re.compile(r"train/([^/]+)/share")


def write_report(run_dir: Path, *, title: str | None = None, output: Path | None = None, total_steps: int = 0) -> Path:
    """Write `report.html` in the folder of a run, or `output`, whole or not at all; returns its path. `total_steps` is
    the number of the last step, 0 where it is not known.

    Raises:
        LachesisError: the folder has no `metrics.jsonl`, or one that is not valid JSON; the report cannot be written.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        runs = sorted({str(file.parent) for file in run_dir.glob("*/*") if file.name in FILES_OF_RUNS})
        hint = f"name one of its runs: {', '.join(runs[:8])}" if runs else "name the folder of a run"
        raise SettingsError(f"{run_dir} has no {', '.join(FILES_OF_RUNS)}; {hint}")
    output = output or run_dir / "report.html"
    lines = list(read_lines(path, torn_tail=True))
    # SFT writes empty ones, or wrote them.
    files = {step: file for step, file in step_files(run_dir / "rollouts") if file.stat().st_size}
    evaluations, settings = _evaluations(run_dir / "eval"), parsed(manifest_of(path)[0])
    shown = _spread(sorted(files), MAX_STEPS)
    budget = MAX_CHARACTERS // max(1, len(shown))
    by_step = {line["step"]: line for line in lines}
    page = Templates(Path(__file__).parent / "templates").page(
        "training_report.html.jinja",
        title=title or run_dir.absolute().name,
        last=lines[-1]["step"] if lines else 0,
        total_steps=total_steps,
        environments=environments(lines),
        verdict=verdict(lines, evaluations),
        troubles=troubles(lines),
        circumstances=filter(None, [*circumstances(run_dir, lines), repaired(lines)]),
        folder=quote(str(run_dir)),
        commands=_commands(run_dir),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        figures=figures(lines, evaluations),
        on_files=on_files(lines),
        alarm=_repaired(lines).alarm,
        charts=[chart for chart in (*_of_environments(lines, evaluations), *_charts(lines)) if chart is not None],
        steps=[_step_view(step, by_step.get(step, {}), files[step], budget) for step in reversed(shown)],
        recorded=len(lines),
        with_rollouts=len(files),
        number=number,
        settings=settings,
    )
    try:
        write_page(output, page)
    except OSError as error:
        raise LachesisError(f"{output}: cannot be written ({error.strerror})") from error
    return output


def _commands(run_dir: Path) -> list[tuple[str, str]]:
    """What `lachesis train` wrote of how to go on; of another run, how to have its model."""
    with suppress(OSError, *MISSHAPEN):
        return [(str(command), str(does)) for command, does in json.loads((run_dir / NEXT_COMMANDS).read_bytes())]
    model = quote(f"{run_dir.absolute().name}_model")
    return [(f"export --run-dir {quote(str(run_dir))} --to {model}", "writes the trained model as a folder")]


def on_files(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what was trained came from files: no step has groups."""
    return any(line.get("train/tokens") for line in lines) and not any("train/groups" in line for line in lines)


Evaluations = Mapping[str, Mapping[int, Mapping[str, Any]]]


def figures(lines: Sequence[Mapping[str, Any]], evaluations: Evaluations | None = None) -> list[tuple[str, str]]:
    """Value and caption of what a run has done, and of what held-out items show of it."""
    if not lines:
        return []
    found = [*_held_out(evaluations or {})]
    tokens = sum(line.get("train/tokens", 0) for line in lines)
    skipped = sum(value for line in lines for name, value in line.items() if name.startswith("train/skipped/"))
    found += [(number(tokens), "tokens trained")] if tokens else []
    if any("train/samples" in line for line in lines):
        said = "examples trained, from files" if on_files(lines) else f"samples trained, {number(skipped)} skipped"
        found += [(number(sum(line.get("train/samples", 0) for line in lines)), said)]
    found += [(duration(sum(line.get("train/step_time", 0) for line in lines)), "training time")]
    return found


def _held_out(evaluations: Evaluations) -> Iterator[tuple[str, str]]:
    """The mean reward in the first and the last evaluation of each environment."""
    name = "eval/avg_reward"
    for of, of_steps in sorted(evaluations.items()):
        known = [(step, found) for step, found in sorted(of_steps.items()) if found.get(name) is not None]
        if known:
            ends = dict((known[0], known[-1]))
            low, high = (known[-1][1].get(f"{name}_{end}") for end in ("low", "high"))
            interval = "" if low is None or high is None else f"; the last one [{number(low)}, {number(high)}]"
            at = f"step{'s' * (len(ends) > 1)} {' and '.join(map(str, ends))}"
            yield (
                " → ".join(number(found[name]) for found in ends.values()),
                f"mean reward on held-out items{' of ' * bool(of)}{of}, {at}{interval}",
            )


def repaired(lines: Sequence[Mapping[str, Any]]) -> str:
    """How many calls the parser repaired, in a sentence; empty where it read none."""
    calls = _repaired(lines)
    return f"{NAME.capitalize()}: {calls}." if calls.parsed else ""


def _repaired(lines: Sequence[Mapping[str, Any]]) -> RepairedCalls:
    found = RepairedCalls()
    for line in lines:
        for counts in line.get("repaired_calls", ()):
            found.add([counts])
    return found


def _charts(lines: Sequence[Mapping[str, Any]]) -> Iterator[Chart | None]:
    steps = [line["step"] for line in lines]

    def values(name: str) -> list[float | None]:
        return [line.get(name) for line in lines]

    def parts(prefix: str) -> list[dict[str, float]]:
        return [{n.removeprefix(prefix): v for n, v in line.items() if n.startswith(prefix)} for line in lines]

    sampling = "train/sampling/"
    lengths = "train/completions/"
    reward = Line("mean of the groups", values("train/reward"), values("train/reward_low"), values("train/reward_high"))
    yield line_chart("Reward", steps, [reward], note="with its 95 % interval over groups", floor=0.0, wide=True)
    losses = [Line("training", values("train/loss")), Line("validation", values("eval/loss"))]
    yield line_chart("Loss", steps, losses, wide=not any("train/reward" in line for line in lines))
    yield line_chart(
        "Logprobs of the trained tokens",
        steps,
        [Line("sampler", values("logprobs/mean")), Line("trainer", values("logprobs/mean_training"), dashed=True)],
        note="mean; before the update",
    )
    kl = [Line("k3", values(f"{sampling}kl_k3")), Line("k1", values(f"{sampling}kl_k1"), dashed=True)]
    yield line_chart(
        "KL of sampler and trainer", steps, kl, note="nats per token; two estimates, of which k3 is never negative"
    )
    yield line_chart("Entropy", steps, [Line("sampler", values("train/entropy"))], note="nats per token")
    clip = [
        Line("above the upper bound", values("train/clip_ratio/high_mean")),
        Line("below the lower bound", values("train/clip_ratio/low_mean")),
    ]
    yield line_chart("Clip share", steps, clip, note="of the trained tokens", floor=0.0)
    size = [Line("share of the tokens", values(f"{sampling}effective_sample_size"))]
    yield line_chart("Effective sample size of the importance ratios", steps, size, floor=0.0)
    ranges = [Line("mean", *(values(f"{lengths}{name}") for name in ("mean_length", "min_length", "max_length")))]
    yield line_chart("Length of the samples", steps, ranges, note="sampled tokens; shortest to longest", floor=0.0)
    largest = Line("largest", values("train/staleness/max"), dashed=True)
    stale = [Line("mean", values("train/staleness/mean")), largest]
    yield line_chart("Staleness", steps, stale, note="versions of the weights", floor=0.0)
    repaired = [Line("share of the calls", values("train/repaired_call_rate"))]
    yield line_chart(NAME.capitalize(), steps, repaired, note="in the groups that the trainer got", floor=0.0)
    yield bar_chart("Outcomes", steps, parts("train/outcome/"), note="rollouts", kind=ended)
    yield bar_chart("Skipped and refused", steps, parts("train/skipped/"), note="samples, by reason")
    yield bar_chart("Time", steps, parts("time/"), note="seconds by phase", unit=" s")
    yield line_chart("Speed", steps, [Line("tokens per second", values("train/tokens_per_second"))], floor=0.0)
    yield line_chart("Queue", steps, [Line("groups that wait", values("train/queue"))], floor=0.0)
    yield line_chart("Norm of the gradient", steps, [Line("norm", values("train/grad_norm"))], floor=0.0)
    yield line_chart("Learning rate", steps, [Line("learning rate", values("train/learning_rate"))], floor=0.0)


def environments(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of those whose groups were trained."""
    return sorted({found[1] for line in lines for name in line if (found := _SHARE.fullmatch(name))})


def _of_environments(lines: Sequence[Mapping[str, Any]], evaluations: Evaluations) -> Iterator[Chart | None]:
    """The curves by environment: rewards and evaluations with their intervals, and shares."""
    steps, names = [line["step"] for line in lines], environments(lines)
    if len(names) > 1:
        rewards = [_with_interval(name, lines, f"train/{name}/reward") for name in names]
        note = "mean of the groups, with its 95 % interval"
        yield line_chart("Reward by environment", steps, rewards, note=note, floor=0.0, wide=True)
        shares = [Line(name, [line.get(f"train/{name}/share") for line in lines]) for name in names]
        yield line_chart("Share of the sequences", steps, shares, floor=0.0, wide=True)
    evaluated = sorted({step for of_steps in evaluations.values() for step in of_steps})
    curves = [
        _with_interval(name or "mean", [of_steps.get(step, {}) for step in evaluated], "eval/avg_reward")
        for name, of_steps in sorted(evaluations.items())
    ]
    note = "mean reward on held-out items, with its 95 % interval"
    yield line_chart("Evaluations", evaluated, curves, note=note, floor=0.0, wide=True)


def _with_interval(label: str, found: Sequence[Mapping[str, Any]], name: str) -> Line:
    return Line(label, *([line.get(f"{name}{end}") for line in found] for end in ("", "_low", "_high")))


def _evaluations(folder: Path) -> dict[str, dict[int, Mapping[str, Any]]]:
    """The figures of the evaluations beside training by environment, whose name is empty where there is one, and step;
    of several at one step those of the last."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    files = [*folder.glob("step-*/metrics.json"), *folder.glob("*/step-*/metrics.json")]
    for path in sorted(filter(Path.is_file, files), key=lambda path: path.stat().st_mtime_ns):
        of = path.parent.parent
        if match := re.match(r"step-(\d+)", path.parent.name):
            figures = json.loads(path.read_bytes())["results"]["all"]
            found.setdefault("" if of == folder else of.name, {})[int(match[1])] = figures
    return found


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """The first and the last one, and others between them at equal distances."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (count - 1))] for at in range(count)]


def _step_view(step: int, line: Mapping[str, Any], path: Path, budget: int) -> dict[str, Any]:
    groups = []
    left = budget
    for at, group in enumerate(read_lines(path)):
        if left <= 0:
            break
        if not isinstance(group, dict) or group.get("schema") != SCHEMA:
            raise SettingsError(f"{path}, line {at + 1}: it is not a group that a trainer wrote")
        view = _group_view(at, group)
        left -= view.pop("characters")
        groups.append(view)
    return {
        "step": step,
        "line": line,
        "groups": groups,
        "file": path.name,
        "count": line.get("train/groups", len(groups)),
    }


def _group_view(place: int, group: Mapping[str, Any]) -> dict[str, Any]:
    samples = []
    ids = [each["rollout_id"] or at for at, each in enumerate(group["training"])]
    for at, training in enumerate(group["training"]):
        score = (group.get("scores") or [None] * (at + 1))[at]
        record = group["samples"][at] if at < len(group["samples"]) else {}
        messages = (group.get("messages") or [])[at : at + 1]
        text = [(trained, _cut(part)) for trained, part in training["text"] or ()]
        sampled = [
            p for p, mask in zip(record.get("logprobs", ()), record.get("masks", ()), strict=True) if mask != -100
        ]
        samples.append(
            {
                **training,
                "name": f"rollout {list(dict.fromkeys(ids)).index(ids[at])}"
                + (f", sample {ids[:at].count(ids[at])}" if ids.count(ids[at]) > 1 else ""),
                "score": score if isinstance(score, float | int) and abs(score) <= LARGEST_REWARD else None,
                "messages": [_cut_message(message) for message in (messages[0] if messages else ())],
                "text": text,
                "tokens": len(sampled),
                "sampler_logprob": _mean(sampled),
                "trainer_logprob": _mean(training["trainer_logprobs"] or ()),
            }
        )
    scores = [sample["score"] for sample in samples if sample["score"] is not None]
    return {
        "number": place,
        "title": _title(samples),
        "skipped": group["skipped"],
        "detail": group["detail"],
        "shortened": group.get("shortened"),
        "mean": _mean(scores),
        "samples": samples,
        "characters": 300 * len(samples) + sum(map(_characters, samples)),
    }


def _characters(sample: Mapping[str, Any]) -> int:
    return sum(len(part) for _, part in sample["text"]) + sum(map(len, map(str, sample["messages"])))


def _cut_message(message: Any) -> dict[str, Any]:
    view = message_view(message)
    calls = [{"name": call["name"], "shown": _cut(call["shown"])} for call in view["calls"]]
    return {**view, "text": _cut(view["text"]), "reasoning": _cut(view["reasoning"]), "calls": calls}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT:,} more characters)"


def _title(samples: Sequence[Mapping[str, Any]]) -> str:
    """What the user asked, or the beginning of the first text."""
    for sample in samples:
        asked = [message["text"] for message in sample["messages"] if message["role"] == "user"]
        context = [part for trained, part in sample["text"] if not trained]
        if text := " ".join("".join(asked[:1] or context[:1]).split()):
            return text[:140]
    return ""


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None
