"""The pool: workers and runs connect to it, and it passes their messages on."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from backends.errors import BackendError, BackendUnavailable, SandboxLost
from backends.tasks import seen

from .engines.engine import StartLedger, WorkerEngine
from .slots import Scale, SlotPool, Wish
from .stream import UPGRADE, PoolStream
from .wire import CONTROL, DEFAULT, error_header, is_read, message, opened

_LOG = logging.getLogger(__name__)
_LOOK = 1.0
"""Seconds between looks at the engine and at idle workers."""
_PAUSES = (1.0, 60.0)
"""Seconds without a start after one that failed: at first, at most."""
_DRAIN = 60.0
"""Seconds that workers have to end at the end of a pool."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Workers of one kind: how many, and what starts them. Without an engine, they are started by hand."""

    scale: Scale
    engine: WorkerEngine | None = None
    backend: str = ""
    """Of its workers."""


@dataclass(slots=True)
class _Pause:
    """Between starts of a profile."""

    until: float = 0.0
    seconds: float = _PAUSES[0]


class Pool:
    """Serves workers at /worker, runs at /run, and what it does at /status, /metrics and /stop.

    Args:
        token: what everybody who connects has to know.
        profiles: by name; "" is that of rollouts that ask for none.
        most: workers of all profiles together.
        start_timeout: seconds from the start of a worker until it is ready.
    """

    def __init__(
        self,
        token: str,
        profiles: Mapping[str, Profile],
        *,
        most: float = math.inf,
        start_timeout: float = 600.0,
        ledger: StartLedger,
    ) -> None:
        self.slots = SlotPool({name: profile.scale for name, profile in profiles.items()}, most)
        self._backends = {name: profile.backend for name, profile in profiles.items()}
        self.engines = {name: profile.engine for name, profile in profiles.items() if profile.engine is not None}
        self.ledger = ledger
        self._token, self._start_timeout = token, start_timeout
        self._workers: dict[str, PoolStream] = {}
        self._backend_of: dict[str, str] = {}
        self._runs: dict[bytes, PoolStream] = {}
        """By lease."""
        self._of_runs: set[PoolStream] = set()
        self._asked: dict[bytes, bytes] = {}
        """The messages of those that wait, which their workers get."""
        self._facts: dict[bytes, dict[str, Any]] = {}
        """Of each lease that waits or runs: whose it is, and the name of its sandbox."""
        self._changed = asyncio.Event()
        self.stopped = asyncio.Event()
        self._empty = asyncio.Event()
        """There are no workers."""
        self._empty.set()
        self._counts = {"leases": 0, "lost": 0, "refused": 0, "started": 0}
        self._begun = time.time()
        self._number = 0
        self._ended: set[str] = set()
        """Workers that were given up: they are ended, and do not come back."""
        self._placed: dict[str, str] = {}
        """The profile of each worker that was started."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = {name: _Pause() for name in profiles}
        self._mark = f"{ledger.pool}-{secrets.token_hex(4)}"

    def application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [
                web.get("/worker", self._worker),
                web.get("/run", self._run),
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
                web.get("/leases", self._leases),
                web.post("/end", self._end_leases),
                web.post("/stop", self._stop),
            ]
        )
        return application

    async def keep(self) -> None:
        """Keep the number of workers right until `stopped`, then end all.

        Raises:
            TooManyFailures: too large a share of workers did not start.
        """
        await self.ledger.reap(self.engines.values())
        try:
            while not self.stopped.is_set():
                self._give()
                for profile, engine in self.engines.items():
                    await self._scale(profile, engine)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _LOOK)
                self._changed.clear()
        finally:
            await self._end()

    async def _scale(self, profile: str, engine: WorkerEngine) -> None:
        now = time.monotonic()
        pause = self._starts[profile]
        count = self.slots.missing(profile, now) if now >= pause.until else 0
        if count:
            self._number += 1
            base = f"{self._mark}-{self._number}"
            names = [f"{base}.{at}" for at in range(1, count + 1)]
            for name in names:
                self.slots.begins(name, now, profile)
                self._placed[name] = profile
            self._counts["started"] += count
            self.ledger.write(base, engine.name, "")
            try:
                self.ledger.write(base, engine.name, await engine.start(base, count))
            except BackendError as error:
                self._give_up(names)  # some may have been started
                for name in names:
                    self._failed(name, str(error))
        await self._look(profile, engine, now)
        for name in self.slots.idle(now):
            self._drain(name)

    async def _look(self, profile: str, engine: WorkerEngine, now: float) -> None:
        """Find starts that have failed."""
        mine = {name: start for name, start in self.slots.starting.items() if start.profile == profile}
        late = [name for name, start in mine.items() if now - start.began > self._start_timeout]
        try:
            ended = await engine.ended([*mine])
        except BackendError as error:  # of an engine that does not answer now
            _LOG.warning("engine %s: %s", engine.name, error)
            ended = {}
        for name, reason in ended.items():
            self._failed(name, reason)
        for name in late:
            if name in self.slots.starting:  # still
                self._give_up([name])
                self._failed(name, f"not ready within {self._start_timeout:g} s")

    def _failed(self, name: str, reason: str) -> None:
        """A start failed: the next one waits."""
        if name in self.slots.starting:
            now = time.monotonic()
            self._placed.pop(name, None)
            pause = self._starts[self.slots.starting[name].profile]
            if now >= pause.until:  # the first of those that were started together
                pause.until, pause.seconds = now + pause.seconds, min(_PAUSES[1], 2 * pause.seconds)
            self.slots.failed(name, reason)

    def _give_up(self, names: Collection[str]) -> None:
        """End workers that were started, and let them not join any more."""
        mine: dict[str, list[str]] = {}
        for name in names:
            if name in self._placed:
                self._ended.add(name)
                mine.setdefault(self._placed.pop(name), []).append(name)
        for profile, found in mine.items():
            ending = asyncio.create_task(self.engines[profile].stop(found))
            self._tasks.add(ending)
            ending.add_done_callback(self._tasks.discard)
            ending.add_done_callback(seen)

    def _drain(self, name: str) -> None:
        self.slots.drain(name)
        if name in self._workers:
            self._workers[name].post(message(CONTROL, {"do": "drain"}))

    def _give(self) -> None:
        for wish, slot in self.slots.assign(time.monotonic()):
            self._workers[slot.worker].post(self._asked.pop(wish.lease))

    async def _end(self) -> None:
        self.stopped.set()
        for name, peer in self._workers.items():
            self.slots.drain(name)
            peer.post(message(CONTROL, {"do": "drain", "now": True}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN):
                await self._empty.wait()
        ends = error_header(SandboxLost("the pool ends"))
        for lease in [*self._runs]:
            self._lost(lease, ends)
        for peer in {*self._of_runs, *self._workers.values()}:
            peer.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.ledger.reap(self.engines.values())
        for engine in self.engines.values():
            try:
                await engine.close()
            except BackendError as error:
                _LOG.warning("engine %s: %s", engine.name, error)

    def _settle(self) -> None:
        if self._workers:
            self._empty.clear()
        else:
            self._empty.set()

    # connections

    def _require(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode()):
            raise web.HTTPUnauthorized(text="the key is wrong: set LACHESIS_POOL_TOKEN to that of the pool")

    def _require_upgrade(self, request: web.Request) -> None:
        self._require(request)
        if request.headers.get("Upgrade") != UPGRADE:
            raise web.HTTPUpgradeRequired(text=f"this address speaks {UPGRADE}: a proxy has to pass upgrades on")

    async def _worker(self, request: web.Request) -> web.StreamResponse:
        self._require_upgrade(request)
        name, slots = request.query["name"], int(request.query["slots"])
        if name in self._ended or self.stopped.is_set():
            raise web.HTTPGone(text="the pool has given it up")
        profile = "" if (given := request.query.get("profile", "")) == DEFAULT else given
        peer = PoolStream(self._from_worker, name)
        peer.accept(request)
        if name in self._workers:  # it has another connection now, and has ended its sandboxes
            self._gone(name, self._workers[name])
        self._workers[name], self._backend_of[name] = peer, request.query.get("backend", "")
        self._settle()
        self.slots.joined(name, slots, time.monotonic(), profile)
        if profile in self._starts:
            self._starts[profile].seconds = _PAUSES[0]
        _LOG.info("worker %s has joined with %d slots", name, slots)
        self._changed.set()
        try:
            await asyncio.shield(peer.ended)
        finally:
            if self._workers.get(name) is peer:
                self._gone(name, peer)
                self._give_up([name])  # another one takes its place
        return web.Response()

    def _gone(self, name: str, peer: PoolStream) -> None:
        """A worker is gone: what it had is lost, and is never continued elsewhere."""
        del self._workers[name], self._backend_of[name]
        self._settle()
        lost = self.slots.left(name)
        self._counts["lost"] += len(lost)
        reason = error_header(SandboxLost(f"its worker {name} is gone"))
        for lease in lost:
            self._asked.pop(lease, None)
            self._lost(lease, reason)
        self._changed.set()
        peer.abort()
        _LOG.info("worker %s is gone, with %d leases", name, len(lost))

    async def _run(self, request: web.Request) -> web.StreamResponse:
        self._require_upgrade(request)
        peer = PoolStream(self._from_run, request.query.get("run", ""))
        peer.accept(request)
        self._of_runs.add(peer)
        try:
            await asyncio.shield(peer.ended)
        finally:
            self._of_runs.discard(peer)
            for lease in [lease for lease, run in self._runs.items() if run is peer]:
                del self._runs[lease]
                self._release(lease, message(lease, {"do": "release"}))
        return web.Response()

    def _from_run(self, peer: PoolStream, data: bytes) -> None:
        lease = data[: len(CONTROL)]
        slot = self.slots.leases.get(lease)
        if slot is not None and self._runs.get(lease) is peer and not is_read(data):
            self._workers[slot.worker].post(data)
            return
        header, _ = opened(data)
        if header.get("do") == "acquire" and self.stopped.is_set():
            peer.post(message(lease, {"lost": error_header(SandboxLost("the pool ends"))}))
        elif header.get("do") == "acquire":
            if not all(isinstance(header[name], str) for name in ("kind", "profile")):
                raise TypeError("kind and profile of a lease are texts")
            beside = bytes.fromhex(header["beside"]) if header.get("beside") else b""
            worker = self.slots.leases[beside].worker if beside in self.slots.leases else ""
            profile = self.slots.workers[worker].profile if worker else header["profile"]
            lifetime = float(header["spec"]["lifetime"])
            refused = self._refusal(profile, lifetime) if not beside or worker else SandboxLost("its parent is gone")
            if refused is not None:
                peer.post(message(lease, {"lost": error_header(refused)}))
                return
            wish = Wish(lease, peer.name, header["kind"], time.monotonic(), worker, profile, lifetime)
            if self.slots.ask(wish):
                self._asked[lease], self._runs[lease] = data, peer
                self._facts[lease] = {**header["labels"], "lease": lease.hex(), "sandbox": ""}
                self._counts["leases"] += 1
                self._give()
                self._changed.set()
        elif header.get("do") == "release" and self._runs.get(lease) is peer:
            self._release(lease, data)
        elif slot is None and "id" in header:
            peer.post(message(lease, {"lost": error_header(SandboxLost("the pool does not know its lease"))}))

    def _refusal(self, profile: str, lifetime: float) -> BackendUnavailable | None:
        """Why no rollout of a profile can be served, ever."""
        scale = self.slots.scales.get(profile)
        if scale is not None and lifetime > scale.longest:
            return BackendUnavailable(
                f"the pool's workers live {scale.lifetime:g} s, of which a rollout can have {scale.longest:g} s, and a "
                f"sandbox may be needed for {lifetime:g} s (to set up, for the agent, and for its reward). Next step: "
                "let workers live longer, or lower rollout_timeout and reward_timeout"
            )
        known = {*self.slots.scales, *(worker.profile for worker in self.slots.workers.values())}
        if profile in known:
            return None
        return BackendUnavailable(
            f"the pool has no profile {profile!r}, but {', '.join(repr(each) for each in sorted(known))}"
        )

    def _lost(self, lease: bytes, reason: dict[str, Any]) -> None:
        """Tell the run of a lease."""
        self._facts.pop(lease, None)
        run = self._runs.pop(lease, None)
        if run is not None:
            run.post(message(lease, {"lost": reason}))

    def _release(self, lease: bytes, data: bytes) -> None:
        if self.slots.forget(lease):
            self._asked.pop(lease, None)
            self._facts.pop(lease, None)
            run = self._runs.pop(lease, None)
            if run is not None:
                run.post(message(lease, {"do": "released"}))
        elif (worker := self.slots.releasing(lease)) is not None:
            self._workers[worker].post(data)

    def _from_worker(self, peer: PoolStream, data: bytes) -> None:
        lease = data[: len(CONTROL)]
        slot = self.slots.leases.get(lease)
        if lease != CONTROL and (slot is None or slot.worker != peer.name):
            return  # of a lease that is over
        run = self._runs.get(lease)
        if is_read(data):
            header, _ = opened(data)
            said = header["do"]
            if said == "acquired":
                self.slots.ready(lease)
                self._facts[lease]["sandbox"] = str(header["sandbox"])
                if run is None:  # it is gone meanwhile
                    self._release(lease, message(lease, {"do": "release"}))
            elif said in ("refused", "released"):
                self._counts["refused"] += said == "refused"
                self.slots.released(lease, time.monotonic(), error=bool(header.get("error_left")))
                self._runs.pop(lease, None)
                self._facts.pop(lease, None)
                self._changed.set()
                self._give()
            elif said == "draining":
                self.slots.drain(peer.name)
                peer.post(message(CONTROL, {"do": "drained"}))  # it gets no more after this
                return
        if run is not None:
            run.post(data)

    # what is seen from outside

    async def _status(self, request: web.Request) -> web.Response:
        self._require(request)
        return web.json_response(self.described())

    def described(self) -> dict[str, Any]:
        slots = self.slots
        workers = [
            {
                "name": worker.name,
                "profile": worker.profile,
                "backend": self._backend_of.get(worker.name, ""),
                "slots": len(worker.slots),
                "busy": worker.busy,
                "draining": worker.draining,
                "states": [slot.state.value for slot in worker.slots],
            }
            for worker in slots.workers.values()
        ]
        return {
            "pool": self.ledger.pool,
            "engine": next((engine.name for engine in self.engines.values()), ""),
            "begun": self._begun,
            "profiles": {
                name: {"backend": self._backends[name], **asdict(scale), "lifetime": min(scale.lifetime, 1e12)}
                for name, scale in slots.scales.items()
            },
            "workers": workers,
            "starting": len(slots.starting),
            "waiting": slots.waiting,
            "slots": slots.states(),
            **self._counts,
        }

    async def _leases(self, request: web.Request) -> web.Response:
        self._require(request)
        return web.json_response([*self._facts.values()])

    async def _end_leases(self, request: web.Request) -> web.Response:
        """End leases of others, whose runs find them lost."""
        self._require(request)
        for each in await request.json():
            lease = bytes.fromhex(each)
            run = self._runs.get(lease)
            self._release(lease, message(lease, {"do": "release"}))
            if run is not None:
                self._runs.pop(lease, None)
                run.post(message(lease, {"lost": error_header(SandboxLost("somebody has reaped it"))}))
        return web.json_response({})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._require(request)
        lines = ["# TYPE lachesis_pool_slots gauge"]
        lines += [f'lachesis_pool_slots{{state="{state}"}} {count}' for state, count in self.slots.states().items()]
        gauges = {
            "workers": len(self.slots.workers),
            "workers_starting": len(self.slots.starting),
            "leases_waiting": self.slots.waiting,
        }
        for name, count in gauges.items():
            lines += [f"# TYPE lachesis_pool_{name} gauge", f"lachesis_pool_{name} {count}"]
        for name, count in self._counts.items():
            lines += [f"# TYPE lachesis_pool_{name}_total counter", f"lachesis_pool_{name}_total {count}"]
        return web.Response(text="\n".join(lines) + "\n")

    def stop(self) -> None:
        """End the pool and its workers."""
        self.stopped.set()
        self._changed.set()

    async def _stop(self, request: web.Request) -> web.Response:
        self._require(request)
        self.stop()
        return web.json_response({"stopping": True})
