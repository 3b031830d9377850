"""Kernel surface: calls that ordinary programs do not need and that ways out of sandboxes have used."""

from __future__ import annotations

from .attack import Family
from .inside import kernel

kernel_surface = Family("kernel")
kernel_surface.programs(kernel)
