"""What the recording endpoint costs a turn, over asking the model server directly.

    python benchmarks/endpoint.py [--rollouts 16] [--profile]

Rollouts of 20 tool turns, about 200 sampled and 200 observed tokens each, are played three times in each round: by
this process directly (`ManagedServer` and a `MessageHistory`), by a program in another process through the endpoint,
which runs here, and by the same program against an aiohttp server here that only parses the body and writes a prepared
answer. The model server is a process of its own. The figures are CPU time of this process alone, the best of several
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import multiprocessing
import pstats
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import orjson
from aiohttp import web

from benchmarks.fake_process import MAX_TOKENS, MESSAGES, TOOLS, ToolScript, fake_process, observation, token_server
from benchmarks.machine import disturbance
from lachesis_messages.history import MessageHistory
from lachesis_testing.fake_server import Codec, fake_tokenizer
from lachesis_tokens.endpoint import Recording, RecordingEndpoint
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.token_server import TokenServer

TURNS = 20
CONCURRENCY = 16
ROUNDS = 6
LIMIT_MS = 0.5
"""CPU milliseconds of a turn over the direct path."""


async def program(urls: list[str], observed: str) -> None:
    """What an agent program does: it sends the whole conversation each turn."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(http: aiohttp.ClientSession, url: str) -> None:
        messages: list[Any] = [*MESSAGES]
        async with gate:
            for _ in range(TURNS):
                body = orjson.dumps({"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": MAX_TOKENS})
                headers = {"Content-Type": "application/json"}
                async with http.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
                    message = orjson.loads(await response.read())["choices"][0]["message"]
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": observed} for call in message["tool_calls"]
                ]

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(one(http, url) for url in urls))


def _programs(pipe: Connection) -> None:
    while True:
        urls, observed = pipe.recv()
        asyncio.run(program(urls, observed))
        pipe.send(None)


@contextmanager
def programs() -> Iterator[Callable[[list[str], str], Awaitable[None]]]:
    """Plays rollouts in another process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_programs, args=(theirs,), daemon=True)
    process.start()

    async def play(urls: list[str], observed: str) -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(ours.fileno(), ended.set)
        ours.send((urls, observed))
        await ended.wait()
        asyncio.get_running_loop().remove_reader(ours.fileno())
        ours.recv()

    try:
        yield play
    finally:
        process.terminate()
        process.join()


async def directly(server: TokenServer, observed: str, rollouts: int) -> None:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one() -> None:
        async with gate:
            managed, history = server.for_rollout(), MessageHistory(MESSAGES)
            for _ in range(TURNS):
                response = await managed.chat(history, tools=TOOLS, temperature=1.0, max_tokens=MAX_TOKENS)
                history.append(response)
                for call in response.message.tool_calls:
                    history.append({"role": "tool", "tool_call_id": call.id, "content": observed})

    await asyncio.gather(*(one() for _ in range(rollouts)))


@contextmanager
def echo(said: bytes) -> Iterator[web.Server]:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        orjson.loads(await request.read())
        return web.Response(body=said, content_type="application/json")

    yield web.Server(handle, access_log=None, handler_cancellation=True)


async def measure(given: argparse.Namespace) -> float:
    tokenizer = fake_tokenizer()
    observed = observation(Codec(tokenizer))
    rollouts: int = given.rollouts
    turns = rollouts * TURNS
    best: dict[str, float] = {}
    print(f"a fixed piece of work costs {disturbance():.1f} times its best on this machine now")

    async def timed(label: str, work: Awaitable[None]) -> None:
        started = time.process_time()
        await work
        taken = 1000 * (time.process_time() - started) / turns
        best[label] = min(best.get(label, taken), taken)

    with fake_process(ToolScript(), vary=True, tokenizer=tokenizer) as settings, programs() as play:
        async with token_server(settings, tokenizer=tokenizer) as server, RecordingEndpoint(server) as endpoint:
            recordings: list[Recording] = []

            def opened() -> list[str]:
                recordings[:] = [endpoint.open(max_tokens=MAX_TOKENS) for _ in range(rollouts)]
                return [recording.base_url for recording in recordings]

            await play(opened(), observed)
            said = await _an_answer(endpoint)
            with echo(said) as bare:
                runner = web.ServerRunner(bare)
                await runner.setup()
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                bare_url = "http://{}:{}".format(*runner.addresses[0][:2])
                for _ in range(ROUNDS):
                    await timed("direct", directly(server, observed, rollouts))
                    await timed("endpoint", play(opened(), observed))
                    await timed("bare aiohttp", play([bare_url] * rollouts, observed))
                await runner.cleanup()
            for recording in recordings:
                found = samples(recording.history())
                if len(found) != 1 or len(recording.completions()) != TURNS or verify(found[0]):
                    raise RuntimeError(f"a rollout of one conversation made {len(found)} samples")
            if given.profile:
                profile = cProfile.Profile(time.process_time)
                profile.enable()
                await play(opened(), observed)
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    over = best["endpoint"] - best["direct"]
    print("CPU ms a turn")
    for label, taken in best.items():
        print(f"  {label:<14}{taken:>8.3f}")
    print(f"  the endpoint over the direct path {over:.3f}, of which bare aiohttp {best['bare aiohttp']:.3f}")
    print(json.dumps({"cpu_ms_over_direct": round(over, 3), "limit": LIMIT_MS}))
    return over


async def _an_answer(endpoint: RecordingEndpoint) -> bytes:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": MAX_TOKENS}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{endpoint.open().base_url}/v1/chat/completions", json=body) as response,
    ):
        return await response.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=16, help="number of rollouts to average")
    parser.add_argument("--profile", action="store_true", help="show where the time of the endpoint goes")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return asyncio.run(measure(given)) > LIMIT_MS


if __name__ == "__main__":
    sys.exit(main())
