"""Run the tests of all packages, or of one: `python -m tests.run [PACKAGE] [OPTION OF PYTEST ...]`.

`make test`, `make test-all` and `make test P=PACKAGE` do this. Which tests belong to which package stands here only.

A few workers of pytest-xdist take one module after the other. Tests that start sandboxes look for what these leave on
the machine, so each worker has namespaces of its own (`scripts/apart.sh`). Without the right to make them (that is,
unless root runs this) one worker runs all tests of that kind.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
PACKAGES: dict[str, list[str]] = {
    "umbrella": [
        *("test_docs.py", "test_wheel.py", "test_cookbook.py", "test_first_use.py", "test_mission.py", "golden"),
        *("test_architecture.py", "test_public_interface.py", "test_faces.py", "test_run.py"),
    ],
    "core": ["runs", "agent", "cli", "tools", "evaluation", "test_services.py"],
    "parsers": ["tool_call_parsers"],
    "sandbox": ["backends", "test_plugins.py"],
    "tokens": ["endpoint", "inference", "trajectories", "vllm"],
    "train": ["training", "torch"],
    "doors": ["doors"],
    "envs": ["environments", "task_folders", "harbor", "test_tasks.py"],
    "data": ["batch", "compression"],
    "view": ["view"],
    "compat": ["compat", "guests"],
    "testing": ["testing", "programs"],
}
"""The folders and modules of `tests/` by package, those with the longest tests first."""
ON_REQUEST = {"torch", "vllm", "programs"}
"""Folders whose tests need what is installed by targets of their own."""
SHARING = {"endpoint", "evaluation", "inference", "testing", "tool_call_parsers", "trajectories"}
"""Folders whose tests touch nothing that is shared on a machine: they start no sandboxes."""
ORDER = {name: number for number, name in enumerate(name for names in PACKAGES.values() for name in names)}
UNITS = {
    "tests/test_docs.py": re.compile(r"::.*"),
    "tests/backends/test_backend_conformance.py": re.compile(r"\[[a-z]+(-bubblewrap|-none)?"),
}
"""The part of a test's name that says what one worker runs, for modules that are too long for one."""
ALL = os.environ.get("LACHESIS_TESTS") == "all"
"""Whether the tests that are marked `long` run as well, and hypothesis tries all of its examples."""


def room(path: Path) -> str:
    """The entry of `PACKAGES` that a module of tests belongs to, if it is in `tests/`."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else path.name


def some(examples: int) -> int:
    """So many examples of hypothesis; in `make test` three tenths of them, and not fewer than eight: the first ones are
    the simplest, and show little."""
    return examples if ALL else min(examples, max(8, 3 * examples // 10))


def unit(name: str) -> str:
    """What one worker runs as a whole: the module of a test, unless `UNITS` divides it.

    Without namespaces of their own, workers that started sandboxes would see each other's: one runs all of these.
    """
    module = name.partition("::")[0]
    if os.environ.get("LACHESIS_APART") != "1" and room(ROOT / module) not in SHARING:
        return "sandboxes"
    part = UNITS[module].search(name) if module in UNITS else None
    return f"{module} {part[0]}" if part else module


def can_be_apart() -> bool:
    return subprocess.run([ROOT / "scripts/apart.sh", "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0


def main(arguments: list[str]) -> None:
    options = list(arguments)
    packages = [options.pop(0)] if options and not options[0].startswith("-") else list(PACKAGES)
    if unknown := [name for name in packages if name not in PACKAGES]:
        print(f"no package {unknown[0]!r}; there are {', '.join(PACKAGES)}", file=sys.stderr)
        raise SystemExit(2)
    # One more than processors: some tests wait most of the time.
    count = int(os.environ.get("LACHESIS_TEST_WORKERS") or len(os.sched_getaffinity(0)) + 1)
    if can_be_apart():
        os.environ["LACHESIS_APART"] = "1"
        workers = ["--tx", f"{count}*popen//python={ROOT / 'scripts/apart.sh'} {sys.executable}"]
    else:
        workers = ["--tx", f"{count}*popen"]
    chosen = sorted((name for package in packages for name in PACKAGES[package]), key=lambda name: ORDER[name])
    command = [sys.executable, "-m", "pytest", "--dist", "loadscope", "--no-loadscope-reorder", *workers]
    command += ["--durations=10", *options, *(f"tests/{name}" for name in chosen if name not in ON_REQUEST)]
    os.chdir(ROOT)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
