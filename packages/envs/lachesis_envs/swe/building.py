"""Software tasks as Harbor folders: the agent's files, hidden tests, a solution, and the judge's data.

    task.toml                 `[metadata.lachesis.judge]` is for our judge; Harbor runs tests/test.sh
    instruction.md
    environment/Dockerfile    Python with pytest; environment/repo becomes the workspace
    tests/files/              the hidden tests, new and changed ones, which are written over the workspace
    tests/expected.txt        the ids of the tests that must pass solution/files/           the files of the solution

The archives are not ours to ship: the recipe names them, and `build_fixes` fetches them.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lachesis_envs.swe.archives import archive
from lachesis_envs.swe.recipes import BuildError, read_expected, read_recipe
from lachesis_envs.task_folders import TaskConfig, create_task
from lachesis_envs.task_folders.task import files_below

Files = Mapping[str, bytes]
WORKSPACE = "/workspace"
PYTHON = "PYTHONPATH=src:. python3 -B"
"""The Python of the tests: the tree comes before anything that is installed."""
ARGUMENTS = ("-p", "no:cacheprovider", "-o", "addopts=")
_LICENSE = re.compile("LICENSE|COPYING")
_MADE = {"__pycache__", ".git", ".pytest_cache"}
"""Names in folders of one's own that no agent gets."""
_VERSION = re.compile(rb"""^(__version__\s*=\s*)(["']).*?\2""", re.MULTILINE)


@dataclass(frozen=True)
class SweTask:
    """The content of a task folder. Paths are relative to the workspace."""

    name: str
    instruction: str
    tree: Files
    """The files that the agent gets."""
    tests: Files
    """Hidden tests, written over the tree. Those that the tree has too are not among them: nobody has to hide them."""
    solution: Files
    """The files that the solution changes."""
    sources: Sequence[str]
    """Files and folders of which the judge takes what the agent left. What is below `test_folder` is not taken."""
    test_folder: str
    expected: Sequence[str]
    """The ids of the tests that must pass with a solution."""
    fail_to_pass: Sequence[str]
    """Those of them that fail without it."""
    python: Sequence[str]
    """Requirements, with versions, of the Python that runs the tests."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from, for `[metadata.lachesis]`."""


def recipe() -> Mapping[str, Any]:
    """`recipe.toml` of this package."""
    return tomllib.loads(_resource("recipe.toml"))


def read_fixes(
    names: Iterable[str] = (), archives: Sequence[Path] = (), own: Path | None = None, *, judged: bool = True
) -> list[SweTask]:
    """The real fixes of a recipe, all of them or those that are named, from archives that are fetched where needed.

    Args:
        archives: folders that may hold archives already.
        own: the file of another recipe than that of this package.
        judged: False reads no lists of expected tests.

    Raises:
        BuildError: a name is not in the recipe, or a fix does not fit its archive.
        ArchiveError: an archive is not to be had.
    """
    known = recipe() if own is None else read_recipe(own)
    entries = {entry["name"]: entry for entry in known["tasks"]}
    made = []
    for name in list(names) or entries:
        if name not in entries:
            raise BuildError(f"the recipe has no task {name!r}. Next step: choose from {', '.join(entries)}")
        made.append(_task(entries[name], known, archives, own, judged=judged))
    return made


def _task(
    entry: Mapping[str, Any], known: Mapping[str, Any], archives: Sequence[Path], own: Path | None, *, judged: bool
) -> SweTask:
    name = entry["name"]
    old, new = (_files(entry[which], known, archives, own) for which in ("old", "new"))
    tree = {path: without_version(path, data) for path, data in old.items() if within(path, entry["tree"])}
    if not tree:
        places = ", ".join(entry["tree"])
        raise BuildError(f"{name}: the tree {entry['old']} has nothing at {places}. Next step: correct `old` or `tree`")
    ids = []
    if judged:
        ids = _resource(f"expected/{name}.txt").splitlines() if own is None else read_expected(own, name)
    hidden = {path: data for path, data in new.items() if within(path, [entry["tests"]]) and tree.get(path) != data}
    if entry.get("checks"):
        hidden[f"{entry['tests']}/test_checks.py"] = entry["checks"].lstrip().encode()
    changed: Files
    if fix := entry.get("fix"):
        if missing := sorted(fix.keys() - new.keys()):
            raise BuildError(f"{name}: the new tree has no {missing[0]}. Next step: correct `fix` in the recipe")
        changed = {path: with_hunks(old.get(path, b""), new[path], lines) for path, lines in fix.items()}
    else:
        changed = _changed(
            name, old, new, [place for place in entry["tree"] if place != entry["tests"]], entry["tests"]
        )
    return SweTask(
        name=name,
        instruction=entry["instruction"].strip(),
        tree=tree,
        tests=hidden,
        solution={path: without_version(path, data) for path, data in changed.items()},
        sources=[path for path in entry["tree"] if path != entry["tests"] and not _LICENSE.match(path)],
        test_folder=entry["tests"],
        expected=[id.removeprefix("! ") for id in ids],
        fail_to_pass=[id[2:] for id in ids if id.startswith("! ")],
        python=entry.get("python") or known["python"],
        origin={"kind": "fix", "old": entry["old"], "new": entry["new"]},
    )


def _files(source: str, known: Mapping[str, Any], archives: Sequence[Path], own: Path | None) -> Files:
    """A folder next to a recipe, or an archive."""
    folder = own.parent / source if own is not None else None
    if folder is not None and folder.is_dir():
        return {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in files_below(folder)
            if file.is_file() and not _MADE.intersection(file.relative_to(folder).parts)
        }
    sums = known.get("archives", {})
    if f"{source}.tar.gz" not in sums:
        raise BuildError(
            f"{source!r} is not a folder next to the recipe, and [archives] has no SHA-256 of "
            f"{source}.tar.gz. Next step: "
            "make the folder, or write the line"
        )
    return archive(f"{source}.tar.gz", sums[f"{source}.tar.gz"], archives)


def _changed(name: str, old: Files, new: Files, places: Sequence[str], tests: str) -> Files:
    """All sources that the new tree has otherwise."""
    sources = {path for path in (*old, *new) if within(path, places) and not within(path, [tests])}
    if gone := sorted(path for path in sources if path not in new):
        raise BuildError(
            f"{name}: the new tree has no {gone[0]}, but a solution cannot remove files. Next step: name in `fix` the "
            "files to correct, or keep the file"
        )
    if found := {path: new[path] for path in sorted(sources) if old.get(path) != new[path]}:
        return found
    raise BuildError(f"{name}: the two trees have the same sources at {', '.join(places)}. Next step: correct `tree`")


def without_version(path: str, data: bytes) -> bytes:
    """A module without the version that it says it has, by which a model could know the next release."""
    return _VERSION.sub(rb"\g<1>\g<2>0.0.0\g<2>", data) if path.endswith(".py") else data


def hunks(old: bytes, new: bytes) -> list[tuple[int, int, list[bytes]]]:
    """The difference: begin and end among the old lines, from 0, and the new lines."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [(begin, end, after[at:to]) for kind, begin, end, at, to in matcher.get_opcodes() if kind != "equal"]


def with_hunks(old: bytes, new: bytes, begins: Iterable[int]) -> bytes:
    """`old` with those hunks of its difference to `new` that begin at the lines `begins`, which count from 1."""
    lines, found = old.splitlines(keepends=True), {hunk[0] + 1: hunk for hunk in hunks(old, new)}
    for begin in sorted(begins, reverse=True):
        if begin not in found:
            raise BuildError(f"no hunk begins at line {begin}, only at {sorted(found)}. Next step: correct the recipe")
        at, end, text = found[begin]
        lines[at:end] = text
    return b"".join(lines)


def write_swe_task(task: SweTask, folder: Path) -> Path:
    """Write a task folder; what was at `folder` is replaced. Returns `folder`."""
    files: dict[str, str | bytes | Path] = {
        "instruction.md": f"{task.instruction}\n\n{_HOW}",
        "environment/Dockerfile": _DOCKERFILE.format(python=" ".join(task.python)),
        "tests/expected.txt": "".join(f"{id}\n" for id in task.expected),
        "tests/grade.py": _resource("grade.txt"),
        "tests/test.sh": _TEST,
        "solution/solve.sh": _SOLVE,
        "solution/fix.patch": "".join(
            diff(path, task.tree.get(path, b""), data) for path, data in task.solution.items()
        ),
    }
    for below, some in (
        ("environment/repo", task.tree),
        ("tests/files", task.tests),
        ("solution/files", task.solution),
    ):
        files |= {f"{below}/{path}": data for path, data in some.items()}
    shutil.rmtree(folder, ignore_errors=True)
    create_task(folder, TaskConfig.model_validate(_settings(task)), files)
    return folder


def diff(path: str, old: bytes, new: bytes) -> str:
    """A unified diff, for people."""
    before, after = (data.decode(errors="replace").splitlines() for data in (old, new))
    return "".join(f"{line}\n" for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm=""))


def _settings(task: SweTask) -> dict[str, Any]:
    judge = {
        "kind": "pytest",
        "sources": list(task.sources),
        "not_sources": [task.test_folder],
        "tests": "files",
        "expect": "expected.txt",
        "fail_to_pass": list(task.fail_to_pass),
        "python": PYTHON,
        "args": list(ARGUMENTS),
        "timeout": 300,
    }
    return {
        "artifacts": [f"{WORKSPACE}/{path}" for path in task.sources],
        "task": {"name": f"lachesis/{task.name}", "keywords": ["swe", "python"]},
        "metadata": {"category": "software-engineering", "lachesis": {**task.origin, "judge": judge}},
        "agent": {"timeout_sec": 1800.0},
        "verifier": {"timeout_sec": 600.0},
        "environment": {
            "workdir": WORKSPACE,
            "network_mode": "no-network",
            "cpus": 2,
            "memory_mb": 2048,
            "storage_mb": 1024,
        },
    }


def _resource(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def within(path: str, places: Iterable[str]) -> bool:
    """Whether `path` is one of the places, or below one."""
    return any(path == place or path.startswith(f"{place}/") for place in places)


_HOW = """\
The code is in /workspace, and its tests run with `PYTHONPATH=src:. python3 -m pytest`. Correct the code; hidden tests
decide whether it is right.
"""
_DOCKERFILE = """\
FROM python:3.11
RUN pip install --no-cache-dir {python}
WORKDIR /workspace
COPY repo/ /workspace/
"""
_TEST = """\
#!/bin/bash
# Grades in place, where what the agent left runs in the interpreter of the tests and can forge the outcome.
# Lachesis takes its own judge instead, see [metadata.lachesis.judge] in task.toml.
cp -R /tests/files/. /workspace/
cd /workspace
PYTHONPATH=src:. python3 -B /tests/grade.py
"""
_SOLVE = """\
#!/bin/bash
cp -R /solution/files/. /workspace/
"""
