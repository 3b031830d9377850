"""`serve` with a real vLLM, Atropos' own rollout API and a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_vllm import FOLDER, RealVLLM

from lachesis.settings.server_settings import ServerConfig
from tests.support.stock_run_api import StockRunApi
from tests.support.training_runs import proven, serving, trained


@pytest.mark.parametrize("engine", ["vllm", "vllm-generate"])
async def test_serve_sends_what_vllm_sampled(tmp_path: Path, raw: RealVLLM, engine: str) -> None:
    server = ServerConfig(
        base_url=raw.base_url,
        model_name=FOLDER.name,
        server_type="vllm",
        engine=engine,
        tokenizer_name=str(FOLDER),
    )
    async with StockRunApi() as api:
        env = serving(tmp_path, api, server, max_agent_turns=3, max_token_length=64)
        samples = proven(await trained(env, api, groups=4, steps=2))
    tokens = sum(sample.trained for sample in samples)
    print(f"{engine}: {len(samples)} samples, {tokens} trained tokens, all proven")
    assert len({sample.rollout_id for sample in samples}) == len(samples) == 8
