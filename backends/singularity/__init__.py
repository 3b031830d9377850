"""Sandboxes in instances of apptainer, which singularity is called today."""

from .backend import Installation, SingularityBackend, command

__all__ = ["Installation", "SingularityBackend", "command"]
