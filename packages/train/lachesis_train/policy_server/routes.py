"""The routes that sample: OpenAI's with vLLM's fields, SGLang's `/generate`, and that of Atropos' vLLM server.

Every completion carries the version of the policy that sampled it: `weight_versions` as vLLM and SGLang list them, and
`system_fingerprint` in OpenAI's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from backends.tasks import run_all
from lachesis.inference.parse_thread import LONG_IDS, parse
from lachesis.inference.wire import openai_chat
from lachesis.inference.wire.request import JSON, Refused, TextRequest, take
from lachesis.inference.wire.writing import NamesOf, dump, listed_versions
from lachesis.trajectories import ChatResponse, FinishReason, SampledTokens
from lachesis_tokens.prompts.vocabulary import Vocabulary
from lachesis_tokens.server.conversation_index import ConversationIndex
from lachesis_tokens.server.stop_texts import first_stop
from lachesis_tokens.server.token_server import DEFAULT_MAX_TOKENS, TokenServer
from lachesis_tokens.wire import openai_text, sglang
from lachesis_train.policy_server.fields import Wanted, meant, sampling_of, wanted

_SAMPLING: Final = frozenset({"n", "max_tokens", "stop", "seed", "temperature", "top_p", "top_k"})
_TEXT: Final = _SAMPLING | {"model", "prompt", "logprobs"}
_CHAT: Final = (
    _SAMPLING
    | {"model", "messages", "tools", "tool_choice", "max_completion_tokens", "logprobs", "top_logprobs"}
    | frozenset(openai_chat.WISHES)
)
_GENERATE: Final = frozenset({"text", "input_ids", "sampling_params", "return_logprob", "return_text_in_logprobs"})
_PARAMETERS: Final = _SAMPLING - {"seed", "max_tokens"} | {"max_new_tokens", "sampling_seed"}
_TEXT_TOKENS: Final = 16
_GENERATE_TOKENS: Final = 128
"""The defaults of `max_tokens` in OpenAI's and SGLang's APIs."""


class Routes:
    """Answers for parsed requests. They raise `Refused`, the errors of the prompt builder, and those of the engine."""

    def __init__(self, server: TokenServer, model_name: str, context_length: int | None) -> None:
        self.server = server
        self.model_name = model_name
        self.context_length = context_length
        self._vocabulary = Vocabulary(server.prompts.tokenizer, "").rows
        self._special = frozenset(server.prompts.tokenizer.all_special_ids)
        self._token_text = lru_cache(maxsize=1 << 17)(lambda token: server.reader.decode([token]))

    async def chat(self, body: JSON) -> bytes:
        """`/v1/chat/completions`."""
        asked, given = wanted(body), meant(body, _CHAT)
        self._check_model(given)
        request = openai_chat.read(given)
        for name, value in request.wishes.items():
            if value not in ({"type": "text"}, True):
                raise Refused(400, f"{name} is not supported; leave it out", code="unsupported_parameter", param=name)
        responses = await self.server.for_rollout().chat_n(
            request.messages,
            request.n,
            sampling=sampling_of(request, asked, default_max_tokens=DEFAULT_MAX_TOKENS),
            tools=request.tools,
            tool_choice=request.tool_choice,
        )

        def write() -> JSON:
            answer = openai_chat.answer(responses, self._names_of(asked) if request.logprobs else None)
            return _with_tokens(answer, responses, asked)

        return await _written(responses, write)

    async def completions(self, body: JSON) -> bytes:
        """`/v1/completions`."""
        asked, given = wanted(body), meant(body, _TEXT | {"add_special_tokens"})
        self._check_model(given)
        begin = take(body, "add_special_tokens", bool, default=True)
        requests = openai_text.read({name: value for name, value in given.items() if name != "add_special_tokens"})
        answered = await run_all(self._text(request, asked, begin=begin) for request in requests)
        responses = list(chain.from_iterable(answered))

        def write() -> JSON:
            logprobs = given.get("logprobs") is not None
            answer = openai_text.answer(answered, self._names_of(asked) if logprobs else None)
            stops = chain.from_iterable([request.stop] * request.n for request in requests)
            for choice, response, stop in zip(answer["choices"], responses, stops, strict=True):
                choice["text"] = self._text_of(response, asked, stop)
            return _with_tokens(answer, responses, asked)

        return await _written(responses, write)

    async def generate(self, body: JSON) -> bytes:
        """`/generate`: SGLang's, or that of Atropos' vLLM server, whose requests have a `prompt`."""
        return await (self._atropos(body) if "prompt" in body else self._sglang(body))

    async def _sglang(self, body: JSON) -> bytes:
        parameters = take(body, "sampling_params", dict, default={})
        asked = wanted({**body, **parameters})
        given = meant(body, _GENERATE | {"model", "logprob_start_len"})
        self._check_model(given)
        if (start := given.pop("logprob_start_len", -1)) != -1:
            raise Refused(
                400,
                f"logprob_start_len {start!r}: those of the prompt are not reported; send -1",
                code="unsupported_parameter",
                param="logprob_start_len",
            )
        request = sglang.read({**given, "sampling_params": meant(parameters, _PARAMETERS, "sampling_params.")})
        sampling = sampling_of(request, asked, default_max_tokens=_GENERATE_TOKENS)
        if self.server.logprobs == {"raw"} and sampling.temperature not in (0, 1) and body.get("return_logprob"):
            raise Refused(
                400,
                f"sampling_params.temperature {sampling.temperature:g}: this route reports logprobs at the request's "
                "temperature, and the policy's sampler those at temperature 1; sample at 1, or use /v1/completions",
                param="temperature",
            )
        responses = await self._text(request, asked, default_max_tokens=_GENERATE_TOKENS)

        def write() -> Any:
            answers = []
            for response in responses:
                answer = sglang.write(body, response, self._names_of(asked))
                answer["text"] = self._text_of(response, asked, request.stop)
                if asked.return_ids:
                    answer["prompt_token_ids"] = _prompt_ids(response)
                answers.append(answer)
            return answers[0] if request.n == 1 else answers

        return await _written(responses, write)

    async def _atropos(self, body: JSON) -> bytes:
        prompt = body["prompt"]
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        asked, given = wanted(body), meant({**body, "prompt": ids}, _TEXT)
        request, *others = openai_text.read(given)
        if others:
            raise Refused(400, "prompt: this route takes one prompt", param="prompt")
        responses = await self._text(request, asked)

        def write() -> JSON:
            reasons = [response.finish_reason.value for response in responses]
            answer: JSON = {
                "text": [self._text_of(response, asked, request.stop) for response in responses],
                "prompt": self.server.reader.decode(_prompt_ids(responses[0])),
                "finish_reasons": reasons,
                "prompt_token_ids": _prompt_ids(responses[0]),
                "token_ids": [_tokens(response).ids for response in responses],
                "weight_versions": [listed_versions(response) for response in responses],
            }
            if request.logprobs:
                answer["logprobs"] = [
                    [
                        [{str(token): logprob}]
                        for token, logprob in zip(_tokens(response).ids, _tokens(response).logprobs, strict=True)
                    ]
                    for response in responses
                ]
            return answer

        return await _written(responses, write)

    async def tokenize(self, body: JSON) -> bytes:
        """`/tokenize` of vLLM: the ids of a text, or of a conversation's prompt."""
        prompts, text = self.server.prompts, take(body, "prompt", str)
        if text is not None:
            ids = self._encode(text, begin=take(body, "add_special_tokens", bool, default=True))
        elif "messages" in body:
            request = openai_chat.read({name: body[name] for name in ("messages", "tools") if name in body})
            ids = prompts.prompt(ConversationIndex().find(request.messages).nodes, request.tools).prefix.ids
        else:
            raise Refused(400, "prompt or messages: one of them is required", param="prompt")
        return dump({"count": len(ids), "max_model_len": self.context_length, "tokens": ids, "token_strs": None})

    async def _text(
        self, request: TextRequest, asked: Wanted, *, begin: bool = True, default_max_tokens: int = _TEXT_TOKENS
    ) -> list[ChatResponse]:
        ids = self._encode(request.prompt, begin=begin) if isinstance(request.prompt, str) else request.prompt
        if (largest := max(ids, default=0)) >= self._vocabulary:
            raise Refused(
                400, f"prompt: token id {largest} is not one of the model's {self._vocabulary}", param="prompt"
            )
        sampling = sampling_of(request, asked, default_max_tokens=default_max_tokens)
        return await self.server.for_rollout().continue_text(ids, request.n, sampling=sampling)

    def _encode(self, text: str, *, begin: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refused(400, f"prompt: no tokenizer takes a lone surrogate: {error}", param="prompt") from None
        return list(self.server.prompts.tokenizer(text, add_special_tokens=begin)["input_ids"])

    def _text_of(self, response: ChatResponse, asked: Wanted, stop: Sequence[str]) -> str:
        """The text of a completion without its end of turn."""
        tokens = _tokens(response)
        ids: Sequence[int] = tokens.ids
        if ids[-1] in self.server.prompts.end_of_turn:
            ids = ids[:-1]
        if asked.skip_special:
            ids = [token for token in ids if token not in self._special]
        text = self.server.reader.decode(ids)
        if not asked.keep_stop or response.finish_reason is FinishReason.LENGTH:
            return text[: first_stop(text, stop)]
        ends = [at + len(marker) for marker in stop if (at := text.find(marker)) >= 0]
        return text[: min(ends)] if ends else text

    def _names_of(self, asked: Wanted) -> NamesOf:
        name = "token_id:{}".format if asked.ids_as_tokens else self._token_text
        return lambda response: list(map(name, _tokens(response).ids))

    def _check_model(self, body: JSON) -> None:
        name = body.get("model")
        if name and name != self.model_name:
            raise Refused(
                404,
                f"there is no model {name!r} here, only {self.model_name!r}; set model_name to that",
                code="model_not_found",
                param="model",
            )
        body.pop("model", None)


async def _written(responses: Sequence[ChatResponse], write: Callable[[], Any]) -> bytes:
    """What `write` returns as JSON. Long answers are written in a thread, so that the trainer and others go on."""
    long = sum(len(_tokens(response).ids) for response in responses) > LONG_IDS
    return await parse(long, lambda: dump(write()))


def _tokens(response: ChatResponse) -> SampledTokens:
    assert response.tokens is not None
    return response.tokens


def _prompt_ids(response: ChatResponse) -> list[int]:
    return _tokens(response).prompt.ids


def _with_tokens(answer: JSON, responses: Sequence[ChatResponse], asked: Wanted) -> JSON:
    """vLLM's fields of the choices, and the version of the policy as OpenAI names it."""
    for choice, response in zip(answer["choices"], responses, strict=True):
        choice["weight_versions"] = listed_versions(response)
        if asked.return_ids:
            choice["token_ids"], choice["prompt_token_ids"] = _tokens(response).ids, _prompt_ids(response)
    if asked.return_ids:
        answer["prompt_token_ids"] = _prompt_ids(responses[0])
    answer["system_fingerprint"] = "+".join(dict.fromkeys(str(response.model_version) for response in responses))
    return answer
