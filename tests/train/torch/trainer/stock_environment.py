"""An environment on atroposlib alone, as its own are written: `python stock_environment.py serve --env...`."""

from __future__ import annotations

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class LowBytes(BaseEnv):
    """Rewards the share of sampled tokens below 128, which a random model of bytes learns quickly."""

    name = "low_bytes"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=8,
            use_wandb=False,
            wandb_name="low_bytes",  # the stock API refuses an environment without one
            max_token_length=12,
            max_batches_offpolicy=2,
            steps_per_eval=1_000_000,
            total_steps=1_000_000,
        )
        return config, [APIServerConfig(api_key="x", server_type="sglang")]

    async def setup(self):
        self.draw = random.Random(0)

    async def evaluate(self, *args, **kwargs):
        pass

    async def get_next_item(self):
        return "".join(self.draw.choices("abcdefgh", k=8))

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=item, n=self.config.group_size, max_tokens=12, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node in nodes:
            sampled = [token for token in node.masked_tokens if token != -100]
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(sum(token < 128 for token in sampled) / len(sampled))
        return group, []


if __name__ == "__main__":
    LowBytes.cli()
