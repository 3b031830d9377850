"""Sandboxes on another machine, over one ssh connection."""

from .backend import SshBackend

__all__ = ["SshBackend"]
