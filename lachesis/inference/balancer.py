"""Several servers as one: each request goes to the server with the most free weighted capacity.

Waiting requests are futures in a queue. A request that ends passes its capacity to the next in the queue. An
unavailable server is suspended for a while, and its requests go to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Literal, Protocol, TypeAlias, TypeVar

from lachesis.inference.errors import BadResponse, ServerUnavailable, Unauthorized
from lachesis.inference.failed_requests import note_answered, note_failed
from lachesis.inference.http_client import ServerSettings
from lachesis.inference.lifecycle import AsyncCloseable

Split: TypeAlias = Literal["train", "eval"]
_SPLITS: Final[tuple[Split, ...]] = ("eval", "train")
"""In the order in which waiting requests are served: the limit of evaluations keeps them few."""
_METRICS: Final[Mapping[Split, tuple[str, str]]] = {
    "train": ("request_time", "average_num_attempts"),
    "eval": ("eval_request_time", "eval_retry_rate"),
}
"""The names of latencies and attempts."""


class Server(Protocol):
    """A server that a `Balancer` sends requests to."""

    settings: ServerSettings

    @property
    def base_url(self) -> str: ...

    async def check(self) -> list[str]: ...

    async def close(self) -> None: ...


class TimedAnswer(Protocol):
    """A dataclass that holds the latency and the attempts of its request."""

    @property
    def latency(self) -> float: ...

    @property
    def attempts(self) -> int: ...


S = TypeVar("S", bound=Server)
A = TypeVar("A", bound=TimedAnswer)


def _windows() -> dict[Split, deque[float]]:
    """The last thousand values of each kind."""
    return {split: deque(maxlen=1000) for split in _SPLITS}


@dataclass(slots=True)
class _Member(Generic[S]):
    """A server and its load. Times are those of the event loop, in seconds."""

    server: S
    in_flight: int = 0
    in_flight_eval: int = 0
    suspended_until: float = 0.0
    latencies: dict[Split, deque[float]] = field(default_factory=_windows)
    """Seconds of the last attempt of each answered request."""
    attempts: dict[Split, deque[float]] = field(default_factory=_windows)


class Balancer(AsyncCloseable, Generic[S]):
    """Sends each request to the best of its servers.

    Args:
        cooldown: seconds for which an unavailable server is suspended. A single server is never suspended: each request
            has its own retries, and then fails.
        unavailable_wait: seconds that a request waits while all servers are suspended, before `ServerUnavailable`.
    """

    def __init__(self, servers: Sequence[S], *, cooldown: float = 30.0, unavailable_wait: float = 60.0) -> None:
        if not servers:
            raise ValueError("at least one server is needed")
        self.servers = list(servers)
        self.cooldown = cooldown
        self.unavailable_wait = unavailable_wait
        self._members = [_Member(server) for server in self.servers]
        self._capacity_share = 1.0
        self._waiting: dict[Split, deque[asyncio.Future[_Member[S] | None]]] = {"eval": deque(), "train": deque()}
        self._last_failure: ServerUnavailable | None = None

    async def close(self) -> None:
        """Close the connections of all servers."""
        await asyncio.gather(*(server.close() for server in self.servers))

    async def check(self) -> list[list[str]]:
        """The models of every server, without any completion. The first failure raises its error."""
        return list(await asyncio.gather(*(server.check() for server in self.servers)))

    def wandb_metrics(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """`metrics` and those of every server, under the names of Atropos' dashboards.

        These are `server/server_{i}_request_time_avg` and so on. Metrics without a value are absent.
        """
        report = dict(metrics or {})
        for index, member in enumerate(self._members):
            for split, (request_time, attempts) in _METRICS.items():
                if times := member.latencies[split]:
                    name = f"server/server_{index}_{request_time}"
                    report[f"{name}_avg"] = statistics.fmean(times)
                    report[f"{name}_std"] = statistics.pstdev(times)
                    report[f"{name}_99p"] = sorted(times)[math.ceil(0.99 * len(times)) - 1]
                    report[f"server/server_{index}_{attempts}"] = statistics.fmean(member.attempts[split])
        return report

    async def update_weight(self, weight: float) -> None:
        """Use only this share (0 to 1) of every server's concurrency, but at least one request each."""
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"weight {weight} is not a share between 0 and 1")
        self._capacity_share = weight
        self._hand_out()

    async def _run(
        self,
        send: Callable[[S, int | None], Awaitable[list[A]]],
        split: Split,
        *,
        asked: Callable[[], object],
        prefer: str | None = None,
    ) -> list[A]:
        """The answers of the best server. On `ServerUnavailable`, suspend that server and try the next one.

        Args:
            asked: the messages or the prompt: requests with equal ones are repetitions; see `failed_requests`.
            prefer: the `base_url` of a server that is used while it has room.
        """
        try:
            answers = await self._answers(send, split, prefer)
        except (ServerUnavailable, BadResponse, Unauthorized) as error:
            note_failed(repr(asked()), error)
            raise
        note_answered(lambda: repr(asked()))
        return answers

    async def _answers(
        self, send: Callable[[S, int | None], Awaitable[list[A]]], split: Split, prefer: str | None
    ) -> list[A]:
        failed_attempts = 0
        give_up_at: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            member, give_up_at = await self._take(split, give_up_at, prefer)
            others = any(other is not member and self._available(other) for other in self._members)
            try:
                # If another server is available, one retry here is enough.
                answers = await send(member.server, 1 if others else None)
            except ServerUnavailable as failure:
                failed_attempts += failure.attempts
                if len(self._members) == 1:
                    raise
                self._suspend(member, failure)
                give_up_at = give_up_at or loop.time() + self.unavailable_wait
            else:
                member.latencies[split].append(answers[0].latency)
                member.attempts[split].append(answers[0].attempts)
                member.suspended_until = 0.0
                if not failed_attempts:
                    return answers
                attempts = answers[0].attempts + failed_attempts
                return [replace(answer, attempts=attempts) for answer in answers]  # type: ignore[type-var]
            finally:
                self._release(member, split)

    async def _take(
        self, split: Split, give_up_at: float | None, prefer: str | None
    ) -> tuple[_Member[S], float | None]:
        """Reserve capacity of a server, in turn. While all are suspended, the wait ends at `give_up_at`."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._waiting[split] and (member := self._best(split, prefer)):
                return self._reserve(member, split), give_up_at
            timeout = None
            if not any(map(self._available, self._members)):
                give_up_at = give_up_at or loop.time() + self.unavailable_wait
                timeout = give_up_at - loop.time()
                if timeout <= 0:
                    raise self._all_unavailable()
            turn: asyncio.Future[_Member[S] | None] = loop.create_future()
            self._waiting[split].append(turn)
            try:
                async with asyncio.timeout(timeout):
                    taken = await turn
            except TimeoutError:
                taken = self._leave_queue(turn, split)  # the reservation may have come at the same time
            except asyncio.CancelledError:
                if reserved := self._leave_queue(turn, split):
                    self._release(reserved, split)
                raise
            if taken:
                return taken, give_up_at

    def _leave_queue(self, turn: asyncio.Future[_Member[S] | None], split: Split) -> _Member[S] | None:
        """Stop waiting. Returns a reservation that was made meanwhile."""
        with contextlib.suppress(ValueError):
            self._waiting[split].remove(turn)
        return turn.result() if turn.done() and not turn.cancelled() else None

    def _available(self, member: _Member[S]) -> bool:
        return member.server.settings.weight > 0 and asyncio.get_running_loop().time() >= member.suspended_until

    def _best(self, split: Split, prefer: str | None = None) -> _Member[S] | None:
        """The available server with room whose weighted capacity is least used, or the preferred one."""
        best, least = None, float("inf")
        for member in self._members:
            settings = member.server.settings
            limit = max(1, int(settings.max_concurrency * self._capacity_share))
            eval_limit = max(1, int(settings.max_eval_concurrency * self._capacity_share))
            full = member.in_flight >= limit or (split == "eval" and member.in_flight_eval >= eval_limit)
            if full or not self._available(member):
                continue
            if prefer is not None and member.server.base_url == prefer:
                return member
            load = (member.in_flight + 1) / (limit * settings.weight)
            if load < least:
                best, least = member, load
        return best

    def _reserve(self, member: _Member[S], split: Split) -> _Member[S]:
        member.in_flight += 1
        member.in_flight_eval += split == "eval"
        return member

    def _release(self, member: _Member[S], split: Split) -> None:
        member.in_flight -= 1
        member.in_flight_eval -= split == "eval"
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free capacity to waiting requests."""
        for split in _SPLITS:
            queue = self._waiting[split]
            while queue:
                if queue[0].done():
                    queue.popleft()
                elif member := self._best(split):
                    queue.popleft().set_result(self._reserve(member, split))
                else:
                    break

    def _suspend(self, member: _Member[S], failure: ServerUnavailable) -> None:
        loop = asyncio.get_running_loop()
        self._last_failure = failure
        member.suspended_until = loop.time() + self.cooldown
        loop.call_at(member.suspended_until + 0.001, self._hand_out)
        if not any(map(self._available, self._members)):
            for queue in self._waiting.values():  # they wait again, with a limit
                while queue:
                    turn = queue.popleft()
                    if not turn.done():
                        turn.set_result(None)

    def _all_unavailable(self) -> ServerUnavailable:
        failure = self._last_failure
        cause, attempts = (failure.cause, failure.attempts) if failure else ("every weight is 0", 0)
        names = ", ".join(server.base_url for server in self.servers)
        return ServerUnavailable(names, cause, attempts)
