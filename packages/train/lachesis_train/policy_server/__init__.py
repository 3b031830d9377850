"""The inference server of a training run: the current policy over the APIs of OpenAI, vLLM and SGLang.

async with PolicyServer(policy, tokenizer, model_name="my-model", port=8001) as server:
    ...  # completions carry the version that sampled them; policy.publish(version) swaps the weights
"""

from lachesis_train.policy_server.server import PolicyServer

__all__ = ["PolicyServer"]
