"""The lag of an environment's event loop while groups of 8 x 32k tokens are written to the outbox and posted.

    python benchmarks/serve_lag.py

Posts to Atropos' `run-api` in a separate process, with our client and with that of atroposlib's BaseEnv, and
prints the longest time between two turns of the loop: as CPU time of this process, which a busy machine does not
change, and as wall time, of which "idle" shows the machine's share.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.run_api import register, run_api
from lachesis_compat.atropos.package import BaseEnv
from lachesis_train.outbox import Outbox
from lachesis_train.outbox_state import Entry
from lachesis_train.relay import OutboxRelay
from lachesis_train.rollout_api import EnvDescription, RolloutApi

SEQUENCES, LENGTH, GROUPS = 8, 32_768, 4
PERIOD = 0.001


def group() -> dict[str, Any]:
    tokens = [[random.randrange(150_000) for _ in range(LENGTH)] for _ in range(SEQUENCES)]
    return {
        "tokens": tokens,
        "masks": tokens,
        "scores": [float(at) for at in range(SEQUENCES)],
        "inference_logprobs": [[-random.random() for _ in row] for row in tokens],
    }


class Lag:
    """Measures the loop inside the `with` block. Seconds."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    async def __aenter__(self) -> Lag:
        self.task = asyncio.create_task(self.measure())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    async def measure(self) -> None:
        while True:
            cpu, wall = time.process_time(), time.perf_counter()
            await asyncio.sleep(PERIOD)
            self.cpu.append(time.process_time() - cpu)
            self.wall.append(time.perf_counter() - wall - PERIOD)

    def __str__(self) -> str:
        cpu, wall = sorted(self.cpu), sorted(self.wall)
        at = int(0.99 * len(cpu))
        return (
            f"CPU: longest {1e3 * cpu[-1]:7.1f} ms, p99 {1e3 * cpu[at]:5.1f} ms; "
            f"wall: longest {1e3 * wall[-1]:7.1f} ms, p99 {1e3 * wall[at]:5.1f} ms"
        )


async def ours(url: str, groups: list[dict[str, Any]], folder: Path) -> Lag:
    async def on_refused(entry: Entry, reason: str) -> None:
        raise SystemExit(reason)

    outbox = Outbox(folder / "outbox", {})
    await outbox.open()
    env = EnvDescription("lag", max_token_length=LENGTH, group_size=SEQUENCES)
    async with RolloutApi(url) as api:
        relay = OutboxRelay(api, outbox, env, on_refused=on_refused, report=print)
        task = asyncio.create_task(relay.run())
        while relay.status is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with Lag() as lag:
            for at, made in enumerate(groups):
                await outbox.append(made, key=str(at), tokens=0)
                relay.wake()
            while outbox.state.unsent:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        relay.stop()
        await task
    await outbox.close()
    return lag


async def theirs(url: str, groups: list[dict[str, Any]]) -> Lag:
    env: Any = object.__new__(type("Env", (BaseEnv,), dict.fromkeys(BaseEnv.__abstractmethods__)))
    env.config = type("Config", (), {"rollout_server_url": url})
    async with Lag() as lag:
        for made in groups:
            await env._send_scored_data_to_api(made)
            await asyncio.sleep(0.01)
    return lag


async def main() -> None:
    async with aiohttp.ClientSession() as session, run_api(session) as url:
        await register(session, url, batch_size=SEQUENCES * (GROUPS + 1), max_token_len=2 * LENGTH)
        async with session.get(f"{url}/batch") as answer:
            await answer.read()
        groups = [group() for _ in range(GROUPS)]
        async with Lag() as idle:
            await asyncio.sleep(1.0)
        print(f"idle        {idle}")
        with tempfile.TemporaryDirectory() as folder:
            print(f"serve       {await ours(url, groups, Path(folder))}")
        print(f"atroposlib  {await theirs(url, groups)}")


if __name__ == "__main__":
    asyncio.run(main())
