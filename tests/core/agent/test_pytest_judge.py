"""A suite that judges code in its own interpreter: what a right solution passes, and nothing else does."""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from backends import SandboxSpec, create_backend
from backends.host.folders import cache_folder
from lachesis.loop.judgement import Judgement, TestVerdict
from lachesis.rewards import AgentFault
from lachesis.rewards.reward import RewardError
from lachesis.tool_context.artifacts import Artifacts
from lachesis.tool_context.pace import MachineOverloaded, OwnTime, pace
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.judging import pytest_judge
from lachesis_envs.judging.changed_tests import ENDED, INVERTED, VALUE, TestFile
from lachesis_envs.judging.pytest_judge import PytestJudge, other_changes
from lachesis_testing.cheats import IDS, SOLUTION, TEST_PATH, TESTS, WRONG
from lachesis_tools import BUILTIN_TOOLS, ToolSessions
from tests.support.busy_machine import busy_machine, quiet_machine
from tests.support.judges import AGENTS, JUDGES, table

VENV = Path(sys.prefix)
PYTHON = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {VENV}/bin/python"

HELPERS = """
import contextlib, unittest
from datetime import datetime
from unittest import mock
import pytest

def raising(*args): raise KeyError("no")
numbers, found, words, called = [3, 1, 2], {"a": [1, 2.5], "b": None}, "two words", mock.Mock()
called(7)
maybe, expectation = pytest.raises(ValueError), pytest.raises
"""
CERTAIN = {
    "assert sorted(numbers) == [1, 2, 3]": VALUE,
    "assert 6 == sum(numbers), 'a message'": VALUE,
    "assert found == {'a': [1, 2.5], 'b': None}": VALUE,
    "assert words == 'two words'": VALUE,
    "assert words.encode() == b'two words'": VALUE,
    'assert words == "two " "words"': VALUE,
    "assert -max(numbers) == -3 and words": VALUE,
    "assert max(numbers) == pytest.approx(3.0)": VALUE,
    "assert (max(numbers)) == (\n        3\n    )": VALUE,
    "with pytest.raises(ValueError):\n        int(words)": VALUE,
    "with pytest.raises(KeyError):\n        raising()": INVERTED,
    "assert max(numbers) == pytest.approx(3.0) == 3 or words": ENDED,
    "assert max(numbers) * 1e-14 == pytest.approx(3e-14)": INVERTED,
    "assert '\\n\\t' * 1 == '\\n\\t'": INVERTED,
    "assert words + '\\n1' == 'two words\\n1'": VALUE,
    "with contextlib.nullcontext():\n        assert max(numbers) == 3": VALUE,
    "called.assert_called_once_with(7)": VALUE,
    "assert numbers == found['a'] or max(numbers) == 3\n    assert len(words) > 3": INVERTED,
    "assert numbers is numbers": INVERTED,
    "class Same(dict):\n        __eq__ = lambda *_: True\n    assert Same() == numbers": INVERTED,
    "assert numbers is not found": INVERTED,
    "assert 'two' in words": INVERTED,
    "assert 'ten' not in words": INVERTED,
    "assert not found['b']": INVERTED,
    "assert isinstance(words, str)": INVERTED,
    "assert callable(raising) is True": VALUE,
    "case.assertIs(callable(raising), True)": VALUE,
    "wanted = [1, 2, 3]\n    assert sorted(numbers) == wanted": VALUE,
    "wanted = [3]\n    wanted += [1, 2]\n    assert numbers == wanted": INVERTED,
    "assert datetime.fromisoformat('2023-11-21') == datetime(2023, 11, day=21)": VALUE,
    "assert found['b'] is None": INVERTED,
    "assert max(numbers) >= 3": INVERTED,
    "assert sum(numbers) == sum(reversed(numbers))": INVERTED,
    "assert words == f'{words}'": INVERTED,
    "case.assertEqual(max(numbers), 3)": VALUE,
    "case.assertEqual(max(numbers), len(numbers), 'a message')": INVERTED,
    "case.assertRaises(KeyError, raising)": INVERTED,
    "case.assertRaises(ValueError, int, words)": VALUE,
    "case.assertAlmostEqual(3.0, float(max(numbers)))": VALUE,
    "case.assertIn('two', words)": INVERTED,
    "case.assertTrue(words)": INVERTED,
    "case.assertLess(1, max(numbers))": INVERTED,
    "case.assertIsNone(found['b'])": INVERTED,
    "if not numbers:\n        return\n    assert max(numbers) == 3": ENDED,
    "for number in []:\n        assert number == 3": ENDED,
    "with contextlib.suppress(AssertionError):\n        assert max(numbers) == 3": ENDED,
    "with pytest.raises(KeyError) as caught:\n        raising()\n        assert max(numbers) == 3": INVERTED,
    "with maybe as e:\n        int(words)\n        assert 1 == e": ENDED,
    "with expectation(ValueError):\n        int(words)\n        assert max(numbers) == 3": ENDED,
    "with mock.patch('math.pi', 3):\n        assert max(numbers) == 3": VALUE,
    "try:\n        assert max(numbers) == 3\n    except AssertionError:\n        pass": ENDED,
    "assert {'a': 3} == {'a': 1, 'a': 3}": VALUE,
    "assert {'two words': 5, 'a': 2} == {words: 1, 'two words': 5, 'a': 2}": VALUE,
    "assert {'a': 3, **found} == {'a': 3, **found}": INVERTED,
    "assert {1, 2} == {1, 1, 2}": VALUE,
    "raising if numbers else None": ENDED,
}
"""Bodies of tests that pass, with the strongest change that is certain to make them fail."""


@pytest.mark.parametrize("body", CERTAIN)
def test_a_changed_test_fails_wherever_the_test_passes(body: str) -> None:
    def run(text: bytes) -> None:
        names: dict[str, Any] = {}
        exec(compile(text, "test_it.py", "exec"), names)
        names["test_it"](__import__("unittest").TestCase())

    source = f"{HELPERS}\n\ndef test_it(case=None):\n    # ümläut: offsets are in bytes\n    {body}\n".encode()
    file = TestFile("test_it.py", source)
    run(source)
    function = file.function("test_it.py::test_it")
    for seed in range(20):
        change = file.change(function, ["test_it.py::test_it"], random.Random(seed))
        assert change.kind == CERTAIN[body], change
        changed = file.changed([change])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an unknown escape sequence would tell, and break suites that are strict
            compile(changed, "test_it.py", "exec")
        assert changed != source and "ümläut".encode() in changed
        with pytest.raises((AssertionError, KeyError, ValueError, pytest.fail.Exception)):
            run(changed)


SUITE = """
import unittest

import pytest


class Base:
    def test_inherited(self):
        assert max(1, 2) == 2


class TestIt(Base):
    @pytest.mark.parametrize("a, expected", [(1, 1), ("x-y", 2), (None, 3.5)])
    def test_rows(self, a, expected):
        assert {1: 1, "x-y": 2, None: 3.5}[a] == expected

    @pytest.mark.parametrize(("a", "expected"), [(1, 1), (2, 2)], ids=["one", "two"])
    def test_named(self, a, expected):
        assert a == expected

    @pytest.mark.parametrize("a", [1, 2])
    @pytest.mark.parametrize("expected", [3, 4])
    def test_product(self, a, expected):
        assert a + 2 == expected

    @pytest.mark.parametrize("a, expected", [([1], [1]), (object, "object")])
    def test_objects(self, a, expected):
        assert getattr(a, "__name__", a) == expected
"""


@pytest.mark.parametrize(
    ("test", "params", "kind", "renames"),
    [
        ("test_rows", ["1-1", "x-y-2", "None-3.5"], VALUE, True),
        ("test_named", ["one", "two"], VALUE, False),
        ("test_product", ["3-1", "3-2"], INVERTED, False),
        ("test_objects", ["a0-expected0", "object-object"], INVERTED, False),
        ("test_inherited", [], VALUE, False),
    ],
)
def test_changed_parameters_keep_the_ids_known(test: str, params: list[str], kind: str, renames: bool) -> None:
    file = TestFile("t/test_a.py", SUITE.encode())
    ids = [f"t/test_a.py::TestIt::{test}[{name}]" for name in params] or [f"t/test_a.py::TestIt::{test}"]
    change = file.change(file.function(ids[0]), ids, random.Random(3))
    assert change.kind == kind
    assert {id != change.renamed.get(id, id) for id in ids} == {renames}


ROWS = """
import pytest
from .others import imported, other

@pytest.fixture
def of_n(n): return list(range(n))
@pytest.fixture
def of_m(m=1): return [1]
def made(k): return k
built = pytest.fixture(made)

{marks}
@pytest.mark.parametrize("{name}", [10, 25]{options})
def test_it({name}{arguments}):
    assert made({name}=1) == {name}

@pytest.mark.parametrize("p", [1])
def test_more(p, of_m):
    assert p == 1
"""


@pytest.mark.parametrize(
    ("name", "arguments", "options", "marks", "conftest", "kind"),
    [
        ("p", "", "", "", "", VALUE),
        ("p", ", of_m, tmp_path", "", "@pytest.mark.slow", "import pytest\n", VALUE),
        ("n", ", of_n", "", "", "", INVERTED),
        ("n", "", "", "", "", INVERTED),
        ("m", "", "", "", "", INVERTED),
        ("k", "", "", "", "", INVERTED),
        ("p", "", ", indirect=True", "", "", INVERTED),
        ("p", "", ", ids=str", "", "", INVERTED),
        ("p", ", imported", "", "", "", INVERTED),
        ("p", "", "", "@other", "", INVERTED),
        ("p", "", "", "", "@pytest.fixture(autouse=True)\ndef ready(p): pass\n", INVERTED),
        ("p", "", "", "", "def pytest_runtest_setup(item): item.callspec.params['p']\n", INVERTED),
        ("p", "", "", "", "this is of no Python", INVERTED),
    ],
)
def test_a_parameter_that_a_fixture_may_take_is_not_changed(
    name: str, arguments: str, options: str, marks: str, conftest: str, kind: str
) -> None:
    """The fixture would get the other value too, and a right solution would pass the changed test."""
    text = ROWS.format(name=name, arguments=arguments, options=options, marks=marks)
    ids = [f"t/test_a.py::test_it[{value}]" for value in (10, 25)]
    for is_given in (True, False):
        suite: dict[str, TestFile | bytes] = {"t/test_a.py": TestFile("t/test_a.py", text.encode())}
        others = [] if is_given else [conftest.encode()]
        if is_given:
            suite["t/conftest.py"] = conftest.encode()
        plan = pytest_judge._Plan(suite, ids, random.Random(1), others)
        assert plan.changes[ids[0]].kind == kind, plan.changes[ids[0]]


Judge = Callable[..., Any]


@pytest.fixture
async def judge() -> AsyncIterator[Judge]:
    """Judges what an agent leaves: `await judge({path: text}, expect=..., tests=...)`."""
    async with ToolSessions(create_backend("local", mounts=[str(VENV)])) as sessions:

        async def judged(left: dict[str, str], before: str = "", **options: Any) -> Judgement:
            name = f"task-{len(list(sessions))}"
            ctx = ToolContext(sessions.open(name), BUILTIN_TOOLS, open_verifier=lambda: sessions.open("verifier"))
            for path, text in left.items():
                await ctx.write_file(path, text)
            if before:
                await ctx.terminal(before)
            options = {"sources": list(left), "python": PYTHON, "timeout": 60, **options}
            return await ctx.judge_pytest(**options)

        yield judged


async def test_a_right_solution_passes_and_every_verdict_is_shown(judge: Judge) -> None:
    found = await judge({"shop.py": SOLUTION}, tests={TEST_PATH: TESTS}, expect=IDS)
    assert found.passed and found.fraction == 1.0 and not found.forged, found
    assert list(found.tests) == list(IDS)
    assert {verdict.kind for verdict in found.tests.values()} == {VALUE, INVERTED}
    assert "passed" in found.output and "changed" not in found.output


async def test_fixtures_of_the_tree_are_known_and_each_number_has_its_changes(python_image: Path) -> None:
    rows = "import pytest\n@pytest.mark.parametrize('n', [10, 25])\ndef test_it(n):\n    assert N == [n]\nN = []\n"
    rows += "def test_constant():\n    assert 12345678 == 12345678\n"
    made = "import pytest, test_it\n@pytest.fixture(autouse=True)\ndef data(request):\n"
    made += "    test_it.N[:] = request.node.callspec.params.values() if hasattr(request.node, 'callspec') else ()\n"
    (python_image / "repo/tests").mkdir(parents=True)
    (python_image / "repo/tests/conftest.py").write_text(made)
    ids = ["tests/test_it.py::test_it[10]", "tests/test_it.py::test_it[25]", "tests/test_it.py::test_constant"]
    options: dict[str, Any] = {"tests": {"tests/test_it.py": rows}, "expect": ids, "timeout": 60}
    options["python"] = "PYTHONPATH=/opt/pytest python3"
    shown, spec = set(), SandboxSpec(image=str(python_image), workdir="/repo")
    async with ToolSessions(create_backend("local"), spec) as sessions:
        for number in range(3):
            other_changes.set(bytes([number]))
            name = f"verifier-{number}"
            ctx = ToolContext(
                sessions.open(f"task-{number}"), BUILTIN_TOOLS, open_verifier=functools.partial(sessions.open, name)
            )
            await ctx.write_file("shop.py", SOLUTION)
            found = await ctx.judge_pytest(["shop.py"], **options)
            assert found.passed and found.tests[ids[0]].kind == INVERTED, found
            shown.add(found.tests[ids[2]].change)
    assert len(shown) > 1


class Noting(random.Random):
    """Notes the threads that draw from it."""

    threads: set[int]

    def random(self) -> float:
        self.threads.add(threading.get_ident())
        return super().random()


async def test_the_tests_are_changed_beside_the_event_loop(tmp_path: Path) -> None:
    """A large suite takes seconds to read and to change: other rollouts go on meanwhile."""
    chosen = Noting()
    chosen.threads = set()
    async with ToolSessions(create_backend("local", mounts=[str(VENV)])) as sessions:
        made = PytestJudge({TEST_PATH: TESTS}, IDS, PYTHON, (), 60, lambda: sessions.open("verifier"), chosen)
        solution = tmp_path / "shop.py"
        solution.write_text(SOLUTION)
        found = await made.judge(Artifacts(tmp_path, {"shop.py": solution}), allow=(), rounds=1)
    assert found.passed
    assert chosen.threads and threading.get_ident() not in chosen.threads


def test_a_test_is_changed_to_the_same_in_every_grading() -> None:
    """Code of two gradings can talk. If a test had two changes, the text that both know would be the right one."""
    texts = (TESTS, "# a later version of the file\n" + TESTS + "\ndef test_more():\n    assert 1 == 1\n")
    plans = [
        pytest_judge._Plan({TEST_PATH: TestFile(TEST_PATH, text.encode())}, IDS, random.Random(seed))
        for seed in range(8)
        for text in texts
    ]
    assert len({tuple(plan.changes[id].shown for id in IDS) for plan in plans}) == 1
    assert len({frozenset(plan.first) for plan in plans}) > 1, "in which run is drawn for each"


KEY = "from lachesis_envs.judging import pytest_judge; print(pytest_judge._secret().hex(), flush=True); input()"


async def test_processes_that_grade_at_once_have_one_key_that_no_sandbox_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keys = []
    for _ in range(2):
        graders = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", KEY), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            for _ in range(3)
        ]
        said = [await grader.stdout.readline() for grader in graders if grader.stdout is not None]
        keys.append({line.decode().strip() for line in said})
        assert len(keys[-1]) == 1
        graders[0].kill()
        await asyncio.gather(*(grader.communicate(b"\n") for grader in graders))
    path = tmp_path / "cache/lachesis/judge.key"
    assert keys[0] != keys[1] == {path.read_bytes().hex()}, "a new one after the last has ended"
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.undo()
    pytest_judge._secret()
    path = cache_folder() / "judge.key"
    assert path.exists()
    async with ToolSessions(create_backend("local", mounts=[str(VENV)])) as sessions:
        sandbox = await sessions.open("code").sandbox()
        done = await sandbox.exec(f"cat {path} || find / -name judge.key 2>/dev/null", timeout=60)
    assert done.stdout == b"" and b"No such file" in done.stderr


async def test_what_is_no_pass_does_not_count(judge: Judge) -> None:
    """Skipped, expected to fail, broken by a fixture, missing: each is named."""
    suite = """
import pytest, unittest
import shop

@pytest.fixture
def broken():
    raise RuntimeError

@pytest.fixture
def breaks_later():
    yield 1
    raise RuntimeError

def test_good(): assert shop.total([1, 2]) == 3
def test_bad(): assert shop.total([1, 2]) == 4
def test_skipped(): pytest.skip("not here")
@pytest.mark.xfail
def test_xfailed(): assert shop.total([1]) == 2
@pytest.mark.xfail(strict=False)
def test_xpassed(): assert shop.total([1]) == 1
def test_setup(broken): assert shop.total([1]) == 1
def test_teardown(breaks_later): assert shop.total([1]) == 1
class Parts(unittest.TestCase):
    def test_parts(self):
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(shop.total([number]), number)
    def test_bad_part(self):
        with self.subTest(number=1):
            self.assertEqual(shop.total([1]), 2)
        self.assertEqual(shop.total([1]), 1)
"""
    wanted = {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_xfailed": "xfailed",
        "test_xpassed": "xfailed",
        "test_setup": "error",
        "test_teardown": "error",
        "Parts::test_parts": "passed",
        "Parts::test_bad_part": "failed",
        "test_good[none]": "missing",
    }
    ids = [f"test_it.py::{name}" for name in wanted]
    found = await judge({"shop.py": SOLUTION}, tests={"test_it.py": suite}, expect=ids)
    assert {id.partition("::")[2]: verdict.outcome for id, verdict in found.tests.items()} == wanted
    assert [verdict.passed for verdict in found.tests.values()] == [outcome == "passed" for outcome in wanted.values()]
    assert not found.forged and found.fraction == 0.2


def test_a_wrong_solution_that_passes_a_changed_test_by_accident_is_not_forged() -> None:
    def judgement(*outcomes: tuple[str, str]) -> Judgement:
        tests = {str(at): TestVerdict(*outcome, VALUE) for at, outcome in enumerate(outcomes)}
        return Judgement(tests, "")

    assert judgement(("failed", "passed"), ("passed", "failed")).fraction == 0.5
    assert judgement(("passed", "passed"), ("passed", "failed")).fraction == 0.0
    assert judgement(("contradictory", "failed"), ("passed", "failed")).fraction == 0.0
    assert judgement(("passed", "missing"), ("passed", "failed")).fraction == 0.5


async def test_the_tree_is_fresh_and_the_named_sources_are_as_the_agent_left_them(python_image: Path) -> None:
    """The image is a repository. The agent changes a file, removes another, and spoils what it did not name."""
    image = python_image
    for path, text in {
        "pkg/__init__.py": "",
        "pkg/code.py": "def value(): return 1\n",
        "pkg/old.py": "",
        "tests/test_code.py": "from pkg.code import value\n\n\ndef test_value():\n    assert value() == 2\n",
        "tests/test_old.py": "import os\n\n\ndef test_gone():\n    assert not os.path.exists('pkg/old.py')\n",
        "tests/conftest.py": "",
    }.items():
        (image / "repo" / path).parent.mkdir(parents=True, exist_ok=True)
        (image / "repo" / path).write_text(text)
    spec = SandboxSpec(image=str(image), workdir="/repo")
    async with ToolSessions(create_backend("local"), spec) as sessions:
        ctx = ToolContext(sessions.open("task"), BUILTIN_TOOLS, open_verifier=lambda: sessions.open("verifier"))
        await ctx.write_file("pkg/code.py", "def value(): return 2\n")
        await ctx.terminal("rm pkg/old.py; echo 'raise SystemExit(0)' > tests/conftest.py; rm -rf /opt/pytest")
        found = await ctx.judge_pytest(
            ["pkg"],
            expect=["tests/test_code.py::test_value", "tests/test_old.py::test_gone"],
            python="PYTHONPATH=/opt/pytest python3",
            timeout=60,
        )
        assert found.passed, found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "/usr/bin/env python-none"}, "cannot run pytest in a fresh sandbox.*Next step"),
        ({"expect": ["tests/test_none.py::test_a"]}, "neither in `tests` nor in the fresh tree"),
        (
            {"expect": [f"{TEST_PATH}::test_none"], "tests": {TEST_PATH: "def test_a(): pass"}},
            "has no test of the expected id",
        ),
        ({"tests": {TEST_PATH: "def test_a(:"}}, "cannot be read by the Python"),
        ({"sources": ["/etc/hosts"]}, "/etc/hosts is not in the workspace"),
        ({"expect": []}, "expect is empty"),
    ],
)
async def test_what_the_environment_has_to_correct_is_never_a_score(judge: Judge, options: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        await judge({"shop.py": SOLUTION}, **{"tests": {TEST_PATH: TESTS}, "expect": IDS, **options})


@pytest.mark.slow
async def test_an_agent_that_breaks_the_run_is_scored(judge: Judge) -> None:
    found = await judge({"shop.py": "raise SystemExit(0)"}, tests={TEST_PATH: TESTS}, expect=IDS)
    assert found.fraction == 0.0 and {verdict.outcome for verdict in found.tests.values()} == {"missing"}
    with quiet_machine():
        found = await judge({"shop.py": "import time; time.sleep(60)"}, tests={TEST_PATH: TESTS}, expect=IDS, timeout=3)
    assert found.fraction == 0.0 and "took longer than" in found.output


@pytest.mark.long
async def test_a_right_solution_on_an_overloaded_machine_is_not_a_low_score(judge: Judge) -> None:
    suite = "import time\nwhile time.process_time() < 0.6: pass\n" + TESTS
    with busy_machine():
        try:
            found = await judge({"shop.py": SOLUTION}, tests={TEST_PATH: suite}, expect=IDS, timeout=1.5)
        except MachineOverloaded as error:
            assert "took longer than" in str(error) and "Next step" in str(error)
        else:
            assert found.passed


def test_a_late_program_shows_that_it_hangs_only_where_its_own_time_is_measured() -> None:
    for waited, used_up, enough in ((None, False, False), (0.0, True, True), (70.0, False, True), (80.0, False, False)):
        took = OwnTime(100.0, waited)
        assert (took.uses_up(100.0), took.is_enough(100.0)) == (used_up, enough)


@pytest.mark.long
@pytest.mark.parametrize("hang", ["while True: pass", "import time; time.sleep(600)"], ids=["loop", "sleep"])
async def test_a_solution_that_hangs_is_scored_on_an_overloaded_machine_too(judge: Judge, hang: str) -> None:
    with busy_machine(12):
        found = await judge({"shop.py": hang}, tests={TEST_PATH: TESTS}, expect=IDS, timeout=1.5)
    assert found.fraction == 0.0 and "took longer than" in found.output


async def test_a_sandbox_that_may_use_little_of_a_processor_is_not_an_overloaded_machine() -> None:
    async with ToolSessions(create_backend("local"), SandboxSpec(cpus=0.1)) as sessions:
        limited, free = sessions.open("limited").another(), sessions.open("free", spec=SandboxSpec(cpus=0))
        found = [await pace(await each.sandbox(), each.cpus) for each in (limited, free)]
    assert found[0].stretch < 5 * found[1].stretch  # 10 times as slow


async def test_a_source_that_fills_the_verifiers_disk_is_the_agents_fault() -> None:
    spec = SandboxSpec(disk_bytes=8 << 20)
    async with ToolSessions(create_backend("local", mounts=[str(VENV)]), spec) as sessions:
        ctx = ToolContext(sessions.open("task"), BUILTIN_TOOLS, open_verifier=lambda: sessions.open("verifier"))
        await ctx.terminal("head -c 8300000 /dev/zero > shop.py")
        with pytest.raises(AgentFault, match="No space left"):
            await ctx.judge_pytest(
                ["shop.py"], {TEST_PATH: TESTS, "tests/data": b"x" * 200_000}, expect=IDS, python=PYTHON
            )


async def test_what_honest_suites_do_to_their_interpreter_accuses_nobody(judge: Judge) -> None:
    suite = """
import json, os, pytest
from shop import total

@pytest.fixture
def replaced(monkeypatch):
    monkeypatch.setattr(os, "write", None)
    monkeypatch.setattr(json, "dumps", None)

def test_fakes(replaced): assert total([1]) == 1
def test_strict(): assert "%s\\n\\t" % total([1]) == "1\\n\\t"
def test_runs(): total([1])
"""
    settings = "[pytest]\naddopts = -x --sw -n 2 -p xdist.plugin\nfilterwarnings = error\n"
    tests = {"test_it.py": suite, "pytest.ini": settings}
    names = [f"test_it.py::{name}" for name in ("test_fakes", "test_strict", "test_runs")]
    found = await judge({"shop.py": SOLUTION}, tests=tests, expect=names)
    assert found.passed, found


async def test_no_record_of_the_agents_stops_the_judge(judge: Judge) -> None:
    """Its code knows the secret that begins a record, and writes one that exhausts whoever reads it."""
    attack = """
import os, sys

frame = sys._getframe()
while "secret" not in frame.f_locals:
    frame = frame.f_back
for text in ("[" * 200_000, '{"id": 1}', '{"id": "x", "when": "call", "outcome": ' + "[" * 900 + "]" * 900 + "}"):
    os.write(frame.f_locals["out"], f"{frame.f_locals['secret']} {text}\\n".encode())
"""
    found = await judge({"shop.py": WRONG + attack}, tests={TEST_PATH: TESTS}, expect=IDS)
    assert 0 < found.fraction < 1 and not found.forged


@pytest.mark.parametrize(
    ("header", "is_read"),
    [("# -*- coding: utf-8 -*-", True), ("#!/usr/bin/python\n# coding=UTF_8", True), ("# coding: latin-1", False)],
)
def test_a_file_that_names_another_encoding_keeps_its_text(header: str, is_read: bool) -> None:
    file = TestFile("t.py", f"{header}\ndef test_a():\n    assert 1 == 1\n".encode())
    change = file.change(file.function("t.py::test_a"), ["t.py::test_a"], random.Random(1))
    assert change.kind == (VALUE if is_read else ENDED)
    assert (file.changed([change]) != file.source) is is_read


@pytest.mark.parametrize(
    "text",
    [
        "def test_a(): pass\n",
        "def test_a():\n\tpass",
        "def test_a():\n    if 1:\n        return\n    print()\n",
        'def test_a():\n    print("""\n""")\n    # the end\n\n\nX = 1\n',
        "def test_a():\n    return None\n",
    ],
)
def test_a_test_without_a_place_to_change_fails_at_its_end_by_its_text(text: str) -> None:
    file = TestFile("t.py", text.encode())
    change = file.change(file.function("t.py::test_a"), ["t.py::test_a"], random.Random(1))
    assert change.kind == ENDED and change.edits
    names: dict[str, Any] = {}
    exec(file.changed([change]), names)
    with pytest.raises(AssertionError):
        names["test_a"]()


COMMON = """
class Common:
    def test_sum(self):
        assert self.total([2, 3]) == 5
"""
EMPTYING = """
def emptied(cls, **kwargs):
    for name in dir(cls):
        if name.startswith("test_"):
            setattr(cls, name, lambda self: None)

__import__("tests.common").common.Common.__init_subclass__ = classmethod(emptied)
"""


async def test_an_inherited_test_is_changed_where_it_is_written(judge: Judge) -> None:
    """Code that empties the tests of a class would pass, if these failed only after their end."""
    below = " total = staticmethod(shop.total)"
    tests = {
        "tests/__init__.py": "",
        "tests/common.py": COMMON,
        "tests/test_a.py": f"import shop\nfrom .common import Common as Base\nclass TestA(Base): {below}",
        "tests/test_b.py": f"import shop\nimport tests.common\nclass TestB(tests.common.Common): {below}",
    }
    options: dict[str, Any] = {"tests": tests, "python": f"PYTHONPATH=. {PYTHON}"}
    options["expect"] = ["tests/test_a.py::TestA::test_sum", "tests/test_b.py::TestB::test_sum"]
    found = await judge({"shop.py": SOLUTION}, **options)
    assert found.passed and {test.kind for test in found.tests.values()} == {VALUE}, found
    found = await judge({"shop.py": WRONG + EMPTYING}, **options)
    assert found.fraction == 0.0 and found.forged, found


def test_a_test_that_others_use_keeps_its_text() -> None:
    text = "def test_a(n=1):\n    assert n == 1\n\n\ndef test_b():\n    test_a(1)\n"
    text += "\n\nclass TestC:\n    test_d = test_a\n"
    file = TestFile("t.py", text.encode())
    for id in ("t.py::test_a", "t.py::test_b", "t.py::TestC::test_d"):
        assert file.change(file.function(id), [id], random.Random(1)).kind == ENDED


def test_long_suites_are_changed_in_no_time() -> None:
    """It happens on the event loop."""
    many = "".join(
        f"def test_{number}():\n    assert {number} == {number}\n" + "    # more\n" * 20 for number in range(400)
    )
    file = TestFile("t.py", many.encode())
    begin = time.process_time()
    for number in range(400):
        id = f"t.py::test_{number}"
        assert file.change(file.function(id), [id], random.Random(1)).kind == VALUE
    assert time.process_time() - begin < 5  # 0.1 s; 20 s if the file is parsed for each


async def test_a_missing_source_is_named(judge: Judge) -> None:
    options: dict[str, Any] = {"sources": ["shop.py", "other.py"], "tests": {TEST_PATH: TESTS}, "expect": IDS}
    found = await judge({"shop.py": WRONG}, **options)
    assert found.missing == ("other.py",) and 0 < found.fraction < 1


async def test_no_cheat_is_taken_for_a_solution(python_image: Path) -> None:
    """One of each kind; `benchmarks/tamper.py` plays them all, on four backends."""
    cheats = [
        "reports of pytest are patched",
        "an object equal to everything",
        "the expected value is read in the caller",
        "the tests are read for their answers",
        "the records of the judge are forged",
        "atexit ends with 0",
        "usercustomize.py",
    ]
    spec = SandboxSpec(image=str(python_image))
    judges = {name: JUDGES[name] for name in ("`judge_pytest`", "programs")}
    async with ToolSessions(create_backend("local"), spec) as sessions:
        found = await table(sessions, ["honest", *cheats], judges)
    assert found == {name: {"honest"} for name in judges}
    assert set(cheats) <= set(AGENTS)
