"""A rollout of 1,000 turns whose context is compressed as it grows: what is delivered, and what a turn costs.

    python benchmarks/live_compression.py [--turns 1000] [--at 8000]

A turn has about 200 sampled and 200 observed tokens. The fake model server runs in a separate process, so the figures
are CPU time of this process. Beside the rollout is the same one without compression, as far as `--whole` turns go,
and what a trainer gets of the compressed one if only its last context, or only its longest, is trained, or by the
rule of NeMo Gym 0.7, which merges prefixes into one chain: a completion is kept if its prompt begins with all tokens
so far. That rule is applied to the whole rollout, and to what it was after three compressions. Lag is the time
between two turns of the event loop while eight such rollouts are played at once by a model that takes up to half a
second for a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fake_process import (
    MAX_TOKENS,
    MESSAGES,
    SAMPLED,
    TOOLS,
    ToolScript,
    fake_process,
    observation,
    token_server,
)
from benchmarks.serve_lag import Lag
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.result import AgentResult
from lachesis_client import ServerSettings
from lachesis_data.compression.live import ContextCompression
from lachesis_messages.messages import ToolCall
from lachesis_messages.responses import ChatResponse
from lachesis_testing.fake_server import Ask, Codec, Reply, fake_tokenizer
from lachesis_testing.fake_server.policies import WORDS
from lachesis_tokens.samples.verification import verify_records
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tools import ToolResult

LIMIT_LAG_MS, LIMIT_GROWTH = 10.0, 1.5
PART = 10
"""The first and the last tenth of the turns are compared."""
PLAYERS, LATENCY = 8, 0.5
"""Rollouts at once while the lag is measured, and the seconds that the model takes for a turn at most."""


class Summarises(ToolScript):
    """The script of tool calls, which writes a summary when it is asked to."""

    def reply(self, ask: Ask) -> Reply:
        if "Answer with the summary alone" not in ask.codec.decode(ask.prompt_ids[-150:]):
            return super().reply(ask)
        return Reply(ask.ended(ask.codec.prose(ask.rng().choices(WORDS, k=SAMPLED))[:SAMPLED]))


class Turns:
    """Tools that cost nothing, and the CPU time at each turn."""

    def __init__(self, observed: str) -> None:
        self.observed = observed
        self.at = [time.process_time()]

    async def __call__(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.at.append(time.process_time())
        return [ToolResult(content=self.observed, error=None) for _ in calls]

    def cost(self) -> tuple[float, float]:
        """CPU milliseconds of a turn, in the first tenth of the turns and in the last."""
        part = max(1, len(self.at) // PART)
        return 1000 * (self.at[part] - self.at[0]) / part, 1000 * (self.at[-1] - self.at[-1 - part]) / part


async def play(server: TokenServer, turns: Turns, count: int, compression: ContextCompression | None) -> AgentResult:
    loop = HermesAgentLoop(
        server.for_rollout(), TOOLS, max_turns=count, max_tokens=MAX_TOKENS, execute=turns, compression=compression
    )
    result = await loop.run(MESSAGES)
    if result.turns_used != count:
        raise RuntimeError(f"{result.outcome}: {result.reason}")
    return result


def report(label: str, result: AgentResult, turns: Turns) -> dict[str, float]:
    """Print a row of the table, and what is delivered."""
    early, late = turns.cost()
    started = time.process_time()
    found = result.samples("rollout")
    afterwards = 1000 * (time.process_time() - started) / result.turns_used
    totals = verify_records([sample.to_record() for sample in found])
    if not totals.ok:
        raise RuntimeError(totals.problems)
    sampled = result.tokens.completion_tokens
    print(
        f"{label:<34}{early:9.2f}{late:9.2f}{afterwards:9.2f}{len(result.context_edits):10}"
        f"{result.tokens.prompt_tokens / 1e6:9.1f} M{totals.delivered / sampled:12.4f}{totals.duplicated:11}"
    )
    completions = result.history.completions()
    ends = [place for place, each in enumerate(completions, 1) if each.purpose == "summary"]
    return {
        "early": early,
        "late": late,
        "delivered": totals.delivered / sampled,
        "duplicated": totals.duplicated,
        "last context": found[0].trained / sampled,
        "longest context": max(sample.trained for sample in found) / sampled,
        "first chain": of_one_chain(completions),
        "first chain after three compressions": of_one_chain(completions[: (*ends, *[None] * 4)[3]]),
    }


def of_one_chain(completions: Sequence[ChatResponse]) -> float:
    """The share of the sampled tokens that are kept where each prompt has to begin with all tokens so far."""
    chain: list[int] = []
    kept = sampled = 0
    for tokens in (each.tokens for each in completions if each.tokens is not None):
        sampled += len(tokens)
        if tokens.prompt.ids[: len(chain)] == chain:
            chain, kept = tokens.after.ids, kept + len(tokens)
    return kept / sampled


async def run(settings: ServerSettings, given: argparse.Namespace) -> bool:
    tokenizer = fake_tokenizer()
    observed = observation(Codec(tokenizer))
    compression = ContextCompression(given.at)
    async with token_server(settings, tokenizer=tokenizer) as server:
        await play(server, Turns(observed), 3, None)  # opens connections and fills caches
        print(f"{'CPU ms a turn':<34}    early     late  samples     edits    prompts   delivered  duplicate")
        for count in sorted({100, given.whole}):
            turns = Turns(observed)
            report(f"{count} turns, whole context", await play(server, turns, count, None), turns)
        turns = Turns(observed)
        found = report(
            f"{given.turns} turns, compressed at {given.at}",
            await play(server, turns, given.turns, compression),
            turns,
        )
        for label in list(found)[-4:]:
            print(f"{f'  if only its {label} is trained':<82}{found[label]:12.4f}")
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))
    whole = found["delivered"] == 1.0 and found["duplicated"] == 0
    return whole and found["late"] < LIMIT_GROWTH * found["early"]


async def lag(settings: ServerSettings, at: int) -> bool:
    tokenizer = fake_tokenizer()
    observed = observation(Codec(tokenizer))
    async with token_server(settings, tokenizer=tokenizer) as server:
        players = [
            asyncio.create_task(play(server, Turns(observed), 80, ContextCompression(at))) for _ in range(PLAYERS)
        ]
        await asyncio.sleep(2)  # the first turns validate the chat template
        async with Lag() as measured:
            edits = sum(len(result.context_edits) for result in await asyncio.gather(*players))
    print(f"lag of the event loop, {PLAYERS} rollouts at once, {edits} compressions: {measured}")
    return 1000 * sorted(measured.cpu)[int(0.99 * len(measured.cpu))] < LIMIT_LAG_MS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--whole", type=int, default=300, help="turns of the rollout without compression")
    parser.add_argument("--at", type=int, default=8000, help="tokens from which on a context is compressed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with fake_process(Summarises(), vary=True, context_length=1_000_000) as settings:
        good = asyncio.run(run(settings, given))
    with fake_process(Summarises(), vary=True, latency=(0.0, LATENCY)) as settings:
        good &= asyncio.run(lag(settings, given.at))
    return not good


if __name__ == "__main__":
    sys.exit(main())
