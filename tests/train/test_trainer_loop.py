"""The loop of a run: each batch is in the weights exactly once, whatever fails or is killed, and how a run ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.runs.run_folder import OtherSettings, RunFolderError
from lachesis_messages.records.jsonl import read_lines
from lachesis_train.api import ApiSettings, RolloutApiServer
from lachesis_train.curves.recorder import TrainingRecorder
from lachesis_train.policy import CurrentPolicy
from lachesis_train.tinker_sdk import Datum, LossPart, Trained, TrainingEngineError
from lachesis_train.trainer import batches, checkpoints, engine_link
from lachesis_train.trainer.batches import BatchError, BatchSource
from lachesis_train.trainer.checkpoints import Checkpoint
from lachesis_train.trainer.datums import prepare
from lachesis_train.trainer.engine_run import TrainingStopped
from lachesis_train.trainer.loop import Trainer
from lachesis_train.trainer.settings import TrainingSettings
from lachesis_train.trainer.teacher import TeacherFailed
from lachesis_train.verbs.launch_training import read_settings
from tests.run import some
from tests.support.ports import free_port
from tests.support.stock_run_api import StockRunApi, run_api
from tests.support.trained_groups import group_body
from tests.train.test_forecast import SMOLLM2, model

__all__ = ["model", "run_api"]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between tries of an engine that fails."""
    monkeypatch.setattr(engine_link, "_LONGEST_PAUSE", 0.0)


class Killed(BaseException):
    """The process ended here."""


@dataclass
class Engine:
    """An engine whose weights are the texts of what they were trained on. It fails where `faults` says."""

    faults: list[str] = field(default_factory=list)
    """What happens at its next calls: nothing, a failure or a kill, before or after the call has had its effect."""
    saved: dict[str, tuple[str, ...]] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    rates: list[float] = field(default_factory=list)
    losses: set[str] = field(default_factory=set)
    keeps: int = 0
    broken: bool = False
    """After a failure the SDK's client takes no more requests; a new connection has a new one."""

    async def connect(self) -> Engine:
        self.broken = False
        return self

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    @contextlib.contextmanager
    def fault(self) -> Any:
        kind = self.faults.pop(0) if self.faults else ""
        if self.broken:
            raise TrainingEngineError("go on", RuntimeError("poisoned"))
        self.end(kind, "before")
        yield
        self.end(kind, "after")

    def end(self, kind: str, when: str) -> None:
        if kind == f"fails {when}":
            self.broken = True
            raise TrainingEngineError("compute", RuntimeError("a failure of the test"))
        if kind == f"killed {when}":
            raise Killed

    async def train(self, *_: Any) -> Engine:
        with self.fault():
            self.weights = ()
        return self

    async def resume(self, path: str, *_: Any, **__: Any) -> Engine:
        with self.fault():
            self.weights = self.saved[path]
        return self

    async def take(self, state: str, run_dir: Path) -> None:
        with self.fault():
            assert state in self.saved

    async def step_in_parts(self, data: Sequence[Datum], parts: Sequence[LossPart], adam: Any) -> Trained:
        with self.fault():
            assert sorted(place for part in parts for place in part.places) == [*range(len(data))]
            if not any(np.any(each.inputs["advantages"]) for each in data):  # as the embedded engine does
                raise TrainingEngineError("make a step", ValueError("there are no gradients"), final=True)
            text = "|".join(bytes(token for token in each.targets if token < 256).decode() for each in data)
            self.weights = (*self.weights, text)
            self.rates.append(adam.learning_rate)
            self.losses |= {part.loss for part in parts}
        return Trained([[-0.5] * len(each.targets) for each in data], {"loss:sum": 0.0})

    async def forward(self, data: Sequence[Datum]) -> Trained:
        with self.fault():
            return Trained([[-0.5 + 0.1 * len(self.weights)] * len(each.targets) for each in data], {})

    async def save_state(self, name: str) -> str:
        path = f"tinker://{name}-{len(self.saved)}"
        with self.fault():
            self.saved[path] = self.weights
        return path

    save_sampler = save_state

    async def forget(self, path: str) -> None:
        with self.fault():
            if path not in self.saved:
                raise TrainingEngineError(f"delete {path}", ValueError("it is not there"), final=True)
            del self.saved[path]

    async def sampler(self) -> Any:
        with self.fault():
            return self.weights


class WithoutReport(TrainingRecorder):
    """The report of a run takes longer to write than these runs."""

    def report(self) -> Path:
        return self.run_dir


@dataclass
class World:
    """A run, its folder, its API and its engine."""

    folder: Path
    url: str
    engine: Engine = field(default_factory=Engine)
    said: list[str] = field(default_factory=list)
    policy: CurrentPolicy | None = None

    def trainer(self, *, resume: bool = False, stop: asyncio.Event | None = None, **training: Any) -> Trainer:
        given = {"base_model": "m", "run_dir": str(self.folder), "num_steps": 4, "step_retries": 50, **training}
        env = {"group_size": 2, "batch_size": 2, "rollout_server_url": self.url}
        chosen = read_settings(None, {"training": given, "env": env})
        source = BatchSource(
            self.url,
            chosen.registration,
            self.folder / "batches",
            end_without_environments=chosen.training.end_without_environments,
            say=self.said.append,
        )
        return Trainer(
            chosen,
            self.engine,  # type: ignore[arg-type]
            source,
            recorder=lambda first: WithoutReport(self.folder, first_step=first),
            serving=self.serving,
            resume=resume,
            say=self.said.append,
            stop=stop,
        )

    @contextlib.asynccontextmanager
    async def serving(self, policy: CurrentPolicy) -> AsyncIterator[None]:
        self.policy = policy
        yield

    async def post(self, *bodies: dict[str, Any]) -> None:
        """Post groups before a trainer has asked for any."""
        register = {
            **dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), "x"),
            "batch_size": 2,
            "max_token_len": 2048,
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 4,
            "acknowledges": True,
        }
        async with aiohttp.ClientSession() as http:
            for path, body in (("/register", register), *(("/scored_data", body) for body in bodies)):
                async with http.post(self.url + path, json=body) as answer:
                    assert answer.status == 200, await answer.text()


def group(number: int, scores: Sequence[float] = (1.0, 0.0), **more: Any) -> dict[str, Any]:
    body = group_body(f"g{number}", f"question {number}", ["yes", "no"], scores, **more)
    body["group_overrides"]["group_id"] = f"g{number}"
    del body["env_id"]
    return body


@contextlib.asynccontextmanager
async def world(stock: StockRunApi | None = None) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if stock is not None:
            async with stock.wiped() as server:
                yield World(folder / "run", server.url)
        else:
            async with RolloutApiServer(ApiSettings(folder / "api.db", port=0)) as api:
                yield World(folder / "run", api.url)


FAULTS = st.lists(
    st.sampled_from(["", "", "", "", "fails before", "fails after", "killed before", "killed after"]), max_size=30
)


async def _run_to_the_end(at: World, interval: int, steps: int) -> None:
    while True:
        try:
            assert await at.trainer(save_checkpoint_interval=interval, num_steps=steps).run() == steps
        except Killed:
            continue
        return


@settings(max_examples=some(15))
@given(FAULTS, st.integers(0, 3), st.booleans())
def test_each_batch_is_in_the_weights_once_whatever_fails_and_whenever_it_is_killed(
    run_api: StockRunApi, faults: list[str], interval: int, stock: bool
) -> None:
    async def play() -> None:
        async with world(run_api if stock else None) as at:
            await at.post(*map(group, range(4)))
            at.engine.faults = list(faults)
            await _run_to_the_end(at, interval, 4)
            assert [text.count("question") for text in at.engine.weights] == [2] * 4
            order = [3, 2, 1, 0] if stock else [0, 1, 2, 3]  # the stock API forms all batches, and gives the last first
            assert [f"question {n}" in text for n, text in zip(order, at.engine.weights, strict=True)] == [True] * 4
            found = Checkpoint.read(at.folder)
            assert found is not None
            assert (found.step, found.batch_id) == (4, 4)
            assert at.engine.saved[found.state] == at.engine.weights
            assert found.sampler is not None
            assert at.engine.saved[found.sampler] == at.engine.weights
            assert [line["step"] for line in read_lines(at.folder / "metrics.jsonl")] == [1, 2, 3, 4]
            assert at.policy is not None
            assert (at.policy.current.step, at.policy.current.sampler) == (4, at.engine.weights)
            assert not list((at.folder / "batches").glob("*"))

    asyncio.run(play())


async def test_a_batch_without_a_signal_is_a_step_without_an_update() -> None:
    async with world() as at:
        await at.post(group(0), group(1, (1.0, 1.0)), group(2))
        assert await at.trainer(num_steps=3).run() == 3
        assert len(at.engine.weights) == 2
        lines = list(read_lines(at.folder / "metrics.jsonl"))
        assert [line["train/samples"] for line in lines] == [2, 0, 2]
        assert lines[1]["train/skipped/same_scores"] == 2
        assert at.policy is not None
        assert at.policy.current.name.endswith(":3")


async def test_batches_of_cut_off_rollouts_are_steps_without_an_update_and_do_not_end_the_run() -> None:
    async with world() as at:
        await at.post(*(group(number, outcome="context_exhausted") for number in range(3)), group(3))
        assert await at.trainer(mask_truncated_completions=True).run() == 4
        assert len(at.engine.weights) == 1
        lines = list(read_lines(at.folder / "metrics.jsonl"))
        assert [line.get("train/skipped/truncated") for line in lines] == [2, 2, 2, None]
        assert not any("refused" in text for text in at.said)


class Equal:
    """A base model that finds each token as likely as the sampler of these groups did."""

    async def logprobs(self, ids: list[int]) -> list[float]:
        return [-0.5] * len(ids)


async def test_a_batch_whose_penalties_are_all_0_is_a_step_without_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as at:

        async def equal(_: Engine, __: str) -> Equal:
            return Equal()

        monkeypatch.setattr(Engine, "base_sampler", equal, raising=False)
        await at.post(group(0), group(1, (1.0, 1.0)), group(2))
        assert await at.trainer(num_steps=3, kl_penalty=0.1).run() == 3
        assert len(at.engine.weights) == 2
        lines = list(read_lines(at.folder / "metrics.jsonl"))
        assert [line["train/samples"] for line in lines] == [2, 0, 2]
        assert lines[1]["train/skipped/same_scores"] == 2


class AwayTwice:
    """A teacher that finds each token likelier than the sampler of these groups did, when it is there."""

    asked = 0

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.asked += 1
        if self.asked in (3, 4):
            raise TeacherFailed("ask the teacher", ConnectionError("it is away"))
        return [[-0.5 + 0.01 * at for at in range(len(ids))] for ids in sequences]


@pytest.mark.parametrize("stock", [False, True])
async def test_a_teacher_that_is_away_is_asked_again_with_the_same_weights(run_api: StockRunApi, stock: bool) -> None:
    async with world(run_api if stock else None) as at:
        await at.post(*map(group, range(4)))
        running = at.trainer(num_steps=4, save_checkpoint_interval=0, teacher_url="http://127.0.0.1:9/v1")
        running._teacher = teacher = AwayTwice()  # type: ignore[assignment]
        states = len(at.engine.saved)
        assert await running.run() == 4
        assert teacher.asked == 6, "no step was trained a second time"
        assert [text.count("question") for text in at.engine.weights] == [2] * 4
        assert len(at.engine.saved) - states == 3, "the first state, and the last one with its sampler"
        assert sum("ask the teacher" in text and "checkpoint" not in text for text in at.said) == 2


class Hangs:
    """A teacher that never answers; the run is asked to stop meanwhile."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.stop = stop

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.stop.set()
        return await asyncio.Future()


async def test_a_run_that_is_asked_to_stop_does_not_wait_for_its_teacher() -> None:
    async with world() as at:
        await at.post(group(0))
        running = at.trainer(num_steps=1, teacher_url="http://127.0.0.1:9/v1")
        running._teacher = Hangs(running._stop)  # type: ignore[assignment]
        async with asyncio.timeout(20):
            assert await running.run() == 0
        assert not at.engine.weights
        again = at.trainer(num_steps=1, teacher_url="http://127.0.0.1:9/v1")
        again._teacher = AwayTwice()  # type: ignore[assignment]
        assert await again.run() == 1, "the same batch"
        (line,) = read_lines(at.folder / "metrics.jsonl")
        assert (line["train/samples"], line["train/impossible_tokens_of_teacher"]) == (2, 0)


async def test_sequences_beyond_a_ratio_are_left_out_of_the_step_and_counted() -> None:
    """The sampler's logprobs are -0.5; those of the engine rise by 0.1 with each step that trains."""
    async with world() as at:
        await at.post(*map(group, range(4)))
        given = {"reject_ratio_above": 1.15, "max_sequence_ratio": 1.2}
        assert await at.trainer(**given).run() == 4
        assert len(at.engine.weights) == 2  # with no step and one step before; after two the ratio is e^0.2
        lines = list(read_lines(at.folder / "metrics.jsonl"))
        assert [line["train/samples"] for line in lines] == [2, 2, 0, 0]
        assert [line.get("train/skipped/off_policy") for line in lines] == [None, None, 2, 2]
        assert [line.get("train/sequence_ratio/max") for line in lines] == [1.0, 1.2, None, None]
        assert lines[1]["train/sequence_ratio/truncated"] == 1.0


async def test_a_second_copy_of_a_group_is_not_trained_also_after_a_restart(run_api: StockRunApi) -> None:
    async with world(run_api) as at:
        await at.post(group(0), group(1), group(0), group(1))
        assert await at.trainer(num_steps=1).run() == 1
        assert await at.trainer(num_steps=4).run() == 4
        assert len(at.engine.weights) == 2


async def test_ctrl_c_ends_the_run_with_a_checkpoint_and_the_next_start_continues() -> None:
    async with world() as at:
        await at.post(group(0), group(1))
        stop = asyncio.Event()
        running = asyncio.create_task(at.trainer(stop=stop, save_checkpoint_interval=100).run())
        async with asyncio.timeout(60):
            while True:
                if any("waiting" in text for text in at.said):
                    break
                await asyncio.sleep(0.01)
        stop.set()
        assert await running == 2
        found = Checkpoint.read(at.folder)
        assert found is not None
        assert found.step == 2
        await at.post(group(2), group(3))
        assert await at.trainer(resume=True).run() == 4
        assert len(at.engine.weights) == 4


async def test_a_step_that_always_fails_ends_the_run_with_what_to_do() -> None:
    async with world() as at:
        await at.post(*map(group, range(4)))
        # Start: train, save_state, sampler; then two good steps of two calls each.
        at.engine.faults = [""] * 7 + [*["fails before", "", "", "", "", "", ""] * 50]
        with pytest.raises(TrainingStopped, match=r"step 3: .*3 failures in a row.* start the same command again"):
            await at.trainer(step_retries=2, save_checkpoint_interval=0).run()


async def test_a_request_that_the_engine_refuses_is_not_repeated() -> None:
    async with world() as at:
        await at.post(group(0))

        async def refuse(*_: Any) -> Any:
            raise TrainingEngineError("compute gradients", ValueError("too many tokens"), final=True)

        at.engine.step_in_parts = refuse  # type: ignore[method-assign]
        with pytest.raises(TrainingStopped, match=r"step 1: .*too many tokens \(batch 1, with the groups g0\)"):
            await at.trainer().run()
        assert not any("another try" in text for text in at.said)


async def test_batches_of_refused_groups_end_the_run_with_the_setting_to_change() -> None:
    async with world() as at:
        bodies = [group(number) for number in range(4)]
        for body in bodies:
            body["overrides"] = None
        await at.post(*bodies)
        with pytest.raises(TrainingStopped, match=r"3 batches in a row.*--training\.uncertified allow"):
            await at.trainer().run()
        assert at.engine.weights == ()
        assert len({text for text in at.said if "refused, uncertified" in text}) == 3, "a batch each"
        assert await at.trainer(uncertified="allow", run_dir=f"{at.folder}-b", num_steps=1).run() == 1


async def test_groups_of_another_tokenizer_than_the_models_are_refused_before_the_engine_gets_them(
    model: Path,
) -> None:
    (model / "config.json").write_text(json.dumps({**SMOLLM2, "vocab_size": 100}))
    async with world() as at:
        await at.post(*map(group, range(3)))
        with pytest.raises(TrainingStopped, match=r"token ids from 3 to 121, and the model has 100 rows"):
            await at.trainer(base_model=str(model), num_steps=3).run()
        assert at.engine.weights == ()


async def test_a_folder_of_other_settings_is_refused_with_the_differences() -> None:
    async with world() as at:
        await at.post(*map(group, range(4)))
        await at.trainer(num_steps=1).run()
        with pytest.raises(OtherSettings, match=r"training\.lora_rank: 32 then, 8 now"):
            at.trainer(lora_rank=8)
        with pytest.raises(RunFolderError, match="no checkpoint to resume from"):
            at.trainer(run_dir=f"{at.folder}-new", resume=True)
        assert await at.trainer(save_checkpoint_interval=1, num_steps=2).run() == 2  # how, not what


async def test_a_run_begins_with_the_weights_of_another_and_no_longer_needs_it_then() -> None:
    async with world() as at:
        await at.post(*map(group, range(4)))
        first, second = str(at.folder), f"{at.folder}-second"
        await at.trainer(num_steps=1).run()
        with pytest.raises(OtherSettings, match=r"another adapter: training\.lora_rank: 32 then, 8 now"):
            at.trainer(run_dir=second, init_from=first, lora_rank=8)
        with pytest.raises(RunFolderError, match=r"init_from: .*-third has no checkpoint\.json"):
            at.trainer(run_dir=second, init_from=f"{at.folder}-third")
        at.folder = Path(second)
        at.engine.faults = ["", "fails before"]  # the second time it begins anew
        assert await at.trainer(run_dir=second, init_from=first, num_steps=2).run() == 2
        shutil.rmtree(first)
        assert await at.trainer(run_dir=second, init_from=first, num_steps=3).run() == 3
        assert ["question 0" in text for text in at.engine.weights] == [True, False, False, False]
        assert [line["step"] for line in read_lines(at.folder / "metrics.jsonl")] == [1, 2, 3]


async def test_a_batch_that_comes_again_is_not_another_one() -> None:
    async with world() as at:
        trainer, body = at.trainer(), {**group(0), "overrides": None}
        refused = prepare([body], TrainingSettings())
        for number in (7, 7, 7, 8):  # asked for again after failures of the engine
            trainer._check_refused(batches.Batch(number, [body]), refused)
        with pytest.raises(TrainingStopped, match="3 batches in a row"):
            trainer._check_refused(batches.Batch(9, [body]), refused)


@pytest.mark.parametrize("of", ["first", "first/warm-start"])
async def test_an_engine_takes_the_weights_of_another_run_or_of_its_warm_start(tmp_path: Path, of: str) -> None:
    weights = Path("engine", "7f:train:0", "weights", "step-00016.safetensors")
    there = tmp_path / "first" / weights
    there.parent.mkdir(parents=True)
    there.write_bytes(b"weights")
    engine = engine_link.EmbeddedEngine("tiny", tmp_path / "second", {})
    await engine.take("tinker://7f:train:0/weights/step-00016", tmp_path / of)
    assert (tmp_path / "second" / weights).read_bytes() == b"weights"
    with pytest.raises(TrainingEngineError, match=f"take the weights of .*{of}"):
        await engine.take("tinker://7f:train:0/weights/step-00017", tmp_path / of)


async def test_a_full_disk_ends_the_run_with_its_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as at:
        await at.post(*map(group, range(4)))
        with monkeypatch.context() as patched:
            real = checkpoints.write_atomically

            def full(path: Path, content: bytes) -> None:
                if b'"step": 2' in content:
                    raise OSError(errno.ENOSPC, "No space left on device")
                real(path, content)

            patched.setattr(checkpoints, "write_atomically", full)
            with pytest.raises(TrainingStopped, match=r"No space left on device. The checkpoint of step 1 is complete"):
                await at.trainer(save_checkpoint_interval=1).run()
        assert await at.trainer(save_checkpoint_interval=1).run() == 4
        assert ["question" in text for text in at.engine.weights] == [True] * 4


async def test_ctrl_c_ends_a_run_that_waits_for_the_api() -> None:
    async with world() as at:
        at.url, stop = f"http://127.0.0.1:{free_port()}", asyncio.Event()
        running = asyncio.create_task(at.trainer(stop=stop).run())
        async with asyncio.timeout(60):
            while not any("waiting for the rollout API" in text for text in at.said):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stop.set()
            assert await running == 0


async def test_an_api_that_comes_back_with_another_database_ends_the_run(tmp_path: Path) -> None:
    """Its first batches have numbers that this run has had."""
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        async with RolloutApiServer(ApiSettings(tmp_path / "a.db", port=port)) as api:
            at = World(tmp_path / "run", api.url)
            await at.post(group(0), group(1))
            running = asyncio.create_task(at.trainer().run())
            async with asyncio.timeout(60):
                while len(at.engine.weights) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await stack.enter_async_context(RolloutApiServer(ApiSettings(tmp_path / "b.db", port=port)))
        with pytest.raises(BatchError, match="now has a different database"):
            async with asyncio.timeout(60):
                await running
        await at.post(group(2), group(3))
        assert await at.trainer().run() == 4
        assert [f"question {n}" in text for n, text in enumerate(at.engine.weights)] == [True] * 4


async def test_a_run_whose_environments_have_left_ends_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that left before the trainer came do not count: the next one may be about to start."""
    monkeypatch.setattr(batches, "_LOOK", 0.0)
    async with world() as at, aiohttp.ClientSession() as http:

        async def call(path: str, body: dict[str, Any]) -> dict[str, Any]:
            async with http.post(at.url + path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                found: dict[str, Any] = await answer.json()
                return found

        async def joined() -> int:
            about = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2}
            async with asyncio.timeout(60):
                while (answer := await call("/register-env", about))["status"] != "success":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            return int(answer["env_id"])

        await at.post()
        async with http.get(at.url + "/batch?after=0"):
            pass
        await call("/disconnect-env", {"env_id": await joined()})
        running = asyncio.create_task(at.trainer(end_without_environments=0, save_checkpoint_interval=0).run())
        await asyncio.wait({running}, timeout=1.5)
        assert not running.done()
        env = await joined()
        await call("/scored_data", group(0))
        while not at.engine.weights and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await call("/disconnect-env", {"env_id": env})
        with pytest.raises(BatchError, match=r"all environments have left .*: 0 sequences wait, and a batch has 2"):
            async with asyncio.timeout(60):
                await running
        found = Checkpoint.read(at.folder)
        assert found is not None
        assert found.step == 1


@pytest.mark.parametrize("keeps", [0, 1, 2, 5])
async def test_the_engine_keeps_the_states_of_the_last_checkpoints(keeps: int) -> None:
    async with world() as at:
        await at.post(*map(group, range(6)))
        for steps in (3, 6):  # a second start knows of those of the first one
            await at.trainer(num_steps=steps, keep_checkpoints=keeps, save_checkpoint_interval=1).run()
        found = Checkpoint.read(at.folder)
        assert found is not None
        assert len(found.earlier) == (6 if keeps == 0 else keeps - 1)
        assert set(at.engine.saved) == {*found.paths, *(path for paths in found.earlier for path in paths)}
        assert len(at.engine.saved[found.state]) == 6


async def test_a_state_that_cannot_be_deleted_is_said_and_ends_nothing() -> None:
    async with world() as at:
        await at.post(*map(group, range(4)))
        await at.trainer(num_steps=2, keep_checkpoints=1, save_checkpoint_interval=2).run()
        found = Checkpoint.read(at.folder)
        assert found is not None
        assert found.sampler is not None
        del at.engine.saved[found.sampler]
        running = at.trainer(num_steps=4, keep_checkpoints=1, save_checkpoint_interval=2)
        assert await running.run() == 4
        assert any(f"cannot delete {found.sampler}" in text for text in at.said)


async def test_a_damaged_checkpoint_is_named() -> None:
    async with world() as at:
        at.folder.mkdir()
        (at.folder / "checkpoint.json").write_text('{"step": 1')
        with pytest.raises(RunFolderError, match=r"cannot read .*checkpoint\.json"):
            at.trainer()


async def test_an_api_with_another_database_is_followed_from_its_own_first_batch(tmp_path: Path) -> None:
    async with world() as at:
        await at.post(group(0), group(1))
        await at.trainer(num_steps=2).run()
        async with RolloutApiServer(ApiSettings(tmp_path / "other.db", port=0)) as other:
            at.url = other.url
            await at.post(group(2), group(3))
            assert await at.trainer().run() == 4
        assert any("different database" in text for text in at.said)
        assert [f"question {n}" in text for n, text in enumerate(at.engine.weights)] == [True] * 4


async def test_what_is_no_rollout_api_is_named() -> None:
    from aiohttp import web

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with world() as at:
            at.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            with pytest.raises(Exception, match=r"is not a rollout API: / answered hello; set env\.rollout_server_url"):
                await at.trainer().run()
    finally:
        await runner.cleanup()


async def test_the_learning_rate_and_the_loss_of_each_step_are_those_of_the_settings() -> None:
    async with world() as at:
        await at.post(*map(group, range(4)))
        await at.trainer(
            learning_rate=1.0, warmup_steps=2, learning_rate_schedule="linear", max_importance_ratio=2.0
        ).run()
        assert at.engine.rates == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3])
        assert at.engine.losses == {"cispo"}
