"""The benches of the project's own engines: fake servers, and llama.cpp."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis_client.sampling import Sampling
from lachesis_testing.engine_bench import Bench, FakeBench, fake_bench, relayed_engine
from lachesis_tokens.engines.embedded import EmbeddedServer

FAKED = ("vllm", "vllm-generate", "sglang", "atropos")
ALL = (*FAKED, pytest.param("llama.cpp", marks=pytest.mark.model))


class AtroposBench(FakeBench):
    rejects = False


@dataclass
class LlamaBench(Bench):
    embedded: EmbeddedServer
    log: Path
    repeatable = {"cache_prompt": False}  # noqa: RUF012 - a constant

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.embedded.api_key}"})

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with (
            self._session() as session,
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
            self._session() as session,
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


@asynccontextmanager
async def bench(kind: str, embedded: EmbeddedServer | None, policy: Any = None, **server: Any) -> AsyncIterator[Any]:
    """The engine of this kind with its server. `policy` and `server` are those of a fake server."""
    if kind == "llama.cpp":
        assert embedded is not None
        settings = {"api_key": embedded.api_key, **server.pop("settings", {})}
        async with relayed_engine(kind, embedded.address, embedded.model_name, settings) as (engine, relay):
            yield LlamaBench(engine, relay, embedded, Path(str(embedded._log_path)))
        return
    async with fake_bench(kind, policy, **server) as it:
        yield AtroposBench(it.engine, it.relay, it.server) if kind == "atropos" else it
