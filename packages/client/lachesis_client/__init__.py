"""Clients of model servers: OpenAI-compatible servers, token engines, and a small embedded model.

    async with Router([OpenAIServer(ServerSettings(base_url, model_name))]) as router:
        response = await router.chat(messages, tools=tools)

Import the embedded model from `lachesis_tokens.engines.embedded`.
"""

from typing import TYPE_CHECKING

from backends.lazy import lazy_names

if TYPE_CHECKING:
    from lachesis_client.client_settings import ServerSettings
    from lachesis_client.errors import (
        BadResponse,
        ContextExhausted,
        InferenceError,
        RequestRejected,
        ServerUnavailable,
        Unauthorized,
    )
    from lachesis_client.model_server import MessageServer, ModelServer, TokenTrackingUnavailable
    from lachesis_client.openai_server import OpenAIServer
    from lachesis_client.router import Router
    from lachesis_client.token_tracker import TokenTracker
else:  # aiohttp takes 0.3 s of CPU to import
    __getattr__ = lazy_names(
        __name__,
        {
            "lachesis_client.errors": (
                *("BadResponse", "ContextExhausted", "InferenceError"),
                *("RequestRejected", "ServerUnavailable", "Unauthorized"),
            ),
            "lachesis_client.client_settings": ("ServerSettings",),
            "lachesis_client.openai_server": ("OpenAIServer",),
            "lachesis_client.router": ("Router",),
            "lachesis_client.token_tracker": ("TokenTracker",),
            "lachesis_client.model_server": ("MessageServer", "ModelServer", "TokenTrackingUnavailable"),
        },
    )

__all__ = [
    "BadResponse",
    "ContextExhausted",
    "InferenceError",
    "MessageServer",
    "ModelServer",
    "OpenAIServer",
    "RequestRejected",
    "Router",
    "ServerSettings",
    "ServerUnavailable",
    "TokenTracker",
    "TokenTrackingUnavailable",
    "Unauthorized",
]
