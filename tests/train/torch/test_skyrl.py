"""The whole path with SkyRL as the engine: `make test-skyrl` installs it, and the SDK 0.25 that it understands."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

if "LACHESIS_SKYRL" not in os.environ:
    pytest.skip("make test-skyrl installs SkyRL", allow_module_level=True)

from lachesis_tokens.prompts.model_folders import model_folder
from lachesis_train.processes.ports import free_ports
from tests.train.torch.test_whole_path import ROOT, Run

STEPS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of SkyRL's server, with the model `tiny`."""
    folder, (port,) = tmp_path_factory.mktemp("skyrl"), free_ports(1)
    command = [os.environ["LACHESIS_SKYRL"], str(ROOT / "scripts/skyrl_server.py"), "--port", str(port)]
    command += ["--base-model", str(model_folder("tiny")), "--backend", "jax"]
    command += ["--backend-config", '{"max_lora_adapters": 4, "max_lora_rank": 8}']
    command += ["--database-url", f"sqlite:///{folder}/skyrl.db", "--checkpoints-base", str(folder / "checkpoints")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, process_group=0
        )
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(answers(f"{url}/api/v1/healthz", process))
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        print((folder / "server.log").read_text()[-4000:])


async def answers(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(600):
        while process.poll() is None:
            try:
                await asyncio.to_thread(lambda: urllib.request.urlopen(url).close())
            except OSError:
                await asyncio.sleep(0.5)
            else:
                return
    raise AssertionError(f"SkyRL ended with {process.returncode}")


async def test_a_run_trains_on_a_skyrl_server_and_continues(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts: the second one continues from SkyRL's checkpoint."""
    monkeypatch.setenv("TINKER_BASE_URL", server)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    model = str(model_folder("tiny"))
    for steps in (STEPS // 2, STEPS):
        run = Run(tmp_path, steps=steps, learning_rate=0.03, training__base_model=model, openai__model_name=model)
        await run.ended()
    metrics = run.metrics
    assert [step["step"] for step in metrics] == [*range(1, STEPS + 1)]
    for step in metrics:
        print({name: step[name] for name in ("step", "train/reward", "train/step_time")})
    assert len({step["version"] for step in metrics}) == STEPS
    fresh = [step for step in metrics if step["train/staleness/max"] == 0]
    assert all(step["train/sampling/sampling_logp_difference/max"] < 1e-4 for step in fresh)
    assert fresh
