"""What the tokens of rollouts cost, by the prices of the run's model servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.errors import SettingsError
from lachesis.settings.server_settings import ServerConfig

_MILLION = 1_000_000
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "uncounted_requests")


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens, in the currency of the user."""

    input: float
    output: float
    cached_input: float
    """Of prompt tokens that the server had in its prefix cache."""

    def of(self, record: Mapping[str, Any]) -> float | None:
        """The cost of a rollout's record, its lost attempts included; None where a server counted no tokens."""
        prompt, cached, completion, uncounted = (
            (record.get(name) or 0) + (record.get(f"lost_{name}") or 0) for name in _COUNTS
        )
        if uncounted or (completion and not prompt):
            return None
        return round(self.of_tokens(prompt, cached, completion), 9)

    def of_tokens(self, prompt: int, cached: int, completion: int) -> float:
        """The cost of these counts of tokens; `prompt` includes `cached`."""
        cost = (prompt - cached) * self.input + cached * self.cached_input + completion * self.output
        return cost / _MILLION

    def add_to(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a group with a `cost` for each rollout, and for what was sampled beside them."""
        found = {**group, "rollouts": [{**each, "cost": self.of(each)} for each in group["rollouts"]]}
        return (
            {**found, "beside": {**group["beside"], "cost": self.of(group["beside"])}} if "beside" in group else found
        )


def prices_of(configs: Sequence[ServerConfig]) -> Prices | None:
    """The prices of a run's servers; None where there are none.

    Raises:
        SettingsError: there is a price of input or output only, or the servers have different ones: a rollout may be
            answered by several of them.
    """
    found = {
        (each.price_per_million_input, each.price_per_million_output, each.price_per_million_cached_input)
        for each in configs
    }
    if len(found) > 1:
        raise SettingsError("the model servers of a run must have the same prices (openai.price_per_million_...)")
    [(given, output, cached)] = found or {(None, None, None)}
    if given is None and output is None and cached is None:
        return None
    if given is None or output is None:
        raise SettingsError("a price needs both openai.price_per_million_input and openai.price_per_million_output")
    return Prices(given, output, given if cached is None else cached)
