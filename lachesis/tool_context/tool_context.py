"""The sandbox that the agent worked in, for its reward, before it is released."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from backends import MAX_DOWNLOAD, BackendError, Sandbox, SandboxSpec
from backends.plugins import Registry, UnknownPlugin
from backends.tasks import in_own_thread
from lachesis.loop.judgement import Judgement
from lachesis.loop.open_runs import OpenRun, open_run
from lachesis.rewards.agent_fault import AgentFault
from lachesis.rewards.call_scope import CallScope, Runs, as_it_is, current_scope
from lachesis.rewards.calls import result_of, running_loop
from lachesis.rewards.reward import RewardError
from lachesis.tool_context.context_calls import RewardCall, SharedState, context_method
from lachesis.tool_context.context_results import Data, DictReply, FileText, Replies, Text
from lachesis.tool_context.file_copies import chunks, files_below, members, remove_dead_links, write_local
from lachesis.tool_context.pace import OwnTime, Pace, pace
from lachesis.tool_context.parsed_files import read_json, read_text
from lachesis.tool_context.placing import placed
from lachesis.tool_context.sealing import MAX_ARTIFACT, Sealed, taken
from lachesis_tools import BUILTIN_TOOLS, ToolRegistry, ToolResult, ToolSession, call_tool

__all__ = ["RewardCall", "ToolContext"]

JUDGES: Registry[Callable[..., Any]] = Registry("judge", "lachesis.judges", {}, package="lachesis-envs")
"""`pytest` is what `judge_pytest` uses: lachesis-envs has it."""
MAX_TERMINAL_OUTPUT = 10_000_000
"""Bytes of output that `terminal` hands to a reward; the model's own limit is smaller and does not apply here."""


class ToolContext:
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
        """
        Args:
            task_id: the session of a rollout, or the id of a task in an open run. A task without a session gets one,
                which `cleanup` or the end of the run removes.
            registry: the tools of `call_tool`; the run's tools if `task_id` is an id.
            open_verifier: gives `seal` a second session, like the agent's own at its start; with `spec=`, one with
                that specification.

        Raises:
            NoOpenRun: there is no run that the task can belong to.
        """
        self.missing: tuple[str, ...] = ()
        """Of the paths given to `seal`: those that the agent left nothing at."""
        self.refused: Mapping[str, str] = {}
        """Of the paths given to `seal`: those that were not taken along, with the reason."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._run: OpenRun | None = None
        if isinstance(task_id, ToolSession):
            self._session = task_id
            with contextlib.suppress(RuntimeError):
                self._loop = asyncio.get_running_loop()
        else:
            self._run = run = open_run(task_id)
            self._session = run.session(task_id)
            self._loop = run.loop
            registry = registry or run.registry
            verifier, own = f"{task_id}-verifier", run.spec
            open_verifier = open_verifier or (lambda spec=None: run.sessions.open(verifier, spec=spec or own(task_id)))
        self._registry = registry or BUILTIN_TOOLS
        self._open_verifier = open_verifier
        self._shared = shared or self._session.state(SharedState)
        if self._session not in self._shared.sessions:
            self._shared.sessions.append(self._session)
        self._is_verifier = shared is not None and not shared.before_agent
        self._has_run = False
        if (scope := current_scope() or self._shared.scope) is not None:
            self.enter(scope)
        self._sealed = False
        self._sealed_into: tuple[list[str], ToolContext] | None = None
        self._judged: Judgement | None = None

    def __await__(self) -> Generator[Any, Any, ToolContext]:
        yield from ()
        return self  # what `seal` gives may be awaited, like every result

    @property
    def task_id(self) -> str:
        return self._session.task_id

    @property
    def session(self) -> Any:
        """What the environment's `session(item)` yielded for this rollout; None if it has no such method."""
        return self._shared.sessions[0].rollout_session

    @property
    def failure(self) -> BackendError | None:
        """The first failure of the infrastructure that a method met."""
        return self._shared.failure

    @property
    def seconds_inside(self) -> float:
        """Seconds that calls spent inside, without the time for starting sandboxes."""
        return self._shared.inside

    def repeat(self) -> None:
        """The reward is called again: `seal` of the same paths gives the same verifier."""
        self._shared.repeated = True

    def forget_calls(self, count: int) -> None:
        """Forget all calls but the first `count`, which were not part of the reward."""
        del self._shared.calls[count:]

    def at_fault(self, fault: AgentFault) -> bool:
        """Whether the agent of this context's rollout is the one at fault."""
        return fault.place is self._shared

    @property
    def calls(self) -> tuple[RewardCall, ...]:
        """The reward's own calls so far, without the agent's."""
        return tuple(self._shared.calls)

    def enter(self, scope: CallScope) -> None:
        """Assign all further calls, including those from threads, to `scope`."""
        self._shared.scope = scope

    def _scope(self) -> CallScope | None:
        """What a call belongs to. A thread that a reward left behind still belongs to it."""
        scope = current_scope() or self._shared.scope
        left = scope is not None and scope.over and scope is not current_scope()
        return None if left and running_loop() is not None else scope

    def _given(self, method: str, what: str, make: Callable[[], Any], scope: CallScope | None) -> Any:
        """What a call of a method gives: see `result_of`."""
        return result_of(what, make, self._loop, scope)

    @context_method
    async def terminal(
        self, command: str, timeout: float = 180, *, env: Mapping[str, str] | None = None, check: bool = False
    ) -> DictReply:
        """Run `command` in the workspace; `{"output", "exit_code", "error"}`, stdout before stderr in `output`.

        Every call starts in the workspace with the sandbox's initial variables and those of `env`, whatever the agent's
        own `cd` and `export` did. A command that takes longer than `timeout` seconds is killed and has exit code 124
        and an `error`. Output of more than `MAX_TERMINAL_OUTPUT` bytes loses its middle and also sets `error`. With
        `check`, a nonzero exit code is a `RewardError`, an error of the environment: use it for the environment's own
        commands.
        """
        _require_characters(command, "command")
        sandbox = await self._sandbox()
        done = await sandbox.exec(command, timeout=timeout, env=env, fresh=True, max_output=MAX_TERMINAL_OUTPUT)
        problems = [f"the command took longer than {timeout:g} s"] if done.timed_out else []
        for stream, elided in (("stdout", done.stdout_elided), ("stderr", done.stderr_elided)):
            problems += [f"{elided} bytes are missing in the middle of {stream}"] if elided else []
        output = (done.stdout + done.stderr).decode(errors="replace")
        if check and done.exit_code != 0:
            # The last line mostly says why, and is the headline; the others follow, without the one that is cut.
            lines = output[-500:].strip().splitlines()[int(len(output) > 500) :] or [output[-500:]]
            ended = f"{command!r} ended with exit code {done.exit_code}: {'; '.join([*problems, *lines[-1:]])}"
            raise RewardError("\n".join([ended, *(lines if len(lines) > 1 else [])]))
        reply = DictReply(output=output, exit_code=done.exit_code, error="; ".join(problems) or None)
        reply.late = OwnTime(done.duration, done.waited) if done.timed_out else None
        return reply

    @context_method
    async def read_file(self, path: str, default: str | None = "") -> FileText:
        """The whole text of a file; `default` if there is no readable file, or an error if `default` is None.

        A pipe, a cycle of links, a file without permissions or of more than 256 MiB is the agent's doing, and not a
        failure of the environment.
        """
        try:
            data = await (await self._sandbox()).read_bytes(await self._path(path))
        except OSError as error:
            if default is None:
                raise
            return FileText.missing(default, error)
        return FileText(data.decode(errors="replace"))

    read_text = read_text
    read_json = read_json

    @context_method
    async def read_bytes(self, path: str) -> Data:
        return Data(await (await self._sandbox()).read_bytes(await self._path(path)))

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

        Only files, folders, and links between them are copied: no pipes, sockets, broken links or link cycles.

        Rejects members that would end up outside `local_dir`. A folder with more than `max_bytes` (sparse files count
        in full) is an error and leaves nothing behind; None means that only the disk limits it. So is a folder with
        more than 2^17 files and folders, or with more than 256 levels.
        """
        await (await self._sandbox()).download_dir(await self._path(remote_dir), local_dir, max_bytes=max_bytes)
        await in_own_thread(remove_dead_links, Path(local_dir))
        return await in_own_thread(files_below, Path(local_dir))

    @context_method
    async def real_path(self, path: str) -> Text:
        """The absolute path without symbolic links, even if nothing is there, resolved without a program inside."""
        return Text((await (await self._sandbox()).stat(await self._path(path))).path)

    @context_method
    async def stop_processes(self) -> DictReply:
        """Kill everything that the agent and earlier calls left running."""
        await (await self._sandbox()).stop_processes()
        return DictReply(success=True)

    async def pace(self) -> Pace:
        """How much of a CPU a program gets here now. Not reliable in a sandbox where an agent was root."""
        return await pace(await self._sandbox(), self._session.cpus)

    async def waited_for_cpu(self) -> float | None:
        """Seconds so far in which others had the CPUs that the reward's commands could have used; None if unknown."""
        found = [await session.waited_for_cpu() for session in self._shared.sessions]
        return None if None in found else sum(each or 0.0 for each in found)

    async def pace_without_agent(self) -> Pace | None:
        """The same in a fresh sandbox, after everything in the others of the rollout is killed; None without one."""
        left = [session for session in self._shared.sessions if not session.closed]
        if not left:
            return None
        for session in left:
            if session.started:
                with contextlib.suppress(BackendError):  # then nothing runs there either
                    await (await session.sandbox()).stop_processes()
        fresh = left[-1].another()
        try:
            return await pace(await fresh.sandbox(), fresh.cpus)
        finally:
            await fresh.close()

    @context_method
    async def search(self, query: str, path: str = ".") -> DictReply:
        """Lines of files below `path` that match the regular expression `query`, as the tool `search_files` does."""
        return await self._tool_reply("search_files", {"pattern": query, "path": path})

    @context_method
    async def web_search(self, query: str) -> DictReply:
        return await self._tool_reply("web_search", {"query": query})

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
        """Call a tool as the agent does. The text says if the tool failed or does not exist.

        `name` and `args` are aliases of the first two parameters.
        """
        return Text((await self._tool(tool_name or name, arguments or args or {})).content)

    async def _tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        self._require_open()
        return await call_tool(name, arguments, self._session, registry=self._registry)

    async def _tool_reply(self, name: str, arguments: Mapping[str, Any]) -> DictReply:
        """What a tool answers, which is JSON where it succeeded."""
        result = await self._tool(name, arguments)
        try:
            value = json.loads(result.content)
        except ValueError:
            value = result.content
        reply = DictReply(value) if isinstance(value, dict) else DictReply(output=value)
        if result.error is not None:
            reply.setdefault("error", result.error)
        return reply

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
    ) -> ToolContext:
        """Copy the agent's files at `paths` into a fresh sandbox, and end the agent's own sandbox.

        First everything that runs in the agent's sandbox is killed; then the files and folders at `paths` are copied
        out, the sandbox is removed, and a new one is created from the same base with the copies at the same paths. The
        agent has never seen files that the reward puts there afterwards, such as tests, and none of its processes run
        there. This context rejects every later call; continue with the returned one. Its `missing` and `refused` name
        the paths that were not copied; the reward decides how to score them.

        Args:
            paths: files or folders in the workspace or the home folder; relative ones start at the workspace.
            allow: absolute paths of other files and folders that may be in `paths`, with everything below them. Paths
                elsewhere are refused, because the programs that the reward relies on are there.
            max_bytes: limit of all artifacts together; artifacts that do not fit are refused.
            spec: the specification of the new sandbox, if it should differ from the agent's.
            exactly: whether the folders at `paths` contain nothing else afterwards, and missing paths are removed. A
                folder with links that lead out of it is copied without them and listed in `refused`.
            ends: False keeps the agent's sandbox, without its processes, for a later step of the same task. Call
                `cleanup` of the returned context before the next `seal`.

        Raises:
            BackendError: a sandbox failed, as in any method.
        """
        wanted = [paths] if isinstance(paths, str) else list(dict.fromkeys(paths))
        if self._shared.repeated and self._sealed_into is not None and self._sealed_into[0] == wanted:
            return self._sealed_into[1]
        self._require_open()
        if self._open_verifier is None:
            raise Sealed("this context already belongs to a verifier sandbox; it cannot be sealed again")
        async with taken(self._session, wanted, max_bytes, partly=exactly) as artifacts:
            if ends:
                self._sealed = True
                await self._session.close()
            opened = self._open_verifier() if spec is None else self._open_verifier(spec=spec)
            verifier = type(self)(opened, self._registry, shared=self._shared)
            await artifacts.place(verifier._session, allow, exactly=exactly)
        verifier.missing, verifier.refused = tuple(artifacts.missing), artifacts.refused
        self._sealed_into = (wanted, verifier) if ends else None
        return verifier

    @context_method
    async def untouched(self, *, spec: SandboxSpec | None = None) -> ToolContext:
        """A fresh sandbox as in `seal`, without any of the agent's files: a failure there is not the agent's doing.

        Call `cleanup` of the sealed context before, and `cleanup` of the returned context before the next `seal`.
        """
        if self._open_verifier is None:
            raise Sealed("this context already belongs to a verifier sandbox; ask the agent's own")
        opened = self._open_verifier() if spec is None else self._open_verifier(spec=spec)
        return type(self)(opened, self._registry, shared=self._shared)

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
            args: extra arguments for pytest.
            timeout: limit of one run in seconds.
            rounds: number of repetitions; more of them help against code that guesses at random.
            allow, max_bytes: as in `seal`.

        Raises:
            RewardError: pytest is missing, a file is missing or cannot be read, or an id is wrong: an error of the
                environment.
            BackendError: a sandbox failed, as in any method.
        """
        if self._shared.repeated and self._judged is not None:
            return self._judged
        self._require_open()
        if self._open_verifier is None:
            raise Sealed("this context already belongs to a verifier sandbox; judge the agent's own")
        open_verifier = self._open_verifier

        def opened() -> ToolSession:
            self._shared.sessions.append(open_verifier())
            return self._shared.sessions[-1]

        try:
            judge = JUDGES.load("pytest")(tests or {}, expect, python, args, timeout, opened)
        except UnknownPlugin as error:
            raise RewardError(f"judge_pytest: {error}") from error
        async with taken(self._session, sources, max_bytes) as artifacts:
            self._sealed = True
            await self._session.close()
            self._judged = await judge.judge(artifacts, allow=allow, rounds=rounds)
        return self._judged

    @context_method
    async def cleanup(self) -> DictReply:
        """Release the sandbox early. Called for you after the reward."""
        if self._run is not None:
            await self._run.sessions.close(self.task_id)
        await self._session.close()
        return DictReply(success=True)

    def _require_open(self) -> None:
        if self._sealed:
            raise Sealed(f"the agent's sandbox of {self.task_id} is sealed; use the context that seal() returned")

    async def _sandbox(self) -> Sandbox:
        self._require_open()
        return await self._session.sandbox()

    async def _path(self, path: str) -> str:
        if "\0" in path:
            raise AgentFault(errno.EINVAL, "a path cannot contain a NUL character", path)
        _require_characters(path, "path")
        return await self._session.path(path)

    async def _put(self, write: Callable[[], Awaitable[None]], wanted: Callable[[], Iterable[tuple[str, str]]]) -> None:
        await (placed(await self._sandbox(), write, wanted) if self._is_verifier else write())


def _require_characters(text: str, what: str) -> None:
    """Raises `AgentFault` for half of a surrogate pair: the model can write one, and nothing inside can take it."""
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise AgentFault(errno.EILSEQ, f"half of a surrogate pair in a {what} is not a character") from None
