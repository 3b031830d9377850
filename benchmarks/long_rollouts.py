"""CPU time and bytes of a turn in rollouts of 20 to 1,000 turns: our agent loop, plain lists, and the bare transport.

    python benchmarks/long_rollouts.py [--turns 20 300 1000] [--only messages,tokens]

A turn has about 200 sampled and 200 observed tokens. The servers run in a separate process and answer with prepared
bytes. The figures are CPU time of this process divided by the number of turns. The floor is aiohttp with the
same bodies, joined from pieces that are kept, and the same answers, of which orjson reads all but the echo of the
prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import orjson
from aiohttp import web

from benchmarks.fake_process import MAX_TOKENS, MESSAGES, SAMPLED, TOOLS, Observe, observation, token_server
from lachesis.loop.loop import HermesAgentLoop
from lachesis_client import OpenAIServer, Router, ServerSettings
from lachesis_testing.fake_server import Codec, fake_tokenizer
from lachesis_testing.fake_server.policies import WORDS
from lachesis_tokens.server.token_server import TokenServer

TURNS = (20, 300, 1000)
ROUNDS = {20: 20, 300: 2}
"""Rollouts to average over, one for longer rollouts."""
_PROMPT = re.compile(rb'"prompt":(\[[^]]*\])')

Play = Callable[[int], Awaitable[None]]
"""Plays one rollout of a number of turns."""


def said(tokenizer: Any) -> tuple[str, list[int]]:
    """A turn of words and one call: its text, and its ids with the end of the turn."""
    codec, rng = Codec(tokenizer), Random(0)
    arguments = {"query": " ".join(rng.choices(WORDS, k=12)), "limit": 7}
    call = codec.encode(f"\n<tool_call>\n{json.dumps({'name': 'search', 'arguments': arguments})}\n</tool_call>")
    room = SAMPLED - len(call) - 1
    ids = [*codec.prose(rng.choices(WORDS, k=room))[:room], *call]
    return codec.decode(ids), [*ids, min(codec.end_ids)]


class _Server:
    """Prepared answers. `/bytes` has the bytes of requests and answers since the last time."""

    def __init__(self) -> None:
        text, ids = said(fake_tokenizer())
        words, _, call = text.partition("\n<tool_call>\n")
        function = json.loads(call.removesuffix("\n</tool_call>"))
        self.words = words
        self.function = {"name": function["name"], "arguments": json.dumps(function["arguments"])}
        logprobs = [-0.25 - place % 7 / 10 for place in range(len(ids))]
        texts = [f"token_id:{token}" for token in ids]
        self.with_ids = orjson.dumps({"token_logprobs": logprobs, "tokens": None}), orjson.dumps(ids)
        self.with_texts = orjson.dumps({"token_logprobs": logprobs, "tokens": texts}), b"null"
        self.sampled = len(ids)
        self.up = self.down = 0

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.read()
        call = {"id": f"call_{body.count(b'tool_call_id')}", "type": "function", "function": self.function}
        message = {"role": "assistant", "content": self.words, "tool_calls": [call]}
        return self.answer(
            body,
            orjson.dumps(
                {
                    "id": "chatcmpl-1",
                    "model": "instant",
                    "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                    "usage": {"prompt_tokens": 100, "completion_tokens": self.sampled},
                }
            ),
        )

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.read()
        found = _PROMPT.search(body)
        assert found is not None
        prompt = found[1]
        echoes = b'"return_token_ids":true' in body
        echo = prompt if echoes else b"null"
        logprobs, ids = self.with_ids if echoes else self.with_texts
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (prompt.count(b",") + 1, self.sampled)
        return self.answer(
            body,
            b'{"id":"cmpl-1","model":"instant","choices":[{"index":0,"text":"","logprobs":%b,"finish_reason":"stop",'
            b'"prompt_token_ids":%b,"token_ids":%b}],"usage":%b}' % (logprobs, echo, ids, usage),
        )

    def answer(self, asked: bytes, body: bytes) -> web.Response:
        self.up += len(asked)
        self.down += len(body)
        return web.Response(body=body, content_type="application/json")

    async def traffic(self, _: web.Request) -> web.Response:
        counted = {"up": self.up, "down": self.down}
        self.up = self.down = 0
        return web.json_response(counted)


def _serve(ports: multiprocessing.Queue[int]) -> None:
    async def run() -> None:
        server = _Server()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", server.chat)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_get("/bytes", server.traffic)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def instant_server() -> Iterator[str]:
    """The URL of a running server."""
    context = multiprocessing.get_context("spawn")
    ports: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=_serve, args=(ports,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=120)}"
    finally:
        process.terminate()
        process.join()


def plays(
    url: str, tokenizer: Any, phase_1: Router, phase_2: TokenServer, unechoed: TokenServer | None = None
) -> dict[str, Play]:
    """The rows of the table."""
    observed = observation(Codec(tokenizer))
    text, ids = said(tokenizer)

    async def loop(server: Any, turns: int) -> None:
        agent = HermesAgentLoop(server, TOOLS, max_turns=turns, max_tokens=MAX_TOKENS, execute=Observe(observed))
        result = await agent.run(MESSAGES)
        if result.turns_used != turns:
            raise RuntimeError(f"{result.outcome}: {result.reason}")

    async def lists(server: Any, turns: int) -> None:
        """The loop that users of Atropos write."""
        conversation: list[dict[str, Any]] = [dict(message) for message in MESSAGES]
        for _ in range(turns):
            completion = await server.chat_completion(messages=conversation, tools=TOOLS, max_tokens=MAX_TOKENS)
            message = completion.choices[0].message
            calls = [call.model_dump() for call in message.tool_calls]
            conversation.append({"role": "assistant", "content": message.content, "tool_calls": calls})
            conversation.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": observed})

    async def bare(route: str, turns: int, head: bytes, piece: bytes, tail: bytes) -> None:
        pieces, name = [head], b'"prompt_token_ids":'
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            for _ in range(turns):
                async with session.post(f"{url}/v1/{route}", data=b"".join((*pieces, tail))) as response:
                    raw = await response.read()
                if (at := raw.find(name) + len(name)) >= len(name):
                    echo = b"".join(pieces).removeprefix(b'{"prompt":') + b"]"
                    assert raw.startswith(echo, at)
                    raw = raw[:at] + b"null" + raw[at + len(echo) :]
                orjson.loads(raw)
                pieces.append(piece)

    async def message_floor(turns: int) -> None:
        call = {"id": "call_10", "type": "function", "function": {"name": "search", "arguments": text[-100:]}}
        turn = [
            {"role": "assistant", "content": text[:-100], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_10", "name": "search", "content": observed},
        ]
        head = b'{"messages":[' + b",".join(map(orjson.dumps, MESSAGES))
        tail = b'],"tools":' + orjson.dumps(TOOLS) + b',"model":"instant"}'
        await bare("chat/completions", turns, head, b"," + orjson.dumps(turn)[1:-1], tail)

    async def token_floor(turns: int) -> None:
        a_turn = (ids * 3)[: len(ids) + len(Codec(tokenizer).encode(observed)) + 10]
        head = b'{"prompt":' + orjson.dumps(ids + ids)[:-1]
        tail = b'],"model":"instant","return_token_ids":true}'
        await bare("completions", turns, head, b"," + orjson.dumps(a_turn)[1:-1], tail)

    return {
        "messages": partial(loop, phase_1),
        "messages, plain list": partial(lists, phase_1),
        "messages, floor": message_floor,
        "tokens": lambda turns: loop(phase_2.for_rollout(), turns),
        **({"tokens, no echo": lambda turns: loop(unechoed.for_rollout(), turns)} if unechoed is not None else {}),
        "tokens, plain list": lambda turns: lists(phase_2.for_rollout(), turns),
        "tokens, floor": token_floor,
    }


async def measure(play: Play, url: str, turns: int) -> tuple[float, float, float]:
    """CPU milliseconds of a turn, and megabytes of a rollout, up and down."""
    rounds = ROUNDS.get(turns, 1)
    async with aiohttp.ClientSession() as session:
        await session.get(f"{url}/bytes")
        started = time.process_time()
        for _ in range(rounds):
            await play(turns)
        taken = time.process_time() - started
        counted = await (await session.get(f"{url}/bytes")).json()
    return 1000 * taken / rounds / turns, counted["up"] / rounds / 1e6, counted["down"] / rounds / 1e6


async def run(given: argparse.Namespace) -> None:
    found: dict[str, dict[int, float]] = {}
    print(f"{'CPU ms a turn (MB up, MB down)':<32}" + "".join(f"{turns:>18} turns" for turns in given.turns))
    with instant_server() as url:
        tokenizer, settings = fake_tokenizer(), ServerSettings(base_url=f"{url}/v1", model_name="instant")
        async with (
            Router([OpenAIServer(settings)]) as phase_1,
            token_server(settings, tokenizer=tokenizer) as phase_2,
            token_server(replace(settings, echo_limit=0), tokenizer=tokenizer) as unechoed,
        ):
            for label, play in plays(url, tokenizer, phase_1, phase_2, unechoed).items():
                if given.only and label not in given.only.split(";"):
                    continue
                await play(3)  # opens connections and fills caches
                cells = []
                for turns in given.turns:
                    taken, up, down = await measure(play, url, turns)
                    found.setdefault(label, {})[turns] = round(taken, 3)
                    cells.append(f"{taken:.3f} ({up:.1f}, {down:.1f})")
                print(f"{label:<32}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
    print(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--only", default="", help="names of rows, separated by semicolons")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    asyncio.run(run(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
