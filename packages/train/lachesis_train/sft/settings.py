"""`sft:`, the settings of a run on files; the model, Adam, the folder and the checkpoints are those of `training:`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SftSettings(BaseModel):
    """`sft:`."""

    model_config = ConfigDict(extra="forbid")

    epochs: int = Field(default=1, ge=1, description="How often each example is trained.")
    batch_size: int = Field(default=16, ge=1, description="Sequences of a step.")
    batch_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of a step at most, context included, in place of batch_size."
    )
    seed: int = Field(default=0, description="Seed for the order of the examples.")
    learning_rate: float | None = Field(
        default=None, ge=0, description="Adam's learning rate, where it is not training.learning_rate."
    )
    validation_share: float = Field(
        default=0.05, ge=0, lt=1, description="Share of the items that are held out to measure the loss."
    )
    eval_interval: int = Field(
        default=0, ge=0, description="Steps between two measurements (0: at the start, and at the end of each epoch)."
    )
    completed_only: bool = Field(default=True, description="Leave out rollouts that did not complete.")
    min_reward: float | None = Field(
        default=None, description="Leave out rollouts with a lower reward, or without one."
    )
    reasoning: Literal["keep", "drop"] = Field(
        default="keep",
        description="Reasoning in ShareGPT lines; keep refuses lines whose reasoning the chat template leaves out.",
    )
    chat_template: str | None = Field(
        default=None, description="File of the chat template for ShareGPT lines, or hermes; default: the model's own."
    )
