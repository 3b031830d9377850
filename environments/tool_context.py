"""`ToolContext` under the name that Hermes environments import it by."""

from lachesis.agent.tool_context import ToolContext

__all__ = ["ToolContext"]
