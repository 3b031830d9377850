"""Named toolset distributions, and draws from them."""

from __future__ import annotations

from typing import Any

from lachesis_compat.in_run import registry_in_use
from lachesis_tools.distributions import DISTRIBUTIONS as _OURS
from lachesis_tools.distributions import draw_toolsets
from lachesis_tools.toolsets import has_toolset

DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    name: {"description": name.replace("_", " "), "toolsets": dict(chances)} for name, chances in _OURS.items()
}


def get_distribution(name: str) -> dict[str, Any] | None:
    return DISTRIBUTIONS.get(name)


def list_distributions() -> dict[str, dict[str, Any]]:
    return dict(DISTRIBUTIONS)


def validate_distribution(distribution_name: str) -> bool:
    return distribution_name in DISTRIBUTIONS


def sample_toolsets_from_distribution(distribution_name: str) -> list[str]:
    """A new draw of toolsets, from those that exist here.

    Raises:
        ToolsetError: there is no such distribution, or none of its toolsets exists. It is a `ValueError`.
    """
    registry = registry_in_use()
    return draw_toolsets(distribution_name, exists=lambda name: has_toolset(name, registry=registry))
