"""The synchronous `ToolContext` under the name that Hermes environments import it by."""

from lachesis_compat.synchronous import SynchronousToolContext as ToolContext

__all__ = ["ToolContext"]
