"""Images in the prompts of the fake server: one placeholder becomes as many as the image has patches."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

PATCH: Final = 28
"""Pixels of a patch in each direction, as in Qwen2.5-VL."""
LEAST: Final = 4
"""Tokens of the smallest image: that model enlarges it."""
_PNG: Final = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image in a prompt, and its place among the ids."""

    start: int
    tokens: int
    sha256: str
    width: int
    height: int

    @property
    def seen_as(self) -> int:
        """In place of its placeholders in what the model sees: so its answers depend on the image."""
        return int(self.sha256[:8], 16)


def with_images(
    ids: Sequence[int], urls: Sequence[object], placeholder: int | None, *, strict: bool
) -> tuple[list[int], tuple[ShownImage, ...]]:
    """The ids with every image expanded, and the images. Placeholders that are left over stay, unless `strict`.

    Raises ValueError with a message as of vLLM.
    """
    if placeholder is None:
        raise ValueError("At most 0 image(s) may be provided in one prompt.")
    found: list[int] = []
    images: list[ShownImage] = []
    for token in ids:
        if token != placeholder or len(images) == len(urls):
            found.append(token)
            continue
        width, height, digest = _read(urls[len(images)])
        tokens = max(LEAST, -(-width // PATCH) * -(-height // PATCH))
        images.append(ShownImage(len(found), tokens, digest, width, height))
        found += [placeholder] * tokens
    left = ids.count(placeholder) - len(images)
    if len(images) != len(urls) or (strict and left):
        raise ValueError(
            f"Expected there to be {len(urls)} prompt placeholders corresponding to {len(urls)} image items, but "
            f"instead found {len(images) + left} prompt placeholders!"
        )
    return found, tuple(images)


def seen_ids(ids: Sequence[int], images: Sequence[ShownImage]) -> list[int]:
    """The ids with which the model's distribution is computed."""
    seen = list(ids)
    for image in images:
        seen[image.start : image.start + image.tokens] = [image.seen_as] * image.tokens
    return seen


def _read(url: object) -> tuple[int, int, str]:
    try:
        head, _, data = str(url).partition(";base64,")
        raw = base64.b64decode(data, validate=True) if head.startswith("data:image/") else b""
    except binascii.Error:
        raw = b""
    if not raw.startswith(_PNG) or len(raw) < 24:
        raise ValueError("cannot identify image file: the fake server reads PNG, as data:image/png;base64,...")
    return int.from_bytes(raw[16:20]), int.from_bytes(raw[20:24]), sha256(raw).hexdigest()
