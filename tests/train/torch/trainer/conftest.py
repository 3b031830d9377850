"""A real engine and a real rollout API for the trainer. Skipped without torch, unless LACHESIS_NEED_TORCH is set."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis_tokens.samples.group_shapes import with_digest
from lachesis_train.api import ApiSettings, RolloutApiServer
from tests.support.trained_groups import group_body

GROUP_SIZE, GROUPS_A_STEP = 4, 2

if not os.environ.get("LACHESIS_NEED_TORCH"):
    pytest.importorskip("torch", reason="make test-train installs torch")
    pytest.importorskip("tinker", reason="make test-train installs the SDK of Tinker")


@dataclass(frozen=True)
class RunningEngine:
    """`lachesis engine --model tiny`."""

    url: str
    state: Path

    @property
    def environ(self) -> dict[str, str]:
        """What tells the SDK of it."""
        return {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}

    def tensors(self, path: str) -> dict[str, Any]:
        """Those of a `tinker://` path."""
        from safetensors.torch import load_file

        return dict(load_file(self.state / f"{path.removeprefix('tinker://')}.safetensors"))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One for all tests: it takes seconds to start."""
    folder = tmp_path_factory.mktemp("engine")
    command = [sys.executable, "-m", "lachesis", "engine", "--model", "tiny", "--port", "0", "--child"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--state-dir", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (folder / "log").read_text()
    yield RunningEngine(json.loads(line)["base_url"], folder)
    process.terminate()
    process.wait()


@pytest.fixture
def to_engine(engine: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> RunningEngine:
    """The SDK of this process finds the engine."""
    for name, value in engine.environ.items():
        monkeypatch.setenv(name, value)
    return engine


@contextlib.asynccontextmanager
async def filled_api(
    folder: Path, groups: int, seed: int = 0, environments: Sequence[str] = ()
) -> AsyncIterator[RolloutApiServer]:
    """An API to which certified groups are posted once a trainer has registered. Equal seeds, equal groups, which are
    of the environments in turn."""
    async with RolloutApiServer(ApiSettings(folder / "api.db", port=0)) as api:
        posting = asyncio.create_task(_post(api.url, groups, seed, environments))
        try:
            yield api
            await posting
        finally:
            posting.cancel()


async def _post(url: str, groups: int, seed: int, environments: Sequence[str]) -> None:
    draw = random.Random(seed)
    async with aiohttp.ClientSession() as http:

        async def post(path: str, body: Any) -> Any:
            async with http.post(url + path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        env = {"max_token_length": 64, "desired_name": "t", "weight": 1.0, "group_size": GROUP_SIZE}
        while True:
            if (registered := await post("/register-env", env))["status"] == "success":
                break
            await asyncio.sleep(0.05)
        for number in range(groups):
            answers = ["".join(draw.choices("abcdef 012345", k=draw.randint(2, 9))) for _ in range(GROUP_SIZE)]
            scores = [draw.random() for _ in answers]
            body = group_body(f"g{number}", f"question {number}", answers, scores, version="another:0", p=-5.5)
            body["env_id"] = registered["env_id"]
            if environments:
                body["group_overrides"]["environment"] = environments[number % len(environments)]
                body = with_digest(body)
            body["group_overrides"]["group_id"] = f"g{number}"
            await post("/scored_data", body)
