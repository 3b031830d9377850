"""Images of a conversation, and the tokens that stand for them among the ids of a prompt.

A template writes one placeholder token for each image, and the server replaces it by as many as the image needs. A
prompt that was not sent yet has the single placeholder; the ids of a sample have the server's placeholders, which the
model saw and which a trainer's forward pass expects.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

_DATA_URL: Final = re.compile(r"data:(image/[\w.+-]+);base64,")


@dataclass(frozen=True, slots=True)
class MessageImage:
    """An image by its content."""

    sha256: str
    """Hex digest of its bytes."""
    url: str = field(default="", repr=False, compare=False)
    """`data:image/...;base64,...`; empty in a sample that was read without its data."""

    @classmethod
    def from_url(cls, url: object) -> MessageImage:
        """Reads a data URL. Raises ValueError for any other URL, including web URLs, whose content may change."""
        found = _DATA_URL.match(url) if isinstance(url, str) else None
        if not isinstance(url, str) or found is None:
            shown = f"{url[:40]!r}" if isinstance(url, str) else type(url).__name__
            raise ValueError(f"an image is given by {shown}, and not by its data (data:image/...;base64,...)")
        try:
            return cls(sha256(base64.b64decode(url[found.end() :], validate=True)).hexdigest(), url)
        except binascii.Error as error:
            raise ValueError(f"the data of an image is not base64: {error}") from error


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and its place among the ids of a prompt or a sample."""

    image: MessageImage
    start: int
    """Of its first token."""
    tokens: int
    """How many the server made of it; 0 before the server said so: the ids have one placeholder."""
    placeholder: int
    """The id of each of its tokens."""

    @property
    def end(self) -> int:
        """The index after its tokens."""
        return self.start + max(1, self.tokens)

    def to_record(self) -> dict[str, Any]:
        """Plain JSON, without the data."""
        return {"sha256": self.image.sha256, "start": self.start, "tokens": self.tokens, "id": self.placeholder}

    @classmethod
    def from_record(cls, record: Any, data: Mapping[str, str] | None = None) -> PlacedImage:
        """Reads `to_record()`. `data` are URLs by digest. Raises ValueError."""
        names = {"sha256": str, "start": int, "tokens": int, "id": int}
        if not isinstance(record, Mapping) or any(type(record.get(name)) is not kind for name, kind in names.items()):
            raise ValueError(f"{str(record)[:80]} is not an image with sha256, start, tokens and id")
        digest = record["sha256"]
        url = (data or {}).get(digest, "")
        if url and MessageImage.from_url(url).sha256 != digest:
            raise ValueError(f"the data of image {digest[:12]} has another digest")
        return cls(MessageImage(digest, url), record["start"], record["tokens"], record["id"])


def image_urls(content: object) -> Iterator[object]:
    """The URLs of the images in a message's content, in order: OpenAI's `image_url` parts."""
    if isinstance(content, (list, tuple)):
        for part in content:
            if isinstance(part, Mapping) and part.get("type") == "image_url":
                given = part.get("image_url")
                yield given.get("url") if isinstance(given, Mapping) else given


def image_data(each: Iterable[Iterable[PlacedImage]]) -> list[dict[str, str]] | None:
    """For each sample the URLs, by digest, of its images that no earlier one has; None if there are no URLs."""
    seen: set[str] = set()
    found: list[dict[str, str]] = []
    for images in each:
        urls = {placed.image.sha256: placed.image.url for placed in images if placed.image.url}
        new = {digest: url for digest, url in urls.items() if digest not in seen}
        seen |= new.keys()
        found.append(new)
    return found if seen else None


def images_digest(images: Sequence[PlacedImage]) -> str:
    """Hex digest of images in their places; "" for none."""
    places = [f"{placed.image.sha256} {placed.start} {placed.tokens}" for placed in images]
    return sha256("\n".join(places).encode()).hexdigest()[:32] if places else ""


def joined_data(each: Iterable[object]) -> dict[str, str]:
    """All URLs by digest of what `image_data` gave."""
    return {name: url for entry in each if isinstance(entry, Mapping) for name, url in entry.items() if url}


def with_image_data(samples: Iterable[Any]) -> list[Any]:
    """Shallow copies of the records of a group's samples, each with the data of all its images.

    In a group the data of an image is in one sample only, so that one taken out of it may lack its own. What is not the
    record of a sample comes back as it is.
    """
    records = [dict(each) if isinstance(each, Mapping) else each for each in samples]
    data = joined_data(each.get("image_data") for each in records if isinstance(each, dict))
    for each in records if data else ():
        images = each.get("images") if isinstance(each, dict) else None
        if isinstance(images, (list, tuple)):
            digests = [image.get("sha256") for image in images if isinstance(image, Mapping)]
            each["image_data"] = {digest: url for digest, url in data.items() if digest in digests}
    return records


def with_data_once(samples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The opposite, as it is in a group: the data of an image is in the first sample that has it."""
    seen: set[str] = set()
    records = [dict(each) for each in samples]
    for each in records:
        data = each.pop("image_data", None) or {}
        if new := {digest: url for digest, url in data.items() if digest not in seen}:
            each["image_data"] = new
        seen |= new.keys()
    return records


def image_problems(
    images: Sequence[PlacedImage], tokens: Sequence[int], trained: Iterable[tuple[int, int, int, str]]
) -> list[str]:
    """Why these images do not belong to these tokens. `trained`: turn, start, end and `images_digest` of each span."""
    found, at = [], 0
    for number, placed in enumerate(images):
        if not (at <= placed.start < placed.end <= len(tokens) and placed.tokens > 0):
            return [f"images[{number}] is out of order, empty or beyond the end"]
        if not placed.image.url:
            found.append(f"the data of images[{number}] ({placed.image.sha256[:12]}) is missing")
        if set(tokens[placed.start : placed.end]) != {images[0].placeholder}:
            found.append(f"images[{number}] is at tokens {placed.start} to {placed.end}, which are not all its id")
        at = placed.end
    for turn, start, end, digest in trained:
        if digest != images_digest([placed for placed in images if placed.start < start]):
            found.append(f"turn {turn} after other images than when it was sampled")
        if images and images[0].placeholder in tokens[start:end]:
            found.append(f"turn {turn} sampled the id of images ({images[0].placeholder}), which trainers take for one")
    return found
