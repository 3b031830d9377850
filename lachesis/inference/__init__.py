"""Where completions come from: OpenAI-compatible servers, one or many, a small embedded model, a scripted policy.

    async with Router([OpenAIServer(ServerSettings(base_url, model_name))]) as router:
        response = await router.chat(messages, tools=tools)

`lachesis.inference.embedded` and `lachesis.testing.reference_server` are imported where they are used.
"""

from lachesis.inference.errors import (
    BadResponse,
    ContextExhausted,
    InferenceError,
    RequestRejected,
    ServerUnavailable,
    Unauthorized,
)
from lachesis.inference.openai_server import OpenAIServer, ServerSettings
from lachesis.inference.router import Router, TokenTrackingUnavailable
from lachesis.inference.token_server import TokenServer

__all__ = [
    "BadResponse",
    "ContextExhausted",
    "InferenceError",
    "OpenAIServer",
    "RequestRejected",
    "Router",
    "ServerSettings",
    "ServerUnavailable",
    "TokenServer",
    "TokenTrackingUnavailable",
    "Unauthorized",
]
