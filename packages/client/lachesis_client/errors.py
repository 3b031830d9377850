"""Errors between an agent and its model. Each message names the server, the reason and the next step.

The classes say who is at fault: `ServerUnavailable` is the infrastructure, `ContextExhausted` and `ConversationRefused`
are the rollout, and any other rejection is a setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from backends.errors import ExitCode, LachesisError

LOGIN = re.compile(r"^(?P<scheme>[a-zA-Z][\w+.-]*://)(?P<login>[^/?#\s]*)@")
"""`https://user:password@` of a URL. No message or record may have a login."""


class InferenceError(LachesisError):
    """Base class. `server` is the base URL of the server."""

    sampled = 0
    """Tokens that had come before, of a completion that the server aborted and then did not go on with."""

    def __init__(self, server: str, reason: str, next_step: str) -> None:
        self.server = server
        self.reason = reason
        self.next_step = next_step
        super().__init__(f"server {server}: {reason}; {next_step}")


class ServerUnavailable(InferenceError):
    """The server refuses connections, times out, is overloaded or fails, also after bounded retries."""

    def __init__(self, server: str, cause: str, attempts: int) -> None:
        self.cause = cause
        self.attempts = attempts
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        step = "check that the server runs and that base_url is right"
        step += "" if "/v" in server else ", which often ends in /v1"
        super().__init__(server, f"unavailable after {tries}, last cause: {cause}", step)


class RequestRejected(InferenceError):
    """The server rejects the request (4xx). A retry would not help, so there is none."""

    def __init__(self, server: str, status: int, body: str, next_step: str = "correct the request") -> None:
        self.status = status
        self.body = body
        self.refuses_content = status in (400, 413, 422)
        """Whether it is about the content of the request, and not about a key, a name, a quota or a route."""
        said = " ".join(words_of(body).split())[:500]
        if _PAGE.match(said):
            said = "an HTML page, so this is not an OpenAI-compatible server"
            next_step = "set base_url to the address of its API, which usually ends in /v1"
        super().__init__(server, f"rejected the request with {status}: {said}", next_step)


_PAGE: Final = re.compile(r"<!doctype html|<html|<head|<body", re.IGNORECASE)


def words_of(body: str) -> str:
    """The message of an error of OpenAI's API; any other body as it is."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if isinstance(answer, list) and len(answer) == 1:  # Gemini
        (answer,) = answer
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message.strip() else body


class Unauthorized(RequestRejected):
    """401 or 403. The message says whether a key was sent, never the key."""

    exit_code = ExitCode.SETTINGS

    def __init__(self, server: str, status: int, body: str, *, has_key: bool) -> None:
        key = "the api_key that is set for this server was sent" if has_key else "no api_key is set for this server"
        super().__init__(server, status, body, f"{key}: set --openai.api_key to one that this server accepts")


class ContextExhausted(RequestRejected):
    """The conversation and the room for its answer exceed the model's context."""

    def __init__(self, server: str, status: int, body: str) -> None:
        super().__init__(server, status, body, "shorten the conversation, lower max_tokens or serve a longer context")


class ConversationRefused(RequestRejected):
    """The server refuses this conversation, and answers others: its moderation or its routing decided so."""

    def __init__(self, server: str, status: int, body: str) -> None:
        super().__init__(server, status, body, "other conversations are answered; this one is scored as it is")
        self.refuses_content = True


@dataclass(frozen=True, slots=True)
class Asked:
    """The subject of a request."""

    url: str
    model: str
    listed: Sequence[str]
    """The models of the server; empty where it did not say."""

    @property
    def is_listed(self) -> bool:
        return not self.listed or self.model in self.listed


class NothingThere(RequestRejected):
    """The server knows no such model or route: every request would be rejected."""

    exit_code = ExitCode.SETTINGS

    def __init__(self, server: str, status: int, body: str, asked: Asked | None) -> None:
        step = "check model_name and base_url (which often ends in /v1)"
        if asked is not None and asked.listed:
            more = f" and {len(asked.listed) - 8} others" if len(asked.listed) > 8 else ""
            names = f"the server lists {', '.join(asked.listed[:8])}{more}"
            if not asked.is_listed and "model" in body.lower():
                step = f"{names}: set --openai.model_name (-m) to one of these (now {asked.model!r})"
            else:
                known = f"{names}, so model_name is right" if asked.is_listed else f"{step}; {names}"
                route = f"has no route {urlsplit(asked.url).path}"
                step = f"{known}; if it {route}, set openai.server_type and openai.engine as fits this server"
        super().__init__(server, status, body, step)
        self.refuses_content = False


class FirstPromptTooLong(ContextExhausted):
    """The same before the model has said anything: the task and the tools do not fit the settings."""

    exit_code = ExitCode.SETTINGS

    def __init__(self, refused: ContextExhausted) -> None:
        super().__init__(refused.server, refused.status, refused.body)
        self.next_step = (
            "the first prompt (system prompt, tools, task) and the room for an answer exceed the context of the model: "
            "serve a longer one (--openai.context for a model that runs here, --max-model-len of vLLM, "
            "--context-length of SGLang), or lower --env.max_token_length, or give fewer tools with "
            "--env.enabled_toolsets"
        )
        self.args = (f"server {self.server}: {self.reason}; {self.next_step}",)


class BadResponse(InferenceError):
    """The server answered 200 without a completion, or with tokens that cannot be trusted."""

    def __init__(self, server: str, reason: str, next_step: str = "") -> None:
        step = next_step or "check that base_url points to an OpenAI-compatible API (often ends in /v1)"
        super().__init__(server, reason, step)


class PromptError(InferenceError):
    """A prompt cannot be built. No server is involved. The message names the template, the reason and the next step."""

    def __init__(self, what: str, reason: str, next_step: str) -> None:
        super().__init__("", reason, next_step)
        self.what = what
        self.args = (what, reason, next_step)

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}; {self.next_step}"


class TemplateError(PromptError):
    """The template is invalid, raises for this conversation, or shows the model only a part of it."""


class TurnRejected(TemplateError):
    """The template rejects the model's last turn: it has several calls, and the template supports one."""
