"""`lachesis policy`: serve the weights of a training run, as `launch_training.py` does while it trains.

`--base` serves the base model, without an adapter. Environments evaluate either, with `--openai.server_type vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from backends.tasks import stop_event
from lachesis.cli import port_number
from lachesis.cli.verb_parser import VerbParser
from lachesis_tokens.prompts.model_folders import tokenizer_of
from lachesis_train.engine import start_engine
from lachesis_train.policy import CurrentPolicy, PolicyVersion
from lachesis_train.tinker_sdk import LOCAL_KEY, LoraShape, Service
from lachesis_train.trainer.checkpoints import Checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit code."""
    given = _parser().parse_args(argv)
    return asyncio.run(_serve(given))


async def _serve(given: argparse.Namespace) -> int:
    stopped = stop_event()
    async with (
        engine_of(given.run_dir, threads=given.threads) as service,
        served(service, given.run_dir, base=given.base, host=given.host, port=given.port) as url,
    ):
        print(url, flush=True)
        await stopped.wait()
    return 0


@asynccontextmanager
async def engine_of(run_dir: Path, *, threads: int = 1) -> AsyncIterator[Service]:
    """The embedded engine with the weights of a run."""
    settings = Checkpoint.of_folder(run_dir).settings
    async with start_engine(
        settings["base_model"],
        state_dir=run_dir / "engine",
        dtype=settings["training.engine_dtype"],
        lora_layers=settings["training.engine_lora_layers"],
        full_finetuning=settings.get("training.engine_full_finetuning", False),
        threads=threads,
        log=run_dir / "engine.log",
    ) as url:
        service = await asyncio.to_thread(Service, url, LOCAL_KEY)
        try:
            yield service
        finally:
            await service.close()


@asynccontextmanager
async def served(
    service: Service, run_dir: Path, *, base: bool = False, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """The URL of a policy server with the last checkpoint of a run, or with the base model."""
    from transformers import AutoTokenizer

    from lachesis_train.policy_server import PolicyServer

    found = Checkpoint.of_folder(run_dir)
    model = found.settings["base_model"]
    step = 0 if base else found.step
    if base:
        sampler = await service.base_sampler(model)
    else:
        shape = LoraShape(rank=found.settings["training.lora_rank"])
        sampler = await (await service.resume(found.state, model, shape)).sampler()
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, tokenizer_of(model))
    policy = CurrentPolicy(PolicyVersion(step, f"{found.run_id}:{step}", sampler))
    async with PolicyServer(policy, tokenizer, model_name=model, host=host, port=port) as server:
        yield server.base_url


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="lachesis policy", description=__doc__)
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, metavar="DIR", help="the folder of the training run")
    add("--base", action="store_true", help="the base model, without an adapter")
    add("--host", default="127.0.0.1", help="(default: %(default)s)")
    add("--port", type=port_number, default=8001, help="0 takes a free one (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    return parser
