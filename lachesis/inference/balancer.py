"""Several servers as one: each request goes to the one with the most free weighted capacity.

Waiting is a future in a queue, never a poll: whoever frees a place hands it to the next in line. A server that is
unavailable is set aside for a while, and its requests go to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from lachesis.inference.errors import InferenceError, ServerUnavailable
from lachesis.inference.http_client import ServerSettings
from lachesis.inference.metrics import ServerMetrics
from lachesis.inference.scoped import Closing

Split: TypeAlias = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = ("eval", "train")


class Server(Protocol):
    """What is balanced."""

    settings: ServerSettings

    @property
    def base_url(self) -> str: ...

    async def check(self) -> list[str]: ...

    async def close(self) -> None: ...


class Timed(Protocol):
    """A dataclass that says how long its request took, and how often it was made."""

    @property
    def latency(self) -> float: ...

    @property
    def attempts(self) -> int: ...


S = TypeVar("S", bound=Server)
A = TypeVar("A", bound=Timed)


@dataclass(slots=True)
class _Place(Generic[S]):
    """A server, what it is doing, and since when it is trusted again. Times are the loop's, in seconds."""

    server: S
    in_flight: int = 0
    in_flight_eval: int = 0
    set_aside_until: float = 0.0
    metrics: ServerMetrics = field(default_factory=ServerMetrics)


class Balancer(Closing, Generic[S]):
    """Sends each request to the best of its servers.

    `cooldown` is how long (seconds) an unavailable server is left alone while there are others; `unavailable_wait` how
    long a request waits for one to come back when all are, before `ServerUnavailable`. A single server is never set
    aside: each request has its own retries, and then fails.
    """

    def __init__(self, servers: Sequence[S], *, cooldown: float = 30.0, unavailable_wait: float = 60.0) -> None:
        if not servers:
            raise ValueError("at least one server is needed")
        self.servers = list(servers)
        self.cooldown = cooldown
        self.unavailable_wait = unavailable_wait
        self._places = [_Place(server) for server in self.servers]
        self._capacity_share = 1.0
        self._waiting: dict[Split, deque[asyncio.Future[_Place[S] | None]]] = {"eval": deque(), "train": deque()}
        self._last_failure: ServerUnavailable | None = None

    async def close(self) -> None:
        """Close the connections of all servers."""
        await asyncio.gather(*(server.close() for server in self.servers))

    async def check(self) -> list[list[str]]:
        """Ask every server for its models, without any completion; the first that fails raises its error."""
        return list(await asyncio.gather(*(server.check() for server in self.servers)))

    def wandb_metrics(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """`metrics` and those of every server, as `server/server_{i}_request_time_avg` and so on."""
        report = dict(metrics or {})
        for index, place in enumerate(self._places):
            report |= place.metrics.as_wandb(f"server_{index}")
        return report

    async def update_weight(self, weight: float) -> None:
        """Use only this share (0 to 1) of every server's concurrency, at least one request each."""
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"weight {weight} is not a share between 0 and 1")
        self._capacity_share = weight
        self._hand_out()

    # Who goes where, and when.

    async def _run(self, send: Callable[[S, int | None], Awaitable[A]], split: Split, *, near: S | None = None) -> A:
        """Send on the best server; on `ServerUnavailable` set that one aside and go to the next.

        `near` is preferred while it has room: it has the beginning of the prompt in its cache.
        """
        failed_attempts = 0
        give_up_at: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            place, give_up_at = await self._take(split, give_up_at, near)
            others = any(other is not place and self._trusted(other) for other in self._places)
            try:
                # With another server at hand a second try here is enough.
                answer = await send(place.server, 1 if others else None)
            except ServerUnavailable as failure:
                failed_attempts += failure.attempts
                place.metrics.failures += 1
                if len(self._places) == 1:
                    raise
                self._set_aside(place, failure)
                give_up_at = give_up_at or loop.time() + self.unavailable_wait
            except InferenceError:
                place.metrics.failures += 1
                raise
            else:
                place.metrics.record(answer.latency, answer.attempts, evaluation=split == "eval")
                place.set_aside_until = 0.0
                if not failed_attempts:
                    return answer
                return replace(answer, attempts=answer.attempts + failed_attempts)  # type: ignore[type-var]
            finally:
                self._give_back(place, split)

    async def _take(self, split: Split, give_up_at: float | None, near: S | None) -> tuple[_Place[S], float | None]:
        """A reserved place, in turn. Without any trusted server the wait is bounded by `give_up_at`."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._waiting[split] and (place := self._best(split, near)):
                return self._reserve(place, split), give_up_at
            timeout = None
            if not any(map(self._trusted, self._places)):
                give_up_at = give_up_at or loop.time() + self.unavailable_wait
                timeout = give_up_at - loop.time()
                if timeout <= 0:
                    raise self._all_down()
            turn: asyncio.Future[_Place[S] | None] = loop.create_future()
            self._waiting[split].append(turn)
            try:
                async with asyncio.timeout(timeout):
                    taken = await turn
            except TimeoutError:
                taken = self._leave_queue(turn, split)  # it may have come in the same instant
            except asyncio.CancelledError:
                if reserved := self._leave_queue(turn, split):
                    self._give_back(reserved, split)
                raise
            if taken:
                return taken, give_up_at

    def _leave_queue(self, turn: asyncio.Future[_Place[S] | None], split: Split) -> _Place[S] | None:
        """Wait no longer; the place that was handed over meanwhile, if any."""
        with contextlib.suppress(ValueError):
            self._waiting[split].remove(turn)
        return turn.result() if turn.done() and not turn.cancelled() else None

    def _trusted(self, place: _Place[S]) -> bool:
        return place.server.settings.weight > 0 and asyncio.get_running_loop().time() >= place.set_aside_until

    def _best(self, split: Split, near: S | None = None) -> _Place[S] | None:
        """The trusted server with room whose weighted capacity is least used; `near`, if that is one with room."""
        best, least = None, float("inf")
        for place in self._places:
            settings = place.server.settings
            limit = max(1, int(settings.max_concurrency * self._capacity_share))
            eval_limit = max(1, int(settings.max_eval_concurrency * self._capacity_share))
            full = place.in_flight >= limit or (split == "eval" and place.in_flight_eval >= eval_limit)
            if full or not self._trusted(place):
                continue
            if place.server is near:
                return place
            load = (place.in_flight + 1) / (limit * settings.weight)
            if load < least:
                best, least = place, load
        return best

    def _reserve(self, place: _Place[S], split: Split) -> _Place[S]:
        place.in_flight += 1
        place.in_flight_eval += split == "eval"
        return place

    def _give_back(self, place: _Place[S], split: Split) -> None:
        place.in_flight -= 1
        place.in_flight_eval -= split == "eval"
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free places to those who wait; evaluations first, for their own limit keeps them few."""
        for split in SPLITS:
            queue = self._waiting[split]
            while queue:
                if queue[0].done():
                    queue.popleft()
                elif place := self._best(split):
                    queue.popleft().set_result(self._reserve(place, split))
                else:
                    break

    def _set_aside(self, place: _Place[S], failure: ServerUnavailable) -> None:
        loop = asyncio.get_running_loop()
        self._last_failure = failure
        place.set_aside_until = loop.time() + self.cooldown
        loop.call_at(place.set_aside_until + 0.001, self._hand_out)
        if not any(map(self._trusted, self._places)):
            for queue in self._waiting.values():  # from now on their wait is bounded
                while queue:
                    turn = queue.popleft()
                    if not turn.done():
                        turn.set_result(None)

    def _all_down(self) -> ServerUnavailable:
        failure = self._last_failure
        cause, attempts = (failure.cause, failure.attempts) if failure else ("every weight is 0", 0)
        names = ", ".join(server.base_url for server in self.servers)
        return ServerUnavailable(names, cause, attempts)
