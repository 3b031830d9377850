"""The base of all guests: their code runs a rollout over the endpoint, and decides on its score."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from backends.errors import LachesisError, SettingsError
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult
from lachesis.rewards.reward import Reward
from lachesis_tokens.endpoint.recorded import RecordedEnv, open_recording

if TYPE_CHECKING:
    from lachesis.loop.loop import HermesAgentLoop
    from lachesis_tokens.endpoint import Recording, RecordingEndpoint
    from lachesis_tools import ToolSession


class GuestFailed(LachesisError):
    """The guest's own code failed, or left nothing to score."""


@dataclass(frozen=True, slots=True)
class GuestVerdict:
    """The result of a guest's code for one rollout."""

    outcome: Outcome
    reason: str
    failure: Exception | None = None
    """Why it has no score, where the guest's own code is the reason. `compute_reward` raises it."""
    error: Exception | None = None
    """What broke, where the outcome is infra_error."""
    state: Any = None
    """The guest's own record of the rollout, for `score`."""


class GuestEnv(RecordedEnv):
    """A subclass loads the guest in `setup`, and writes `rows`, `eval_rows`, `play` and `score`."""

    # Sandboxes, turns and prompts are the guest's own.
    without_effect = (*RecordedEnv.without_effect, "system_prompt")
    _next_row = 0

    @abstractmethod
    def rows(self) -> Sequence[Any]:
        """The items to train on. They are run in their order, again and again."""

    @abstractmethod
    def eval_rows(self) -> Sequence[Any]:
        """The items of `eval`, which runs the first `eval_items` of them."""

    @abstractmethod
    async def play(self, item: Any, recording: Recording, settings: HermesAgentLoop) -> GuestVerdict:
        """One rollout by the guest's code, which asks the model at `recording`."""

    @abstractmethod
    async def score(self, item: Any, verdict: GuestVerdict) -> float | Reward | None:
        """The score of a rollout that `play` left for scoring; None leaves it out."""

    def guest_modules(self) -> list[str]:
        """Modules or files of the guest's code, by which a second start recognises it."""
        return []

    async def discard(self, verdict: GuestVerdict) -> None:
        """Release the guest's resources for a rollout that is not scored."""

    async def get_next_item(self) -> Any:
        rows = self.rows()
        if not len(rows):
            raise SettingsError(f"{self.run_name} has no items")
        self._next_row += 1
        return rows[(self._next_row - 1) % len(rows)]

    async def get_eval_items(self) -> Sequence[Any]:
        rows = self.eval_rows()
        return [rows[place] for place in range(min(self.config.eval_items, len(rows)))]

    def format_prompt(self, item: Any) -> str:
        """The guest writes its own prompts; this is the item, for records."""
        return str(item)

    def agent_for(self, item: Any, settings: HermesAgentLoop, session: ToolSession) -> GuestLoop:
        return GuestLoop(env=self, item=item, settings=settings, endpoint=self.endpoint)

    async def compute_reward(self, item: Any, result: AgentResult, ctx: Any) -> float | Reward | None:
        verdict: GuestVerdict = result.verdict
        if verdict.failure is not None:
            raise verdict.failure
        if verdict.outcome in (Outcome.TIMEOUT, Outcome.REFUSED) and verdict.state is None:
            return 0.0  # its code was stopped, and left nothing to score
        return await self.score(item, verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestLoop:
    """Plays one rollout, in the place of `HermesAgentLoop`."""

    env: GuestEnv
    item: Any
    settings: HermesAgentLoop
    endpoint: RecordingEndpoint

    async def run(self, messages: Sequence[Mapping[str, Any]]) -> AgentResult:
        """See `Agent.run`. The guest has the messages in its item."""
        recording = open_recording(self.endpoint, self.settings)
        began = time.monotonic()
        try:
            verdict = await self.env.play(self.item, recording, self.settings)
            seconds = time.monotonic() - began
            patience = self.settings.limits.max_waiting if verdict.outcome is Outcome.TIMEOUT else 0.0
            waited = await recording.waited(seconds, patience)
        finally:
            await recording.close()
        if verdict.outcome is Outcome.TIMEOUT and waited > seconds / 2:
            reason = f"{verdict.reason}; the model server took {waited:.1f} s of {seconds:.1f} s"
            verdict = replace(verdict, outcome=Outcome.INFRA_ERROR, reason=reason, error=GuestFailed(reason))
        if recording.refusal is not None and (verdict.failure is not None or not verdict.outcome.scored):
            verdict = replace(verdict, outcome=Outcome.REFUSED, reason=recording.refusal, failure=None, error=None)
        result = recording.result(verdict.outcome, verdict.reason)
        result.seconds_own, result.seconds_waiting = seconds - waited, waited
        unasked = not result.api_calls and result.outcome is not Outcome.REFUSED
        if verdict.failure is None and unasked and result.outcome.scored:
            refused = "".join(f"; the endpoint refused: {reason}" for reason in recording.refused)
            reason = f"the rollout ended before the model had answered anything ({verdict.reason}){refused}"
            verdict = replace(verdict, failure=GuestFailed(reason))
        result.verdict = verdict
        fixed = result.outcome is Outcome.TIMEOUT and self.env.config.score_of_timeout != "reward"
        if verdict.failure is not None or fixed or not result.outcome.scored:
            await self.env.discard(verdict)
        if result.outcome is Outcome.INFRA_ERROR:
            result.error = result.error or verdict.error
        return result
