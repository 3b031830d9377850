"""Which error a rejection by a model server is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lachesis_client.errors import (
    Asked,
    ContextExhausted,
    ConversationRefused,
    NothingThere,
    RequestRejected,
    Unauthorized,
    words_of,
)
from lachesis_client.http_attempts import decode
from lachesis_client.server_words import error_of, is_content_refusal, is_full_context, may_be_of_the_content

_NO_MODEL = re.compile(
    r"model.{0,200}(not found|does not exist|unknown|invalid|not a valid|not available)|"
    r"(unknown|invalid|no such|not a valid).{0,40}model",
    re.IGNORECASE | re.DOTALL,
)


def of_conversation(
    server: str, status: int, body: str, error: Mapping[str, Any]
) -> ContextExhausted | ConversationRefused | None:
    """The error if its wording is about the conversation: it is too long, or the server refuses its content."""
    text = _all_words(body, error)
    if is_full_context(status, error, text):
        return ContextExhausted(server, status, body)
    return ConversationRefused(server, status, body) if is_content_refusal(status, error, text) else None


def names_no_part(refused: RequestRejected) -> bool:
    """Whether a rejection may be about what the messages say, since it names no part of the request."""
    text = _all_words(refused.body, error_of(decode(refused.body.encode())))
    return may_be_of_the_content(refused.status, refused.body, text)


def _all_words(body: str, error: Mapping[str, Any]) -> str:
    upstream = error.get("metadata")  # OpenRouter keeps the words of the provider there
    raw = upstream.get("raw") if isinstance(upstream, Mapping) else None
    return f"{words_of(body)} {raw or ''}".rstrip()


def rejection(
    server: str, status: int, body: str, error: dict[str, Any], *, has_key: bool, asked: Asked | None = None
) -> RequestRejected:
    """The error for a 4xx. `error` is the `error` object of the body, or {}."""
    if (about := of_conversation(server, status, body, error)) is not None:
        return about
    if status in (401, 403):
        return Unauthorized(server, status, body, has_key=has_key)
    # Some gateways answer 400 or 422 for a name that they do not know.
    of_name = asked is not None and not asked.is_listed and asked.model in body and _NO_MODEL.search(body)
    if status == 404 or of_name:
        return NothingThere(server, status, body, asked)
    return RequestRejected(server, status, body)
