"""Sandboxes in containers of a Docker engine, or of podman."""

from .backend import DockerBackend

__all__ = ["DockerBackend"]
