"""Names of tools of other standards."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container


def function_name(name: str, taken: Container[str] = ()) -> str:
    """The name of a tool as models may call it. Other standards allow longer ones, and dots and slashes."""
    fit = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    fit = (fit if re.match(r"[A-Za-z_]", fit) else f"_{fit}")[:64]
    numbered = (f"{fit[:60]}_{number}" for number in itertools.count(2))
    return fit if fit not in taken else next(each for each in numbered if each not in taken)
