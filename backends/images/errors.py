"""The error of images."""

from __future__ import annotations

from backends.errors import BackendUnavailable


class ImageError(BackendUnavailable):
    """An image is not available, or not on this machine. The message names the reason and the next step, and the file,
    line and instruction where there is one."""


def refused(where: str, reason: str, step: str) -> ImageError:
    return ImageError(f"{where}: {reason}. Next step: {step}")
