"""Sandboxes at Modal (https://modal.com), by the asynchronous interface of its SDK.

The executor is the entrypoint of a Modal sandbox and listens on a socket that exists inside only. Its byte stream is a
Modal exec of a relay, which copies between that socket and Modal's streams. When a stream breaks, another exec replaces
it and the connection continues, so every command runs once.

Unlike with other backends, commands run as root of the image. Modal enforces `SandboxSpec.memory_bytes`; if it ends the
whole sandbox for exceeding it, the caller gets a `SandboxLost` with Modal's reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.base import Availability
from backends.connection import GRACE, ByteStream, Connection
from backends.errors import BackendError, BackendUnavailable, SandboxLost
from backends.failures import typed_failures
from backends.limits import CPUS, MEMORY
from backends.owner import new_id
from backends.sandbox import initialise
from backends.spec import SandboxInfo, SandboxSpec, sandbox_title
from backends.tasks import finish

from .calls import ENDING, FIX, ModalShared, bounded, is_rejected, post_mortem, retried, terminate, text_of, why_ended
from .exec_stream import entrypoint, exec_stream, relay
from .sandbox import ModalSandbox
from .terms import MARGIN, MARK, reject, tag, tags_of

if TYPE_CHECKING:  # the import takes more than a second, and the package may be missing: see `_sdk`
    import modal


WORKDIR = "/workspace"
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""Variables inside, before secrets and `SandboxSpec.env`."""

_CPU_RESERVED, _MIB_RESERVED = 0.125, 128
"""What Modal reserves by default."""
_CREATING = 120.0  # seconds for which creating is retried


class ModalBackend:
    """Sandboxes at Modal, all in one Modal app.

    `cpus` (2) and `memory_bytes` (2 GiB) are Modal's hard limits, `lifetime` (at most 24 h) is its timeout. `pids` and
    `disk_bytes` are rejected: Modal has no such limits. Commands get the listed variables of `secrets`, and none of the
    image.
    """

    name = "modal"

    def __init__(
        self,
        *,
        app_name: str = "lachesis",
        environment_name: str | None = None,
        image: str | None = None,
        add_python: str | None = None,
        image_setup: Sequence[str] = (),
        registry_secret: str | None = None,
        secrets: Mapping[str, Sequence[str]] | None = None,
        region: str | Sequence[str] | None = None,
        cloud: str | None = None,
        gpu: str | None = None,
        cpu_request: float | None = None,
        memory_request: int | None = None,
        grace: float = GRACE,
        start_timeout: float = 600.0,
        concurrency: int = 64,
        client: modal.Client | None = None,
    ) -> None:
        """`client` is the Modal client to use, by default the one of Modal's settings.

        Args:
            app_name: the app of the sandboxes, created with the first of them.
            environment_name: the environment of the app and the secrets. Default: that of Modal's settings.
            image: the image of specs without one: a name in a registry, or `im-...` for an image at Modal, such as
                `snapshot` returns. Default: Modal's `debian_slim`.
            add_python: version of Python (such as "3.12") to add to images from a registry.
            image_setup: shell commands to run once per image.
            registry_secret: name of the Modal secret with a private registry's credentials.
            secrets: name of a Modal secret -> its variables to set for commands.
            region, cloud, gpu: as in `modal.Sandbox.create`.
            cpu_request: processors to reserve. Default: the limit.
            memory_request: bytes to reserve. Default: the limit.
            grace: seconds within which a broken connection can be restored; then the sandbox ends itself.
            start_timeout: seconds that a sandbox may take to start, once its image is built.
            concurrency: sandboxes that are created at once.
        """
        if isinstance(secrets, str) or (secrets is not None and not isinstance(secrets, Mapping)):
            raise ValueError("secrets maps the name of a Modal secret to a list of its variables")
        if concurrency < 1:
            raise ValueError(f"concurrency must be positive, not {concurrency}")
        self.app_name, self.environment_name = app_name, environment_name
        self._image_name, self._add_python, self._image_setup = image, add_python, tuple(image_setup)
        self._registry_secret = registry_secret
        self._secrets = {name: list(keys) for name, keys in (secrets or {}).items()}
        self._region = region if region is None or isinstance(region, str) else list(region)
        self._cloud, self._gpu = cloud, gpu
        self._cpu_request, self._memory_request = cpu_request, memory_request
        self._grace, self._start_timeout, self._concurrency = grace, start_timeout, concurrency
        self._client = client
        # ModalShared by the sandboxes of one event loop: objects of asyncio belong to one loop.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ModalShared] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"ModalBackend(app_name={self.app_name!r})"

    async def check(self) -> Availability:
        """Ask Modal whether it accepts the credentials. Creates nothing."""
        client = await self._find_client()
        if isinstance(client, Availability):
            return client
        try:
            async with asyncio.timeout(60):
                await client.hello.aio()  # type: ignore[no-untyped-call]
        except Exception as error:
            if is_rejected(error):
                return Availability(False, f"Modal rejects the credentials: {text_of(error)}", FIX)
            return Availability(False, f"Modal cannot be reached: {text_of(error)}", "check the network, and try again")
        import modal

        limits = "cpus and memory, by Modal; no processes, no disk"
        return Availability(True, f"modal {modal.__version__}, app {self.app_name!r}", "", "Modal: gVisor", limits)

    @typed_failures
    async def create(self, spec: SandboxSpec) -> ModalSandbox:
        reject(spec)
        client = await self._connect()
        app = await self._app(create=True)
        image = await self._image(spec.image or self._image_name, app)
        id = new_id()
        name = sandbox_title(id, spec.labels)
        async with self._shared().turns:
            try:
                async with asyncio.timeout(self._start_timeout):
                    sandbox = await self._make(id, name, spec, app, image, client)
                    return await self._attach(sandbox, id, name, spec)
            except BaseException as error:
                # It may exist, if only the answer was lost: look for it by its name.
                await finish(self._discard(id, client))
                if isinstance(error, TimeoutError):
                    raise BackendError(f"{name} did not start within {self._start_timeout:g} s") from None
                raise

    async def sandboxes(self) -> list[SandboxInfo]:
        return [info for _, info in await self._list(None)]

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`.

        Raises:
            BackendError: some could not be ended; all others were.
        """
        found = [(sandbox, info) for sandbox, info in await self._list(run_id) if everyone or info.orphan]
        await bounded(terminate(sandbox, f"sandbox {info.id}") for sandbox, info in found)
        return [info for _, info in found]

    # shared by all sandboxes

    def _shared(self) -> ModalShared:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = ModalShared(self._concurrency)
        return self._loops[loop]

    async def _find_client(self) -> modal.Client | Availability:
        if self._client is not None:
            return self._client
        if _has_no_token():
            return Availability(False, "Token missing", FIX)
        try:
            sdk = await _sdk()
        except ImportError as error:
            return Availability(False, f"the package modal is missing ({error})", "pip install 'lachesis-rl[modal]'")
        try:
            client: modal.Client = await sdk.Client.from_env.aio()
        except sdk.exception.Error as error:
            return Availability(False, text_of(error), FIX)
        return client

    async def _connect(self) -> modal.Client:
        client = await self._find_client()
        if isinstance(client, Availability):
            unable = f"backend 'modal' cannot make sandboxes: {client.detail}"
            raise BackendUnavailable(f"{unable}. Next step: {client.fix}")
        return client

    async def _app(self, *, create: bool) -> modal.App:
        client = await self._connect()
        import modal

        async def look_up() -> modal.App:
            return await retried(
                lambda: modal.App.lookup.aio(
                    self.app_name, client=client, environment_name=self.environment_name, create_if_missing=create
                ),
                f"the Modal app {self.app_name!r} cannot be used",
            )

        return await self._shared().once(("app", create), look_up)

    async def _image(self, image: str | None, app: modal.App) -> modal.Image:
        """The image, built.

        Raises:
            BackendUnavailable: it does not exist, or cannot be built.
        """
        client = await self._connect()
        import modal

        async def build() -> modal.Image:
            if image is not None and image.startswith("im-"):
                made = modal.Image.from_id(image, client=client)
            else:
                if image is None:
                    made = modal.Image.debian_slim()
                else:
                    secret = self._registry_secret
                    made = modal.Image.from_registry(
                        image,
                        secret=self._secret(secret, ()) if secret is not None else None,
                        add_python=self._add_python,
                    )
                if self._image_setup:
                    made = made.run_commands(*self._image_setup)
            what = f"the image {image or 'debian_slim'!r} cannot be used"
            return await retried(lambda: made.build.aio(app), what)

        return await self._shared().once(("image", image), build)

    def _secret(self, name: str, keys: Sequence[str]) -> modal.Secret:
        import modal

        return modal.Secret.from_name(name, environment_name=self.environment_name, required_keys=list(keys))

    # one sandbox

    async def _make(
        self, id: str, name: str, spec: SandboxSpec, app: modal.App, image: modal.Image, client: modal.Client
    ) -> modal.Sandbox:
        """Create the sandbox once, with retries."""
        import modal

        async def find() -> modal.Sandbox:
            return await modal.Sandbox.from_name.aio(
                self.app_name, id, environment_name=self.environment_name, client=client
            )

        async def make() -> modal.Sandbox:
            try:
                return await modal.Sandbox.create.aio(
                    *entrypoint(),
                    app=app,
                    name=id,
                    tags=tags_of(id, spec.labels),
                    image=image,
                    secrets=[self._secret(secret, keys) for secret, keys in self._secrets.items()],
                    timeout=math.ceil(spec.lifetime) + MARGIN,
                    workdir=spec.workdir,
                    gpu=self._gpu,
                    cloud=self._cloud,
                    region=self._region,
                    cpu=self._cpu(spec.cpus),
                    memory=self._memory(spec.memory_bytes),
                    block_network=not spec.network,
                    client=client,
                )
            except modal.exception.AlreadyExistsError:  # the answer to an earlier attempt was lost
                return await find()

        async def again() -> modal.Sandbox:
            try:
                return await find()
            except modal.exception.NotFoundError:
                return await make()

        return await retried(make, f"{name} could not be created", again=again, patience=_CREATING)

    def _cpu(self, limit: float | None) -> float | tuple[float, float] | None:
        if limit is None:  # what is reserved is paid for: the default limit alone reserves nothing
            return (self._cpu_request or _CPU_RESERVED, max(self._cpu_request or 0.0, CPUS))
        return (min(self._cpu_request or limit, limit), limit) if limit else self._cpu_request

    def _memory(self, limit: int | None) -> int | tuple[int, int] | None:
        """In MiB."""
        request = None if self._memory_request is None else max(1, self._memory_request >> 20)
        if limit is None:
            return (request or _MIB_RESERVED, max(request or 0, MEMORY >> 20))
        return (min(request or limit >> 20, limit >> 20), limit >> 20) if limit else request

    async def _attach(self, sandbox: modal.Sandbox, id: str, name: str, spec: SandboxSpec) -> ModalSandbox:
        async def dial() -> ByteStream:
            try:
                process = await sandbox.exec.aio(*relay(), text=False)
            except Exception as error:
                reason = await why_ended(sandbox, spec.lifetime)
                if reason is None:
                    raise ConnectionError(text_of(error)) from None
                raise SandboxLost(reason) from None
            return exec_stream(process)

        try:
            connection = await Connection.resumable(
                dial, name=name, grace=self._grace, start_timeout=self._start_timeout, sealed=True
            )
        except SandboxLost as error:
            reason = await post_mortem(sandbox, str(error))
            raise BackendError(f"{name} ended before it could be used: {reason}") from None
        try:
            workdir = spec.workdir or WORKDIR
            env = {**ENVIRONMENT, **await self._secret_variables(sandbox)}
            inside = await initialise(connection, spec, workdir=workdir, env=env, grace=self._grace)
        except BaseException as error:
            connection.fail(f"{name} did not start")
            if isinstance(error, BackendError):
                raise type(error)(f"{name} could not be started: {error}") from error
            raise
        return ModalSandbox(
            connection, sandbox, spec, self, self.create, id=id, name=name, workdir=workdir, python=inside.python
        )

    async def _secret_variables(self, sandbox: modal.Sandbox) -> dict[str, str]:
        """Variables of the secrets. Modal sets them only for processes that it starts itself."""
        keys = [key for keys in self._secrets.values() for key in keys]
        if not keys:
            return {}
        code = "import json,os,sys;json.dump({k:os.environ[k] for k in sys.argv[1:] if k in os.environ},sys.stdout)"
        process = await sandbox.exec.aio("python3", "-I", "-S", "-c", code, *keys, text=False)
        found: dict[str, str] = json.loads(await process.stdout.read.aio() or b"{}")
        if missing := sorted(set(keys) - set(found)):
            raise BackendUnavailable(f"its Modal secrets lack variables: {', '.join(missing)}")
        return found

    async def _discard(self, id: str, client: modal.Client) -> None:
        """End the sandbox `id` if it exists. If that fails, it ends itself for want of an owner."""
        import modal

        with contextlib.suppress(Exception):
            async with asyncio.timeout(ENDING):
                sandbox = await modal.Sandbox.from_name.aio(
                    self.app_name, id, environment_name=self.environment_name, client=client
                )
                await terminate(sandbox, f"sandbox {id}")

    async def _list(self, run_id: str | None) -> list[tuple[modal.Sandbox, SandboxInfo]]:
        client = await self._connect()
        import modal

        try:
            app = await self._app(create=False)
        except BackendUnavailable as error:
            if isinstance(error.__cause__, modal.exception.NotFoundError):
                return []  # the app is created with its first sandbox
            raise
        wanted = dict([MARK]) | ({} if run_id is None else {"run_id": tag(run_id)})

        async def listed() -> list[modal.Sandbox]:
            found = modal.Sandbox.list.aio(app_id=app.app_id, tags=wanted, client=client)
            return [sandbox async for sandbox in found]

        async def described(sandbox: modal.Sandbox) -> tuple[modal.Sandbox, SandboxInfo] | None:
            try:
                tags = await retried(sandbox.get_tags.aio, f"the tags of {sandbox.object_id} cannot be read")
            except BackendUnavailable as error:
                if isinstance(error.__cause__, modal.exception.NotFoundError):
                    return None  # it has ended
                raise
            id = tags.get("id", sandbox.object_id)
            return sandbox, SandboxInfo.of(self.name, id, tags, sandbox.object_id)

        found = await retried(listed, f"the sandboxes of the Modal app {self.app_name!r} cannot be listed")
        return [pair for pair in await bounded(map(described, found)) if pair is not None]


def _has_no_token() -> bool:
    """Whether the SDK is here and can find no token: then it need not be imported, which takes half a second."""
    if importlib.util.find_spec("modal") is None or any(name.startswith("MODAL_") for name in os.environ):
        return False
    return not Path("~/.modal.toml").expanduser().exists()


async def _sdk() -> Any:
    """The SDK, imported in a thread: the import would block the event loop."""
    return await asyncio.to_thread(importlib.import_module, "modal")
