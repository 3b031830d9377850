"""The groups that `collect_trajectories` returned, in Atropos' shape, as one record for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lachesis.rewards.reward import RewardError, finite_number
from lachesis_compat.collecting.recording import as_ids
from lachesis_messages.tokens import MASKED
from lachesis_tokens.samples.group_shapes import CERTIFICATE, OVERRIDES

OF_SAMPLES = ("advantages", "ref_logprobs", "images", "distill_token_ids", "distill_logprobs")
"""Fields of a group with one entry per sample, other than tokens, masks, logprobs, scores, messages and overrides."""


class ReturnedGroupError(RewardError):
    """`collect_trajectories` returned something that is not a group. An error of the environment."""


@dataclass(frozen=True, slots=True)
class ReturnedSample:
    """One sequence of a group, as the environment returned it."""

    place: int
    score: float
    tokens: list[int] | None
    """None where they are not a list of ids."""
    masks: list[int] | None
    logprobs: Any
    messages: tuple[Mapping[str, Any], ...] | None
    overrides: Mapping[str, Any]
    carried: Mapping[str, Any] = field(default_factory=dict)
    """Its entries of `OF_SAMPLES`."""
    rollout_id: str | None = None
    """Of the rollout that it is, where our own loop ran it."""
    index: int | None = None
    """Of the sequence of that rollout that it is; None without tokens."""

    def runs(self) -> list[tuple[int, int]]:
        """The trained positions as (start, end) pairs; masks of zeros and ones count as what they mean."""
        if self.tokens is None or self.masks is None:
            return []
        trained = [mask != MASKED for mask in self.masks[: len(self.tokens)]]
        if self.zeros_and_ones:
            trained = [mask == 1 for mask in self.masks[: len(self.tokens)]]
        found: list[tuple[int, int]] = []
        for at, here in enumerate(trained):
            if here and found and found[-1][1] == at:
                found[-1] = found[-1][0], at + 1
            elif here:
                found.append((at, at + 1))
        return found

    @property
    def zeros_and_ones(self) -> bool:
        """Whether the masks are 0 and 1 where Atropos' trainers expect -100 and token ids."""
        return bool(self.masks) and set(self.masks or ()) <= {0, 1}


@dataclass(frozen=True, slots=True)
class ReturnedGroup:
    """One group of an item."""

    samples: tuple[ReturnedSample, ...]
    group_overrides: Mapping[str, Any]
    given: Mapping[str, Any]
    """The group itself."""


def returned_groups(given: Any, source: str) -> list[ReturnedGroup]:
    """All groups of what was returned: a group, a list of groups, or None. Empty ones are left out.

    Args:
        source: the environment and its method, for errors.

    Raises:
        ReturnedGroupError: something else, or lists that do not fit each other.
    """
    listed = given if isinstance(given, list | tuple) else [given]
    groups = []
    for group in listed:
        if group is None or (isinstance(group, Mapping) and not group):
            continue
        if not isinstance(group, Mapping):
            raise ReturnedGroupError(
                f"{source} returned a {type(group).__name__}; a group is a dict with tokens, masks and scores"
            )
        found = _group(group, source)
        if found.samples:
            groups.append(found)
    return groups


def _group(group: Mapping[str, Any], source: str) -> ReturnedGroup:
    scores = group.get("scores")
    if scores is None:
        raise ReturnedGroupError(f"{source} returned a group without scores; its keys are {', '.join(map(str, group))}")
    if isinstance(scores, int | float):  # one trajectory in the place of a group
        group = {
            name: value if name in ("group_overrides", "scores") or value is None else [value]
            for name, value in group.items()
        }
        scores = [scores]
    count = len(scores)
    columns = {name: _column(group, name, count, source) for name in ("tokens", "masks", "inference_logprobs")}
    carried = {name: _optional(group, name, count) for name in OF_SAMPLES}
    messages, overrides = _optional(group, "messages", count), _optional(group, "overrides", count)
    scores = [only(score, int, float) for score in scores]
    nested = [only(tokens, list, tuple) is not tokens for tokens in columns["tokens"]]
    for values in (*columns.values(), *carried.values()):
        values[:] = [only(value) if inside else value for value, inside in zip(values, nested, strict=True)]
    messages = [only(each, list, tuple) for each in messages]
    own = _own_rollouts(group)
    samples = []
    for place in range(count):
        given = only(overrides[place], Mapping)
        of_sample = dict(given) if isinstance(given, Mapping) else {}
        certificate = of_sample.get(CERTIFICATE)
        rollout_id, index = own.get(place), None
        if isinstance(certificate, Mapping):  # our own sample: another one of its rollout may be sent
            rollout_id, index = certificate.get("rollout_id"), certificate.get("index")
            of_sample = {name: value for name, value in of_sample.items() if name not in OVERRIDES}
        samples.append(
            ReturnedSample(
                place=place,
                score=finite_number(scores[place], f"{source} returned a group whose score {place} is"),
                tokens=as_ids(columns["tokens"][place]),
                masks=as_ids(columns["masks"][place]),
                logprobs=columns["inference_logprobs"][place],
                messages=_messages(messages[place]),
                overrides=of_sample,
                carried={name: values[place] for name, values in carried.items() if values[place] is not None},
                rollout_id=rollout_id,
                index=index,
            )
        )
    of_group = group.get("group_overrides")
    return ReturnedGroup(tuple(samples), dict(of_group) if isinstance(of_group, Mapping) else {}, group)


def only(value: Any, *kinds: type) -> Any:
    """The only thing in a list, where it is of these kinds; else the value. A trajectory may be a group of one."""
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value
    if isinstance(plain, list | tuple) and len(plain) == 1 and isinstance(plain[0], kinds or object):
        return plain[0]
    return value


def _column(group: Mapping[str, Any], name: str, count: int, source: str) -> list[Any]:
    values = group.get(name)
    if values is None or (name == "inference_logprobs" and len(values) == 0):
        return [None] * count
    if len(values) != count:
        raise ReturnedGroupError(f"{source} returned a group of {count} scores and {len(values)} {name}")
    return list(values)


def _optional(group: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """Some environments leave these lists empty, or shorter than the group."""
    values = group.get(name)
    if not isinstance(values, list | tuple):
        return [None] * count
    return [*values, *[None] * (count - len(values))][:count]


def _own_rollouts(group: Mapping[str, Any]) -> dict[int, str]:
    """Place -> id of the rollouts of a group record, which our own `collect_trajectories` returns in Phase 1."""
    rollouts = group.get("rollouts")
    if not isinstance(rollouts, list):
        return {}
    return {rollout["place"]: rollout["rollout_id"] for rollout in rollouts if rollout.get("place") is not None}


def _messages(given: Any) -> tuple[Mapping[str, Any], ...] | None:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(each, Mapping) for each in given):
        return None
    return tuple(given)
