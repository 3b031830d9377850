"""Our rollout API beside Atropos' `run-api`: sequences per CPU second of the server, and the lag of its event loop.

    python -m benchmarks.rollout_api

The same client posts the same groups of 8 x 4k tokens, in the form of atroposlib's BaseEnv, to both, and gets them back
in batches. Counted is the CPU time of the server's process, with all its threads, from the first group to the last
batch. Then groups of 8 x 32k are posted to our API inside this process, while the longest time between two turns of its
event loop is measured; the client is another process.

Exits with 1 if our API carries less than 5 times as many sequences, or if its loop waits for more than 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.machine import cpu_seconds
from benchmarks.serve_lag import Lag
from lachesis_train.api import ApiSettings, RolloutApiServer
from lachesis_train.group_encoding import encode_group

SEQUENCES, LENGTH, GROUPS = 8, 4096, 16
LONG, LONG_GROUPS = 32_768, 6
BATCH = 32
LEAST_RATIO, MOST_LAG = 5.0, 0.050
HEADERS = {"Content-Type": "application/json", "Content-Encoding": "gzip"}


def group(length: int, number: int) -> dict[str, Any]:
    """Of 8 sequences."""
    draw = random.Random(number)
    tokens = [[draw.randrange(150_000) for _ in range(length)] for _ in range(SEQUENCES)]
    return {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [float(at) for at in range(SEQUENCES)],
        "inference_logprobs": [[1.0, *(-draw.random() for _ in row[1:])] for row in tokens],
        "messages": [[{"role": "user", "content": "What is " + "long " * 500}] for _ in tokens],
        "group_overrides": {"group_id": f"{number}"},
        "env_id": 0,
    }


async def ask(session: aiohttp.ClientSession, method: str, url: str, body: Any = None, **options: Any) -> Any:
    async with session.request(method, url, json=body, **options) as answer:
        answer.raise_for_status()
        return orjson.loads(await answer.read())


async def register(session: aiohttp.ClientSession, url: str) -> None:
    """A trainer and an environment, once the server answers."""
    trainer = {"wandb_group": "", "wandb_project": "", "batch_size": BATCH, "max_token_len": 2 * LONG}
    trainer |= {"checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 9}
    while True:
        with suppress(aiohttp.ClientError):
            await ask(session, "POST", f"{url}/register", trainer)
            break
        await asyncio.sleep(0.1)
    await ask(session, "GET", f"{url}/batch")
    env = {"max_token_length": LONG, "desired_name": "benchmark", "weight": 1.0, "group_size": SEQUENCES}
    await ask(session, "POST", f"{url}/register-env", env)


async def throughput(command: list[str], url: str, bodies: list[bytes], accepted: str) -> float:
    """Sequences per CPU second of the server that this command starts."""
    server = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        async with aiohttp.ClientSession(headers={"Accept-Encoding": accepted}) as session:
            await register(session, url)
            begun, got = cpu_seconds(server.pid), 0
            for body in bodies:
                async with session.post(f"{url}/scored_data", data=body, headers=HEADERS) as answer:
                    answer.raise_for_status()
            while got < len(bodies) * SEQUENCES:
                batch = (await ask(session, "GET", f"{url}/batch"))["batch"]
                got += sum(len(each["tokens"]) for each in batch)
            return got / (cpu_seconds(server.pid) - begun)
    finally:
        server.kill()
        server.wait()


async def lag(folder: Path) -> Lag:
    """Of our API's event loop while another process posts long groups."""
    async with RolloutApiServer(ApiSettings(folder / "lag.db", port=0)) as server:
        command = [sys.executable, "-m", "benchmarks.rollout_api", "--post", server.url]
        client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert client.stdout is not None and client.stdin is not None
        await client.stdout.readline()  # it has made its groups
        async with Lag() as measured:
            await client.communicate(b"\n")
        if client.returncode or server.state.received != LONG_GROUPS:
            raise SystemExit(f"{server.state.received} of {LONG_GROUPS} long groups have arrived")
    return measured


async def post(url: str) -> None:
    """The client of `lag`: posts groups and gets them back."""
    bodies = [gzip.compress(b"".join(encode_group(group(LONG, at))), 1) for at in range(LONG_GROUPS)]
    async with aiohttp.ClientSession(headers={"Accept-Encoding": "identity"}) as session:
        await register(session, url)
        print("ready", flush=True)
        sys.stdin.readline()
        for body in bodies:
            async with session.post(f"{url}/scored_data", data=body, headers=HEADERS) as answer:
                answer.raise_for_status()
        async with session.get(f"{url}/batch") as answer:
            async for _ in answer.content.iter_any():
                pass


async def measure() -> int:
    bodies = [gzip.compress(json.dumps(group(LENGTH, at)).encode()) for at in range(GROUPS)]
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("| trainer accepts | run-api, sequences per CPU second | ours | times |")
        print("| --- | --- | --- | --- |")
        for at, accepted in enumerate(("identity", "gzip")):
            ports = [free_port(), free_port()]
            stock = ["uvicorn", "atroposlib.api:app", "--log-level", "critical", "--port", str(ports[0])]
            own = ["lachesis", "api", "--db", str(folder / f"{at}.db"), "--port", str(ports[1])]
            theirs, ours = [
                await throughput(command, f"http://127.0.0.1:{port}", bodies, accepted)
                for command, port in zip((stock, own), ports, strict=True)
            ]
            print(f"| {accepted} | {theirs:.0f} | {ours:.0f} | {ours / theirs:.1f} |")
            if ours < LEAST_RATIO * theirs:
                wrong.append(f"{ours / theirs:.1f} times the sequences of run-api, not {LEAST_RATIO:g}")
        async with Lag() as idle:
            await asyncio.sleep(2.0)
        measured = await lag(folder)
        print(f"\nidle: {idle}\ngroups of {SEQUENCES} x {LONG}: {measured}")
        if max(measured.wall) > MOST_LAG and max(measured.cpu) > MOST_LAG:
            wrong.append(f"the loop waited for {max(measured.wall):.3f} s")
    print("\n".join(wrong))
    return bool(wrong)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--post", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.post:
        asyncio.run(post(given.post))
        return 0
    started = time.monotonic()
    code = asyncio.run(measure())
    print(f"{time.monotonic() - started:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
