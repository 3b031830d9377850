"""How a completion is sampled: every parameter that shapes the distribution, always sent, never left to a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

LogprobsKind: TypeAlias = Literal["raw", "temperature", "processed"]
"""What an engine's logprobs are of: logits at temperature 1, logits divided by the temperature, or the final
distribution after top-p, top-k and the like."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request. The defaults sample from the model itself, unchanged.

    Servers have defaults of their own (llama.cpp: top_k 40, top_p 0.95, min_p 0.05; a model's generation_config under
    vLLM): whatever is not said here is said to be off.
    """

    max_tokens: int
    """Completion tokens at most."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end the completion. Their tokens are sampled tokens; the message ends before them."""
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, as the engine spells them."""

    def record(self, logprobs: LogprobsKind) -> dict[str, Any]:
        """What is written down with every span that was sampled so; see `lachesis.trajectories.sampling_problem`."""
        named: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.stop:
            named["stop"] = list(self.stop)
        if self.seed is not None:
            named["seed"] = self.seed
        return {**self.extra, **named, "logprobs": logprobs}


_NAMED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_SAID = (*_NAMED, "max_tokens", "max_completion_tokens", "stop", "seed")


def said_of_sampling(extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """What extra fields of a request say of parameters that have a name here."""
    return {name: extra_body[name] for name in _SAID if extra_body.get(name) is not None}


def read_sampling(
    given: Mapping[str, Any], *, default_max_tokens: int, settings: Mapping[str, Any] | None = None
) -> Sampling:
    """Sampling from the arguments of a request; None and what is not there are off.

    What `extra_body` says of a parameter that has a name here counts where the argument itself is None, and what the
    server's `settings` say of it (`said_of_sampling`) where neither does. The rest of it is `Sampling.extra`.
    """
    extra = dict(given.get("extra_body") or {})
    said = {**(settings or {}), **extra, **{name: value for name, value in given.items() if value is not None}}
    named = {name: said[name] for name in _NAMED if said.get(name) is not None}
    if "top_k" in named:
        named["top_k"] = max(0, named["top_k"])  # -1 is another spelling of off
    stop = said.get("stop") or ()
    if extra:
        for name in _SAID:
            extra.pop(name, None)
    return Sampling(
        max_tokens=said.get("max_tokens") or said.get("max_completion_tokens") or default_max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=said.get("seed"),
        extra=extra,
        **named,
    )
