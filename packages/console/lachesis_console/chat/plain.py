"""A chat without an environment: the agent's tools in a sandbox, with the settings of `cli-config.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from lachesis.base_env import HermesAgentBaseEnv
from lachesis_console.agent.cli_config import environment_settings
from lachesis_console.agent.recording import record_trajectory
from lachesis_messages.messages import Message

NAME: Final = "chat"


class PlainChat(HermesAgentBaseEnv):
    """The person asks, and nothing is scored."""

    name = NAME

    async def get_next_item(self) -> Any:
        return None  # the first message, which the person types

    def format_prompt(self, item: Mapping[str, str]) -> str:
        return item["prompt"]

    def compute_reward(self, item: Any, result: Any, ctx: Any) -> None:  # type: ignore[override]
        return None

    def reference_policy(self) -> Any:
        return lambda messages, tools: Message("assistant", "I am the reference policy of a chat: I answer nothing.")


def config_flags(config: Mapping[str, Any]) -> list[str]:
    """The flags that a configuration of `load_cli_config` stands for."""
    model, agent = config["model"], config["agent"]
    given = {
        "openai.model_name": model["default"],
        "openai.base_url": model["base_url"],
        "openai.api_key": model["api_key"] or None,
        "env.enabled_toolsets": config["toolsets"],
        "env.system_prompt": agent["system_prompt"],
        **{f"env.{name}": value for name, value in environment_settings(config).items()},
    }
    return [f"--{name}={_written(value)}" for name, value in given.items() if value is not None]


def _written(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True, width=10**6).split("\n...")[0].strip()
    )


def save(prompt: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], model: str) -> str:
    """Append the conversation to a file of trajectories; its path. Without an answer at the end it is a failed one."""
    ended = bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return str(record_trajectory([{"role": "user", "content": prompt}, *messages], tools, model=model, completed=ended))
