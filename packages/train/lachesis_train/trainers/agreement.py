"""Settings that a trainer and an environment both have. One of them applies, or the training does not begin."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import get_annotations
from typing import Any, Final

from backends.errors import LachesisError
from lachesis_messages.records.sampling_record import has_effect

_OFF: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (None, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0.0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (None, 0.0)),
    "repetition_penalty": (None, 1.0),
    **dict.fromkeys(("stop", "stop_token_ids"), (None, [], ())),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (None, 0, 1)),
}
"""What leaves the distribution and the end of a completion alone."""
_TAKEN: Final = ("temperature", "max_tokens", "max_new_tokens", "logprobs", "include_stop_str_in_output")
"""Other parameters that trainers pass: they apply, or say what is reported."""


class SettingsDisagree(LachesisError, ValueError):
    """A trainer's setting and one of the environment contradict each other, or one would have no effect."""


def is_chosen(config: Any, name: str) -> bool:
    """Whether somebody set this setting of an environment: in code, in a file, or as a class attribute."""
    redefined = sum(name in get_annotations(cls) for cls in type(config).__mro__) > 1
    return name in config.model_fields_set or redefined


def use_temperature(config: Any, temperature: float, *, where: str) -> None:
    """Have rollouts sampled at the trainer's temperature, by which it divides the logits.

    Raises:
        SettingsDisagree: the environment's settings name another one.
    """
    for name in ("agent_temperature", "eval_temperature"):
        own = getattr(config, name)
        if own != temperature and is_chosen(config, name):
            raise SettingsDisagree(
                f"env.{name} is {own:g} and {where}.temperature is {temperature:g}: the trainer divides all logits by "
                "its own, so the logprobs would be others than those sampled; set one of them to the other, or leave "
                f"env.{name} out"
            )
        _set_unchosen(config, name, temperature)


def use_sampling(config: Any, given: Mapping[str, Any], *, evaluation: bool, where: str) -> None:
    """Have rollouts sampled with the sampling parameters that a trainer passes with its request.

    Its temperature applies. In an evaluation it may differ from that of the training, and from the environment's.

    Raises:
        SettingsDisagree: a parameter would change the distribution that is trained, or the environment names another
            temperature.
    """
    for name, off in _OFF.items():
        if given.get(name) not in off:
            raise SettingsDisagree(
                f"{where}.{name} is {given[name]!r}: it samples from another distribution, or to another end, than the "
                f"one that is trained; set it to {off[-1]!r}"
            )
    for name, value in given.items():
        if name not in _OFF and name not in _TAKEN and has_effect(name, value):
            raise SettingsDisagree(f"{where}.{name} is {value!r}, which would have no effect; leave it out")
    temperature = float(given.get("temperature", 1.0))
    if evaluation:
        _set_unchosen(config, "eval_temperature", temperature)
    elif temperature != config.agent_temperature:
        use_temperature(config, temperature, where=where)


def _set_unchosen(config: Any, name: str, value: float) -> None:
    setattr(config, name, value)
    config.model_fields_set.discard(name)  # nobody chose it: another call, or another trainer, may have another one
