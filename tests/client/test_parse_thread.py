"""While a long completion is parsed, the event loop goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from lachesis_client import OpenAIServer, Router
from lachesis_client.parse_thread import parse
from lachesis_testing.fake_server import FakeServer
from tests.support.exactness import Stack, stack
from tool_call_parsers import get_parser

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
HOSTILE = "<tool_call>\n" * 6_000
ASK = [{"role": "user", "content": "?"}]


class Patient:
    """Hermes' parser. It first waits until the event loop has turned 20 times, or a few seconds."""

    def __init__(self) -> None:
        self.turned, self.waited = 0, False
        self.threads: list[str] = []

    def parse(self, text: str, tools: Any = None) -> Any:
        self.threads.append(threading.current_thread().name)
        until, since = time.monotonic() + 5, self.turned
        while self.turned < since + 20 and time.monotonic() < until:
            time.sleep(0.001)
        self.waited = self.turned >= since + 20
        return get_parser("hermes").parse(text, tools)

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turned += 1


async def turned_meanwhile(parser: Any, asked: Any) -> Any:
    """The answer, if the loop turned while it was parsed."""
    counting = asyncio.create_task(parser.count())
    try:
        answer = await asked
    finally:
        counting.cancel()
    assert parser.threads == ["lachesis-parser_0"] and parser.waited
    return answer


@pytest.mark.parametrize("call", ["chat", "chat_completion"])
async def test_the_loop_turns_while_a_long_text_is_parsed(call: str) -> None:
    parser: Any = Patient()
    async with FakeServer(lambda _: HOSTILE, context_length=10**6) as fake:
        server = OpenAIServer(fake.settings(tool_call_parser="hermes", extra_body={"max_tokens": 900_000}))
        server.parser = parser
        async with Router([server]) as router:
            if call == "chat":
                answer = await turned_meanwhile(parser, router.chat(ASK, tools=TOOLS))
                assert answer.malformed_calls
            else:
                answer = await turned_meanwhile(parser, router.chat_completion(messages=ASK, tools=TOOLS))
                assert answer.choices[0].message.content == HOSTILE


async def test_the_loop_turns_while_many_tokens_are_parsed() -> None:
    parser: Any = Patient()

    async def ask(world: Stack) -> Any:
        world.says.next = [HOSTILE]
        return await world.tokens.chat(ASK, tools=TOOLS, max_tokens=900_000)

    async with stack(parser=parser, context_length=10**6) as world:
        answer = await turned_meanwhile(parser, ask(world))
    assert answer.malformed_calls


async def test_a_forked_process_parses_in_a_thread_of_its_own() -> None:
    assert await parse(True, lambda: 1) == 1  # the parent has its thread now

    def in_child() -> int:
        if not (child := os.fork()):
            with suppress(TimeoutError):
                os._exit(ThreadPoolExecutor(1).submit(asyncio.run, parse(True, lambda: 7)).result(5))
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert await asyncio.to_thread(in_child) == 7


async def test_a_short_completion_is_parsed_at_once() -> None:
    class Parser(Patient):
        def parse(self, text: str, tools: Any = None) -> Any:
            self.threads.append(threading.current_thread().name)
            return get_parser("hermes").parse(text, tools)

    parser: Any = Parser()
    async with stack(parser=parser) as world:
        world.says.next = ["Hello."]
        await world.tokens.chat(ASK, tools=TOOLS)
    assert parser.threads == [threading.main_thread().name]
