"""The wheel: built, installed into an empty environment, and used beside packages of the same names as ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("backends", "environments", "lachesis", "tool_call_parsers")
ENVIRONMENT = """
from lachesis import HermesAgentBaseEnv, Message, ToolCall


class Greet(HermesAgentBaseEnv):
    name = "greet"
    toolsets = ["file"]

    async def get_next_item(self):
        return "hello"

    def format_prompt(self, item):
        return f"Write {item} into greeting.txt."

    async def compute_reward(self, item, result, ctx):
        return float(await ctx.read_file("greeting.txt") == item)

    def reference_policy(self):
        call = ToolCall("call_1", "write_file", '{"path": "greeting.txt", "content": "hello"}')
        return lambda messages, tools: (
            Message("assistant", tool_calls=(call,)) if len(messages) < 2 else Message("assistant", "Done.")
        )


if __name__ == "__main__":
    Greet.cli()
"""


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    run(*build, "--wheel-dir", source / "dist", source, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the project from the wheel alone, and its dependencies from the developer's environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    made = folder / "bin" / "python"
    site = Path(run(made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # As a path in a .pth file: the .pth files of that folder, such as the editable install's, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", made, "install", "--no-deps", "--no-index", "--quiet"]
    run(*install, "--ignore-installed", wheel, cwd=folder)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project, whose own packages have names that are ours as well, or nearly."""
    for name in ("agent", "environments", "inference", "runs", "testing", "tools", "training", "trajectories"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the user\\'s own {name} was imported')")
    (tmp_path / "greet.py").write_text(ENVIRONMENT)
    return tmp_path


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    tracked = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert tracked - packed == set()
    others = {name.split("/")[0] for name in packed if ".dist-info" not in name} - set(PACKAGES)
    assert others == {"lachesis_old_paths.pth"}


def test_an_environment_runs_beside_packages_of_the_same_names(python: Path, folder: Path) -> None:
    place = run(python, "-c", "import lachesis; print(lachesis.__file__)", cwd=folder)
    assert Path(place.strip()).is_relative_to(python.parents[1])
    command = ["greet.py", "process", "--env.total_steps=1", "--env.group_size=2", "--openai.model_name=reference"]
    shown = run(python, *command, cwd=folder)
    assert "1.00" in shown
    assert (folder / "data" / "greet" / "groups.html").exists()


def test_the_paths_of_the_hermes_stack_are_installed(python: Path, tmp_path: Path) -> None:
    program = (
        "from environments.hermes_base_env import HermesAgentBaseEnv, HermesAgentEnvConfig\n"
        "from environments.agent_loop import HermesAgentLoop, AgentResult, ToolError\n"
        "from environments.tool_context import ToolContext\n"
        "from environments.gsm8k_agent_env import GSM8kAgentEnv\n"
        "from environments import ToolContext\n"
        "from environments.tool_call_parsers import get_parser\n"
        "from tools.terminal_tool import register_task_env_overrides\n"
        "import model_tools, toolsets, toolset_distributions, tools.budget_config\n"
        "import lachesis; assert issubclass(HermesAgentBaseEnv, lachesis.HermesAgentBaseEnv)\n"
    )
    run(python, "-c", program, cwd=tmp_path)


@pytest.mark.parametrize(
    "first", ["model_tools", "toolsets", "tools.terminal_tool", "agent.trajectory", "batch_runner"]
)
def test_an_old_path_can_be_the_first_import_of_a_process(python: Path, tmp_path: Path, first: str) -> None:
    run(python, "-c", f"import {first}", cwd=tmp_path)
    loaded = run(python, "-c", "import sys; print([name for name in sys.modules if 'lachesis' in name])", cwd=tmp_path)
    assert loaded.strip() == "[]", "a process that asks for nothing of it loads nothing"
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("OWN = True\n")
    run(python, "-c", "import tools; assert tools.OWN", cwd=tmp_path)
    program = "try:\n    import tools.web_tools\nexcept ModuleNotFoundError:\n    print('left out')"
    assert run(python, "-c", program, cwd=tmp_path).strip() == "left out"


@pytest.mark.model
def test_the_demo_runs_beside_packages_of_the_same_names_and_ends_on_a_success(python: Path, folder: Path) -> None:
    assert run(python.with_name("lachesis"), "--version", cwd=folder).startswith("lachesis ")
    # With -m the folder comes first on the path, so the user's packages would win.
    shown = run(python, "-m", "lachesis", "demo", "--items", "1", "--group-size", "1", cwd=folder)
    _, _, end = " ".join(shown.split()).partition("The model solved ")
    assert "it reasons badly" in end and "reference policy (no model): reward 1.0, completed" in end
    assert (folder / "data" / "demo" / "embedded" / "groups.jsonl").exists()
