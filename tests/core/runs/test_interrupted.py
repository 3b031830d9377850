"""What was said in a rollout that a signal interrupted is in `failed_trajectories.jsonl`; it is played again."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lachesis_data.files.validation import validate_entry
from tests.support.scripted_server import call
from tests.support.small_envs import lines, served, sorts, start

MODULE = "tests.support.small_envs"
BOUND = 60.0


class Model:
    """It plays one command, and of its second turn nobody hears while `silent` is set."""

    def __init__(self) -> None:
        self.silent = True
        self.waiting = threading.Semaphore(0)
        """Counts second turns that were asked for."""

    async def __call__(self, request: dict[str, Any]) -> Any:
        last = request["messages"][-1]
        if last["role"] != "tool":
            return call(("terminal", {"command": "echo first"}))
        if "first" not in str(last["content"]):
            return sorts(request)
        self.waiting.release()
        while self.silent:  # noqa: ASYNC110 - set by a thread without a loop
            await asyncio.sleep(0.02)
        return sorts({**request, "messages": request["messages"][:-2]})


def arguments(url: str, folder: Path, verb: str = "process") -> list[str]:
    flags = {
        "openai.base_url": url,
        "openai.model_name": "m",
        "openai.api_key": "x",
        "env.total_steps": "2",
        "env.group_size": "2",
        "env.max_num_workers": "2",
        "env.enabled_toolsets": "[terminal, file]",
        "env.data_path_to_save_groups": str(folder / "groups.jsonl"),
        "env.data_dir_to_save_evals": str(folder),
        "env.eval_items": "4",
    }
    return ["-m", MODULE, verb, *(text for name, value in flags.items() for text in (f"--{name}", value))]


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = run.communicate(timeout=BOUND)
    except subprocess.TimeoutExpired:
        run.kill()
        raise
    return run.returncode, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "verb"),
    [
        (signal.SIGINT, "process"),
        (signal.SIGTERM, "evaluate"),
        pytest.param(signal.SIGTERM, "process", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, "evaluate", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_conversation_is_kept_and_its_rollout_is_played_again(
    tmp_path: Path, number: signal.Signals, verb: str
) -> None:
    model = Model()
    with served(model) as server:
        run = start(arguments(server.base_url, tmp_path, verb))
        for _ in range(4):
            assert model.waiting.acquire(timeout=BOUND), run.kill() or run.communicate()
        run.send_signal(number)
        code, output = ended(run)
        assert code == 130, output
        assert f"look at what is finished: lachesis view {tmp_path}" in output
        failed = lines(tmp_path / "failed_trajectories.jsonl")
        assert [entry["outcome"] for entry in failed] == ["interrupted"] * 4
        assert {(entry["reward"], entry["completed"]) for entry in failed} == {(None, False)}
        for entry in failed:
            assert [turn["from"] for turn in entry["conversations"]] == ["system", "human", "gpt", "tool"]
            assert "first" in entry["conversations"][-1]["value"]
            assert validate_entry(entry) == []
        groups = tmp_path / ("groups.jsonl" if verb == "process" else "samples.jsonl")
        assert not groups.exists() or lines(groups) == []
        model.silent = False
        code, output = ended(start(arguments(server.base_url, tmp_path, verb)))
        assert code == 0, output
        played = [rollout for group in lines(groups) for rollout in group["rollouts"]]
        assert [rollout["reward"] for rollout in played] == [1.0] * 4
        assert len(lines(tmp_path / "trajectory_samples.jsonl")) == 4
        assert lines(tmp_path / "failed_trajectories.jsonl") == failed, "what was interrupted is counted once"
        assert not {entry["rollout_id"] for entry in failed} & {rollout["rollout_id"] for rollout in played}


ENDING = """
import atexit, os, signal, sys
from pathlib import Path
{imports}

def at_the_end():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)  # is handled before the call returns
    print("put away")

atexit.register(at_the_end)
{program}
"""


@pytest.mark.parametrize(
    ("imports", "program", "argument", "code"),
    [
        ("from tests.support.small_envs import SortWords", "SortWords.cli()", "proces", 2),
        ("import runpy", 'runpy.run_module("lachesis", run_name="__main__")', "--help", 0),
        ("from lachesis.cli import program", "program()", "--help", 0),
    ],
)
def test_ctrl_c_pressed_once_more_interrupts_no_end(imports: str, program: str, argument: str, code: int) -> None:
    end, output = ended(start(["-c", ENDING.format(imports=imports, program=program), argument]))
    assert (end, "Traceback" in output, "put away" in output) == (code, False, True), output


def test_ctrl_c_pressed_many_times_is_one_and_the_run_puts_away_what_it_has(tmp_path: Path) -> None:
    model = Model()
    with served(model) as server:
        run = start(arguments(server.base_url, tmp_path))
        for _ in range(4):
            assert model.waiting.acquire(timeout=BOUND), run.kill() or run.communicate()
        while run.poll() is None:
            run.send_signal(signal.SIGINT)
            time.sleep(0.02)
        code, output = ended(run)
    assert code == 130 and output.splitlines()[-1].startswith("stopped; finished work is saved"), output
    assert len(lines(tmp_path / "failed_trajectories.jsonl")) == 4
    assert not {"Traceback", "KeyboardInterrupt", "destroyed", "Unclosed"}.intersection(output.split()), output
