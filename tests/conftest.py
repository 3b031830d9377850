"""Settings for all tests: which run, hypothesis without deadlines, an image, a line for each reason to skip a test."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.run import ALL, SAMPLE, SLOW, order, sample, some, unit
from tests.support import root_images

# Replaces the profile that hypothesis chose (it has another for CI): the time of an example depends on the machine.
# A failure prints what repeats it.
settings.register_profile(
    "untimed",
    parent=settings.default,
    deadline=None,
    max_examples=some(100),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
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
    if config.option.basetemp:  # of a worker, which may have another /tmp than the process that names it
        Path(config.option.basetemp).parent.mkdir(parents=True, exist_ok=True)
    # A shell that starts the tests in the background lets them ignore Ctrl-C, and with them every program that a test
    # starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `long`, and draw from what is marked `slow` or `sample`; not if a test is named, or all
    are asked for. Packages with long tests come first."""
    named = any("::" in argument for argument in config.args)
    if not ALL and not named and not config.option.markexpr:
        out = {item for item in items if item.get_closest_marker("long")}
        out |= not_drawn([item for item in items if item not in out]) if SAMPLE else set()
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    items.sort(key=lambda item: order(item.path))  # stable


def not_drawn(items: list[pytest.Item]) -> set[pytest.Item]:
    tests: dict[str, list[pytest.Function]] = {}
    # Each by its own name, so that a seed draws the same ones whatever is added.
    slow = {item for item in items if item.get_closest_marker("slow")}
    out = {item for item in slow if random.Random(f"{SAMPLE} {item.nodeid}").random() > SLOW}
    for item in items:
        if item not in slow and isinstance(item, pytest.Function) and item.get_closest_marker("sample"):
            tests.setdefault(f"{item.parent and item.parent.nodeid}::{item.originalname}", []).append(item)
    for name, cases in tests.items():
        (mark,) = cases[0].iter_markers("sample")
        drawn = sample([values(case) for case in cases], mark.args[0], random.Random(f"{SAMPLE} {name}"))
        out |= {case for number, case in enumerate(cases) if number not in drawn}
    return out


def values(item: pytest.Function) -> dict[str, object]:
    """The parameters of a case. One that is no text or number goes by its place in its table."""
    of = item.callspec
    return {name: value if isinstance(value, str | int) else of.indices[name] for name, value in of.params.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadscope`: which tests one worker runs one after the other. (`loadgroup` needs an older pytest.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    return Units(config, log) if config.option.dist == "loadscope" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws from `random` by a seed of its own; a failure shows it, and LACHESIS_SEED repeats the draws."""
    again = json.loads(os.environ.get("LACHESIS_SEEDS", "{}")).get(item.nodeid)
    seed = int(os.environ.get("LACHESIS_SEED") or again or secrets.randbits(32))
    random.seed(seed)
    item.user_properties.append(("seed", seed))
    item.add_report_section("setup", "seed", f"LACHESIS_SEED={seed} draws the same again")


class _Outcomes:
    """Shows each failure when it happens, not only at the end, which a run that is cut off does not reach.

    Which tests passed and which failed goes to the file that `tests/run.py` names.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._to = os.environ.pop("LACHESIS_OUTCOMES", None)  # not of a pytest that a test starts
        self._names: dict[str, list[str]] = {"passed": [], "failed": []}
        self._seeds: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed(report, f"{report.when} of {report.nodeid}", dict(report.user_properties).get("seed"))
        elif report.passed and report.when == "call":
            self._names["passed"].append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed(report, f"collection of {report.nodeid}")

    def _failed(self, report: pytest.TestReport | pytest.CollectReport, what: str, seed: Any = None) -> None:
        text = report.longreprtext if not self._names["failed"] else report.longreprtext[-500:]
        if report.nodeid not in self._names["failed"]:
            self._names["failed"].append(report.nodeid)
        if isinstance(seed, int):
            self._seeds[report.nodeid] = seed
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(f"\n{what} failed: {text}")

    def pytest_sessionfinish(self) -> None:
        if self._to:
            Path(self._to).write_text(json.dumps({"names": self._names, "seeds": self._seeds}), encoding="utf-8")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name each reason to skip once, so that nothing is left out silently."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    for reason in sorted({place[2] for place in skipped if isinstance(place, tuple)}):
        terminalreporter.line(reason)
