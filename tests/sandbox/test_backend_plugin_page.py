"""The backend in docs/backend-plugins.md is complete, small, and found by every route."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backends import backend_names, backend_options

PAGE = Path(__file__).parents[2] / "docs/backend-plugins.md"
MAX_LINES = 200


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that looks like the installed package of somebody else."""
    (tmp_path / "folder_backend.py").write_text(block("python"))
    info = tmp_path / "folder_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lachesis.backends]\nfolder = folder_backend:FolderBackend\n")
    return tmp_path


def run(installed: Path, *command: str) -> str:
    """What a process prints that finds the package and an installed Lachesis."""
    search = os.pathsep.join([str(installed), str(PAGE.parents[1])])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_example_is_within_the_promised_length() -> None:
    assert len(block("python").splitlines()) + len(block("py").splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("tests", "count"), [("sandbox_is or exit_codes or files", 20), pytest.param("", 90, marks=pytest.mark.long)]
)
def test_the_example_passes_the_suite(installed: Path, tests: str, count: int) -> None:
    (installed / "test_folder_backend.py").write_text(block("py"))
    (installed / "pytest.ini").write_text("[pytest]\n")  # none of this project's settings
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={installed / 'temp'}", "-k", tests, "."]
    output = run(installed, *command)
    passed = re.search(r"^(\d+) passed", output, re.MULTILINE)
    assert passed and int(passed[1]) > count, output
    assert not list((installed / "temp").glob("**/lachesis-*")), "sandboxes are left"


def test_the_command_line_finds_a_backend_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "folder_backend.py").write_text(block("python"))
    program = [sys.executable, "-c", "import sys; sys.path.remove(''); from lachesis.cli import main; sys.exit(main())"]
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
    for name, code, said in (
        ("folder_backend:FolderBackend", 0, "0 sandboxes"),
        ("nowhere:Backend", 2, "error: backend 'nowhere:Backend': there is no module 'nowhere'. Next step: "),
    ):
        command = [*program, "sandboxes", "list", "--backend", name]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert done.stderr.splitlines()[-1].startswith(said), done.stderr


STARTS = """
import asyncio, importlib.util, marshal, sys
import folder_backend
from backends import BackendError, SandboxSpec
bytecode = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(compile(sys.argv[1], "executor", "exec"))
folder_backend.executor_bytecode = lambda: bytecode
async def main():
    try:
        await folder_backend.FolderBackend(sys.argv[2]).create(SandboxSpec())
    except BackendError as error:
        print(error)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no luck today')", "no luck today"),
        ("print('a greeting of another program')", "a greeting of another program"),
        ("print('hi')", "it ended after b'hi"),
    ],
)
def test_an_executor_that_does_not_start_says_why(installed: Path, code: str, said: str) -> None:
    shown = run(installed, "-c", STARTS, code, str(installed / "here"))
    assert shown.startswith("the executor did not start: ") and said in shown, shown
    assert list((installed / "here").iterdir()) == []


def test_the_example_is_found_by_entry_point_and_by_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed)
    assert "folder" in backend_names()
    (option,) = backend_options("folder")
    assert (option.name, option.annotation, option.default) == ("root", str, "/tmp/lachesis-folders")
    assert option.help == "the folder for the sandboxes, created if missing."
    code = """
import asyncio, sys
from backends import SandboxSpec, create_backend
async def main():
    sandbox = await create_backend(sys.argv[1], root=sys.argv[2]).create(SandboxSpec())
    print((await sandbox.exec("echo $((6 * 7))", timeout=20)).stdout.decode().strip())
    await sandbox.close()
asyncio.run(main())
"""
    for name in ("folder", "folder_backend:FolderBackend"):
        assert run(installed, "-c", code, name, str(installed / "here")) == "42\n"
    listed = run(installed, "-m", "lachesis", "sandboxes", "list", "--backend", "folder")
    assert listed == ""
