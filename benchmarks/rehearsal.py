"""Rehearsals beside real runs with the same settings.

    python -m benchmarks.rehearsal

A real run is `lachesis fake-server`, `lachesis api` and `lachesis serve`, each in a process of its own and at real
speed, and a trainer that takes its batches as `launch_training.py` does and sleeps for the time of a step. The
rehearsal gets the figures of the servers and the trainer that the real run was started with; turns, tokens and tool
seconds of the runs with a tool come from the groups file of a `lachesis process` before.

Both are counted from the batch after the first quarter of the steps to the last one. Fails if a throughput differs by
more than a tenth.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_train.processes.ports import free_ports
from lachesis_train.rehearsal.fleet import Workload, recorded_workload
from lachesis_train.rehearsal.play import RehearsalPlan, rehearse
from lachesis_train.rollout_api import TrainerRegistration
from lachesis_train.trainer.batches import BatchSource

ROOT = Path(__file__).resolve().parent.parent
MOST = 0.1
LACHESIS = (sys.executable, "-m", "lachesis")
ENVIRONMENT = str(ROOT / "benchmarks" / "rehearsal_env.py") + ":Waiting"


@dataclass(frozen=True)
class Case:
    """Settings, and facts of the servers and the trainer. Seconds."""

    name: str
    env: dict[str, Any]
    places: int
    step: float
    steps: int
    latency: tuple[float, float] = (0.2, 0.6)
    speed: float = 60.0
    """Tokens a second of a request."""
    lengths: tuple[int, int] = (20, 100)
    tools: bool = False
    batch_size: int = 16


CASES = (
    Case("sampling-bound", {"group_size": 4, "max_num_workers": 6}, places=8, step=0.5, steps=16),
    Case("trainer-bound", {"group_size": 4, "max_num_workers": 12}, places=32, step=3.0, steps=14),
    Case(
        "staleness-limited",
        {"group_size": 2, "max_num_workers": 24, "max_staleness": 1, "max_batches_offpolicy": 2},
        places=64,
        step=0.5,
        steps=20,
        latency=(0.2, 3.0),
    ),
    Case(
        "tools, drop",
        {"group_size": 4, "max_num_workers": 10, "max_staleness": 1, "when_stale": "drop"},
        24,
        1.0,
        16,
        tools=True,
    ),
)


@dataclass
class Figures:
    """Of a run."""

    rollouts: float
    """A second."""
    tokens: float
    """Sampled, a second."""
    batches: float
    """An hour."""
    age: float
    servers_idle: float
    trainer_waits: float


@dataclass
class Watch:
    """The fake server's counts."""

    url: str
    places: int
    tokens: int = 0
    seen: list[tuple[float, float]] = field(default_factory=list)
    """Moments, with the share of the places without a request."""

    async def run(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{self.url}/fake/stats") as answer:
                stats = await answer.json()
            self.tokens = stats.get("completion_tokens", 0)
            running = stats.get("in_flight", 0) - stats.get("waiting", 0)
            self.seen.append((time.monotonic(), 1 - running / self.places))
            await asyncio.sleep(0.05)


@asynccontextmanager
async def process(*command: str, log: Path) -> AsyncIterator[None]:
    with log.open("ab") as file:
        running = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.terminate()
        await running.wait()


async def answers(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url):
                return
        await asyncio.sleep(0.1)


def flags(case: Case, model: str, tokenizer: Path, **more: Any) -> list[str]:
    env = {
        "max_agent_turns": 8,
        "max_token_length": 256,
        "steps_per_eval": 0,
        "enabled_toolsets": '["waiting"]' if case.tools else "[]",
        **case.env,
        **more,
    }
    chosen = [text for name, value in env.items() for text in (f"--env.{name}", str(value))]
    of_model = ("--openai.base_url", model, "--openai.model_name", "fake", "--openai.server_type", "vllm")
    return [*chosen, *of_model, "--openai.tokenizer_name", str(tokenizer)]


async def real(case: Case, folder: Path) -> tuple[Figures, Workload]:
    """A run at real speed, and what its rollouts do."""
    model_port, api_port = free_ports(2)
    model, api, log = f"http://127.0.0.1:{model_port}", f"http://127.0.0.1:{api_port}", folder / "log"
    span = [f"{low}-{high}" for low, high in (case.latency, case.lengths)]
    server = [*LACHESIS, "fake-server", "--port", str(model_port), "--latency", span[0], "--vary"]
    server += ["--tokens-per-second", str(case.speed), "--max-concurrency", str(case.places)]
    server += ["--save-tokenizer", str(folder / "tokenizer")]
    server += ["--policy", "tools"] if case.tools else ["--policy", "words", "--lengths", span[1]]
    of_env = flags(case, f"{model}/v1", folder / "tokenizer")
    async with aiohttp.ClientSession() as session, process(*server, log=log):
        await answers(session, model)
        work = Workload((1, 1), case.lengths, (0, 0))
        if case.tools:
            groups = folder / "groups.jsonl"
            more = {"total_steps": 24, "data_path_to_save_groups": groups}
            played = {name: value for name, value in case.env.items() if name not in ("max_staleness", "when_stale")}
            recording = flags(
                Case(case.name, played, case.places, case.step, 0, tools=True),
                f"{model}/v1",
                folder / "tokenizer",
                **more,
            )
            done = await asyncio.create_subprocess_exec(
                *LACHESIS,
                "process",
                ENVIRONMENT,
                *recording,
                cwd=folder,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert await done.wait() == 0
            work = recorded_workload(groups)
        serve = [*LACHESIS, "serve", ENVIRONMENT, *of_env, "--env.rollout_server_url", api]
        serve += ["--env.spool_path", str(folder / "spool"), "--env.total_steps", "-1"]
        async with process(*LACHESIS, "api", "--port", str(api_port), "--db", str(folder / "api.db"), log=log):
            await answers(session, api)
            about = TrainerRegistration("", "", case.batch_size, 4096, "", 0, case.steps, acknowledges=True)
            watch = Watch(model, case.places)
            watching = asyncio.create_task(watch.run(session))
            async with process(*serve, log=log):
                figures = await train(case, BatchSource(api, about, folder / "batches"), watch)
            watching.cancel()
    return figures, work


async def train(case: Case, source: BatchSource, watch: Watch) -> Figures:
    await source.register(0)
    waited, ages = 0.0, list[int]()
    marks: list[tuple[float, float, int, int]] = []
    for step in range(1, case.steps + 1):
        asked = time.monotonic()
        batch = await source.next(step - 1, step - 1)
        now = time.monotonic()
        waited += now - asked
        ages += [step - 1 - group["group_overrides"]["begin_step"] for group in batch.groups]
        marks.append((now, waited, watch.tokens, len(ages)))
        await asyncio.sleep(case.step)
        await source.acknowledge(batch.id)
    await source.close()
    first, last = marks[max(1, case.steps // 4) - 1], marks[-1]
    seconds, steps = last[0] - first[0], case.steps - max(1, case.steps // 4)
    idle = [share for moment, share in watch.seen if first[0] <= moment <= last[0]]
    counted = ages[first[3] : last[3]]
    return Figures(
        rollouts=steps * case.batch_size / seconds,
        tokens=(last[2] - first[2]) / seconds,
        batches=3600 * steps / seconds,
        age=sum(counted) / len(counted),
        servers_idle=sum(idle) / len(idle),
        trainer_waits=(last[1] - first[1]) / seconds,
    )


def rehearsed(case: Case, work: Workload) -> Figures:
    config = HermesAgentEnvConfig(max_agent_turns=8, max_token_length=256, **case.env)
    plan = RehearsalPlan(
        config,
        case.batch_size,
        work,
        places=case.places,
        tokens_per_second=case.speed * case.places,
        latency=case.latency,
        step_seconds=case.step,
        max_token_len=4096,
        steps=case.steps,
    )
    found = rehearse(plan)
    return Figures(
        found.rollouts_per_second,
        found.tokens_per_second,
        found.batches_per_hour,
        found.staleness,
        found.servers_idle,
        found.trainer_waits,
    )


async def main(names: Sequence[str]) -> int:
    failed = False
    print(f"{'':<20}{'':<11}rollouts/s  tokens/s  batches/h   age  servers idle  trainer waits", flush=True)
    for case in CASES:
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found, work = await real(case, Path(folder))
        guess = await asyncio.to_thread(rehearsed, case, work)
        for name, each in (("real", found), ("rehearsal", guess)):
            print(
                f"{case.name:<20}{name:<11}{each.rollouts:>10.2f}{each.tokens:>10.1f}{each.batches:>11.1f}"
                f"{each.age:>6.2f}{each.servers_idle:>14.1%}{each.trainer_waits:>15.1%}"
            )
        ratios = [guess.rollouts / found.rollouts, guess.tokens / found.tokens, guess.batches / found.batches]
        print(f"{case.name:<20}{'ratio':<11}{ratios[0]:>10.3f}{ratios[1]:>10.3f}{ratios[2]:>11.3f}", flush=True)
        failed |= any(abs(ratio - 1) > MOST for ratio in ratios)
    return int(failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
