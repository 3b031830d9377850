"""Sandboxes of Modal."""

from .backend import ModalBackend
from .sandbox import ModalSandbox

__all__ = ["ModalBackend", "ModalSandbox"]
