"""Sandboxes of Modal."""

from .backend import ModalBackend, ModalSandbox

__all__ = ["ModalBackend", "ModalSandbox"]
