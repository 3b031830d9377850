"""Toolset distributions: named probabilities, by which a group draws its toolsets.

Each toolset is drawn independently. If none is drawn, the group gets the likeliest. A draw with the same key is the
same. Names and percentages are those of the removed Hermes stack; toolsets that do not exist here are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from random import Random
from types import MappingProxyType

from lachesis_tools.toolsets import ToolsetError

_SEVEN = ("web", "vision", "image_gen", "terminal", "file", "moa", "browser")

DISTRIBUTIONS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "default": dict.fromkeys(_SEVEN, 100),
        "image_gen": {"image_gen": 90, "vision": 90, "web": 55, "terminal": 45, "moa": 10},
        "research": {"web": 90, "browser": 70, "vision": 50, "moa": 40, "terminal": 10},
        "science": {"web": 94, "terminal": 94, "file": 94, "vision": 65, "browser": 50, "image_gen": 15, "moa": 10},
        "development": {"terminal": 80, "file": 80, "moa": 60, "web": 30, "vision": 10},
        "safe": {"web": 80, "browser": 70, "vision": 60, "image_gen": 60, "moa": 50},
        "balanced": dict.fromkeys(_SEVEN, 50),
        "minimal": {"web": 100},
        "terminal_only": {"terminal": 100, "file": 100},
        "terminal_web": {"terminal": 100, "file": 100, "web": 100},
        "browser_only": {"browser": 100},
        "creative": {"image_gen": 90, "vision": 90, "web": 30},
        "reasoning": {"moa": 90, "web": 30, "terminal": 20},
        "browser_use": {"browser": 100, "web": 80, "vision": 70},
        "browser_tasks": {"browser": 97, "vision": 12, "terminal": 15},
        "terminal_tasks": {"terminal": 97, "file": 97, "web": 97, "browser": 75, "vision": 50, "image_gen": 10},
        "mixed_tasks": {"browser": 92, "terminal": 92, "file": 92, "web": 35, "vision": 15, "image_gen": 15},
    }
)
"""Name -> toolset -> percent."""


def distribution(name: str) -> Mapping[str, int]:
    """The percentages of a distribution.

    Raises:
        ToolsetError: no distribution has this name.
    """
    if name not in DISTRIBUTIONS:
        near = get_close_matches(name, DISTRIBUTIONS, n=1)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise ToolsetError(f"unknown toolset distribution {name!r}; {hint} are: {', '.join(DISTRIBUTIONS)}")
    return DISTRIBUTIONS[name]


def draw_toolsets(name: str, key: str | None = None, *, exists: Callable[[str], bool]) -> list[str]:
    """The toolsets of one group.

    Args:
        name: the distribution.
        key: equal keys draw the same toolsets; None draws at random.
        exists: whether there is a toolset of this name.

    Raises:
        ToolsetError: there is no such distribution, or none of its toolsets exists.
    """
    chances = {toolset: percent for toolset, percent in distribution(name).items() if exists(toolset)}
    if not chances:
        raise ToolsetError(
            f"distribution {name!r}: none of its toolsets exists here ({', '.join(distribution(name))}); choose "
            "another, or extend the environment's `tools` with tools of these toolsets"
        )
    random = Random(None if key is None else f"{name}:{key}")
    drawn = [toolset for toolset, percent in chances.items() if random.random() * 100 < percent]
    return drawn or [max(chances, key=lambda toolset: chances[toolset])]
