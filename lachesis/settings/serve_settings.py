"""Settings that only `serve` reads."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, field_validator, model_validator

from lachesis.settings.setting_facts import SERVE, Facts
from lachesis_client.urls import HTTP_URL
from lachesis_messages.records.split_rollouts import SplitRollouts, check_split


class EvalHandlingEnum(StrEnum):
    """What `serve` does with rollouts while it evaluates."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class ServeSettings(BaseModel):
    """How groups become batches of a trainer, and what happens while it trains."""

    rollout_server_url: Annotated[str, SERVE, HTTP_URL] = Field(
        default="http://localhost:8000", description="The rollout API: `lachesis api`, or Atropos' run-api."
    )
    rollout_server_token: Annotated[str | None, Facts(content="never", only_serve=True, secret=True)] = Field(
        default=None,
        description="Bearer token of the rollout API, if it requires one; default: the variable LACHESIS_API_TOKEN.",
    )
    spool_path: Annotated[str | None, SERVE] = Field(
        default=None, description="Folder in which `serve` keeps groups until they are sent; default: data/NAME/spool."
    )
    split_rollouts: Annotated[Literal["final", "longest", "all"], SERVE] = Field(
        default="final",
        description="For a rollout of several samples: send the path on which it ended (final), the longest, or "
        "all, with advantages and their own group size.",
    )
    discarded_attempts: Annotated[Literal["none", "rollout"] | FiniteFloat, SERVE] = Field(
        default="none",
        description="Reward of an attempt that a retry replaced: none (it is not sent), rollout (the rollout's "
        "reward), or a number of at most 0.",
    )
    unchecked_prompts: Annotated[Literal["refuse", "allow"], SERVE] = Field(
        default="refuse",
        description="Groups with a prompt whose ids and length the server did not repeat, so that it may have "
        "sampled from a different prompt.",
    )
    ensure_scores_are_not_same: Annotated[bool, Facts(only_serve=True)] = Field(
        default=True, description="`serve` withholds groups whose rewards are all equal, since they teach nothing."
    )
    max_equal_groups: Annotated[int | None, SERVE] = Field(
        default=1024,
        ge=1,
        description="`serve` ends after this many consecutive groups with equal rewards and no trainer step in "
        "between: the task is solved, or too hard to learn; null: no limit.",
    )
    target_signal_rate: Annotated[float | None, SERVE] = Field(
        default=None,
        ge=0,
        le=1,
        description="Wanted share of groups whose rewards differ; `serve` shows it beside its own.",
    )
    item_sampling: Annotated[Literal["uniform", "difficulty"], SERVE] = Field(
        default="uniform",
        description="Items of `serve`: as they come (uniform), or again and again, those whose rewards differ most "
        "often (difficulty).",
    )
    new_item_share: Annotated[float, SERVE] = Field(
        default=0.5, gt=0, lt=1, description="Share of draws by difficulty that take a new item while there are any."
    )
    item_seed: Annotated[int, SERVE] = Field(default=0, description="Seed of draws by difficulty.")
    include_messages: Annotated[bool, Facts(only_serve=True)] = Field(
        default=False, description="`serve` sends the messages along with the tokens."
    )
    credit: Annotated[Literal["rollout", "turn"], SERVE] = Field(
        default="rollout",
        description="Advantage of a token: that of its rollout, or the return from its turn on compared with the "
        "group's, where rewards have turn_rewards.",
    )
    turn_discount: Annotated[float, SERVE] = Field(
        default=1.0, ge=0, le=1, description="Discount of each later turn's reward, with credit turn."
    )
    soft_length_limit: Annotated[int | None, SERVE] = Field(
        default=None,
        ge=1,
        description="Sampled tokens of a rollout from which on the score that the trainer gets is lowered by all of "
        "length_penalty; null: never.",
    )
    soft_length_buffer: Annotated[int, SERVE] = Field(
        default=512, ge=1, description="The last tokens before soft_length_limit, over which the penalty grows."
    )
    length_penalty: Annotated[float, SERVE] = Field(
        default=1.0, ge=0, description="Penalty at soft_length_limit; the reward in records and figures stays."
    )
    max_batches_offpolicy: Annotated[int, SERVE] = Field(
        default=3,
        ge=1,
        description="Batches that may be in flight, in the outbox or at the API before `serve` pauses.",
    )
    max_staleness: Annotated[int | None, SERVE] = Field(
        default=8,
        ge=0,
        description="Batches that the trainer may receive between the start of a group and the group's own batch; "
        "null: no limit.",
    )
    when_stale: Annotated[Literal["wait", "drop", "replay", "mark"], SERVE] = Field(
        default="wait",
        description="For a group that would exceed max_staleness: wait for it before others start, drop it, replay "
        "its item, or mark it.",
    )
    inference_weight: Annotated[float, SERVE] = Field(
        default=1.0, description="Share of the trainer's batches, relative to the trainer's other environments."
    )
    min_batch_allocation: Annotated[float | None, SERVE] = Field(
        default=None, description="Minimum share of every batch."
    )
    worker_timeout: Annotated[float, SERVE] = Field(
        default=600,
        description="Limit in seconds of the agent's own time per rollout of `serve`, if rollout_timeout is longer. "
        "It also bounds a hanging group: its rollouts with their waits, retries and rewards.",
    )
    grace_period: Annotated[float, SERVE] = Field(
        default=60.0, ge=0, description="Seconds for rollouts in flight to finish when `serve` ends."
    )
    steps_per_eval: Annotated[int, SERVE] = Field(
        default=100, description="Trainer steps between two evaluations of `serve`."
    )
    eval_handling: Annotated[EvalHandlingEnum, SERVE] = Field(
        default=EvalHandlingEnum.STOP_TRAIN,
        description="How `serve` treats rollouts while it evaluates: STOP_TRAIN, LIMIT_TRAIN or NONE.",
    )
    eval_limit_ratio: Annotated[float, SERVE] = Field(
        default=0.5,
        description="Share of rollouts that continue during an evaluation, if eval_handling is LIMIT_TRAIN.",
    )

    @field_validator("split_rollouts", mode="before")
    @classmethod
    def _rename_split(cls, value: Any) -> Any:
        return "all" if value == "advantages" else value

    @model_validator(mode="after")
    def _check_split(self) -> ServeSettings:
        check_split(SplitRollouts(self.split_rollouts), self.discarded_attempts)
        return self

    @model_validator(mode="after")
    def _check_length(self) -> ServeSettings:
        if self.soft_length_limit is not None and self.soft_length_buffer > self.soft_length_limit:
            raise ValueError(
                f"soft_length_buffer {self.soft_length_buffer} is more than soft_length_limit "
                f"{self.soft_length_limit}, so that every rollout would be penalised: lower it"
            )
        return self
