"""How the fake server makes completions: in time, with token faults, and across weight updates and aborts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from lachesis_testing.fake_server.completions import Ask, Call, Completion, Policy, Reply, cut_off, finish, joined
from lachesis_testing.fake_server.faults import TOKENS, Fault, Occasion, drawn, spoil, tokens_until_abort
from lachesis_testing.fake_server.host import Host
from lachesis_testing.fake_server.model import FakeModel, hash_after
from lachesis_testing.fake_server.prefix_cache import Ranks
from lachesis_testing.fake_server.seen import Seen
from lachesis_testing.fake_server.updates import Flow, PauseMode, Running
from lachesis_tokens.model_routes.host import ABORTED, ModelRoute
from lachesis_tokens.model_routes.requests import Rejected

_KEPT_RESTS: Final = 10_000


_COUNTS: Final = (
    *("requests", "in_flight", "most_in_flight", "waiting", "cancelled"),
    *("completions", "prompt_tokens", "cached_tokens", "completion_tokens", "aborted"),
)
"""Counts that begin at 0. Counts by route, status and fault appear when they occur."""


class FakeEngine:
    """Makes the completions of all requests of a server, whose weights change."""

    def __init__(
        self,
        host: Host,
        policy: Policy,
        *,
        faults: Mapping[Fault, Occasion],
        seed: int,
        vary: bool,
        latency: tuple[float, float],
        tokens_per_second: float | None,
        ranks: Ranks,
        prefills: bool,
    ) -> None:
        """`ranks` count as caches, and take time, where the server `prefills`. For the others see `FakeServer`."""
        self.host = host
        self.policy = policy
        self.faults = faults
        self.seed = seed
        self.vary = vary
        self.latency = latency
        self.tokens_per_second = tokens_per_second
        self.ranks = ranks
        self.prefills = prefills
        self.flow = Flow()
        self.stats: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        """The counts of `/fake/stats`."""
        self._asked: Counter[str] = Counter()
        self._rests: dict[str, Reply] = {}
        """By the digest of all ids before: the rest of aborted answers that a script had already decided."""

    @property
    def model(self) -> FakeModel:
        """Scores any ids: `server.model.score(prompt_ids, ids, sampling, kind)`."""
        return self.host.model

    def update_weights(self, version: str, seed: int) -> None:
        """Use another model and `weight_version` from the next token on."""
        old = self.model
        model = FakeModel(old.vocabulary_size, seed, end_ids=old.end_ids, mean_length=old.mean_length)
        self.host = replace(self.host, model=model, weight_version=version)
        for cache in self.ranks.caches:
            cache.clear()
        if not self.flow.paused:
            self.flow.interrupt(abort=False)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Sample nothing until `resume`. Requests in flight are answered with what they have ("abort"), wait ("keep"),
        or end first ("wait"). New requests wait."""
        self.flow.pause(mode)
        if mode == "wait":
            await self.flow.idle()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.flow.resume()

    def abort_requests(self, ids: Collection[str] = ()) -> int:
        """Answer requests in flight with what they have: those with these ids, or all. Returns how many."""
        return self.flow.interrupt(ids, abort=True)

    async def work(self, route: ModelRoute, seen: Seen, call: Call, running: Running) -> Host:
        """Make the completions, in the time that a model would take; the state of the server at their end.

        Interrupted completions end as they are, or go on with the weights that the server then has.
        """
        ranks = self.ranks
        if self.prefills:
            seen.cached = [await ranks.prefill(seen.rank, prompt) for prompt in call.prompts]
        await self.flow.unfrozen(running)
        host, loop, made = self.host, asyncio.get_running_loop(), seen.completions
        for place, prompt in enumerate(call.prompts):
            seed = self._chance(call.hashes[place].hexdigest(), call)
            limit = min(call.sampling.max_tokens, max(0, host.context_length - len(prompt)))
            made += [
                self._sample(route, host, seen, call, place, (), limit, f"{seed}/{index}") for index in range(call.n)
            ]
        self.stats["prompt_tokens"] += sum(len(prompt) for prompt in call.prompts)
        self.stats["cached_tokens"] += sum(seen.cached)
        self.stats["completions"] += len(made)
        self.stats.update(f"faults.{name}" for each in made for name in each.faults)
        planned = sum(len(each.ids) for each in made)
        self.stats["completion_tokens"] += planned
        wait, done = self._latency(seen), 0
        while not running.aborted:
            started, longest = loop.time(), max((len(each.ids) for each in made), default=0) - done
            seconds = wait + (longest / self.tokens_per_second if self.tokens_per_second else 0.0)
            if not seconds or await running.undisturbed(seconds):
                break
            done += int(max(0.0, loop.time() - started - wait) * (self.tokens_per_second or 0.0))
            wait = max(0.0, wait - (loop.time() - started))
            await self.flow.unfrozen(running)
            if not running.aborted:
                host = self.host
                made[:] = [self._go_on(route, host, seen, call, each, done) for each in made]
        if running.aborted:
            made[:] = [self._abort(call, each, done) for each in made]
        self.stats["completion_tokens"] += sum(len(each.ids) for each in made) - planned
        self.stats["aborted"] += sum(each.finish_reason == ABORTED for each in made)
        if self.prefills:
            for each in made:  # nobody has computed the last token yet
                ranks.caches[seen.rank].add([*call.prompts[each.prompt], *each.ids[:-1]])
        return host

    def _sample(
        self,
        route: ModelRoute,
        host: Host,
        seen: Seen,
        call: Call,
        place: int,
        begun: Sequence[int],
        limit: int,
        seed: str,
    ) -> Completion:
        """A completion of a prompt and the ids that were sampled after it."""
        hashed = hash_after(call.hashes[place], begun)
        prompt_ids = [*call.prompts[place], *begun] if begun else call.prompts[place]
        index = int(seed.rpartition("/")[2])
        ask = Ask(
            call, prompt_ids, hashed, index, seen.number, host.model, host.codec, route.logprobs(host), limit, seed
        )
        names: list[Fault] = []
        reply = self._rests.get(hashed.hexdigest())
        fresh = reply is None
        if reply is None:
            try:
                reply = self.policy.reply(ask)
            except Exception as error:  # a 400: the client must not retry an error of the policy
                raise Rejected(f"the policy failed: {type(error).__name__}: {error}") from error
        if self.faults and not begun:
            rng = ask.rng("faults")
            names = drawn(self.faults, TOKENS, seen.number, rng)
            if fresh:
                reply = spoil(ask, reply, [name for name in names if name is not Fault.ABORTED], rng)
        made = finish(ask, place, reply, [str(name) for name in names])
        made.weights = [(host.model, host.weight_version, 0, len(made.ids))] if made.ids else []
        made.scripted = reply.logprobs is None
        if Fault.ABORTED not in names:
            return made
        return self._abort(call, made, self._tokens_until_abort(seed))

    def _go_on(self, route: ModelRoute, host: Host, seen: Seen, call: Call, made: Completion, done: int) -> Completion:
        """The completion with everything after its first `done` tokens sampled anew, unless it has ended by then."""
        if len(made.ids) <= done:
            return made
        begun = cut_off(made, done, host.codec, call)
        room = host.context_length - len(call.prompts[made.prompt])
        limit = min(call.sampling.max_tokens, room) - done
        if made.scripted and done:
            self._remember(call, made, done)
        digest = hash_after(call.hashes[made.prompt], begun.ids).hexdigest()
        seed = f"{self._chance(digest, call)}/{made.index}"
        rest = self._sample(route, host, seen, call, made.prompt, begun.ids, limit, seed)
        if not done:
            return rest
        if Fault.ABORTED in made.faults:
            rest = self._abort(call, rest, self._tokens_until_abort(seed))
        return joined(begun, rest, host.codec, call)

    def _tokens_until_abort(self, seed: str) -> int:
        self._asked[f"{seed}/abort"] += 1  # a prompt that was aborted before its first token must not be so again
        return tokens_until_abort(Random(f"{seed}/abort {self._asked[f'{seed}/abort']}"))

    def _abort(self, call: Call, made: Completion, count: int) -> Completion:
        if count >= len(made.ids):
            return made
        if made.scripted and count:
            self._remember(call, made, count)
        return cut_off(made, count, self.host.codec, call)

    def _remember(self, call: Call, made: Completion, count: int) -> None:
        """Keep the rest of an answer from a script for the request that goes on with it."""
        if len(self._rests) >= _KEPT_RESTS:
            self._rests.pop(next(iter(self._rests)))
        key = hash_after(call.hashes[made.prompt], made.ids[:count]).hexdigest()
        self._rests[key] = Reply(made.ids[count:], made.finish_reason, as_is=True)

    def _chance(self, digest: str, call: Call) -> str:
        """The seed of the random numbers for a prompt with this digest."""
        if call.sampling.seed is not None:
            return f"{self.seed}/{digest}/{call.sampling.seed}"
        if not self.vary:
            return f"{self.seed}/{digest}"
        self._asked[digest] += 1
        return f"{self.seed}/{digest}/time {self._asked[digest]}"

    def _latency(self, seen: Seen) -> float:
        low, high = self.latency
        return low if low == high else Random(f"{self.seed}/latency/{seen.number}").uniform(low, high)
