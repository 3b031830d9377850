"""Whether the server at a URL is the policy server of a training run, which then says how it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from lachesis.settings.server_settings import key_for

_SECONDS = 2.0


def policy_server_at(url: str, api_key: str) -> dict[str, str]:
    """The `server_type`, `model_name` and `tokenizer_name` of a policy server; empty for any other server, and where
    none answers. Asks `GET /models` once, and no public service. Blocks."""
    if not url or key_for(url) or urlsplit(url).scheme not in ("http", "https"):
        return {}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(f"{url.rstrip('/')}/models", headers=headers), timeout=_SECONDS) as answer:
            listed = json.loads(answer.read(1 << 20))["data"]
    except (URLError, OSError, ValueError, LookupError, TypeError):
        return {}
    card = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(card, Mapping) or card.get("policy_server") is not True:
        return {}
    found: dict[str, Any] = {"server_type": "vllm", "model_name": card.get("id"), "tokenizer_name": card.get("root")}
    return {name: value for name, value in found.items() if isinstance(value, str) and value}
