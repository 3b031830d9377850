"""The core's interface to a server that reports the tokens of completions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lachesis_client.balancer import Balancer, S


class TokenTracker(Balancer[S]):
    """A server that reports the tokens of its completions (Phase 2); `lachesis_tokens` has it."""

    tracks_tokens = True

    prompts: Any
    """The model's tokenizer and chat template."""
    tokenizer_proof: Any
    """Which tokenizer it is, and how that was compared with the servers'."""

    @abstractmethod
    def for_rollout(self, *, group: str | None = None, session: str | None = None) -> Any:
        """The server of one rollout, which has `chat` and tracks its tokens."""
