"""Several servers as one: each request goes where the fewest tokens are in flight and the most of it is cached.

Waiting requests are futures in a queue. A request that ends passes its capacity to the next in the queue. An
unavailable server is suspended for a while, and its requests go to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from lachesis_client.affinity import Affinity, Demand, ExpectedTokens, GroupCache, Place, Route
from lachesis_client.chat_options import AnswerTimes, Split
from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import BadResponse, ServerUnavailable, Unauthorized
from lachesis_client.failed_requests import note_answered, note_failed
from lachesis_client.lifecycle import AsyncCloseable

_SPLITS: Final[tuple[Split, ...]] = ("eval", "train")
"""In the order in which waiting requests are served: the limit of evaluations keeps them few."""
_CACHED: Final = 4
"""Tokens in flight that outweigh a token of the prompt in the cache: four siblings with one prompt stay together while
another server has nothing to do."""
_STAY: Final = 0.25
"""The share of a server's load that a whole prompt in its cache outweighs. Among many requests, loads differ by more
than any prompt from moment to moment."""


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


@dataclass(slots=True)
class _Member(Generic[S]):
    """A server and its load. Times are those of the event loop, in seconds."""

    server: S
    in_flight: int = 0
    in_flight_eval: int = 0
    suspended_until: float = 0.0
    times: AnswerTimes = field(default_factory=AnswerTimes)
    """The latency is that of the last attempt of a request."""
    share: float = 1.0
    """Of the concurrency that may be used."""
    failure: ServerUnavailable | None = None
    """The last one."""
    places: list[Place] = field(init=False)

    def __post_init__(self) -> None:
        ranks = self.server.settings.data_parallel_size
        self.places = [Place(rank) for rank in range(ranks)] if ranks > 1 else [Place()]

    def forget(self) -> None:
        """What its caches hold is unknown."""
        for place in self.places:
            place.cache = object()

    def full(self, split: Split) -> bool:
        """Whether it may get no further request."""
        if self.in_flight >= self.limit:
            return True
        eval_limit = self.server.settings.max_eval_concurrency
        return split == "eval" and self.in_flight_eval >= max(1, int(eval_limit * self.share))

    @property
    def limit(self) -> int:
        return max(1, int(self.server.settings.max_concurrency * self.share))


class _Slot(NamedTuple, Generic[S]):
    """Capacity that is reserved for one request."""

    member: _Member[S]
    place: Place
    demand: Demand


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[S]):
    demand: Demand
    turn: asyncio.Future[_Slot[S] | None]


class Balancer(AsyncCloseable, Generic[S]):
    """Sends each request to the best of its servers.

    That is the one with the fewest tokens in flight (prompts and expected completions), relative to `weight *
    max_concurrency`, minus a bonus for the part of the prompt in its cache. So a rollout stays with its server, and a
    group with the server of its prompt, until another one has much less to do. A copy is the same servers with the same
    load.

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
        self._waiting: dict[Split, deque[_Waiting[S]]] = {"eval": deque(), "train": deque()}
        self._groups: WeakValueDictionary[str, GroupCache] = WeakValueDictionary()
        self._expected = ExpectedTokens()
        self._choice = sum(len(member.places) for member in self._members) > 1
        """Whether there is more than one place to send a request to."""

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
            report |= member.times.metrics(index)
        return report

    async def update_weight(self, weight: float) -> None:
        """Use only this share (0 to 1) of every server's concurrency, but at least one request each."""
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"weight {weight} is not a share between 0 and 1")
        for member in self._members:
            member.share = weight
        self._hand_out()

    def _affinity(self, group: str | None, session: str | None) -> Affinity:
        """That of a new rollout."""
        affinity = Affinity() if session is None else Affinity(session)
        if group is not None:
            affinity.group = self._groups.setdefault(group, affinity.group)
        return affinity

    async def _run(
        self,
        send: Callable[[S, int | None, Route], Awaitable[list[A]]],
        split: Split,
        *,
        asked: Callable[[], object],
        demand: Demand,
        sampled: Callable[[A], int | None] = lambda _: None,
    ) -> list[A]:
        """The answers of the best server. On `ServerUnavailable`, suspend that server and try the next one.

        Args:
            send: sends the request to a server, with that many retries, by that route.
            asked: the messages or the prompt: requests with equal ones are repetitions; see `failed_requests`.
            sampled: the length of a completion, if it is known.
        """
        try:
            answers, slot = await self._answers(send, split, demand)
        except (ServerUnavailable, BadResponse, Unauthorized) as error:
            note_failed(repr(asked()), error)
            raise
        note_answered(lambda: repr(asked()))
        if self._choice:
            lengths = [length for answer in answers if (length := sampled(answer)) is not None]
            for length in lengths:
                self._expected.add(length)
            if demand.affinity is not None:
                demand.affinity.answered(slot.place, demand.prompt_tokens + max(lengths, default=0))
        return answers

    async def _answers(
        self, send: Callable[[S, int | None, Route], Awaitable[list[A]]], split: Split, demand: Demand
    ) -> tuple[list[A], _Slot[S]]:
        failed_attempts = 0
        give_up_at: float | None = None
        loop = asyncio.get_running_loop()
        affinity = demand.affinity
        while True:
            slot, give_up_at = await self._take(split, give_up_at, demand)
            member, place = slot.member, slot.place
            others = self._choice and any(other is not member and self._available(other) for other in self._members)
            try:
                # If another server is available, one retry here is enough.
                route = Route(None if affinity is None else affinity.session, place.rank)
                answers = await send(member.server, 1 if others else None, route)
            except ServerUnavailable as failure:
                failed_attempts += failure.attempts
                if len(self._members) == 1:
                    raise
                self._suspend(member, failure)
                give_up_at = give_up_at or loop.time() + self.unavailable_wait
            else:
                member.times.add(split, answers[0].latency, answers[0].attempts)
                member.suspended_until = 0.0
                if not failed_attempts:
                    return answers, slot
                attempts = answers[0].attempts + failed_attempts
                return [replace(answer, attempts=attempts) for answer in answers], slot  # type: ignore[type-var]
            finally:
                self._release(slot, split)

    async def _take(self, split: Split, give_up_at: float | None, demand: Demand) -> tuple[_Slot[S], float | None]:
        """Reserve capacity of a server, in turn. While all are suspended, the wait ends at `give_up_at`."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._waiting[split] and (slot := self._best(split, demand)):
                return self._reserve(slot, split), give_up_at
            timeout = None
            if not any(map(self._available, self._members)):
                give_up_at = give_up_at or loop.time() + self.unavailable_wait
                timeout = give_up_at - loop.time()
                if timeout <= 0:
                    raise self._all_unavailable()
            waiting: _Waiting[S] = _Waiting(demand, loop.create_future())
            self._waiting[split].append(waiting)
            try:
                async with asyncio.timeout(timeout):
                    taken = await waiting.turn
            except TimeoutError:
                taken = self._leave_queue(waiting, split)  # the reservation may have come at the same time
            except asyncio.CancelledError:
                if reserved := self._leave_queue(waiting, split):
                    self._release(reserved, split)
                raise
            if taken:
                return taken, give_up_at

    def _leave_queue(self, waiting: _Waiting[S], split: Split) -> _Slot[S] | None:
        """Stop waiting. Returns a reservation that was made meanwhile."""
        with contextlib.suppress(ValueError):
            self._waiting[split].remove(waiting)
        return waiting.turn.result() if waiting.turn.done() and not waiting.turn.cancelled() else None

    def _available(self, member: _Member[S]) -> bool:
        return member.server.settings.weight > 0 and asyncio.get_running_loop().time() >= member.suspended_until

    def _best(self, split: Split, demand: Demand) -> _Slot[S] | None:
        """The place, of an available server with room, that has the least to do once it has this request."""
        best, least = None, float("inf")
        for member in self._members:
            if member.full(split) or not self._available(member):
                continue
            if not self._choice:
                return _Slot(member, member.places[0], demand)
            capacity = member.limit * member.server.settings.weight / len(member.places)
            for place in member.places:
                cached = demand.cached(place)
                bonus = _CACHED * cached + _STAY * place.tokens * cached / max(1, demand.prompt_tokens)
                load = (place.tokens + demand.tokens - bonus) / capacity
                if load < least:
                    best, least = _Slot(member, place, demand), load
        return best

    def _reserve(self, slot: _Slot[S], split: Split) -> _Slot[S]:
        slot.member.in_flight += 1
        slot.member.in_flight_eval += split == "eval"
        slot.place.tokens += slot.demand.tokens
        if self._choice and slot.demand.affinity is not None:
            slot.demand.affinity.sent(slot.place, slot.demand.prompt_tokens)
        return slot

    def _release(self, slot: _Slot[S], split: Split) -> None:
        slot.member.in_flight -= 1
        slot.member.in_flight_eval -= split == "eval"
        slot.place.tokens -= slot.demand.tokens
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free capacity to waiting requests."""
        for split in _SPLITS:
            queue = self._waiting[split]
            while queue:
                if queue[0].turn.done():
                    queue.popleft()
                elif slot := self._best(split, queue[0].demand):
                    queue.popleft().turn.set_result(self._reserve(slot, split))
                else:
                    break

    def _suspend(self, member: _Member[S], failure: ServerUnavailable) -> None:
        loop = asyncio.get_running_loop()
        member.failure = failure
        member.suspended_until = loop.time() + self.cooldown
        member.forget()
        loop.call_at(member.suspended_until + 0.001, self._hand_out)
        if not any(map(self._available, self._members)):
            for queue in self._waiting.values():  # they wait again, with a limit
                while queue:
                    turn = queue.popleft().turn
                    if not turn.done():
                        turn.set_result(None)

    def _all_unavailable(self) -> ServerUnavailable:
        failure = max(self._members, key=lambda member: member.suspended_until).failure
        cause, attempts = (failure.cause, failure.attempts) if failure else ("every weight is 0", 0)
        names = ", ".join(server.base_url for server in self.servers)
        return ServerUnavailable(names, cause, attempts)
