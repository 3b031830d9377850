"""Collects rollouts with nemo-gym: nemogym_client.py URL ROWS FOLDER, in the interpreter that has it. Prints JSON."""

import asyncio
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit


async def main(url, rows, folder):
    agent = json.loads(Path(rows).read_text().splitlines()[0])["agent_ref"]["name"]
    at = {"host": urlsplit(url).hostname, "port": urlsplit(url).port}
    front = {**at, "agent_server": {"type": "responses_api_agents", "name": agent}}
    os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(
        {
            "head_server": {"host": "127.0.0.1", "port": 9},
            "front": {"environment_servers": {"lachesis": front}},
            agent: {"responses_api_agents": {"lachesis": at}},
        }
    )
    from nemo_gym.base_resources_server import BaseVerifyResponse
    from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper

    out = Path(folder, "rollouts.jsonl")
    given = {"input_jsonl_fpath": rows, "output_jsonl_fpath": str(out), "disable_health_check": True}
    given["num_samples_in_parallel"] = 1
    await RolloutCollectionHelper().run_from_config(RolloutCollectionConfig.model_validate(given))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    checked = [BaseVerifyResponse.model_validate(each) for each in found]
    kinds = [[type(item).__name__ for item in each.response.output] for each in checked]
    metrics = json.loads(next(Path(folder).glob("*aggregate_metrics.json")).read_text())
    print(json.dumps({"rollouts": found, "kinds": kinds, "metrics": metrics}))


asyncio.run(main(*sys.argv[1:]))
