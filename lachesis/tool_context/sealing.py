"""The sandboxes after the agent's own: fresh ones, with what the reward takes along."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from backends import SandboxSpec
from backends.plugins import Registry, UnknownPlugin
from lachesis.loop.judgement import Judgement
from lachesis.rewards.reward import RewardError
from lachesis.tool_context.context_calls import SharedState
from lachesis_tools import ToolSession

JUDGES: Registry[Callable[..., Any]] = Registry("judge", "lachesis.judges", {}, package="lachesis-envs")
"""`pytest` is what `judge_pytest` uses: lachesis-envs has it."""
MAX_ARTIFACT = 1 << 30
"""Bytes that `seal` takes along, in all."""


class Sealed(RuntimeError):
    """The agent's sandbox is gone since `seal`: the reward must continue with the context that `seal` returned."""


class _Verifier(Protocol):
    missing: tuple[str, ...]
    refused: Mapping[str, str]


V = TypeVar("V", bound=_Verifier)


class Sealing:
    """Ends the sandbox of one context, and remembers what followed.

    Args:
        open_verifier: gives fresh sandboxes; None in one of these.
    """

    def __init__(
        self, session: ToolSession, shared: SharedState, open_verifier: Callable[..., ToolSession] | None
    ) -> None:
        self._session, self._shared, self.open_verifier = session, shared, open_verifier
        self._over = False
        self._into: tuple[list[str], Any] | None = None
        self._judged: Judgement | None = None

    def require_open(self) -> None:
        if self._over:
            task = self._session.task_id
            raise Sealed(f"the agent's sandbox of {task} is sealed; use the context that seal() returned")

    def opened(self, spec: SandboxSpec | None = None) -> ToolSession:
        """A fresh sandbox."""
        self._require_agents()
        assert self.open_verifier is not None
        self._shared.sessions.append(self.open_verifier() if spec is None else self.open_verifier(spec=spec))
        return self._shared.sessions[-1]

    def _require_agents(self) -> None:
        if self.open_verifier is None:
            raise Sealed("this context already belongs to a verifier sandbox; it cannot be sealed again")

    @contextlib.asynccontextmanager
    async def _taken(self, paths: Iterable[str], room: int, *, ends: bool, partly: bool) -> AsyncIterator[Any]:
        from lachesis.tool_context.artifacts import taken  # late: few rewards copy files out

        async with taken(self._session, paths, room, partly=partly) as artifacts:
            if ends:
                self._over = True
                await self._session.close()
            yield artifacts

    async def seal(
        self,
        context: Callable[[ToolSession], V],
        paths: Iterable[str],
        max_bytes: int,
        spec: SandboxSpec | None,
        *,
        allow: Iterable[str],
        exactly: bool,
        ends: bool,
    ) -> V:
        """As `ToolContext.seal`; `context` makes the context of a fresh sandbox."""
        wanted = [paths] if isinstance(paths, str) else list(dict.fromkeys(paths))
        if self._shared.repeated and self._into is not None and self._into[0] == wanted:
            return self._into[1]  # type: ignore[no-any-return]
        self.require_open()
        self._require_agents()
        async with self._taken(wanted, max_bytes, ends=ends, partly=exactly) as artifacts:
            verifier = context(fresh := self.opened(spec))
            await artifacts.place(fresh, allow, exactly=exactly)
        verifier.missing, verifier.refused = tuple(artifacts.missing), artifacts.refused
        self._into = (wanted, verifier) if ends else None
        return verifier

    async def judged(self, sources: Iterable[str], max_bytes: int, *judge: Any, **how: Any) -> Judgement:
        """As `ToolContext.judge_pytest`.

        Args:
            judge: the arguments of the judge.
            how: those of its method `judge`.
        """
        if self._shared.repeated and self._judged is not None:
            return self._judged
        self.require_open()
        self._require_agents()
        try:
            made = JUDGES.load("pytest")(*judge, self.opened)
        except UnknownPlugin as error:
            raise RewardError(f"judge_pytest: {error}") from error
        async with self._taken(sources, max_bytes, ends=True, partly=False) as artifacts:
            self._judged = await made.judge(artifacts, **how)
        return self._judged
