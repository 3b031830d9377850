"""Settings for all tests: no deadlines for hypothesis, an image, and a line for each reason to skip a test."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import root_images

# Replaces the profile that hypothesis chose (it has another for CI): the time of an example depends on the machine.
settings.register_profile(
    "untimed", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


@pytest.fixture
def python_image(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with Python and pytest, to which a test may add files. Its own are links, which must not change."""
    made = root_images.pytest_root(tmp_path_factory.getbasetemp() / "roots/pytest")
    image = tmp_path / "root"
    subprocess.run(["cp", "-al", made, image], check=True)
    return image


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Failures(config))


class _Failures:
    """Names each failure when it happens, not only at the end, which a run that is cut off does not reach."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.when} of {report.nodeid} failed: {report.longreprtext[-500:]}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name each reason to skip once, so that nothing is left out silently."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    for reason in sorted({place[2] for place in skipped if isinstance(place, tuple)}):
        terminalreporter.line(reason)
