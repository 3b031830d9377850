"""The current policy as a token engine: ids in, ids and logprobs out, all of one completion from one version."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Final

from backends.errors import LachesisError
from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import ContextExhausted, RequestRejected
from lachesis_client.parse_thread import LONG_IDS, parse
from lachesis_client.rejections import rejection
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_messages.messages import FinishReason
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.server.stop_texts import StopTexts
from lachesis_train.policy import CurrentPolicy, PolicyVersion, Sampled

_log: Final = logging.getLogger(__name__)
_MOST_IDS: Final = 2**31
"""Models have rows beyond their tokenizer's vocabulary, and may sample them; tokenizers decode those to nothing."""


class EngineFailed(LachesisError):
    """The engine behind the policy failed, or answered what cannot be a completion."""


class PolicyEngine:
    """A `TokenEngine` in the process of the policy.

    A version is chosen when a completion begins to be sampled, not when its request came. A completion ends at the
    first end of a turn, stop id or stop text in it, whatever its sampler makes of them.

    Args:
        settings: `model_name` is reported, `max_concurrency` bounds the requests that are sampled at once.
        end_of_turn: ids that end a turn.
        decode: the text of ids, special tokens included.
        context_length: tokens of prompt and completion together; None leaves it to the engine.
    """

    kind: ClassVar[str] = "policy"
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("raw", "temperature", "processed")
    base_url: ClassVar[str] = "policy"

    def __init__(
        self,
        policy: CurrentPolicy,
        settings: ServerSettings,
        *,
        end_of_turn: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        context_length: int | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.context_length = context_length
        self._ends = tuple(end_of_turn)
        self._decode = decode

    @property
    def logprobs(self) -> LogprobsKind:
        """The kind that the samplers report."""
        return self.policy.logprobs

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> list[Generation]:
        """`n` completions of the prompt; see `TokenEngine`. `sampling.extra` may have `stop_token_ids`, `ignore_eos`.

        Raises:
            RequestRejected: the request cannot be sampled; `ContextExhausted` if its prompt is too long.
            EngineFailed: the engine failed.
        """
        prompt = list(prompt_ids)
        room = self._room(prompt)
        max_tokens = sampling.max_tokens if room is None else min(sampling.max_tokens, room)
        ends = {*sampling.extra.get("stop_token_ids", ()), *(() if sampling.extra.get("ignore_eos") else self._ends)}
        # Samplers may end at an end of turn beside the stops that they are given; without any they do not.
        stop = [] if sampling.extra.get("ignore_eos") else list(sampling.stop) or sorted(ends)
        version, started = self.policy.current, time.monotonic()
        try:
            answers = await version.sampler.sample(
                prompt,
                n=n,
                max_tokens=max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                seed=sampling.seed,
                stop=stop,
            )
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise  # the client is gone
            raise self._failed(f"version {version.name} cannot be sampled: the engine cancelled the request") from None
        except ValueError as error:
            raise rejection(self.base_url, 400, str(error), {}, has_key=False) from error
        except Exception as error:
            raise self._failed(f"version {version.name} cannot be sampled: {type(error).__name__}: {error}") from error
        latency = time.monotonic() - started
        try:
            if len(answers) != n:
                raise self._failed(f"{n} completions were requested of version {version.name} and {len(answers)} came")
            return await parse(
                sum(len(answer.tokens) for answer in answers) > LONG_IDS,
                lambda: [self._generation(answer, version, sampling, max_tokens, ends, latency) for answer in answers],
            )
        except (AttributeError, TypeError) as error:
            raise self._failed(f"version {version.name} returned an invalid completion: {error}") from error

    async def check(self) -> list[str]:
        """The model's name."""
        return [self.settings.model_name]

    async def close(self) -> None:
        """Nothing: the samplers belong to the trainer."""

    def _room(self, prompt: Sequence[int]) -> int | None:
        """Tokens that the context leaves for a completion."""
        if not prompt:
            raise RequestRejected(self.base_url, 400, "the prompt has no tokens")
        if self.context_length is None:
            return None
        room = self.context_length - len(prompt)
        if room < 1:
            reason = (
                f"this model's maximum context length is {self.context_length} tokens, and the prompt has {len(prompt)}"
            )
            raise ContextExhausted(self.base_url, 400, reason)
        return room

    def _generation(
        self,
        answer: Sampled,
        version: PolicyVersion,
        sampling: Sampling,
        max_tokens: int,
        ends: Collection[int],
        latency: float,
    ) -> Generation:
        ids, logprobs = list(answer.tokens), list(answer.logprobs)
        if not ids or len(ids) != len(logprobs) or len(ids) > max_tokens:
            raise self._failed(
                f"version {version.name} was asked for at most {max_tokens} tokens and answered {len(ids)} tokens with "
                f"{len(logprobs)} logprobs"
            )
        if not math.isfinite(sum(logprobs)):
            raise self._failed(f"version {version.name} answered logprobs that are not finite numbers")
        if not all(isinstance(token, int) for token in ids) or min(ids) < 0 or max(ids) >= _MOST_IDS:
            raise self._failed(f"version {version.name} answered tokens that are not token ids")
        count = StopTexts(sampling.stop, self._decode, stop_ids=frozenset(ends)).end(ids)
        stopped = count is not None or answer.stop_reason == "stop"
        ids, logprobs = ids[:count], logprobs[:count]
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Generation(
            ids,
            logprobs,
            reason,
            reason.value,
            model=self.settings.model_name,
            model_version=version.name,
            server=self.base_url,
            latency=latency,
            sampling=sampling.record(self.logprobs),
            prompt_checked="ids",
            versions=((version.name, 0, len(ids)),),
        )

    def _failed(self, reason: str) -> EngineFailed:
        _log.warning("%s", reason)
        return EngineFailed(reason)
