"""The reports of runs. The pages are made by the package lachesis-view; without it there are figures and no page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from backends.plugins import Registry
from lachesis.runs.figures import Figures
from lachesis.runs.summary import Summary

REPORTS: Registry[Callable[..., Any]] = Registry("report", "lachesis.reports", {}, package="lachesis-view")
"""`run` takes a path, `title` and `groups`, and returns their `Summary`; `training` takes a folder and a `title`."""

NO_REPORT = "there is no report: the package lachesis-view writes it. Next step: pip install lachesis-view"


def write_report(path: Path, *, title: str, groups: Iterable[Mapping[str, Any]]) -> Summary:
    """Write the report of group records to `path`, if that package is installed; returns their figures.

    Raises:
        OSError: `path` cannot be written.
    """
    if "run" in REPORTS.names():
        found: Summary = REPORTS.load("run")(path, title=title, groups=groups)
        return found
    figures = Figures()
    for group in groups:
        figures.add(group)
    return figures.summary()
