"""The servers that the engines are tested on, all with one face, and a relay that sees what goes over the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from lachesis.inference.embedded import EmbeddedServer
from lachesis.inference.engines import TokenEngine, create_engine
from lachesis.inference.http_client import ServerSettings
from lachesis.inference.sampling import Sampling
from lachesis.testing.fake_server import FakeServer, RandomTokens, Scripted

FAKED = ("vllm", "vllm-generate", "sglang", "atropos")
ALL = (*FAKED, pytest.param("llama.cpp", marks=pytest.mark.model))
GREETING = "Hello there. I'm here to help with any kind of math."


class Relay:
    """A TCP relay to one server: every connection, every request line, and which connections the client closed."""

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
class Bench:
    """One engine and its server."""

    engine: TokenEngine
    relay: Relay

    async def encode(self, text: str) -> list[int]:
        """Special tokens are read as such."""
        raise NotImplementedError

    async def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    async def score(self, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling) -> list[float]:
        """The logprobs that the engine's `logprobs` kind says, found another way."""
        raise NotImplementedError

    async def look_up(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """As `score`, for tokens that end inside a character."""
        return await self.score(prompt, ids, Sampling(1))

    async def busy(self) -> bool:
        """Whether the server works on a completion."""
        raise NotImplementedError

    async def cancelled(self) -> bool:
        """Whether the server gave up a completion because the client had left."""
        raise NotImplementedError

    @property
    def end_of_turn(self) -> int:
        raise NotImplementedError

    def forced(self, token: int, sampling: Sampling) -> Sampling:
        """Sampling that gives only this token (a fake is scripted to say it)."""
        raise NotImplementedError

    async def chat(self, text: str) -> list[int]:
        return await self.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


@dataclass
class FakeBench(Bench):
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


@dataclass
class LlamaBench(Bench):
    embedded: EmbeddedServer
    log: Path

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.embedded.address}{path}", json=body) as answer,
        ):
            return await answer.json()

    async def encode(self, text: str) -> list[int]:
        return (await self._post("/tokenize", {"content": text, "parse_special": True}))["tokens"]

    async def decode(self, ids: Sequence[int]) -> str:
        return (await self._post("/detokenize", {"tokens": list(ids)}))["content"]

    async def score(self, prompt: Sequence[int], ids: Sequence[int], sampling: Sampling) -> list[float]:
        scores = []
        for place, token in enumerate(ids):
            body = {"prompt": [*prompt, *ids[:place]], "n_predict": 1, "n_probs": 1, "logit_bias": [[token, 1e6]]}
            [entry] = (await self._post("/completion", body))["completion_probabilities"]
            assert entry["id"] == token
            scores.append(entry["logprob"])
        return scores

    async def look_up(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """As `score`, also for the tokens of half a character, to which llama.cpp lists no logprob of their own."""
        [plain] = await self.encode("b")
        scores = []
        for place, token in reversed(list(enumerate(ids))):
            bias = [[plain, 1e6]]
            body = {"prompt": [*prompt, *ids[:place]], "n_predict": 1, "n_probs": 400, "logit_bias": bias}
            [entry] = (await self._post("/completion", body))["completion_probabilities"]
            scores += [other["logprob"] for other in entry["top_logprobs"] if other["id"] == token]
        return scores[::-1]

    async def busy(self) -> bool:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.embedded.address}/slots") as answer,
        ):
            return any(slot["is_processing"] for slot in await answer.json())

    async def cancelled(self) -> bool:
        # Its log says so. Asking /slots would not do: at each answer llama.cpp puts off looking by another second.
        return "cancel task" in self.log.read_text(errors="replace")

    @property
    def end_of_turn(self) -> int:
        return 2

    def forced(self, token: int, sampling: Sampling) -> Sampling:
        return replace(sampling, extra={"logit_bias": [[token, 1e6]]})


async def until(asked: Callable[[], Awaitable[bool]], *, seconds: float = 60.0) -> None:
    """Ask until the answer is yes."""
    async with asyncio.timeout(seconds):
        while not await asked():  # noqa: ASYNC110 - servers that are only asked
            await asyncio.sleep(0.02)


@asynccontextmanager
async def bench(kind: str, embedded: EmbeddedServer | None, policy: Any = None, **server: Any) -> AsyncIterator[Bench]:
    """A bench for the engine of this kind. A fake server says what `policy` says, or samples from its formula."""
    settings: dict[str, Any] = server.pop("settings", {})
    async with AsyncExitStack() as stack:
        if kind == "llama.cpp":
            assert embedded is not None
            base_url, name = embedded.address, embedded.model_name
        else:
            fake = await stack.enter_async_context(FakeServer(policy or RandomTokens(), **server))
            base_url, name = fake.root_url, fake.host.model_name
        host, port = base_url.removeprefix("http://").split(":")
        relay = await stack.enter_async_context(Relay(host, int(port)))
        engine = create_engine(
            kind, ServerSettings(**{"base_url": f"{relay.root_url}/v1", "model_name": name, "timeout": 60.0} | settings)
        )
        stack.push_async_callback(engine.close)
        if kind == "llama.cpp":
            yield LlamaBench(engine, relay, embedded, Path(str(embedded._log_path)))
        else:
            yield FakeBench(engine, relay, fake)
