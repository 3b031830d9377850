"""Whether a server reports the tokens of completions, asked without loading what reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

if TYPE_CHECKING:
    from lachesis_client.router import Router
    from lachesis_client.token_tracker import TokenTracker

ModelServer: TypeAlias = "Router | TokenTracker[Any]"
"""Where the completions of a run come from: Phase 1 or Phase 2."""


def tracks_tokens(server: Any) -> TypeGuard[TokenTracker[Any]]:
    """Whether it reports tokens: a run in Phase 1 has a `Router`."""
    return bool(getattr(server, "tracks_tokens", False))
