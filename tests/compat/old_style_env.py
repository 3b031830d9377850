"""An environment as those of the removed stack are written: old paths, servers of Atropos, contexts without `await`.

It is run as a script, from a copy outside the tree, and imported by the tests in this folder.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from pathlib import Path

_root = Path(__file__).resolve().parent.parent.parent
if str(_root) not in sys.path:
    sys.path.insert(0, str(_root))

# isort: off
from dotenv import load_dotenv  # noqa: E402
from pydantic import Field  # noqa: E402

from atroposlib.envs.base import EvalHandlingEnum  # noqa: E402
from atroposlib.envs.server_handling.server_manager import APIServerConfig  # noqa: E402

from environments.agent_loop import AgentResult, HermesAgentLoop  # noqa: E402
from environments.hermes_base_env import HermesAgentBaseEnv, HermesAgentEnvConfig  # noqa: E402
from environments.tool_context import ToolContext  # noqa: E402
from tools.terminal_tool import (  # type: ignore[import-not-found]  # noqa: E402
    cleanup_all_environments,
    cleanup_vm,
    clear_task_env_overrides,
    register_task_env_overrides,
)
# isort: on

load_dotenv(Path(__file__).with_name(".env"))


class NotesConfig(HermesAgentEnvConfig):
    """Own settings, and another default."""

    dataset_name: str = Field(default="someone/notes", description="Unused here.")
    check_timeout: int = Field(default=30, description="Seconds for the check.")
    places: list[str] = Field(default=["north", "south"])


class NotesEnv(HermesAgentBaseEnv):
    """The agent writes where it is into a note."""

    name = "notes"
    env_config_cls = NotesConfig
    default_toolsets = ("terminal", "file")

    @classmethod
    def config_init(cls):
        env = NotesConfig(
            enabled_toolsets=["terminal", "file", "web"],
            disabled_toolsets=None,
            distribution=None,
            max_agent_turns=6,
            max_token_length=512,
            terminal_backend="local",
            terminal_timeout=60,
            tool_pool_size=16,
            purge_job_on_start=True,
            sandbox_image="pool:local",
            not_a_setting=True,
            eval_handling=EvalHandlingEnum.STOP_TRAIN,
            group_size=2,
            total_steps=2,
            ensure_scores_are_not_same=False,
            system_prompt="Write what you are asked for.",
        )
        server = APIServerConfig(
            base_url="https://openrouter.ai/api/v1",
            model_name="someone/model",
            server_type="openai",
            api_key=os.getenv("OPENROUTER_API_KEY", ""),
            health_check=False,
        )
        return env, [server]

    def __init__(self, config, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.rewards = []
        if hasattr(self, "server"):
            self.models = [getattr(server.config, "model_name", None) for server in self.server.servers]

    async def setup(self):
        self.config.terminal_lifetime = 600 + self.config.check_timeout
        self.turn = 0
        print(f"pool of {self.config.tool_pool_size}")

    async def get_next_item(self):
        item = {"place": self.config.places[self.turn % len(self.config.places)], "number": self.turn}
        self.turn += 1
        return item

    def format_prompt(self, item):
        return f"Write the word {item['place']} into ~/note.txt"

    async def compute_reward(self, item, result: AgentResult, ctx: ToolContext):
        try:
            found = ctx.terminal("cat ~/note.txt", timeout=self.config.check_timeout)
            score = float(found["exit_code"] == 0 and found.get("output", "").strip() == item["place"])
        except Exception:
            score = 0.0
        calls = [call["function"]["name"] for message in result.messages for call in message.get("tool_calls") or []]
        self.rewards.append((score, calls))
        return score

    def check(self, item, ctx):
        """Runs on a thread, and uses the sandbox there."""
        ctx.terminal("mkdir -p /checks /logs/verdict")
        ctx.write_file(
            "/checks/run.sh", f'test "$(cat ~/note.txt)" = {item["place"]} && echo 1 > /logs/verdict/reward.txt'
        )
        ctx.terminal("chmod +x /checks/run.sh; bash /checks/run.sh", timeout=self.config.check_timeout)
        folder = Path(os.environ["NOTES_VERDICTS"]) / uuid.uuid4().hex
        ctx.download_dir("/logs/verdict", str(folder))
        reward = folder / "reward.txt"
        return float(reward.read_text()) if reward.exists() else 0.0

    async def one_evaluation(self, item, tools, names):
        task_id = str(uuid.uuid4())
        messages = [{"role": "user", "content": self.format_prompt(item)}]
        try:
            register_task_env_overrides(task_id, {"docker_image": "someone/notes:1", "cwd": "/app"})
            options = {
                "tool_schemas": tools,
                "valid_tool_names": names,
                "max_turns": self.config.max_agent_turns,
                "task_id": task_id,
                "temperature": 0.0,
                "max_tokens": self.config.max_token_length,
                "extra_body": self.config.extra_body,
                "budget_config": self.config.build_budget_config(),
            }
            nodes = []
            if self._use_managed_server():
                async with self.server.managed_server(tokenizer=self.tokenizer, preserve_think_blocks=True) as managed:
                    result = await HermesAgentLoop(server=managed, **options).run(messages)
                    nodes = managed.get_state()["nodes"]
            else:
                result = await HermesAgentLoop(server=self.server, **options).run(messages)
            ctx = ToolContext(task_id)
            where = ctx.terminal("pwd")["output"].strip()
            try:
                reward = await asyncio.get_event_loop().run_in_executor(None, self.check, item, ctx)
            finally:
                ctx.cleanup()
            return {
                "reward": reward,
                "where": where,
                "turns": result.turns_used,
                "nodes": [[len(node.tokens), sum(token != -100 for token in node.masked_tokens)] for node in nodes],
            }
        except Exception as error:
            return {"reward": 0.0, "error": str(error)}
        finally:
            clear_task_env_overrides(task_id)
            cleanup_vm(task_id)

    async def evaluate(self, *args, **kwargs):
        began = time.time()
        tools, names = self._resolve_tools_for_group()
        items = [{"place": place} for place in self.config.places]
        samples = await asyncio.gather(*(self.one_evaluation(item, tools, names) for item in items))
        cleanup_all_environments()
        from environments.agent_loop import _tool_executor

        _tool_executor.shutdown(wait=False, cancel_futures=True)
        print(json.dumps(samples))
        await self.evaluate_log(
            metrics={"eval/mean_reward": sum(sample["reward"] for sample in samples) / len(samples)},
            samples=samples,
            start_time=began,
            end_time=time.time(),
        )

    async def wandb_log(self, wandb_metrics=None):
        wandb_metrics = wandb_metrics or {}
        wandb_metrics["train/mean"] = sum(score for score, _ in self.rewards) / max(1, len(self.rewards))
        await super().wandb_log(wandb_metrics)


if __name__ == "__main__":
    NotesEnv.cli()
