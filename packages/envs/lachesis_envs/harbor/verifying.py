"""Whether tasks grade soundly: the solution is worth 1, nothing is worth 0, and so is each attack, every time."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from backends import Backend, BackendError
from backends.tasks import run_all
from lachesis.rewards.agent_fault import AgentFault
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.harbor.grading import Grading, way_of
from lachesis_envs.harbor.places import Places, opened, places_of
from lachesis_envs.harbor.task_attacks import ATTACKS, TaskAttack
from lachesis_envs.harbor.trial import Trial, solve
from lachesis_envs.judging.pytest_judge import other_changes
from lachesis_envs.task_folders import Task
from lachesis_envs.task_folders.task import files_below
from lachesis_tools import ToolSessions

_ATTACK_TIME = 60.0
"""Seconds for the script of an attack."""

_TELLING = 16
"""Bytes that a file has to have for its copy to be a leak: shorter ones are found everywhere."""

Act = Callable[[Trial, ToolContext], Awaitable[object]]
Result = dict[str, Any]
"""What one trial, or the search for leaks, came to, with a `key` that says what decided it."""


async def _forget(result: Result) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Play:
    """One trial of one agent."""

    agent: str
    """`oracle`, `nop`, or the name of an attack."""
    reward: float | None
    """None where the trial is invalid."""
    detail: str
    """Why it is invalid, or what was noted."""
    seconds: float


@dataclass(slots=True)
class Verification:
    """The results of one task's trials."""

    task: Task
    way: str
    """How it is graded."""
    plays: list[Play] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    """Files of the solution or of the tests that the agent can find."""

    def rewards(self, agent: str) -> list[float | None]:
        return [play.reward for play in self.plays if play.agent == agent]

    @property
    def attacks(self) -> list[Play]:
        return [play for play in self.plays if play.agent not in ("oracle", "nop")]

    @property
    def forged(self) -> list[str]:
        """Attacks that were worth something, at least once."""
        return list(dict.fromkeys(play.agent for play in self.attacks if play.reward))

    @property
    def problems(self) -> list[str]:
        """The problems, one line each, with the next step; empty if the task is sound."""
        found = []
        for agent, wanted in (("oracle", 1.0), ("nop", 0.0)):
            rewards = self.rewards(agent)
            wrong = [reward for reward in rewards if reward != wanted]
            if wrong:
                why = next((play.detail for play in self.plays if play.agent == agent and play.detail), "")
                verb = "is not always" if len(wrong) < len(rewards) else "is not"
                shown = ", ".join("invalid" if reward is None else f"{reward:g}" for reward in dict.fromkeys(wrong))
                found.append(f"{agent} {verb} {wanted:g}, but {shown}{': ' + why if why else ''}")
        if self.forged:
            step = {
                "in_place": "declare `artifacts`, so that a fresh sandbox runs the tests, or --grading seal",
                "seal": "test programs from outside, or use [metadata.lachesis.judge]",
            }.get(self.way, "look at what the tests run")
            found.append(f"{len(self.forged)} attacks are worth something: {', '.join(self.forged)}. Next step: {step}")
        if attacked := [play for play in self.attacks if play.reward is None]:
            names = ", ".join(dict.fromkeys(play.agent for play in attacked))
            found.append(f"{len(attacked)} attacks came to no verdict ({names}): {attacked[0].detail}")
        if self.leaks:
            found.append(f"the agent can read {', '.join(self.leaks)}. Next step: take it out of environment/")
        return found


async def verify_task(
    task: Task,
    backend: Backend,
    sessions: ToolSessions,
    *,
    times: int = 5,
    attacks: Sequence[TaskAttack] = ATTACKS,
    grading: Grading = "auto",
    images: bool = True,
    at_once: asyncio.Semaphore,
    earlier: Mapping[str, Result] = MappingProxyType({}),
    keep: Callable[[Result], Awaitable[None]] = _forget,
    played: Callable[..., None] = lambda *, before: None,
) -> Verification:
    """Play every agent `times` times, as many at once as `at_once` lets.

    Args:
        earlier: results by their keys: these trials are not run again.
        keep: gets every new result that says something about the task.
        played: is called after each trial, with `before=True` for an earlier one.

    Raises:
        BackendError: the task cannot run here.
    """
    places = await places_of(task, backend, sessions.spec, images=images, grading=grading)
    found = Verification(task, way_of(task, task.steps[-1], grading))
    agents: list[tuple[str, str, Act]] = [("oracle", "", _solve), ("nop", "", _nothing)]
    agents += [(attack.name, attack.script, partial(_attack, attack)) for attack in attacks]
    decided_by = (task.digest, found.way, backend.name, places)

    async def one(agent: str, script: str, act: Act, number: int) -> None:
        key = _key(*decided_by, agent, script, number)
        if key in earlier:
            play = Play(**earlier[key]["play"])
        else:
            async with at_once:
                if agent == "oracle":  # a test that is changed unsoundly by chance is found here, not in training
                    other_changes.set(number.to_bytes(4, "big"))
                play = await _play(task, agent, act, places, sessions, grading, f"{agent}-{number}-{uuid.uuid4().hex}")
            if play.reward is not None:  # else it says nothing about the task
                await keep({"key": key, "task": str(task.folder), "play": asdict(play)})
        found.plays.append(play)
        played(before=key in earlier)

    await run_all(one(*agent, number) for agent in agents for number in range(times))
    key = _key(*decided_by, "leaks")
    if key in earlier:
        found.leaks = earlier[key]["leaks"]
    else:
        async with at_once:
            found.leaks = await _leaks(task, places, sessions)
        await keep({"key": key, "task": str(task.folder), "leaks": found.leaks})
    return found


def _key(*decided_by: object) -> str:
    return hashlib.sha256("\n".join(map(repr, decided_by)).encode("utf-8", "surrogateescape")).hexdigest()


async def _play(
    task: Task, agent: str, act: Act, places: Places, sessions: ToolSessions, grading: Grading, name: str
) -> Play:
    began, trial, more = time.monotonic(), Trial(task, grading, places.verifiers), True
    try:
        async with opened(sessions, name, places.agent) as ctx:
            while more:
                await trial.begin(ctx)
                await act(trial, ctx)
                more = await trial.finish(ctx)
        verdict = trial.verdict()
        reward, detail = verdict.reward.value, "; ".join(verdict.record["notes"])
        if reward == 0.0 and agent == "oracle":
            detail = detail or verdict.record["stdout"].strip()[-300:]
    except AgentFault as fault:
        reward, detail = 0.0, str(fault)
    except BackendError as error:
        reward, detail = None, str(error)
    return Play(agent, reward, detail, time.monotonic() - began)


async def _solve(trial: Trial, ctx: ToolContext) -> None:
    await solve(trial, ctx, timeout=trial.step.agent.timeout_sec or 1800.0)


async def _nothing(trial: Trial, ctx: ToolContext) -> None:
    pass


async def _attack(attack: TaskAttack, trial: Trial, ctx: ToolContext) -> None:
    await ctx.terminal(attack.script, timeout=_ATTACK_TIME)


async def _leaks(task: Task, places: Places, sessions: ToolSessions) -> list[str]:
    """Files in the agent's sandbox with the content of one of the solution or the tests, whatever their names."""
    secret = [
        file
        for step in task.steps
        for folder in (step.solution, *step.test_folders)
        if folder is not None
        for file in files_below(folder)
        if file.is_file() and not file.is_symlink() and file.stat().st_size >= _TELLING and file.name != "Dockerfile"
    ]
    wanted = " -o ".join(f"-size {size}c" for size in {file.stat().st_size for file in secret})
    if not wanted:
        return []
    pruned = "\\( -path /proc -o -path /sys -o -path /dev \\) -prune"
    search = f"find / {pruned} -o -type f \\( {wanted} \\) -exec sha256sum {{}} + 2>/dev/null"
    async with opened(sessions, f"leaks-{uuid.uuid4().hex}", places.agent) as ctx:
        done = await ctx.terminal(f"command -v find sha256sum > /dev/null || exit 127; {search}", timeout=300)
    if done["exit_code"] in (124, 127):
        raise Invalid("sandbox_failed", f"leaks cannot be searched: {done['error'] or 'no find, or no sha256sum'}")
    contents = {hashlib.sha256(file.read_bytes()).hexdigest(): file for file in secret}
    lines = (line.partition("  ") for line in str(done["output"]).splitlines())
    same = [(path, contents.get(digest)) for digest, _, path in lines]
    return [f"{path} ({file.relative_to(task.folder)})" for path, file in same if file is not None]
