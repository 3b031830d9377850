"""What follows a line that a person typed."""

from __future__ import annotations

from enum import Enum, auto


class Action(Enum):
    """What follows a line."""

    STAY = auto()
    """Nothing: the person goes on."""
    SAY = auto()
    """The user's message is set."""
    AGAIN = auto()
    """The model is asked, with the conversation as it is."""
    CUT = auto()
    """The answer that was shown is taken back; the person goes on."""
    END = auto()
    """The answer that was shown is the last one."""
    STOP = auto()
    """The chat ends, and there is no answer."""
