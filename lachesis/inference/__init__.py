"""Clients of model servers: OpenAI-compatible servers, token engines, and a small embedded model.

    async with Router([OpenAIServer(ServerSettings(base_url, model_name))]) as router:
        response = await router.chat(messages, tools=tools)

Import the embedded model from `lachesis.inference.embedded`.
"""

from typing import TYPE_CHECKING

from lachesis.lazy import lazy_names

if TYPE_CHECKING:
    from lachesis.inference.errors import (
        BadResponse,
        ContextExhausted,
        InferenceError,
        RequestRejected,
        ServerUnavailable,
        Unauthorized,
    )
    from lachesis.inference.http_client import ServerSettings
    from lachesis.inference.openai_server import OpenAIServer
    from lachesis.inference.router import Router, TokenTrackingUnavailable
    from lachesis.inference.token_server import TokenServer
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
            "lachesis.inference.token_server": ("TokenServer",),
        },
    )

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
