"""Images in prompts that are sent as ids: their placeholders, and how a server expands them.

Templates in the shape of Qwen-VL's write `<|vision_start|><|image_pad|><|vision_end|>` for an image: one placeholder
between two tokens. Servers take ids with this one placeholder together with the images, replace it by as many as the
image has patches, and repeat the ids that they made. Nobody can tell a placeholder that a model sampled from one of an
image, so a prompt with images has no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lachesis_client.errors import PromptError, TurnRejected
from lachesis_messages.images import MessageImage, PlacedImage, image_urls
from lachesis_messages.responses import Node
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.templates.special_tokens import SpecialTokensInText


class ImagePlaces:
    """Finds the images of messages among the ids that a template writes for them.

    `placeholder` is the id that stands for an image, `text` its text.
    """

    def __init__(self, placeholder: int, text: str, policy: SpecialTokensInText) -> None:
        self.placeholder, self.text = placeholder, text
        self._policy = policy

    def placed(self, ids: Sequence[int], nodes: Iterable[Node], start: int = 0) -> tuple[PlacedImage, ...]:
        """The images of these messages, whose rendering has these ids, the first of them at `start`."""
        urls = [url for node in nodes for url in image_urls(node.item.get("content"))]
        if not urls:
            return ()
        try:
            images = [MessageImage.from_url(url) for url in urls]
        except ValueError as error:
            raise PromptError("the prompt", str(error), "put the data of the image into the message") from error
        at = [place for place, token in enumerate(ids) if token == self.placeholder]
        if len(at) != len(images):
            raise PromptError(
                "the chat template",
                f"it wrote {self.text} {len(at)} times for {len(images)} images",
                "put images into user messages, or set chat_template to one that writes each of them once",
            )
        return tuple(
            PlacedImage(image, start + place, 0, self.placeholder) for image, place in zip(images, at, strict=True)
        )

    def check(self, prompt: TokenPrefix) -> None:
        """Raise if a prompt with images has further placeholders."""
        if not prompt.images or prompt.ids.count(prompt.images[0].placeholder) == sum(
            image.end - image.start for image in prompt.images
        ):
            return
        if self._policy == "as_is":
            reason, step = f"a text spells {self.text}", 'set special_tokens_in_text to "encode_as_text"'
            raise PromptError("the prompt", reason, step)
        raise TurnRejected("the prompt", f"the model sampled {self.text}, which stands for an image", "sample again")


def require_images(engines: Iterable[object]) -> None:
    """Raise PromptError if one of these token engines takes no images: any of them may get the prompt."""
    for engine in engines:
        if not getattr(engine, "takes_images", False):
            kind = getattr(engine, "kind", type(engine).__name__)
            raise PromptError(
                "the prompt",
                f"it contains an image, and the API of the engine {kind!r} takes text ids only",
                "use --openai.engine vllm-generate or sglang, or a chat server (Phase 1)",
            )


def collapsed(prompt: TokenPrefix) -> list[int]:
    """The ids for the server: one placeholder an image. O(length)."""
    ids, found, done = prompt.ids, [], 0
    for placed in prompt.images:
        found += [*ids[done : placed.start], placed.placeholder]
        done = placed.end
    return found + ids[done:]


def expanded(prompt: TokenPrefix, tokens: Sequence[int]) -> TokenPrefix:
    """The prompt with as many tokens for each image; itself if it has no new images. Pieces without any are shared."""
    if not tokens:
        return prompt
    pieces: list[TokenPrefix] = []
    grown: TokenPrefix | None = prompt
    while grown is not None and not all(placed.tokens for placed in grown.images):
        pieces.append(grown)
        grown = grown.parent
    for piece in reversed(pieces):
        number, base = (0, 0) if grown is None else (len(grown.images), grown.length)
        first, own, done = piece.length - piece.own_length, piece.own_ids, 0
        ids: list[int] = []
        images: list[PlacedImage] = []
        for placed, count in zip(piece.images[number:], tokens[number:], strict=False):
            ids += own[done : placed.start - first]
            images.append(replace(placed, start=base + len(ids), tokens=count))
            ids += [placed.placeholder] * count
            done = placed.end - first
        grown = TokenPrefix([*ids, *own[done:]], grown, tuple(images))
    assert grown is not None
    return grown


def expansion(prompt: TokenPrefix, echoed: Sequence[Any]) -> tuple[int, ...]:
    """The tokens of each image, from the ids that the server repeats.

    Raises:
        ValueError: they are not the prompt's, with one or more placeholders for each image, and as many as before for
            an image that was sent before.
    """
    ids, found, sent, came = prompt.ids, [], 0, 0
    for number, placed in enumerate(prompt.images):
        came += _same(ids[sent : placed.start], echoed, came, sent)
        count = next((at for at, token in enumerate(echoed[came:]) if token != placed.placeholder), len(echoed) - came)
        if count == 1 and not placed.tokens:  # models have a least size of several tokens
            raise ValueError(f"image {number} was left as it is, so the model did not see it")
        if not count or placed.tokens not in (0, count):
            before = f", and {placed.tokens} before" if placed.tokens else ""
            raise ValueError(f"image {number} has {count} tokens{before}")
        found.append(count)
        came, sent = came + count, placed.end
    came += _same(ids[sent:], echoed, came, sent)
    if came != len(echoed):
        raise ValueError(f"{len(echoed) - came} tokens follow the prompt")
    return tuple(found)


def _same(ids: Sequence[int], echoed: Sequence[Any], came: int, sent: int) -> int:
    if list(echoed[came : came + len(ids)]) != ids:
        raise ValueError(f"the ids from {sent} on came back as others")
    return len(ids)
