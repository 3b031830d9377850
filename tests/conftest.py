"""Settings for all tests: no deadlines for hypothesis, and a line for each reason to skip a test."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

# Replaces the profile that hypothesis chose (it has another for CI): the time of an example depends on the machine.
settings.register_profile(
    "untimed", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name each reason to skip once, so that nothing is left out silently."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    for reason in sorted({place[2] for place in skipped if isinstance(place, tuple)}):
        terminalreporter.line(reason)
