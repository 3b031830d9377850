"""CPU time of a prompt in `lachesis batch`, beside plain requests for the same prompts, with 1,000 in flight.

    python benchmarks/batch.py

Both ask the same server, in a separate process, whose answers take 1 to 2 s. The peer is the shortest program that
does it: aiohttp and a semaphore, the answers written to one file. Figures are CPU time of this process, from the first
prompt to the last line of the report.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.instant_server import instant_server
from lachesis.runs import own_process
from lachesis.settings.server_settings import ServerConfig
from lachesis_data.batch.prompts import Prompts, over_rows
from lachesis_data.batch.rows import Rows
from lachesis_data.batch.run import BatchSettings, run_batch

PROMPTS, IN_FLIGHT = 4000, 1000
LATENCY = (1.0, 2.0)
ROUNDS = 3
LIMIT_MS = 2.0
"""The limit: CPU milliseconds of a prompt beyond those of a plain request."""


class Counted(Prompts):
    """Counts the prompts in flight."""

    needs_sandboxes = False
    now = most = 0

    async def play_rollout(self, *args: Any, **kwargs: Any) -> Any:
        Counted.now += 1
        Counted.most = max(Counted.most, Counted.now)
        try:
            return await super().play_rollout(*args, **kwargs)
        finally:
            Counted.now -= 1


async def plain(url: str, rows: Path, out: Path) -> None:
    """The peer."""
    gate = asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:
        with out.open("wb") as file:

            async def ask(row: dict[str, Any]) -> None:
                body = {"model": "instant", "messages": [{"role": "user", "content": row["prompt"]}]}
                async with gate, session.post(f"{url}/chat/completions", json=body) as response:
                    answer = orjson.loads(await response.read())
                file.write(orjson.dumps({**row, "answer": answer["choices"][0]["message"]["content"]}) + b"\n")

            await asyncio.gather(*(ask(orjson.loads(line)) for line in rows.read_bytes().splitlines()))


async def ours(url: str, rows: Path, out: Path) -> None:
    """The batch runner."""
    env_cls = over_rows(Counted, seed=0)
    config = env_cls.env_config_cls(enabled_toolsets=[])
    server = ServerConfig(base_url=url, model_name="instant", api_key="x", num_max_requests_at_once=IN_FLIGHT)
    env = env_cls(config, [server])
    env.console = Console(file=io.StringIO())
    settings = BatchSettings(
        folder=out,
        run_name="bench",
        rows=Rows(str(rows)),
        batch_size=1000,
        concurrency=IN_FLIGHT,
        keep_without_reasoning=True,
    )
    result = await run_batch(env, settings)
    if result.totals.kept.groups != len(list(settings.rows)):
        raise RuntimeError(f"{result.totals}")


def measure(folder: Path, url: str, prompts: int, number: int) -> tuple[float, float]:
    """CPU milliseconds of a prompt: plain, ours."""
    rows = folder / f"{number}.jsonl"
    rows.write_bytes(b"".join(orjson.dumps({"prompt": f"What is {at} and {number}?"}) + b"\n" for at in range(prompts)))
    found = []
    for run, out in ((plain, folder / f"{number}.out"), (ours, folder / f"{number}")):
        gc.collect()
        started = time.process_time()
        own_process.run(run(url, rows, out))
        found.append(1000 * (time.process_time() - started) / prompts)
    return found[0], found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    prompts = parser.parse_args().prompts
    with instant_server(LATENCY) as port, tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{port}/0/v1"
        measure(Path(folder), url, min(prompts, 200), 0)  # imports, and fills caches
        Counted.most = 0
        rounds = [measure(Path(folder), url, prompts, number) for number in range(1, ROUNDS + 1)]
    peer, own = (min(figures) for figures in zip(*rounds, strict=True))
    print(f"{prompts} prompts of one turn, {Counted.most} in flight, the better of {ROUNDS} rounds")
    print(f"plain requests   {peer:.2f} ms CPU a prompt")
    print(f"lachesis batch   {own:.2f} ms CPU a prompt")
    print(f"overhead         {own - peer:.2f} ms (limit {LIMIT_MS})")
    return int(own - peer > LIMIT_MS or Counted.most < min(prompts, IN_FLIGHT))


if __name__ == "__main__":
    sys.exit(main())
