"""Each test belongs to one package, and the marks say which of them run."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run import LONGEST, ON_REQUEST, PACKAGES, ROOT, SHARING, TESTS, sample, unit

MOVED = {"backends": "sandbox", "lachesis": "core", "tool_call_parsers": "parsers"}
"""Packages with a folder of another name."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_package_has_a_folder_of_tests_and_every_module_of_tests_is_in_one() -> None:
    projects = [path.parent.name for path in (*ROOT.glob("*/pyproject.toml"), *ROOT.glob("packages/*/pyproject.toml"))]
    assert sorted(PACKAGES) == sorted(["umbrella", *(MOVED.get(name, name) for name in projects)])
    assert {path.parent for path in TESTS.rglob("test_*.py") if TESTS in path.parents[:1]} == set()
    assert set(LONGEST) <= set(PACKAGES) and all((TESTS / name).is_dir() for name in (*ON_REQUEST, *SHARING))


def test_a_package_that_is_not_there_is_named_with_those_that_are() -> None:
    done = run("-m", "tests.run", "veiw")
    assert done.returncode == 2
    assert done.stderr == f"no package 'veiw'; there are {', '.join(PACKAGES)}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "environment", "passed", "left_out"),
    [
        ([], {}, 1, 1),
        ([], {"LACHESIS_TESTS": "all"}, 2, 0),
        (["-m", "long"], {}, 1, 1),
    ],
)
def test_what_is_marked_long_runs_where_all_are_asked_for(
    more: list[str], environment: dict[str, str], passed: int, left_out: int, tmp_path: Path
) -> None:
    module = tmp_path / "test_two.py"
    module.write_text("import pytest\ndef test_short(): ...\n@pytest.mark.long\ndef test_long(): ...\n")
    command = ["-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", str(module)]
    done = run(*command, *more, **environment)
    said = [f"{passed} passed", *([f"{left_out} deselected"] if left_out else [])]
    assert done.returncode == 0 and all(text in done.stdout for text in said), done.stdout + done.stderr
    named = run(*command[:-1], f"{module}::test_long", **environment)
    assert "1 passed" in named.stdout, "a test that is named runs"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("environment", "name", "passed"),
    [
        ({}, "", 31),
        ({"LACHESIS_TESTS": "all", "LACHESIS_SAMPLE": "7"}, "", 31),
        ({"LACHESIS_SAMPLE": "7"}, "", 12),
        ({"LACHESIS_SAMPLE": "7"}, "::test_table[b-4]", 1),
    ],
    ids=["one package", "all", "all packages", "named"],
)
def test_a_sample_of_a_table_runs_where_all_packages_do(
    environment: dict[str, str], name: str, passed: int, tmp_path: Path
) -> None:
    module = tmp_path / "test_table.py"
    module.write_text(
        "import pytest\n@pytest.mark.sample(11)\n@pytest.mark.parametrize('one', range(6))\n"
        "@pytest.mark.parametrize('two', list('abcde'))\ndef test_table(one, two): ...\ndef test_other(): ...\n"
    )
    command = ["-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", "-vv"]
    done = run(*command, f"{module}{name}", **environment)
    assert f"{passed} passed" in done.stdout, done.stdout + done.stderr
    if not name:
        assert {text for text in [*"abcde", *"012345"] if not re.search(rf"[\[-]{text}[\]-]", done.stdout)} == set()
        again = run(*command, str(module), **environment).stdout
        assert re.findall(r"::\S+", again) == re.findall(r"::\S+", done.stdout), "the same ones again"


def test_a_seed_draws_one_in_six_of_the_slow_tests_and_the_same_ones_again(tmp_path: Path) -> None:
    module = tmp_path / "test_hundred.py"
    module.write_text(
        "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('one', range(300))\ndef test_slow(one): ...\n"
    )
    command = ["-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", "-vv"]
    first, again, other = (
        set(re.findall(r"::\S+", run(*command, str(module), LACHESIS_SAMPLE=seed).stdout)) for seed in "778"
    )
    assert first == again != other and all(25 <= len(drawn) <= 80 for drawn in (first, other))
    assert "300 passed" in run(*command, str(module)).stdout, "all of them in the run of a package"


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 90), st.randoms(use_true_random=False))
def test_a_sample_has_every_value_if_there_is_room(one: int, two: int, count: int, draw: random.Random) -> None:
    cases = [{"one": first, "two": second} for first in range(one) for second in range(two)]
    drawn = sample(cases, count, draw)
    assert len(set(drawn)) == len(drawn) == min(count, len(cases)) and sorted(drawn) == drawn
    if count >= one + two:
        assert {value for number in drawn for value in cases[number].items()} == {v for c in cases for v in c.items()}


def test_a_failure_shows_the_seed_that_repeats_its_draws(tmp_path: Path) -> None:
    module = tmp_path / "test_draws.py"
    module.write_text("import random\ndef test_draws(): assert random.random() > 1\n")
    command = ["-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", str(module)]
    first = run(*command)
    (seed,) = {line.split()[0].partition("=")[2] for line in first.stdout.splitlines() if "LACHESIS_SEED=" in line}
    (drawn,) = {line for line in first.stdout.splitlines() if line.startswith("E ") and "> 1" in line}
    assert drawn in run(*command, LACHESIS_SEED=seed).stdout.splitlines()


@pytest.mark.parametrize("apart", ["1", ""])
def test_a_worker_runs_a_whole_module_and_without_namespaces_all_that_start_sandboxes(
    apart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACHESIS_APART", apart)
    conformance, docs = "tests/sandbox/test_backend_conformance.py::test_x", "tests/umbrella/test_docs.py"
    names = [f"{docs}::test_a[x.md]", f"{docs}::test_b", "tests/view/test_app.py::test_a[1]", f"{conformance}[docker]"]
    names += [f"{conformance}[docker-a-b]", f"{conformance}[local-none-a]", "tests/tools/a.py::b"]
    folder = "sandbox/test_backend_conformance.py"
    expected = ["umbrella/test_docs.py ::test_a[x.md]", "umbrella/test_docs.py ::test_b", "view/test_app.py"]
    expected += [f"{folder} [docker"] * 2 + [f"{folder} [local-none", "tools/a.py"]
    assert [unit(name) for name in names] == (expected if apart else ["sandboxes"] * len(names))
    assert unit("tests/tokens/inference/test_a.py::test_b") == "tokens/inference/test_a.py", "these share nothing"


def test_workers_take_whole_modules(tmp_path: Path) -> None:
    for name in "abc":
        text = "import os, pathlib, pytest\n@pytest.mark.parametrize('value', range(6))\ndef test_it(value): "
        (tmp_path / f"test_{name}.py").write_text(
            f"{text}pathlib.Path(__file__ + f'.{{os.getpid()}}').touch()\n", encoding="utf-8"
        )
    command = ["-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    done = run(*command, "-n", "3", "--dist", "loadscope", LACHESIS_APART="1", PYTEST_DEBUG_TEMPROOT=str(tmp_path))
    assert "18 passed" in done.stdout, done.stdout + done.stderr
    assert len(list(tmp_path.glob("test_*.py.*"))) == 3


FAILS_ONCE = """
    import os, pathlib, random, pytest
    def test_first():
        seen = pathlib.Path(__file__).with_name("seen")
        drawn = str(random.random())
        if not seen.exists():
            seen.write_text(drawn)
            assert drawn == "the first time"
        assert seen.read_text() == drawn, "the seed is the same"
        assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "1", "alone"
"""
FIRST, UNSTEADY = "test_first.py::test_first", "unsteady: test_first.py::test_first"
FAILS = "def test_first():\n    assert not 'each time'\n"
FAILS_IN_TEARDOWN_ONCE = """
    import pathlib, pytest
    @pytest.fixture
    def value():
        yield 1
        seen = pathlib.Path(__file__).with_name("seen")
        if not seen.exists():
            seen.touch()
            assert not "at the end"
    def test_first(value): ...
"""
IS_MISSING = "import no_such_module\n"
MANY = """
    import pathlib, pytest
    @pytest.mark.parametrize("value", range(6))
    def test_first(value):
        with pathlib.Path(__file__).with_name("seen").open("a") as file:
            file.write("x")
        assert not "every time"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "status", "said", "not_said"),
    [
        (FAILS_ONCE, 0, ["1 failed run once more, alone: ", f"{UNSTEADY}, failed once and passed alone"], []),
        (FAILS_IN_TEARDOWN_ONCE, 0, ["at the end", f"{UNSTEADY}, failed once and passed alone"], []),
        (FAILS, 1, ["E       AssertionError: assert not 'each time'", f"failed twice: {FIRST}"], ["unsteady"]),
        (
            FAILS + FAILS_ONCE.replace("test_first", "test_second"),
            1,
            [f"failed twice: {FIRST}", "unsteady: test_first.py::test_second, failed once and passed alone"],
            [],
        ),
        (MANY, 1, ["6 failed, 1 passed", "6 failed, the first 5 run once more, alone: "], ["unsteady"]),
        (IS_MISSING, 1, ["No module named 'no_such_module'"], ["unsteady"]),
    ],
    ids=["once", "once in teardown", "twice", "one of each", "many", "no module"],
)
@pytest.mark.sample(4)
def test_a_few_that_failed_run_once_more_alone_and_the_unsteady_ones_are_named(
    text: str, status: int, said: list[str], not_said: list[str], tmp_path: Path
) -> None:
    module = tmp_path / "test_first.py"
    module.write_text("\n".join(textwrap.dedent(part) for part in text.split("\n\n")))
    (tmp_path / "test_other.py").write_text("def test_passes(): ...\n")
    start = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    start += ["-p", "tests.conftest", "-p", "no:cacheprovider"]
    program = f"from tests.run import run; raise SystemExit(run({start}, 2, ['.']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        # Not beside the folders of this run's tests, of which the next runs would remove all but three.
        env={"PYTHONPATH": str(ROOT), "PYTEST_DEBUG_TEMPROOT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == (status != 0), done.stdout + done.stderr
    for part in said:
        assert part in done.stdout, part
    assert not [part for part in not_said if part in done.stdout]
    assert "test_other" not in done.stdout.partition("run once more, alone")[2], "only what failed runs again"
    if text == MANY:
        assert (tmp_path / "seen").read_text() == "x" * 11, "five ran twice"
