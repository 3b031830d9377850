"""Two evaluations of the same items, read from their files and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from backends.errors import ExitCode, LachesisError, cannot_read, refuse_empty
from backends.text import counted
from lachesis.figures.evaluations import invalid, tokens
from lachesis.figures.figures import Figures
from lachesis.figures.intervals import Mean, valid
from lachesis.figures.item_keys import repeated
from lachesis.figures.summary import Summary
from lachesis.runs.file_sink import unscored_groups
from lachesis.runs.results import RunFiles
from lachesis.runs.run_folder import changes
from lachesis_messages.records.jsonl import read_lines
from lachesis_view.html import write_page
from lachesis_view.html.parts import Parts
from lachesis_view.names import places_of
from lachesis_view.pairs import Difference, paired
from lachesis_view.reports.run import MAX_CHARACTERS, ReportedRun, mean_bars, render_page, settings_of


class ComparisonError(LachesisError):
    """Files that cannot be read as evaluations, or evaluations that have no item in common."""


class NoEvaluation(ComparisonError):
    """There is no file of samples of the name that was given."""

    exit_code = ExitCode.SETTINGS


@dataclass(frozen=True, slots=True)
class EvaluatedRun:
    """One evaluation."""

    path: Path
    title: str
    settings: Mapping[str, Any]
    """Empty if the file next to it that contains them is missing."""
    summary: Summary


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The records of `samples.jsonl`, or of a groups file, and of what has no score in the file next to it.

    Args:
        path: the file, or the folder of an evaluation.

    Raises:
        NoEvaluation: there is no such file.
    """
    path = path / "samples.jsonl" if path.is_dir() else path
    files = RunFiles(path)
    if not path.exists() and not files.failures.exists():
        played = path.with_name("groups.jsonl").exists()
        hint = "name the folder of an evaluation, or its samples.jsonl"
        if played:
            hint = "that is a run of `process`; play an evaluation, lachesis eval ENV -o FOLDER, and name its folder"
        raise NoEvaluation(f"{cannot_read(path)}; {hint}")
    done = set()
    for record in read_lines(path, torn_tail=True) if path.exists() else ():
        done.add(record.get("item_key"))
        yield record
    yield from unscored_groups(files.failures, done).values()


def read_run(path: Path) -> EvaluatedRun:
    """Raises `ComparisonError` for what is no evaluation."""
    path = path / "samples.jsonl" if path.is_dir() else path
    refuse_empty(path)
    figures, title = Figures(), ""
    records = read_samples(path)
    try:
        for record in records:
            figures.add(record)
            title = title or f"{record['environment']}: {record['model']}"
    except (KeyError, TypeError, AttributeError):
        raise ComparisonError(f"{path}: its lines are not samples of an evaluation; name a samples.jsonl") from None
    if not figures.groups:
        raise ComparisonError(f"{path}: has no samples yet; play the evaluation to its end (lachesis eval)")
    return EvaluatedRun(path, title, settings_of(path), figures.summary(tests=False))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The change from a to b, over the items that both have."""

    a: EvaluatedRun
    b: EvaluatedRun
    difference: Difference
    again: str
    """Of items that come several times in it, in words."""
    categories: Mapping[str, Difference]
    only_a: int
    """Items that b does not have."""
    only_b: int
    settings: str
    """Those that differ, in words."""

    @property
    def names(self) -> tuple[str, str]:
        """The runs for people, by what tells them apart: their models, or else the shortest part of their paths."""
        models = [run.title.partition(": ")[2] for run in (self.a, self.b)]
        if all(models) and models[0] != models[1]:
            return models[0], models[1]
        paths = [[*run.path.absolute().parent.parts, run.path.stem] for run in (self.a, self.b)]
        while len(paths[0]) > 1 < len(paths[1]) and paths[0][0] == paths[1][0]:
            paths = [path[1:] for path in paths]
        while len(paths[0]) > 1 < len(paths[1]) and paths[0][-1] == paths[1][-1]:
            paths = [path[:-1] for path in paths]
        a, b = ("/".join(path) for path in paths)
        return a, b

    def means(self) -> Iterator[tuple[str, Mean, Mean]]:
        """Each figure of both."""
        figures = self.a.summary.figures(), self.b.summary.figures()
        for name in figures[0]:
            if name in figures[1]:
                yield "mean reward" if name == "avg_reward" else name, figures[0][name][0], figures[1][name][0]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The figures side by side: name, a, b."""
        both = self.a, self.b
        yield ("run", *(run.title for run in both))
        yield ("items", *(f"{run.summary.items:,}{repeated(run.summary.scores)}" for run in both))
        yield ("samples", *(f"{run.summary.rollouts:,}" for run in both))
        yield ("invalid", *(invalid(run.summary) for run in both))
        figures = [run.summary.figures() for run in both]
        for name in figures[0] | figures[1]:
            yield ("mean reward" if name == "avg_reward" else name, *(_figure(each, name) for each in figures))
        if any(run.summary.in_place for run in both):
            yield ("graded in place", *(f"{run.summary.in_place:,}" for run in both))
        if any(run.summary.repaired.parsed for run in both):
            yield ("repaired calls", *(f"{run.summary.repaired}" for run in both))
        yield ("turns", *(f"{run.summary.turns:.2f}" for run in both))
        yield ("tokens", *(tokens(run.summary) for run in both))

    def lines(self) -> Iterator[tuple[str, str]]:
        """The subject of the comparison and its results."""
        found = self.difference
        yield "common items", f"{found.items:,}{self.again}; {self.only_a:,} only in A, {self.only_b:,} only in B"
        yield "B - A", f"{found}"
        yield "by item", f"B is higher at {found.better:,}, lower at {found.worse:,}, equal at the others"
        for name, difference in self.categories.items():
            yield f"B - A of {name}", f"{difference} ({counted(difference.items, 'item')})"
        if self.settings:
            yield "settings", self.settings


def _figure(figures: Mapping[str, tuple[Mean, float, float]], name: str) -> str:
    if name not in figures:
        return "undefined"
    mean, worst, best = figures[name]
    cases = f"; {worst:.3f} to {best:.3f} with the invalid ones" if best - worst > 1e-9 else ""
    return f"{mean}".removesuffix(", 95 % interval") + cases


def compare(a: Path, b: Path) -> Comparison:
    """Compare two evaluations item by item; an item is the same in both if its content is.

    Raises:
        ComparisonError: one cannot be read, or they have no item in common.
    """
    runs = read_run(a), read_run(b)
    scores = [run.summary.scores for run in runs]
    common = [key for key in scores[0] if key in scores[1]]
    if not common:
        raise ComparisonError(
            f"{runs[0].path} and {runs[1].path} have no item in common; compare evaluations of the same dataset"
        )
    category = dict(chain.from_iterable(run.summary.category_of.items() for run in runs))
    by_category: dict[str, list[str]] = {}
    for key in common:
        if key in category:
            by_category.setdefault(category[key], []).append(key)

    def difference(keys: list[str]) -> Difference:
        return paired(*([each[key] for key in keys] for each in scores))

    return Comparison(
        *runs,
        difference=difference(common),
        again=repeated([key for key in common if all(valid(each[key]) for each in scores)]),
        categories={name: difference(keys) for name, keys in sorted(by_category.items())},
        only_a=len(scores[0]) - len(common),
        only_b=len(scores[1]) - len(common),
        settings=changes(runs[0].settings, runs[1].settings, words=("in A", "in B"))
        if all(run.settings for run in runs)
        else "",
    )


def write_comparison(path: Path, found: Comparison) -> None:
    """Write a page with both runs side by side, whole or not at all."""
    parts = Parts(MAX_CHARACTERS)
    runs = [ReportedRun(name, places=places_of(of.path)) for name, of in (("A", found.a), ("B", found.b))]
    for run, of in zip(runs, (found.a, found.b), strict=True):
        run.read(read_samples(of.path), parts)
    differences = {"all": found.difference, **found.categories}
    html = render_page(
        parts,
        title=f"{found.names[1]} against {found.names[0]}",
        runs=runs,
        names=[f"A: {found.names[0]}", f"B: {found.names[1]}"],
        found=found,
        differences=mean_bars([(name, each, each.items) for name, each in differences.items()]),
    )
    write_page(path, html)
