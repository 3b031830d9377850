"""What a run asks for completions. Nothing here loads a client: a run that needs none starts without."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self, TypeAlias, TypedDict, TypeGuard, Unpack

from backends.errors import LachesisError
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    from lachesis_client.affinity import Affinity
    from lachesis_client.token_tracker import TokenTracker

Split: TypeAlias = Literal["train", "eval"]
"""Evaluations have limits and metrics of their own."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of every `chat`. None and missing arguments are off."""

    tools: Tools | None
    tool_choice: str | Mapping[str, Any] | None
    temperature: float | None
    max_tokens: int | None
    top_p: float | None
    stop: str | Sequence[str] | None
    seed: int | None
    extra_body: Mapping[str, Any] | None


def check_arguments(given: Mapping[str, Any], known: Set[str], call: str) -> None:
    """Raise `TypeError` for arguments that would have no effect. None and False never have one."""
    if given.keys() <= known:
        return
    unknown = sorted(name for name, value in given.items() if name not in known and value not in (None, False))
    if unknown:
        raise TypeError(f"{call}() does not take {', '.join(unknown)}; fields of the server go into extra_body")


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


_METRICS: Final[Mapping[Split, tuple[str, str]]] = {
    "train": ("request_time", "average_num_attempts"),
    "eval": ("eval_request_time", "eval_retry_rate"),
}
"""The names of latencies and attempts."""


class AnswerTimes:
    """The last thousand answers of a server: the seconds that each took, and its attempts."""

    __slots__ = ("attempts", "latencies")

    def __init__(self) -> None:
        self.latencies: dict[Split, deque[float]] = {split: deque(maxlen=1000) for split in _METRICS}
        self.attempts: dict[Split, deque[int]] = {split: deque(maxlen=1000) for split in _METRICS}

    def add(self, split: Split, latency: float, attempts: int) -> None:
        """Count an answer."""
        self.latencies[split].append(latency)
        self.attempts[split].append(attempts)

    def metrics(self, index: int) -> dict[str, float]:
        """Those of the server number `index`, such as `server/server_0_request_time_avg`; none without answers."""
        report: dict[str, float] = {}
        for split, (request_time, attempts) in _METRICS.items():
            if times := self.latencies[split]:
                name = f"server/server_{index}_{request_time}"
                report[f"{name}_avg"] = statistics.fmean(times)
                report[f"{name}_std"] = statistics.pstdev(times)
                report[f"{name}_99p"] = sorted(times)[math.ceil(0.99 * len(times)) - 1]
                report[f"server/server_{index}_{attempts}"] = statistics.fmean(self.attempts[split])
        return report
