"""Run the tests of all packages, or of one: `python -m tests.run [PACKAGE] [OPTION OF PYTEST ...]`.

`make test`, `make test-all` and `make test P=PACKAGE` do this. The tests of a package are in `tests/PACKAGE/`.

A few workers of pytest-xdist take one module after the other. Tests that start sandboxes look for what these leave on
the machine, so each worker has namespaces of its own (`scripts/apart.sh`). Without the right to make them (that is,
unless root runs this) one worker runs all tests of that kind.

Where a few tests fail, these run once more, alone and with the same seeds. One that passes then is unsteady: it is
named at the end, and does not fail the run. The first run does not rewrite assertions, which would take each worker
some 15 seconds; the second one does, and shows the values.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
LONGEST = ["core", "sandbox", "umbrella", "envs", "compat"]
"""The packages whose tests take longest begin."""
PACKAGES = [
    *LONGEST,
    *sorted({path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}.difference(LONGEST)),
]
ON_REQUEST = ("train/torch/", "tokens/vllm/", "testing/programs/")
"""Folders whose tests need what is installed by targets of their own."""
SHARING = ("client/", "core/evaluation/", "messages/", "parsers/", "testing/", "tokens/")
"""Folders whose tests touch nothing that is shared on a machine: they start no sandboxes."""
UNITS = {
    "umbrella/test_docs.py": re.compile(r"::.*"),
    "sandbox/test_backend_conformance.py": re.compile(r"\[[a-z]+(-bubblewrap|-none)?"),
}
"""The part of a test's name that says what one worker runs, for modules that are too long for one."""
REPEATED = 5
"""So many failed tests run once more. Where more fail, something is wrong that does not pass by itself."""
FAILED = 1
"""The exit status of pytest that ran all tests, of which some failed."""
HANGS = 400
"""Seconds after which a test of `make test` fails, as one that hangs; the longest takes a quarter of that beside
others."""
ALL = os.environ.get("LACHESIS_TESTS") == "all"
"""Whether the tests that are marked `long` run as well, and hypothesis tries all of its examples."""
SAMPLE = os.environ.get("LACHESIS_SAMPLE")
"""The seed that draws the tests marked `slow` and the cases of those marked `sample` that run. Without it, all run."""
SLOW = 1 / 6
"""The share of the tests marked `slow` that is drawn."""


def order(path: Path) -> int:
    """The place of a module of tests among those of all packages; modules elsewhere come last."""
    package = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return PACKAGES.index(package) if package in PACKAGES else len(PACKAGES)


def some(examples: int) -> int:
    """So many examples of hypothesis; in `make test` three tenths of them, and not fewer than eight: the first ones are
    the simplest, and show little."""
    return examples if ALL else min(examples, max(8, 3 * examples // 10))


def sample(cases: Sequence[Mapping[str, object]], count: int, draw: random.Random) -> list[int]:
    """The numbers of so many cases. Each value of each parameter is among them, if there is room for all values."""
    seen: set[tuple[str, object]] = set()
    first, rest = [], []
    for number in draw.sample(range(len(cases)), len(cases)):
        values = set(cases[number].items())
        (rest if values <= seen else first).append(number)
        seen |= values
    return sorted([*first, *rest][:count])


def unit(name: str) -> str:
    """What one worker runs as a whole: the module of a test, unless `UNITS` divides it.

    Without namespaces of their own, workers that started sandboxes would see each other's: one runs all of these.
    """
    module = name.partition("::")[0].removeprefix("tests/")
    if os.environ.get("LACHESIS_APART") != "1" and not module.startswith(SHARING):
        return "sandboxes"
    part = UNITS[module].search(name) if module in UNITS else None
    return f"{module} {part[0]}" if part else module


def can_be_apart() -> bool:
    return subprocess.run([ROOT / "scripts/apart.sh", "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0


def places(workers: int) -> list[str]:
    """The options of pytest-xdist for so many workers, in namespaces of their own where that is possible."""
    python = f"//python={ROOT / 'scripts/apart.sh'} {sys.executable}" if os.environ.get("LACHESIS_APART") == "1" else ""
    return ["--dist", "loadscope", "--no-loadscope-reorder", "--tx", f"{workers}*popen{python}"]


def outcomes(command: list[str], **environment: str) -> tuple[int, dict[str, list[str]], dict[str, int]]:
    """Run pytest: its exit status, the names of tests by outcome, and the seeds of those that failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        names = {**os.environ, **environment, "LACHESIS_OUTCOMES": file.name}
        process = subprocess.Popen(command, env=names)
        before = {
            # Ctrl-C reaches pytest as well, which ends its workers and says what it has seen until then.
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
        }
        status = process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        said = json.loads(file.read() or "{}")
    return status, said.get("names", {}), said.get("seeds", {})


def run(start: list[str], workers: int, tests: list[str]) -> int:
    """Run the tests on so many workers, and a few that failed once more on one: the exit status.

    `start` is how pytest starts, with its options.
    """
    status, names, seeds = outcomes([*start, "--assert=plain", *places(workers), *tests])
    count = len(names.get("failed", []))
    failed = names.get("failed", [])[:REPEATED]
    if status != FAILED or not failed:
        return status
    of = f", the first {REPEATED}" if count > REPEATED else ""
    print(f"\n{count} failed{of} run once more, alone: {' '.join(failed)}", flush=True)
    status, names, _ = outcomes([*start, *places(1), *failed], LACHESIS_SEEDS=json.dumps(seeds))
    passed = set(names.get("passed", [])) - set(names.get("failed", []))
    for name in failed:
        print(f"unsteady: {name}, failed once and passed alone" if name in passed else f"failed twice: {name}")
    return status or int(count > REPEATED or not passed.issuperset(failed))


def main(arguments: list[str]) -> None:
    options = list(arguments)
    packages = [options.pop(0)] if options and not options[0].startswith("-") else PACKAGES
    if unknown := [name for name in packages if name not in PACKAGES]:
        print(f"no package {unknown[0]!r}; there are {', '.join(PACKAGES)}", file=sys.stderr)
        raise SystemExit(2)
    # More than processors: most tests wait half of the time.
    workers = int(os.environ.get("LACHESIS_TEST_WORKERS") or 2 * len(os.sched_getaffinity(0)) + 1)
    if can_be_apart():
        os.environ["LACHESIS_APART"] = "1"
    if len(packages) > 1 and not ALL:
        os.environ["LACHESIS_SAMPLE"] = seed = os.environ.get("LACHESIS_SEED") or str(secrets.randbits(32))
        print(f"a sample of slow tests and of the cases of large tables; LACHESIS_SEED={seed} draws the same again")
    os.chdir(ROOT)
    start = [sys.executable, "-m", "pytest", "--durations=10", *(f"--ignore=tests/{name}" for name in ON_REQUEST)]
    start += [] if ALL else [f"--timeout={HANGS}"]
    raise SystemExit(run([*start, *options], workers, [f"tests/{name}" for name in packages]))


if __name__ == "__main__":
    main(sys.argv[1:])
