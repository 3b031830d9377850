"""`POST /v1/chat/completions` of OpenAI and vLLM: messages through the chat template, text back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lachesis_testing.fake_server.completions import Call
from lachesis_testing.fake_server.shapes import JSON, Host, Rejected, Shown, new_id, top_logprobs, whole
from lachesis_testing.fake_server.vllm import VLLMApi, read_vllm_call, token_names
from tool_call_parsers import get_parser


class ChatCompletions(VLLMApi):
    """The chat route. With tools, calls are read from the text, as with `--enable-auto-tool-choice`."""

    name: ClassVar[str] = "chat-completions"

    def call(self, host: Host, body: JSON) -> Call:
        messages, tools = body.get("messages"), body.get("tools")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise Rejected("messages: a list of messages is required.", param="messages")
        ids = render_ids(host, body, messages, tools)
        room = max(1, host.context_length - len(ids))
        named = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        call = read_vllm_call(body, [ids], default_max_tokens=room, max_tokens=named)
        return replace(call, messages=messages, tools=tools)

    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> JSON:
        return_ids, versions = bool(body.get("return_token_ids")), bool(body.get("return_weight_versions"))
        choices = []
        for each in shown:
            message = self._message(host, body, call, each)
            choice = {
                "index": each.made.index,
                "message": message,
                "logprobs": self._logprobs(host, body, call, each) if body.get("logprobs") else None,
                **self.ending(host, each, each.ids if return_ids else None, versions=versions),
            }
            if message["tool_calls"] and choice["finish_reason"] == "stop":
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

    def _message(self, host: Host, body: JSON, call: Call, each: Shown) -> JSON:
        message: JSON = {"role": "assistant", "content": each.made.text, "refusal": None, "tool_calls": []}
        if host.tool_call_parser is None or not call.tools or body.get("tool_choice") == "none":
            return message
        parsed = get_parser(host.tool_call_parser).parse(each.made.text, call.tools)
        if parsed.tool_calls:
            message["content"] = parsed.content
            message["tool_calls"] = [
                {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments_json}}
                for made in parsed.tool_calls
            ]
        return message

    def _logprobs(self, host: Host, body: JSON, call: Call, each: Shown) -> JSON | None:
        if each.logprobs is None:
            return None
        ids = each.ids if each.ids is not None else each.made.ids
        likeliest = top_logprobs(host, call, each.made, whole(body, "top_logprobs", 0))
        name, bytes_of = token_names(host, body), host.codec.bytes_of

        def entry(index: int, logprob: float | None) -> JSON:
            return {"token": name(index), "logprob": logprob, "bytes": list(bytes_of[index])}

        return {
            "content": [
                {**entry(index, logprob), "top_logprobs": [entry(*pair) for pair in best]}
                for index, logprob, best in zip(ids, each.logprobs, likeliest, strict=False)
            ]
        }


def render_ids(host: Host, body: Mapping[str, Any], messages: Sequence[Any], tools: Any) -> list[int]:
    """The ids of a conversation's prompt. Raises `ValueError` if the template raises."""
    try:
        text = host.codec.render(
            [_for_template(message) for message in messages],
            tools,
            add_generation_prompt=body.get("add_generation_prompt", True),
            **(body.get("chat_template_kwargs") or {}),
        )
    except Exception as error:  # templates raise any exception
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return host.codec.encode(text, add_special_tokens=bool(body.get("add_special_tokens")))


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
