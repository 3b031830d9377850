"""Benches of the conformance suite of token engines: an engine, its server, and a relay between them."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import Sampling
from lachesis_testing.fake_server import FakeServer, RandomTokens, Scripted
from lachesis_tokens.engines import TokenEngine, create_engine


class Relay:
    """A TCP relay to one server that records connections, request lines, and whether a client closed its connection."""

    def __init__(self, host: str, port: int) -> None:
        self.target = host, port
        self.connections = 0
        self.request_lines: list[str] = []
        self.closed_by_client = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def root_url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        upstream = await asyncio.open_connection(*self.target)
        there = asyncio.create_task(self._pump(reader, upstream[1], self._note))
        back = asyncio.create_task(self._pump(upstream[0], writer, None))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            if there.done():
                self.closed_by_client.set()
        finally:
            there.cancel()
            back.cancel()
            for end in (upstream[1], writer):
                end.close()

    def _note(self, data: bytes) -> None:
        for method in (b"GET ", b"POST "):
            if data.startswith(method):
                self.request_lines.append(data.split(b" HTTP/", 1)[0].decode())

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[bytes], None] | None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if note:
                    note(data)
                writer.write(data)
                await writer.drain()


@dataclass
class Bench(ABC):
    """One engine and its server, which is seen through a relay."""

    engine: TokenEngine
    relay: Relay
    rejects: ClassVar[bool] = True
    """The server answers 4xx to bad requests. Atropos' server answers 500 to everything that vLLM rejects."""
    repeatable: ClassVar[Mapping[str, Any]] = {}
    """Extra fields with which a seed repeats a completion exactly."""

    @abstractmethod
    async def encode(self, text: str) -> list[int]:
        """The ids of a text. The text of a special token is its id."""

    @abstractmethod
    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""

    @abstractmethod
    async def score(self, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling) -> list[float]:
        """The logprobs of the kind `engine.logprobs`, computed in another way."""

    async def look_up(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """As `score`, for tokens that end inside a character."""
        return await self.score(prompt, ids, Sampling(1))

    @abstractmethod
    async def busy(self) -> bool:
        """Whether the server is processing a completion."""

    @abstractmethod
    async def cancelled(self) -> bool:
        """Whether the server stopped a completion because the client closed its connection."""

    @property
    @abstractmethod
    def end_of_turn(self) -> int:
        """The id that ends a turn."""

    @abstractmethod
    def forced(self, token: int, sampling: Sampling) -> Sampling:
        """Sampling that yields only this token."""

    async def chat(self, text: str) -> list[int]:
        """A prompt in ChatML."""
        return await self.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


@dataclass
class FakeBench(Bench):
    """An engine with a `FakeServer`."""

    server: FakeServer

    async def encode(self, text: str) -> list[int]:
        return self.server.codec.encode(text)

    async def decode(self, ids: Sequence[int]) -> str:
        return self.server.codec.decode(ids)

    async def score(self, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling) -> list[float]:
        return self.server.model.score(prompt, ids, sampling, self.engine.logprobs)

    async def busy(self) -> bool:
        return bool(self.server.stats["in_flight"])

    async def cancelled(self) -> bool:
        return bool(self.server.stats["cancelled"])

    @property
    def end_of_turn(self) -> int:
        return min(self.server.model.end_ids)

    def forced(self, token: int, sampling: Sampling) -> Sampling:
        self.server.policy = Scripted([token] * sampling.max_tokens)
        return sampling


async def until(asked: Callable[[], Awaitable[bool]], *, seconds: float = 60.0) -> None:
    """Wait until `asked` returns True."""
    async with asyncio.timeout(seconds):
        while not await asked():  # noqa: ASYNC110 - servers can only be polled
            await asyncio.sleep(0.02)


@asynccontextmanager
async def relayed_engine(
    name: str, root_url: str, model_name: str, settings: Mapping[str, Any]
) -> AsyncIterator[tuple[TokenEngine, Relay]]:
    """The engine `name`, connected through a relay to the server at `root_url`."""
    host, port = root_url.removeprefix("http://").split(":")
    async with Relay(host, int(port)) as relay:
        defaults = {"base_url": f"{relay.root_url}/v1", "model_name": model_name, "timeout": 60.0}
        engine = create_engine(name, ServerSettings(**{**defaults, **settings}))
        try:
            yield engine, relay
        finally:
            await engine.close()


@asynccontextmanager
async def fake_bench(name: str, policy: Any = None, **server: Any) -> AsyncIterator[FakeBench]:
    """The engine `name` with a `FakeServer`, which plays `policy` or samples from its formula."""
    settings: dict[str, Any] = server.pop("settings", {})
    async with (
        FakeServer(policy or RandomTokens(), **server) as fake,
        relayed_engine(name, fake.root_url, fake.host.model_name, settings) as (engine, relay),
    ):
        yield FakeBench(engine, relay, fake)


class OpenBench(Protocol):
    """Opens a bench. `settings` are those of the engine; the other arguments are those of `FakeServer`."""

    def __call__(self, policy: Any = None, **server: Any) -> AbstractAsyncContextManager[Bench]: ...
