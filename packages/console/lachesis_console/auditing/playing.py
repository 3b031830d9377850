"""Plays rollouts of one environment with scripted policies: one start of it, any number of rollouts."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import io
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stderr, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from backends.errors import SettingsError
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.figures.item_keys import item_digest
from lachesis.loop.rollout import Rollout
from lachesis.runs.command_line import read_settings
from lachesis.runs.group_player import play_item
from lachesis.runs.reference_policy import Policy
from lachesis.settings.hooks import misspelt_hooks, of_hook
from lachesis.settings.server_settings import ServerConfigError
from lachesis.tracebacks import in_one_line
from lachesis_console.auditing.policies import text_of
from lachesis_console.auditing.records import (
    AuditPlay,
    EnvironmentFacts,
    answer_field,
    cut_field,
    not_offered,
    shortened,
)
from lachesis_console.replaced import with_methods
from lachesis_messages.messages import Message
from lachesis_tools import BUILTIN_TOOLS

NO_REFERENCE = "there is no reference_policy()"
NO_SOLUTION = "it has no solution for this item"
_LOOKS = frozenset({"terminal", "read_file", "read_bytes", "search", "call_tool", "download_file", "download_dir"})
"""Methods of `ctx` that read the agent's files in the agent's sandbox."""
SCANNED = 400
"""Items that are read beyond those that are played, to find duplicates."""
_NAMES = frozenset({"id", "uid", "uuid", "idx", "index", "split", "item_id", "task_id", "name", "subset", "partition"})
"""Fields by which equal items may differ."""
_SCANNING = 5.0
"""Seconds for that."""


class NoSolution(SettingsError):
    """The environment has none, or none for this item."""


@dataclass(slots=True)
class _Playing:
    """Who answers in a rollout."""

    policy: Policy
    unsolved: bool = False
    """It is a reference policy that knows no solution of the item."""


class Stage:
    """One start of an environment.

    Args:
        seconds: the longest time of a rollout; a longer one is cancelled.
        began: called with each rollout before it is played.
        finished: called with each rollout that was played.
    """

    def __init__(
        self,
        env_cls: type[HermesAgentBaseEnv],
        flags: Sequence[str],
        *,
        seconds: float | None = None,
        began: Callable[[int, str, str], None] = lambda item, policy, block: None,
        finished: Callable[[AuditPlay], None] = lambda play: None,
    ) -> None:
        self.facts = EnvironmentFacts(name=env_cls.name or env_cls.__name__, misspelt=misspelt_hooks(env_cls))
        self.plays: list[AuditPlay] = []
        self.items: list[Any] = []
        self._seconds, self._began, self._finished = seconds, began, finished
        self._playing: ContextVar[_Playing | None] = ContextVar("playing", default=None)
        self._latest: _Playing | None = None
        chosen = {"openai.model_name": "reference", "env.group_size": 1, "env.use_wandb": False}
        if not any("max_infra_retries" in flag for flag in flags):
            chosen["env.max_infra_retries"] = 0
        given = [*flags, *(f"--{name}={value}" for name, value in chosen.items())]
        said = io.StringIO()
        try:
            with redirect_stderr(said):
                _, self._settings = read_settings(env_cls, ["process", *given], prog="lachesis audit")
        except SystemExit:  # of a flag that no setting has: it is not the environment that ends the process
            raise SettingsError(said.getvalue().strip().partition("error: ")[2]) from None
        self._env_cls = env_cls

    @asynccontextmanager
    async def started(self, count: int) -> AsyncIterator[Stage]:
        """The environment is set up, and its first `count` items are read."""
        spent: dict[str, list[float]] = {"setup": [], "setup_sandbox": []}
        cls = self._env_cls
        own = [name for name in spent if getattr(cls, name) is not getattr(HermesAgentBaseEnv, name)]
        timed = {name: _timed(cls, name, spent[name]) for name in own}
        self.env = env = with_methods(cls, reference_policy=lambda env: self._answer, **timed)(**self._settings)
        env.console = Console(emoji=False, file=io.StringIO())
        self._reference = cls.reference_policy
        async with env.running():
            self.facts.started = time.time()
            self.facts.memory = resident()
            await self._read(count)
            yield self
            self.facts.setup = {name: max(times) for name, times in spent.items() if times}

    async def _read(self, count: int) -> None:
        """Read the items, and what can be known of them before they are played."""
        env, facts = self.env, self.facts
        facts.has_walls = env.config.terminal_backend != "local" or env.config.sandbox != "none"
        if callable(versions := getattr(env, "versions", None)):
            facts.versions = dict(await of_hook(versions()))
        facts.settings = {
            "terminal_backend": env.config.terminal_backend,
            "max_agent_turns": env.config.max_agent_turns,
        }
        declared = getattr(env, "reward_range", None)
        if isinstance(declared, tuple) and len(declared) == 2:
            facts.reward_range = (float(declared[0]), float(declared[1]))
        self.items = []
        for _ in range(count):
            item = await of_hook(env.get_next_item())
            if item is None:
                break
            self.items.append(item)
            facts.digests.append(item_digest(item))
            facts.items.append(shortened(json.dumps(item, ensure_ascii=False, default=str), 300))
            facts.answers.append(answer_field(item))
            prompt = self._scanned(item)[2]
            values = map(str, item.values()) if isinstance(item, Mapping) and prompt else ()
            facts.secrets.append([value for value in values if 1 < len(value) < 60 and value not in prompt])
            self._read_tools(item)
        if not self.items:
            raise SettingsError(f"{env.run_name} has no items: get_next_item returned None at its first call")
        facts.has_turns = env.follow_up is not None or any(facts.tools)
        own = type(env)
        facts.prepares = any(
            getattr(own, name) is not getattr(HermesAgentBaseEnv, name) for name in ("sandbox_files", "setup_sandbox")
        )

    def _read_tools(self, item: Any) -> None:
        tools = [*self.env.group_tools(f"item{len(self.facts.tools)}")[1]]
        self.facts.has_shell |= any(tool["function"]["name"] == "terminal" for tool in tools)
        with suppress(Exception):  # every rollout says so
            tools += [tool.definition() for tool in self.env.tools_for(item) if tool.offered]
        self.facts.tools.append(tools)

    async def scan(self) -> None:
        """Read further items, and those of evaluations. Call it last: `items` then has more of them."""
        until = time.monotonic() + _SCANNING
        self.facts.cut.clear()
        self.facts.not_offered.clear()
        self.facts.scanned += map(self._scanned, self.items)
        with suppress(Exception):  # what is broken shows at those that are played
            while len(self.facts.scanned) < SCANNED and time.monotonic() < until:
                if (item := await of_hook(self.env.get_next_item())) is None:
                    break
                self.facts.scanned.append(self._scanned(item))
                self._read_tools(item)
                self.items.append(item)
        if self._env_cls.get_eval_items is not HermesAgentBaseEnv.get_eval_items:
            with suppress(Exception):
                items = await of_hook(self.env.get_eval_items())
                self.facts.evaluation += map(self._scanned, items[:SCANNED])

    def _scanned(self, item: Any) -> tuple[str, str, str]:
        prompt = ""
        with suppress(Exception):  # it may need a session
            prompt = _prompt(self.env.initial_messages(item))
        if isinstance(item, Mapping) and (cut := cut_field(item, prompt)):
            self.facts.cut.append(f"item {item_digest(item)[:8]}: {cut}")
        if isinstance(item, Mapping) and (odd := not_offered(item)):
            self.facts.not_offered.append(f"item {item_digest(item)[:8]}: {odd} is not among its choices")
        content = {k: v for k, v in item.items() if k not in _NAMES} if isinstance(item, Mapping) else item
        return item_digest(item), item_digest(content) if content else "", prompt

    def reference(self) -> Policy:
        """The environment's reference policy.

        Raises:
            NoSolution: there is none.
            ServerConfigError: it is no function.
        """
        try:
            found = self._reference(self.env)
        except SettingsError as error:
            raise NoSolution(str(error)) from error
        if found is None:
            raise NoSolution(NO_REFERENCE)
        if not callable(found):
            raise ServerConfigError(
                f"reference_policy() returned {found!r:.80}, which is not a function; return one that takes "
                "messages and tools, and returns a Message"
            )
        return found

    async def play(self, item: int, policy: str, scripted: Policy | None, block: str = "first") -> AuditPlay:
        """Play a rollout; `scripted` None is the environment's reference policy.

        Raises:
            UnusableSettings: no rollout can be scored with these settings.
            NoSolution: there is none.
        """
        self._began(item, policy, block)
        play = AuditPlay(item, policy, block, began=time.time())
        scripted = scripted or self.reference()
        self._latest = playing = _Playing(scripted)
        started = time.monotonic()
        deadline = asyncio.timeout(self._seconds)
        size = 2 if self.env.compute_group_reward is not None else 1
        token = self._playing.set(playing)
        before, numbers = item_digest(self.items[item]), random.getstate()
        try:
            async with deadline:
                groups = await play_item(self.env, self.items[item], f"item{item}", size=size)
            rollout = groups[0].rollouts[0]
        except TimeoutError:
            if not deadline.expired():
                raise
            play.outcome = play.kind = "too_slow"
            play.reason = f"not finished after {self._seconds:g} s"
        else:
            _note(play, rollout, self.facts.tools[item])
        finally:
            self._playing.reset(token)
        play.changed = item_digest(self.items[item]) != before
        if (state := random.getstate()) != numbers:
            play.drew = hashlib.sha256(repr(state).encode()).hexdigest()
        play.seconds = time.monotonic() - started
        play.memory, play.held = resident(), held()
        if playing.unsolved:
            raise NoSolution(NO_SOLUTION)
        self.plays.append(play)
        self._finished(play)
        return play

    async def _answer(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> Message:
        playing = self._playing.get() or self._latest  # a program that asks over HTTP has no context
        assert playing is not None
        try:
            said = playing.policy(messages, tools)
            return await said if inspect.isawaitable(said) else said
        except SettingsError:  # of a reference policy that knows no solution of this item
            playing.unsolved = True
            return Message("assistant", "")


def resident() -> float:
    """MiB of this process and its descendants; 0 where there is no /proc."""
    children: dict[str, list[str]] = {}
    sizes: dict[str, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (folder / "status").read_text()
            parent, size = (re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE) for name in ("PPid", "VmRSS"))
            children.setdefault(parent[1] if parent is not None else "", []).append(folder.name)
            sizes[folder.name] = int(size[1]) / 1024 if size is not None else 0.0
    todo, total = [str(os.getpid())], 0.0
    while todo:
        total += sizes.get(todo[-1], 0.0)
        todo += children.get(todo.pop(), [])
    return total


def held() -> int:
    """Open files, threads and child processes of this process; 0 where there is no /proc."""
    own = Path("/proc/self")
    with suppress(OSError):
        children = sum(len(each.read_text().split()) for each in own.glob("task/*/children"))
        return children + sum(1 for name in ("fd", "task") for _ in (own / name).iterdir())
    return 0


def _timed(env_cls: type, name: str, times: list[float]) -> Any:
    method = getattr(env_cls, name)
    if inspect.iscoroutinefunction(method):

        async def timed(*arguments: Any) -> Any:
            started = time.monotonic()
            try:
                return await method(*arguments)
            finally:
                times.append(time.monotonic() - started)

        return timed

    def timed_on_thread(*arguments: Any) -> Any:
        started = time.monotonic()
        try:
            return method(*arguments)
        finally:
            times.append(time.monotonic() - started)

    return timed_on_thread


def _prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(text_of(message) for message in messages if message.get("role") != "system")


def _note(play: AuditPlay, rollout: Rollout, tools: Sequence[Mapping[str, Any]]) -> None:
    play.reward, play.outcome, play.kind = rollout.reward, rollout.outcome.value, rollout.unscored_kind
    play.metrics = {str(name): float(value) for name, value in rollout.metrics.items()}
    if rollout.reward is None:
        play.reason = rollout.unscored_because
        if trace := rollout.traceback:
            play.reason, play.traceback = in_one_line(trace), trace.partition("\n")[2]
    if rollout.fault_traceback:
        play.fault = in_one_line(rollout.fault_traceback)
    calls = rollout.reward_calls
    play.outputs = [call.output for call in calls if call.output][:20]
    if not {"judge_pytest", "seal"} & {call.method for call in calls}:
        looks = (
            f"ctx.{each.method}({next(iter(each.arguments), '')[:40]!r})" for each in calls if each.method in _LOOKS
        )
        play.looks = list(dict.fromkeys(looks))
    if rollout.result is None:
        return
    messages = [dict(message) for message in rollout.result.messages]
    first = next((at for at, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
    play.prompt = _prompt(messages[:first])
    system = [text_of(each) for each in messages[:first] if each["role"] == "system"]
    own = [tool for tool in tools if tool["function"]["name"] not in BUILTIN_TOOLS]
    play.told = shortened("\n\n".join([*system, json.dumps(own, ensure_ascii=False)]), 20_000)
    play.prompt_length = sum(len(text_of(each)) for each in messages[:first]) + len(json.dumps(tools))
    play.prompt = shortened(play.prompt, 20_000)
    for message in messages[first:]:
        if message["role"] == "assistant":
            called = [call["function"] for call in message.get("tool_calls") or ()]
            calls_made = [{"name": each["name"], "arguments": shortened(each["arguments"], 20_000)} for each in called]
            play.turns.append({"text": shortened(text_of(message), 20_000), "calls": calls_made})
        else:
            play.seen.append(shortened(text_of(message)))
    play.tool_errors = [
        (each.tool_name, shortened(each.arguments, 300), shortened(each.error, 300))
        for each in rollout.result.tool_errors
    ]
