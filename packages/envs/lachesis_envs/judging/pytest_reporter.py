"""Runs pytest and reports the outcome of every test on a pipe of its own.

`pytest_judge` sends this file to the Python of a sandbox, which may be as old as 3.6. Nothing here has to be believed:
code under test can reach it. What it says is compared with what it cannot know.
"""

import json
import os
import sys
from typing import Any


def report(secret: str, ended: list, args: list, expected: list) -> None:  # type: ignore[type-arg]
    """Run pytest.

    Args:
        secret: begins every line of the report.
        ended: ids of tests that fail once they have ended.
        args: pytest's.
        expected: ids of the tests to run; others are left out.
    """
    out = os.dup(1)
    os.dup2(2, 1)
    import pytest

    wanted = frozenset(expected)
    write, dumps = os.write, json.dumps  # a test may replace them while it runs

    def say(**record: object) -> None:
        write(out, (secret + " " + dumps(record) + "\n").encode())

    class Reporter:
        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config: Any) -> None:
            if hasattr(config.option, "dist"):  # the workers of pytest-xdist would not know this plugin
                config.option.dist = "no"

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, config: Any, items: Any) -> None:
            left = [item for item in items if item.nodeid not in wanted]
            items[:] = [item for item in items if item.nodeid in wanted]
            if left:
                config.hook.pytest_deselected(items=left)
            for item in items:
                if item.nodeid in ended:
                    item.runtest = ending(item.runtest)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.outcome != "rerun":
                part = type(report).__name__.lower() == "subtestreport"
                expected_to_fail = hasattr(report, "wasxfail")
                say(id=report.nodeid, when=report.when, outcome=report.outcome, xfail=expected_to_fail, part=part)

    def ending(run: Any) -> Any:
        def runtest() -> None:
            run()
            pytest.fail("it has ended", pytrace=False)  # a traceback through pytest takes 0.1 s

        return runtest

    sys.argv[:] = ["pytest"]
    sys.exit(int(pytest.main(args, plugins=[Reporter()])))
