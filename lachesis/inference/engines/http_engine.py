"""What all token engines over HTTP share: one request, one answer, and the checks that make its tokens trustworthy."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from lachesis.inference import wire
from lachesis.inference.engines.base import Generated, Generation
from lachesis.inference.engines.prompt_ids import PromptIds
from lachesis.inference.errors import BadResponse
from lachesis.inference.http_client import HttpClient, ServerSettings
from lachesis.inference.sampling import LogprobsKind, Sampling, said_of_sampling

_ROUNDING: Final = 1e-5
"""How far above zero a logprob may be: float32 probabilities of almost one are rounded to a little more than one."""
_FLOOR: Final = -9000.0
"""vLLM and its kin write -9999 for minus infinity, which no sampled token has."""
_RESERVED: Final = frozenset(
    {
        "best_of",
        "echo",
        "input_ids",
        "logprobs",
        "n",
        "prompt",
        "stream",
        "suffix",
        "text",
        "token_ids",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)
"""Fields that would change what is asked or how it is answered, so that the tokens could not be told any more."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an engine's API said, taken out of its shape and checked one by one, not yet against the request."""

    generations: Sequence[Generation]
    model: str | None = None
    model_version: str | None = None
    prompt_ids: object = None
    """The prompt as the server repeats it, where it does."""
    prompt_length: int | None = None
    """Tokens that the server says the prompt had."""


class HttpEngine(HttpClient):
    """What every engine does with its settings, and with what a server says of its tokens."""

    kind: ClassVar[str]
    modes: ClassVar[tuple[LogprobsKind, ...]]
    """What its logprobs can be of; the first is what they are without `logprobs_mode`."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        if settings.logprobs_mode is not None and settings.logprobs_mode not in self.modes:
            raise ValueError(
                f"{self.kind} reports {' or '.join(self.modes)} logprobs, never {settings.logprobs_mode}; set "
                f"openai.logprobs_mode to one of these, or leave it out"
            )
        _refuse_reserved(settings.extra_body, "openai.extra_body")
        decided = said_of_sampling(settings.extra_body)  # by each request's `Sampling`
        self._extra = {name: value for name, value in settings.extra_body.items() if name not in decided}

    @property
    def logprobs(self) -> LogprobsKind:
        """What the reported logprobs are of."""
        return self.settings.logprobs_mode or self.modes[0]

    def extra(self, sampling: Sampling) -> dict[str, Any]:
        """What is sent beyond the parameters that `Sampling` names: the settings' fields, then the request's."""
        return {**self._extra, **sampling.extra}

    def record(self, sampling: Sampling) -> dict[str, Any]:
        """How a request was sampled, for the record of its tokens."""
        return {**self._extra, **sampling.record(self.logprobs)}

    def check_reading(self, reading: Reading, prompt: PromptIds, n: int) -> None:
        """Raise `BadResponse` unless the answer is one to this request."""
        if len(reading.generations) != n:
            raise BadResponse(
                self.base_url, f"{n} completions were asked for and {len(reading.generations)} came", _UPDATE
            )
        self.check_prompt(prompt, reading.prompt_ids, reading.prompt_length)

    def check_prompt(self, prompt: PromptIds, echoed: object, length: int | None) -> None:
        """Raise `BadResponse` if the prompt that the server repeats, or counts, is not the one that was sent."""
        if isinstance(echoed, list):
            length = len(echoed)
        elif echoed is not None:
            raise BadResponse(self.base_url, f"the prompt came back as {type(echoed).__name__}, not as ids", _UPDATE)
        if length is not None and length != len(prompt):
            raise BadResponse(
                self.base_url,
                f"the prompt had {len(prompt)} tokens, but the server sampled after {length}",
                "let it neither truncate prompts (SGLang: --allow-auto-truncate) nor add tokens of its own",
            )
        if echoed is not None and echoed != prompt.ids:
            where = next(i for i, (sent, came) in enumerate(zip(prompt, echoed, strict=True)) if sent != came)
            raise BadResponse(
                self.base_url,
                f"the server sampled after another prompt: id {where} was sent as {prompt[where]} and came back as "
                f"{echoed[where]!r}",
                "look for a proxy or a plugin that rewrites prompts",
            )

    def generation(
        self, ids: object, logprobs: object, raw_reason: object, model_version: str | None = None
    ) -> Generation:
        """A completion of which every id and every logprob has been looked at; `BadResponse` otherwise."""
        if not isinstance(ids, list) or not isinstance(logprobs, list):
            raise BadResponse(self.base_url, "a completion has no token ids or no logprobs", _UPDATE)
        if len(ids) != len(logprobs):
            reason = f"a completion has {len(ids)} token ids, but {len(logprobs)} logprobs"
            raise BadResponse(self.base_url, reason, _UPDATE)
        # Whole lists at a time: a loop over 32k tokens would hold the event loop up for milliseconds.
        if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) < 1 << 32):
            wrong = next(token for token in ids if type(token) is not int or not 0 <= token < 1 << 32)
            raise BadResponse(self.base_url, f"{wrong!r} is no token id", _UPDATE)
        if set(map(type, logprobs)) - {float} or not math.isfinite(sum(logprobs)) or _out_of_range(logprobs):
            logprobs = [self._logprob(value, position) for position, value in enumerate(logprobs)]
        raw = text_or_none(raw_reason)
        return Generation(ids, logprobs, wire.read_finish_reason(raw), raw, model_version)

    def _logprob(self, value: object, position: int) -> float:
        if isinstance(value, (int, float)) and type(value) is not bool:
            if _FLOOR < value <= 0:
                return float(value)
            if 0 < value <= _ROUNDING:
                return 0.0
        raise BadResponse(
            self.base_url,
            f"the logprob of sampled token {position} is {value!r}, which no sampled token has",
            "such a completion cannot be trained on; if it repeats, look at the server's log for NaN",
        )


async def one_by_one(requests: Iterable[Coroutine[Any, Any, Generated]]) -> Generated:
    """Requests for one completion each, side by side, as one answer. `latency` is that of the slowest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    answers = [task.result() for task in tasks]
    return replace(
        answers[0],
        generations=[generation for answer in answers for generation in answer.generations],
        latency=max(answer.latency for answer in answers),
        attempts=1 + sum(answer.attempts - 1 for answer in answers),
    )


class SingleRequestEngine(HttpEngine, ABC):
    """A `TokenEngine` whose API answers one POST with all `n` completions."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> Generated:
        """`n` completions of the prompt; see `TokenEngine`."""
        prompt = check_request(prompt_ids, sampling, n)
        if n > 1 and sampling.temperature <= 0:  # vLLM refuses several greedy completions in one request
            return await one_by_one(self.generate(prompt, sampling, max_retries=max_retries) for _ in range(n))
        payload = self.payload(prompt, sampling, n)
        answer = await self.send(
            self.url,
            payload,
            max_retries=max_retries,
            echo=lambda: b'"prompt_token_ids":' + prompt.json,
            shorten=self.shorten,
        )
        reading = self.read(answer.body)
        self.check_reading(reading, prompt, n)
        return Generated(
            generations=reading.generations,
            model=reading.model,
            model_version=reading.model_version,
            latency=answer.latency,
            attempts=answer.attempts,
            sampling=self.record(sampling),
        )

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the request goes."""

    @abstractmethod
    def payload(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """The request, every sampling parameter spelled out."""

    def shorten(self, raw: bytes) -> bytes:
        """An answer as it came, without what `read` does not look at."""
        return raw

    @abstractmethod
    def read(self, body: Mapping[str, Any]) -> Reading:
        """The answer; `BadResponse` where it is none, or says something of its tokens that cannot be."""


_UPDATE: Final = "its API is not the one that this kind of engine speaks: check openai.engine and its version"


def check_request(prompt_ids: Sequence[int], sampling: Sampling, n: int) -> PromptIds:
    """The prompt, ready to be sent. `ValueError` for what servers answer with something that was not asked for."""
    if not prompt_ids:
        raise ValueError("the prompt has no tokens; no engine samples after nothing")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens}; an engine samples one token or more")
    if n < 1:
        raise ValueError(f"n is {n}; ask for one completion or more")
    _refuse_reserved(sampling.extra, "extra_body")
    return prompt_ids if isinstance(prompt_ids, PromptIds) else PromptIds(prompt_ids)


def list_of_objects(value: object) -> list[Mapping[str, Any]] | None:
    """`value` if it is a list of JSON objects, else None."""
    return value if isinstance(value, list) and all(isinstance(item, Mapping) for item in value) else None


def text_or_none(value: object) -> str | None:
    """`value` if it is text."""
    return value if isinstance(value, str) else None


def join_versions(versions: Iterable[object]) -> str | None:
    """The versions of the weights, each once, in the order in which they sampled."""
    return "+".join(dict.fromkeys(str(version) for version in versions if version is not None)) or None


def _out_of_range(logprobs: Sequence[float]) -> bool:
    return bool(logprobs) and not _FLOOR < min(logprobs) <= max(logprobs) <= 0


def _refuse_reserved(extra: Mapping[str, Any], where: str) -> None:
    if reserved := sorted(_RESERVED & extra.keys()):
        raise ValueError(f"{where} sets {', '.join(reserved)}, which the token engine sets itself; leave it out")
