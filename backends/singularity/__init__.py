"""Sandboxes in instances of apptainer, which singularity is called today."""

from .backend import SingularityBackend
from .installation import Installation, command

__all__ = ["Installation", "SingularityBackend", "command"]
