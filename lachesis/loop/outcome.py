"""How a rollout ends: one of a few outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Outcome(StrEnum):
    """Why a rollout stopped. All but `INFRA_ERROR` are the agent's own doing, and are scored."""

    COMPLETED = "completed"
    """The model ended with an answer."""
    MAX_TURNS = "max_turns"
    """The budget of turns or of tool calls is used up."""
    CONTEXT_EXHAUSTED = "context_exhausted"
    """The prompt no longer fits the model, the token budget is used up, or the answer was cut off by its limit."""
    MODEL_ERROR = "model_error"
    """The model wrote nothing usable, even when sampled again; the rollout is at its last valid state."""
    TIMEOUT = "timeout"
    """The agent used up its time with its commands and completions. Scored according to `score_of_timeout`."""
    AGENT_FAULT = "agent_fault"
    """The agent used up its sandbox's resources, which ended it. Scored according to `score_of_agent_fault`."""
    REFUSED = "refused"
    """The server refused the conversation, or withheld the answer, because of moderation or routing, while it answered
    others. Scored on the conversation and the sandbox as they are."""
    INFRA_ERROR = "infra_error"
    """A server or a sandbox failed or took too long, even after retries. Says nothing about the model: never scored."""

    @property
    def scored(self) -> bool:
        """Whether the rollout says something about the model."""
        return self is not Outcome.INFRA_ERROR


OF_A_FULL_CONTEXT = (Outcome.CONTEXT_EXHAUSTED, Outcome.MODEL_ERROR)
"""How a rollout ends whose next completion has too little room."""


DECLINED = "declined"
"""The kind of a rollout (`Rollout.unscored_kind`) whose score is not missing: a batch has none, or the reward is None
on purpose."""
SHOWN = {
    Outcome.CONTEXT_EXHAUSTED.value: "out of tokens",
    Outcome.AGENT_FAULT.value: "agent's fault",
    DECLINED: "no reward",
}
"""What people read in the place of a name: a context is only one of the limits of tokens."""


def in_words(name: str) -> str:
    """The name of an outcome, or of a cause, for people to read. Files and JSON keep the names."""
    return SHOWN.get(name) or name.replace("_", " ")


def listed(counts: Iterable[tuple[str, int]]) -> str:
    """How often rollouts ended in each way, for people to read."""
    return ", ".join(f"{in_words(name)} {count:,}" for name, count in counts)


def advice_if_cut_off(outcomes: Mapping[str, int], rollouts: int) -> str:
    """What to change where limits of tokens cut off most of so many rollouts; elsewhere empty."""
    if (cut := outcomes.get(Outcome.CONTEXT_EXHAUSTED.value, 0)) <= rollouts / 2:
        return ""
    return (
        f"{cut:,} of {rollouts:,} rollouts were cut off: allow longer answers with --env.max_token_length (-t), or "
        "serve a longer context"
    )


class RolloutEnded(Exception):
    """Raised in the agent loop when the rollout is over."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
