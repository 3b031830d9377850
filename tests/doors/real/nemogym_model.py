"""NeMo Gym's model server in front of a vLLM: nemogym_model.py PORT URL, in the interpreter that has it."""

import json
import os
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

port, url = int(sys.argv[1]), sys.argv[2]
at = {"host": "127.0.0.1", "port": port}
servers = {"head_server": {**at, "port": 9}, "policy_model": {"responses_api_models": {"vllm_model": at}}}
os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(servers)

from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig  # noqa: E402 - it reads the variable

config = VLLMModelConfig(
    name="policy_model",
    entrypoint="app.py",
    base_url=url,
    api_key="none",
    model="fake",
    return_token_id_information=True,
    uses_reasoning_parser=False,
    **at,
)
client = ServerClient(
    head_server_config=BaseServerConfig(**servers["head_server"]), global_config_dict=OmegaConf.create(servers)
)
uvicorn.run(VLLMModel(config=config, server_client=client).setup_webserver(), **at)
