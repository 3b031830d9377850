"""The synchronous `ToolContext` under the name that Hermes environments import it by."""

from lachesis_compat.synchronous import ToolContext

__all__ = ["ToolContext"]
