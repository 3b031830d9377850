"""A token engine over the sampler of a trainer: what its own vLLM or SGLang answers, with the version of the weights.

A completion that the trainer aborted for new weights comes with the tokens so far. `TokenServer` goes on with it, so
that each token has the version that sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeAlias

from backends.tasks import run_all
from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import ContextExhausted, InferenceError, RequestRejected, ServerUnavailable
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_messages.messages import FinishReason
from lachesis_messages.tokens import PromptChecked
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.engines.checks import checked_completion
from lachesis_tokens.engines.prompt_ids import PromptIds

_REASONS: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "aborted": FinishReason.ABORT,
}
_MOST_ROLLOUTS: Final = 1 << 16
"""Rollouts of which the length of the first prompt is kept."""


@dataclass(frozen=True, slots=True)
class TrainerCompletion:
    """One completion of a trainer's sampler, or its beginning."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None
    reason: str | None
    """"stop", "length" or "abort"; with any other one, the last token shows which it is."""
    versions: Sequence[Any] = ()
    """Of the weights that sampled it. Where there are several, nobody knows which sampled which token."""


TrainerSampler: TypeAlias = Callable[[list[int], str, int, float], Coroutine[Any, Any, TrainerCompletion]]
"""One completion of a prompt: its ids, the name of the rollout for sticky routing, the most tokens, the temperature."""


class TokenRoom:
    """How many tokens may follow the first prompt of a rollout, and how many a prompt may have.

    Args:
        url, setting: name the trainer and its limit, for messages.
    """

    def __init__(self, url: str, setting: str) -> None:
        self.url, self.setting = url, setting
        self.after_first: int | None = None
        self.prompt: int | None = None
        self._first: dict[str, int] = {}

    def left(self, prompt_ids: Sequence[int]) -> int:
        """Tokens that a completion of this prompt may have. Raises `ContextExhausted` if there is none."""
        route = prompt_ids.route if isinstance(prompt_ids, PromptIds) else None
        first = count = len(prompt_ids)
        if route is not None and route.session:
            first = self._first.setdefault(route.session, first)
            if len(self._first) > _MOST_ROLLOUTS:
                del self._first[next(iter(self._first))]
        if self.prompt is not None and count > self.prompt:
            raise ContextExhausted(self.url, 400, f"the prompt has {count} tokens; {self.setting} is {self.prompt}")
        if self.after_first is None:
            return 1 << 31
        if (left := first + self.after_first - count) > 0:
            return left
        used = count - first
        raise ContextExhausted(
            self.url, 400, f"{used} tokens follow the first prompt; {self.setting} of the trainer is {self.after_first}"
        )

    def forget(self) -> None:
        """The rollouts are over."""
        self._first.clear()


def refused_parameter(sampling: Sampling) -> str:
    """A parameter other than the temperature and the number of tokens; empty if there is none."""
    plain = Sampling(max_tokens=sampling.max_tokens, temperature=sampling.temperature)
    for name, value in {**sampling.parameters(), **sampling.extra}.items():
        if value != plain.parameters().get(name):
            return f"{name} = {value!r}"
    return ""


class TrainerSamplerEngine:
    """See `TokenEngine`.

    Args:
        sample: the trainer's sampler.
        url: names the trainer in messages and records.
        logprobs: the kind of its logprobs.
        room: the trainer's limits.
        tokenizer: the trainer's.
        time_limit: seconds for a completion; None for any. An engine that cannot be placed would never answer.
    """

    kind: ClassVar[str] = "trainer"
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("processed", "temperature", "raw")
    prompt_checked: PromptChecked = "none"
    """See `Generation.prompt_checked`."""

    def __init__(
        self,
        sample: TrainerSampler,
        *,
        tokenizer: Any,
        url: str,
        logprobs: LogprobsKind,
        room: TokenRoom,
        time_limit: float | None,
    ) -> None:
        self.settings = ServerSettings(base_url=url, model_name="policy", max_concurrency=1 << 20)
        self.room = room
        self.tokenizer = tokenizer
        self.ends: frozenset[int] = frozenset()
        """Ids that end a turn."""
        self.caller: asyncio.AbstractEventLoop | None = None
        """The event loop of the trainer. None: the one that rollouts run on."""
        self._sample = sample
        self.base_url = url
        self.logprobs: LogprobsKind = logprobs
        self._time_limit = time_limit

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> list[Generation]:
        """See `TokenEngine.generate`. Retries are the trainer's.

        Raises:
            RequestRejected: a parameter other than the temperature and the number of tokens.
        """
        if refused := refused_parameter(sampling):
            raise RequestRejected(
                self.base_url, 400, refused, "leave it out of the settings: the trainer decides how its engine samples"
            )
        limit = min(sampling.max_tokens, self.room.left(prompt_ids))
        route = prompt_ids.route if isinstance(prompt_ids, PromptIds) else None
        session = (route and route.session) or ""
        asked = replace(sampling, max_tokens=limit)
        return await run_all(self._one(list(prompt_ids), asked, session) for _ in range(n))

    async def _one(self, prompt_ids: list[int], sampling: Sampling, session: str) -> Generation:
        began = time.monotonic()
        given = await self._answer(prompt_ids, sampling, session)
        reported = None if given.logprobs is None else [float(value) for value in given.logprobs]
        step = "let the trainer's sampler report each sampled token with its logprob"
        ids, logprobs = checked_completion(self.base_url, list(given.ids), reported, step)
        names = [str(version) for version in dict.fromkeys(given.versions) if version not in (None, "")]
        reason = _REASONS.get(given.reason or "")
        if reason is None:
            ended = FinishReason.STOP if ids and ids[-1] in self.ends else FinishReason.UNKNOWN
            reason = FinishReason.LENGTH if ended is FinishReason.UNKNOWN and len(ids) >= sampling.max_tokens else ended
        return Generation(
            ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            raw_finish_reason=given.reason,
            model=self.settings.model_name,
            model_version="+".join(names) or None,
            server=self.base_url,
            latency=time.monotonic() - began,
            sampling=sampling.record(self.logprobs),
            prompt_checked=self.prompt_checked,
            versions=((names[0], 0, len(ids)),) if len(names) == 1 and ids else (),
        )

    async def _answer(self, prompt_ids: list[int], sampling: Sampling, session: str) -> TrainerCompletion:
        """What the sampler says. Its failure is one of the infrastructure."""
        call = self._sample(prompt_ids, session, sampling.max_tokens, sampling.temperature)
        try:
            async with asyncio.timeout(self._time_limit):
                if self.caller in (None, asyncio.get_running_loop()):
                    return await call
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self.caller))
        except TimeoutError as error:
            cause = f"the trainer's sampler gave no answer in {self._time_limit:g} s; is its engine placed and awake"
            raise ServerUnavailable(self.base_url, cause, 1) from error
        except InferenceError:
            raise
        except Exception as error:
            cause = f"the trainer's sampler raised {type(error).__name__}: {error}"
            raise ServerUnavailable(self.base_url, cause, 1) from error

    async def tokenize(self, text: str) -> list[int] | None:
        """The ids of the run's tokenizer, which is the trainer's own."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    async def check(self) -> list[str]:
        return []

    async def close(self) -> None:
        """Nothing to close: the engine is the trainer's."""
