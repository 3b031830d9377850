"""A fake Modal on this machine: its gRPC services, with sandboxes that really run.

    with ModalServer(folder) as server:
        client = await server.client()

Each sandbox is a set of namespaces made with bubblewrap over a copy-on-write root, in which the entrypoint and every
exec run as processes. Names, tags, statuses and error codes are those that the SDK's source expects. RPCs that are not
built answer UNIMPLEMENTED and are listed in `unbuilt`. Only the loopback is used.

Requested limits of CPU and memory are recorded and not enforced; regions, clouds and GPUs exist by name only.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import secrets
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpclib.server
import modal
from google.protobuf.message import Message
from grpclib import GRPCError, Status
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_grpc, api_pb2, task_command_router_grpc, task_command_router_pb2

from tests.support.modal_boxes import Box, BoxProcess, Flow, Result
from tests.support.root_images import full_root

T = TypeVar("T")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Fault:
    """A fault of the next `times` calls of `method`: a pause, then an error, before or after the call is carried out.

    Without a `status` the call is carried out after the pause.
    """

    method: str
    status: Status | None = None
    message: str = "injected"
    times: int = 1
    carried_out: bool = False
    """Whether the call takes effect and only its answer is lost."""
    stall: float = 0.0
    details: Sequence[Message] = ()


def _token(lifetime: float = 3600.0) -> str:
    def part(content: Mapping[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part({'exp': time.time() + lifetime})}.{secrets.token_hex(8)}"


def _secret_values(server: ModalServer, sources: Sequence[api_pb2.SecretSource]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in sources:
        found |= server.secrets[source.secret_id.removeprefix("st-")] if source.secret_id else source.env.contents
    return found


class _Control:
    """The services behind `api.modal.com`."""

    def __init__(self, server: ModalServer) -> None:
        self.server = server

    async def ClientHello(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse(image_builder_version="2025.06"))

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        self.server.tokens.add(token := _token())
        await stream.send_message(api_pb2.AuthTokenGetResponse(token=token))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def MountGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.MountGetOrCreateResponse(mount_id="mo-1"))

    async def AppGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        key = (request.environment_name, request.app_name)
        if key not in self.server.apps:
            if request.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"App '{request.app_name}' not found")
            self.server.apps[key] = f"ap-{secrets.token_hex(11)}"
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id=self.server.apps[key]))

    async def ImageGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        self.server.image_requests.append(request)
        commands = list(request.image.dockerfile_commands)
        bases = "".join(base.image_id for base in request.image.base_images)
        image_id = "im-" + hashlib.sha256("\n".join([bases, *commands]).encode()).hexdigest()[:22]
        result = Result(status=Result.GENERIC_STATUS_SUCCESS)
        if any("no-such" in command for command in commands):
            result = Result(status=Result.GENERIC_STATUS_FAILURE, exception="failed to pull: manifest unknown")
        else:
            bad = any("no-python" in command for command in commands)
            self.server.images[image_id] = ([self.server.root], "/opt/bin" if bad else _PATH)
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=result))

    async def ImageFromId(self, stream: Any) -> None:
        request = await stream.recv_message()
        if request.image_id not in self.server.images:
            raise GRPCError(Status.NOT_FOUND, f"Image with ID {request.image_id} not found")
        await stream.send_message(api_pb2.ImageFromIdResponse(image_id=request.image_id))

    async def SecretGetOrCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        values = self.server.secrets.get(request.deployment_name)
        if values is None:
            raise GRPCError(Status.NOT_FOUND, f"Secret '{request.deployment_name}' not found")
        if missing := [key for key in request.required_keys if key not in values]:
            raise GRPCError(Status.NOT_FOUND, f"Secret is missing key(s): {', '.join(missing)}")
        await stream.send_message(api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{request.deployment_name}"))

    async def _create(self, request: Any, sources: Sequence[api_pb2.SecretSource], v1: bool) -> Box:
        server, definition = self.server, request.definition
        server.created.append(request)
        if definition.name and server.find(definition.name) is not None:
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name '{definition.name}' already exists")
        layers, path = server.images[definition.image_id]
        suffix = secrets.token_hex(11) if v1 else secrets.token_hex(13)
        id, task_id = f"sb-{suffix}", f"ta-{suffix}{'' if v1 else 'V'}"
        env = {"PATH": path, "HOME": "/root", "MODAL_TASK_ID": task_id, "MODAL_SANDBOX_ID": id, "MODAL_REGION": "local"}
        env |= _secret_values(server, sources)
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        box = Box(id, task_id, request.app_id, definition, tags, env, layers, server.folder / id)
        server.boxes[id] = server.boxes[task_id] = box
        box.launch()
        await box.start("", definition.entrypoint_args, definition.workdir, env, 0)
        asyncio.get_running_loop().call_later(definition.timeout_secs, box.end, Result.GENERIC_STATUS_TIMEOUT)
        return box

    async def SandboxCreateV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        box = await self._create(request, request.secret_sources, v1=False)
        await stream.send_message(
            api_pb2.SandboxCreateV2Response(
                sandbox_id=box.id, task_id=box.task_id, command_router_access=self.server.router_access()
            )
        )

    async def SandboxCreate(self, stream: Any) -> None:
        request = await stream.recv_message()
        sources = [api_pb2.SecretSource(secret_id=id) for id in request.definition.secret_ids]
        box = await self._create(request, sources, v1=True)
        await stream.send_message(api_pb2.SandboxCreateResponse(sandbox_id=box.id))

    async def SandboxGetFromNameV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        box = self.server.find(request.sandbox_name)
        app_id = self.server.apps.get((request.environment_name, request.app_name))
        if box is None or box.app_id != app_id:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox with name '{request.sandbox_name}' not found")
        await stream.send_message(api_pb2.SandboxGetFromNameResponse(sandbox_id=box.id))

    SandboxGetFromName = SandboxGetFromNameV2

    async def SandboxGetTaskIdV2(self, stream: Any) -> None:
        box = self.server.box((await stream.recv_message()).sandbox_id)
        answer = api_pb2.SandboxGetTaskIdResponse(task_id=box.task_id)
        if box.result is not None:
            answer = api_pb2.SandboxGetTaskIdResponse(task_result=box.result)
        await stream.send_message(answer)

    SandboxGetTaskId = SandboxGetTaskIdV2

    async def SandboxGetCommandRouterAccess(self, stream: Any) -> None:
        request = await stream.recv_message()
        self.server.living(request.sandbox_id or request.task_id)
        access = self.server.router_access()
        await stream.send_message(api_pb2.SandboxGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt))

    async def TaskGetCommandRouterAccess(self, stream: Any) -> None:
        self.server.living((await stream.recv_message()).task_id)
        access = self.server.router_access()
        await stream.send_message(api_pb2.TaskGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt))

    async def SandboxWaitV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        box = self.server.box(request.sandbox_id)
        try:
            await asyncio.wait_for(box.ended.wait(), request.timeout or 0.001)
        except TimeoutError:
            await stream.send_message(api_pb2.SandboxWaitResponse())
        else:
            await stream.send_message(api_pb2.SandboxWaitResponse(result=box.result))

    SandboxWait = SandboxWaitV2

    async def SandboxTerminateV2(self, stream: Any) -> None:
        box = self.server.box((await stream.recv_message()).sandbox_id)
        answer = api_pb2.SandboxTerminateResponse(existing_result=box.result)
        box.end(Result.GENERIC_STATUS_TERMINATED)
        await stream.send_message(answer)

    SandboxTerminate = SandboxTerminateV2

    async def SandboxTagsGetV2(self, stream: Any) -> None:
        box = self.server.box((await stream.recv_message()).sandbox_id)
        tags = [api_pb2.SandboxTag(tag_name=key, tag_value=value) for key, value in box.tags.items()]
        await stream.send_message(api_pb2.SandboxTagsGetResponse(tags=tags))

    SandboxTagsGet = SandboxTagsGetV2

    async def SandboxListV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        listed = [
            api_pb2.SandboxInfo(id=box.id, created_at=box.created, name=box.name, app_id=box.app_id)
            for box in sorted(set_of(self.server.boxes), key=lambda box: -box.created)
            if box.result is None
            and box.app_id == request.app_id
            and (not request.before_timestamp or box.created < request.before_timestamp)
            and wanted.items() <= box.tags.items()
        ]
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=listed[:25]))


def set_of(boxes: Mapping[str, Box]) -> list[Box]:
    return list({box.id: box for box in list(boxes.values())}.values())


class _Router:
    """The service on the worker, one for all sandboxes here."""

    def __init__(self, server: ModalServer) -> None:
        self.server = server

    def _process(self, request: Any) -> BoxProcess:
        try:
            return self.server.box(request.task_id).processes[request.exec_id]
        except KeyError:
            raise GRPCError(Status.NOT_FOUND, f"exec {request.exec_id} not found") from None

    async def TaskExecStart(self, stream: Any) -> None:
        request = await stream.recv_message()
        self.server.executed.append(request)
        box = self.server.box(request.task_id)
        if request.exec_id not in box.processes:  # the id makes repetition safe
            env = {**box.env, **request.env, **_secret_values(self.server, request.secret_sources)}
            cwd = request.workdir or box.definition.workdir
            await box.start(request.exec_id, request.command_args, cwd, env, request.timeout_secs)
        await stream.send_message(task_command_router_pb2.TaskExecStartResponse())

    async def TaskExecStdioRead(self, stream: Any) -> None:
        request = await stream.recv_message()
        process = self._process(request)
        is_stdout = request.file_descriptor == task_command_router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        async for data in (process.stdout if is_stdout else process.stderr).chunks(request.offset):
            await stream.send_message(task_command_router_pb2.TaskExecStdioReadResponse(data=data))

    async def TaskExecStdinWrite(self, stream: Any) -> None:
        request = await stream.recv_message()
        process = self._process(request)
        async with process.lock:
            if process.stdin is None or process.stdin.is_closing():
                raise GRPCError(Status.FAILED_PRECONDITION, "stdin is closed")
            if request.offset > process.stdin_size:
                raise GRPCError(Status.INVALID_ARGUMENT, f"offset {request.offset} is beyond {process.stdin_size}")
            fresh = request.data[process.stdin_size - request.offset :]
            process.stdin_size += len(fresh)
            process.stdin.write(fresh)
            flow = process.stdin.get_protocol()
            assert isinstance(flow, Flow)
            await flow.writable.wait()
            if request.eof:
                process.stdin.write_eof()
        await stream.send_message(task_command_router_pb2.TaskExecStdinWriteResponse())

    async def TaskExecWait(self, stream: Any) -> None:
        process = self._process(await stream.recv_message())
        await process.exited.wait()
        await stream.send_message(process.status(task_command_router_pb2.TaskExecWaitResponse))

    async def TaskExecPoll(self, stream: Any) -> None:
        process = self._process(await stream.recv_message())
        await stream.send_message(process.status(task_command_router_pb2.TaskExecPollResponse))

    async def SandboxStdioReadV2(self, stream: Any) -> None:
        request = await stream.recv_message()
        process = self.server.box(request.task_id).processes[""]
        is_stdout = request.file_descriptor == task_command_router_pb2.SANDBOX_STDIO_FILE_DESCRIPTOR_STDOUT
        offset = request.offset
        async for data in (process.stdout if is_stdout else process.stderr).chunks(offset):
            answer = task_command_router_pb2.SandboxStdioReadV2Response(data=data, starting_offset=offset)
            offset += len(data)
            await stream.send_message(answer)

    async def TaskSnapshotFilesystem(self, stream: Any) -> None:
        request = await stream.recv_message()
        box = self.server.living(request.task_id)
        image_id = "im-" + hashlib.sha256(request.snapshot_id.encode()).hexdigest()[:22]
        layer = self.server.folder / image_id
        copy = ["cp", "-a", str(box.folder / "upper"), str(layer)]
        await asyncio.to_thread(subprocess.run, copy, check=True)
        self.server.images[image_id] = ([*box.layers, layer], box.env["PATH"])
        await stream.send_message(task_command_router_pb2.TaskSnapshotFilesystemResponse(image_id=image_id))


class _Unanswered:
    """The stream of a call whose answer is lost."""

    def __init__(self, stream: Any) -> None:
        self.metadata, self.recv_message = stream.metadata, stream.recv_message

    async def send_message(self, _: Message) -> None:
        pass


class _Guarded:
    """A servicer whose calls are counted, authenticated and disturbed."""

    def __init__(self, built: object, base: type, server: ModalServer) -> None:
        self._server = server
        names = [name for name in base.__dict__ if not name.startswith("_")]
        handlers = {name: getattr(built, name, None) or self._missing(name) for name in names}
        servicer = type("Servicer", (base,), {name: staticmethod(handler) for name, handler in handlers.items()})()
        self._mapping = {
            path: handler._replace(func=self._guard(path.rpartition("/")[2], handler.func))
            for path, handler in servicer.__mapping__().items()
        }

    def __mapping__(self) -> dict[str, Any]:
        return self._mapping

    def _missing(self, name: str) -> Callable[[Any], Awaitable[None]]:
        async def fallback(_: Any) -> None:
            self._server.unbuilt.add(name)
            logging.getLogger(__name__).error("modal_server has no %s", name)
            raise GRPCError(Status.UNIMPLEMENTED, f"the fake Modal server has no {name}")

        return fallback

    def _guard(self, name: str, call: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        async def guarded(stream: Any) -> None:
            self._server.calls[name] += 1
            self._server.at_once[name] += 1
            self._server.most_at_once[name] = max(self._server.most_at_once[name], self._server.at_once[name])
            try:
                await disturbed(stream)
            finally:
                self._server.at_once[name] -= 1

        async def disturbed(stream: Any) -> None:
            fault = self._server.take_fault(name)
            if fault is not None and fault.stall:
                await asyncio.sleep(fault.stall)
            if fault is None or fault.status is None:
                self._server.authenticate(stream.metadata)
                await call(stream)
                return
            if fault.carried_out:
                await call(_Unanswered(stream))
            raise GRPCError(fault.status, fault.message, list(fault.details) or None)

        return guarded


class ModalServer:
    """The services, in a separate thread. Methods may be called from any other thread."""

    def __init__(self, folder: Path, *, root: Path | None = None) -> None:
        """`folder` takes the sandboxes' files; `root` is the root file system of every image (else made there)."""
        self.folder = folder
        self.root = root or full_root(folder / "root")
        self.credentials = ("ak-" + secrets.token_hex(8), "as-" + secrets.token_hex(16))
        self.secrets: dict[str, dict[str, str]] = {}
        self.tokens: set[str] = set()
        self.apps: dict[tuple[str, str], str] = {}
        self.images: dict[str, tuple[list[Path], str]] = {}
        self.boxes: dict[str, Box] = {}
        self.calls: Counter[str] = Counter()
        self.at_once: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()
        self.created: list[Any] = []
        self.executed: list[Any] = []
        self.image_requests: list[Any] = []
        self.unbuilt: set[str] = set()
        self._faults: list[Fault] = []
        self._pairs: set[asyncio.StreamWriter] = set()
        self._cut_until = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = self._router_port = 0
        self._thread = threading.Thread(target=self._serve, name="modal-server", daemon=True)
        self._ready = threading.Event()

    # used by tests

    def __enter__(self) -> ModalServer:
        self._thread.start()
        self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self._thread.join(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def client(self, credentials: tuple[str, str] | None = None) -> modal.Client:
        """A client of this server. It needs no configuration and changes none."""
        client = modal.Client(self.url, api_pb2.CLIENT_TYPE_CLIENT, credentials or self.credentials)
        await client.__aenter__()  # type: ignore[no-untyped-call]
        return client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)

    def clear_faults(self) -> list[Fault]:
        """Returns the faults that have not happened."""
        left, self._faults = self._faults, []
        return left

    def running(self) -> list[str]:
        """Names of living sandboxes."""
        return [box.name for box in set_of(self.boxes) if not box.ended.is_set()]

    def end(self, name: str, status: Result.GenericStatus.ValueType, exception: str = "") -> None:
        """End a sandbox from Modal's side."""

        async def work() -> None:
            box = self.find(name)
            assert box is not None
            box.end(status, exception)
            await box.ended.wait()

        self.run(work())

    def kill_execs(self, name: str) -> int:
        """Kill the processes that `exec` started in a sandbox, except its entrypoint. Returns their number."""

        async def work() -> int:
            box = self.find(name)
            assert box is not None
            alive = [id for id, process in box.processes.items() if id and process.exit_code is None]
            for id in alive:
                box.kill(id)
            return len(alive)

        return self.run(work())

    def cut(self, seconds: float) -> None:
        """Break every connection to the workers, and reject new ones for a while."""

        async def work() -> None:
            self._cut_until = time.monotonic() + seconds
            for writer in list(self._pairs):
                writer.transport.abort()

        self.run(work())

    # used by the services

    def take_fault(self, method: str) -> Fault | None:
        for fault in self._faults:
            if fault.method == method:
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
                return fault
        return None

    def authenticate(self, metadata: Any) -> None:
        bearer = metadata.get("authorization", "").removeprefix("Bearer ")
        by_secret = (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) == self.credentials
        if not by_secret and bearer not in self.tokens:
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed, or the token was revoked")
        if metadata.get("x-modal-auth-token", bearer) not in self.tokens | {""}:
            raise GRPCError(Status.UNAUTHENTICATED, "auth token is not valid")

    def router_access(self) -> api_pb2.CommandRouterAccess:
        self.tokens.add(token := _token())
        return api_pb2.CommandRouterAccess(url=f"http://127.0.0.1:{self._router_port}", jwt=token)

    def find(self, name: str) -> Box | None:
        return next((box for box in set_of(self.boxes) if box.name == name and box.result is None), None)

    def box(self, id: str) -> Box:
        try:
            return self.boxes[id]
        except KeyError:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {id} not found") from None

    def living(self, id: str) -> Box:
        box = self.box(id)
        if box.result is not None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {id} has already finished")
        return box

    # the thread

    def _serve(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        servicers = [
            _Guarded(_Control(self), api_grpc.ModalClientBase, self),
            _Guarded(_Router(self), task_command_router_grpc.TaskCommandRouterBase, self),
        ]
        self._server = grpclib.server.Server(servicers, status_details_codec=custom_detail_codec)
        # Named, because asyncio otherwise does not see that it is TCP and leaves Nagle's algorithm on: 40 ms a command.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        self._port = listening.getsockname()[1]
        await self._server.start(sock=listening)
        self._router = await asyncio.start_server(self._forward, "127.0.0.1", 0, limit=1 << 20)
        self._router_port = self._router.sockets[0].getsockname()[1]

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection to the worker: the same server after a proxy that can be cut."""
        if time.monotonic() < self._cut_until:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        pair = {writer, far_writer}
        self._pairs |= pair

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(1 << 18):
                    target.write(data)
                    await target.drain()
            except OSError:
                pass
            finally:
                for end in pair:
                    end.transport.abort()

        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        self._pairs -= pair

    async def _stop(self) -> None:
        assert self._loop is not None
        boxes = set_of(self.boxes)
        for box in boxes:
            box.end(Result.GENERIC_STATUS_TERMINATED)
        await asyncio.gather(*(box.ending for box in boxes if box.ending is not None))
        self._router.close()
        for writer in list(self._pairs):
            writer.transport.abort()
        self._server.close()
        await self._server.wait_closed()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)  # aborted transports close in the next round
        self._loop.call_soon(self._loop.stop)
