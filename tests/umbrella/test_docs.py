"""Every command that README and docs show is run, every Python example is executed, every link leads somewhere."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lachesis.loop.outcome import SHOWN, Outcome
from tests.run import ALL

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")

LONGEST = 42
"""Words between two stops."""

OF_THE_MODEL = (
    *("lachesis eval sort_words.py", "lachesis process terminal -n 1 -r 1 -t"),
    *("-o data/verified", "lachesis verify data/verified/"),
)
"""Commands that sample from the embedded model, which takes long, or read what it made: `make test` runs other ones."""


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if match[1] == language:
                yield page, match[2]


def commands(page: Path) -> list[str]:
    return [
        line.removeprefix("$ ")
        for of, text in blocks("console")
        if of == page
        for line in text.splitlines()
        if line.startswith("$ ")
    ]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the project, to run commands in without leaving anything in the real one."""
    for name in ("environments", "configs", "Makefile", "requirements", "scripts", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    for page, text in blocks("python"):
        if page.name == "README.md" and ".cli()" in text:
            (tmp_path / "sort_words.py").write_text(text)
    return tmp_path


@pytest.mark.model
def test_every_command_of_the_readme_runs(checkout: Path) -> None:
    run_all(commands(PAGES[0]), checkout)


@pytest.mark.model
@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES[1:] if commands(page) and not page.name.startswith("tutorial-")],  # see test_tutorials
    ids=lambda page: page.name,
)
def test_every_command_shown_runs(page: Path, checkout: Path) -> None:
    run_all(commands(page), checkout)


def run_all(lines: list[str], checkout: Path) -> None:
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in lines:
        if not ALL and any(part in command for part in OF_THE_MODEL):
            continue
        if command.startswith("make "):
            command = command.replace("make ", "make --dry-run --always-make ")
        # A test has no right to prune the images of the person who runs it.
        own_cache = {"XDG_CACHE_HOME": str(checkout / "cache")} if command.startswith("lachesis images ") else {}
        env = {**os.environ, "PATH": search, **own_cache}
        # A server is ended when it has said its address, not after a time, which may be too short on a busy machine.
        if served := re.fullmatch(r"timeout --preserve-status \d+ (.*)", command):
            command = f"coproc {served[1]}; pid=$COPROC_PID; head -n 1 <&${{COPROC[0]}} && kill $pid && wait $pid"
        done = subprocess.run(
            ["bash", "-c", command], cwd=checkout, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    shutil.rmtree(checkout / "data", ignore_errors=True)


def test_the_commands_of_the_model_are_there_and_the_readme_has_another_one() -> None:
    shown = [command for page in PAGES for command in commands(page)]
    assert [part for part in OF_THE_MODEL if not any(part in command for command in shown)] == []
    assert any(command.startswith("lachesis eval sort_words.py") for command in commands(ROOT / "README.md"))


@pytest.mark.model
@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("page", "code"), list(blocks("python")), ids=lambda value: value.name if isinstance(value, Path) else ""
)
def test_every_python_example_runs(page: Path, code: str, tmp_path: Path) -> None:
    # An example that starts a command line is played by the commands beside it; here it is only imported.
    path = tmp_path / "example.py"
    path.write_text(code)
    run = [sys.executable, "-c", "import example"] if ".cli()" in code else [sys.executable, str(path)]
    done = subprocess.run(
        run,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def sentences(page: Path) -> Iterator[str]:
    """The prose of a page, cut at its stops; without tables, headings, code and the targets of links."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *(\||#|    ).*$", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", text):
        prose = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split())))
        yield from re.split(r"(?<=[.!?:;])[\"')*]*\s+", prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_easy_to_read_and_says_where_to_go_next(page: Path) -> None:
    said = list(sentences(page))
    assert [each for each in said if len(re.findall(r"\w[\w'-]*", each)) > LONGEST] == []
    # Environments, tasks and rollouts are run. Games, users and replays are not.
    assert [each for each in said if re.search(r"\b(is|are|be) played\b|Lachesis plays|\bplays? \w+ tasks", each)] == []
    ending = page.read_text(encoding="utf-8").rstrip().splitlines()[-12:]
    assert any(LINK.search(line) for line in ending)


def test_the_readme_leads_to_every_page_itself_or_through_others() -> None:
    reached, ahead = {PAGES[0]}, [PAGES[0]]
    while ahead:
        page = ahead.pop()
        links = {(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))}
        new = links & set(PAGES) - reached
        reached |= new
        ahead += new
    assert [page.name for page in PAGES if page not in reached] == []


def test_the_modules_that_the_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+(?:/|\.py))`", page)
    assert "packages/train/lachesis_train/trainer/loop.py" in named
    assert [path for path in named if not any((room / path).exists() for room in (ROOT, ROOT / "lachesis"))] == []


def test_every_room_of_training_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "packages" / "train" / "lachesis_train").glob("*/__init__.py")]
    assert "engine" in rooms
    assert [room for room in rooms if f"`packages/train/lachesis_train/{room}/`" not in page] == []


def test_make_runs_every_benchmark_and_the_page_has_its_figures() -> None:
    makefile = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "scripts/test-with.sh"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^BENCHMARKS := (.*)$", makefile, re.MULTILINE)
    run = {*listed.split(), *re.findall(r"-m benchmarks\.(\w+)", makefile)}
    described = set(re.findall(r"benchmarks/(\w+)\.py", page))
    assert {name for name in run if not (ROOT / "benchmarks" / f"{name}.py").exists()} == set()
    assert described - run == set()


def test_every_setting_of_sft_the_engine_and_the_policy_server_is_on_its_page() -> None:
    from lachesis_train.engine import start_engine
    from lachesis_train.policy_server.server import PolicyServer
    from lachesis_train.sft.settings import SftSettings

    def text(name: str) -> str:
        return (ROOT / "docs" / name).read_text(encoding="utf-8")

    def arguments(function: Callable[..., object]) -> list[str]:
        return [each.name for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]

    of_engine = [name for name in arguments(start_engine) if name not in ("log", "start_timeout")]
    assert {"dtype", "port"} <= set(of_engine)
    assert [name for name in of_engine if f"`--{name.replace('_', '-')}`" not in text("training-engine.md")] == []
    assert [name for name in arguments(PolicyServer.__init__) if f"`{name}`" not in text("policy-server.md")] == []
    assert [name for name in SftSettings.model_fields if f"| `{name}` |" not in text("sft.md")] == []


def test_the_readme_is_short_and_begins_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert commands(ROOT / "README.md")[:2] == ["make demo", "make test"]
    assert all(f"`{command}`" in text for command in ("pip install lachesis-rl", "lachesis demo"))
    assert text.count("![") == 1


def test_the_readme_shows_the_environment_in_thirty_lines_and_nothing_more_is_needed() -> None:
    (code,) = (text for page, text in blocks("python") if page.name == "README.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    assert code.count("import") <= 3


@pytest.mark.parametrize("script", ["parsers_page.py", "settings_page.py"])
def test_a_generated_page_says_what_the_code_says(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["troubleshooting.md", "agent-loop.md"])
def test_every_outcome_of_a_rollout_has_its_row(page: str) -> None:
    _, _, text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("## How a rollout ends\n")
    rows = re.findall(r"^\| `(\w+)`(.*)", text.partition("\n## ")[0], re.MULTILINE)
    assert [name for name, _ in rows] == [outcome.value for outcome in Outcome]
    assert all(SHOWN.get(name, "") in text for name, text in rows)


def test_pages_install_lachesis_in_one_form_and_say_where() -> None:
    """No index has the packages: a reader who pastes the line outside a clone gets an error."""
    for page in PAGES[1:]:
        text = page.read_text(encoding="utf-8")
        installed = re.findall(r"pip install ([^`\n]*lachesis-[^`\n]*)", text)
        forms = [each for each in installed if not re.match(r'(--find-links CLONE/dist )?"?lachesis-rl', each)]
        assert forms == [] and "pip install 'lachesis" not in text, page.name
        assert not installed or "#installing" in text, page.name
