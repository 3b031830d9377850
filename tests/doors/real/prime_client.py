"""Asks an env server with verifiers: prime_client.py ADDRESS ROWS URL MODEL, in the interpreter that has it.

`lachesis_taskset` is on its path. Prints JSON.
"""

import asyncio
import json
import sys

from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.serve import EnvClient
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type


async def main(address, rows, url, model):
    client = EnvClient(address)
    await client.wait_for_server_startup(20)
    config = taskset_config_type("lachesis_taskset").model_validate({"id": "lachesis_taskset", "rows": rows})
    endpoint = EvalClientConfig(base_url=url, api_key_var="NO_KEY")
    found, deltas = [], []
    for task in load_taskset(config):
        data = task.data.model_dump(mode="json")
        found.append(await client.run(endpoint, model, SamplingConfig(temperature=0.5), data, deltas.append))
    await client.close()
    branches = [[len(branch.nodes) for branch in trace.branches] for each in found for trace in each.traces]
    said = {"episodes": [each.to_record() for each in found], "deltas": len(deltas), "branches": branches}
    print(json.dumps({**said, "rewards": [trace.reward for each in found for trace in each.traces]}))


asyncio.run(main(*sys.argv[1:]))
