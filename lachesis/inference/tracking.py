"""Whether a server gives tokens, asked without loading what gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from lachesis.inference.token_server import TokenServer


def tracks_tokens(server: Any) -> TypeGuard[TokenServer]:
    """Whether it is a `TokenServer`: a run in Phase 1 has a `Router`."""
    return bool(getattr(server, "tracks_tokens", False))
