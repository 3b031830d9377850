"""Completions that a server aborted: what remains to be sampled, where they end, and their parts as one completion.

Servers abort completions when their weights change. Sampling these again from the beginning would make long completions
rare: the longer one is, the more updates it meets. So the tokens are kept, and the rest is sampled after them. The
server that continues sees the tokens so far as part of the prompt. It does not see that they count against `max_tokens`
and `min_tokens`, that a stop text began in them, and that they have used up the random numbers of the seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from time import monotonic
from typing import Any, Final

from lachesis_client.errors import ServerUnavailable
from lachesis_client.http_attempts import retry_delay
from lachesis_client.sampling import Sampling
from lachesis_messages.messages import FinishReason
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_messages.tokens import PromptChecked, Versions
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.engines.replay_fields import joined_replay
from lachesis_tokens.server.stop_texts import StopTexts

_LEAST: Final = ("min_tokens", "min_new_tokens")
"""The least number of tokens, in the spelling of vLLM and of SGLang."""
_LOWERED: Final = ("max_tokens", "seed", *_LEAST)
"""What the request that goes on has another value of."""
_NEEDS_ALL: Final = (
    *("bad_words", "custom_logit_processor", "ebnf", "grammar", "json_schema", "logits_processors", "mirostat"),
    *("regex", "response_format", "structural_tag", "structured_outputs"),
    *("max_thinking_tokens", "thinking_budget", "thinking_token_budget"),
    *("guided_choice", "guided_decoding", "guided_grammar", "guided_json", "guided_regex"),
    *("repetition_detection", "stop_regex"),
)
"""Extra fields whose effect on a token, or on the end, depends on the sampled tokens before it. A server forgets these
at an abort."""
_WEAKER: Final[Sequence[PromptChecked]] = ("ids", "length", "none")
_LONGEST_PAUSE: Final = 5.0


class Interrupted:
    """Rules for one request whose completions were aborted.

    Args:
        sampling: of the whole completion.
        extra_body: further fields of the request, from the settings of its server.
        ends: ids that end a turn.
        decode: the text of ids.
    """

    def __init__(
        self,
        sampling: Sampling,
        extra_body: Mapping[str, Any],
        ends: Sequence[int],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        extra = {**extra_body, **sampling.extra}
        self._sampling = sampling
        self._least = {name: int(extra[name]) for name in _LEAST if extra.get(name)}
        self._stops = StopTexts.of(sampling, extra_body, decode)
        self._ends = frozenset(() if extra.get("ignore_eos") else ends) | frozenset(extra.get("stop_token_ids") or ())
        self._begins_again = any(extra.get(name) for name in _NEEDS_ALL) or (
            sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        )

    def kept(self, begun: Generation) -> Generation:
        """The kept part of an aborted completion: all of its tokens, or none if its sampling depends on all of them.

        It gets another finish reason if it has ended: SGLang reports the last token of an aborted completion before it
        looks whether that token ends it.
        """
        if begun.finish_reason is not FinishReason.ABORT:
            return self._stops.cut(begun) if begun.interrupts else begun
        ended = self._stops.cut(begun)
        if ended.finish_reason is not FinishReason.ABORT:
            return ended
        if begun.ids and begun.ids[-1] in self._ends:
            return replace(begun, finish_reason=FinishReason.STOP)
        if len(begun.ids) >= self._sampling.max_tokens:
            return replace(begun, finish_reason=FinishReason.LENGTH)
        if self._begins_again:
            return replace(begun, ids=(), logprobs=(), versions=(), model_version=None, interrupts=0)
        return begun

    def rest(self, begun: Generation, index: int) -> Sampling:
        """The parameters of the request that goes on. `index` is that of the choice."""
        count, sampling = len(begun.ids), self._sampling
        least = {name: max(0, value - count) for name, value in self._least.items()}
        seed = sampling.seed
        if seed is not None and (count or index):
            # With the seed itself, the random numbers of the first tokens would decide about these tokens again.
            seed = int.from_bytes(blake2b(f"{seed}/{index}/{count}".encode(), digest_size=4).digest()) >> 1
        return replace(sampling, max_tokens=sampling.max_tokens - count, seed=seed, extra={**sampling.extra, **least})


def joined(begun: Generation, rest: Generation) -> Generation:
    """One completion of two parts: the second was sampled after the first."""
    whole = replace(
        rest,
        latency=begun.latency + rest.latency,
        attempts=begun.attempts + rest.attempts,
        sampling=_joined_sampling(begun, rest),
    )
    if not begun.ids:
        return whole
    if rest.ids:
        versions, interrupts = _joined_versions(begun, rest), begun.interrupts + rest.interrupts + 1
        checked = max(begun.prompt_checked, rest.prompt_checked, key=_WEAKER.index)
    else:  # SGLang confirms no prompt of what it aborts in its queue
        versions, interrupts, checked = begun.versions, begun.interrupts, begun.prompt_checked
    names = [_names(part) for part in (begun, rest) if part.ids]
    return replace(
        whole,
        **joined_replay(begun, rest),
        ids=[*begun.ids, *rest.ids],
        logprobs=[*begun.logprobs, *rest.logprobs],
        versions=versions,
        interrupts=interrupts,
        model_version="+".join(dict.fromkeys(chain.from_iterable(names))) if all(names) else rest.model_version,
        prompt_checked=checked,
        cached_tokens=begun.cached_tokens,
        image_tokens=rest.image_tokens or begun.image_tokens,  # what was aborted in the queue has none
    )


def _joined_sampling(begun: Generation, rest: Generation) -> Mapping[str, Any]:
    """The record of the request that began it; if the other one cannot be trained, that of the other."""
    if not begun.sampling or not rest.ids or not sampling_problem(rest.sampling):
        return begun.sampling
    return {**rest.sampling, **{name: begun.sampling[name] for name in _LOWERED if name in begun.sampling}}


def _joined_versions(begun: Generation, rest: Generation) -> Versions:
    """Empty if one of the parts has none: ranges cover all tokens, or there are none."""
    if not begun.versions or not rest.versions:
        return ()
    shift = len(begun.ids)
    (last, start, _), (first, _, end), *others = begun.versions[-1], *rest.versions
    seam = [(last, start, end + shift)] if first == last else [begun.versions[-1], (first, shift, end + shift)]
    return (*begun.versions[:-1], *seam, *((name, low + shift, high + shift) for name, low, high in others))


def _names(part: Generation) -> list[str]:
    """The versions that sampled a part, also where nobody knows which of them sampled which token."""
    if part.versions:
        return [name for name, _, _ in part.versions]
    return part.model_version.split("+") if part.model_version else []


class Patience:
    """Pauses between requests that were aborted without a token.

    A server that updates its weights has not failed, so these do not count as failures. `deadline` is how many
    seconds may pass without a token.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._count = 0
        self._since = monotonic()

    def progress(self) -> None:
        """A token came."""
        self._count = 0

    async def pause(self, begun: Generation) -> None:
        """Raises `ServerUnavailable` after the deadline."""
        if not self._count:
            self._since = monotonic()
        self._count += 1
        waited = monotonic() - self._since
        if waited > self._deadline:
            cause = f"it aborted every attempt for {waited:.0f} s, and no token could be kept (finish_reason 'abort')"
            raise ServerUnavailable(begun.server, cause, begun.attempts)
        await asyncio.sleep(min(_LONGEST_PAUSE, retry_delay(self._count)))
