"""Clients of model servers: OpenAI-compatible servers, token engines, and a small embedded model.

    async with Router([OpenAIServer(ServerSettings(base_url, model_name))]) as router:
        response = await router.chat(messages, tools=tools)

Import the embedded model from `lachesis_tokens.engines.embedded`.
"""

from typing import TYPE_CHECKING

from lachesis.lazy import lazy_names

if TYPE_CHECKING:
    from lachesis.inference.client_settings import ServerSettings
    from lachesis.inference.errors import (
        BadResponse,
        ContextExhausted,
        InferenceError,
        RequestRejected,
        ServerUnavailable,
        Unauthorized,
    )
    from lachesis.inference.openai_server import OpenAIServer
    from lachesis.inference.router import Router, TokenTrackingUnavailable
    from lachesis.inference.token_tracker import TokenTracker
    from lachesis.inference.tracking import ModelServer
else:  # aiohttp takes 0.3 s of CPU to import
    __getattr__ = lazy_names(
        __name__,
        {
            "lachesis.inference.errors": (
                *("BadResponse", "ContextExhausted", "InferenceError"),
                *("RequestRejected", "ServerUnavailable", "Unauthorized"),
            ),
            "lachesis.inference.http_client": ("ServerSettings",),
            "lachesis.inference.openai_server": ("OpenAIServer",),
            "lachesis.inference.router": ("Router", "TokenTrackingUnavailable"),
            "lachesis.inference.token_tracker": ("TokenTracker",),
            "lachesis.inference.tracking": ("ModelServer",),
        },
    )

__all__ = [
    "BadResponse",
    "ContextExhausted",
    "InferenceError",
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
