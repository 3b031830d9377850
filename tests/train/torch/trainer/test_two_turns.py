"""`ToolResultEnv`, where the model has to read a tool's result: both turns of its rollouts are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from lachesis_envs.tool_call import ToolResultEnv, in_stock
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tokens.prompts.model_folders import model_folder
from lachesis_train.tinker_sdk import Adam, LoraShape, Service
from lachesis_train.trainer.datums import prepare
from lachesis_train.trainer.settings import TrainingSettings
from tests.support.training_runs import environment, with_tokens
from tests.train.torch.trainer.conftest import RunningEngine

ROLLOUTS = 4


async def test_each_token_of_both_turns_is_trained_once(to_engine: RunningEngine, tmp_path: Path) -> None:
    """A quarter of the rollouts asks for the wrong part."""
    begun = 0

    def agent(ask: Ask) -> Any:
        nonlocal begun
        part = ask.prompt.rpartition("pieces of ")[2].partition(" ")[0]
        if ask.turn:
            return f"There are {in_stock(part)}."
        begun += 1
        call = {"name": "look_up", "arguments": {"part": part if begun % ROLLOUTS else "lamp-0"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    async with FakeServer(agent, tokenizer=AutoTokenizer.from_pretrained(model_folder("tiny"))) as model:
        server = with_tokens(model, tmp_path)
        env = environment(ToolResultEnv, tmp_path, server, group_size=ROLLOUTS, enabled_toolsets=["stock"])
        async with env.running(training=True):
            group, _ = await env.collect_trajectories(await env.get_next_item())
        sampled = [made for seen in model.requests for made in seen.completions]
    assert sorted(group["scores"]) == [0.0, 1.0, 1.0, 1.0]
    assert len(sampled) == 2 * ROLLOUTS
    batch = prepare([group], TrainingSettings(max_token_trainer_length=4096))
    service = Service()
    training = await service.train("tiny", LoraShape(rank=8, seed=1))
    before = await training.step([each.datum() for each in batch.samples], "importance_sampling", Adam(0.0))
    assert before.metrics["trained_tokens:sum"] == sum(len(made.ids) for made in sampled)
    found = sorted(
        [
            int(each.sample.tokens[place])
            for each in batch.samples
            for place in np.flatnonzero(each.datum().inputs["advantages"]) + 1
        ]
    )
    assert found == sorted(token for made in sampled for token in made.ids)
    after = await training.step([each.datum() for each in batch.samples], "importance_sampling", Adam(1e-4))
    again = await training.step([each.datum() for each in batch.samples], "importance_sampling", Adam(0.0))
    assert again.metrics["loss:sum"] < after.metrics["loss:sum"]
    for each, old, new in zip(batch.samples, after.logprobs, again.logprobs, strict=True):
        places = each.sample.trained - 1
        for turn in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
            assert np.abs(np.asarray(new)[turn] - np.asarray(old)[turn]).max() > 0
    await service.close()
