"""The policy as the host of the routes of model servers (`lachesis_tokens.model_routes`).

Every completion carries the version of the policy that sampled it: `weight_versions` as vLLM and SGLang list them, and
`system_fingerprint` in OpenAI's answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from backends.tasks import run_all
from lachesis_client.parse_thread import LONG_IDS, parse
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_messages.messages import FinishReason
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens
from lachesis_tokens.model_routes.atropos import AtroposRoute
from lachesis_tokens.model_routes.chat import ChatRoute
from lachesis_tokens.model_routes.host import ModelHost, ModelRoute, SampledCompletion, ShownCompletion, tokenized
from lachesis_tokens.model_routes.requests import PromptTooLong, Rejected, SamplingRequest
from lachesis_tokens.model_routes.sglang import SGLangRoute
from lachesis_tokens.model_routes.vllm import CompletionsRoute, GenerateRoute
from lachesis_tokens.prompts.vocabulary import Vocabulary
from lachesis_tokens.server.conversation_index import ConversationIndex
from lachesis_tokens.server.stop_texts import first_stop
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.server.token_source import DEFAULT_MAX_TOKENS
from lachesis_tokens.wire.openai_chat import finish_reason, read_message, write_message
from lachesis_tokens.wire.request import JSON, Refused, function_tools, take
from lachesis_tokens.wire.writing import dump
from lachesis_train.policy import CurrentPolicy
from lachesis_train.policy_server.fields import allowed


@dataclass(frozen=True, slots=True)
class PolicyCompletion:
    """A completion for the routes; see `SampledCompletion`."""

    prompt: int
    index: int
    ids: Sequence[int]
    text: str
    finish_reason: str
    versions: Sequence[tuple[str, int, int]]
    response: ChatResponse
    stop_reason: None = None


class PolicyHost(ModelHost):
    """The policy's name, tokenizer and completions."""

    logprobs_mode: LogprobsKind = "raw"
    weight_version = ""

    def __init__(self, policy: CurrentPolicy, server: TokenServer, model_name: str, context_length: int | None) -> None:
        self.policy = policy
        self.server = server
        self.model_name = model_name
        self.context_length = context_length
        self._scores: Mapping[tuple[int, ...], list[float]] = {}
        self._vocabulary: int = Vocabulary(server.prompts.tokenizer, "").rows
        self._special = frozenset(server.prompts.tokenizer.all_special_ids)
        self._token_text = lru_cache(maxsize=1 << 17)(lambda token: server.reader.decode([token]))

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset(self.server.prompts.end_of_turn)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt: no tokenizer takes a lone surrogate: {error}") from None
        return list(self.server.prompts.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return self.server.reader.decode(ids)

    def token_text(self, index: int) -> str:
        return self._token_text(index)

    def chat_prompt(self, body: Mapping[str, Any]) -> list[int]:
        return []  # the token server makes it, with the opening of a call that `tool_choice` asks for

    def message(self, request: SamplingRequest, made: SampledCompletion) -> JSON:
        assert isinstance(made, PolicyCompletion)
        return write_message(made.response.message)

    def version_of(self, made: SampledCompletion) -> str:
        return made.versions[-1][0]

    def room(self, prompt_ids: Sequence[int]) -> int:
        return DEFAULT_MAX_TOKENS

    async def with_scores(self, request: SamplingRequest) -> PolicyHost:
        """The host for the answer to this request, which has the logprobs of its prompts."""
        found = await run_all(self.policy.current.sampler.logprobs(list(prompt)) for prompt in request.prompts)
        host = copy(self)
        host._scores = {tuple(prompt): scores[1:] for prompt, scores in zip(request.prompts, found, strict=True)}
        return host

    def prompt_scores(
        self, request: SamplingRequest, prompt_ids: Sequence[int], count: int
    ) -> tuple[list[float], Sequence[Sequence[tuple[int, float]]]]:
        scores = self._scores[tuple(prompt_ids)]
        return scores, [()] * len(scores)

    async def sample(self, request: SamplingRequest) -> list[ShownCompletion]:
        """The completions. Raises the errors of the prompt builder and of the engine."""
        extra: JSON = {"ignore_eos": True} if request.ignore_end else {}
        if request.stop_ids:
            extra["stop_token_ids"] = list(request.stop_ids)
        sampling = replace(request.sampling, extra=extra)
        if request.messages is None:
            answered = await run_all(
                self.server.for_rollout().continue_text(prompt, request.n, sampling=sampling)
                for prompt in request.prompts
            )
        else:
            chat = self.server.for_rollout().chat_n(
                list(map(read_message, request.messages)),
                request.n,
                sampling=sampling,
                tools=function_tools(list(request.tools) if request.tools else None),
                tool_choice=request.tool_choice,
            )
            answered = [await chat]
        return [
            self._shown(request, response, prompt, index)
            for prompt, responses in enumerate(answered)
            for index, response in enumerate(responses)
        ]

    def _shown(self, request: SamplingRequest, response: ChatResponse, prompt: int, index: int) -> ShownCompletion:
        tokens = response.tokens
        assert tokens is not None
        text = "" if request.messages is not None else self._text_of(request, response, tokens)
        reason = finish_reason(response)
        made = PolicyCompletion(prompt, index, tokens.ids, text, reason, tokens.versions, response)
        return ShownCompletion(made, tokens.prompt.ids, tokens.ids, tokens.logprobs)

    def _text_of(self, request: SamplingRequest, response: ChatResponse, tokens: SampledTokens) -> str:
        """The text of a completion without its end of turn."""
        ids: Sequence[int] = tokens.ids
        if ids[-1] in self.server.prompts.end_of_turn:
            ids = ids[:-1]
        if request.skip_special:
            ids = [token for token in ids if token not in self._special]
        text, stop = self.server.reader.decode(ids), request.sampling.stop
        if not request.keep_stop or response.finish_reason is FinishReason.LENGTH:
            return text[: first_stop(text, stop)]
        ends = [at + len(marker) for marker in stop if (at := text.find(marker)) >= 0]
        return text[: min(ends)] if ends else text


class IdsRoute(GenerateRoute):
    """Names a token of logprobs as vLLM 0.31 and later do, and as those before did, which verifiers reads."""

    def entry(self, index: int, logprob: float | None, rank: int | None) -> JSON:
        return {"token": f"token_id:{index}", **super().entry(index, logprob, rank)}


class Routes:
    """Answers for parsed requests. They raise `Refused`, the errors of the prompt builder, and those of the engine."""

    def __init__(self, host: PolicyHost) -> None:
        self.host = host

    async def chat(self, body: JSON) -> bytes:
        """`/v1/chat/completions`."""
        return await self._answer(ChatRoute(), body)

    async def completions(self, body: JSON) -> bytes:
        """`/v1/completions`."""
        return await self._answer(CompletionsRoute(), body)

    async def generate(self, body: JSON) -> bytes:
        """`/generate`: SGLang's, or that of Atropos' vLLM server, whose requests have a `prompt`."""
        return await self._answer(AtroposRoute() if "prompt" in body else SGLangRoute(), body)

    async def generate_ids(self, body: JSON) -> bytes:
        """`/inference/v1/generate` of vLLM: ids in, ids out."""
        return await self._answer(IdsRoute(), {**body, "sampling_params": body.get("sampling_params") or {}})

    async def tokenize(self, body: JSON) -> bytes:
        """`/tokenize` of vLLM: the ids of a text, or of a conversation's prompt."""
        host = self.host
        try:
            answer = tokenized(host, body)
        except ValueError as error:
            raise Refused(400, str(error), param="prompt") from None
        if messages := take(body, "messages", list):
            prompts, nodes = host.server.prompts, ConversationIndex().find(list(map(read_message, messages))).nodes
            ids = prompts.prompt(nodes, function_tools(take(body, "tools", list))).prefix.ids
            answer |= {"tokens": ids, "count": len(ids)}
        return dump(answer)

    async def _answer(self, route: ModelRoute, body: JSON) -> bytes:
        host = self.host
        given = allowed(route, body, host.model_name)
        try:
            request = route.read(host, given)
        except PromptTooLong as too_long:
            raise Refused(400, str(too_long), code="context_length_exceeded", param=too_long.param) from None
        except Rejected as rejected:
            raise Refused(rejected.status, str(rejected), param=rejected.param) from None
        except ValueError as error:
            raise Refused(400, str(error)) from None
        self._check_logprobs(route, body, request.sampling)
        shown = await host.sample(request)
        if given.get("prompt_logprobs") is not None:
            host = await host.with_scores(request)

        def write() -> bytes:
            answer = route.write(host, {**body, "return_weight_versions": True}, request, shown)
            if "system_fingerprint" in answer:
                versions = dict.fromkeys(host.version_of(each.made) for each in shown)
                answer["system_fingerprint"] = "+".join(versions)
            return dump(answer)

        # Long answers are written in a thread, so that the trainer and others go on.
        return await parse(sum(len(each.made.ids) for each in shown) > LONG_IDS, write)

    def _check_logprobs(self, route: ModelRoute, body: JSON, sampling: Sampling) -> None:
        """Raises `Refused` where the route promises other logprobs than those of the policy's sampler."""
        if not isinstance(route, SGLangRoute) or not body.get("return_logprob"):
            return
        if self.host.server.logprobs == {"raw"} and sampling.temperature not in (0, 1):
            raise Refused(
                400,
                f"sampling_params.temperature {sampling.temperature:g}: this route reports logprobs at the request's "
                "temperature, and the policy's sampler those at temperature 1; sample at 1, or use /v1/completions",
                param="temperature",
            )
