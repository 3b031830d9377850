"""An environment as an env server of prime-rl: `lachesis serve ENV --as prime`.

The wire is that of verifiers 0.4: ZeroMQ and msgpack. A request names a task and the model that answers in it. Its
trace is one delta, before the reply. What has no score is an episode with errors.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgpack
import zmq
import zmq.asyncio

from backends.errors import LachesisError, SettingsError, cannot_listen
from lachesis.settings.server_settings import ServerConfig
from lachesis_client.lifecycle import AsyncService
from lachesis_client.model_server import tracks_tokens
from lachesis_doors.serving.host import ServingHost
from lachesis_doors.serving.policies import RequestPolicy
from lachesis_doors.serving.refusals import problem_of_settings
from lachesis_doors.serving.trace import standing_of, trace_of

log = logging.getLogger(__name__)
_OF_THE_ENGINE: Final = ("logprobs", "return_token_ids", "skip_special_tokens")
"""Sampling parameters that say what is reported. The engine asks for all of it."""


class PrimeService(AsyncService):
    plays = True

    def __init__(self, host: ServingHost, address: str, port: int) -> None:
        self._host = host
        self._address = (address, port)
        self.root_url = f"tcp://{address}:{port}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._runs: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(self.root_url)
        except zmq.ZMQError as error:
            self._socket.close()
            raise cannot_listen(*self._address, OSError(error.errno, error.strerror)) from error
        self.root_url = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._keep(self._receive())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._socket.close()
        self._context.term()

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def rows(self) -> Iterable[dict[str, Any]]:
        """The tasks, for the taskset `lachesis_taskset` of verifiers."""
        for number, (task, messages) in enumerate(self._host.tasks()):
            yield {"idx": number, "prompt": messages or None, **task}

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 4:
                continue  # there is nobody to tell
            task, key = self._keep(self._answer(*frames)), (frames[0], frames[1])
            if frames[2] == b"run":  # now: a cancel may be read before the task begins
                self._runs[key] = task

    async def _answer(self, client: bytes, request: bytes, method: bytes, body: bytes) -> None:
        async def send(kind: bytes, said: Mapping[str, Any]) -> None:
            await self._socket.send_multipart([client, request, kind, msgpack.packb(said)])

        try:
            given = msgpack.unpackb(body)
            if method == b"run":
                answer = await self._run(given, partial(send, b"delta"))
            elif method == b"cancel":
                run = self._runs.get((client, str(given["request_id"]).encode()))
                if run is not None:
                    run.cancel()
                answer = {"success": True, "cancelled": run is not None}
            elif method == b"health":
                answer = {"success": True}
            else:
                answer = _failed(f"there is no method {method.decode(errors='replace')!r}")
        except asyncio.CancelledError:
            answer = _failed("the rollout was cancelled")
        except Exception as error:  # whatever it is: a client without an answer waits for ever
            if not isinstance(error, (LachesisError, ValueError, TypeError, KeyError)):
                log.exception("a request of prime-rl failed")
            answer = _failed(f"{type(error).__name__}: {error}")
        finally:
            self._runs.pop((client, request), None)
        await send(b"reply", answer)

    async def _run(self, given: Mapping[str, Any], send: Callable[[Mapping[str, Any]], Awaitable[None]]) -> Any:
        data = given["task_data"]
        server = await self._host.policies.get([self._settings(given["client"], given["model"])])
        sampling = {name: value for name, value in given["sampling"].items() if name not in _OF_THE_ENGINE}
        policy = RequestPolicy(server, sampling)
        task = {"type": "LachesisTask", "data": data}
        head: dict[str, Any] = {"id": uuid.uuid4().hex, "env": {"id": self._host.name}, "task": task}
        trains = tracks_tokens(server) and data["split"] != "test"
        if trains and (problem := problem_of_settings(server, self._host.env.config, policy.named)):
            error = {"type": "SettingsError", "message": problem, "traceback": None}
            head |= {"ok": False, "is_timeout": False, "errors": [error]}
            return {"success": True, "error": None, "head": head, "traces": []}
        group, untrainable = await self._host.play(data["split"], data["index"], policy)
        (rollout,) = group.rollouts
        head |= standing_of(rollout, untrainable)
        traces = [trace_of(group, task, untrainable)] if rollout.result is not None else []
        for trace in traces:
            await send(trace)
        sent = [{"id": each["trace"], "nodes": len(each["nodes"]), "calls": len(each["calls"])} for each in traces]
        return {"success": True, "error": None, "head": head, "traces": sent}

    def _settings(self, client: Mapping[str, Any], model: str) -> ServerConfig:
        """Those of the run, for the server of a request. The key is the run's own."""
        if named := client.get("headers_from_env"):
            raise SettingsError(
                f"headers_from_env names variables of the client ({', '.join(named)}); send their values in headers"
            )
        url = {"base_url": client["base_url"], "model_name": model, "server_type": "openai", "engine": "auto"}
        url["headers"] = dict(client.get("headers") or {})
        config = self._host.env.server_configs[0]
        if client["type"] == "train":
            url |= {"engine": "vllm-generate", "tokenizer_name": client.get("renderer_model_name") or model}
            url["logprobs_mode"] = config.logprobs_mode or "processed"  # prime-rl starts its vLLM so
        return config.model_copy(update=url)


def _failed(why: str) -> dict[str, Any]:
    return {"success": False, "error": why}
