"""The settings of `launch_training.py`: `training:`, and what it reads of `env:` and `openai:` of the same file.

One file configures the trainer and the environment: both read `env.rollout_server_url`, `env.group_size` and so on. The
names are those of tinker-atropos where it has the setting, and its section `tinker:` is `training:` under another name.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lachesis.settings.checked import validate_settings
from lachesis.settings.setting_facts import COUNT
from lachesis_client.urls import HTTP_URL
from lachesis_tokens.samples.advantages import LossAverage
from lachesis_train.rollout_api import TrainerRegistration
from lachesis_train.tinker_sdk import Adam, LoraShape
from lachesis_train.trainer.environments import RunEnvironment

HOW: Final = "how"
"""Marks a setting that may change when a run is continued: it decides how the run runs, not what it trains, or is part
of the content under another name."""
TREES_MASKED: Final = (
    "training.mask_truncated_completions would leave out the turns that a rollout shares with others, whose rewards "
    "stay: unset it"
)


class EnvSettings(BaseModel):
    """The part of `env:` that the trainer reads; the rest belongs to the environment."""

    model_config = ConfigDict(extra="ignore")

    rollout_server_url: Annotated[str, HOW, HTTP_URL] = Field(
        default="http://localhost:8000", description="URL of the rollout API."
    )
    group_size: int = Field(default=4, ge=1, description="Rollouts of a group.")
    batch_size: Annotated[int, COUNT] = Field(default=-1, description="Sequences of a step; -1: 8 groups.")
    total_steps: Annotated[int, HOW, COUNT] = Field(
        default=-1, description="Steps, where training.num_steps names none."
    )
    tokenizer_name: Annotated[str | None, HOW] = Field(default=None, description="The model's, where it is another.")
    tool_call_parser: Annotated[str, HOW] = Field(
        default="hermes", description="Reads tool calls in chat completions of the policy server."
    )
    tree_at: Annotated[str | None, HOW] = Field(default=None, description="Where rollouts fork; null: nowhere.")

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.batch_size if self.batch_size > 0 else 8 * self.group_size


class TrainingSettings(BaseModel):
    """`training:`."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: Annotated[str, HOW] = Field(
        default="run", pattern=r"^[\w.-]*[\w-][\w.-]*$", description="Name of the run, and of its folder."
    )
    run_dir: Annotated[str | None, HOW] = Field(
        default=None, description="Folder of the run: checkpoint, metrics, report (default: data/train/NAME)."
    )
    num_steps: Annotated[int | None, HOW] = Field(
        default=None, ge=1, description="Steps of the whole run, including those before a resume."
    )
    base_model: Annotated[str | None, HOW] = Field(
        default=None, description="The model to train, by its name at the engine (default: openai.model_name)."
    )
    init_from: str | None = Field(
        default=None,
        description="Folder of another run, on files or on batches, whose last weights this run starts from.",
    )
    warm_start: int = Field(
        default=0,
        ge=0,
        description="Items that the reference policy solves before the first step: the model is fine-tuned on them.",
    )
    lora_rank: int = Field(default=32, ge=1, description="Rank of the adapter.")
    lora_seed: int = Field(default=0, description="Seed of the adapter's initial weights.")
    train_mlp: bool = Field(default=True, description="Train an adapter of the MLP layers.")
    train_attn: bool = Field(default=True, description="Train an adapter of the attention layers.")
    train_unembed: bool = Field(default=True, description="Train an adapter of the unembedding.")
    loss: Literal["importance_sampling", "ppo", "cispo", "gspo", "dppo"] = Field(
        default="importance_sampling", description="The engine's loss."
    )
    clip_low: float | None = Field(
        default=0.2,
        ge=0,
        le=1,
        description="ppo, cispo, gspo: ratios below 1 - clip_low are clipped (null, with clip_high: the engine's own "
        "bounds).",
    )
    clip_high: float | None = Field(
        default=0.2, ge=0, description="ppo, cispo, gspo: ratios above 1 + clip_high are clipped."
    )
    delta_low: float = Field(
        default=0.2, ge=0, le=1, description="dppo: largest fall of a token's probability, where its advantage is < 0."
    )
    delta_high: float = Field(
        default=0.2, ge=0, le=1, description="dppo: largest rise of a token's probability, where its advantage is > 0."
    )
    max_importance_ratio: float | None = Field(
        default=None,
        gt=0,
        description="importance_sampling: maximum weight of a token; greater ratios are cut to it (null: no limit).",
    )
    max_sequence_ratio: float | None = Field(
        default=None,
        gt=0,
        description="importance_sampling: one weight for a sequence, the product of its ratios, cut to this (null: a "
        "weight for each token). Costs a forward pass of each sequence.",
    )
    reject_ratio: Literal["product", "geometric"] = Field(
        default="geometric", description="Ratio of a sequence that decides whether it is left out."
    )
    reject_ratio_below: float | None = Field(
        default=None,
        gt=0,
        description="Leave out sequences with a smaller ratio. Costs a forward pass of each sequence.",
    )
    reject_ratio_above: float | None = Field(
        default=None,
        gt=0,
        description="Leave out sequences with a greater ratio. Costs a forward pass of each sequence.",
    )
    mask_truncated_completions: bool = Field(
        default=False,
        description="Leave out rollouts that a limit of tokens cut off; their rewards stay in the baseline.",
    )
    loss_average: LossAverage = Field(
        default=LossAverage.SAMPLE,
        description="sample: the mean over rollouts of the mean over their tokens. token: the mean over all tokens.",
    )
    advantage: Literal["centred", "normalised"] = Field(
        default="centred", description="Reward minus the group's mean; normalised: divided by its standard deviation."
    )
    kl_penalty: float = Field(
        default=0.0,
        ge=0,
        description="Weight of a KL penalty against the base model, applied to the advantages.",
    )
    teacher_url: Annotated[str | None, HOW] = Field(
        default=None,
        description="On-policy distillation: URL of a vLLM or policy server of the teacher, such as "
        "http://127.0.0.1:8002/v1.",
    )
    teacher_model: str | None = Field(default=None, description="Its model's name (default: training.base_model).")
    teacher_weight: float = Field(
        default=1.0, gt=0, description="Weight of the divergence from the teacher in the advantages."
    )
    reward_weight: float = Field(
        default=1.0, ge=0, description="Weight of the rewards in the advantages (0: the teacher alone)."
    )
    max_policy_lag: int | None = Field(
        default=None,
        ge=0,
        description="Sequences whose sampling weights are more steps old than this are left out (null: no limit).",
    )
    uncertified: Literal["refuse", "allow"] = Field(
        default="refuse", description="Groups without certificates, such as those of stock Atropos environments."
    )
    max_token_trainer_length: int = Field(
        default=2048, ge=2, description="Every sequence must be shorter; longer ones are left out and counted."
    )
    learning_rate: float = Field(default=4e-5, ge=0, description="Adam's learning rate after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps in which the learning rate grows from 0.")
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Schedule after the warm-up, down to min_learning_rate_ratio at the last step."
    )
    min_learning_rate_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Learning rate of the last step as a share of learning_rate (0: it reaches 0 only after that "
        "step).",
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam's beta1.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="Adam's beta2.")
    adam_eps: float = Field(default=1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay.")
    grad_clip_norm: float = Field(default=0.0, ge=0, description="Maximum norm of the gradient (0: no limit).")
    checkpoint_dir: Annotated[str | None, HOW] = Field(
        default=None, description="Folder in which environments may keep state (default: the run's folder)."
    )
    save_checkpoint_interval: Annotated[int, HOW] = Field(
        default=10, ge=0, description="Steps between two checkpoints (0: only at the start and at the end)."
    )
    keep_checkpoints: Annotated[int | None, HOW] = Field(
        default=None,
        ge=0,
        description="Number of most recent checkpoints whose weights the engine keeps (0: all; null: 5 with the "
        "embedded engine, all with a service).",
    )
    step_retries: Annotated[int, HOW] = Field(
        default=5, ge=0, description="Consecutive failures without a finished step after which the run stops."
    )
    end_without_environments: Annotated[float | None, HOW] = Field(
        default=300.0,
        ge=0,
        description="Seconds after which the run ends once all environments have left `lachesis api` (null: never).",
    )
    host: Annotated[str, HOW] = Field(default="127.0.0.1", description="Address of the policy server.")
    port: Annotated[int | None, HOW] = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the policy server (default: the port of openai.base_url, or 8001).",
    )
    engine_lora_layers: int | None = Field(
        default=None, ge=1, description="Embedded engine: train the last layers only (null: all)."
    )
    engine_full_finetuning: bool = Field(
        default=False, description="Embedded engine: train all parameters instead of adapters (needs float32)."
    )
    engine_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Embedded engine: data type of the weights."
    )
    engine_device: Annotated[str, HOW] = Field(
        default="cpu", description="Embedded engine: device, such as cpu, cuda or cuda:1."
    )
    engine_threads: Annotated[int, HOW] = Field(
        default=1, ge=1, description="Embedded engine: number of torch threads."
    )
    use_wandb: Annotated[bool, HOW] = Field(default=False, description="Send metrics to Weights & Biases.")
    wandb_project: Annotated[str, HOW] = Field(default="lachesis", description="W&B project, also of environments.")
    wandb_group: Annotated[str | None, HOW] = Field(default=None, description="W&B group (default: the run's name).")
    wandb_run_name: Annotated[str | None, HOW] = Field(default=None, description="Name of the W&B run.")

    @model_validator(mode="after")
    def _check_ratio(self) -> TrainingSettings:
        if self.max_importance_ratio is not None and self.loss != "importance_sampling":
            raise ValueError(
                f"training.max_importance_ratio has no effect with loss {self.loss}, which has bounds of its own "
                "(training.clip_high, or training.delta_high of dppo)"
            )
        of_teacher = {"teacher_model", "teacher_weight", "reward_weight"} & self.model_fields_set
        if self.teacher_url is None and of_teacher:
            raise ValueError(f"training.{min(of_teacher)} has an effect only with training.teacher_url")
        if (self.reject_ratio_below or 0.0) >= (self.reject_ratio_above or math.inf):
            raise ValueError(
                "training.reject_ratio_below must be less than training.reject_ratio_above, or no sequence is trained"
            )
        if self.max_sequence_ratio is not None and (
            self.loss != "importance_sampling" or self.max_importance_ratio is not None
        ):
            raise ValueError(
                "training.max_sequence_ratio replaces the ratios of tokens: it needs loss importance_sampling, without "
                "training.max_importance_ratio"
            )
        whole = self.train_mlp and self.train_attn and self.train_unembed and self.engine_lora_layers is None
        if self.engine_full_finetuning and not (whole and self.engine_dtype == "float32"):
            raise ValueError(
                "training.engine_full_finetuning trains all parameters in float32: leave training.train_mlp, "
                "train_attn, train_unembed, engine_lora_layers and engine_dtype at their defaults"
            )
        if (self.clip_low is None) != (self.clip_high is None):
            raise ValueError("set both training.clip_low and training.clip_high to null, or neither")
        return self

    @property
    def trains_without_signal(self) -> bool:
        """Whether groups without a signal are trained too, with advantage 0: a penalty or a teacher adds to it."""
        return self.kl_penalty > 0 or self.teacher_url is not None

    @property
    def needs_ratios(self) -> bool:
        """Whether logprobs of the trained weights are needed before the step, for the ratios of sequences."""
        bounds = (self.max_sequence_ratio, self.reject_ratio_below, self.reject_ratio_above)
        return any(bound is not None for bound in bounds)


class Settings(BaseModel):
    """All that the trainer reads."""

    env: EnvSettings
    training: TrainingSettings
    served_model: str
    """openai.model_name: what environments ask for."""
    base_model: str
    tokenizer: str | None
    """A name or a folder of a tokenizer; None: the engine's."""
    port: int
    num_steps: int
    environments: list[RunEnvironment] = []
    """Those of the file."""

    def of_environment(self, name: str | None) -> Settings:
        """These settings with what the environment of this name has of its own."""
        own = next((each.training for each in self.environments if each.name == name), None)
        if not own:
            return self
        values = {**self.training.model_dump(exclude_unset=True), **own}
        training = validate_settings(TrainingSettings, values, f"environments: {name}: training")
        return self.model_copy(update={"training": training})

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.training.run_dir or Path("data/train") / self.training.name)

    @property
    def warm_start_dir(self) -> Path:
        """The folder of the examples of a warm start, and of the run on them."""
        return self.run_dir / "warm-start"

    @property
    def first_run(self) -> Path | None:
        """The folder of the run whose weights this one begins with."""
        if self.training.warm_start:
            return self.warm_start_dir
        return Path(self.training.init_from) if self.training.init_from else None

    @property
    def registration(self) -> TrainerRegistration:
        """What the trainer sends to the rollout API when it registers."""
        training = self.training
        return TrainerRegistration(
            wandb_group=training.wandb_group or training.name,
            wandb_project=training.wandb_project,
            batch_size=self.env.sequences,
            max_token_len=training.max_token_trainer_length,
            checkpoint_dir=training.checkpoint_dir or str(self.run_dir),
            save_checkpoint_interval=training.save_checkpoint_interval,
            num_steps=self.num_steps,
            acknowledges=True,
        )

    @property
    def engine(self) -> dict[str, Any]:
        """Options of `start_engine`."""
        names = ("lora_layers", "full_finetuning", "dtype", "device", "threads")
        return {name: getattr(self.training, f"engine_{name}") for name in names}

    @property
    def lora(self) -> LoraShape:
        """The adapter."""
        training = self.training
        return LoraShape(
            rank=training.lora_rank,
            seed=training.lora_seed,
            train_mlp=training.train_mlp,
            train_attn=training.train_attn,
            train_unembed=training.train_unembed,
        )

    def adam(self, rate: float) -> Adam:
        """A step of Adam with this learning rate."""
        training = self.training
        return Adam(
            learning_rate=rate,
            beta1=training.adam_beta1,
            beta2=training.adam_beta2,
            eps=training.adam_eps,
            weight_decay=training.weight_decay,
            grad_clip_norm=training.grad_clip_norm,
        )

    @property
    def loss(self) -> tuple[str, dict[str, float]]:
        """The engine's loss, and its parameters.

        Importance sampling with truncated ratios has the gradient of `cispo` without a lower bound: both weight the
        gradient of a token's logprob with its advantage and the ratio, at most the bound.
        """
        training = self.training
        if training.loss == "importance_sampling":
            if training.max_importance_ratio is None:
                return training.loss, {}
            return "cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": training.max_importance_ratio}
        if training.loss == "dppo":
            return training.loss, {"delta_low": training.delta_low, "delta_high": training.delta_high}
        if training.clip_low is None or training.clip_high is None:
            return training.loss, {}
        return training.loss, {
            "clip_low_threshold": 1 - training.clip_low,
            "clip_high_threshold": 1 + training.clip_high,
        }

    @property
    def ratio_bounds(self) -> tuple[float, float] | None:
        """The importance ratios of single tokens beyond which the loss clips; None: nowhere, or not known here."""
        name, parameters = self.loss
        if name not in ("ppo", "cispo") or not parameters:
            return None
        return parameters["clip_low_threshold"], parameters["clip_high_threshold"]

    def content(self) -> dict[str, Any]:
        """The settings that decide what is trained: those that a resumed run must have again."""
        found: dict[str, Any] = {"base_model": self.base_model}
        for prefix, part in (("env", self.env), ("training", self.training)):
            for name, field in type(part).model_fields.items():
                if HOW not in field.metadata:
                    found[f"{prefix}.{name}"] = getattr(part, name)
        for each in self.environments:
            own = {
                name: "null" if value is None else value for name, value in each.training.items()
            }  # it is no default
            found |= {f"environments.{each.name}.{name}": value for name, value in own.items()}
        if self.training.teacher_url is not None:
            found["training.teacher"] = True  # its URL may change
        if self.training.learning_rate_schedule != "constant":
            found["training.num_steps"] = self.num_steps
        plain: dict[str, Any] = orjson.loads(orjson.dumps(found))
        return plain
