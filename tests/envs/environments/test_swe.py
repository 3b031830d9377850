"""Building software tasks from archives, and judging what an agent left, with a package of our own as the archive."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import re
import shutil
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends import SandboxSpec, create_backend
from lachesis.cli import main
from lachesis.loop.judgement import Judgement, TestVerdict
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.harbor.grading import grade
from lachesis_envs.judging.changed_tests import VALUE
from lachesis_envs.judging.pytest_judge import other_changes
from lachesis_envs.swe import archives, building, expecting
from lachesis_envs.swe.building import SweTask
from lachesis_envs.swe.environment import scripted_calls
from lachesis_envs.swe.mutations import changed_operators, mutated, without_tests
from lachesis_envs.swe.trying import judging
from lachesis_envs.task_folders import read_task
from lachesis_testing.cheats import CHEATS
from lachesis_tools import BUILTIN_TOOLS, ToolSessions, call_tool
from tests.support.small_envs import ROOT

OLD = '''"""Prices."""

__version__ = "1.0.1"


def total(prices):
    return sum(prices[1:])


def highest(prices):
    return max(prices) if len(prices) > 0 else 0
'''
NEW = OLD.replace("1.0.1", "1.0.2").replace("prices[1:]", "prices").replace("highest", "most")
TESTS = """
from shop.prices import highest, total


class Common:
    def test_sum(self):
        assert total([3, 4]) == 7


def test_highest():
    assert highest([1, 5, 2]) == 5


def test_empty():
    assert highest([]) == 0
"""
INHERITED = "from .test_prices import Common\n\n\nclass TestShop(Common):\n    pass\n"
IDS = [
    "tests/test_shop.py::TestShop::test_sum",
    "tests/test_prices.py::test_highest",
    "tests/test_prices.py::test_empty",
]
PYTHON = "PYTHONPATH=src:.:/opt/pytest python3 -B"


def archive_of(folder: Path, name: str, files: dict[str, str]) -> str:
    """Write an archive; its SHA-256."""
    with io.BytesIO() as data:
        with tarfile.open(fileobj=data, mode="w:gz") as opened:
            for path, text in files.items():
                member = tarfile.TarInfo(f"{name}/{path}")
                member.size = len(text.encode())
                opened.addfile(member, io.BytesIO(text.encode()))
        (folder / f"{name}.tar.gz").write_bytes(data.getvalue())
        return hashlib.sha256(data.getvalue()).hexdigest()


@pytest.fixture
def fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[building.SweTask]:
    """A task that is read from a recipe and archives of our own."""
    common = {"LICENSE": "free", "CHANGES": "1.0.2 sums all prices", "shop/__init__.py": "", "tests/__init__.py": ""}
    hidden = {"tests/test_prices.py": TESTS, "tests/test_shop.py": INHERITED}
    sums = {
        "shop-1.0.1.tar.gz": archive_of(tmp_path, "shop-1.0.1", {**common, "shop/prices.py": OLD}),
        "shop-1.0.2.tar.gz": archive_of(tmp_path, "shop-1.0.2", {**common, "shop/prices.py": NEW, **hidden}),
    }
    recipe = {
        "python": ["pytest"],
        "archives": sums,
        "tasks": [
            {
                "name": "shop-1",
                "old": "shop-1.0.1",
                "new": "shop-1.0.2",
                "tree": ["shop", "tests", "LICENSE"],
                "tests": "tests",
                "fix": {"shop/prices.py": [7]},
                "instruction": 'The sum of `prices` leaves out the first: "total([3, 4])" is 4.\n',
            }
        ],
    }
    texts = {"expected/shop-1.txt": "".join(f"{'! ' if id == IDS[0] else ''}{id}\n" for id in IDS)}
    read = building._resource
    monkeypatch.setattr(building, "recipe", lambda: recipe)
    monkeypatch.setattr(building, "_resource", lambda name: texts.get(name) or read(name))
    monkeypatch.setattr(building, "PYTHON", PYTHON)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (task,) = building.read_fixes(archives=[tmp_path])
    yield task


def test_a_task_has_the_fix_alone_and_nothing_that_tells_of_it(fix: building.SweTask, tmp_path: Path) -> None:
    folder = building.write_swe_task(fix, tmp_path / "tasks" / "shop-1")
    repo = folder / "environment" / "repo"
    assert {file.relative_to(repo).as_posix() for file in repo.rglob("*") if file.is_file()} == {
        *("LICENSE", "shop/__init__.py", "shop/prices.py", "tests/__init__.py")
    }
    assert "1.0" not in (repo / "shop/prices.py").read_text()
    solved = (folder / "solution/files/shop/prices.py").read_text()
    assert "sum(prices)" in solved and "def highest" in solved and "0.0.0" in solved
    task = read_task(folder)
    assert task.steps[0].instruction.startswith(fix.instruction)
    assert (folder / "tests/expected.txt").read_text().splitlines() == IDS
    assert sorted(path.name for path in (folder / "tests/files/tests").iterdir()) == ["test_prices.py", "test_shop.py"]
    first = task.digest
    assert read_task(building.write_swe_task(fix, folder)).digest == first


def test_another_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    right = archive_of(tmp_path, "shop-1.0.1", {"shop.py": "", "../out.py": "", "a/../../b.py": ""})
    assert archives.archive("shop-1.0.1.tar.gz", right, [tmp_path]) == {"shop.py": b""}
    with pytest.raises(archives.ArchiveError, match=r"cannot be fetched from http://127.0.0.1:9/simple/shop/.*Next"):
        archives.archive("shop-1.0.1.tar.gz", "0" * 64, [tmp_path])


def test_the_recipe_fits_its_lists_of_tests() -> None:
    known = building.recipe()
    assert len(known["tasks"]) == 12
    for entry in known["tasks"]:
        assert {f"{entry['old']}.tar.gz", f"{entry['new']}.tar.gz"} <= known["archives"].keys()
        ids = building._resource(f"expected/{entry['name']}.txt").splitlines()
        assert ids[0].startswith("! ") and len(set(ids)) == len(ids)
        checks = re.findall(r"^def (test_\w+)", entry.get("checks", ""), re.MULTILINE)
        assert [id.rpartition("::")[2] for id in ids if "/test_checks.py::" in id] == checks
        assert all(id.removeprefix("! ").startswith(f"{entry['tests']}/") and ".py::" in id for id in ids)
        assert "." in json.dumps(entry["instruction"])
        version = entry["new"].rpartition("-")[2]
        assert version not in entry["instruction"]


async def test_only_a_solution_is_worth_something(fix: building.SweTask, tmp_path: Path, python_image: Path) -> None:
    """The agent that reads, edits and tests; nothing; a cheat; and what the judge leaves for the record."""
    folder = building.write_swe_task(fix, tmp_path / "tasks" / "shop-1")
    task, image = read_task(folder), python_image
    tree = image / "workspace"
    for path, data in fix.tree.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
    spec = SandboxSpec(image=str(image), workdir="/workspace")
    cheats = {cheat.name: cheat for cheat in CHEATS}
    async with ToolSessions(create_backend("local"), spec) as sessions:

        async def played(name: str, calls: Any = (), left: Any = (), keep: Path | None = None) -> Any:
            session = sessions.open(name)
            ctx = ToolContext(session, BUILTIN_TOOLS, open_verifier=lambda: sessions.open(f"{name}-verifier"))
            for tool, arguments in calls:
                assert (await call_tool(tool, json.dumps(arguments), session)).error is None
            for path, text in dict(left).items():
                await ctx.write_file(path, text)
            return await grade(task, task.steps[0], ctx, keep=keep)

        honest = await played("honest", scripted_calls(task), keep=tmp_path / "kept")
        assert honest.reward.value == 1.0 and honest.record["grading"] == "judge"
        assert honest.reward.components == {"fail_to_pass": 1.0, "pass_to_pass": 1.0, "forged": 0.0}
        assert "-    return sum(prices[1:])\n+    return sum(prices)\n" in honest.record["diff"]
        assert "sum(prices)" in (tmp_path / "kept/artifacts/workspace/shop/prices.py").read_text()

        nothing = await played("nothing")
        assert nothing.reward.value == 0.0 and nothing.record["diff"] == ""
        assert nothing.reward.components == {"fail_to_pass": 0.0, "pass_to_pass": 1.0, "forged": 0.0}
        assert list(nothing.record["tests"]) == [IDS[0]]

        text = fix.tree["shop/prices.py"].decode()
        forged = await played("cheat", left=cheats["pytest runs no test"].left_in("shop/prices.py", text))
        assert forged.reward.value == 0.0 and forged.record["cause"] == "tampered"
        assert forged.reward.components["forged"] == 1.0

        (folder / "tests/expected.txt").unlink()
        with pytest.raises(Invalid, match=r"no_tests.*expected.txt.*Next step"):
            await played("broken")

    async with judging(building.write_swe_task(fix, folder), fix, create_backend("local"), spec, images=False) as judge:
        made = await mutated(fix, judge, 2, seed=1)
    assert [task.origin["change"] for task in made] == ["shop/prices.py:11: > -> >="]
    assert made[0].fail_to_pass == [IDS[2]] and IDS[2] in made[0].instruction
    assert building.diff("p", made[0].tree["shop/prices.py"], made[0].solution["shop/prices.py"]).count("\n-") == 1
    seen = made[0].tree["tests/test_prices.py"].decode()
    assert "test_empty" not in seen and "test_highest" in seen  # code that knows a test could tell it from the changed
    assert made[0].tests == {"tests/test_prices.py": TESTS.encode()}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_image: Path) -> list[str]:
    """The files of the page below the current folder; arguments that run tests in an image with pytest and the tree."""
    page = (ROOT / "docs/swe.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```(?:toml|py)\n# (fixes/\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copytree(tmp_path / "fixes/before", python_image / "workspace", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(building, "PYTHON", PYTHON)
    return ["--image", str(python_image), "--workdir", "/workspace"]


@pytest.mark.slow
def test_the_commands_of_the_page_make_a_sound_task_of_ones_own(
    own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/swe.md").read_text(encoding="utf-8")
    build, verify = re.findall(r"^lachesis (tasks (?:build tasks --recipe|verify tasks$).*)", page, re.MULTILINE)[-2:]
    assert main(["tasks", "build", "tasks", "--recipe", "fixes/recipe.toml"]) == 1
    assert re.search(r"expected/shop-total.txt.*--write-expected", capsys.readouterr().err)
    (Path("fixes") / "after/tests/test_bad.py").write_text("def test_it_fails():\n    assert 1 == 2\n")
    assert main([*build.split(), *own]) == 0
    said = capsys.readouterr().out
    assert "2 tests pass with the solution, 1 of them fail without it; 1 left out" in said
    assert "left out: tests/test_bad.py::test_it_fails: failed" in said
    listed = Path("fixes/expected/shop-total.txt").read_text().splitlines()
    assert listed == ["! tests/test_prices.py::test_total", "tests/test_prices.py::test_highest"]
    task = read_task("tasks/shop-total")
    assert task.own_settings["judge"]["fail_to_pass"] == ["tests/test_prices.py::test_total"]
    assert main([*verify.split(), *own, "--times", "1", "--only", "a time bomb"]) == 0
    assert main([*build.replace("--write-expected", "").split(), *own]) == 0
    assert read_task("tasks/shop-total").digest == task.digest


async def test_a_test_whose_change_is_sound_only_by_chance_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of a training run might change it otherwise, and a right solution would be called tampered."""

    async def ids(*_: Any) -> list[str]:
        return ["tests/test_a.py::test_it", "tests/test_a.py::test_by_chance"]

    async def judge(changed: Any) -> Judgement:
        changes = ["passed" if changed else "failed", "failed" if other_changes.get().strip(b"\0") == b"" else "passed"]
        verdicts = zip(await ids(), changes, strict=True)
        return Judgement({id: TestVerdict("failed" if changed else "passed", it, VALUE) for id, it in verdicts}, "")

    task = SweTask("t", "", {"a.py": b""}, {}, {"a.py": b"1"}, ["a.py"], "tests", [], [], [])
    monkeypatch.setattr(expecting, "_collected", ids)
    monkeypatch.setattr(expecting, "judging", lambda *_, **__: contextlib.nullcontext(judge))
    found = await expecting.expected_of(task, tmp_path / "t", create_backend("local"), SandboxSpec())
    assert found.passing == ["tests/test_a.py::test_it"]
    assert found.left_out == {"tests/test_a.py::test_by_chance": "passed, changed passed"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('tests = "tests"', 'test = "tests"', r"recipe.toml: tasks.0.tests?: "),
        ('old = "before"', 'old = "befor"', r"'befor' is not a folder next to the recipe"),
        ('old = "before"', 'old = "before/shop"', r"the tree before/shop has nothing at shop, tests"),
        ('tests = "tests"', 'tests = "../.."', r"tasks.0.tests: .*'../..' is not a path within a tree"),
        ('"shop", "tests"]', '"/etc/passwd", "tests"]', r"tasks.0.tree.0: .*'/etc/passwd' is not a path within a tree"),
        ('new = "after"', 'new = "before"', r"the same sources"),
        ('name = "shop-total"', 'name = "../shop"', r"tasks.0.name"),
        ("[[tasks]]", "[[tasks]", r"cannot be read"),
        ('tree = ["shop", "tests"]', 'tree = ["shop", "tests"]\nfix = {"shop/prices.py" = [9]}', r"only at \[2\]"),
        ('tree = ["shop", "tests"]', 'tree = ["shop", "tests"]\nfix = {"shop/price.py" = [2]}', r"shop/price.py"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(own: list[str], old: str, new: str, said: str) -> None:
    recipe = Path("fixes/recipe.toml")
    assert old in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(old, new))
    with pytest.raises(building.BuildError, match=said):
        building.read_fixes(own=recipe, judged=False)


def test_requirements_are_those_of_the_task_where_it_has_some(own: list[str]) -> None:
    recipe = Path("fixes/recipe.toml")
    text = recipe.read_text()
    second = (
        text.partition("[[tasks]]")[2].replace("shop-total", "other") + 'python = ["pytest==9.1.1", "attrs==25.4.0"]'
    )
    recipe.write_text(f"{text}\n[[tasks]]{second}\n")
    first, other = building.read_fixes(own=recipe, judged=False)
    assert first.python == ["pytest==9.1.1"]
    assert "attrs==25.4.0" in (building.write_swe_task(other, Path("made")) / "environment/Dockerfile").read_text()


def test_the_agent_does_not_get_the_tests_that_fail(fix: building.SweTask) -> None:
    tree = {**fix.tree, **fix.tests}
    (seen,) = without_tests(tree, [IDS[0], IDS[2]]).values()  # one is inherited, and alone in its class
    names: dict[str, Any] = {}
    exec(seen.replace(b"from shop.prices", b"from math").replace(b"highest, total", b"pi"), names)
    assert "test_highest" in names and "test_empty" not in names and not hasattr(names["Common"], "test_sum")


def test_operators_are_changed_one_by_one() -> None:
    text = b"def f(a, b):\n    return a<b and (a) + b not in [1]  # a + b\n"
    changed = {
        mutation.shown: mutation.data.splitlines()[1] for mutation in changed_operators({"f.py": text}, ["f.py"])
    }
    assert changed == {
        "f.py:2: and -> or": b"    return a<b or (a) + b not in [1]  # a + b",
        "f.py:2: < -> <=": b"    return a <= b and (a) + b not in [1]  # a + b",
        "f.py:2: not in -> in": b"    return a<b and (a) + b in [1]  # a + b",
    }


def test_settings_are_toml(fix: building.SweTask, tmp_path: Path) -> None:
    odd = dataclasses.replace(fix, origin={"change": 'a "quoted" \\ text → ü'})
    written = building.write_swe_task(odd, tmp_path / "odd") / "task.toml"
    assert tomllib.loads(written.read_text())["metadata"]["lachesis"]["change"] == 'a "quoted" \\ text → ü'
