"""An event loop in a thread of its own, and on it the model servers and the sandboxes of one agent."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar

from backends import SupportsClose, create_backend
from backends.errors import SettingsError
from lachesis import BUILTIN_TOOLS, ServerConfig, ToolRegistry
from lachesis.loop.open_runs import OpenRun, opened
from lachesis.loop.tool_calls import SessionCalls
from lachesis.other_packages import DATA
from lachesis.runs.model_servers import start_servers
from lachesis.runs.silence import SilenceWatch
from lachesis.settings.agent_tools import AgentTools, chosen_tools
from lachesis.settings.server_settings import CHAT
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client import Router
from lachesis_tools import ToolSessions

if TYPE_CHECKING:
    from lachesis.loop.context_edits import Compression

log = logging.getLogger(__name__)
T = TypeVar("T")

_ENDING: Final = 30.0
"""Seconds that a cancelled call may take to end."""


class LoopThread:
    """An event loop that runs in a thread, from the first call on until `close`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="agent", daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether this is the thread of the loop itself."""
        return threading.current_thread() is self._thread

    def check_elsewhere(self) -> None:
        """Raises RuntimeError on the thread of the loop itself."""
        if self.here:
            raise RuntimeError("a callback of an agent cannot wait for the agent: call it on another thread")

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled where this thread is interrupted (Ctrl-C)."""
        ended = threading.Event()

        async def to_its_end() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(to_its_end(), self.loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(_ENDING)  # it keeps what is there of the conversation
            raise

    def soon(self, function: Any, *arguments: Any) -> None:
        """Call a function on the loop, from any thread."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class AgentResources:
    """The servers and sandboxes, all on one event loop."""

    def __init__(self, config: HermesAgentEnvConfig, registry: ToolRegistry = BUILTIN_TOOLS) -> None:
        """Raises ToolsetError for toolsets that do not exist."""
        self.config, self.registry = config, chosen_tools(registry, config, "agent", user=False)
        tools = AgentTools(config, self.registry)
        self.definitions: list[dict[str, Any]] = tools.definitions() if config.enabled_toolsets != [] else []
        if missing := tools.missing():
            log.warning("toolsets without tools here are left out: %s", ", ".join(missing))
        self.servers: list[Router] = []
        """The model's, and that of the fallback if there is one."""
        self.compression: Compression | None = None
        self._run: OpenRun | None = None
        self._sandboxes, self._connections = AsyncExitStack(), AsyncExitStack()

    async def connect(self, configs: Sequence[ServerConfig]) -> None:
        """Use these servers from now on, instead of those before."""

        async def unchecked(_: Sequence[Any]) -> None: ...

        await self._connections.aclose()
        self._connections = AsyncExitStack()
        self.servers = []
        for config in configs:
            chats = [config.model_copy(update={"engine": CHAT})]
            server = await start_servers(chats, settings=self.config, stack=self._connections, check=unchecked)
            assert isinstance(server, Router)
            self.servers.append(server)

    async def calls(self, task_id: str) -> SessionCalls:
        """The tools in the sandbox of a task, which starts when one first needs it, and stays."""
        if self._run is None:
            await self._open()
        assert self._run is not None
        names = [definition["function"]["name"] for definition in self.definitions]
        return SessionCalls(self._run.session(task_id), self.registry, names, self.config.build_budget_config())

    async def _open(self) -> None:
        """Let tools, and the functions of the old paths that know a task id only, find the sandboxes."""
        config = self.config
        try:
            backend = create_backend(config.terminal_backend, **config.backend_options())
            spec = config.sandbox_spec({"environment": "agent"})
        except ValueError as error:
            raise SettingsError(f"the agent's sandboxes: {error}") from error
        if isinstance(backend, SupportsClose):
            self._sandboxes.push_async_callback(backend.close)
        sessions = ToolSessions(backend, spec, terminal_timeout=float(config.terminal_timeout))
        self._sandboxes.push_async_callback(sessions.close_all)
        if config.mcp:
            from lachesis_tools.mcp.toolset import mcp_tools

            self.registry = self.registry.extended(*await mcp_tools(config.mcp, sessions))
            self.definitions = AgentTools(config, self.registry).definitions()
        if config.compress_context_at is not None:
            from rich.console import Console

            watch = SilenceWatch(Console(stderr=True))
            self.compression = await DATA.load("context_compression")(config, self._sandboxes, watch)
        self._run = OpenRun(
            sessions,
            self.registry,
            asyncio.get_running_loop(),
            backend=config.terminal_backend,
            takes_images=config.terminal_backend not in ("local", "ssh"),
            walls=config.terminal_backend != "local" or config.sandbox != "none",
        )
        self._sandboxes.enter_context(opened(self._run))

    async def close(self) -> None:
        """Remove the sandboxes, and close the connections."""
        try:
            await self._sandboxes.aclose()
        finally:
            self._run = None
            await self._connections.aclose()
