"""Contexts that are called without `await` in an `async def`.

The interface of the removed Hermes stack is synchronous, and its environments call it inside `async def`. Such a call
stops the coroutine (see `driven`): everything else goes on meanwhile, and time limits and cancellation reach the
coroutine at the call. A result may still be awaited, and gives itself.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import lachesis
from lachesis.rewards.call_scope import CallScope, Runs, ScopedCall
from lachesis.rewards.calls import in_call_scope, result_of
from lachesis.tool_context.context_results import DictReply, FileText, Replies
from lachesis_compat.synchronous.driven import Driven, current_runner, stop_for
from lachesis_tools import ToolResult
from lachesis_tools.json_results import as_json

T = TypeVar("T")

_ANSWERS: Mapping[str, Callable[[OSError], Any]] = {
    "write_file": DictReply.failed,
    "upload_file": DictReply.failed,
    "download_file": DictReply.failed,
    "upload_dir": Replies.failed,
    "download_dir": Replies.failed,
}
"""Methods that answer with an error where new code meets an exception."""


class SynchronousToolContext(lachesis.ToolContext):
    """The context of the removed stack: an `async def` calls it without `await`."""

    runs: ClassVar[Runs] = Driven

    def _given(self, method: str, what: str, make: Callable[[], Any], scope: CallScope | None) -> Any:
        raises = (scope is not None and scope.plain) or self.shared.before_agent
        try:
            result = blocking(result_of(what, make, self._calls.loop, scope))
        except OSError as error:
            if raises or method not in _ANSWERS or isinstance(error, TimeoutError):
                raise
            return _ANSWERS[method](error)
        if isinstance(result, FileText):
            result.keys_only = not raises
        return result

    async def _tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """With the text as JSON, as `handle_function_call` gives it."""
        result = await super()._tool(name, arguments)
        return replace(result, content=as_json(name, result.content))


def blocking(result: T | ScopedCall[T]) -> T | ScopedCall[T]:
    """The result of a call, for which the coroutine around stops; the call itself where nothing can stop."""
    runner = current_runner() if isinstance(result, ScopedCall) else None
    return result if runner is None or not isinstance(result, ScopedCall) else stop_for(result, runner)


async def with_blocking_calls(coroutine: Coroutine[Any, Any, T], *, name: str = "the environment") -> T:
    """The result of a coroutine of the environment, which uses contexts of this kind.

    Args:
        name: what runs, for messages: "my-env: report".

    Raises:
        BackendError: a sandbox failed in one of its calls, even if the coroutine caught that.
        RewardError: a call was never awaited, or has not ended.
    """
    return await in_call_scope(coroutine, name=name, runs=Driven)
