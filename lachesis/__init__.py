"""Environments for tool-calling language models. This module is the public interface; `docs/api.md` describes it.

    from lachesis import HermesAgentBaseEnv

A name is imported when it is first used, so `import lachesis` costs nothing.
"""

from typing import TYPE_CHECKING

from backends.lazy import lazy_names

if TYPE_CHECKING:
    from backends import SandboxSpec
    from backends.errors import LachesisError
    from lachesis.base_env import HermesAgentBaseEnv
    from lachesis.loop.loop import HermesAgentLoop
    from lachesis.loop.outcome import Outcome
    from lachesis.loop.result import AgentResult
    from lachesis.loop.rollout_session import rollout_session
    from lachesis.rewards.reward import Reward, reward
    from lachesis.runs.dataset_rows import load_rows
    from lachesis.runs.own_process import run
    from lachesis.runs.reference_policy import Policy
    from lachesis.settings.server_settings import ServerConfig
    from lachesis.settings.settings import HermesAgentEnvConfig
    from lachesis.tool_context.tool_context import ToolContext
    from lachesis_console.checking import check_environment
    from lachesis_messages.history import MessageHistory
    from lachesis_messages.messages import Message, ToolCall
    from lachesis_tokens.endpoint.agent_program import AgentProgramEnv
    from lachesis_tools.builtin import BUILTIN_TOOLS
    from lachesis_tools.dispatch import ToolResult
    from lachesis_tools.tool_registry import Tool, ToolFailure, ToolRegistry, tool
    from lachesis_tools.tool_session import ToolSession
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "backends": ["SandboxSpec"],
            "lachesis.loop.loop": ["HermesAgentLoop"],
            "lachesis.loop.outcome": ["Outcome"],
            "lachesis.loop.result": ["AgentResult"],
            "lachesis.loop.rollout_session": ["rollout_session"],
            "lachesis.rewards.reward": ["Reward", "reward"],
            "lachesis.tool_context.tool_context": ["ToolContext"],
            "lachesis.base_env": ["HermesAgentBaseEnv"],
            "lachesis_console.checking": ["check_environment"],
            "lachesis_tokens.endpoint.agent_program": ["AgentProgramEnv"],
            "backends.errors": ["LachesisError"],
            "lachesis.runs.dataset_rows": ["load_rows"],
            "lachesis.settings.server_settings": ["ServerConfig"],
            "lachesis.settings.settings": ["HermesAgentEnvConfig"],
            "lachesis.runs.own_process": ["run"],
            "lachesis.runs.reference_policy": ["Policy"],
            "lachesis_tools.builtin": ["BUILTIN_TOOLS"],
            "lachesis_tools.dispatch": ["ToolResult"],
            "lachesis_tools.tool_registry": ["Tool", "ToolFailure", "ToolRegistry", "tool"],
            "lachesis_tools.tool_session": ["ToolSession"],
            "lachesis_messages.history": ["MessageHistory"],
            "lachesis_messages.messages": ["Message", "ToolCall"],
        },
    )

__all__ = [
    "BUILTIN_TOOLS",
    "AgentProgramEnv",
    "AgentResult",
    "HermesAgentBaseEnv",
    "HermesAgentEnvConfig",
    "HermesAgentLoop",
    "LachesisError",
    "Message",
    "MessageHistory",
    "Outcome",
    "Policy",
    "Reward",
    "SandboxSpec",
    "ServerConfig",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolFailure",
    "ToolRegistry",
    "ToolResult",
    "ToolSession",
    "check_environment",
    "load_rows",
    "reward",
    "rollout_session",
    "run",
    "tool",
]
