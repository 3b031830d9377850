"""Sampling parameters. A request sends every parameter that shapes the distribution, so no server default applies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lachesis_messages.records.sampling_record import HARMLESS_FIELDS, OTHER_FIELDS, is_sampling_field, unknown_fields

LogprobsKind: TypeAlias = Literal["raw", "temperature", "processed"]
"""The distribution that logprobs belong to: logits at temperature 1, logits divided by the temperature, or the final
distribution after top-p, top-k and the like."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request. The defaults sample from the unchanged model.

    Servers have other defaults (llama.cpp: top_k 40, top_p 0.95, min_p 0.05; vLLM: the model's generation_config), so
    a request switches off each parameter that is not set here.
    """

    max_tokens: int
    """Maximum of completion tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end the completion. Their tokens are sampled; the message ends before them."""
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, in the engine's spelling."""

    def parameters(self) -> dict[str, Any]:
        """The named parameters as JSON fields, in vLLM's spelling. `stop` and `seed` only if they are set."""
        named: dict[str, Any] = {name: getattr(self, name) for name in ("max_tokens", *_NAMED)}
        if self.stop:
            named["stop"] = list(self.stop)
        if self.seed is not None:
            named["seed"] = self.seed
        return named

    def record(self, logprobs: LogprobsKind) -> dict[str, Any]:
        """The record that is kept with every sampled span; see `sampling_problem` of
        `lachesis_messages.records.sampling_record`."""
        return {**recorded_fields(self.extra), **self.parameters(), "logprobs": logprobs}


_NAMED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
SAMPLING_FIELDS = (*_NAMED, "max_tokens", "max_completion_tokens", "stop", "seed")
"""The fields of a request that are parameters of `Sampling`."""


def sampling_fields(extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """The extra fields of a request that are parameters of `Sampling`."""
    return {name: extra_body[name] for name in SAMPLING_FIELDS if extra_body.get(name) is not None}


def recorded_fields(extra_body: Mapping[str, Any], harmless: Collection[str] = ()) -> dict[str, Any]:
    """The part of an `extra_body` that is recorded with the completions: the fields that change the sampling.

    Of a field that is not known, only the name is recorded: it may be a secret, for a proxy for example. `harmless`
    are the names of those that the user knows.
    """
    if not extra_body:
        return {}
    record = {name: value for name, value in extra_body.items() if name in SAMPLING_FIELDS or is_sampling_field(name)}
    if other := [name for name in unknown_fields(extra_body) if name not in SAMPLING_FIELDS]:
        record[OTHER_FIELDS] = other
        if known := [name for name in other if name in harmless]:
            record[HARMLESS_FIELDS] = known
    return record


def read_sampling(
    given: Mapping[str, Any], *, default_max_tokens: int, settings: Mapping[str, Any] | None = None
) -> Sampling:
    """`Sampling` from the arguments of a request. None and missing arguments are off.

    A parameter comes from its argument, else from `extra_body`, else from the server's `settings` (see
    `sampling_fields`). The other fields of `extra_body` become `Sampling.extra`.
    """
    extra = dict(given.get("extra_body") or {})
    merged = {**(settings or {}), **extra, **{name: value for name, value in given.items() if value is not None}}
    named = {name: merged[name] for name in _NAMED if merged.get(name) is not None}
    if "top_k" in named:
        named["top_k"] = max(0, named["top_k"])  # -1 is another spelling of off
    stop = merged.get("stop") or ()
    if extra:
        for name in SAMPLING_FIELDS:
            extra.pop(name, None)
    return Sampling(
        max_tokens=merged.get("max_tokens") or merged.get("max_completion_tokens") or default_max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=merged.get("seed"),
        extra=extra,
        **named,
    )
