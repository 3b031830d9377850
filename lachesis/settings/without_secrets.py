"""Settings as others may read them."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from lachesis_client.errors import LOGIN


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without what may be a secret.

    Of a sandbox's variables, of `extra_body` and of what is ephemeral, digests are written, which still show a change.
    URLs lose their login.
    """
    digested: dict[str, Any] = {
        field: {name: _digest(value) for name, value in settings[field].items()}
        for field in ("terminal_env", "extra_body")
        if settings.get(field)
    }
    ephemeral = ("ephemeral_system_prompt", "prefill_messages")
    digested |= {field: _digest(settings[field]) for field in ephemeral if settings.get(field)}
    for field in ("compress_context_with", "judge_server"):
        if isinstance(server := settings.get(field), dict):
            digested[field] = {name: _without_login(value) for name, value in server.items() if name != "api_key"}
    return {**{name: _without_login(value) for name, value in settings.items()}, **digested}


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def _without_login(value: Any) -> Any:
    return LOGIN.sub(r"\g<scheme>", value) if isinstance(value, str) else value
