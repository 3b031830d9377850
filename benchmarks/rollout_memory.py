"""Memory of 1,000 concurrent rollouts of 10 turns, in MB above that of a process that is ready to play.

    python benchmarks/rollout_memory.py [--rollouts 1000]

About 200 sampled and 200 observed tokens a turn, five tools. Every rollout waits before each turn until all have
reached it, and keeps its history to the end: the peak is that of 1,000 requests in flight in their tenth turn. The
baseline is taken after the imports, with the tokenizer loaded and the template checked, which a process does once. The
fake model server runs in a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fake_process import (
    MAX_TOKENS,
    MESSAGES,
    OBSERVED,
    TOOLS,
    ToolScript,
    fake_process,
    observation,
    token_server,
)
from benchmarks.machine import forget_peak, memory_mb
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.result import AgentResult
from lachesis_client import ServerSettings
from lachesis_messages.messages import ToolCall
from lachesis_testing.fake_server import Codec, fake_tokenizer
from lachesis_tools import ToolResult

TURNS = 10
LIMIT_MB = 150.0


class Observe:
    """Answers each call with distinct words, once all rollouts have reached it."""

    def __init__(self, text: str, barrier: asyncio.Barrier) -> None:
        self.text = text
        self.barrier = barrier

    async def __call__(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        await self.barrier.wait()
        return [ToolResult(content=f"{call.id}: {self.text}", error=None) for call in calls]


async def play(settings: ServerSettings, rollouts: int) -> tuple[list[AgentResult], float]:
    """The results, and the memory of the process before."""
    tokenizer = fake_tokenizer()
    observed = observation(Codec(tokenizer), OBSERVED)
    async with token_server(settings, tokenizer=tokenizer) as server:
        baseline = memory_mb("VmRSS")
        print(f"with tokenizer and template  {baseline:7.1f} MB", flush=True)
        forget_peak()
        barrier = asyncio.Barrier(rollouts)

        async def one() -> AgentResult:
            execute = Observe(observed, barrier)
            loop = HermesAgentLoop(server.for_rollout(), TOOLS, max_turns=TURNS, max_tokens=MAX_TOKENS, execute=execute)
            return await loop.run(MESSAGES)

        return list(await asyncio.gather(*(one() for _ in range(rollouts)))), baseline


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with fake_process(ToolScript(), vary=True) as settings:
        print(f"after the imports            {memory_mb('VmRSS'):7.1f} MB")
        results, baseline = asyncio.run(play(settings, given.rollouts))
        now, peak = memory_mb("VmRSS"), memory_mb("VmHWM")
    if failed := [result.reason for result in results if result.turns_used != TURNS]:
        raise RuntimeError(f"{len(failed)} rollouts ended early, one of them: {failed[0]}")
    contexts = [list(result.history.responses())[-1].tokens for result in results]
    tokens = sum(context.after.length for context in contexts if context is not None)
    sampled = sum(result.tokens.completion_tokens for result in results)
    over = peak - baseline
    print(f"{given.rollouts} rollouts of {TURNS} turns    {now:7.1f} MB at the end, {peak:.1f} MB at most")
    print(f"over the baseline            {over:7.1f} MB, {1024 * over / given.rollouts:.0f} kB a rollout")
    print(f"they hold {tokens / 1e6:.1f} M tokens, {sampled / 1e6:.1f} M of them sampled")
    print(json.dumps({"mb_over_baseline": round(over, 1), "limit": LIMIT_MB}))
    return over > LIMIT_MB


if __name__ == "__main__":
    sys.exit(main())
