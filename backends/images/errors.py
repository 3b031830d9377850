"""The error of images."""

from __future__ import annotations

from backends.errors import BackendUnavailable, ExitCode


class ImageError(BackendUnavailable):
    """An image is not available, or not on this machine. The message names the reason and the next step, and the file,
    line and instruction where there is one."""


class NoSuchContext(ImageError):
    """There is no folder, or no Dockerfile in it, of the name that was given."""

    exit_code = ExitCode.SETTINGS


def refused(where: str, reason: str, step: str, kind: type[ImageError] = ImageError) -> ImageError:
    return kind(f"{where}: {reason}. Next step: {step}")
