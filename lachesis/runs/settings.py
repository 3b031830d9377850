"""Settings of an environment: the fields that Hermes environments have always had, and ours, each with a default."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from backends import SandboxSpec, backend_names
from lachesis.runs.atropos import BaseEnvConfig

_NOT_ABOUT_CONTENT = frozenset(
    {
        "total_steps",
        "max_num_workers",
        "max_num_workers_per_node",
        "max_eval_workers",
        "worker_timeout",
        "use_wandb",
        "wandb_name",
        "rollout_server_url",
        "data_path_to_save_groups",
        "data_dir_to_save_evals",
        "eval_items",
        "num_rollouts_to_keep",
        "num_rollouts_per_group_for_logging",
        "min_items_sent_before_logging",
        "max_failed_groups",
        "max_infra_retries",
        "steps_per_eval",
        "eval_handling",
        "eval_limit_ratio",
        "inference_weight",
        "max_batches_offpolicy",
        "batch_size",
        "min_batch_allocation",
        "split_rollouts",
        "grace_period",
        "spool_path",
        "terminal_options",
    }
)
"""Settings that may differ between two starts of one run: they decide how it runs, not what it writes."""


class HermesAgentEnvConfig(BaseEnvConfig):
    """Everything that can be set as `--env.NAME` or under `env:` in YAML. Unknown names are an error."""

    model_config = ConfigDict(extra="forbid")

    # What is played.
    total_steps: int = Field(
        1000, ge=-1, description="Groups that `process` plays; steps of the trainer that `serve` goes on for (-1: its)."
    )
    group_size: int = Field(4, ge=1, description="Rollouts of an item, which are scored against each other.")
    max_token_length: int = Field(2048, ge=1, description="Tokens of one completion.")

    # What the agent may do.
    enabled_toolsets: list[str] | None = Field(None, description="Toolsets or tools that the agent gets; null is all.")
    disabled_toolsets: list[str] | None = Field(None, description="Toolsets or tools that are taken away again.")
    distribution: str | None = Field(None, description="Named distribution to draw the toolsets of a group from.")
    max_agent_turns: int = Field(30, ge=1, description="Completions per rollout, the final answer included.")
    agent_temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    system_prompt: str | None = Field(None, description="System message of every rollout.")
    extra_body: dict[str, Any] | None = Field(None, description="Extra fields of every request to the model server.")
    tool_call_parser: str = Field(
        "hermes", description="Parser for completions whose tool calls the server left in the text; auto detects it."
    )

    # How exact tokens are kept (Phase 2: server_type vllm or sglang, openai.engine, and always in `serve`).
    chat_template: str | None = Field(None, description="File of the chat template; default: the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template, for example '{enable_thinking: false}'."
    )
    when_unextendable: Literal["branch", "error"] = Field(
        "branch",
        description="What a turn does whose template cannot go on from sampled tokens: render anew, or stop.",
    )

    # What `serve` sends.
    split_rollouts: Literal["longest", "advantages"] = Field(
        "longest",
        description="A rollout of several samples: send the longest, or all with advantages and their own group size.",
    )
    grace_period: float = Field(60.0, ge=0, description="Seconds that rollouts in flight get to finish at the end.")
    spool_path: str | None = Field(
        None, description="Folder in which `serve` keeps groups until they are sent; default: data/NAME/spool."
    )

    # Where its tools run.
    terminal_backend: str = Field(
        "local", description=f"What makes the sandboxes: {', '.join(backend_names())}, or package.module:Class."
    )
    terminal_timeout: int = Field(120, ge=1, description="Seconds a command may take unless the call says otherwise.")
    terminal_lifetime: int = Field(3600, ge=1, description="Seconds after which a sandbox ends itself.")
    terminal_image: str | None = Field(
        None, description="What a sandbox is made from, in the backend's terms; null is the backend's default."
    )
    terminal_workdir: str | None = Field(None, description="Folder inside in which commands start.")
    terminal_env: dict[str, str] = Field(default_factory=dict, description="Variables to set inside.")
    terminal_network: bool = Field(False, description="Whether commands may use the network.")
    terminal_cpus: float | None = Field(None, gt=0, description="Processors' worth of time for a whole sandbox.")
    terminal_memory: int | None = Field(None, gt=0, description="Megabytes of memory for a whole sandbox.")
    terminal_pids: int | None = Field(None, gt=0, description="Processes and threads in a sandbox.")
    terminal_disk: int | None = Field(None, gt=0, description="Megabytes that may be written in a sandbox.")
    terminal_options: dict[str, Any] = Field(
        default_factory=dict, description="The backend's own options, for example '{host: worker-1}' for ssh."
    )
    sandbox: Literal["bubblewrap", "none"] = Field(
        "bubblewrap",
        description="Isolation of the local backend. 'none' runs the model's commands as you: trusted use only.",
    )

    # What it is asked.
    dataset_name: str | None = Field(None, description="Dataset; what names mean is the environment's.")
    dataset_split: str = Field("train", description="Split of the dataset to train on.")
    prompt_field: str = Field("prompt", description="Field of a row that holds the prompt.")

    # Told to the model, never written into a trajectory.
    ephemeral_system_prompt: str | None = Field(
        None, description="Appended to the system message of requests; in no trajectory."
    )
    prefill_messages: list[dict[str, Any]] = Field(
        default_factory=list, description="Messages behind the system message of requests; in no trajectory."
    )

    # Budgets of a rollout, besides max_agent_turns and max_token_length (tokens of one completion).
    max_tool_calls: int | None = Field(None, ge=1, description="Tool calls per rollout.")
    rollout_token_budget: int | None = Field(None, ge=1, description="Completion tokens per rollout.")
    rollout_timeout: float | None = Field(1800.0, gt=0, description="Wall-clock seconds per rollout.")
    reward_timeout: float = Field(300.0, gt=0, description="Wall-clock seconds for one reward.")

    # Retries.
    max_resamples: int = Field(3, ge=0, description="How often an unusable completion is sampled again.")
    max_faulty_turns: int = Field(3, ge=1, description="Turns in a row with calls that cannot be run before giving up.")
    max_infra_retries: int = Field(2, ge=0, description="New starts of a rollout that the infrastructure broke.")
    max_failed_groups: int = Field(
        3, ge=1, description="Groups in a row without a single scored rollout before the run stops."
    )

    # Evaluation.
    eval_items: int = Field(50, ge=1, description="Problems that `evaluate` plays.")
    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluation.")

    # Output.
    trajectory_system_prompt: Literal["generated", "actual"] = Field(
        "generated",
        description="System turn of ShareGPT trajectories: Hermes' tool prompt, or what the model was told.",
    )
    use_wandb: bool = Field(False, description="Log to Weights & Biases (needs a login, or WANDB_MODE=offline).")

    @model_validator(mode="after")
    def _check_distribution(self) -> HermesAgentEnvConfig:
        if self.distribution is not None:
            raise ValueError("toolset distributions are not available yet; set enabled_toolsets instead")
        return self

    @model_validator(mode="after")
    def _check_isolation(self) -> HermesAgentEnvConfig:
        if self.sandbox == "none" and self.terminal_backend != "local":
            raise ValueError(
                f"sandbox: none is a setting of the local backend; terminal_backend is {self.terminal_backend!r}"
            )
        return self

    @field_validator("total_steps")
    @classmethod
    def _check_total_steps(cls, value: int) -> int:
        if value == 0:
            raise ValueError("has to be at least 1, or -1 for as many as the trainer makes")
        return value

    def sandbox_spec(self, labels: Mapping[str, str]) -> SandboxSpec:
        """What a rollout's sandbox is to be, as far as the settings say it."""
        return SandboxSpec(
            image=self.terminal_image,
            workdir=self.terminal_workdir,
            env=self.terminal_env,
            network=self.terminal_network,
            cpus=self.terminal_cpus,
            memory_bytes=None if self.terminal_memory is None else self.terminal_memory << 20,
            pids=self.terminal_pids,
            disk_bytes=None if self.terminal_disk is None else self.terminal_disk << 20,
            lifetime=float(self.terminal_lifetime),
            labels=labels,
        )

    def backend_options(self) -> dict[str, Any]:
        """Options for `create_backend`."""
        own = {"isolation": self.sandbox} if self.terminal_backend == "local" else {}
        return {**own, **self.terminal_options}

    def about_content(self, *, evaluation: bool) -> dict[str, Any]:
        """The settings that decide what a run writes, as JSON: a second start has to have the same."""
        irrelevant = {"group_size", "agent_temperature"} if evaluation else {"eval_temperature"}
        return _without_values(self.model_dump(mode="json", exclude=set(_NOT_ABOUT_CONTENT | irrelevant)))

    def public(self) -> dict[str, Any]:
        """All settings as JSON, as far as others may read them."""
        return _without_values(self.model_dump(mode="json", exclude={"terminal_options"}))


def _without_values(settings: dict[str, Any]) -> dict[str, Any]:
    """Variables of a sandbox may be secrets: of their values only digests are written down, so that a change shows."""
    digests = {name: sha256(value.encode()).hexdigest()[:16] for name, value in settings["terminal_env"].items()}
    return {**settings, "terminal_env": digests}
