"""The player of rollouts.

It leases a sandbox, lets the agent play, scores its work and releases the sandbox. Failure is not zero: a rollout has a
reward only if the agent's own work was scored. The player retries a rollout that the infrastructure broke a few times,
and then leaves it out. An exception in a reward is an error of the environment and is kept as one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from backends import BackendError, SandboxSpec
from lachesis.loop.attempt import Attempt, RolloutPlan
from lachesis.loop.broken_items import ALIKE, BrokenItems
from lachesis.loop.interrupted import interrupted_agents
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult, TokenCount
from lachesis.loop.rollout import FixedScore, HeldSandbox, Rollout, branch_of_rollout, held_sandboxes, repeats
from lachesis.loop.rollout_session import SessionEnded, while_open
from lachesis.loop.tool_calls import SessionCalls
from lachesis.rewards.reward import Reward
from lachesis.rewards.scorer import Scorer, SetUpFailed
from lachesis.rewards.timed_call import Scored
from lachesis_client import InferenceError
from lachesis_client.chat_options import Split
from lachesis_client.failed_requests import failed_requests
from lachesis_tools import Tool, ToolCrashed, ToolRegistry, ToolSession, ToolSessions
from lachesis_tools.budget import ResultBudget

if TYPE_CHECKING:
    from lachesis.rewards.doubt import Doubt
    from lachesis_client.model_server import ModelServer

log = logging.getLogger(__name__)


class Agent(Protocol):
    """Plays one rollout, up to its reward: `HermesAgentLoop`, or a program."""

    async def run(self, messages: Sequence[Mapping[str, Any]]) -> AgentResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlayer:
    """Plays rollouts of one environment. Holds no state of a rollout, so any number may run at once."""

    make_loop: Callable[..., Agent]
    """`HermesAgentLoop` with the settings of the run."""
    max_infra_retries: int
    """New starts of a rollout that the infrastructure broke."""
    server: ModelServer
    sessions: ToolSessions
    registry: ToolRegistry
    unlisted: Sequence[Tool] = ()
    """Tools of the registry that may be called although the prompt does not name them."""
    scorer: Scorer
    budget: ResultBudget = field(default_factory=ResultBudget)
    """Of tool results."""
    score_of_timeout: FixedScore | Literal["reward"] = "reward"
    score_of_agent_fault: FixedScore = 0.0
    broken_items: BrokenItems = field(default_factory=BrokenItems)

    def with_tools(self, tools: Sequence[Tool], others: Callable[[], Sequence[Mapping[str, Any]]]) -> Self:
        """With further tools, of one item.

        Args:
            others: definitions of the tools that the agent has anyway. A tool may have the name of one that the agent
                does not get.
        """
        taken = {tool.name for tool in tools if tool.name in self.registry}
        if taken:
            taken -= {each["function"]["name"] for each in others()}
        registry = self.registry.without(*taken).extended(*tools)
        return replace(self, registry=registry, unlisted=[tool for tool in tools if not tool.offered])

    async def play(
        self,
        item: Any,
        messages: Sequence[Mapping[str, Any]] | Callable[[], Sequence[Mapping[str, Any]]],
        *,
        item_key: str,
        index: int,
        tools: Sequence[Mapping[str, Any]],
        temperature: float,
        split: Split = "train",
        spec: SandboxSpec | None = None,
    ) -> Rollout:
        """Play one rollout to its end. Raises only cancellation and errors of this program.

        A scored rollout of an environment that also scores whole groups keeps its sandbox (`Rollout.held`) until
        `score_group`.

        Args:
            messages: the first ones; a function of an environment whose sessions write them.
            spec: the sandbox of this rollout, where it differs from the run's. It lives as long as the run's at least.
        """
        if spec is not None:
            spec = replace(spec, lifetime=max(spec.lifetime, self.sessions.spec.lifetime))
        started = time.monotonic()
        plan = RolloutPlan(
            item=item,
            messages=messages,
            item_key=item_key,
            index=index,
            tools=tools,
            temperature=temperature,
            split=split,
            spec=spec,
            branch=branch_of_rollout.get(),
        )
        branch_of_rollout.set(None)  # a rollout that this one's code plays is another one
        retried_after: list[str] = []
        lost = TokenCount()
        broken_item = False
        while True:
            attempt = await self._attempt(plan, len(retried_after) + 1)
            lost.include(attempt.unfinished)
            if attempt.outcome is not Outcome.INFRA_ERROR:
                self.broken_items.answered(item_key)
                break
            if attempt.scored.error is not None:
                break
            if self.broken_items.failed(item_key, attempt.reason):
                broken_item = True
                attempt.reason = (
                    f"failed {ALIKE} times in a row while others were answered, the last time: {attempt.reason}"
                )
                break
            if attempt.number > self.max_infra_retries or repeats(attempt.error):
                break
            retried_after.append(attempt.reason)
            if attempt.result is not None:
                lost.include(plan.tokens_of(attempt.result))
        scored = attempt.scored
        rollout = Rollout(
            rollout_id=plan.rollout_id,
            item_key=item_key,
            index=index,
            outcome=attempt.outcome,
            reason=attempt.reason,
            reward=None,
            result=attempt.result,
            traceback=scored.traceback,
            error=attempt.error or scored.wrong_setting,
            attempts=attempt.number,
            retried_after=tuple(retried_after),
            lost=lost,
            seconds=time.monotonic() - started,
            broken_item=broken_item,
            reward_calls=attempt.context.calls if attempt.context is not None else (),
            held=attempt.held,
            doubt=scored.doubt,
        ).rewarded(scored.value)
        if scored.doubt is not None:
            return self.settled(rollout)
        if scored.faults:
            return self.at_fault(rollout, scored.faults[0])
        if self._is_fixed(attempt.outcome):
            return _with_fixed(rollout, self.score_of_timeout, attempt.reason, "score_of_timeout")
        return rollout

    async def _attempt(self, plan: RolloutPlan, number: int) -> Attempt:
        """Start a rollout, and play it up to its score or to what breaks it."""
        attempt = Attempt(number)
        name = f"{plan.item_key}-{plan.index}-{plan.rollout_id[:8]}-{number}"
        verifier = f"{name}-verifier"
        start = plan.start
        session = self.sessions.open(name, spec=plan.spec, checkpoint=None if start is None else start.checkpoint)
        try:
            attempt.result = result = await self._played(attempt, plan, session)
            attempt.outcome, attempt.reason, attempt.error = result.outcome, result.reason, result.error
            if isinstance(result.error, ToolCrashed):
                attempt.scored = Scored(error=result.error)
            elif result.outcome is Outcome.AGENT_FAULT:
                attempt.scored = Scored(faults={0: result.reason})
            elif result.outcome.scored and not self._is_fixed(result.outcome):
                await self._score(attempt, plan, result, session, verifier)
        except (BackendError, InferenceError) as broken:
            attempt.outcome, attempt.reason, attempt.error = Outcome.INFRA_ERROR, str(broken), broken
        except (SetUpFailed, SessionEnded) as broken:
            if attempt.cut and attempt.result is None:  # its tokens were paid, although it has no result
                attempt.unfinished = plan.tokens_of(attempt.cut[-1])
            attempt.error = next(iter(attempt.failed.values()), None)
            attempt.scored = Scored(error=(broken.__cause__ or broken) if attempt.error is None else None)
            attempt.outcome, attempt.reason = Outcome.INFRA_ERROR, str(attempt.error or broken)
        except asyncio.CancelledError:
            attempt.note_interrupted(plan)
            raise
        finally:
            if attempt.held is None:
                await self.release(name, verifier)
        return attempt

    async def _played(self, attempt: Attempt, plan: RolloutPlan, session: ToolSession) -> AgentResult:
        """Set the sandbox up, and let the agent play."""
        names = [*(schema["function"]["name"] for schema in plan.tools), *(tool.name for tool in self.unlisted)]
        loop = self.make_loop(
            self.server.for_rollout(group=plan.item_key, session=plan.rollout_id),
            plan.tools,
            task_id=session.task_id,
            temperature=plan.temperature,
            execute=SessionCalls(session, self.registry, names, self.budget),
            split=plan.split,
        )
        for tool in self.unlisted:
            assert isinstance(loop, HermesAgentLoop), "environments of other agents have no tools of items"
            loop.required_arguments[tool.name] = tool.definition()["function"]["parameters"].get("required", ())
        if self.scorer.follow_up is not None:
            assert isinstance(loop, HermesAgentLoop), "environments of other agents take no follow_up"
            loop.follow_up = functools.partial(self.scorer.user_message, plan.item)
        with failed_requests() as attempt.failed:
            if plan.branch is not None:
                plan.branch.join(loop, session)
            if plan.start is None:
                await self.scorer.set_up(plan.item, session, self.registry)
        for request in attempt.failed.values():
            raise request
        first = plan.messages() if callable(plan.messages) else plan.messages
        with failed_requests(), interrupted_agents() as attempt.cut:  # the outcome reports failed requests
            try:
                return await while_open(loop.run(first), session)
            except asyncio.CancelledError:
                attempt.result = attempt.cut[-1] if attempt.cut else None
                raise

    async def _score(
        self, attempt: Attempt, plan: RolloutPlan, result: AgentResult, session: ToolSession, verifier: str
    ) -> None:
        """Call the reward. `verifier` names its fresh sandboxes."""
        open_verifier = functools.partial(self.sessions.open, verifier, spec=plan.spec)
        context = self.scorer.context_class(session, self.registry, open_verifier=open_verifier)
        attempt.context = context
        with failed_requests() as attempt.failed:
            about = (plan.item_key, plan.rollout_id)
            scored = await while_open(self.scorer.score(plan.item, result, context, about=about), session)
        if attempt.failed:
            scored = Scored()
            attempt.outcome, attempt.error = Outcome.INFRA_ERROR, next(iter(attempt.failed.values()))
            attempt.reason = f"a request of the reward failed: {attempt.error}"
        attempt.scored = scored
        result.reward = scored.value
        if scored.value is not None and self.scorer.compute_group_reward is not None:
            attempt.held = HeldSandbox(context, functools.partial(self.release, session.task_id, verifier))
            if (of_group := held_sandboxes.get()) is not None:
                of_group.append(attempt.held)

    def _is_fixed(self, outcome: Outcome) -> bool:
        """Whether a setting decides the score, and no reward."""
        return outcome is Outcome.AGENT_FAULT or (outcome is Outcome.TIMEOUT and self.score_of_timeout != "reward")

    def at_fault(self, rollout: Rollout, fault: str, what: str = "the agent broke its sandbox: ") -> Rollout:
        """The rollout with the score of the agent's fault."""
        found = replace(rollout, agent_fault=fault)
        return _with_fixed(found, self.score_of_agent_fault, f"{what}{fault}", "score_of_agent_fault")

    def settled(self, rollout: Rollout) -> Rollout:
        """The same, with a score where its doubt is settled by now as the agent's fault."""
        doubt, evidence = rollout.doubt, self.scorer.evidence
        if doubt is None:
            return rollout
        if evidence.reference_met.get(doubt.kind):
            trace = f"{doubt.trace}The reward raises the same for the reference policy: the environment is at fault.\n"
            return replace(rollout, doubt=None, traceback=trace)
        if not evidence.is_agents(doubt):
            return rollout
        return self.at_fault(replace(rollout, doubt=None, traceback=None, fault_traceback=doubt.trace), doubt.fault, "")

    async def score_group(self, item: Any, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with the rewards of `compute_group_reward`, which replace those that they have.

        Rollouts without a reward stay without one, and the function does not see them. If a sandbox or a model server
        fails during the call, no rollout of the group has a reward, and another attempt may succeed.
        """
        finished = list(rollouts)
        places = [
            at
            for at, rollout in enumerate(rollouts)
            if rollout.reward is not None
            and rollout.result
            and not (rollout.agent_fault or self._is_fixed(rollout.outcome))
        ]
        if self.scorer.compute_group_reward is None:
            return finished
        while places:
            faults = await self._score_together(item, finished, places)
            doubtful = [at for at in places if finished[at].doubt is not None]
            if not faults and 0 < len(doubtful) < len(places):
                places = [at for at in places if at not in doubtful]
                continue
            for at, fault in faults.items():
                finished[at] = self.at_fault(finished[at], fault)
            if not faults:
                break
            places = [at for at in places if at not in faults]  # the others are compared without these
        return [self.settled(replace(rollout, held=None)) for rollout in finished]

    async def _score_together(self, item: Any, finished: list[Rollout], places: Sequence[int]) -> dict[int, str]:
        """Put the rewards of the group into the rollouts at `places`, or return the faults of agents by place."""
        group = [(finished[at], result) for at in places if (result := finished[at].result) is not None]
        contexts = [rollout.held.context if rollout.held is not None else None for rollout, _ in group]
        changed: list[Rollout]
        faults: dict[int, str] = {}
        doubts: dict[int, Doubt] = {}
        try:
            with failed_requests() as failed:
                about = (group[0][0].item_key, f"{group[0][0].rollout_id}, together")
                results = [result for _, result in group]
                scored = await self.scorer.score_group(item, results, contexts, about=about)
                if scored.doubt is not None:
                    of = [(rollout.item_key, rollout.rollout_id) for rollout, _ in group]
                    doubts = await self.scorer.those_alone(scored.doubt, item, results, contexts, of)
            for failure in failed.values():
                raise failure
        except (BackendError, InferenceError) as broken:
            reason = f"the group could not be scored: {broken}"
            changed = [
                replace(rollout.rewarded(None), outcome=Outcome.INFRA_ERROR, reason=reason, error=broken)
                for rollout, _ in group
            ]
        else:
            if scored.faults:
                faults = {places[at]: fault for at, fault in scored.faults.items()}
                changed = [rollout for rollout, _ in group]
            else:
                given = scored.value if scored.value is not None else [None] * len(group)
                changed = [
                    replace(
                        rollout.rewarded(reward),
                        traceback=scored.traceback or rollout.traceback,
                        error=rollout.error or scored.wrong_setting,
                    )
                    for (rollout, _), reward in zip(group, given, strict=True)
                ]
                if doubts:  # the others are compared without these
                    changed = [
                        replace(rollout.rewarded(None), traceback=doubts[at].trace, doubt=doubts[at])
                        if at in doubts
                        else rollout
                        for at, (rollout, _) in enumerate(group)
                    ]
        for at, rollout, context in zip(places, changed, contexts, strict=True):
            finished[at] = replace(rollout, reward_calls=context.calls if context is not None else rollout.reward_calls)
            if (faults or doubts) and context is not None:
                context.repeat()
        return faults

    async def release(self, *task_ids: str) -> None:
        """Close the rollout's sandboxes, also when the rollout is cancelled: nothing of it may remain."""
        closing = asyncio.gather(*map(self.sessions.close, task_ids), return_exceptions=True)
        for task_id, error in zip(task_ids, await asyncio.shield(closing), strict=True):
            if isinstance(error, BackendError):
                # The reward stays; so does the session in the list, and the end of the run tries again.
                log.warning("the sandbox of %s could not be removed yet: %s", task_id, error)
            elif isinstance(error, BaseException):
                raise error


def _with_fixed(rollout: Rollout, score: FixedScore | Literal["reward"], why: str, setting: str) -> Rollout:
    """The rollout with the score of a setting in place of a reward."""
    if isinstance(score, str):
        return replace(rollout.rewarded(None), left_out=f"{why} ({setting}: {score})")
    return rollout.rewarded(Reward(score))
