"""The part of a `ToolContext` that ends what runs, tries something in a copy of the sandbox, and goes back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal, Self

from backends import BackendUnavailable, Sandbox, SandboxCheckpoint, SupportsCheckpoint, SupportsRestore
from lachesis.tool_context.context_calls import ContextCalls, context_method
from lachesis.tool_context.context_results import DictReply
from lachesis_tools import ToolSession
from lachesis_tools.tool_session import with_checkpoints


class Branching:
    """What a `ToolContext` has of `SupportsCheckpoint`."""

    session: Any
    _calls: ContextCalls
    _session: ToolSession
    _given: Callable[..., Any]
    _sandbox: Callable[[], Coroutine[Any, Any, Sandbox]]
    _like_this: Callable[[ToolSession], Self]
    """A context of another sandbox with the same files."""

    @context_method
    async def stop_processes(self) -> DictReply:
        """Kill everything that the agent and earlier calls left running."""
        await (await self._sandbox()).stop_processes()
        return DictReply(success=True)

    @context_method
    async def checkpoint(self, *, running: Literal["error", "left out"] = "error") -> SandboxCheckpoint:
        """What is in the sandbox now, for `fork` and `restore`: its files, and the agent's folder and variables.

        Raises:
            ProcessesRunning: something runs. Call `stop_processes` before, or pass `running="left out"`: processes go
                on in this sandbox, and are not in the checkpoint.
            BackendUnavailable: the backend makes none.
        """
        return await self._branching(await self._sandbox()).checkpoint(running=running)

    @context_method
    async def restore(self, checkpoint: SandboxCheckpoint) -> DictReply:
        """End everything that runs, and go back to a checkpoint of this rollout.

        Raises:
            BackendUnavailable: the backend cannot, and may be able to `fork`.
        """
        sandbox = self._branching(await self._sandbox())
        if not isinstance(sandbox, SupportsRestore):
            raise BackendUnavailable(
                f"task {self._session.task_id!r}: sandboxes of this backend cannot go back. Next step: "
                "`ctx.fork(checkpoint)`, or backend 'local'"
            )
        await sandbox.restore(checkpoint)
        return DictReply(success=True)

    @context_method
    async def fork(self, checkpoint: SandboxCheckpoint | None = None) -> Self:
        """A context of another sandbox, which goes on from `checkpoint`, or else from now, and is removed with this
        rollout or by its `cleanup`. What is done there does not change this sandbox, nor the other way round.

        Raises:
            ProcessesRunning: as `checkpoint`.
        """
        parent = self._branching(await self._sandbox())
        child = self._session.another(lambda: parent.fork(checkpoint))
        await child.sandbox()
        return self._like_this(child)

    def _branching(self, sandbox: Sandbox) -> SupportsCheckpoint:
        if self.session is not None:
            raise BackendUnavailable(
                f"task {self._session.task_id!r}: what `session(item)` has opened is in no checkpoint, so a copy of "
                "the sandbox would not go with it. Next step: keep that state in the sandbox"
            )
        return with_checkpoints(sandbox)
