"""Prefix-cache hits, balance and time of a step, by the way in which requests are spread over servers.

    python benchmarks/routing.py [--servers 4] [--ranks 1] [--groups 8] [--size 8] [--turns 6]

Groups of rollouts of several turns run against fake servers with bounded prefix caches, which take time for the
uncached tokens of a prompt, one prompt at a time, and for the tokens of a completion. "hits" are the cached tokens of
all prompts, as the servers count them; "best" is what one cache of unlimited size would have. "max/mean" compares the
tokens in flight of the fullest server (or rank) with the mean, over the time of the step.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lachesis_client.affinity import Demand
from lachesis_client.balancer import _Slot
from lachesis_client.chat_options import Split
from lachesis_client.sampling import Sampling
from lachesis_messages.tokens import TokenPrefix
from lachesis_testing.fake_server import FakeServer, Lengths, RandomWords, fake_tokenizer
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.server.token_server import TokenServer

PREFILL, DECODE = 20_000.0, 400.0
"""Tokens a second: of a server for prompts, of one completion."""
CACHE = 60_000
"""Tokens that a server keeps."""
PROMPT, OBSERVATION, COMPLETION = (1000, 3000), (50, 600), Lengths(20, 200)
TOOL_SECONDS = (0.02, 0.3)


class RoundRobin(TokenServer):
    """Each request goes to the next place."""

    turn = count()

    def _best(self, split: Split, demand: Demand) -> _Slot[Any]:
        places = [(member, place) for member in self._members for place in member.places]
        return _Slot(*places[next(self.turn) % len(places)], demand)


@dataclass(frozen=True)
class Result:
    hits: float
    best: float
    imbalance: float
    seconds: float

    def row(self) -> str:
        return f"{self.hits:8.1%} {self.best:8.1%} {self.imbalance:10.2f} {self.seconds:9.2f}"


async def step(kind: Callable[..., TokenServer], by_group: bool, arguments: argparse.Namespace, seed: int) -> Result:
    """One step: all groups at once, until the last rollout has ended."""
    tokenizer = fake_tokenizer()
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(
                FakeServer(
                    RandomWords(COMPLETION),
                    tokenizer=tokenizer,
                    vary=True,
                    tokens_per_second=DECODE,
                    prefix_cache=CACHE // arguments.ranks,
                    data_parallel_size=arguments.ranks,
                    prefill_tokens_per_second=PREFILL / arguments.ranks,
                    context_length=1 << 20,
                )
            )
            for _ in range(arguments.servers)
        ]
        engines = [create_engine("vllm", fake.settings(data_parallel_size=arguments.ranks)) for fake in fakes]
        server = await stack.enter_async_context(kind(engines, PromptBuilder(tokenizer), "hermes"))
        rng = Random(seed)
        known = 0

        async def rollout(group: int, prompt: TokenPrefix, number: int) -> None:
            nonlocal known
            chance = Random(f"{seed}/{group}/{number}")
            managed = server.for_rollout(group=str(group) if by_group else None)
            known += prompt.length if number else 0
            for turn in range(chance.randint(1, arguments.turns)):
                if turn:
                    await asyncio.sleep(chance.uniform(*TOOL_SECONDS))
                    prompt = prompt.extend(chance.choices(range(10, 1000), k=chance.randint(*OBSERVATION)))
                [made] = await server.generate(prompt, Sampling(max_tokens=256), affinity=managed.affinity)
                known += prompt.parent.length if turn and prompt.parent else 0
                prompt = prompt.extend(made.ids)

        imbalances: list[float] = []

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.02)
                loads = [place.tokens for member in server._members for place in member.places]
                if mean := statistics.fmean(loads):
                    imbalances.append(max(loads) / mean)

        watching = asyncio.create_task(watch())
        started = time.monotonic()
        prompts = [TokenPrefix(rng.choices(range(10, 1000), k=rng.randint(*PROMPT))) for _ in range(arguments.groups)]
        await asyncio.gather(
            *(rollout(group, prompt, n) for group, prompt in enumerate(prompts) for n in range(arguments.size))
        )
        seconds = time.monotonic() - started
        watching.cancel()
        total = sum(fake.stats["prompt_tokens"] for fake in fakes)
        return Result(
            hits=sum(fake.stats["cached_tokens"] for fake in fakes) / total,
            best=known / total,
            imbalance=statistics.fmean(imbalances),
            seconds=seconds,
        )


WAYS: dict[str, tuple[Callable[..., TokenServer], bool]] = {
    "round robin": (RoundRobin, False),
    "by rollout": (TokenServer, False),
    "by rollout and group": (TokenServer, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{'':22}{'hits':>8} {'best':>8} {'max/mean':>10} {'seconds':>9}")
    for name, (kind, by_group) in WAYS.items():
        result = asyncio.run(step(kind, by_group, arguments, arguments.seed))
        print(f"{name:22}{result.row()}", flush=True)


if __name__ == "__main__":
    main()
