"""What a run asks for completions. Nothing here loads a client: a run that needs none starts without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, TypeGuard, Unpack

from backends.errors import LachesisError
from lachesis_client.chat_options import ChatOptions, Split
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    from lachesis_client.affinity import Affinity
    from lachesis_client.token_tracker import TokenTracker


class TokenTrackingUnavailable(LachesisError, NotImplementedError):
    """The caller needs exact tokens and logprobs, and these servers do not report them."""


class MessageServer(ABC):
    """Answers messages with messages, and reports no tokens (Phase 1)."""

    affinity: Affinity | None = None
    """The servers that have computed the prompts of the rollout; None: it is of no rollout, or there is no choice."""

    @abstractmethod
    async def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], *, split: Split = "train", **options: Unpack[ChatOptions]
    ) -> ChatResponse:
        """One completion. Raises the errors of `lachesis_client.errors`."""

    @abstractmethod
    async def chat_completion(self, *, split: Split = "train", n: int = 1, **kwargs: Any) -> ChatCompletion:
        """OpenAI's keyword arguments in, `openai.types.chat.ChatCompletion` out; `model` is the server's."""

    @abstractmethod
    async def completion(self, *, split: Split = "train", n: int = 1, **kwargs: Any) -> Completion:
        """The same for the text-completion route (`prompt=`)."""

    @abstractmethod
    def for_rollout(self, *, group: str | None = None, session: str | None = None) -> Self:
        """The server as one rollout sees it."""

    @abstractmethod
    def wandb_metrics(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """`metrics` and those of every server, under the names of Atropos' dashboards."""

    @abstractmethod
    async def update_weight(self, weight: float) -> None:
        """Use only this share (0 to 1) of every server's concurrency."""

    @abstractmethod
    async def check(self) -> Sequence[Sequence[str]]:
        """The models of every server, without any completion. The first failure raises its error."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    def managed_server(self, *_: Any, **__: Any) -> NoReturn:
        """Raises `TokenTrackingUnavailable`."""
        raise TokenTrackingUnavailable(
            "managed_server() tracks exact tokens, which OpenAI-style servers do not report: that is Phase 2, with a "
            "server_type of vllm or sglang. For evaluation and trajectories without tokens (Phase 1) use chat()"
        )

    async def get_logprobs(self, **_: Any) -> NoReturn:
        """Raises `TokenTrackingUnavailable`."""
        raise TokenTrackingUnavailable(
            "get_logprobs() scores token ids, which OpenAI-style servers do not take: that is Phase 2, with a "
            "server_type of vllm or sglang"
        )


ModelServer: TypeAlias = "MessageServer | TokenTracker[Any]"
"""Where the completions of a run come from: Phase 1 or Phase 2."""


def tracks_tokens(server: Any) -> TypeGuard[TokenTracker[Any]]:
    """Whether it reports tokens."""
    return bool(getattr(server, "tracks_tokens", False))
