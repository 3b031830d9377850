"""A `Balancer`'s knowledge of prefix caches: where the beginning of a prompt was computed before."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Final, NamedTuple

_UNKNOWN: Final = 2048
"""Expected tokens of a completion without a limit, before there was one."""


class Place:
    """A server, or one data-parallel rank of it: its load and its prefix cache. Compared by identity."""

    __slots__ = ("cache", "rank", "tokens")

    def __init__(self, rank: int | None = None) -> None:
        self.rank: Final = rank
        self.tokens = 0
        """Of the requests in flight: prompts and expected completions."""
        self.cache = object()
        """The name of the prefix cache's content. After a failure, when the content may be gone, it changes."""


class GroupCache(dict[object, int]):
    """Tokens of the first prompt of a group, by the `Place.cache` that has them. Lives as long as one of its
    rollouts."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Affinity:
    """The places that have computed the beginning of a rollout's prompts."""

    session: str = field(default_factory=partial(token_hex, 16))
    """Names the rollout to routers; see `ServerSettings.session_header`."""
    group: GroupCache = field(default_factory=GroupCache)
    """Shared by the rollouts of a group."""
    own: dict[object, int] = field(default_factory=dict)
    """Tokens of the last prompt and its completion, by the `Place.cache` that has them."""
    first: int = 0
    """Tokens of the first prompt."""

    def cached(self, place: Place) -> int:
        """Tokens of the rollout that the place has computed."""
        return max(self.own.get(place.cache, 0), self.group.get(place.cache, 0))

    def sent(self, place: Place, prompt_tokens: int) -> None:
        """A request goes to the place. Siblings that are sent at the same time find the prompt of the group there."""
        self.first = self.first or prompt_tokens
        self.group.setdefault(place.cache, self.first)

    def answered(self, place: Place, tokens: int) -> None:
        """The place has computed `tokens`: a prompt and its completion."""
        self.own[place.cache] = tokens


class Route(NamedTuple):
    """How a request reaches its cache through what is between."""

    session: str | None = None
    """The value of the session header."""
    rank: int | None = None
    """The data-parallel rank of the server; None leaves the choice to the server."""


class Demand(NamedTuple):
    """A request's load on a server."""

    prompt_tokens: int = 0
    """0 where it is unknown."""
    completion_tokens: int = 1
    """The expected length of its completions together."""
    affinity: Affinity | None = None

    @property
    def tokens(self) -> int:
        """In flight while the request is."""
        return self.prompt_tokens + self.completion_tokens

    def cached(self, place: Place) -> int:
        """Tokens of the prompt that the place probably need not compute."""
        return min(self.prompt_tokens, self.affinity.cached(place)) if self.affinity is not None else 0


class ExpectedTokens:
    """The mean length of completions, over about the last hundred."""

    __slots__ = ("_count", "_mean")

    def __init__(self) -> None:
        self._count, self._mean = 0, 0.0

    def of(self, limit: int | None, n: int = 1) -> int:
        """Expected tokens of `n` completions of at most `limit` tokens, at least 1."""
        if not self._count:
            return n * (_UNKNOWN if limit is None else limit)
        mean = max(1, round(self._mean))
        return n * (mean if limit is None else min(mean, limit))

    def add(self, tokens: int) -> None:
        """A completion had this length."""
        self._count = min(100, self._count + 1)
        self._mean += (tokens - self._mean) / self._count
