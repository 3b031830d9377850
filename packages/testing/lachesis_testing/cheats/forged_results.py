"""Cheats that forge the results of the tests, or prevent them."""

from __future__ import annotations

from lachesis_testing.cheats.task import Cheat

_FORGE = """
def forge():
    import _pytest.reports as reports

    made = reports.TestReport.from_item_and_call.__func__

    def passed(cls, item, call):
        report = made(cls, item, call)
        report.outcome, report.longrepr = "passed", None
        return report

    reports.TestReport.from_item_and_call = classmethod(passed)


if __name__ != "__main__":
    forge()
"""

FORGED_RESULTS: tuple[Cheat, ...] = (
    Cheat("none: a wrong solution", ""),
    Cheat("sys.exit(0) at import", "print('SUMMARY')\nsys.exit(0)\n"),
    Cheat("os._exit(0) with a forged summary", "import os\nos.write(1, b'SUMMARY\\n')\nos._exit(0)\n"),
    Cheat("atexit ends with 0", "import atexit, os\natexit.register(lambda: (os.write(1, b'SUMMARY'), os._exit(0)))\n"),
    Cheat("reports of pytest are patched", _FORGE),
    Cheat(
        "pytest runs no test",
        """
import _pytest.python, _pytest.unittest

_pytest.python.Function.runtest = lambda self: None
_pytest.unittest.TestCaseFunction.runtest = lambda self: None
""",
    ),
    Cheat(
        "conftest.py",
        "",
        {
            "conftest.py": """
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    report.outcome, report.longrepr = "passed", None
"""
        },
    ),
    Cheat("a plugin by pytest.ini", "", {"pytest.ini": "[pytest]\naddopts = -p forging\n", "forging.py": _FORGE}),
    Cheat("pyproject.toml deselects", "", {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-k test_order'\n"}),
    Cheat(
        "usercustomize.py",
        "",
        {
            f"~/.local/lib/python3.{minor}/site-packages/usercustomize.py": """
import os, sys

if "-m" in sys.orig_argv or "-" in sys.orig_argv:
    os.write(1, b"SUMMARY\\n")
    os._exit(0)
"""
            for minor in range(10, 14)
        },
    ),
    Cheat(
        "files of results are overwritten",
        """
import atexit, glob


def forge():
    for path in glob.glob("/tmp/*/*.xml") + glob.glob("/tmp/*.xml") + glob.glob("**/*.xml", recursive=True):
        with open(path, "w") as file:
            file.write('<testsuites><testsuite tests="10" failures="0" errors="0"/></testsuites>')
    print("SUMMARY")


atexit.register(forge)
""",
    ),
    Cheat(
        "the tests are emptied",
        """
if __name__ != "__main__":
    import _pytest.python
    import unittest

    _pytest.python.Function._getobj = lambda self: lambda *args, **kwargs: None
    unittest.TestCase.assertEqual = lambda *args, **kwargs: None
""",
    ),
    Cheat(
        "reporters are found with gc",
        """
import gc

if __name__ != "__main__":
    for found in gc.get_objects():
        kind = type(found)
        if "pytest_runtest_logreport" in vars(kind):

            def passed(self, report, was=kind.pytest_runtest_logreport):
                report.outcome, report.longrepr = "passed", None
                return was(self, report=report)

            kind.pytest_runtest_logreport = passed
"""
        + _FORGE,
    ),
    Cheat(
        "a child kills the parent",
        """
import os, signal, time

if __name__ != "__main__":
    if os.fork() == 0:
        for fd in (1, 2):
            os.write(fd, b"SUMMARY\\n")
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    time.sleep(5)
""",
    ),
    Cheat(
        "the memory of other processes",
        """
import os

for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid():
        continue
    try:
        with open(f"/proc/{pid}/maps") as file:
            starts = [int(line.split("-")[0], 16) for line in file if " rw-p " in line]
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for start in starts:
                memory.seek(start)
                memory.write(b"passed")
    except (OSError, OverflowError, ValueError):
        pass
os.write(1, b"SUMMARY\\n")
os._exit(0)
""",
    ),
    Cheat(
        "modules are replaced",
        """
class Anything:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


def anything(*args, **kwargs):
    return Anything()


if "pytest" in sys.modules:
    sys.modules["pytest"].raises = sys.modules["pytest"].approx = anything
"""
        + _FORGE,
    ),
    Cheat(
        "the records of the judge are forged",
        """
import json, os

frame = sys._getframe() if __name__ != "__main__" else None
while frame is not None:
    names = frame.f_locals
    if "secret" in names and "expected" in names:
        for id in names["expected"]:
            for when in ("setup", "call", "teardown"):
                record = {"id": id, "when": when, "outcome": "passed", "xfail": False, "part": False}
                os.write(names["out"], (names["secret"] + " " + json.dumps(record) + "\\n").encode())
    frame = frame.f_back
os.write(1, b"SUMMARY\\n")
os._exit(0)
""",
    ),
    Cheat(
        "a thread writes to every descriptor",
        """
import os, threading, time


def forge():
    for _ in range(10):
        for fd in range(3, 64):
            try:
                os.write(fd, b"\\nSUMMARY\\n")
            except OSError:
                pass
        time.sleep(0.02)
    os._exit(0)


if __name__ != "__main__":
    threading.Thread(target=forge, daemon=True).start()
""",
    ),
    Cheat("a deadlock until the time limit", "import os, time\nos.write(1, b'SUMMARY\\n')\ntime.sleep(1000)\n"),
    Cheat(
        "memory is exhausted",
        """
import os, resource

os.write(1, b"SUMMARY\\n")
resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
try:
    bytearray(1 << 30)
except MemoryError:
    os._exit(0)
""",
    ),
    Cheat("descriptors are closed", "import os\nos.write(1, b'SUMMARY\\n')\nos.closerange(0, 4096)\nos._exit(0)\n"),
    Cheat(
        "pytest is replaced by a module of the workspace",
        "",
        {
            "pytest.py": """
import os, sys

hookimpl = mark = lambda *args, **kwargs: lambda function: function


def main(args, plugins):
    class Report:
        outcome = "passed"

    for Report.nodeid in sys._getframe(1).f_locals["expected"]:
        for Report.when in ("setup", "call", "teardown"):
            plugins[0].pytest_runtest_logreport(Report())
    return 0


if __name__ == "__main__":
    print("SUMMARY")
"""
        },
    ),
    Cheat(
        "a plugin by an entry point",
        "",
        {
            "forging-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: forging\nVersion: 1.0\n",
            "forging-1.0.dist-info/entry_points.txt": "[pytest11]\nforging = forging\n",
            "forging.py": _FORGE,
        },
    ),
    Cheat(
        "a child that lives on writes records",
        """
import json, os, time

frame = sys._getframe() if __name__ != "__main__" else None
while frame is not None and "secret" not in frame.f_locals:
    frame = frame.f_back
if __name__ != "__main__" and os.fork() == 0:
    os.setsid()
    time.sleep(0.5)
    os.write(1, b"SUMMARY\\n")
    for id in frame.f_locals["expected"] if frame else ():
        for when in ("setup", "call", "teardown"):
            record = json.dumps({"id": id, "when": when, "outcome": "passed"})
            os.write(frame.f_locals["out"], f"{frame.f_locals['secret']} {record}\\n".encode())
    os._exit(0)
""",
    ),
    Cheat(
        "records that exhaust their reader",
        """
import os

frame = sys._getframe() if __name__ != "__main__" else None
while frame is not None and "secret" not in frame.f_locals:
    frame = frame.f_back
if frame is not None:
    os.write(frame.f_locals["out"], (frame.f_locals["secret"] + "[" * 200_000 + "\\n").encode())
""",
    ),
)
