"""The part of the wire that samples: sampling sessions, each with its version of the weights, and their requests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from lachesis_train.engine.answers import Body, failed_result, failure, named, read_json
from lachesis_train.engine.checkpoints import SAMPLER_WEIGHTS, Checkpoints
from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.promises import Promise, Promises, Result
from lachesis_train.engine.sampling import SamplingTask, check_request
from lachesis_train.engine.wire import encode_samples, sample_request
from lachesis_train.engine.worker import MAX_WAITING, EngineWorker

EPHEMERAL: Final = "ephemeral-"
"""Names of weights that the SDK did not name: they go with their session."""
KEPT_EPHEMERAL: Final = 32
"""The newest of them that a session keeps: a trainer makes one each step."""
FULL_EPHEMERAL: Final = 4
"""Those with full weights, each a file as large as the model."""


class Samplers:
    """Sampling sessions by id, with the `tinker://` path that each samples from; None is the base model."""

    def __init__(
        self,
        worker: EngineWorker,
        checkpoints: Checkpoints,
        promises: Promises,
        base_names: Sequence[str],
        kept: int = KEPT_EPHEMERAL,
    ) -> None:
        self.worker = worker
        self.checkpoints = checkpoints
        self.promises = promises
        self.base_names = base_names
        self.kept = kept
        self._paths: dict[str, str | None] = {}
        self._requests: dict[str, SamplingTask] = {}

    def add(self, session: str, number: int, path: str | None) -> str:
        """A new sampling session of a client's session; its id."""
        name = f"{session}:sample:{number}"
        self._paths[name] = path
        if _is_ephemeral(path):
            for old in [each for each in self._of(session) if _is_ephemeral(self._paths[each])][: -self.kept]:
                if not self.worker.samples(self._paths[old]):  # a long completion keeps its weights
                    self.checkpoints.remove(str(self._paths.pop(old)))
        return name

    def _of(self, session: str) -> list[str]:
        return [name for name in list(self._paths) if name.startswith(f"{session}:sample:")]

    def end_session(self, session: str) -> None:
        """Forget the sampling sessions of a client, and the weights that it did not name."""
        for name in self._of(session):
            path = self._paths.pop(name)
            if _is_ephemeral(path):
                self.checkpoints.remove(str(path))

    def path_of(self, body: Body) -> str | None:
        """The weights that a body names. Raises RequestError for those that cannot be sampled."""
        path: str | None = body.get("model_path")
        if path is None:
            self.check_base_model(body.get("base_model"))
        elif self.checkpoints.find(path).file.parent.name != SAMPLER_WEIGHTS:
            raise RequestError(
                f"{path} is a training state, which may be overwritten; "
                "sample from the path that save_weights_for_sampler returns"
            )
        return path

    def check_base_model(self, name: str | None) -> None:
        """Raises RequestError for another model than the one that is served. Its first name is shown."""
        if name is not None and name not in self.base_names:
            raise RequestError(f"base model {name!r} is not served here; this engine serves {self.base_names[0]}")

    async def get(self, request: web.Request) -> web.Response:
        """GET samplers/ID."""
        sampler = request.match_info["sampler"]
        path = self._path(sampler)
        return web.json_response({"sampler_id": sampler, "base_model": self.base_names[0], "model_path": path})

    def _path(self, sampler: str) -> str | None:
        if sampler not in self._paths:
            raise RequestError(
                f"sampling session {sampler!r} is unknown: its session ended, the engine was started again, or it is "
                f"older than the last {self.kept} of weights without a name; create a sampling client from a "
                "saved path"
            )
        return self._paths[sampler]

    async def sample(self, request: web.Request) -> web.Response:
        """POST asample: a promise of samples."""
        if self.worker.waiting >= MAX_WAITING:
            return failure(429, f"{MAX_WAITING} requests wait; try again", {"Retry-After": "1"})
        body = await read_json(request)
        sampler, seq_id = body.get("sampling_session_id"), body.get("seq_id")
        name = f"{sampler or 'sample'}:{uuid.uuid4().hex if seq_id is None else seq_id}"
        count = max(1, int(body.get("num_samples") or 1))
        answer = {"request_id": name, "sample_sequence_ids": [f"{name}:{number}" for number in range(count)]}
        if self.promises.get(name) is not None:  # sent again, because the answer was lost
            return web.json_response(answer)
        promise = self.promises.create(name)
        loop = asyncio.get_running_loop()

        def done(result: SamplingTask | Exception) -> None:
            encoded = failed_result(result) if isinstance(result, Exception) else encode_samples(result)
            loop.call_soon_threadsafe(self._fulfil, promise, encoded)

        try:
            version = self._path(sampler) if sampler else self.path_of(body)
            made = sample_request(self.worker.model, body, done)
            check_request(self.worker.model, made)
        except (RequestError, KeyError, TypeError, ValueError) as error:
            self.promises.fulfil(promise, failed_result(named(error)))
        else:
            self._requests[name] = made
            self.worker.sample(version, made)
        return web.json_response(answer)

    def _fulfil(self, promise: Promise, result: Result) -> None:
        if self._requests.pop(promise.id, None) is not None:  # else it was cancelled
            self.promises.fulfil(promise, result)

    async def cancel(self, request: web.Request) -> web.Response:
        """POST cancel_future: its samples leave the batch before the next token."""
        name = (await read_json(request)).get("request_id", "")
        made, promise = self._requests.get(name), self.promises.get(name)
        if made is not None and promise is not None:
            made.cancelled = True
            self._fulfil(promise, failed_result(RequestError("the request was cancelled")))
        return web.json_response({})


def _is_ephemeral(path: str | None) -> bool:
    return path is not None and path.rpartition("/")[2].startswith(EPHEMERAL)
