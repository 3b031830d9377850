"""The attacks can succeed: each is seen to fall where there is no wall, and the command says so."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lachesis.cli import main
from lachesis_testing.attacks import ATTACKS
from lachesis_testing.attacks.attack import mark, program
from lachesis_testing.attacks.inside import channel, harness, kernel, neighbours, network, secrets
from lachesis_testing.attacks.secrets_outside import planted

WITHOUT_WALLS = [
    "secrets/home folders",
    "secrets/other processes",
    "network/loopback of the host",
    "network/abstract socket of the host",
    "network/socket file of the host",
    "neighbours/lock",
    "neighbours/record lock",
    "neighbours/opening",
    "neighbours/abstract socket",
    "neighbours/loopback",
    *([] if os.geteuid() == 0 else ["neighbours/shared memory"]),  # root's have an IPC namespace in any case
    "neighbours/named memory",
    "neighbours/process",
]
"""Attacks that succeed on any machine and as any user, where commands run without isolation."""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, str]]]:
    code = main(["sandboxes", "attack", *arguments, "--json"])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_attacks_succeed_where_there_are_no_walls(capsys: pytest.CaptureFixture[str]) -> None:
    only = [part for name in WITHOUT_WALLS for part in ("--only", name)]
    code, rows = run(capsys, "--backend", "local", "--options", "{isolation: none}", *only)
    assert code == 1
    assert {row["attack"] for row in rows if row["verdict"] == "fell"} == set(WITHOUT_WALLS)


def test_attacks_that_would_hit_the_machine_do_not_run_without_walls(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "channel/limits", "--only", "channel/signals", "--only", "waiting shells"]
    code, rows = run(capsys, "--backend", "local", "--options", "{isolation: none}", *only)
    assert code == 0
    assert {row["verdict"] for row in rows} == {"n/a"}
    assert all("processes of the machine" in row["detail"] for row in rows)


def test_the_command_ends_with_0_when_every_wall_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = run(capsys, "--backend", "local", "--only", "channel/", "--only", "secrets/")
    assert code == 0
    assert {row["verdict"] for row in rows} == {"held"}
    assert len(rows) > 10


def test_every_kind_of_planted_secret_is_found_by_who_may_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"planted{mark()}"
    monkeypatch.setenv("OPENAI_API_KEY", f"{secret}: variable")
    with planted(secret, tmp_path) as sockets:
        source = program(secrets, f"print(json.dumps(search({secret!r}, {sockets!r})))")
        source = source.replace('os.walk("/")', f"os.walk({str(tmp_path)!r})")
        ran = subprocess.run([sys.executable, "-I", "-S", "-c", source], capture_output=True, check=True)
    found = json.loads(ran.stdout)
    assert "the variables" in found
    assert f"the socket {sockets[0]}" in found
    assert f"the socket {sockets[1]}" in found
    assert any(place.startswith(str(tmp_path)) for place in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --backend"),
        (["--backend", "local", "--backend", "ssh"], "exactly one --backend"),
        (["--backend", "local", "--only", "no-such"], "no attack has no-such in its name"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["sandboxes", "attack", *arguments])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code != 0
    assert message in capsys.readouterr().err


def test_the_list_names_every_attack_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandboxes", "attack", "--backend", "local", "--list", "--heavy"]) == 0
    names = [line[:36].strip() for line in capsys.readouterr().out.splitlines()]
    assert names == [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert all(len(name) < 36 and attack.tries for name, attack in zip(names, ATTACKS, strict=True))


@pytest.mark.parametrize("module", [channel, kernel, neighbours, network, secrets], ids=lambda module: module.__name__)
def test_programs_that_run_inside_are_in_the_language_of_python_38(module: ModuleType) -> None:
    ast.parse(program(module, ""), feature_version=(3, 8))
    ast.parse(inspect.getsource(harness), feature_version=(3, 8))


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert main(["sandboxes", "attack", "--backend", "local", "--only", "channel/"]) == 0
    assert capsys.readouterr().out == shown
