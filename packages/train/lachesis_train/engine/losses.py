"""The losses of Tinker's wire: sums over tokens, to be minimised.

Source: the loss functions page of Tinker's documentation. `logprobs` are those of the model that is trained, `sampled`
those of the model that sampled; a token with advantage (or weight) 0 adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from lachesis_train.engine.errors import RequestError

Tensors = Mapping[str, torch.Tensor]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss function of flat tensors of tokens, each [n]."""

    compute: Callable[[torch.Tensor, Tensors, Settings], torch.Tensor]
    """The loss of each token, of logprobs, the other inputs and settings."""
    inputs: tuple[str, ...]
    """Inputs that every datum must have, in addition to `target_tokens`."""
    weight: str
    """The input that is 0 where a token is not trained."""
    settings: Mapping[str, float]
    """Keys of `loss_fn_config` with their defaults."""


def _cross_entropy(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    return -logprobs * inputs["weights"]


def _importance_sampling(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    return -torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


def _ppo(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    ratio, advantages = torch.exp(logprobs - inputs["logprobs"]), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)


def _cispo(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    ratio = torch.exp(logprobs - inputs["logprobs"]).detach()
    return -_clip(ratio, settings) * logprobs * inputs["advantages"]


def _clip(ratio: torch.Tensor, settings: Settings) -> torch.Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


_POLICY_GRADIENT: Final = ("logprobs", "advantages")
_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(_cross_entropy, ("weights",), "weights", {}),
    "importance_sampling": Loss(_importance_sampling, _POLICY_GRADIENT, "advantages", {}),
    "ppo": Loss(_ppo, _POLICY_GRADIENT, "advantages", _CLIP),
    "cispo": Loss(_cispo, _POLICY_GRADIENT, "advantages", _CLIP),
}


def loss_named(name: str) -> Loss:
    """Raises RequestError for a loss that the engine does not have."""
    if name not in LOSSES:
        raise RequestError(
            f"loss_fn {name!r} is not one that the embedded engine has; use {', '.join(LOSSES)}, "
            "or forward_backward_custom with a Python function"
        )
    return LOSSES[name]


def loss_settings(name: str, given: Mapping[str, float]) -> dict[str, float]:
    """`loss_fn_config` with its defaults. Raises RequestError for an unknown key or limits the wrong way round."""
    known = loss_named(name).settings
    for key in given:
        if key not in known:
            has = ", ".join(known) or "no settings"
            raise RequestError(f"loss_fn_config key {key!r} is unknown to loss {name!r}, which has {has}")
    settings = {**known, **given}
    if known is _CLIP and not settings["clip_low_threshold"] <= settings["clip_high_threshold"]:
        raise RequestError(
            f"clip_low_threshold {settings['clip_low_threshold']} is above "
            f"clip_high_threshold {settings['clip_high_threshold']}"
        )
    return settings


def loss_metrics(name: str, logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> dict[str, float]:
    """Sums over the trained tokens. The SDK adds up what ends in `:sum` over the parts of a large batch."""
    trained = inputs[LOSSES[name].weight] != 0
    metrics = {"trained_tokens:sum": float(trained.sum())}
    if name == "cross_entropy":
        return metrics
    difference = (logprobs - inputs["logprobs"])[trained]
    metrics["sampler_minus_trainer_logprob:sum"] = float(-difference.sum())
    metrics["ratio:sum"] = float(difference.exp().sum())
    metrics["max_logprob_difference:max"] = float(difference.abs().max()) if len(difference) else 0.0
    if LOSSES[name].settings is _CLIP:
        ratio = difference.exp()
        low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
        metrics["clipped_tokens:sum"] = float(((ratio < low) | (ratio > high)).sum())
    return metrics
