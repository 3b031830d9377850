"""The HTTP server of Tinker's wire, as the SDK 0.38 and 0.25 speak it. Source: the SDK's resources and message classes.

Most requests are answered with a promise at once; `retrieve_future` then waits for its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from lachesis_tokens.wire.visitors import Visitors
from lachesis_train.engine.answers import Body, errors, failed_result, failure, read_json
from lachesis_train.engine.checkpoints import SAMPLER_WEIGHTS, WEIGHTS, Checkpoints
from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.model import FULL, LoraSpec, Model
from lachesis_train.engine.ordering import Ordering
from lachesis_train.engine.promises import Promises, Result
from lachesis_train.engine.samplers import EPHEMERAL, FULL_EPHEMERAL, KEPT_EPHEMERAL, Samplers
from lachesis_train.engine.training import TrainingModel, create_training_model, forward_backward, optim_step
from lachesis_train.engine.versions import Versions
from lachesis_train.engine.wire import data_of, encode_forward_backward, loss_config_of, parse_forward_backward
from lachesis_train.engine.worker import MAX_WAITING, EngineWorker

POLL_SECONDS: Final = 30.0
"""How long `retrieve_future` waits; the SDK gives up after 45 s."""
SILENT_SECONDS: Final = 600.0
"""Without a heartbeat for so long, a session is over when memory is needed for a new training model."""
BODY_BYTES: Final = 256 << 20
PROTOBUF: Final = "application/x-protobuf"


@dataclass
class _Training:
    """A training model, or one that is being made (None), with the order of its requests."""

    session: str
    ordering: Ordering
    model: TrainingModel | None = None


class TrainingEngine:
    """One base model, with training models and sampling sessions of any number of clients."""

    def __init__(
        self,
        model: Model,
        state_dir: Path,
        *,
        names: tuple[str, ...] = (),
        lora_layers: int | None = None,
        full_finetuning: bool = False,
    ):
        self.model = model
        self.name = str(model.folder)
        self.lora_layers = lora_layers
        self.full_finetuning = full_finetuning
        """Whether new training models train all parameters, whatever adapter their client asks for."""
        self.checkpoints = Checkpoints(state_dir, model.folder.name)
        self.worker = EngineWorker(model, Versions(model, self.checkpoints))
        self.promises = Promises()
        kept = FULL_EPHEMERAL if full_finetuning else KEPT_EPHEMERAL
        self.samplers = Samplers(self.worker, self.checkpoints, self.promises, (self.name, *names), kept)
        self.sessions: dict[str, float] = {}
        """Sessions of clients, with the time at which each was heard of."""
        self.training: dict[str, _Training] = {}

    def app(self, visitors: Visitors) -> web.Application:
        """The application; it starts the worker and ends it."""
        guard = visitors.middleware(lambda reason: failure(403, reason))
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[guard, errors])
        for path, handler in {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": _accepted,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "unload_model": self._unload_model,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampling_session,
            "asample": self.samplers.sample,
            "cancel_future": self.samplers.cancel,
            "retrieve_future": self._retrieve,
        }.items():
            app.router.add_post(f"/api/v1/{path}", handler)
        app.router.add_post("/api/v1/sessions/{session}/finish", self._finish_session)
        app.router.add_delete("/api/v1/training_runs/{model}/checkpoints/{kind}/{name}", self._delete_checkpoint)
        app.router.add_get("/api/v1/healthz", self._health)
        app.router.add_get("/api/v1/get_server_capabilities", self._capabilities)
        app.router.add_get("/api/v1/samplers/{sampler}", self.samplers.get)
        app.cleanup_ctx.append(self._work)
        return app

    async def _work(self, app: web.Application) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        self.worker.start()
        yield
        await asyncio.to_thread(self.worker.close)
        for session in list(self.sessions):
            self._end_session(session)

    # Sessions

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"status": "ok", "model": self.name, "waiting": self.worker.waiting, "running": self.worker.running}
        )

    async def _client_config(self, request: web.Request) -> web.Response:
        # The SDK then sends the parts of a large batch one after another.
        return web.json_response({"parallel_fwdbwd_chunks": False, "sample_max_concurrent_requests": MAX_WAITING // 2})

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        return web.json_response({"sample_cancel_enabled": True})

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {"model_name": self.name, "max_context_length": self.model.context_length}
        return web.json_response({"supported_models": [{**model, "trainable": True, "sampleable": True}]})

    async def _create_session(self, request: web.Request) -> web.Response:
        session = uuid.uuid4().hex[:12]
        self.sessions[session] = time.monotonic()
        return web.json_response({"type": "create_session", "session_id": session})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self.sessions[self._session(await read_json(request))] = time.monotonic()
        return web.json_response({"type": "session_heartbeat"})

    async def _finish_session(self, request: web.Request) -> web.Response:
        self._end_session(request.match_info["session"])
        return web.json_response({})

    def _end_session(self, name: str) -> None:
        self.sessions.pop(name, None)
        for model_id in [key for key, training in self.training.items() if training.session == name]:
            self._drop(model_id)
        self.samplers.end_session(name)

    def _drop(self, model_id: str) -> None:
        training = self.training.pop(model_id)
        if training.model is not None:
            adapter = training.model.adapter
            self.worker.run(lambda: self.model.remove_adapter(adapter))

    def _session(self, body: Body) -> str:
        name: str = body["session_id"]
        if name not in self.sessions:
            raise RequestError(f"session {name!r} is unknown: the engine was started again; create a new client")
        return name

    def _new_model(self, body: Body) -> tuple[str, str]:
        """The session and the id of a new training model. The SDK expects ids of this form where it does not wait for
        the answer."""
        session = self._session(body)
        return session, f"{session}:train:{body['model_seq_id']}"

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        path = self.samplers.path_of(body)
        sampler = self.samplers.add(self._session(body), body["sampling_session_seq_id"], path)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

    # Training models

    async def _create_model(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        session, model_id = self._new_model(body)
        lora = body.get("lora_config") or {}

        def create() -> TrainingModel:
            if (optimizer := (body.get("optimizer_config") or {}).get("type", "adamw")) != "adamw":
                raise RequestError(f"optimizer {optimizer!r} is not one that the embedded engine has; use adamw")
            self.samplers.check_base_model(body["base_model"])
            adapter = LoraSpec(
                rank=int(lora.get("rank", 32)),
                train_attn=bool(lora.get("train_attn", True)),
                train_mlp=bool(lora.get("train_mlp", True)),
                train_unembed=bool(lora.get("train_unembed", True)),
                layers=self.lora_layers,
            )
            spec = FULL if self.full_finetuning else adapter
            return create_training_model(self.model, model_id, spec, session, lora.get("seed"))

        return self._make(session, model_id, create, {"type": "create_model", "model_id": model_id})

    def _make(self, session: str, model_id: str, create: Callable[[], TrainingModel], answer: Result) -> web.Response:
        """A promise of a new training model."""
        for name, heard in list(self.sessions.items()):
            if time.monotonic() - heard > SILENT_SECONDS and name != session:
                self._end_session(name)
        training = self.training.setdefault(model_id, _Training(session, Ordering()))

        def job() -> Result:
            training.model = create()
            if self.training.get(model_id) is not training:  # the session ended in between
                self.model.remove_adapter(training.model.adapter)
                raise RequestError(f"the session of {model_id} ended before it was made")
            return answer

        return self._promise(f"{model_id}:create", job, model_id=model_id)

    async def _unload_model(self, request: web.Request) -> web.Response:
        model_id = (await read_json(request))["model_id"]
        if model_id in self.training:
            self._drop(model_id)
        return self._promise(f"{model_id}:unload", lambda: {"type": "unload_model", "model_id": model_id})

    def _trained(self, model_id: str) -> TrainingModel:
        training = self.training.get(model_id)
        if training is None or training.model is None:
            raise RequestError(
                f"training model {model_id!r} is unknown: its session ended, or the engine was started again; "
                "create a training client from a saved state"
            )
        return training.model

    async def _get_info(self, request: web.Request) -> web.Response:
        model_id = (await read_json(request))["model_id"]
        spec = self._trained(model_id).spec
        data = {"arch": type(self.model.network).__name__, "model_name": self.name, "tokenizer_id": self.name}
        return web.json_response(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": model_id,
                "is_lora": not spec.full,
                "lora_rank": spec.rank,
                "model_name": self.name,
            }
        )

    async def _weights_info(self, request: web.Request) -> web.Response:
        spec = self.checkpoints.find((await read_json(request))["tinker_path"]).spec
        return web.json_response(
            {
                "base_model": self.name,
                "is_lora": not spec.full,
                "lora_rank": spec.rank,
                "train_unembed": spec.train_unembed,
                "train_mlp": spec.train_mlp,
                "train_attn": spec.train_attn,
            }
        )

    async def _forward_backward(self, request: web.Request) -> web.Response:
        if request.content_type != PROTOBUF:
            raise RequestError(f"forward_backward takes {PROTOBUF}; use the tinker SDK 0.25 or newer")
        message = parse_forward_backward(await request.read())

        def run(trained: TrainingModel) -> Result:
            result = forward_backward(
                self.model,
                trained,
                data_of(message),
                message.loss_fn,
                loss_config_of(message),
                forward_only=message.forward_only,
            )
            return encode_forward_backward(result)

        return self._training_job(message.model_id, message.seq_id or None, run)

    async def _optim_step(self, request: web.Request) -> web.Response:
        body = await read_json(request)

        def run(trained: TrainingModel) -> Result:
            if "optimizer_params" in body:
                raise RequestError("the embedded engine has Adam only: give AdamParams to optim_step")
            return {"metrics": optim_step(self.model, trained, body.get("adam_params") or {})}

        return self._training_job(body["model_id"], body.get("seq_id"), run)

    async def _save_weights(self, request: web.Request) -> web.Response:
        body = await read_json(request)

        def run(trained: TrainingModel) -> Result:
            name = body.get("path") or f"step-{trained.steps}"
            path = self.checkpoints.save(self.model, trained, WEIGHTS, name, overwrite=bool(body.get("overwrite")))
            return {"type": "save_weights", "path": path}

        return self._training_job(body["model_id"], body.get("seq_id"), run)

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        path, optimizer = body["path"], bool(body.get("optimizer"))
        if body.get("model_id") is not None:

            def run(trained: TrainingModel) -> Result:
                self.checkpoints.load(self.model, trained, self.checkpoints.find(path), optimizer=optimizer)
                return {"type": "load_weights", "path": path, "model_id": trained.id}

            return self._training_job(body["model_id"], body.get("seq_id"), run)
        session, model_id = self._new_model(body)

        def create() -> TrainingModel:
            self.samplers.check_base_model(body.get("base_model"))
            found = self.checkpoints.find(path)
            return self.checkpoints.create(self.model, found, model_id, session, optimizer=optimizer)

        return self._make(session, model_id, create, {"type": "load_weights", "path": path, "model_id": model_id})

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        path = "tinker://{model}/{kind}/{name}".format_map(request.match_info)
        await asyncio.wrap_future(self.worker.run(lambda: self.checkpoints.find(path).file.unlink()))
        return web.json_response({})

    async def _save_for_sampler(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        model_id, number = body["model_id"], body.get("sampling_session_seq_id")

        def run(trained: TrainingModel) -> Result:
            if body.get("kind", "snapshot") != "snapshot":
                raise RequestError(f"kind {body['kind']!r}: the embedded engine has snapshots only")
            name = body.get("path") or (f"step-{trained.steps}" if number is None else f"{EPHEMERAL}{number}")
            path = self.checkpoints.save(self.model, trained, SAMPLER_WEIGHTS, name)
            if number is None:
                return {"type": "save_weights_for_sampler", "path": path}
            sampler = self.samplers.add(trained.session, number, path)
            return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler}

        return self._training_job(model_id, body.get("seq_id"), run)

    def _training_job(self, model_id: str, seq_id: int | None, run: Callable[[TrainingModel], Result]) -> web.Response:
        """A promise of a job that has its place in the order of its model."""
        training = self.training.get(model_id)
        name = f"{model_id}:{uuid.uuid4().hex if seq_id is None else seq_id}"
        job = lambda: run(self._trained(model_id))  # noqa: E731
        return self._promise(name, job, model_id=model_id, order=training.ordering if training else None, seq_id=seq_id)

    # Promises

    def _promise(
        self,
        name: str,
        job: Callable[[], Result],
        *,
        model_id: str | None = None,
        order: Ordering | None = None,
        seq_id: int | None = None,
    ) -> web.Response:
        """Answer with a promise of what `job` returns on the thread of the model. A name that was sent before is
        answered with the promise that it has: the SDK sends again when an answer is lost."""
        answer = web.json_response({"request_id": name, **({"model_id": model_id} if model_id else {})})
        if self.promises.get(name) is not None:
            return answer
        promise = self.promises.create(name)

        def start() -> None:
            future = self.worker.run(job)
            future.add_done_callback(lambda _: self.loop.call_soon_threadsafe(finish))

            def finish() -> None:
                error = future.exception()
                self.promises.fulfil(promise, future.result() if error is None else failed_result(error))

        try:
            if order is None:
                start()
            else:
                order.submit(seq_id, start)
        except RequestError as error:
            self.promises.fulfil(promise, failed_result(error))
        return answer

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = (await read_json(request))["request_id"]
        promise = self.promises.get(name)
        if promise is None:
            return failure(410, f"request {name!r} is unknown, or its result was dropped")
        result = await self.promises.fetch(promise, POLL_SECONDS)
        if result is None:
            return web.json_response({"type": "try_again", "request_id": name, "queue_state": "active"}, status=408)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=PROTOBUF)
        return web.json_response(result)


async def _accepted(request: web.Request) -> web.Response:
    return web.json_response({"status": "accepted"})


@contextlib.asynccontextmanager
async def serve(engine: TrainingEngine, host: str, port: int) -> AsyncIterator[str]:
    """Serve until the context ends; yields the base URL."""
    app = engine.app(Visitors("the engine", host))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)  # not as long as a poll
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()
