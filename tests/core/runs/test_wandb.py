"""Weights & Biases: logs under the names of the field when asked for, and is never touched otherwise."""

from __future__ import annotations

import asyncio
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.figures.summary import training_metrics
from lachesis.loop.outcome import Outcome
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.group_records import group_record
from lachesis_testing.fake_server import FakeServer, ToolUser
from lachesis_view import wandb_sender
from lachesis_view.wandb_tracking import Tracker
from tests.support.scripted_server import ScriptedServer
from tests.support.small_envs import Fussy, SortWords, fussed, lines, make, process, served, sorts, start
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.training_runs import serving, trained, with_tokens

__all__ = ["run_api"]

TRAIN = {
    *("train/avg_reward", "train/total_rollouts", "train/avg_turns", "train/avg_tool_calls", "train/tool_use_rate"),
    *("train/tool_errors_count", "train/items_rejected", "train/outcome/completed", "train/rollouts"),
    "server/server_0_request_time_avg",
}
EVAL = {"eval/avg_reward", "eval/avg_reward_low", "eval/avg_reward_high", "eval/items", "eval/outcome/completed"}


def logged(folder: Path) -> list[dict[str, Any]]:
    """Every step that the offline runs of a folder hold, read back from their own files."""
    steps: list[dict[str, Any]] = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        deadline = time.monotonic() + 200
        while not (read := list(map(parsed, records(path.read_bytes())))) or not read[-1].HasField("exit"):
            assert time.monotonic() < deadline, "a run that is finished was written to its end"
            time.sleep(0.1)  # W&B's own process writes the file, on a busy machine somewhat later
        for record in read:
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                steps.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return steps


def alerts(folder: Path) -> list[str]:
    """The texts of the alerts of these runs."""
    found = [parsed(each) for path in folder.glob("wandb/offline-run-*/*.wandb") for each in records(path.read_bytes())]
    return [record.alert.text for record in found if record.HasField("alert")]


def parsed(data: bytes) -> Any:
    from wandb.proto import wandb_internal_pb2

    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    return record


def records(log: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format (blocks of 32 KiB) after a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        record += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield record
            record = b""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of W&B in this folder. It reads the environment once a process, unless it is torn down."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    import wandb

    wandb.teardown()


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
async def test_process_and_evaluate_log_the_names_of_the_field(tmp_path: Path) -> None:
    async with ScriptedServer(sorts) as server:
        env = make(SortWords, server, tmp_path, use_wandb=True, total_steps=2, eval_items=2)
        await env.process_manager()
        await env._run_evaluate()
    import wandb

    assert wandb.run is None, "the run is finished, not left to the end of the program"
    steps = logged(tmp_path)
    names = [{name.split("/_")[0] for name in step if not name.startswith("_")} for step in steps]
    train = [step for step in names if "train/avg_reward" in step]
    assert len(train) == 2
    assert all(step >= TRAIN for step in train), TRAIN - train[0]
    assert any(step >= EVAL for step in names)
    assert {step["train/avg_reward"] for step in steps if "train/avg_reward" in step} == {"1"}


@pytest.mark.usefixtures("offline")
async def test_a_biased_selection_is_an_alert_also_of_what_an_earlier_start_played(tmp_path: Path) -> None:
    async with ScriptedServer(fussed) as server:
        given = {"group_size": 8, "enabled_toolsets": ["todo"]}
        await make(Fussy, server, tmp_path, total_steps=6, **given).process_manager()
        # 32 rollouts are too few for a look of their own.
        await make(Fussy, server, tmp_path, total_steps=10, use_wandb=True, **given).process_manager()
    steps = logged(tmp_path)
    (alert,) = alerts(tmp_path)
    assert alert.startswith("being left out depends on the item (p = 0.0005, correlation 0.")
    assert steps[-1]["train/unscored_alarm"] == "1"
    assert float(steps[-1]["train/unscored_p/item"]) < 0.01
    assert {step.get("train/unscored/declined") for step in steps} == {"0.875", None}
    assert any(name.startswith("train/unscored_items") for step in steps for name in step)


class Group(dict[str, Any]):
    """A record that can be watched."""


def record(reward: float) -> Group:
    rollout = Rollout("r", "key", 0, Outcome.COMPLETED, "the model answered", reward, result=None)
    return Group(group_record(PlayedGroup("i", "key", [], [rollout]), environment="e", model="m"))


def test_groups_are_counted_until_they_are_logged_and_none_is_kept() -> None:
    """A trainer that gets no group makes no step, and without a step nothing is logged."""
    tracker = Tracker()
    groups = [record(0.0), record(1.0)]
    watched = [weakref.ref(group) for group in groups]
    for group in groups:
        tracker.add(group)
    del group
    groups.clear()
    assert [reference() for reference in watched] == [None, None]
    tracker.log({"eval/avg_reward": 1.0}, 3)  # an evaluation in between
    assert training_metrics(tracker.take())["train/total_rollouts"] == 2
    assert training_metrics(tracker.take()) == {}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("on", [True, False])
async def test_the_record_of_a_served_group_is_made_for_w_and_b_only_and_beside_the_event_loop(
    tmp_path: Path, run_api: StockRunApi, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    threads = []

    def noted(*args: Any, **given: Any) -> Any:
        threads.append(threading.get_ident())
        return group_record(*args, **given)

    monkeypatch.setattr("lachesis.runs.commands.group_record", noted)
    async with run_api.wiped() as api, FakeServer(ToolUser()) as model:
        server = with_tokens(model, tmp_path)
        await trained(serving(tmp_path, api, server, use_wandb=on), api, groups=2, steps=1)
    assert bool(threads) == on and threading.get_ident() not in threads
    if on:
        (ages,) = [step for step in logged(tmp_path) if "train/age_max" in step]
        assert [float(ages[f"train/{name}"]) for name in ("age_mean", "age_max", "too_old")] == [0, 0, 0]


def test_without_a_login_it_says_so_and_asks_nobody(tmp_path: Path) -> None:
    absent = ("WANDB_MODE", "WANDB_API_KEY", "NETRC")
    with served(sorts) as server:
        program = (
            "import os\n"
            f"for name in {absent!r}: os.environ.pop(name, None)\n"
            "from tests.support.small_envs import SortWords\n"
            "SortWords.cli()\n"
        )
        arguments = ["process", "--openai.base_url", server.base_url, "--openai.model_name", "m", "--env.use_wandb"]
        arguments += ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
        child = start(["-c", program, *arguments], HOME=str(tmp_path), WANDB_DIR=str(tmp_path))
        output = child.communicate(timeout=200)[0]
        assert server.requests == [], "it is found before anything is played"
    assert child.returncode == 1, output
    assert "use_wandb is set, but W&B cannot start" in output
    assert "WANDB_MODE=offline" in output
    assert "Traceback" not in output


async def test_without_being_asked_for_it_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    result = await process(SortWords, tmp_path)
    assert len(lines(result.files.groups)) == 2
    assert not (tmp_path / "wandb").exists()
    assert getattr(sys.modules.get("wandb"), "run", None) is None


LONELY = """
import os, signal
from pathlib import Path
from tests.support.small_envs import SortWords

def children(process):
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield from (child, *children(child))

class Lonely(SortWords):
    name = "lonely"
    scored = 0

    async def compute_reward(self, item, result, ctx):
        Lonely.scored += 1
        if Lonely.scored == KILLED_AT:
            for child in children(os.getpid()):
                if "wandb" in Path(f"/proc/{child}/cmdline").read_text():
                    os.kill(child, signal.SIGKILL)
        return 0.5

Lonely.cli()
"""


STILL = """
import lachesis_view.wandb_sender
lachesis_view.wandb_sender.PATIENCE = 1.0
logged = Lonely.wandb_log

async def wandb_log(self, metrics=None):
    await logged(self, {**(metrics or {}), "text": "x" * 10_000_000})  # more than a socket takes that nobody reads
    if OWN and not self.tracker.lost:
        import wandb
        wandb.log({"text": "x" * 10_000_000})

Lonely.wandb_log = wandb_log
Lonely.cli()
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("killed_at", [3, 6])
def test_a_run_outlives_the_process_of_w_and_b(tmp_path: Path, killed_at: int) -> None:
    """The kernel kills it where memory is short: between two groups, or just before the end."""
    with served(sorts) as server:
        arguments = ["process", "--openai.base_url", server.base_url, "--openai.model_name", "m", "--env.use_wandb"]
        arguments += ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl"), "--env.max_num_workers", "1"]
        arguments += ["--env.total_steps", "6", "--env.group_size", "1", "--env.enabled_toolsets", "[file]"]
        program = LONELY.replace("KILLED_AT", str(killed_at))
        child = start(["-c", program, *arguments], WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
        output = child.communicate(timeout=200)[0]
    assert child.returncode == 0, output
    assert len(lines(tmp_path / "groups.jsonl")) == 6
    assert output.count("the run goes on without it") == 1 and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_run_outlives_a_process_of_w_and_b_that_stands_still(tmp_path: Path, own: bool) -> None:
    """`own`: the environment calls W&B by itself, in the event loop."""
    with served(sorts) as server:
        arguments = ["process", "--openai.base_url", server.base_url, "--openai.model_name", "m", "--env.use_wandb"]
        arguments += ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl"), "--env.max_num_workers", "1"]
        arguments += ["--env.total_steps", "6", "--env.group_size", "1", "--env.enabled_toolsets", "[file]"]
        program = LONELY.replace("KILLED_AT", "2").replace("SIGKILL", "SIGSTOP").replace("Lonely.cli()", STILL)
        child = start(
            ["-c", program.replace("OWN", str(own)), *arguments], WANDB_MODE="offline", WANDB_DIR=str(tmp_path)
        )
        output = child.communicate(timeout=200)[0]
    assert child.returncode == 0, output
    assert len(lines(tmp_path / "groups.jsonl")) == 6
    assert output.count("the run goes on without it") == 1 and "Traceback" not in output
    assert "W&B is gone (TimeoutError: it has taken nothing for 1 s)" in output


@pytest.mark.usefixtures("offline")
async def test_lines_that_w_and_b_does_not_take_are_dropped_and_the_end_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    monkeypatch.setattr(wandb_sender, "WAITING", 3)
    monkeypatch.setattr(wandb_sender, "SAID_AFTER", 0.0)
    goes_on, began = threading.Event(), threading.Event()
    sender = wandb_sender.Sender(wandb.init(project="p"))
    sender.send(lambda run: (began.set(), goes_on.wait()))
    began.wait()
    for step in range(6):
        sender.send(lambda run, step=step: run.log({"number": step}, step=step))
    ending = asyncio.create_task(sender.finished(0))
    while "waited for up to 300 s" not in caplog.text:  # noqa: ASYNC110  # what a person sees
        await asyncio.sleep(0.01)
    goes_on.set()
    await ending
    assert [step["number"] for step in logged(tmp_path)] == ["0", "1", "2"]
    assert sender.dropped == 3 and caplog.text.count("further ones are dropped there") == 1 and not sender.gone


async def test_who_does_not_wait_for_the_end_of_w_and_b_need_not(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()
    sender = wandb_sender.Sender(object())
    sender.send(lambda run: never.wait())
    ending = asyncio.create_task(sender.finished(0))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert "W&B is gone (TimeoutError: the run was ended before all was sent)" in caplog.text
    never.set()
