"""The agent loop under the name that Hermes environments import it by."""

from concurrent.futures import ThreadPoolExecutor

from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.result import ToolError
from lachesis_compat.agent_result import AgentResultOfMessages as AgentResult

__all__ = ["AgentResult", "HermesAgentLoop", "ToolError", "resize_tool_pool"]

_tool_executor = ThreadPoolExecutor(max_workers=1)
"""Tools run on no threads here; old environments shut their pool down when they end."""


def resize_tool_pool(max_workers: int) -> None:
    """Does nothing: tools run on no threads."""
