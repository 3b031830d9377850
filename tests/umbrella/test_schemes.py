"""Every verb takes every scheme: one resolver, one message where that fails."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from backends.errors import ExitCode
from lachesis.cli import main
from lachesis.cli.environment_classes import SCHEMES
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import FakeServer, Scripted
from tests.doors.test_suite import SERVER
from tests.envs.environments.test_harbor_env import task_at
from tests.support.recipes import shown
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import ROOT

VERBS = {
    "process": ["process", "ENV"],
    "play": ["play", "ENV"],
    "play serve": ["play", "ENV", "serve"],
    "play evaluate": ["play", "ENV", "evaluate"],
    "eval": ["eval", "ENV"],
    "serve": ["serve", "ENV"],
    "serve as": ["serve", "ENV", "--as", "ors"],
    "check": ["check", "ENV"],
}


def run(verb: str, target: str, *flags: str) -> int:
    return main([target if word == "ENV" else word for word in VERBS[verb]] + list(flags))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LACHESIS_DOORS", str(tmp_path / "no doors"))


@contextmanager
def running(server: Any) -> Iterator[str]:
    """The address of a server in a thread of its own: a command has the main one."""
    ready: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server:
            ready.put_nowait(server.base_url)
            await asyncio.Event().wait()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = asyncio.run_coroutine_threadsafe(serve(), loop)
    try:
        yield asyncio.run_coroutine_threadsafe(ready.get(), loop).result(60)
    finally:
        serving.cancel()
        asyncio.run_coroutine_threadsafe(_others_ended(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _others_ended() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


# --- what plays here without a package of others


def harbor(folder: Path) -> str:
    task_at(folder / "tasks" / "one")
    return "harbor:tasks?agent=oracle"


def atropos(folder: Path) -> str:
    (folder / "capitals.py").write_text(shown("from-atropos.md")["capitals.py"])
    return "atropos:capitals.py:Capitals"


def textarena(folder: Path) -> str:
    (folder / "textarena.py").write_text((ROOT / "tests/doors/textarena_game.py").read_text())
    return "textarena:Five-v0?opponent=random"


def gymnasium(folder: Path) -> str:
    pytest.importorskip("gymnasium")
    return "gymnasium:FrozenLake-v1?is_slippery=false"


def mcp(folder: Path) -> str:
    row = {"prompt": "Add 3 and 4.", "answer": "7", "files": {"server.py": SERVER}}
    (folder / "sums.jsonl").write_text(json.dumps(row) + "\n")
    return f"mcp:sums.jsonl?command={quote('python3 server.py')}&name=sums"


def plays(request: dict[str, Any]) -> Any:
    """A model that is good at all of them."""
    offered = [tool["function"]["name"] for tool in request.get("tools") or ()]
    taken = sum(message["role"] == "tool" for message in request["messages"])
    if "sums__add" in offered:
        return say("7") if taken else call(("sums__add", {"a": 3, "b": 4}))
    if "step" in offered:
        return call(("step", {"action": [1, 1, 2, 2, 1, 2][taken]}))
    return say("[2]")


@pytest.mark.sample(2)
@pytest.mark.parametrize("made", [harbor, atropos, textarena, gymnasium, mcp])
def test_every_verb_plays_every_scheme(
    tmp_path: Path, made: Callable[[Path], str], capfd: pytest.CaptureFixture[str]
) -> None:
    target, flags, short = made(tmp_path), ["-m", "reference"], ["-n", "1", "-r", "2"]
    model: Any = ScriptedServer(plays)
    if made is atropos:
        model = FakeServer(Scripted("Lima"), logprobs_mode="processed")
        model.tokenizer.save_pretrained("tokenizer")
        short = []
    with running(model) as url:
        if made is atropos:
            flags = ["--openai.server_type", "vllm", "--openai.tokenizer_name", "tokenizer"]
            flags += ["--openai.logprobs_mode", "processed", "--env.tokenizer_name", "tokenizer"]
        if made is not harbor:
            flags += ["-m", "fake", "-b", url, "-k", "x"]
        for verb in ("process", "play", "eval"):
            folder = tmp_path / verb
            code = run(
                verb, target, "-o", str(folder), *(short or ["--env.total_steps", "1"] * (verb != "eval")), *flags
            )
            said = capfd.readouterr()
            assert code == 0, f"{verb}: {said.out}{said.err}"
            if verb != "eval":  # an evaluation of Atropos may write nothing
                rollouts = [each for group in read_lines(folder / "groups.jsonl") for each in group["rollouts"]]
                assert {each["reward"] for each in rollouts} == {1.0}, verb
    assert run("check", target, "-n", "1", *(["--env.tokenizer_name", "tokenizer"] if made is atropos else [])) in (
        0,
        1,
    )
    assert re.search(r"^nothing +1 ", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("scheme", sorted(SCHEMES.names()))
def test_a_scheme_without_a_name_is_refused_alike_by_every_verb(scheme: str, capfd: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        assert run(verb, f"{scheme}:") == ExitCode.SETTINGS, verb
        assert f"error: '{scheme}:' names no environment; write {scheme}:NAME" in capfd.readouterr().err, verb


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("textarna:Sudoku-v0", "there is no scheme and no module 'textarna'; did you mean textarena:NAME?"),
        ("nothing_like_it:x", "there is no scheme and no module 'nothing_like_it'; schemes are atropos, bfcl, "),
        ("gymnasium:Taxi-v3?size=[1", "size=[1 is not YAML; write a text in quotes, size='...'"),
        ("harbor:none", "harbor: none: no task is there; name a folder that has a task.toml"),
        ("harbor:tasks?agnt=oracle", "unknown setting harbor:FOLDER?agnt; did you mean agent?"),
        ("atropos:none.py", "atropos: there is no file or folder none.py"),
        ("atropos:capitals.py?a=1", "takes no arguments; give its settings as --env.NAME VALUE"),
        ("atropos:lachesis_envs.gsm8k:GSM8kAgentEnv", "write lachesis_envs.gsm8k:GSM8kAgentEnv"),
        ("skyrl:gsm8k", "needs the package 'skyrl_gym', which this interpreter does not have. Next step: python -m"),
    ],
)
def test_what_cannot_be_played_is_named_with_the_reason_and_the_next_step(
    tmp_path: Path, target: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    harbor(tmp_path)
    for verb in ("process", "play", "eval", "check"):
        assert run(verb, target, *([] if verb == "check" else ["-m", "reference"])) == ExitCode.SETTINGS, verb
        assert said in capfd.readouterr().err, verb


def test_the_audit_resolves_targets_as_all_verbs_do(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, so of one scheme only."""
    assert main(["audit", "harbor:none", "--items", "1"]) == ExitCode.SETTINGS
    assert "harbor: none: no task is there; name a folder" in " ".join(capfd.readouterr().err.split())


def test_a_command_that_play_does_not_have_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "terminal", "proces"]) == ExitCode.SETTINGS
    assert "there is no 'proces'; write process, serve, evaluate, or nothing" in capfd.readouterr().err
    assert main(["play", "terminal", "--drift", "-m", "reference"]) == ExitCode.SETTINGS
    assert "--drift and --json are for environments of Atropos" in capfd.readouterr().err
