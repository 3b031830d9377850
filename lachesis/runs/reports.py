"""The reports of runs. The pages are made by the package lachesis-view; without it there are figures and no page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lachesis.figures.figures import Figures
from lachesis.figures.summary import Summary
from lachesis.other_packages import VIEW

NO_REPORT = "there is no report: the package lachesis-view writes it. Next step: pip install lachesis-view"


def write_report(path: Path, *, title: str, groups: Iterable[Mapping[str, Any]]) -> Summary:
    """Write the report of group records to `path`, if that package is installed; returns their figures.

    Raises:
        OSError: `path` cannot be written.
    """
    if "report" in VIEW.names():
        found: Summary = VIEW.load("report")(path, title=title, groups=groups)
        return found
    figures = Figures()
    for group in groups:
        figures.add(group)
    return figures.summary()
