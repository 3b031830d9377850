"""CPU time of a token-exact turn, and the delivered tokens: our rollouts, and atroposlib's ManagedServer.

    python benchmarks/token_turns.py [--rollouts 16] [--no-peer]

Rollouts have up to 20 tool turns of about 200 sampled and 200 observed tokens, against the fake model server in a
separate process. The figures are all CPU time of this process: prompt ids, HTTP, tool calls, the message graph,
samples. A figure is the best of several rounds. The rows after the first are a loop of chat
completions without tools (atroposlib's tool parser needs vLLM): the same code for both ManagedServers, the same script,
the same route of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

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
from benchmarks.machine import disturbance
from benchmarks.token_ledger import Ledger, Sequenced
from lachesis.loop.loop import HermesAgentLoop
from lachesis.other_packages import ENGINES
from lachesis_client import ServerSettings
from lachesis_testing.fake_server import Codec, fake_tokenizer
from lachesis_tokens.server.token_server import TokenServer

TURNS = (1, 5, 20)
"""Turns before the last one."""
CONCURRENCY = 16
ROUNDS = 8
LIMIT_MS = 1.0
"""CPU milliseconds of a turn in a rollout of 20."""
FAULTS = {"ambiguous": 0.3, "thinking": 0.3, "trailing_space": 0.2, "broken_utf8_end": 0.1, "no_end_of_turn": 0.1}
"""Faults of the model in the second comparison of delivered tokens."""

Play = Callable[[int], Awaitable[list[Sequenced]]]
"""Plays one rollout of a number of turns, and returns the sequences for a trainer."""


def agent(server: TokenServer, observed: str) -> Play:
    """Our whole path, with tools."""

    async def play(turns: int) -> list[Sequenced]:
        loop = HermesAgentLoop(
            server.for_rollout(), TOOLS, max_turns=turns + 1, max_tokens=MAX_TOKENS, execute=Observe(observed)
        )
        result = await loop.run(MESSAGES)
        if result.turns_used != turns + 1:
            raise RuntimeError(f"{result.outcome}: {result.reason}")
        return [
            Sequenced(sample.tokens, sample.masks, sample.logprobs, [(span.start, span.end) for span in sample.spans])
            for sample in result.samples("rollout")
        ]

    return play


def chats(managed_server: Callable[[], Any], observed: str) -> Play:
    """The loop that users of Atropos write, over either ManagedServer."""

    async def play(turns: int) -> list[Sequenced]:
        managed = managed_server()
        messages = [dict(message) for message in MESSAGES]
        for turn in range(turns + 1):
            completion = await managed.chat_completion(messages=messages, n=1, max_tokens=MAX_TOKENS, temperature=1.0)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
            if turn < turns:
                messages.append({"role": "user", "content": observed})
        nodes = managed.get_state()["nodes"]
        return [Sequenced(node.tokens, node.masked_tokens, node.logprobs) for node in nodes]

    return play


def peer(settings: ServerSettings, folder: Path) -> Callable[[], Any]:
    """atroposlib's ManagedServer over its server for vLLM."""
    from atroposlib.envs.server_handling.managed_server import ManagedServer
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.vllm_server import VLLMServer

    config = APIServerConfig(
        base_url=settings.base_url,
        api_key="x",
        model_name=settings.model_name,
        tokenizer_name=str(folder),
        server_type="vllm",
        health_check=False,
    )
    server = VLLMServer(config)
    server.server_healthy = True
    return lambda: ManagedServer(server, tokenizer=server.tokenizer)


async def group(play: Play, turns: int, rollouts: int) -> list[Sequenced]:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one() -> list[Sequenced]:
        async with gate:
            return await play(turns)

    return [sequence for found in await asyncio.gather(*(one() for _ in range(rollouts))) for sequence in found]


async def cpu_ms(play: Play, turns: int, rollouts: int) -> float:
    """CPU milliseconds of a rollout."""
    taken = []
    for _ in range(ROUNDS):
        started = time.process_time()
        await group(play, turns, rollouts)
        taken.append(1000 * (time.process_time() - started) / rollouts)
    return min(taken)


async def row(label: str, play: Play, rollouts: int) -> float:
    """Measures and prints. Returns milliseconds of a turn in the longest rollout."""
    await group(play, 2, min(rollouts, CONCURRENCY))  # opens connections and fills caches
    by_turns = {turns: await cpu_ms(play, turns, rollouts) for turns in TURNS}
    longest = max(TURNS)
    a_turn = by_turns[longest] / (longest + 1)
    extra = (by_turns[longest] - by_turns[min(TURNS)]) / (longest - min(TURNS))
    shown = "".join(f"{by_turns[turns]:>12.2f}" for turns in TURNS)
    print(f"{label:<34}{shown}{a_turn:>14.3f}{extra:>14.3f}", flush=True)
    return a_turn


async def delivered(label: str, play: Play, ledger: Ledger, rollouts: int, end_of_turn: tuple[int, ...]) -> None:
    ledger.path.write_bytes(b"")
    tally = ledger.tally(await group(play, 20, rollouts), end_of_turn)
    print(f"  {label:<12}{tally}", flush=True)


async def measure(given: argparse.Namespace, folder: Path) -> float:
    tokenizer = fake_tokenizer()
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    observed = observation(Codec(tokenizer))
    print(f"a fixed piece of work costs {disturbance():.1f} times its best on this machine now")
    header = "".join(f"{turns:>6} turns" for turns in TURNS)
    print(f"{'CPU ms per rollout':<34}{header}        a turn of 20  per extra turn")
    with fake_process(ToolScript(), vary=True, tokenizer=tokenizer) as settings:
        async with token_server(settings, given.engine, tokenizer=tokenizer) as server:
            worst = await row(f"agent loop, 5 tools, {given.engine}", agent(server, observed), given.rollouts)
            if given.profile:
                profile = cProfile.Profile(time.process_time)
                profile.enable()
                await group(agent(server, observed), max(TURNS), given.rollouts)
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    ratio = None
    record, spoiled = folder / "record.jsonl", folder / "spoiled.jsonl"
    script = ToolScript(calls=False)
    with fake_process(script, vary=True, tokenizer=tokenizer) as settings:
        async with token_server(settings, "atropos", tokenizer=tokenizer) as server:
            own = await row("chat_completion, no tools", chats(server.for_rollout, observed), given.rollouts)
        if not given.no_peer:
            theirs = chats(peer(settings, folder / "tokenizer"), observed)
            other = await row("the same, atroposlib", theirs, given.rollouts)
            ratio = other / own
            print(f"atroposlib / lachesis, a turn of 20: {ratio:.1f}x")
    for title, path, faults in (
        ("what is delivered", record, {}),
        ("and of a model that writes " + ", ".join(FAULTS), spoiled, FAULTS),
    ):
        print(title)
        with fake_process(script, vary=True, tokenizer=tokenizer, record=path, faults=faults) as settings:
            async with token_server(settings, "atropos", tokenizer=tokenizer) as server:
                ends = server.prompts.end_of_turn
                await delivered("lachesis", chats(server.for_rollout, observed), Ledger(path), given.rollouts, ends)
            if not given.no_peer:
                theirs = chats(peer(settings, folder / "tokenizer"), observed)
                await delivered("atroposlib", theirs, Ledger(path), given.rollouts, ends)
    print(json.dumps({"cpu_ms_a_turn": round(worst, 3), "ratio": ratio and round(ratio, 1), "limit": LIMIT_MS}))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16, help="number of rollouts to average")
    parser.add_argument(
        "--engine", choices=sorted(set(ENGINES.names()) - {"llama.cpp"}), default="vllm", help="of the agent loop"
    )
    parser.add_argument("--no-peer", action="store_true", help="skip atroposlib")
    parser.add_argument("--profile", action="store_true", help="show where the time of our agent loop goes")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(given, Path(folder))) > LIMIT_MS


if __name__ == "__main__":
    sys.exit(main())
