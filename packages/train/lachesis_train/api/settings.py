"""Settings of the rollout API."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of one API. Sizes are in bytes, times in seconds."""

    db: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    """Asked of every request, if there is one."""
    insecure: bool = False
    """Without a token, answer every user of this machine."""
    lease: float = 600.0
    """Silence of a trainer after which its batch may go to another one."""
    most_stored: int = 4096 * MB
    """Groups that are not acknowledged. Beyond it no group is taken, unless the trainer waits for groups."""
    most_body: int = 512 * MB
    """One request, unpacked."""
    most_in_memory: int = 512 * MB
    """Bodies of requests that are read at the same time, as they were sent."""
    pack_wait: float = 2.0
    """Wait for a group that completes a batch exactly, when there are enough sequences but no set that fits."""
    hold: float = 60.0
    """A stock environment gives up a group that is refused: it waits this long for room first."""
    retry_after: float = 5.0
    """What a client is asked to wait while there is no room."""
    stalled: float = 60.0
    """A body of which nothing comes for this long is given up: it takes room from others."""
    silent_env: float = 120.0
    """Silence of an environment after which no batch waits for its `min_batch_allocation`."""
    environments: int = 0
    """No batch is formed before so many have registered; `silent_env` after the start it is."""
