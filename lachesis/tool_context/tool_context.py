"""The sandbox that the agent worked in, for its reward, before it is released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from backends import MAX_DOWNLOAD, BackendError, Sandbox, SandboxSpec
from backends.tasks import in_own_thread
from lachesis.loop.judgement import Judgement
from lachesis.loop.open_runs import OpenRun, open_run
from lachesis.rewards.agent_fault import AgentFault, acceptable
from lachesis.rewards.call_scope import CallScope, Runs, as_it_is, current_scope
from lachesis.rewards.calls import result_of
from lachesis.tool_context.blame import blamed
from lachesis.tool_context.branching import Branching
from lachesis.tool_context.context_calls import ContextCalls, RewardCall, SharedState, context_method
from lachesis.tool_context.context_results import Data, DictReply, FileText, Replies, Text, failed_command
from lachesis.tool_context.file_copies import chunks, files_below, members, remove_dead_links, write_local
from lachesis.tool_context.pace import Pace, pace, pace_without_agent
from lachesis.tool_context.parsed_files import adapter_of, decoded, parsed
from lachesis.tool_context.sealing import MAX_ARTIFACT, Sealing
from lachesis_tools import BUILTIN_TOOLS, ToolRegistry, ToolResult, ToolSession, call_tool

MAX_TERMINAL_OUTPUT = 10_000_000
"""Bytes of output that `terminal` hands to a reward; the model's own limit is smaller and does not apply here."""
_RAISE: Any = object()


class ToolContext(Branching):
    """The sandbox of one rollout, for its reward.

    Every path is a path in the sandbox; relative ones start at the workspace, and `~` is the agent's home. Methods
    raise `BackendError` if the sandbox is lost: the rollout is then left out or retried, whatever the reward returns.

    In an `async def` its methods are awaited. In a plain `def`, which runs in a thread of its own, they block.
    """

    runs: ClassVar[Runs] = staticmethod(as_it_is)
    """Gives a coroutine of the environment in the form in which it can call the methods."""

    def __init__(
        self,
        task_id: str | ToolSession,
        registry: ToolRegistry | None = None,
        *,
        open_verifier: Callable[..., ToolSession] | None = None,
        shared: SharedState | None = None,
    ) -> None:
        """Raises `NoOpenRun`: there is no run that the task can belong to.

        Args:
            task_id: the session of a rollout, or the id of a task in an open run. A task without a session gets one,
                which `cleanup` or the end of the run removes.
            registry: the tools of `call_tool`; the run's tools if `task_id` is an id.
            open_verifier: gives `seal` a second session, like the agent's own at its start; with `spec=`, one with
                that specification.
        """
        self.missing: tuple[str, ...] = ()
        """Of the paths given to `seal`: those that the agent left nothing at."""
        self.refused: Mapping[str, str] = {}
        """Of the paths given to `seal`: those that were not taken along, with the reason."""
        self._run: OpenRun | None = None
        loop = None
        if isinstance(task_id, ToolSession):
            session = task_id
            with contextlib.suppress(RuntimeError):
                loop = asyncio.get_running_loop()
        else:
            self._run = run = open_run(task_id)
            session, loop = run.session(task_id), run.loop
            registry = registry or run.registry
            verifier, own = f"{task_id}-verifier", run.spec
            open_verifier = open_verifier or (lambda spec=None: run.sessions.open(verifier, spec=spec or own(task_id)))
        self._session = session
        self._registry = registry or BUILTIN_TOOLS
        self.shared = shared or session.state(SharedState)
        """What the contexts of the rollout have in common."""
        if session not in self.shared.sessions:
            self.shared.sessions.append(session)
        self.session: Any = self.shared.sessions[0].rollout_session
        """What the environment's `session(item)` yielded; None if it has no such method."""
        self._is_verifier = shared is not None and open_verifier is None and not shared.before_agent
        self._calls = ContextCalls(session, self.shared, loop, blamed, in_verifier=self._is_verifier)
        self._sealing = Sealing(session, self.shared, open_verifier)
        if (scope := current_scope() or self.shared.scope) is not None:
            self.enter(scope)

    def __await__(self) -> Generator[Any, Any, Self]:
        yield from ()
        return self  # what `seal` gives may be awaited, like every result

    @property
    def task_id(self) -> str:
        return self._session.task_id

    @property
    def failure(self) -> BackendError | None:
        """The first failure of the infrastructure that a method met."""
        return self.shared.failure

    @property
    def seconds_inside(self) -> float:
        """Seconds that calls spent inside, without the time for starting sandboxes."""
        return self.shared.inside

    def repeat(self) -> None:
        """The reward is called again: `seal` of the same paths gives the same verifier."""
        self.shared.repeated = True

    def at_fault(self, fault: AgentFault) -> bool:
        """Whether the agent of this context's rollout is the one at fault."""
        return fault.place is self.shared

    @property
    def calls(self) -> tuple[RewardCall, ...]:
        """The reward's own calls so far, without the agent's."""
        return tuple(self.shared.calls)

    def enter(self, scope: CallScope) -> None:
        """Assign all further calls, including those from threads, to `scope`."""
        self.shared.scope = scope

    def _given(self, method: str, what: str, make: Callable[[], Any], scope: CallScope | None) -> Any:
        """What a call of a method gives: see `result_of`."""
        return result_of(what, make, self._calls.loop, scope)

    @context_method
    async def terminal(
        self, command: str, timeout: float = 180, *, env: Mapping[str, str] | None = None, check: bool = False
    ) -> DictReply:
        """Run `command` in the workspace; `{"output", "exit_code", "error"}`, stdout before stderr in `output`.

        Every call starts in the workspace with the sandbox's initial variables and those of `env`, whatever the agent's
        own `cd` and `export` did. A command that takes longer than `timeout` seconds is killed and has exit code 124
        and an `error`. Output of more than `MAX_TERMINAL_OUTPUT` bytes loses its middle and also sets `error`. With
        `check`, for the environment's own commands, a nonzero exit code is a `RewardError`.
        """
        sandbox = await self._sandbox()
        command = acceptable(command, "command")
        done = await sandbox.exec(command, timeout=timeout, env=env, fresh=True, max_output=MAX_TERMINAL_OUTPUT)
        reply = DictReply.of_command(done, timeout)
        if check and done.exit_code != 0:
            raise failed_command(command, reply)
        return reply

    @context_method
    async def read_file(self, path: str, default: str | None = "") -> FileText:
        """The whole text of a file; `default` if there is no readable file, or an error if `default` is None.
        A pipe, a cycle of links, a file without permissions or of more than 256 MiB is the agent's doing."""
        try:
            return FileText((await self._bytes(path)).decode(errors="replace"))
        except OSError as error:
            if default is None:
                raise
            return FileText.missing(default, error)

    @context_method
    async def read_text(self, path: str, default: str = "") -> Text:
        """The text of a file, whatever the agent left at `path`; `default` where it is not a file that can be read.
        UTF-8, or UTF-16 and UTF-32 with a byte order mark, which is left out. What is not a character becomes U+FFFD.
        """
        try:
            return Text(decoded(await self._bytes(path)))
        except OSError:
            return Text(default)

    @context_method
    async def read_json(self, path: str, type: Any = Any, *, default: Any = _RAISE) -> Any:
        """The JSON value in a file, of a type: `dict[str, int]`, a model of pydantic, a `TypedDict`, `Literal[1, 2]`.

        It is read strictly: the text "42" is not an `int`, and NaN, infinity and numbers beyond a float are not
        numbers. The type of a number that is compared is `int` or `float`.

        Raises:
            AgentFault: there is no file, or no such value in it, and no `default`. The rollout gets
                `score_of_agent_fault`.
        """
        adapter = adapter_of(type)
        try:
            return await parsed(await self._bytes(path), adapter, path)
        except OSError:
            if default is _RAISE:
                raise
            return default

    @context_method
    async def read_bytes(self, path: str) -> Data:
        return Data(await self._bytes(path))

    @context_method
    async def write_file(self, path: str, content: str | bytes) -> DictReply:
        """Write a whole file, creating missing parent folders. Half of a surrogate pair in text becomes `?`."""
        data = content.encode(errors="replace") if isinstance(content, str) else content
        sandbox, inside = await self._sandbox(), await self._path(path)
        await self._put(partial(sandbox.write_bytes, inside, data), lambda: [("f", inside)])
        return DictReply.written(len(data))

    @context_method
    async def upload_file(self, local_path: str | Path, remote_path: str) -> DictReply:
        """Copy a file of this machine into the sandbox, byte for byte, in constant memory."""
        local = Path(local_path)
        sandbox, inside = await self._sandbox(), await self._path(remote_path)
        await self._put(lambda: sandbox.write_chunks(inside, chunks(local)), lambda: [("f", inside)])
        return DictReply.written(local.stat().st_size)

    @context_method
    async def download_file(
        self, remote_path: str, local_path: str | Path, *, max_bytes: int | None = MAX_DOWNLOAD
    ) -> DictReply:
        """Copy a file out of the sandbox, byte for byte, in constant memory. Replaces `local_path` when it is complete.

        A file larger than `max_bytes` (sparse files count in full) is an error and leaves nothing behind; None means
        that only the disk limits it.
        """
        chunks = (await self._sandbox()).read_chunks(await self._path(remote_path))
        return DictReply.written(await write_local(Path(local_path), chunks, max_bytes))

    @context_method
    async def upload_dir(self, local_dir: str | Path, remote_dir: str) -> Replies:
        """Copy a folder of this machine, with everything below it, into the sandbox; one reply for each file."""
        sandbox, inside = await self._sandbox(), await self._path(remote_dir)
        await self._put(lambda: sandbox.upload_dir(local_dir, inside), lambda: members(Path(local_dir), inside))
        return await in_own_thread(files_below, Path(local_dir))

    @context_method
    async def download_dir(
        self, remote_dir: str, local_dir: str | Path, *, max_bytes: int | None = MAX_DOWNLOAD
    ) -> Replies:
        """Copy a folder out of the sandbox; one reply for each file in `local_dir` then.

        Only files, folders, and links between them are copied: no pipes, sockets, broken links or link cycles. Members
        that would end up outside `local_dir`, more than `max_bytes` (as in `download_file`), more than 2^17 files and
        folders, or more than 256 levels are an error and leave nothing behind.
        """
        await (await self._sandbox()).download_dir(await self._path(remote_dir), local_dir, max_bytes=max_bytes)
        await in_own_thread(remove_dead_links, Path(local_dir))
        return await in_own_thread(files_below, Path(local_dir))

    @context_method
    async def real_path(self, path: str) -> Text:
        """The absolute path without symbolic links, even if nothing is there, resolved without a program inside."""
        return Text((await (await self._sandbox()).stat(await self._path(path))).path)

    async def pace(self) -> Pace:
        """How much of a CPU a program gets here now. Not reliable in a sandbox where an agent was root."""
        return await pace(await self._sandbox(), self._session.cpus)

    async def pace_without_agent(self) -> Pace | None:
        """The same in a fresh sandbox, after all in the others of the rollout is killed; None without one."""
        return await pace_without_agent(self.shared.sessions)

    @context_method
    async def search(self, query: str, path: str = ".") -> DictReply:
        """Lines of files below `path` that match the regular expression `query`, as the tool `search_files` does."""
        return await self._tool_reply("search_files", {"pattern": query, "path": path})

    @context_method
    async def web_search(self, query: str, limit: int = 5) -> DictReply:
        return await self._tool_reply("web_search", {"query": query, "limit": limit})

    @context_method
    async def web_extract(self, urls: list[str]) -> DictReply:
        return await self._tool_reply("web_extract", {"urls": urls})

    @context_method
    async def browser_navigate(self, url: str) -> DictReply:
        return await self._tool_reply("browser_navigate", {"url": url})

    @context_method
    async def browser_snapshot(self) -> DictReply:
        return await self._tool_reply("browser_snapshot", {})

    @context_method
    async def call_tool(
        self, tool_name: str = "", arguments: Mapping[str, Any] | None = None, *, name: str = "", args: Any = None
    ) -> Text:
        """Call a tool as the agent does. The text says if it failed, or there is none; `name`, `args` are aliases."""
        return Text((await self._tool(tool_name or name, arguments or args or {})).content)

    async def _tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        self._sealing.require_open()
        return await call_tool(name, arguments, self._session, registry=self._registry)

    async def _tool_reply(self, name: str, arguments: Mapping[str, Any]) -> DictReply:
        return DictReply.of_tool(await self._tool(name, arguments), name, self._registry)

    @context_method
    async def seal(
        self,
        paths: Iterable[str],
        *,
        allow: Iterable[str] = (),
        max_bytes: int = MAX_ARTIFACT,
        spec: SandboxSpec | None = None,
        exactly: bool = False,
        ends: bool = True,
    ) -> Self:
        """Copy the agent's files at `paths` into a fresh sandbox, and end the agent's own sandbox.

        First everything that runs in the agent's sandbox is killed; then the files and folders at `paths` are copied
        out, the sandbox is removed, and a new one is created from the same base with the copies at the same paths. The
        agent has never seen what the reward puts there, such as tests, and none of its processes run there. This
        context rejects later calls: continue with the returned one. Its `missing` and `refused` are not copied.

        Args:
            paths: files or folders in the workspace or the home folder; relative ones start at the workspace.
            allow: absolute paths of other files and folders that may be in `paths`, with everything below them. Paths
                elsewhere are refused, because the programs that the reward relies on are there.
            max_bytes: limit of all artifacts together; artifacts that do not fit are refused.
            spec: the specification of the new sandbox, if it should differ from the agent's.
            exactly: whether folders contain nothing else afterwards, and missing paths are removed. A folder with links
                that lead out of it is copied without them and listed in `refused`.
            ends: False keeps the agent's sandbox, without its processes, for a later step of the same task. Call
                `cleanup` of the returned context before the next `seal`.
        """
        seal = partial(self._sealing.seal, allow=allow, exactly=exactly, ends=ends)
        return await seal(self._verifier, paths, max_bytes, spec)

    @context_method
    async def untouched(self, *, spec: SandboxSpec | None = None) -> Self:
        """A fresh sandbox as in `seal`, without any of the agent's files: a failure there is not the agent's doing.
        Call `cleanup` of the sealed context before, and `cleanup` of the returned context before the next `seal`."""
        return self._verifier(self._sealing.opened(spec))

    def _like_this(self, session: ToolSession) -> Self:
        return type(self)(session, self._registry, shared=self.shared, open_verifier=self._sealing.open_verifier)

    def _verifier(self, session: ToolSession) -> Self:
        return type(self)(session, self._registry, shared=self.shared)

    @context_method
    async def judge_pytest(
        self,
        sources: Iterable[str],
        tests: Mapping[str, str | bytes | Path] | None = None,
        *,
        expect: Sequence[str],
        python: str = "python3",
        args: Sequence[str] = (),
        timeout: float = 120,
        rounds: int = 1,
        allow: Iterable[str] = (),
        max_bytes: int = MAX_ARTIFACT,
    ) -> Judgement:
        """Run a pytest suite on the agent's files at `sources`, and detect whether the outcomes are forged.

        Ends the agent's sandbox as `seal` does. Every test runs in two fresh sandboxes, once unchanged and once changed
        so that a right solution fails it, in an order that the code under test cannot know. `Judgement.fraction` is a
        score.

        Args:
            sources: files and folders that the agent was to write, as in `seal`. In the fresh tree, a folder is
                replaced as a whole, and files that the agent removed are removed.
            tests: by path in the workspace, the text of files that are written over the tree, or a local file. Other
                files of `expect` come from the fresh tree.
            expect: ids of the tests that must pass, such as `tests/test_add.py::test_add[1-2]`, relative to the
                workspace. Skipped, deselected, missing, erroneous and xfailed tests have not passed.
            python: shell text that runs a Python with pytest; ` -` is appended.
            args, timeout: extra arguments for pytest; limit of one run in seconds.
            rounds: number of repetitions; more of them help against code that guesses at random.
            allow, max_bytes: as in `seal`.

        Raises:
            RewardError: pytest is missing, a file is missing or cannot be read, or an id is wrong: an error of the
                environment.
        """
        judge = tests or {}, expect, python, args, timeout
        return await self._sealing.judged(sources, max_bytes, *judge, allow=allow, rounds=rounds)

    @context_method
    async def cleanup(self) -> DictReply:
        """Release the sandbox early. Called for you after the reward."""
        if self._run is not None:
            await self._run.sessions.close(self.task_id)
        await self._session.close()
        return DictReply(success=True)

    async def _sandbox(self) -> Sandbox:
        self._sealing.require_open()
        return await self._session.sandbox()

    async def _bytes(self, path: str) -> bytes:
        return await (await self._sandbox()).read_bytes(await self._path(path))

    async def _path(self, path: str) -> str:
        return await self._session.path(acceptable(path, "path"))

    async def _put(self, write: Callable[[], Awaitable[None]], wanted: Callable[[], Iterable[tuple[str, str]]]) -> None:
        if self._is_verifier:
            from lachesis.tool_context.artifacts import placed

            write = partial(placed, await self._sandbox(), write, wanted)
        await write()
