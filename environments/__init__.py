"""Environments that run as scripts, and the Hermes stack under the names that its environments import.

Folders `environments` elsewhere on `sys.path` are part of it: an environment next to others can import them.
"""

from pkgutil import extend_path
from typing import TYPE_CHECKING

from backends.lazy import lazy_names  # importing lachesis lets the old paths be found

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from environments.agent_loop import AgentResult
    from environments.hermes_base_env import HermesAgentBaseEnv, HermesAgentEnvConfig
    from environments.tool_context import ToolContext
    from lachesis import HermesAgentLoop
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "environments.agent_loop": ["AgentResult", "HermesAgentLoop"],
            "environments.hermes_base_env": ["HermesAgentBaseEnv", "HermesAgentEnvConfig"],
            "environments.tool_context": ["ToolContext"],
        },
    )

__all__ = ["AgentResult", "HermesAgentBaseEnv", "HermesAgentEnvConfig", "HermesAgentLoop", "ToolContext"]
