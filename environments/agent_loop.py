"""The agent loop under the name that Hermes environments import it by."""

from lachesis.agent.loop import HermesAgentLoop
from lachesis.agent.result import AgentResult, ToolError

__all__ = ["AgentResult", "HermesAgentLoop", "ToolError"]
