"""Why a trial of a task folder has no reward, or ended early: one table.

A grade is a `Verdict`, or `Invalid` is raised: an invalid trial has no number that could be added to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from backends import BackendError
from lachesis.tool_context.pace import OwnTime

Fault = Literal["model", "task", "infrastructure"]


@dataclass(frozen=True, slots=True)
class Cause:
    """One row."""

    name: str
    retry: bool
    """Whether another attempt at the same rollout may end otherwise."""
    grade: bool
    """Whether the verifier runs."""
    valid: bool
    """Whether the reward, where there is one, is a measurement of the model."""
    fault: Fault
    harbor: str
    """The exception of Harbor 0.25 for it; empty where Harbor has none."""
    meaning: str


_ROWS = (
    Cause("agent_timeout", False, True, True, "model", "AgentTimeoutError", "the agent used up its time"),
    Cause("agent_limit", False, True, True, "model", "ContextWindowExceededError", "turns or context are used up"),
    Cause("model_error", False, True, True, "model", "", "the model wrote nothing usable"),
    Cause("tampered", False, True, True, "model", "", "the agent put something in the way of the reward: a score of 0"),
    Cause("no_verdict", False, True, True, "model", "", "the agent's files stop the tests: a score of 0"),
    Cause("model_server", True, False, False, "infrastructure", "ApiError", "a request to the model server failed"),
    Cause("sandbox_failed", True, False, False, "infrastructure", "EnvironmentStartTimeoutError", "a sandbox failed"),
    Cause("image_failed", False, False, False, "task", "SandboxBuildFailedError", "the image cannot be built"),
    Cause("healthcheck", True, False, False, "task", "HealthcheckError", "the environment did not become healthy"),
    Cause("setup", False, False, False, "task", "RuntimeError", "setup.sh of a step failed"),
    Cause("variable", False, False, False, "task", "ValueError", "the task needs a variable that it cannot have"),
    Cause("user", False, False, False, "task", "", "the sandbox cannot run a command as the user that the task names"),
    Cause("network", False, False, False, "task", "", "the network that the task needs is not available"),
    Cause("no_tests", False, False, False, "task", "FileNotFoundError", "the task has no tests/test.sh"),
    Cause("no_solution", False, False, False, "task", "FileNotFoundError", "the oracle has no solution/solve.sh"),
    Cause("verifier_timeout", False, True, False, "task", "VerifierTimeoutError", "the tests took too long"),
    Cause("no_reward_file", False, True, False, "task", "RewardFileNotFoundError", "the tests wrote no reward"),
    Cause("empty_reward_file", False, True, False, "task", "RewardFileEmptyError", "the tests wrote an empty file"),
    Cause("not_a_reward", False, True, False, "task", "VerifierOutputParseError", "the reward is not a finite number"),
)
CAUSES: Mapping[str, Cause] = MappingProxyType({cause.name: cause for cause in _ROWS})
"""By name."""


class Invalid(BackendError):
    """A trial without a reward: its rollout is `infra_error`, and is left out. Never a score."""

    def __init__(self, cause: str, detail: str) -> None:
        self.cause = CAUSES[cause]
        self.record: dict[str, Any] = {"cause": cause}
        """For `"verifier"` of the rollout's record."""
        self.late: OwnTime | None = None
        """What the tests took that the time limit has ended."""
        self.may_pass = self.cause.retry
        super().__init__(f"{self.cause.meaning} ({cause}): {detail}")
