"""The error of images."""

from __future__ import annotations

from backends.errors import BackendUnavailable


class ImageError(BackendUnavailable):
    """An image cannot be had, or not here. The message names the file, line and instruction where there is one, the
    reason, and the next step."""


def refused(where: str, reason: str, step: str) -> ImageError:
    return ImageError(f"{where}: {reason}. Next step: {step}")
