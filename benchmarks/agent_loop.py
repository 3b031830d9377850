"""CPU time of a rollout against an instant server: our agent loop, and atroposlib's client with the same script.

    python benchmarks/agent_loop.py

Both play the same conversations against the same server, which runs in a separate process. The benchmark measures the
CPU time of this process, because wall time on a shared machine says little. The peer's loop is the shortest that its
users write: `self.server.chat_completion(messages=..., tools=...)` until there are no calls, run by atroposlib's
`process_manager`, one group at a time, as it does. Its `process` does more than a loop: the figure of our whole
`process` is that of `process_lag.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.instant_server import instant_server
from lachesis.loop.loop import HermesAgentLoop
from lachesis_client import OpenAIServer, Router, ServerSettings
from lachesis_tools import ToolResult

TURNS = (0, 1, 5, 20)
"""Tool turns before the final answer."""
CONCURRENCY = (1, 64, 256)
ROUNDS, PEER_ROUNDS = 5, 1
"""One round is enough: the peer takes most of the time, and its figures are far from ours."""
LIMIT_MS = 1.0
"""The limit: CPU milliseconds of one extra tool turn."""

NOOP = {
    "type": "function",
    "function": {
        "name": "noop",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
MESSAGES = [{"role": "system", "content": "You are a test."}, {"role": "user", "content": "What is the answer?"}]


async def noop(calls: Any) -> list[ToolResult]:
    """Tools that cost nothing, so that only the loop is measured."""
    return [ToolResult(content="done", error=None) for _ in calls]


async def ours(port: int, tool_turns: int, rollouts: int, concurrency: int) -> float:
    """CPU milliseconds per rollout."""
    settings = ServerSettings(
        base_url=f"http://127.0.0.1:{port}/{tool_turns}/v1", model_name="instant", max_concurrency=512
    )
    async with Router([OpenAIServer(settings)]) as router:
        gate = asyncio.Semaphore(concurrency)

        async def one() -> None:
            async with gate:
                result = await HermesAgentLoop(router, [NOOP], execute=noop).run(MESSAGES)
            if result.turns_used != tool_turns + 1:
                raise RuntimeError(f"{result.outcome}: {result.reason}")

        await asyncio.gather(*(one() for _ in range(concurrency)))  # opens connections and fills caches
        started = time.process_time()
        await asyncio.gather(*(one() for _ in range(rollouts)))
        return 1000 * (time.process_time() - started) / rollouts


def peer_env(port: int, tool_turns: int, rollouts: int, folder: Path) -> Any:
    """atroposlib's environment with the same script."""
    from atroposlib.envs.base import BaseEnv, BaseEnvConfig
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig

    class Peer(BaseEnv):  # type: ignore[misc]
        name = "peer"

        async def setup(self) -> None: ...

        async def get_next_item(self) -> Any:
            return MESSAGES

        async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

        async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any], list[Any]]:
            messages = [dict(message) for message in item]
            while True:
                completion = await self.server.chat_completion(messages=messages, tools=[NOOP], n=1)
                message = completion.choices[0].message
                calls = [call.model_dump() for call in message.tool_calls or []]
                messages.append({"role": "assistant", "content": message.content, "tool_calls": calls or None})
                if not calls:
                    break
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
            return {"tokens": [1], "masks": [1], "scores": 1.0, "messages": messages}, []

    config = BaseEnvConfig(
        group_size=rollouts,
        total_steps=1,
        use_wandb=False,
        ensure_scores_are_not_same=False,
        include_messages=True,
        tokenizer_name=str(tokenizer_folder(folder)),
        data_path_to_save_groups=str(folder / f"peer-{tool_turns}-{time.monotonic_ns()}.jsonl"),
    )
    server = APIServerConfig(
        base_url=f"http://127.0.0.1:{port}/{tool_turns}/v1", api_key="x", model_name="instant", health_check=False
    )
    env = Peer(config, [server])
    env.process_mode, env.n_groups_to_process, env.group_size_to_process = True, 1, rollouts
    return env


def tokenizer_folder(folder: Path) -> Path:
    """A tokenizer that loads without a download. atroposlib needs one even if it counts no tokens."""
    target = folder / "tokenizer"
    if not target.exists():
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        plain = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
        plain.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", eos_token="<eos>").save_pretrained(target)
    return target


async def theirs(port: int, tool_turns: int, rollouts: int, folder: Path) -> float:
    """CPU milliseconds per rollout, a group of `rollouts` at once, as atroposlib's `process` plays a group."""
    await peer_env(port, tool_turns, 8, folder).process_manager()
    env = peer_env(port, tool_turns, rollouts, folder)
    started = time.process_time()
    await env.process_manager()
    return 1000 * (time.process_time() - started) / rollouts


def per_turn(by_turns: dict[int, float]) -> float:
    """Milliseconds per extra tool turn: the slope between the shortest and the longest rollout."""
    low, high = min(by_turns), max(by_turns)
    return (by_turns[high] - by_turns[low]) / (high - low)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256, help="number of rollouts to average")
    parser.add_argument("--no-peer", action="store_true", help="skip atroposlib")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)

    print(f"CPU ms per rollout, median of {ROUNDS} rounds of {arguments.rollouts} rollouts (atroposlib: {PEER_ROUNDS})")
    print(f"{'':<28}" + "".join(f"{turns:>4} tool turns" for turns in TURNS) + "   per extra turn")
    slopes = {}
    with instant_server() as port, tempfile.TemporaryDirectory() as folder:
        for concurrency in CONCURRENCY:
            rollouts = min(arguments.rollouts, 64) if concurrency == 1 else arguments.rollouts
            row = {
                turns: statistics.median(asyncio.run(ours(port, turns, rollouts, concurrency)) for _ in range(ROUNDS))
                for turns in TURNS
            }
            slopes[concurrency] = per_turn(row)
            show(f"lachesis, {concurrency} at once", row)
        if not arguments.no_peer:
            for concurrency in CONCURRENCY[1:]:
                with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
                    peer = {
                        turns: statistics.median(
                            asyncio.run(theirs(port, turns, concurrency, Path(folder))) for _ in range(PEER_ROUNDS)
                        )
                        for turns in TURNS
                    }
                show(f"atroposlib, {concurrency} at once", peer)
                print(f"  ratio per extra turn, {concurrency} at once: {per_turn(peer) / slopes[concurrency]:.1f}x")
    worst = max(slopes.values())
    print(json.dumps({"cpu_ms_per_extra_turn": {str(k): round(v, 3) for k, v in slopes.items()}}))
    return worst > LIMIT_MS


def show(label: str, row: dict[int, float]) -> None:
    print(f"{label:<28}" + "".join(f"{row[turns]:>14.2f}" for turns in TURNS) + f"{per_turn(row):>14.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
