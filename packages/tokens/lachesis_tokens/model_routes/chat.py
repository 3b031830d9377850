"""`POST /v1/chat/completions` of OpenAI and vLLM: messages through the chat template, text back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from lachesis_tokens.model_routes.host import JSON, ModelHost, ShownCompletion, new_id
from lachesis_tokens.model_routes.requests import Rejected, SamplingRequest, whole
from lachesis_tokens.model_routes.vllm import VLLMRoute, read_vllm_request, token_names


class ChatRoute(VLLMRoute):
    """The chat route. With tools, calls are read from the text, as with `--enable-auto-tool-choice`."""

    name: ClassVar[str] = "chat-completions"

    def parse(self, host: ModelHost, body: JSON) -> SamplingRequest:
        messages, tools = body.get("messages"), body.get("tools")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise Rejected("messages: a list of messages is required.", param="messages")
        ids = host.chat_prompt(body)
        named = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        request = read_vllm_request(body, [ids], default_max_tokens=host.room(ids), max_tokens=named)
        return replace(request, messages=messages, tools=tools, tool_choice=body.get("tool_choice"))

    def write(self, host: ModelHost, body: JSON, request: SamplingRequest, shown: Sequence[ShownCompletion]) -> JSON:
        return_ids, versions = bool(body.get("return_token_ids")), bool(body.get("return_weight_versions"))
        choices = []
        for each in shown:
            message = host.message(request, each.made)
            choice = {
                "index": each.made.index,
                "message": message,
                "logprobs": self._logprobs(host, body, request, each) if body.get("logprobs") else None,
                **self.ending(host, each, each.ids if return_ids else None, versions=versions),
            }
            if message.get("tool_calls") and choice["finish_reason"] == "stop":
                choice["finish_reason"] = "tool_calls"
            choices.append(choice)
        return self.answer(
            host,
            choices,
            shown,
            absent=("service_tier", "system_fingerprint", "prompt_logprobs", "kv_transfer_params"),
            id=new_id("chatcmpl-"),
            object="chat.completion",
            prompt_token_ids=list(shown[0].prompt_ids) if return_ids else None,
        )

    def _logprobs(self, host: ModelHost, body: JSON, request: SamplingRequest, each: ShownCompletion) -> JSON | None:
        if each.logprobs is None:
            return None
        ids = each.ids if each.ids is not None else each.made.ids
        likeliest = host.likeliest(request, each.made, whole(body, "top_logprobs", 0))
        name = token_names(host, body)
        # One list for all tokens of an id: completions are long, and the garbage collector visits each list.
        raw = lru_cache(maxsize=None)(lambda index: list(host.token_bytes(index)))

        def entry(index: int, logprob: float | None) -> JSON:
            return {"token": name(index), "logprob": logprob, "bytes": raw(index)}

        return {
            "content": [
                {**entry(index, logprob), "top_logprobs": [entry(*pair) for pair in best]}
                for index, logprob, best in zip(ids, each.logprobs, likeliest, strict=False)
            ]
        }
