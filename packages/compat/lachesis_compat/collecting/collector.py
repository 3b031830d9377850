"""The groups of an item from an environment that collects them itself, as the runs take them.

The environment decides what is scored and how. The tokens are the ones recorded in the meantime, never its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backends import BackendError
from backends.tasks import cancel_requests
from lachesis.figures.item_keys import part_key
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import TokenCount
from lachesis.loop.rollout import PlayedGroup, Rollout, holding_sandboxes
from lachesis.runs.environment import Collecting
from lachesis.runs.group_player import stop_if_hopeless
from lachesis_client import RequestRejected
from lachesis_client.errors import ConversationRefused
from lachesis_compat.collecting.drift import Drift, drift_of
from lachesis_compat.collecting.matching import Match, Matcher
from lachesis_compat.collecting.recording import ItemRecording, RecordedCompletion, recorded
from lachesis_compat.collecting.returned import ReturnedGroup, ReturnedSample, returned_groups
from lachesis_compat.collecting.rollouts import renumbered, result_of, rollout_of
from lachesis_compat.synchronous import with_blocking_calls
from lachesis_tokens.samples.group_shapes import OF_TOKENS
from lachesis_tokens.samples.samples import TokenSample


class _TooLate(Exception):
    """The environment did not return the groups of an item in time."""


_MOST_PRINTED = 5
"""Refusals of one run that are printed."""


@dataclass(kw_only=True)
class Collector:
    """Collects the groups of one environment; any number of items at once."""

    source: Collecting
    name: str
    """Of the environment, for errors."""
    decode: Callable[[Sequence[int]], str]
    ends: Callable[[], Sequence[str]]
    """The texts of special tokens."""
    tools: Sequence[Mapping[str, Any]] = ()
    max_retries: int = 0
    """Further attempts at an item whose model server failed."""
    timeout: float | None = None
    """Seconds for one attempt."""
    tell: Callable[[str], None] = print
    on_drift: Callable[[str, ReturnedSample, Drift], None] | None = None
    """Called with the key of the item, for every sample with tokens of its own."""
    refused: int = field(default=0, init=False)
    """Samples that were not recognised."""
    _printed: set[str] = field(default_factory=set, init=False)
    _matching: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def collect(self, item: Any, item_key: str) -> list[PlayedGroup]:
        """The groups of `item`, at least one: if the environment returned none, one without scored rollouts says why.

        Raises:
            RunStopped: the server rejects the key, or knows no such model or route.
        """
        retried_after: list[str] = []
        lost = TokenCount()
        while True:
            with recorded() as recording:
                async with holding_sandboxes():
                    groups, backlog, failure = await self._attempt(item, recording)
            broken = recording.error
            if broken is None or len(retried_after) >= self.max_retries or isinstance(broken, RequestRejected):
                break
            retried_after.append(str(broken))
            for completion in recording.completions:
                lost.add(completion.response.usage)
        if broken is not None:
            rollouts = [_infrastructure(recording, item_key, broken)]
            played = [PlayedGroup(item, item_key, self.tools, rollouts)]
        elif failure is not None:
            declined = str(failure) if isinstance(failure, ConversationRefused) else ""
            found = _failed(recording, item_key, failure)
            played = [PlayedGroup(item, item_key, self.tools, found, declined=declined)]
        else:
            self.source.backlog.extend(backlog)
            async with self._matching:  # threads that compute share one GIL with the loop: it waits for each of them
                played = await asyncio.to_thread(self._played, item, item_key, groups, recording)
        first = played[0]
        rollouts = renumbered(first.rollouts)
        beside = first.beside
        if rollouts:
            attempts = len(retried_after) + 1
            rollouts[0] = replace(rollouts[0], attempts=attempts, retried_after=tuple(retried_after), lost=lost)
        elif lost != TokenCount():
            beside = replace(beside or _beside((), item_key), lost=lost)
        stop_if_hopeless(rollouts)
        return [replace(first, rollouts=rollouts, beside=beside), *played[1:]]

    async def _attempt(
        self, item: Any, recording: ItemRecording
    ) -> tuple[list[ReturnedGroup], list[Any], BaseException | None]:
        """The groups that the environment returned, and the exception that it raised."""
        before = cancel_requests()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                name = f"{self.name}: collect_trajectories"
                groups, backlog = await with_blocking_calls(self._collected(item), name=name)
            return groups, backlog, None
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit would end the run, with its own exit code
            if isinstance(error, asyncio.CancelledError) and cancel_requests() > before:
                raise
            if limit.expired():
                error = _TooLate(f"the groups of the item took longer than {self.timeout:g} s; see env.rollout_timeout")
            elif isinstance(error, BackendError):
                recording.error = recording.error or error
            return [], [], error

    async def _collected(self, item: Any) -> tuple[list[ReturnedGroup], list[Any]]:
        returned = await self.source.collect_trajectories(item)
        given, backlog = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if given:
            given = await self.source.postprocess_histories(given)
        groups = returned_groups(given, f"{self.name}.collect_trajectories")
        await self.source.cleanup()
        return groups, list(backlog or ())

    def _played(
        self, item: Any, item_key: str, groups: Sequence[ReturnedGroup], recording: ItemRecording
    ) -> list[PlayedGroup]:
        foreign = [
            [sample for sample in group.samples if sample.rollout_id not in recording.rollouts] for group in groups
        ]
        matches = iter(Matcher(recording, self.decode, self.ends).match(foreign))
        used: set[int] = set()
        own: dict[str, tuple[int, set[int | None]]] = {}
        """By id of a rollout of our loop: the group that has it, and which of its sequences were returned."""
        played = []
        for number, group in enumerate(groups):
            key = part_key(item_key, number)
            at_place: dict[int, Rollout] = {}
            extras: dict[str, Mapping[str, Any]] = {}
            of_group = dict(group.group_overrides)
            for sample in group.samples:
                rollout = recording.rollouts.get(sample.rollout_id or "")
                if rollout is not None and rollout.rollout_id in own:
                    group_of_it, indexes = own[rollout.rollout_id]
                    if group_of_it == number and sample.index not in indexes:
                        indexes.add(sample.index)
                        of_group.pop("group_size", None)  # of samples, and this one is another of the same rollout
                        continue
                    why = f"group {group_of_it} of its item has rollout {rollout.rollout_id}, and each is trained once"
                    rollout = self._refused(sample, why, key)
                elif rollout is not None:
                    own[rollout.rollout_id] = number, {sample.index}
                    if rollout.reward != sample.score:
                        rollout = replace(rollout, left_out="").rewarded(_reward(sample.score))
                else:
                    rollout = self._recognised(sample, next(matches), key, used)
                at_place[sample.place] = rollout
                if rollout.reward is not None:
                    extras[rollout.rollout_id] = self._extras(sample, rollout, key)
            played.append(
                PlayedGroup(
                    item,
                    key,
                    self.tools,
                    renumbered(list(at_place.values())),
                    extras=extras,
                    group_overrides=of_group,
                    returned=_with_sampled_tokens(group, at_place),
                )
            )
        return self._with_the_rest(item, item_key, played, recording, used, own)

    def _recognised(self, sample: ReturnedSample, match: Match, key: str, used: set[int]) -> Rollout:
        used.update(map(id, match.completions))
        if not match.refused:
            return rollout_of(match.completions, item_key=key, index=sample.place, score=sample.score)
        return self._refused(sample, match.refused, key)

    def _refused(self, sample: ReturnedSample, reason: str, key: str) -> Rollout:
        self.refused += 1
        why = f"sample {sample.place} is refused: {reason}"
        self._tell_once(reason, f"{key}: {why}")
        refused = rollout_of((), item_key=key, index=sample.place, score=None, left_out=why)
        return replace(refused, not_sampled=True)

    def _extras(self, sample: ReturnedSample, rollout: Rollout, key: str) -> dict[str, Any]:
        """The data that is sent with a sample, in addition to its tokens."""
        sent = next(iter(rollout.samples), None)
        if sent is not None and self.on_drift is not None:
            self.on_drift(key, sample, drift_of(sample, sent, self.decode))
        fits = sent is not None and sample.tokens == sent.tokens
        kept: dict[str, Any] = {"overrides": dict(sample.overrides)} if sample.overrides else {}
        for name, value in sample.carried.items():
            if name not in OF_TOKENS or (fits and sent is not None and _one_for_each_token(value, sent)):
                kept[name] = value
            else:
                why = f"{name} of the environment belong to other tokens than were sampled; they are not sent"
                self._tell_once(name, f"{key}: {why}")
        return kept

    def _with_the_rest(
        self,
        item: Any,
        item_key: str,
        played: list[PlayedGroup],
        recording: ItemRecording,
        used: set[int],
        own: Container[str],
    ) -> list[PlayedGroup]:
        """The groups with everything that was sampled and is in none of them: nothing is lost silently."""
        missing = [rollout for rollout in recording.rollouts.values() if rollout.rollout_id not in own]
        if not played and missing:  # our own group, which was not complete or not scored
            return [PlayedGroup(item, item_key, self.tools, missing)]
        rest = _unfinished(missing)
        left = [each for each in recording.completions if id(each) not in used]
        beside = _beside(left, item_key) if left else None
        if not played:
            why = "collect_trajectories returned no group"
            return [PlayedGroup(item, item_key, self.tools, rest, declined=why, beside=beside)]
        return [replace(played[0], rollouts=[*played[0].rollouts, *rest], beside=beside), *played[1:]]

    def _tell_once(self, what: str, line: str) -> None:
        if what not in self._printed and len(self._printed) < _MOST_PRINTED:
            self._printed.add(what)
            self.tell(line)


def _reward(score: float) -> Any:
    from lachesis.rewards.reward import Reward

    return Reward(score)


def _one_for_each_token(value: Any, sample: TokenSample) -> bool:
    return isinstance(value, list | tuple) and len(value) == len(sample.tokens)


def _with_sampled_tokens(group: ReturnedGroup, at_place: Mapping[int, Rollout]) -> dict[str, Any]:
    """The group as the environment's own hooks read it, with the sampled tokens where there are some."""
    count = len(group.samples)
    tokens = list(group.given.get("tokens") or [None] * count)
    masks = list(group.given.get("masks") or [None] * count)
    logprobs: list[Any] = [None] * count
    for place, rollout in at_place.items():
        if (sample := next(iter(rollout.samples), None)) and place < len(tokens) and place < len(masks):
            tokens[place], masks[place], logprobs[place] = sample.tokens, sample.masks, sample.logprobs
    return {**group.given, "tokens": tokens, "masks": masks, "inference_logprobs": logprobs}


def _infrastructure(recording: ItemRecording, item_key: str, error: Exception) -> Rollout:
    rollout = Rollout.broken(item_key, 0, error)
    completions: Sequence[RecordedCompletion] = recording.completions
    return replace(
        rollout,
        outcome=Outcome.INFRA_ERROR,
        reason=str(error),
        traceback=None,
        error=error,
        result=result_of(completions, Outcome.INFRA_ERROR, str(error), error) if completions else None,
    )


def _beside(completions: Sequence[RecordedCompletion], item_key: str) -> Rollout:
    count = "1 completion is" if len(completions) == 1 else f"{len(completions)} completions are"
    why = f"{count} in no sample that the environment returned"
    return rollout_of(completions, item_key=item_key, index=0, score=None, left_out=why)


def _unfinished(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Rollouts of our own loop that the environment did not return; they lose their rewards."""
    why = "collect_trajectories did not return it"
    return [replace(each.rewarded(None), left_out=why) if each.reward is not None else each for each in rollouts]


def _failed(recording: ItemRecording, item_key: str, failure: BaseException) -> list[Rollout]:
    """The rollouts of an item on which the environment raised, or took too long."""
    rollout = Rollout.broken(item_key, 0, failure)
    if isinstance(failure, _TooLate):
        why = str(failure)
        rollout = replace(rollout, outcome=Outcome.TIMEOUT, reason=why, left_out=why, error=failure, traceback=None)
    elif isinstance(failure, ConversationRefused):
        why = str(failure)
        rollout = replace(rollout, outcome=Outcome.REFUSED, reason=why, left_out=why, traceback=None)
    if recording.completions:
        rollout = replace(rollout, result=result_of(recording.completions, rollout.outcome, rollout.reason))
    return [rollout, *_unfinished(recording.rollouts.values())]
