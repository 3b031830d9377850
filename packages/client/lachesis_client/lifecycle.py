"""Base classes for objects that an `async with` block closes, or starts and stops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class AsyncCloseable(ABC):
    """An `async with` block closes it."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncService(AsyncCloseable):
    """An `async with` block starts and stops it."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    async def close(self) -> None:
        await self.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self
