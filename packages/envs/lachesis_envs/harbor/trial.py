"""One attempt at a task folder: the steps before and after the agent, in one sandbox."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backends import SandboxSpec
from lachesis.rewards.agent_fault import AgentFault
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.harbor.grading import (
    AGENT,
    TESTS,
    VERIFIER,
    Grading,
    as_user,
    empty_folders,
    grade,
    way_of,
)
from lachesis_envs.harbor.variables import resolved_variables
from lachesis_envs.harbor.verdicts import Verdict, below_minimum, mean_of_steps, verdict_of
from lachesis_envs.task_folders import Step, Task
from lachesis_envs.task_folders.config import HealthcheckConfig

SOLUTION = "/solution"


@dataclass(slots=True)
class Trial:
    """The state of one attempt. For each step: `begin`, the agent, `finish`; then `verdict`."""

    task: Task
    grading: Grading = "auto"
    verifiers: Mapping[str, SandboxSpec] = field(default_factory=dict)
    """By the name of a step: the sandbox of a verifier that is `separate`."""
    keep: Path | None = None
    """Folder for artifacts and logs; with several steps, it has a folder for each."""
    at: int = 0
    over: bool = False
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def step(self) -> Step:
        return self.task.steps[self.at]

    @property
    def is_last(self) -> bool:
        return self.at + 1 == len(self.task.steps)

    async def begin(self, ctx: ToolContext) -> None:
        """Make the sandbox ready for the agent of this step: folders, files, setup.sh, healthchecks.

        Raises:
            Invalid: the task cannot run.
            AgentFault: what the agent left keeps a later step from its beginning.
        """
        try:
            await self._begin(ctx)
        except AgentFault as fault:
            if self.at:
                raise
            raise Invalid("sandbox_failed", str(fault)) from fault  # no agent has been there yet
        except Invalid as invalid:
            if not self.at:
                raise
            untouched = await ctx.untouched()
            try:
                await self._begin(untouched)
            except AgentFault as fault:
                raise Invalid("sandbox_failed", str(fault)) from fault
            finally:
                await untouched.cleanup()
            raise AgentFault(errno.EIO, f"{invalid}; not so in a fresh sandbox") from invalid

    async def _begin(self, ctx: ToolContext) -> None:
        step = self.step
        old = [AGENT]
        if self.at and way_of(self.task, self.task.steps[self.at - 1], self.grading) == "in_place":
            old += [VERIFIER, TESTS]  # no agent sees how an earlier step was graded
        await empty_folders(ctx, old)
        if not self.at:
            for user in self._users():  # later, the agent may have removed the programs that change the user
                await as_user(ctx, "true", user)
            await _healthcheck(ctx, self.task.config.environment.healthcheck, None)
        if step.workdir is not None:
            await ctx.upload_dir(step.workdir, ".")
        if step.workdir_setup is not None:
            done = await ctx.terminal(await as_user(ctx, "bash ./setup.sh", step.agent.user), timeout=600)
            if done["exit_code"] != 0:
                raise Invalid("setup", f"step {step.name!r}: exit code {done['exit_code']}: {done['output'][-500:]}")
        await _healthcheck(ctx, step.healthcheck, step.agent.user)

    def _users(self) -> set[str | int | None]:
        """As whom something is to run in sandboxes of the agent's image."""
        users = {step.agent.user for step in self.task.steps}
        users |= {hook.user for step in self.task.steps for hook in step.verifier.collect}
        in_image = (step for step in self.task.steps if way_of(self.task, step, self.grading) in ("seal", "in_place"))
        return users | {step.verifier.user for step in in_image}

    async def finish(self, ctx: ToolContext, *, reached: bool = True) -> bool:
        """Grade this step; whether another one begins.

        Args:
            reached: False where the agent has used up its time or its turns: no later step begins.

        Raises:
            Invalid, BackendError: as `grade`.
        """
        step = self.step
        verdict = await grade(
            self.task,
            step,
            ctx,
            grading=self.grading,
            spec=self.verifiers.get(step.name),
            keep=self.keep / step.name if self.keep is not None else None,
            ends=self.is_last or not reached,
        )
        self.verdicts.append(verdict)
        if not reached:  # the steps that the agent did not come to
            nothing = replace(verdict, rewards=dict.fromkeys(verdict.rewards, 0.0), record={"cause": "not_reached"})
            self.verdicts += [nothing] * (len(self.task.steps) - self.at - 1)
        self.over = self.is_last or not reached or below_minimum(verdict.rewards, step.min_reward)
        self.at += not self.over
        return not self.over

    def verdict(self) -> Verdict:
        """Of all steps together."""
        if len(self.task.steps) == 1:
            return self.verdicts[0]
        final = self.task.config.multi_step_reward_strategy == "final"
        rewards = self.verdicts[-1].rewards if final else mean_of_steps([verdict.rewards for verdict in self.verdicts])
        played = zip(self.task.steps, self.verdicts, strict=False)  # min_reward may end a trial early
        records = [{"name": step.name, **verdict.record} for step, verdict in played]
        ways = dict.fromkeys(record["grading"] for record in records if "grading" in record)
        causes = [cause for each in records if (cause := each["cause"]) not in (None, "not_reached")]
        record = {**records[0], "cause": next(iter(causes), None), "rewards": dict(rewards), "steps": records}
        del record["name"]
        record["grading"] = "in_place" if "in_place" in ways else next(iter(ways))
        return verdict_of(self.task, rewards, record)


async def solve(trial: Trial, ctx: ToolContext, *, timeout: float) -> Mapping[str, Any]:
    """Run the reference solution of the step, as Harbor's agent `oracle`; the answer of `terminal`.

    Raises:
        Invalid: there is none.
    """
    step = trial.step
    if step.solution is None:
        raise Invalid("no_solution", f"{trial.task.folder} has no solution/solve.sh. Next step: write one")
    await ctx.upload_dir(step.solution, SOLUTION)
    await ctx.terminal(f"chmod +x {SOLUTION}/solve.sh", timeout=60)
    variables = {
        "DEBIAN_FRONTEND": "noninteractive",
        **resolved_variables(trial.task.config.solution.env, "[solution].env", trial.task.variables),
    }
    command = await as_user(ctx, f"({SOLUTION}/solve.sh) > {AGENT}/oracle.txt 2>&1", step.agent.user)
    done = await ctx.terminal(command, timeout=timeout, env=variables)
    return {**done, "output": str(await ctx.read_file(f"{AGENT}/oracle.txt"))}


async def _healthcheck(ctx: ToolContext, check: HealthcheckConfig | None, user: str | int | None) -> None:
    """Wait until the command succeeds, as Docker's HEALTHCHECK: failures within the start period do not count."""
    if check is None:
        return
    command = await as_user(ctx, check.command, user)
    started, failures = time.monotonic(), 0
    while True:
        starting = time.monotonic() - started < check.start_period_sec
        done = await ctx.terminal(command, timeout=check.timeout_sec)
        if done["exit_code"] == 0:
            return
        failures += not starting
        if failures >= check.retries:
            said = str(done["output"])[-500:]
            raise Invalid("healthcheck", f"{check.command!r} failed {failures} times, the last time with: {said}")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
