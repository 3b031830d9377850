"""The losses of Tinker's wire: sums over tokens, to be minimised.

Source: the loss functions page of Tinker's documentation; `gspo` and `dppo` have the names and keys that SkyRL 0.4.0
gives them on the same wire. `logprobs` are those of the model that is trained, `sampled` those of the model that
sampled; a token with advantage (or weight) 0 adds nothing. A token that the two find likely to such a different degree
that it cannot have been sampled has no gradient through its ratio, and makes none of another token infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from lachesis_train.curves.estimators import LARGEST_LOG_RATIO
from lachesis_train.engine.errors import RequestError

Tensors = Mapping[str, torch.Tensor]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss function of flat tensors of tokens, each [n]. `sequences`, int64, has the number of each token's sequence;
    a sequence is always complete."""

    compute: Callable[[torch.Tensor, Tensors, Settings], torch.Tensor]
    """The loss of each token, of logprobs, the other inputs and settings."""
    inputs: tuple[str, ...]
    """Inputs that every datum must have, in addition to `target_tokens`."""
    weight: str
    """The input that is 0 where a token is not trained."""
    settings: Mapping[str, float]
    """Keys of `loss_fn_config` with their defaults."""
    clipped: Callable[[torch.Tensor, Tensors, Settings], torch.Tensor] | None = None
    """Whether each token is beyond the bounds, of the same arguments; None: there are no bounds."""


def _cross_entropy(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    return -logprobs * inputs["weights"]


def _importance_sampling(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _ratio(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    return _exp(logprobs - inputs["logprobs"])


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Without a gradient where it is cut."""
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def _ppo(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)


def _cispo(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    ratio = _ratio(logprobs, inputs).detach()
    return -_clip(ratio, settings) * logprobs * inputs["advantages"]


def _gspo(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    """GSPO-token (Zheng et al. 2025, arXiv 2507.18071): -min(s A, clip(s) A), where s has the value of exp(mean of
    log p - log q over the trained tokens of the sequence), and its gradient goes to the token: that of log p times s.
    With one advantage a sequence, value and gradient are those of GSPO. `weights` is 1 where a token is trained."""
    ratio = _exp(_sequence_log_ratio(logprobs, inputs) + (logprobs - logprobs.detach()))
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages) * inputs["weights"]


def _sequence_log_ratio(logprobs: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """The mean log ratio of the trained tokens of each token's sequence, without a gradient."""
    sequences, trained = inputs["sequences"], inputs["weights"] != 0
    difference = (logprobs.detach() - inputs["logprobs"]).where(trained, 0.0)
    none = difference.new_zeros(len(sequences))
    sums, counts = (none.index_add(0, sequences, of.to(difference)) for of in (difference, trained))
    return (sums / counts.clamp(min=1))[sequences]


def _dppo(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    """DPPO with binary total variation (Qi et al. 2026, arXiv 2602.04879, equation 13, as SkyRL 0.4.0 has it): -w A,
    but 0 where the token's probability p has already moved from q by more than delta the way that A pushes it: p - q >
    delta_high with A > 0, q - p > delta_low with A < 0. In the paper q is the probability at the sampler."""
    kept = ~_beyond_delta(logprobs, inputs, settings)
    return -_ratio(logprobs, inputs) * inputs["advantages"] * kept


def _beyond_delta(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    moved, advantages = logprobs.detach().exp() - inputs["logprobs"].exp(), inputs["advantages"]
    return ((advantages > 0) & (moved > settings["delta_high"])) | ((advantages < 0) & (-moved > settings["delta_low"]))


def _clip(ratio: torch.Tensor, settings: Settings) -> torch.Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _ratio_beyond(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    ratio = _ratio(logprobs, inputs)
    return _clip(ratio, settings) != ratio


def _sequence_beyond(logprobs: torch.Tensor, inputs: Tensors, settings: Settings) -> torch.Tensor:
    ratio = _exp(_sequence_log_ratio(logprobs, inputs))
    return _clip(ratio, settings) != ratio


_POLICY_GRADIENT: Final = ("logprobs", "advantages")
_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_DELTA: Final = {"delta_low": 0.2, "delta_high": 0.2}
LOSSES: Final[Mapping[str, Loss]] = {
    "cross_entropy": Loss(_cross_entropy, ("weights",), "weights", {}),
    "importance_sampling": Loss(_importance_sampling, _POLICY_GRADIENT, "advantages", {}),
    "ppo": Loss(_ppo, _POLICY_GRADIENT, "advantages", _CLIP, _ratio_beyond),
    "cispo": Loss(_cispo, _POLICY_GRADIENT, "advantages", _CLIP, _ratio_beyond),
    "gspo": Loss(_gspo, (*_POLICY_GRADIENT, "weights"), "weights", _CLIP, _sequence_beyond),
    "dppo": Loss(_dppo, _POLICY_GRADIENT, "advantages", _DELTA, _beyond_delta),
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
    metrics["ratio:sum"] = float(_exp(difference).sum())
    metrics["impossible_tokens:sum"] = float((difference.abs() > LARGEST_LOG_RATIO).sum())
    metrics["max_logprob_difference:max"] = float(difference.abs().max()) if len(difference) else 0.0
    if (clipped := LOSSES[name].clipped) is not None:
        metrics["clipped_tokens:sum"] = float((clipped(logprobs, inputs, settings) & trained).sum())
    return metrics
