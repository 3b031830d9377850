"""A device whose calls are those of a context, without sandboxes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from lachesis.rewards.call_scope import CallScope, current_scope
from lachesis.rewards.calls import called, in_call_scope, result_of
from lachesis.tool_context.context_results import DictReply


class Device:
    """Answers late. Knows how many of its calls ran at once, and which were cancelled."""

    def __init__(self, scope: CallScope | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.scope = scope
        self.at_once = self.most = 0
        self.done: list[Any] = []
        self.cancelled: list[Any] = []

    def get(self, value: Any, seconds: float = 0.01) -> Any:
        return self._given(called("ctx.get"), value, seconds)

    def _given(self, what: str, value: Any, seconds: float) -> Any:
        make = functools.partial(self._get, value, seconds)
        return result_of(what, make, self.loop, current_scope() or self.scope)

    async def _get(self, value: Any, seconds: float) -> Any:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(value)
            raise
        finally:
            self.at_once -= 1
        if isinstance(value, Exception):
            raise value
        self.done.append(value)
        return DictReply(value=value)


def in_scope(function: Callable[[Device], Any]) -> Callable[[], Any]:
    """The test as a coroutine of an environment, with a device."""

    @functools.wraps(function)
    async def test() -> None:
        await in_call_scope(function(Device()), name="test")

    del test.__wrapped__  # type: ignore[attr-defined]  # pytest would look for its arguments
    return test


def plainly(device: Device, value: Any) -> Any:
    return device.get(value)["value"]
