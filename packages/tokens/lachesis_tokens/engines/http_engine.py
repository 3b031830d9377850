"""Base classes of token engines: one request, one answer, and the checks that make its tokens trustworthy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from backends.tasks import run_all
from lachesis_client.chat_format import read_finish_reason
from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import BadResponse, RequestRejected, ServerUnavailable
from lachesis_client.http_attempts import ARRAY
from lachesis_client.http_client import HttpClient
from lachesis_client.sampling import SAMPLING_FIELDS, LogprobsKind, Sampling, recorded_fields
from lachesis_messages.tokens import Versions
from lachesis_tokens.engines.base import REPLAY, Generation
from lachesis_tokens.engines.checks import checked_completion
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.engines.shortening import ECHOED, without_echo

_RESERVED: Final = frozenset(
    (
        *("best_of", "echo", "input_ids", "logprobs", "n", "prompt"),
        *("stream", "suffix", "text", "token_ids", "truncate_prompt_tokens", "use_beam_search"),
    )
)
"""Fields that would change the prompt or the form of the answer, so that the tokens could no longer be read."""
_TAKES_IMAGES: Final = (
    "serve a model that takes images, with its own chat template; SGLang before 0.5.13 re-encodes prompts with images"
)
_CHECK_ENGINE: Final = "its API is not the one of this engine: check openai.engine and the server's version"


class HttpEngine(HttpClient):
    """Handles the settings and validates the tokens that a server reports."""

    kind: ClassVar[str]
    modes: ClassVar[tuple[LogprobsKind, ...]]
    replays: ClassVar[frozenset[str]] = frozenset()
    """Of `REPLAY`, what its API reports."""
    takes_images: ClassVar[bool] = False
    """Whether `payload` sends `PromptIds.sent` and `PromptIds.images`, and the server repeats the ids that it made."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        if settings.logprobs_mode is not None and settings.logprobs_mode not in self.modes:
            raise ValueError(
                f"{self.kind} reports {' or '.join(self.modes)} logprobs, never {settings.logprobs_mode}; set "
                f"openai.logprobs_mode to one of these, or leave it out"
            )
        for name in REPLAY:
            if getattr(settings, name) and name not in self.replays:
                raise ValueError(f"the API of the engine {self.kind} reports no {name}; leave openai.{name} out")
        _reject_reserved(settings.extra_body, "openai.extra_body")
        # The `Sampling` of each request has its own fields.
        self._extra = {name: value for name, value in settings.extra_body.items() if name not in SAMPLING_FIELDS}

    @property
    def logprobs(self) -> LogprobsKind:
        """The kind of the reported logprobs."""
        return self.settings.logprobs_mode or self.modes[0]

    def extra(self, sampling: Sampling) -> dict[str, Any]:
        """Fields that `Sampling` does not name: those of the settings, then those of the request."""
        return {**self._extra, **sampling.extra}

    def record(self, sampling: Sampling) -> dict[str, Any]:
        """The sampling parameters of a request, for the record of its tokens."""
        extra = recorded_fields(self.extra(sampling), self.settings.harmless_fields)
        masked = {"sampling_mask": True} if self.settings.sampling_mask else {}
        return {**sampling.parameters(), "logprobs": self.logprobs, **extra, **masked}

    def echoes(self, prompt: PromptIds) -> bool:
        """Whether the server is to repeat this prompt. It doubles the bytes of a long rollout."""
        limit = self.settings.echo_limit
        return limit is None or len(prompt) <= limit or prompt.has_new_images

    def check_prompt(self, prompt: PromptIds, echoed: object, length: int | None) -> None:
        """Note in `prompt.checked` what the server confirms: it may repeat the ids, count them, both or neither.

        Raises `BadResponse` if the prompt that it repeats or counts differs from the one that was sent.
        """
        repeated = echoed is not None
        if echoed == ECHOED:  # compared as text
            echoed = None
        if echoed is not None and not isinstance(echoed, list):
            reason = f"the prompt came back as {type(echoed).__name__}, not as ids"
            raise BadResponse(self.base_url, reason, _CHECK_ENGINE)
        if prompt.has_new_images:
            self._check_images(prompt, echoed, length)
            return
        prompt.image_tokens = tuple(placed.tokens for placed in prompt.images)
        for count in (length, None if echoed is None else len(echoed)):
            if count is not None and count != len(prompt):
                raise BadResponse(
                    self.base_url,
                    f"the prompt had {len(prompt)} tokens, but the server sampled after {count}",
                    "make sure that it neither truncates prompts (SGLang: --allow-auto-truncate) nor adds tokens",
                )
        if echoed is not None and echoed != prompt.ids:
            where = next(i for i, (sent, came) in enumerate(zip(prompt, echoed, strict=True)) if sent != came)
            raise BadResponse(
                self.base_url,
                f"the server sampled after another prompt: id {where} was sent as {prompt[where]} and came back as "
                f"{echoed[where]!r}",
                "look for a proxy or a plugin that rewrites prompts",
            )
        if repeated:
            prompt.checked = "ids"
        elif length is not None and prompt.checked == "none":
            prompt.checked = "length"

    def _check_images(self, prompt: PromptIds, echoed: list[Any] | None, length: int | None) -> None:
        if echoed is None:
            raise BadResponse(
                self.base_url,
                "it did not repeat the ids of a prompt with images, so it is unknown how it encoded them",
                "serve with vLLM 0.32 or later (openai.engine vllm-generate), or SGLang 0.5.13 or later",
            )
        from lachesis_tokens.prompts.prompt_images import expansion  # loaded with the prompt that has the images

        try:
            prompt.image_tokens = expansion(prompt.prefix, echoed)
        except ValueError as error:
            reason = f"the server sampled after another prompt than the one with images that was sent: {error}"
            raise BadResponse(self.base_url, reason, _TAKES_IMAGES) from error
        if length not in (None, len(echoed)):
            raise BadResponse(self.base_url, f"it counts {length} prompt tokens, but repeats {len(echoed)}")
        prompt.checked = "ids"

    def generation(
        self,
        ids: object,
        logprobs: object,
        raw_reason: object,
        *,
        model: object = None,
        model_version: str | None = None,
        versions: object = None,
        completion_id: object = None,
        cached_tokens: int | None = None,
    ) -> Generation:
        """A completion with validated ids and logprobs. Raises `BadResponse` if one of them is invalid.

        `versions` are `{version, start, end}` for ranges of ids, `model_version` that of all ids; None where the server
        reports none.
        """
        ids, logprobs = checked_completion(self.base_url, ids, logprobs, _CHECK_ENGINE)
        raw = text_or_none(raw_reason)
        ranges = self._versions(versions, model_version, len(ids))
        if ranges:
            model_version = "+".join(dict.fromkeys(version for version, _, _ in ranges))
        return Generation(
            ids,
            logprobs,
            read_finish_reason(raw),
            raw,
            text_or_none(model),
            model_version,
            cached_tokens=cached_tokens,
            completion_id=text_or_none(completion_id) or "",
            versions=ranges,
        )

    def _versions(self, listed: object, whole: str | None, count: int) -> Versions:
        if listed is None:
            return ((whole, 0, count),) if whole and count else ()
        entries, found, end = list_of_objects(listed), [], 0
        for entry in entries or ():
            name, first, last = entry.get("version"), entry.get("start"), entry.get("end")
            if type(first) is not int or type(last) is not int or first != end or name is None:
                entries = None
                break
            end = max(end, last)
            if first < (last := min(last, count)):  # a stop text may have cut off what the last ranges count
                found.append((str(name), first, last))
        if entries is None or (entries and end < count):
            raise BadResponse(
                self.base_url,
                f"the versions of the weights are not ranges over the {count} sampled tokens: {str(listed)[:300]}",
                "look for a proxy that changes answers, or report this with the server's version",
            )
        return tuple(found)


async def tokenized(engine: HttpEngine, payload: Mapping[str, Any]) -> list[int] | None:
    """The ids that `/tokenize` answers; None where it gives none: some proxies answer 500 for a route that they do not
    know. vLLM, SGLang and llama.cpp have it, each with its own payload."""
    try:
        answer = await engine.send(f"{engine.root_url}/tokenize", payload, max_retries=1)
    except (BadResponse, RequestRejected, ServerUnavailable):
        return None
    return ids_or_none(answer.body.get("tokens"))


def ids_or_none(value: object) -> list[int] | None:
    """`value` if it is a list of ids, else None."""
    return value if isinstance(value, list) and value and all(type(token) is int for token in value) else None


class SingleRequestEngine(HttpEngine, ABC):
    """A `TokenEngine` whose API answers one POST with all `n` completions."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> list[Generation]:
        """`n` completions of the prompt; see `TokenEngine`."""
        prompt = check_request(prompt_ids, sampling, n)
        if n > 1 and sampling.temperature <= 0:  # vLLM rejects several greedy completions in one request
            return await one_by_one(self.generate(prompt, sampling, max_retries=max_retries) for _ in range(n))

        def shorten(raw: bytes) -> bytes:
            if prompt.has_new_images:  # the server expands these: their ids are compared as numbers
                return self.shorten(raw)
            return self.shorten(without_echo(raw, b'"prompt_token_ids":', prompt.json_pieces()))

        payload = self.payload(prompt, sampling, n)
        answer = await self.send(
            self.url,
            payload,
            max_retries=max_retries,
            shorten=shorten,
            route=prompt.route,
            partial=True,
            check=self._check_any,
            harmless=lambda: self.payload(PromptIds(prompt.ids[:1]), replace(sampling, max_tokens=1), 1),
        )
        prompt.checked, prompt.image_tokens = "none", ()
        generations = self.read(answer.body, prompt)
        if len(generations) != n:
            reason = f"{n} completions were requested and {len(generations)} came"
            raise BadResponse(self.base_url, reason, _CHECK_ENGINE)
        record = self.record(sampling)
        for generation in generations:
            generation.server = self.base_url
            generation.latency, generation.attempts = answer.latency, answer.attempts
            generation.sampling = record
            generation.prompt_checked, generation.image_tokens = prompt.checked, prompt.image_tokens
        return generations

    def _check_any(self, body: Mapping[str, Any]) -> None:
        """Raises `BadResponse` for an empty list of completions."""
        for key, name in (("choices", "choices"), (ARRAY, "completions")):
            if key in body and not body[key]:
                raise BadResponse(self.base_url, f"the answer has no {name}", _CHECK_ENGINE)

    @property
    @abstractmethod
    def url(self) -> str:
        """The address of the route."""

    @abstractmethod
    def payload(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """The request, with every sampling parameter."""

    def shorten(self, raw: bytes) -> bytes:
        """The raw answer without the parts that `read` ignores."""
        return raw

    @abstractmethod
    def read(self, body: Mapping[str, Any], prompt: PromptIds) -> list[Generation]:
        """The completions of an answer, each made by `generation`.

        Calls `check_prompt` with what the server reports of the prompt: without that, the tokens are not trained.
        Raises `BadResponse` for anything else.
        """


async def one_by_one(requests: Iterable[Coroutine[Any, Any, list[Generation]]]) -> list[Generation]:
    """Concurrent requests as one answer. `latency` is that of the slowest."""
    answers = await run_all(requests)
    latency = max(answer[0].latency for answer in answers)
    attempts = 1 + sum(answer[0].attempts - 1 for answer in answers)
    return [replace(one, latency=latency, attempts=attempts) for answer in answers for one in answer]


def check_request(prompt_ids: Sequence[int], sampling: Sampling, n: int) -> PromptIds:
    """The prompt, ready to send. Raises `ValueError` for requests that servers answer wrongly."""
    if not prompt_ids:
        raise ValueError("the prompt has no tokens; an engine needs at least one")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens}; an engine samples one token or more")
    if n < 1:
        raise ValueError(f"n is {n}; request one completion or more")
    _reject_reserved(sampling.extra, "extra_body")
    return prompt_ids if isinstance(prompt_ids, PromptIds) else PromptIds(prompt_ids)


def list_of_objects(value: object) -> list[Mapping[str, Any]] | None:
    """`value` if it is a list of JSON objects, else None."""
    return value if isinstance(value, list) and set(map(type, value)) <= {dict} else None


def text_or_none(value: object) -> str | None:
    """`value` if it is text, else None."""
    return value if isinstance(value, str) else None


def _reject_reserved(extra: Mapping[str, Any], where: str) -> None:
    if reserved := sorted(_RESERVED & extra.keys()):
        raise ValueError(f"{where} sets {', '.join(reserved)}, which the token engine sets itself; leave it out")
