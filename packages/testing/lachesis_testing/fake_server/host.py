"""The fake server as the host of the routes: its tokenizer, and what its model reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeVar, cast

from lachesis_client.sampling import LogprobsKind
from lachesis_testing.fake_server.completions import Completion
from lachesis_testing.fake_server.images import ShownImage, with_images
from lachesis_testing.fake_server.model import IMPOSSIBLE, FakeModel
from lachesis_testing.fake_server.replay import experts_of
from lachesis_testing.fake_server.tokenizer import Codec
from lachesis_tokens.model_routes.host import JSON, ModelHost, SampledCompletion
from lachesis_tokens.model_routes.requests import SamplingRequest
from tool_call_parsers import get_parser

T = TypeVar("T")


@dataclass(frozen=True)
class Host(ModelHost):
    """The server's state that an API needs."""

    codec: Codec
    model: FakeModel
    model_name: str
    weight_version: str
    context_length: int
    logprobs_mode: LogprobsKind
    tool_call_parser: str | None
    """Reads calls from the text on the chat route. None leaves them in the text."""
    experts: tuple[int, int, int] | None = None
    sampling_mask: bool = False
    image_token: int | None = None
    """The placeholder of a model that takes images."""

    @property
    def vocabulary_size(self) -> int:
        return self.model.vocabulary_size

    @property
    def end_ids(self) -> frozenset[int]:
        return self.model.end_ids

    @property
    def takes_images(self) -> bool:
        return self.image_token is not None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self.codec.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self.codec.decode(ids)

    def token_text(self, index: int) -> str:
        return self.codec.token_texts[index]

    def token_bytes(self, index: int) -> bytes:
        return self.codec.bytes_of[index]

    def chat_prompt(self, body: Mapping[str, Any]) -> list[int]:
        try:
            text = self.codec.render(
                [_for_template(message) for message in body["messages"]],
                body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # templates raise any exception
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return self.codec.encode(text, add_special_tokens=bool(body.get("add_special_tokens")))

    def message(self, request: SamplingRequest, made: SampledCompletion) -> JSON:
        """With tools, calls are read from the text, as with `--enable-auto-tool-choice`."""
        message: JSON = {"role": "assistant", "content": made.text, "refusal": None, "tool_calls": []}
        if self.tool_call_parser is None or not request.tools or request.tool_choice == "none":
            return message
        parsed = get_parser(self.tool_call_parser).parse(made.text, request.tools)
        if parsed.tool_calls:
            message["content"] = parsed.content
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in parsed.tool_calls
            ]
        return message

    def with_images(
        self, ids: Sequence[int], urls: Sequence[object], *, strict: bool
    ) -> tuple[list[int], tuple[ShownImage, ...]]:
        return with_images(ids, urls, self.image_token, strict=strict)

    def likeliest(
        self, request: SamplingRequest, made: SampledCompletion, count: int
    ) -> Iterable[Sequence[tuple[int, float]]]:
        if not count:
            return repeat(())
        kind = self.logprobs_mode
        return by_model(request, made, lambda model, before, ids: model.top(before, ids, request.sampling, kind, count))

    def prompt_scores(
        self, request: SamplingRequest, prompt_ids: Sequence[int], count: int
    ) -> tuple[list[float], Sequence[Sequence[tuple[int, float]]]]:
        first, rest, kind = prompt_ids[:1], prompt_ids[1:], self.logprobs_mode
        likeliest = self.model.top(first, rest, request.sampling, kind, count) if count else []
        return self.model.score(first, rest, request.sampling, kind), likeliest

    def experts_of(self, ids: Sequence[int]) -> list[int]:
        assert self.experts is not None
        return experts_of(ids, self.experts)

    def sampling_masks(self, request: SamplingRequest, made: SampledCompletion) -> list[list[int]]:
        sampling = request.sampling
        likeliest = by_model(
            request, made, lambda model, before, ids: model.top(before, ids, sampling, "processed", sampling.top_k)
        )
        return [[index for index, logprob in best if logprob > IMPOSSIBLE] for best in likeliest]

    def mask_logprobs(self, request: SamplingRequest, made: SampledCompletion) -> list[float]:
        return by_model(
            request, made, lambda model, before, ids: model.score(before, ids, request.sampling, "processed")
        )


def by_model(
    request: SamplingRequest,
    made: SampledCompletion,
    ask: Callable[[FakeModel, Sequence[int], Sequence[int]], Iterable[T]],
) -> list[T]:
    """One value for each sampled token, from the model that sampled it: `ask` gets the ids before and its ids."""
    prompt, weights = request.prompts[made.prompt], cast(Completion, made).weights
    parts = (ask(model, [*prompt, *made.ids[:start]], made.ids[start:end]) for model, _, start, end in weights)
    return list(chain.from_iterable(parts))


def _for_template(message: Mapping[str, Any]) -> JSON:
    """vLLM's conversion of a message before rendering: arguments as objects, text parts as one text."""
    changed: JSON = dict(message)
    if isinstance(parts := changed.get("content"), list):
        changed["content"] = "\n".join(part.get("text", "") for part in parts if isinstance(part, Mapping))
    if calls := changed.get("tool_calls"):
        changed["tool_calls"] = [{**call, "function": _with_object(call.get("function") or {})} for call in calls]
    return changed


def _with_object(function: Mapping[str, Any]) -> JSON:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"tool call arguments are not JSON: {error}") from error
    return {**function, "arguments": arguments}
