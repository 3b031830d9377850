"""Runs the fake model server in a separate process, so that its cost is not counted, with a script of tool calls.

A turn of the script has about `SAMPLED` sampled tokens, and its tool result about `OBSERVED`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from lachesis_client import ServerSettings
from lachesis_messages.messages import ToolCall
from lachesis_testing.fake_server import Ask, Codec, FakeServer, Policy, Reply, fake_tokenizer
from lachesis_testing.fake_server.policies import WORDS
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tools import ToolResult

SAMPLED, OBSERVED = 200, 200
"""Tokens of a completion and of a tool result."""
MAX_TOKENS = 1024
NAMES = ("terminal", "read_file", "write_file", "search", "web_search")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"What {name} does, in a sentence that a model can make sense of.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What is wanted."},
                    "limit": {"type": "integer", "description": "How much of it."},
                },
                "required": ["query"],
            },
        },
    }
    for name in NAMES
]
MESSAGES = [
    {"role": "system", "content": "You are an agent with tools. Use them until you know, then answer."},
    {"role": "user", "content": "How many words are there in the longest line of the files below this folder?"},
]


class ToolScript:
    """A tool call in each of `turns` turns, with words before it, then an answer in words. Without `calls`, only words.

    The completions of two rollouts differ if their server has `vary`.
    """

    def __init__(
        self, turns: int = 10**6, *, calls: bool = True, tokens: int = SAMPLED, names: Sequence[str] = NAMES
    ) -> None:
        self.turns = turns
        self.names = names
        self.calls = calls
        self.tokens = tokens

    def reply(self, ask: Ask) -> Reply:
        rng = ask.rng()
        call: list[int] = []
        if self.calls and ask.turn < self.turns:
            arguments = {"query": " ".join(rng.choices(WORDS, k=12)), "limit": rng.randint(1, 99)}
            said = json.dumps({"name": rng.choice(self.names), "arguments": arguments})
            call = ask.codec.encode(f"\n<tool_call>\n{said}\n</tool_call>")
        room = max(1, self.tokens - len(call) - 1)
        return Reply(ask.ended([*ask.codec.prose(rng.choices(WORDS, k=room))[:room], *call]))


def observation(codec: Codec, tokens: int = OBSERVED) -> str:
    """About this many tokens of words."""
    words = Random(0).choices(WORDS, k=tokens)
    while len(codec.encode(" ".join(words))) > tokens:
        words.pop()
    return " ".join(words)


class Observe:
    """Tools that cost nothing: every call has the same result."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def __call__(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(content=self.text, error=None) for _ in calls]


def token_server(
    settings: ServerSettings, kind: str = "vllm", *, tokenizer: Any = None, prompts: PromptBuilder | None = None
) -> TokenServer:
    """Phase 2 over the server, with Hermes' tool calls. Checks the template first, as a run does at its start."""
    prompts = prompts or PromptBuilder(tokenizer or fake_tokenizer())
    server = TokenServer([create_engine(kind, settings)], prompts, "hermes", max_tokens=MAX_TOKENS)
    _ = prompts.end_of_turn
    return server


@contextmanager
def fake_process(policy: Policy, **settings: Any) -> Iterator[ServerSettings]:
    """Settings for a client of a running `FakeServer(policy, **settings)`. All arguments must be picklable."""
    context = multiprocessing.get_context("spawn")
    ready: multiprocessing.Queue[ServerSettings] = context.Queue()
    process = context.Process(target=_serve, args=(policy, settings, ready), daemon=True)
    process.start()
    try:
        yield ready.get(timeout=120)
    finally:
        process.terminate()
        process.join()


def _serve(policy: Policy, settings: dict[str, Any], ready: multiprocessing.Queue[ServerSettings]) -> None:
    async def run() -> None:
        async with FakeServer(policy, keep_requests=0, **settings) as server:
            ready.put(server.settings(max_concurrency=4096))
            await asyncio.Event().wait()

    asyncio.run(run())
