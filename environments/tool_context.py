"""`ToolContext` under the name that Hermes environments import it by."""

from lachesis import ToolContext

__all__ = ["ToolContext"]
