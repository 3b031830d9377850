"""The compression of a chat's context, which waits for the end of a replay, and whose summaries nobody answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from lachesis.loop.context_edits import Compression, ContextEdit, CountedMessages, RolloutCompression
from lachesis.loop.loop import PlayedRollout


class CompressedChat(Protocol):
    """What the compression needs of a chat."""

    def play(self, rollout: PlayedRollout) -> None: ...
    def may_compress(self) -> bool: ...
    async def compress(self, run: Callable[[], Awaitable[None]]) -> None: ...


class ChatCompression:
    """Tells the chat of its rollout, and of each compression. `own` is that of the environment, if it has one."""

    def __init__(self, chat: CompressedChat, own: Compression | None) -> None:
        self._chat, self._own = chat, own

    def of_rollout(self, rollout: PlayedRollout, *, max_resamples: int) -> RolloutCompression:
        self._chat.play(rollout)
        own = self._own.of_rollout(rollout, max_resamples=max_resamples) if self._own is not None else None
        return _OfRollout(self._chat, own)


class _OfRollout:
    def __init__(self, chat: CompressedChat, own: RolloutCompression | None) -> None:
        self._chat, self._own = chat, own
        self.size: CountedMessages = own.size if own is not None else _Uncounted()

    @property
    def edits(self) -> Sequence[ContextEdit]:
        return self._own.edits if self._own is not None else ()

    @property
    def broken(self) -> Exception | None:
        return self._own.broken if self._own is not None else None

    @property
    def due(self) -> bool:
        return self._own is not None and self._own.due and self._chat.may_compress()

    async def run(self) -> None:
        assert self._own is not None
        await self._chat.compress(self._own.run)

    def copied(self, rollout: PlayedRollout) -> RolloutCompression:
        return _OfRollout(self._chat, self._own.copied(rollout) if self._own is not None else None)


class _Uncounted:
    """Where nothing is compressed, nobody asks for a size."""

    def add(self, entry: object) -> None: ...
    def cut(self, length: int) -> None: ...
    def replace(self, start: int, stop: int, *messages: object) -> None: ...
