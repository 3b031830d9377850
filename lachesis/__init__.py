"""Environments for tool-calling language models. This module is the public interface; `docs/api.md` describes it.

    from lachesis import HermesAgentBaseEnv

A name is imported when it is first used, so `import lachesis` costs nothing.
"""

from typing import TYPE_CHECKING

from lachesis.lazy import lazy_names

if TYPE_CHECKING:
    from backends import SandboxSpec
    from backends.errors import LachesisError
    from lachesis.agent.loop import HermesAgentLoop
    from lachesis.agent.outcome import Outcome
    from lachesis.agent.reference_server import Policy
    from lachesis.agent.result import AgentResult
    from lachesis.agent.reward import Reward, reward
    from lachesis.agent.tool_context import ToolContext
    from lachesis.base_env import HermesAgentBaseEnv
    from lachesis.environments.checking import check_environment
    from lachesis.runs.dataset_rows import load_rows
    from lachesis.runs.server_settings import ServerConfig
    from lachesis.runs.settings import HermesAgentEnvConfig
    from lachesis.tools.builtin import BUILTIN_TOOLS
    from lachesis.tools.dispatch import ToolResult
    from lachesis.tools.tool_registry import ToolRegistry, tool
    from lachesis.tools.tool_session import ToolSession
    from lachesis.trajectories.history import MessageHistory
    from lachesis.trajectories.messages import Message, ToolCall
    from lachesis_tokens.endpoint.agent_program import AgentProgramEnv
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "backends": ["SandboxSpec"],
            "lachesis.agent.loop": ["HermesAgentLoop"],
            "lachesis.agent.outcome": ["Outcome"],
            "lachesis.agent.result": ["AgentResult"],
            "lachesis.agent.reward": ["Reward", "reward"],
            "lachesis.agent.tool_context": ["ToolContext"],
            "lachesis.base_env": ["HermesAgentBaseEnv"],
            "lachesis.environments.checking": ["check_environment"],
            "lachesis_tokens.endpoint.agent_program": ["AgentProgramEnv"],
            "backends.errors": ["LachesisError"],
            "lachesis.runs.dataset_rows": ["load_rows"],
            "lachesis.runs.server_settings": ["ServerConfig"],
            "lachesis.runs.settings": ["HermesAgentEnvConfig"],
            "lachesis.agent.reference_server": ["Policy"],
            "lachesis.tools.builtin": ["BUILTIN_TOOLS"],
            "lachesis.tools.dispatch": ["ToolResult"],
            "lachesis.tools.tool_registry": ["ToolRegistry", "tool"],
            "lachesis.tools.tool_session": ["ToolSession"],
            "lachesis.trajectories.history": ["MessageHistory"],
            "lachesis.trajectories.messages": ["Message", "ToolCall"],
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
    "ToolCall",
    "ToolContext",
    "ToolRegistry",
    "ToolResult",
    "ToolSession",
    "check_environment",
    "load_rows",
    "reward",
    "tool",
]
