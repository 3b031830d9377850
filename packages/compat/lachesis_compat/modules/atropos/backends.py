"""The sandboxes' interface, under its old path."""

from backends import *  # noqa: F403
from backends import __all__ as __all__
