"""Clients of model servers: OpenAI-compatible servers, token engines, and a small embedded model.

    async with Router([OpenAIServer(ServerSettings(base_url, model_name))]) as router:
        response = await router.chat(messages, tools=tools)

Import the embedded model from `lachesis.inference.embedded`.
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
