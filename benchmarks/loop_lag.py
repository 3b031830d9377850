"""The lag of the event loop while rollouts are played beside 100 blocking rewards.

    python benchmarks/loop_lag.py [--seconds 4]

The rewards are plain functions on `RewardThreads`. Those of the limit block like rewards that wait for a process, a
file or a server. A last line has four that compute in Python all the time, each of which may hold the interpreter for
5 ms. Lag is the time between two turns of the loop: as CPU time of this process, which a busy machine does not change,
and as wall time, of which the line "idle" shows the machine's share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fake_process import (
    MAX_TOKENS,
    MESSAGES,
    TOOLS,
    Observe,
    ToolScript,
    fake_process,
    observation,
    token_server,
)
from benchmarks.serve_lag import Lag
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.result import AgentResult
from lachesis.rewards.timed_call import RewardThreads
from lachesis_client import ServerSettings
from lachesis_testing.fake_server import Codec, fake_tokenizer
from lachesis_tokens.server.token_server import TokenServer

PLAYERS, REWARDS, COMPUTING = 8, 100, 4
TURNS = 5
LATENCY = 0.5
"""The maximum time of the model for a turn, in seconds."""
LIMIT_MS = 10.0


def blocking(result: AgentResult) -> float:
    """Waits like a test run, and examines the agent's answer."""
    time.sleep(0.25)
    return float("42" in result.final_response)


def computing(result: AgentResult) -> float:
    until = time.thread_time() + 0.25
    score = 0.0
    while time.thread_time() < until:
        score += sum(number % 7 for number in range(1000))
    return score


class Bench:
    """Players that never stop, and the load beside them."""

    def __init__(self, server: TokenServer, observed: str) -> None:
        self.server = server
        self.observed = observed
        self.rollouts = self.rewards = 0

    async def rollout(self) -> AgentResult:
        execute = Observe(self.observed)
        loop = HermesAgentLoop(
            self.server.for_rollout(), TOOLS, max_turns=TURNS, max_tokens=MAX_TOKENS, execute=execute
        )
        result = await loop.run(MESSAGES)
        result.samples("rollout")
        self.rollouts += 1
        return result

    async def play(self) -> None:
        while True:
            await self.rollout()

    async def reward(self, threads: RewardThreads, function: Callable[[AgentResult], float], of: AgentResult) -> None:
        while True:
            await threads.run(function, of)
            self.rewards += 1

    async def lag(self, seconds: float, *beside: Callable[[], Awaitable[None]]) -> Lag:
        self.rollouts = self.rewards = 0
        tasks = [asyncio.ensure_future(each()) for each in beside]
        await asyncio.sleep(0.5)
        async with Lag() as lag:
            await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        failed = [
            error for error in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(error, Exception)
        ]
        if failed:
            raise failed[0]
        return lag


async def measure(settings: ServerSettings, seconds: float) -> float:
    tokenizer = fake_tokenizer()
    async with token_server(settings, tokenizer=tokenizer) as server:
        bench = Bench(server, observation(Codec(tokenizer)))
        done = await bench.rollout()

        def rewards(function: Callable[[AgentResult], float], count: int) -> list[Callable[[], Awaitable[None]]]:
            threads = RewardThreads(count)
            return [lambda: bench.reward(threads, function, done)] * count

        players = [bench.play] * PLAYERS
        print(f"{'idle':<44}{await bench.lag(1.0)}", flush=True)
        print(f"{f'{PLAYERS} rollouts at once':<44}{await bench.lag(seconds, *players)}", flush=True)
        lag = await bench.lag(seconds, *players, *rewards(blocking, REWARDS))
        print(f"{f'and {REWARDS} blocking rewards':<44}{lag}; {bench.rollouts} rollouts, {bench.rewards} rewards")
        beside = await bench.lag(seconds, *players, *rewards(computing, COMPUTING))
        label = f"and {COMPUTING} that compute in Python"
        print(f"{label:<44}{beside}; {bench.rollouts} rollouts, {bench.rewards} rewards")
    ordered = sorted(lag.cpu)
    p99 = 1000 * ordered[int(0.99 * len(ordered))]
    print(json.dumps({"p99_cpu_ms": round(p99, 2), "limit": LIMIT_MS}))
    return p99


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long to measure each line")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with fake_process(ToolScript(), vary=True, latency=(0.0, LATENCY)) as settings:
        return asyncio.run(measure(settings, given.seconds)) > LIMIT_MS


if __name__ == "__main__":
    sys.exit(main())
