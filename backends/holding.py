"""Nothing is served in a sandbox while all of it is saved or changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

from .answers import shown
from .connection import Connection
from .errors import BackendError, ProcessesRunning

_STATE = 8 << 20
"""Bytes of the state of a shell."""


@dataclass(slots=True)
class Hold:
    """A sandbox whose requests wait."""

    running: list[str]
    """The command lines of what runs, and is stopped meanwhile."""
    state: bytes
    """The folder and the variables of its shell, for `resumed`, also in another sandbox."""
    ran: bool
    """Whether any command ran since its files were last changed as a whole."""
    shared: list[str]
    """What is in /dev/shm, which belongs to no disk."""
    resumed: bytes = b""
    """The state with which the shell goes on, if not with its own."""
    moved: bool = False
    """Whether it has another root now."""
    objects: int = 0
    """System V objects that it has, once it is no longer held."""

    @property
    def folder(self) -> str:
        try:
            return str(json.loads(self.state)["cwd"])
        except (ValueError, LookupError, TypeError):
            raise BackendError("the executor has given no state of its shell") from None


@contextlib.asynccontextmanager
async def held(connection: Connection, id: str, *, stop: bool = False) -> AsyncIterator[Hold]:
    """Hold the requests of sandbox `id` back until the block ends, which must not be cancelled halfway.

    Raises:
        ProcessesRunning: something runs, unless it is to `stop` meanwhile.
    """
    answer, state = await connection.request("hold", stop=stop, room=_STATE)
    running = [shown(each) for each in answer["running"]]
    if not answer["held"]:
        raise ProcessesRunning(id, running)
    now = Hold(running, state, answer["ran"], [shown(each) for each in answer["shared"]])
    try:
        yield now
    finally:
        ended, _ = await connection.request("go_on", now.resumed, moved=now.moved)
        now.objects = ended["left"]
