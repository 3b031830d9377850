"""The rollout API: the wire of Atropos' `run-api` 0.4.0 over a `Store`, and its extension (docs/rollout-api.md)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final, Self

from aiohttp import web

from backends.errors import cannot_listen
from lachesis_tokens.wire.visitors import Visitors
from lachesis_train.api.dispatcher import Dispatcher
from lachesis_train.api.group_body import FIELDS, GroupBody, read_group, read_groups
from lachesis_train.api.page import ApiFigures, metrics, page
from lachesis_train.api.requests import (
    RequestRefused,
    TooLarge,
    authorise,
    batch_number,
    encoding,
    json_answer,
    parts,
    read_small,
    unpacked,
)
from lachesis_train.api.settings import ApiSettings
from lachesis_train.api.state import ApiState, Group, RegisteredEnv
from lachesis_train.api.store import Store, StoreError
from lachesis_train.api.wire import Acknowledgement, EnvIdentifier, EnvRequest, TrainerRequest, env_status, parse
from lachesis_train.group_encoding import GroupError
from lachesis_train.rollout_api import EXTENSION, INSTANCE_HEADER, TOKEN_VARIABLE, TrainerRegistration

_READERS: Final = 2
"""Bodies that are unpacked, checked and written at the same time."""
_NO_GROUP: Final[dict[str, list[Any]]] = {
    name: [] for name in FIELDS[:11] if name not in ("overrides", "group_overrides")
}
"""The stock API's answer to `/latest_example` before the first group."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RolloutApiServer:
    """Serves inside `async with`.

    Raises on entry:
        StoreError: the database cannot be used.
        OSError: the address cannot be used.
    """

    def __init__(self, settings: ApiSettings, *, report: Callable[[str], None] = lambda line: None) -> None:
        self.settings = settings
        self.store = Store(settings.db)
        self.counts: Counter[str] = Counter()
        """What happened since the start, by the name of its metric."""
        self.url = ""
        self._report = report
        self._visitors = Visitors(
            "the rollout API",
            settings.host,
            has_token=bool(settings.token),
            others=f"set {TOKEN_VARIABLE} for it and for them, or start it with --insecure",
            open_to_users=settings.insecure,
        )
        self._version = importlib.metadata.version("lachesis-train")
        self._dispatcher = Dispatcher(self.store, settings, self.counts)
        self._readers = asyncio.Semaphore(_READERS)
        self._reading = 0
        self._full = False
        self._runner: web.AppRunner | None = None

    @property
    def state(self) -> ApiState:
        return self.store.state

    @property
    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._root),
            web.get("/metrics", self._metrics),
            web.post("/register", self._register),
            web.post("/register-env", self._register_env),
            web.post("/disconnect-env", self._disconnect_env),
            web.get("/wandb_info", self._wandb_info),
            web.get("/info", self._info),
            web.get("/batch", self._batch),
            web.post("/ack", self._acknowledge),
            web.get("/latest_example", self._latest_example),
            web.post("/scored_data", self._scored_data),
            web.post("/scored_data_list", self._scored_data_list),
            web.get("/status", self._status),
            web.get("/status-env", self._status_env),
            web.get("/reset_data", self._reset_data),
        ]

    async def __aenter__(self) -> Self:
        await self.store.open()
        self._dispatcher.restarted()
        app = web.Application(middlewares=[self._guard])
        app.add_routes(self.routes)
        # Bodies are unpacked in threads.
        self._runner = web.AppRunner(app, access_log=None, auto_decompress=False, shutdown_timeout=5.0)
        try:
            await self._runner.setup()
            site = web.TCPSite(self._runner, self.settings.host, self.settings.port, backlog=1024)
            await site.start()
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, OSError):
                raise cannot_listen(self.settings.host, self.settings.port, error) from error
            raise
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self.store.close()

    # Every request.

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            authorise(request, self._visitors, self.settings.token)
            return await handler(request)
        except GroupError as error:
            self.counts["refused"] += 1
            return json_answer({"detail": str(error)}, status=422)
        except StoreError as error:
            self._report(str(error))
            return json_answer({"detail": str(error)}, status=503, headers={"Retry-After": "5"})
        except RequestRefused as error:
            return json_answer({"detail": str(error)}, status=error.status, headers=error.headers)

    # The run.

    async def _root(self, request: web.Request) -> web.StreamResponse:
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(text=page(self._figures()), content_type="text/html")
        return json_answer({"message": EXTENSION, "version": self._version, "instance": self.state.instance})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=metrics(self._figures()), content_type="text/plain", charset="utf-8")

    def _figures(self) -> ApiFigures:
        now = time.monotonic()
        return ApiFigures(
            version=self._version,
            state=self.state,
            counts=self.counts,
            most_stored=self.settings.most_stored,
            reading=self._reading,
            trainers={name: now - heard for name, heard in self._dispatcher.trainers.items()},
            environments={env_id: now - heard for env_id, heard in self._dispatcher.environments.items()},
        )

    async def _register(self, request: web.Request) -> web.StreamResponse:
        asked = parse(TrainerRequest, await read_small(request, self.settings))
        trainer, state = TrainerRegistration(**asked.model_dump()), self.state
        await self._dispatcher.register(trainer)
        answer: dict[str, Any] = {"uuid": uuid.uuid4().int}
        if trainer.acknowledges:
            answer |= {"instance": state.instance, "acknowledged": state.acknowledged, "last_batch": state.last_batch}
        return json_answer(answer)

    async def _wandb_info(self, request: web.Request) -> web.StreamResponse:
        trainer = self.state.trainer
        return json_answer({"group": trainer and trainer.wandb_group, "project": trainer and trainer.wandb_project})

    async def _info(self, request: web.Request) -> web.StreamResponse:
        trainer = self.state.trainer
        if trainer is None:
            return json_answer({"batch_size": -1, "max_token_len": -1})
        return json_answer({"batch_size": trainer.batch_size, "max_token_len": trainer.max_token_len})

    async def _status(self, request: web.Request) -> web.StreamResponse:
        state = self.state
        return json_answer(
            {
                "current_step": state.step if state.trainer else 0,
                "queue_size": len(state.waiting),
                "sequences": state.waiting_sequences,
                "unacknowledged": len(state.batches),
                "environments": {
                    "registered": len(state.environments),
                    "connected": sum(env.connected for env in state.environments),
                },
            }
        )

    async def _reset_data(self, request: web.Request) -> web.StreamResponse:
        async with self._dispatcher.lock:
            state = self.state
            await self.store.reset()
            self._report(f"reset: {len(state.waiting)} groups and {len(state.batches)} batches are gone")
            self._dispatcher.restarted()
        return web.Response(text="Reset successful")

    # Environments.

    async def _register_env(self, request: web.Request) -> web.StreamResponse:
        asked = parse(EnvRequest, await read_small(request, self.settings))
        async with self._dispatcher.lock:
            state = self.state
            if state.trainer is None or not state.started:
                return json_answer({"status": "wait for trainer to start"})
            namesakes = sum(env.desired_name == asked.desired_name for env in state.environments)
            env = RegisteredEnv(
                env_id=len(state.environments), real_name=f"{asked.desired_name}_{namesakes}", **asked.model_dump()
            )
            await self.store.put_env(env)
            self._dispatcher.environments[env.env_id] = time.monotonic()
        return json_answer(
            {
                "status": "success",
                "env_id": env.env_id,
                "wandb_name": env.real_name,
                "checkpoint_dir": state.trainer.checkpoint_dir,
                "starting_step": state.step,
                "checkpoint_interval": state.trainer.save_checkpoint_interval,
                "num_steps": state.trainer.num_steps,
            }
        )

    async def _disconnect_env(self, request: web.Request) -> web.StreamResponse:
        env_id = parse(EnvIdentifier, await read_small(request, self.settings)).env_id
        async with self._dispatcher.lock:
            if not 0 <= env_id < len(self.state.environments):
                return json_answer({"status": "failure", "error": f"no environment {env_id} is registered"})
            await self.store.put_env(replace(self.state.environments[env_id], connected=False))
        return json_answer({"status": "success"})

    async def _status_env(self, request: web.Request) -> web.StreamResponse:
        asked = parse(EnvIdentifier, await read_small(request, self.settings))
        state = self.state
        if not 0 <= asked.env_id < len(state.environments):
            raise RequestRefused(404, f"no environment {asked.env_id} is registered")
        self._dispatcher.environments[asked.env_id] = time.monotonic()
        answer = env_status(state, state.environments[asked.env_id])
        if asked.group_ids:
            answer["group_ids"] = [group.group_id for group in state.waiting_of(asked.env_id)]
        return json_answer(answer)

    # Groups.

    async def _scored_data(self, request: web.Request) -> web.StreamResponse:
        async with self._read(request) as body:
            (new,) = await self._take(request, body, lambda text: [read_group(text)])
        return json_answer({"status": "received"} if new else {"status": "received", "duplicate": True})

    async def _scored_data_list(self, request: web.Request) -> web.StreamResponse:
        async with self._read(request) as body:
            new = await self._take(request, body, read_groups)
        duplicates = len(new) - sum(new)
        answer = {"status": "received", "groups_processed": len(new)}
        return json_answer({**answer, "duplicates": duplicates} if duplicates else answer)

    @asynccontextmanager
    async def _read(self, request: web.Request) -> AsyncIterator[list[bytes]]:
        """The body as it was sent, once there is room for it."""
        settings = self.settings
        instance = request.headers.get(INSTANCE_HEADER)
        if instance is not None and instance != self.state.instance:
            raise RequestRefused(409, "this API has forgotten its groups since the environment has registered")
        await self._wait_for_room(0.0 if instance is not None else settings.hold)
        size, reserved, body = 0, request.content_length or 0, []
        self._reading += reserved
        try:
            if reserved > settings.most_body:
                raise TooLarge(settings.most_body)
            async for part in parts(request, settings.stalled):
                size += len(part)
                if size > settings.most_body:
                    raise TooLarge(settings.most_body)
                if size > reserved:  # without a Content-Length
                    self._reading, reserved = self._reading + size - reserved, size
                body.append(part)
            yield body
        finally:
            self._reading -= reserved
            self._dispatcher.room.set()

    async def _wait_for_room(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while reason := self._no_room():
            left = until - time.monotonic()
            if left <= 0:
                self.counts["full"] += 1
                raise RequestRefused(429, reason[0], retry_after=reason[1])
            self._dispatcher.room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._dispatcher.room.wait()

    def _no_room(self) -> tuple[str, float] | None:
        """Why no group is taken, and the seconds after which to try again."""
        full = self._dispatcher.is_full()
        if full and not self._full:
            self._report(
                f"full: {len(self.state.waiting)} groups wait and {len(self.state.batches)} batches are not "
                f"acknowledged, {self.state.stored >> 20} MB; environments wait for the trainer (--max-stored-mb)"
            )
        self._full = full
        if full:
            return f"{self.state.stored >> 20} MB of groups wait for the trainer", self.settings.retry_after
        if self._reading >= self.settings.most_in_memory:
            return f"{self._reading >> 20} MB are being read", 1.0
        return None

    async def _take(
        self, request: web.Request, body: list[bytes], read: Callable[[bytes], list[GroupBody]]
    ) -> list[bool]:
        """Check the groups in a body and write them down. Says of each whether it is new."""

        def groups_in_it() -> list[GroupBody]:
            return read(unpacked(encoding(request), body, self.settings.most_body))

        async with self._readers:  # an unpacked body may be a thousand times larger
            groups = await asyncio.to_thread(groups_in_it)
            new = await self.store.add(groups)
        self.counts["received"] += sum(new)
        self.counts["duplicate"] += len(new) - sum(new)
        self.counts["tokens"] += sum(group.tokens for group, is_new in zip(groups, new, strict=True) if is_new)
        return new

    async def _latest_example(self, request: web.Request) -> web.StreamResponse:
        state = self.state
        latest = state.recent[0] if state.recent else None
        if latest is None or latest.id not in state.held:
            return json_answer(_NO_GROUP)
        return await self._send(request, b"", [latest], b"")

    # Batches.

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        if (trainer := self.state.trainer) is None:
            message = "Trainer not registered. Call /register first."
            return json_answer({"status": "error", "message": message, "batch": []})
        name, after = request.query.get("trainer", ""), batch_number(request, "after")
        if trainer.acknowledges or after is not None:
            batch = await self._dispatcher.leased(trainer, name, after)
            if batch is None:
                return json_answer({"batch": None, "batch_id": None})
            return await self._send(request, b'{"batch":[', batch.groups, b'],"batch_id":%d}' % batch.id)
        async with self._dispatcher.given(trainer, name) as batch:
            if batch is None:
                return json_answer({"batch": None})
            return await self._send(request, b'{"batch":[', batch.groups, b"]}")

    async def _acknowledge(self, request: web.Request) -> web.StreamResponse:
        asked = parse(Acknowledgement, await read_small(request, self.settings))
        await self._dispatcher.acknowledge(asked.batch_id, asked.trainer)
        return json_answer({"status": "success", "acknowledged": self.state.acknowledged})

    async def _send(
        self, request: web.Request, before: bytes, groups: Sequence[Group], after: bytes
    ) -> web.StreamResponse:
        """JSON with the content of groups, a piece at a time. The length shows a client whether it has all of it."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        commas = max(0, len(groups) - 1)
        response.content_length = len(before) + sum(group.size for group in groups) + commas + len(after)
        await response.prepare(request)
        await response.write(before)
        try:
            async for piece in self.store.content(groups):
                await response.write(piece)
        except StoreError as error:  # acknowledged meanwhile, or the disk fails: no second answer after half of one
            self._report(str(error))
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(str(error)) from error
        await response.write(after)
        await response.write_eof()
        return response
