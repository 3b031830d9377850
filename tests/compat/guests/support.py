"""What the tests of all guests need: the framework or a reason to skip, environments, and what they played."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lachesis_compat.guests.guest_env import GuestEnv
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tokens.samples.verification import verify_records
from tests.support.small_envs import ROOT, lines
from tests.support.stock_run_api import StockRunApi, Trainer
from tests.support.training_runs import environment as make
from tests.support.training_runs import played, proven, take, with_tokens, written

__all__ = ["played", "written"]

EXAMPLES = Path(__file__).parent / "examples"


def needed(guest: str, package: str) -> None:
    """Skip the module where the framework is not installed. `make test-guests` has it, and must not skip."""
    if os.environ.get("LACHESIS_NEED_GUEST") == guest:
        importlib.import_module(package)
    else:
        pytest.importorskip(package, reason=f"{package} is not installed; `make test-guests` has it")


async def served(
    env_cls: type[GuestEnv], folder: Path, api: StockRunApi, right: Any, wrong: Any, **settings: Any
) -> None:
    """`serve` two groups to a trainer, and check every sample. Half of the rollouts, by chance, have a wrong answer."""

    def sometimes_right(ask: Ask) -> Any:
        return right(ask) if ask.turn or random.random() < 0.5 else wrong(ask)

    async with api.wiped() as wiped, FakeServer(sometimes_right) as model:
        of_serve = {"rollout_server_url": wiped.url, "spool_path": str(folder / "spool"), "steps_per_eval": 0}
        env = make(env_cls, folder, with_tokens(model, folder), **of_serve, **settings, total_steps=-1)
        trainer = Trainer(wiped.url, batch_size=4, num_steps=1)
        await trainer.register()
        await trainer.poll()
        run = asyncio.create_task(env.env_manager())
        await take(trainer, 2)
        await run
    assert len(proven(trainer)) == 4


async def run_page(command: str, folder: Path, policy: Any) -> FakeServer:
    """Run a command that a page shows with the examples that it shows, and `verify` after.

    Args:
        command: how it begins.
    """
    page = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("from-*.md")))
    for name, code in re.findall(r"^```py\n# (\w+\.py)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (folder / name).write_text(code)
    (shown,) = (line for line in page.splitlines() if line.startswith(command))
    program, *arguments = shlex.split(shown, comments=True)
    lachesis = ["-c", "import lachesis.cli as c; exit(c.main())"]
    async with FakeServer(policy) as model:
        server = with_tokens(model, folder)
        settings = {
            "env.data_path_to_save_groups": folder / "groups.jsonl",
            "openai.base_url": server.base_url,
            "openai.model_name": server.model_name,
            "openai.server_type": "vllm",
            "openai.tokenizer_name": server.tokenizer_name,
        }
        for short, name in (("-m", "openai.model_name"), ("-b", "openai.base_url")):
            if program == "lachesis":
                arguments[arguments.index(short) + 1] = str(settings.pop(name))
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        await _run(folder, *(lachesis if program == "lachesis" else []), *arguments, *flags)
        await _run(folder, *lachesis, "verify", str(folder / "groups.jsonl"))
    return model


async def _run(folder: Path, *command: str) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def assert_exact(folder: Path, model: FakeServer) -> int:
    """Everything that was sampled is delivered once, after exactly its prompt. Returns the number of samples."""
    samples = [sample for group in lines(folder / "groups.jsonl") for sample in group["samples"]]
    sampled = Counter(
        (tuple(seen.call.prompts[made.prompt]), tuple(made.ids), tuple(made.logprobs))
        for seen in model.requests
        if seen.call is not None
        for made in seen.completions
    )
    delivered = Counter(
        (
            tuple(sample["tokens"][: span["start"]]),
            tuple(sample["tokens"][span["start"] : span["end"]]),
            tuple(sample["logprobs"][span["start"] : span["end"]]),
        )
        for sample in samples
        for span in sample["spans"]
    )
    assert delivered == sampled
    totals = verify_records(samples)
    assert totals.ok, totals.problems
    return len(samples)
