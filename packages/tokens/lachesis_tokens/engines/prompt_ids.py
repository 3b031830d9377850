"""The ids of a prompt for a request: JSON text for the server, numbers only on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lachesis_client.affinity import Route
from lachesis_messages.images import PlacedImage
from lachesis_messages.replay import RoutedExperts
from lachesis_messages.tokens import PromptChecked, TokenPrefix


class PromptIds(Sequence[int]):
    """Token ids with their JSON text.

    A rollout sends its whole, long prompt with every turn. The text is the one that the prefix keeps; this object keeps
    none of it.
    """

    __slots__ = ("_ids", "_prefix", "checked", "image_tokens", "known_experts", "route")

    def __init__(self, ids: Sequence[int] | TokenPrefix) -> None:
        self._prefix = ids if isinstance(ids, TokenPrefix) else TokenPrefix(ids)
        self._ids: list[int] | None = None
        self.checked: PromptChecked = "none"
        """What the answer that is being read confirms. It holds only until the next `await`: requests share prompts."""
        self.image_tokens: tuple[int, ...] = ()
        """The tokens of each image in the answer that is being read."""
        self.route: Route | None = None
        """The way that the `Balancer` chose."""
        self.known_experts: RoutedExperts | None = None
        """Those that end with the last sampled token in the prompt. The server reports only what comes after them."""

    @property
    def experts_start(self) -> int:
        """The first position whose experts the server reports."""
        return 0 if self.known_experts is None else self.known_experts.end

    @property
    def prefix(self) -> TokenPrefix:
        """The same ids, with the images in them."""
        return self._prefix

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """Those in the ids, in order."""
        return self._prefix.images

    @property
    def has_new_images(self) -> bool:
        """Whether the ids have a single placeholder for an image, because no server made more of it yet."""
        images = self._prefix.images
        return bool(images) and not all(placed.tokens for placed in images)

    @property
    def sent(self) -> PromptIds:
        """The ids for the server, which takes one placeholder an image."""
        if not self.images:
            return self
        from lachesis_tokens.prompts.prompt_images import collapsed  # loaded with the prompt that has the images

        return PromptIds(collapsed(self._prefix))

    @property
    def there(self) -> TokenPrefix:
        """The prompt as the server that answered has it."""
        if not self.image_tokens:
            return self._prefix
        from lachesis_tokens.prompts.prompt_images import expanded

        return expanded(self._prefix, self.image_tokens)

    def json_pieces(self) -> list[bytes | memoryview]:
        """A compact JSON list, in pieces. A request uses them to send the prompt and to find its echo."""
        return self._prefix.json_pieces()

    @property
    def ids(self) -> list[int]:
        """As numbers, created on first use."""
        if self._ids is None:
            self._ids = self._prefix.ids
        return self._ids

    def __len__(self) -> int:
        return self._prefix.length

    def __getitem__(self, index: Any) -> Any:
        return self.ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == len(self) and list(other) == self.ids

    __hash__ = None  # type: ignore[assignment]
