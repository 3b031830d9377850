"""The inference server of a training run: the current policy over the APIs of OpenAI, vLLM and SGLang.

async with serve(policy, tokenizer, model_name="my-model", port=8001) as (host, port):
    ...  # completions carry the version that sampled them; policy.publish(version) swaps the weights
"""

from lachesis_train.policy_server.server import PolicyServer, serve

__all__ = ["PolicyServer", "serve"]
