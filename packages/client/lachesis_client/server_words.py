"""The meaning of the errors of model servers, which all word them differently.

Read from the documentation and the error texts of OpenAI, Azure, Anthropic, Gemini, Bedrock, Mistral, Cohere, xAI,
Groq, Cerebras, Together, Fireworks, OpenRouter, DeepSeek, Zhipu, Moonshot, DashScope, MiniMax, Ark, SiliconFlow, GitHub
Models, vLLM, SGLang, TGI, TensorRT-LLM, llama.cpp, Ollama, LM Studio and LiteLLM. No list of texts is complete, so a
full context is recognised by what is counted and by the word for too much of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

_FULL_CODES: Final = frozenset(
    (
        *("context_length_exceeded", "exceed_context_size_error", "request_too_large", "contextwindowexceeded"),
        *("tokens_limit_reached", "model_max_prompt_tokens_exceeded", "context_window_exceeded", "input_too_long"),
        "1039",  # MiniMax
    )
)
_FULL: Final = re.compile(
    r"context[\s_-]*(length|size|window|limit|overflow)|the context of the model|"
    r"max(imum)? context\b|\bmax(imum)?[\s_](model|prompt|input|"
    r"seq|sequence)[\s_]len(gth)?\b|request( body| entity| payload)?( is| was)? too (large|long)|payload too large|"
    r"request( \w+){0,4} exceed\w*( \w+){0,4} (tokens?|length|size)\b|"
    r"max_tokens must be at least 1, got (0|-\d)|inputs. (tokens \+ .max_new_tokens|must have less than)|"
    r"messages(\[\d+\]\.content\S*)?.: (string|array) too long|too many (input |prompt |total )?tokens\b|"
    r"(range of )?input length should be|(shorten|(reduce|decrease) the (length|size) of) (the|your) (messages|prompt|"
    r"input|conversation)|total tokens.{0,40} exceed|(prompt|input|context)?[\s_]?tokens?[\s_]limit[\s_](is )?(reached|"
    r"exceeded)|max tokens of \d+ exceeded|expected maxlength: \d+, actual|(prompt|input)\w* > ?max_|"
    r"(上下文|输入|内容|请求|消息|prompt|token|长度)\w*\s*(超|过长)|超\w{0,15}(上下文|长度|token)|"
    r"(入力|コンテキスト|プロンプト|トークン)\w{0,20}(超え|超過|長すぎ)",
    re.IGNORECASE,
)
"""Words for a full context that say so by themselves."""
_COUNTED: Final = re.compile(
    r"\b(prompt|input(?! validation)|messages?|conversation|context|history|sequence|total|payload)", re.IGNORECASE
)
_MEASURE: Final = re.compile(
    r"(?<!max_)(?<!new_)(?<!completion[ _])(?<!output[ _])tokens?|length|\blong\b|\blarge\b|size|context|"
    r"characters|bytes",
    re.IGNORECASE,
)
_TOO_MUCH: Final = re.compile(
    r"exceed|too (long|large|big|many)|(longer|larger|greater|more)( \w+){0,2} than|(over|above|beyond) the|at most|"
    r"only supports|up to|must be (less|<)|should not be|> \d|not fit|overflow|(limit|maximum) (of|is)\b",
    re.IGNORECASE,
)
_OF_ANOTHER_THING: Final = re.compile(
    r"\btools?\b|tool_|function|\bname\b|schema|\bstop\b|\bseed\b|logprob|image|audio|metadata|\bid\b|quota|credit|"
    r"balance|budget|\brate\b|per (second|minute|min|hour|day|month)|timeout|timed? out|deadline|queue|concurren",
    re.IGNORECASE,
)
_NEVER_FITS: Final = re.compile(r"request too large for|too large.{0,200}reduce|must be reduced", re.I | re.DOTALL)
"""In a 429: one request is above the limit of a minute, so no pause lets it pass."""
_REFUSED: Final = re.compile(
    r"content[\s_-]?(filter|policy|management policy|moderat|violat|exists? risk|blocked)|(safety|usage|acceptable use)"
    r"[\s_-](polic|guideline|system|filter|check)|violat\w*.{0,60}(polic|guideline|terms|safety)|moderation|"
    r"responsible ?ai|flagged|guardrail|prohibited[\s_-]content|data[\s_-]?inspection|inappropriate content|censor|"
    r"sensitive[\s_-]?(content|word|information|data|text)|new_sensitive|considered high risk|harmful content|"
    r"敏感|违规|不安全|安全审核",
    re.IGNORECASE,
)
"""The server refuses the content of a conversation."""
_OF_THE_ACCOUNT: Final = re.compile(
    r"account|organization|\bkey\b|suspended|deactivated|unknown|unrecogni[sz]ed|not supported|not found|not exist",
    re.IGNORECASE,
)
"""In words for a refusal: it is about who asks, or about a setting."""
_BLOCKED: Final = re.compile(r"safety|blocklist|prohibited|spii|recitation|other|language", re.IGNORECASE)

_TRANSIENT: Final = re.compile(
    r"rate[\s_-]?limit(s|ed|ing)?\b|too many (concurrent )?requests|overload|at capacity|server (is |are )?(too )?busy|"
    r"(temporar\w+|currently) unavailable|try again (later|in\b|after)|retry (later|after|your request)|throttl",
    re.IGNORECASE,
)
"""Words of a pause, whatever the status: another attempt may pass."""
REFUSING: Final = frozenset({403, 404, 405, 406, 451})
"""Statuses by which servers, and the firewalls before them, refuse one conversation, or all requests."""
_OF_THE_FORM: Final = re.compile(
    r"support|unknown|unrecogni[sz]ed|unexpected|extra|permitted|allowed|missing|required|field|parameter|property|"
    r"schema|\brole|\btype\b|content part|reasoning|thinking|signature|image|audio|version|model\b|deprecated|template|"
    r"tool_choice|\btools\b|temperature|\btop_|\bmin_p\b|max_\w*tokens|penalty|logprob|\bseed\b|\bstop\b|stream|_format\b",
    re.IGNORECASE,
)
"""In words of a 400: it is about the way in which requests are written, which the settings decide."""
_NAMED_PART: Final = re.compile(r"""\b(param|loc)\\*["']\s*:\s*(\\*["']\w|[(\[])""")
"""In a body: its error names the part of the request (of OpenAI and of pydantic)."""
_ENVELOPE: Final = re.compile(
    r"""\\*["'](error|message|type|param|code|object)\\*["']\s*:|(received|available) model group[^\n]*""",
    re.IGNORECASE,
)
"""Of bodies that an error quotes, and of what LiteLLM adds: it says nothing about the request."""
_NO_ERROR: Final = frozenset({"", "none", "0", "200", "ok", "success"})
"""Codes of an error that is none."""


def is_full_context(status: int, error: Mapping[str, Any], text: str) -> bool:
    """Whether an error says that the conversation and the room for its answer exceed what the server takes.

    Args:
        error: the error object of the body, or {}.
        text: its message, or the body.
    """
    if status == 429:
        return bool(_NEVER_FITS.search(text)) and "too large" in text.lower()
    if status == 413 or not _codes(error).isdisjoint(_FULL_CODES):
        return True
    if status not in (400, 422, 424, 500, 502, 503):
        return False
    if _FULL.search(text):
        return status < 500 or bool(_TOO_MUCH.search(text))
    if status >= 500 or _OF_ANOTHER_THING.search(text):
        return False
    return all(words.search(text) for words in (_COUNTED, _MEASURE, _TOO_MUCH))


def is_content_refusal(status: int, error: Mapping[str, Any], text: str) -> bool:
    """Whether an error says that the server refuses the content of the conversation."""
    if status in (401, 402, 404, 429) or status > 500 or _OF_THE_ACCOUNT.search(text):
        return False
    return bool(_REFUSED.search(" ".join((*_codes(error), text))))


def is_refusal(error: BaseException) -> bool:
    """Whether an exception of a client library (openai, anthropic, httpx, requests) is a 4xx of a model server that
    refuses the content or the length of the request, and would answer others."""
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None) or getattr(response, "status_code", None)
    if not isinstance(status, int) or not 400 <= status < 500:
        return False
    body = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    text = str(error)
    if inner is None:
        with suppress(Exception):  # it was not read, and may never be
            text = f"{text} {response.text if response is not None else ''}"
    about = inner if isinstance(inner, Mapping) else {}
    return is_content_refusal(status, about, text) or is_full_context(status, about, text)


def may_be_of_the_content(status: int, body: str, text: str) -> bool:
    """Whether a rejection may be about what the messages say, although its words (`text`) do not tell: of a 400 or 422
    that speaks of no field, no role and no part of the API."""
    if status not in (400, 422) or _NAMED_PART.search(body):
        return False
    return not _OF_THE_FORM.search(_ENVELOPE.sub("", text))


def is_transient(status: int, text: str) -> bool:
    """Whether a rejection says that the same request may pass later."""
    return status in (400, 403, 404, 406, 422) and bool(_TRANSIENT.search(text))


def error_of(answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """The error that a body reports, as `{"message", "code"}` and what else it has; {} where it reports none.

    Beside OpenAI's `error`: that of the first choice (OpenRouter), `base_resp` (MiniMax), `errors` (Cloudflare,
    watsonx), bodies that are the error themselves (vLLM before 0.10, many gateways).
    """
    if not answer:
        return {}
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    of_choice = first.get("error") if isinstance(first, Mapping) else None
    errors = answer.get("errors")
    listed = errors[0] if isinstance(errors, list) and errors else errors
    for found in (of_choice, answer.get("error"), None if first else listed, answer.get("base_resp")):
        if (error := _error(found)) and _is_error(error):
            return error
    if first is None and (answer.get("object") == "error" or _is_number_of_error(answer.get("code"))):
        return _error(answer)
    return {}


def _error(found: object) -> dict[str, Any]:
    if isinstance(found, str):
        return {"message": found}
    if not isinstance(found, Mapping):
        return {}
    error = dict(found)
    for name, others in (("message", ("msg", "status_msg", "description")), ("code", ("status_code",))):
        given = next((error[key] for key in (name, *others) if error.get(key) is not None), None)
        if given is not None:
            error[name] = given
    return error


def _is_error(error: Mapping[str, Any]) -> bool:
    """Some servers send an empty error, or one that says "success", with every answer."""
    code = error.get("code")
    if code is not None:
        return str(code).lower() not in _NO_ERROR
    return any(error.get(name) not in (None, "") for name in ("message", "type", "status"))


def _is_number_of_error(code: object) -> bool:
    return str(code).isdecimal() and 400 <= int(str(code)) < 600


def blocked_prompt(body: Mapping[str, Any]) -> str:
    """Why an answer without choices has none, where the server blocked the prompt (Gemini); else empty."""
    feedback = body.get("promptFeedback") or body.get("prompt_feedback")
    reason = (feedback.get("blockReason") or feedback.get("block_reason")) if isinstance(feedback, Mapping) else None
    return reason if isinstance(reason, str) and _BLOCKED.search(reason) else ""


def _codes(error: Mapping[str, Any]) -> set[str]:
    inner = error.get("innererror")
    found = [error.get("code"), error.get("type"), inner.get("code") if isinstance(inner, Mapping) else None]
    return {str(code) for code in found if isinstance(code, str | int)}
