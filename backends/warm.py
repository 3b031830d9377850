"""Sandboxes that are used again: each lease gets one that is as it was before any lease."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial

from .base import Backend, Sandbox, SandboxCheckpoint, SupportsReset
from .errors import BackendUnavailable, LachesisError
from .lease import Lease
from .spec import SandboxSpec

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Warm:
    sandbox: Sandbox
    base: SandboxCheckpoint
    """What it is like before a lease."""


class WarmSandboxes:
    """A lessor that keeps sandboxes for the next leases of the same specification, labels aside.

    A sandbox that comes back is reset: what ran is ended, its files are dropped as a whole, and it is verified that
    nothing of the lease is left. One that cannot be reset is removed. Where sandboxes cannot be reset, every lease gets
    a new one.
    """

    def __init__(self, backend: Backend, most: int) -> None:
        """
        Args:
            most: sandboxes that are kept while nobody uses them.
        """
        self.backend = backend
        self._most = most
        self._idle: dict[str, list[_Warm]] = {}
        self._bases: dict[str, SandboxCheckpoint] = {}
        self._closed = False

    async def lease(self, spec: SandboxSpec) -> Lease:
        """See `Lessor.lease`."""
        kind = repr(replace(spec, labels={}))
        while idle := self._idle.get(kind):
            warm = idle.pop()
            if await self._reset(warm, spec):
                return self._lent(kind, warm, spec)
        sandbox = await self.backend.create(spec)
        single = Lease(sandbox, sandbox.close, lifetime=spec.lifetime)
        if not isinstance(sandbox, SupportsReset):
            return single
        try:
            if kind not in self._bases:
                self._bases[kind] = await sandbox.checkpoint()
            base = self._bases[kind]
            if base.sandbox != sandbox.id:  # all share the files of the first one
                await sandbox.restore(base)
        except BackendUnavailable:  # the backend can, and not here
            return single
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return self._lent(kind, _Warm(sandbox, base), spec)

    async def make_room(self, spec: SandboxSpec | None, most: int) -> None:
        """Before a sandbox of `spec` is made, or of none: remove idle ones until there are at most `most`."""
        if spec is None or not self._idle.get(repr(replace(spec, labels={}))):
            every = [(kept, warm) for kept in self._idle.values() for warm in kept]
            removed = every[: max(0, len(every) - most)]
            for kept, warm in removed:  # before anything is awaited: others look for room at the same time
                kept.remove(warm)
            await asyncio.shield(asyncio.gather(*(warm.sandbox.close() for _, warm in removed)))

    def _lent(self, kind: str, warm: _Warm, spec: SandboxSpec) -> Lease:
        return Lease(warm.sandbox, partial(self._given_back, kind, warm, spec), lifetime=spec.lifetime)

    async def _given_back(self, kind: str, warm: _Warm, spec: SandboxSpec) -> None:
        # Others may come back while this one is reset.
        if self._has_room() and await self._reset(warm, replace(spec, labels={})) and self._has_room():
            self._idle.setdefault(kind, []).append(warm)
        else:
            await warm.sandbox.close()

    def _has_room(self) -> bool:
        return not self._closed and sum(map(len, self._idle.values())) < self._most

    async def _reset(self, warm: _Warm, spec: SandboxSpec) -> bool:
        """Whether it is as before any lease. It is closed if not."""
        assert isinstance(warm.sandbox, SupportsReset)
        try:
            await warm.sandbox.reset(warm.base, labels=spec.labels)
        except (LachesisError, OSError) as error:
            _LOG.info("a sandbox is not used again: %s", error)
            await warm.sandbox.close()
            return False
        except BaseException:
            await asyncio.shield(warm.sandbox.close())
            raise
        return True

    async def close(self) -> None:
        """Remove those that nobody uses; the others are removed when they come back."""
        self._closed = True
        idle = [warm for kept in self._idle.values() for warm in kept]
        self._idle.clear()
        self._bases.clear()
        await asyncio.gather(*(warm.sandbox.close() for warm in idle))
