"""The whole path in real processes, as `lachesis train` runs them: API, trainer with its engine, and `serve`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("LACHESIS_NEED_TORCH"):
    pytest.importorskip("torch", reason="make test-train installs torch")
    pytest.importorskip("tinker", reason="make test-train installs the SDK of Tinker")

from lachesis_train.processes.supervisor import Supervisor
from lachesis_train.verbs.train import TrainingPlan
from tests.run import ALL

ROOT = Path(__file__).parents[3]
ENVIRONMENT = f"{ROOT / 'tests/support/ascii_env.py'}:AsciiEnv"
KILLS = 20 if ALL else 1
"""How often each process is killed."""
GROUPS_A_STEP = 8


class Run:
    """A training run of the model `tiny`, in its folder."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        learning_rate: float = 0.03,
        rollout_api: str = "lachesis",
        interval: int = 5,
        environment: str = ENVIRONMENT,
        config: Path | None = None,
        **settings: str,
    ) -> None:
        self.folder, self.steps = folder, steps
        self.lines: list[tuple[str, str]] = []
        flags = {
            "training.run_dir": str(folder),
            "training.base_model": "tiny",
            "training.num_steps": str(steps),
            "training.lora_rank": "8",
            "training.learning_rate": str(learning_rate),
            "training.advantage": "normalised",
            "training.save_checkpoint_interval": str(interval),
            "openai.model_name": "tiny",
            "env.group_size": "8",
            "env.batch_size": str(8 * GROUPS_A_STEP),
            "env.total_steps": "-1",
            "env.max_batches_offpolicy": "1",
            "env.ensure_scores_are_not_same": "false",  # at the end all are right, and the steps go on
            "env.steps_per_eval": "0",
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        named = [environment] if config is None else None  # those of the file
        given = Namespace(env=named, config=config and str(config), rollout_api=rollout_api)
        self.plan = TrainingPlan.of(given, {name: [value] for name, value in flags.items()})
        self.supervisor = Supervisor(
            self.plan.parts,
            main="trainer",
            logs=folder / "logs",
            say=lambda name, line: self.lines.append((name, line)),
            max_restarts=100,
            finished=self.plan.why_it_cannot_go_on,
        )

    async def ended(self) -> None:
        """Run to the end, which has to be a good one."""
        async with asyncio.timeout(900 * KILLS):
            code = await self.supervisor.run()
        assert code == 0, "\n".join(f"{name}: {line}" for name, line in self.lines[-60:])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """The groups that were trained, by the file of their step."""
        files = sorted((self.folder / "rollouts").glob("step_*.jsonl"))
        # Not splitlines(): answers of a random model hold every other separator of lines.
        return {file.name: [json.loads(line) for line in file.open(encoding="utf-8", newline="\n")] for file in files}


def rows(database: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def of_stock_api(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run beside Atropos' own API."""
    run = Run(tmp_path_factory.mktemp("stock"), steps=10, rollout_api="stock")
    asyncio.run(run.ended())
    return run


def check_that_it_learned(run: Run) -> None:
    metrics = run.metrics
    rewards = [step["train/reward"] for step in metrics]
    assert [step["step"] for step in metrics] == [*range(1, run.steps + 1)]
    assert rewards[0] < 0.6
    assert rewards[-1] > 0.95, rewards
    assert len({step["version"] for step in metrics}) == run.steps
    # Logprobs of the trainer and of the sampler agree where the same weights made both.
    fresh = [
        step
        for step in metrics
        if step["train/staleness/max"] == 0 and "train/sampling/sampling_logp_difference/max" in step  # some is trained
    ]
    assert fresh, "the first batch is of the weights that it trains"
    assert all(step["train/sampling/sampling_logp_difference/mean"] < 1e-5 for step in fresh)
    # At this learning rate the weights grow until float32 itself is off by more, at single tokens: in float64 both
    # agree to 1e-10 with such weights (tests/train/torch/engine/test_sampling.py).
    assert all(step["train/sampling/sampling_logp_difference/max"] < 1e-5 for step in fresh if step["step"] <= 3)
    assert (run.folder / "report.html").exists()


def test_a_random_model_learns_beside_a_stock_api(of_stock_api: Run) -> None:
    check_that_it_learned(of_stock_api)


def test_what_a_step_takes_is_said_before_the_policy_is_served(of_stock_api: Run) -> None:
    said = [line for name, line in of_stock_api.lines if name == "trainer"]
    forecast = next(place for place, line in enumerate(said) if "the longest step that the settings allow" in line)
    served = next(place for place, line in enumerate(said) if "is served at" in line)
    assert forecast < served


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"env__items": "40"}, "all items are played"),
        ({"env__solved_after": "40", "env__ensure_scores_are_not_same": "true"}, "nothing is left to learn"),
    ],
)
async def test_a_run_without_more_to_train_ends_with_a_checkpoint_of_all_that_it_had(
    tmp_path: Path, settings: dict[str, str], reason: str
) -> None:
    environment = f"{ROOT / 'tests/support/ascii_env.py'}:EndingEnv"
    run = Run(
        tmp_path,
        steps=100,
        interval=0,
        learning_rate=1e-4,
        environment=environment,
        env__max_equal_groups="8",
        **settings,
    )
    async with asyncio.timeout(900):
        assert await run.supervisor.run() == 1
    assert any(reason in line for name, line in run.lines if name == "environment"), run.lines[-20:]
    assert any("has ended on its own" in line for name, line in run.lines if name == "lachesis")
    checkpoint = json.loads((tmp_path / "checkpoint.json").read_text())
    assert checkpoint["step"] == len(run.metrics) == 40 // GROUPS_A_STEP
    assert len(checkpoint["group_ids"]) == 40


def test_the_policy_command_serves_the_trained_weights(of_stock_api: Run) -> None:
    command = [sys.executable, "-m", "lachesis", "policy", "--run-dir", str(of_stock_api.folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        asked = {"model": "tiny", "prompt": "Item 1.", "max_tokens": 16, "n": 32, "temperature": 1.0}
        with urllib.request.urlopen(
            urllib.request.Request(
                f"{url}/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
        ) as answer:
            texts = [choice["text"] for choice in json.load(answer)["choices"]]
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    letters = "".join(texts)
    assert len(letters) > 32
    assert sum(map(str.isascii, letters)) / len(letters) > 0.9  # 0.45 before training


async def test_a_run_learns_and_loses_nothing_whichever_process_is_killed(tmp_path: Path) -> None:
    """`kill -9` of each process, at random instants of a run that goes on."""
    victims = ["api", "trainer", "environment"] * KILLS
    random.shuffle(victims)
    # Of many steps each has to train something, so rewards have to stay different.
    rate = 0.03 if KILLS == 1 else 1e-4
    run = Run(tmp_path, steps=3 * len(victims) + 3, learning_rate=rate, interval=2)

    async def kill() -> None:
        for number, name in enumerate(victims):
            goal = 3 * number + 2
            while len(run.metrics) < goal or name not in run.supervisor.running:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
            await asyncio.sleep(random.uniform(0.0, 1.5 * min(step["train/step_time"] for step in run.metrics)))
            run.supervisor.running[name].signal(signal.SIGKILL)

    killing = asyncio.create_task(kill())
    await run.ended()
    await killing
    assert run.supervisor.restarts == dict.fromkeys(("api", "trainer", "environment"), KILLS)
    check_that_nothing_is_lost_or_doubled(run)
    if KILLS == 1:
        check_that_it_learned(run)


def check_that_nothing_is_lost_or_doubled(run: Run) -> None:
    """By the weights, and by the records of all three processes."""
    from safetensors import safe_open

    checkpoint = json.loads((run.folder / "checkpoint.json").read_text())
    assert checkpoint["step"] == run.steps
    files = run.groups()
    assert list(files) == [f"step_{step:05d}.jsonl" for step in range(1, run.steps + 1)]
    taken = Counter(group["group_id"] for groups in files.values() for group in groups)
    assert [name for name, count in taken.items() if count > 1] == [], "trained twice"
    assert taken.keys() == set(checkpoint["group_ids"]), "what the files show is what the checkpoint says"
    # The optimizer counts the steps that made the final weights: none twice, and none of a start whose end was lost.
    updates = sum(any(group["skipped"] is None for group in groups) for groups in files.values())
    weights = run.folder / "engine" / f"{checkpoint['state'].removeprefix('tinker://')}.safetensors"
    with safe_open(weights, "pt") as tensors:
        counts = {tensors.get_tensor(name).item() for name in tensors.keys() if name.startswith("optimizer.step.")}  # noqa: SIM118
    assert counts == {updates}
    # Each finished group is in one batch, or waits: in the outbox, or in the API's queue.
    sent = "SELECT group_id FROM groups WHERE group_id IS NOT NULL AND state IN ('accepted', 'delivered')"
    accepted = {name for outbox in run.folder.glob("spool/**/outbox.db") for (name,) in rows(outbox, sent)}
    assert accepted
    received = dict(rows(run.folder / "api.db", "SELECT group_id, batch_id FROM groups"))
    in_batches = {name for name, batch in received.items() if batch is not None and batch <= checkpoint["batch_id"]}
    assert in_batches == taken.keys()
    assert accepted <= received.keys(), "the environment takes nothing for delivered that the API does not have"
