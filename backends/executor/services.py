"""What commands, background processes and transfers work with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .prewarmed import PrewarmedShells
from .waiting import Waiting

if TYPE_CHECKING:
    from .loop import Loop
    from .output import Spills
    from .owner_session import OwnerSession
    from .shells import Shells


class Services:
    """The loop, the session with the owner, and what is shared by all that a sandbox runs."""

    def __init__(self, loop: Loop, session: OwnerSession, shells: Shells, spills: Spills) -> None:
        self.loop = loop
        self.session = session
        self.shells = shells
        self.spills = spills
        self.prewarmed = PrewarmedShells(shells)
        self.waiting = Waiting(loop)
        self.wall_time = math.inf
        """Seconds that a command or a background process may take."""
