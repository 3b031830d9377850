"""`POST /v1/chat/completions` of OpenAI and vLLM: messages through the chat template, text back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lachesis.testing.fake_server.completions import Call
from lachesis.testing.fake_server.shapes import JSON, Host, Rejected, Shown, new_id, now, openai_error, usage, whole
from lachesis.testing.fake_server.vllm import (
    Checked,
    VLLMApi,
    check_model,
    check_prompts,
    read_vllm_call,
    weight_versions,
)
from tool_call_parsers import get_parser


class ChatCompletions(VLLMApi):
    """The chat route. With tools, calls are read from the text, as with `--enable-auto-tool-choice`."""

    name: ClassVar[str] = "chat-completions"

    def read(self, host: Host, body: JSON) -> Call:
        check_model(host, body)
        if body.get("stream"):
            raise Rejected(400, openai_error(400, "The fake server does not stream.", "stream"))
        messages, tools = body.get("messages"), body.get("tools")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise Rejected(400, openai_error(400, "messages: a list of messages is required.", "messages"))
        ids = render_ids(host, body, messages, tools)
        room = max(1, host.context_length - len(ids))
        named = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        with Checked():
            call = read_vllm_call(body, [ids], default_max_tokens=room, max_tokens=named)
        check_prompts(host, call)
        return replace(call, messages=messages, tools=tools)

    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> JSON:
        return_ids = bool(body.get("return_token_ids"))
        choices = []
        for each in shown:
            message, called = self._message(host, body, call, each)
            reason = "tool_calls" if called and each.made.finish_reason == "stop" else each.made.finish_reason
            choices.append(
                {
                    "index": each.made.index,
                    "message": message,
                    "logprobs": self._logprobs(host, body, call, each) if body.get("logprobs") else None,
                    "finish_reason": reason,
                    "stop_reason": each.made.stop_reason,
                    "token_ids": list(each.ids) if return_ids and each.ids is not None else None,
                    "routed_experts": None,
                    "weight_versions": weight_versions(host, each) if body.get("return_weight_versions") else None,
                }
            )
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": now(),
            "model": host.model_name,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage(shown),
            "prompt_logprobs": None,
            "prompt_token_ids": list(shown[0].prompt_ids) if return_ids else None,
            "kv_transfer_params": None,
        }

    def _message(self, host: Host, body: JSON, call: Call, each: Shown) -> tuple[JSON, bool]:
        message: JSON = {"role": "assistant", "content": each.made.text, "refusal": None, "tool_calls": []}
        if host.tool_call_parser is None or not call.tools or body.get("tool_choice") == "none":
            return message, False
        parsed = get_parser(host.tool_call_parser).parse(each.made.text, call.tools)
        if not parsed.tool_calls:
            return message, False
        message["content"] = parsed.content
        message["tool_calls"] = [
            {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments_json}}
            for made in parsed.tool_calls
        ]
        return message, True

    def _logprobs(self, host: Host, body: JSON, call: Call, each: Shown) -> JSON | None:
        if each.logprobs is None:
            return None
        ids = each.ids if each.ids is not None else each.made.ids
        count = whole(body, "top_logprobs", 0)
        found = host.model.top(call.prompts[0], ids, call.sampling, host.logprobs_mode, count) if count else []
        as_ids = bool(body.get("return_tokens_as_token_ids"))

        def entry(index: int, logprob: float | None) -> JSON:
            token = f"token_id:{index}" if as_ids else host.codec.token_texts[index]
            return {"token": token, "logprob": logprob, "bytes": list(host.codec.bytes_of[index])}

        return {
            "content": [
                {**entry(index, logprob), "top_logprobs": [entry(*pair) for pair in (found[place] if found else ())]}
                for place, (index, logprob) in enumerate(zip(ids, each.logprobs, strict=False))
            ]
        }


def render_ids(host: Host, body: Mapping[str, Any], messages: Sequence[Any], tools: Any) -> list[int]:
    """The ids of a conversation's prompt; 400 if the template raises."""
    try:
        text = host.codec.render(
            [_for_template(message) for message in messages],
            tools,
            add_generation_prompt=body.get("add_generation_prompt", True),
            **(body.get("chat_template_kwargs") or {}),
        )
    except Exception as error:  # templates raise any exception
        raise Rejected(400, openai_error(400, f"{type(error).__name__}: {error}")) from error
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
