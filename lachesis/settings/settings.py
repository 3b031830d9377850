"""Settings of an environment. Each is described once, on its field; see `setting_facts` for what else a field says."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt
from pydantic.functional_validators import field_validator, model_validator

from backends import SandboxSpec, backend_names
from lachesis.settings.removed_settings import RemovedSettings
from lachesis.settings.serve_settings import ServeSettings
from lachesis.settings.setting_facts import COUNT, HOW, Facts, all_facts, without_secrets
from lachesis.settings.tree_settings import TreeSettings
from lachesis_messages.responses import as_message
from lachesis_tools.budget import (
    DEFAULT_PREVIEW_SIZE_CHARS,
    DEFAULT_RESULT_SIZE_CHARS,
    DEFAULT_TURN_BUDGET_CHARS,
    ResultBudget,
)


class UnknownSetting(UserWarning):
    """Code gives a settings class a value for a name that it does not have."""


class HermesAgentEnvConfig(ServeSettings, TreeSettings, RemovedSettings):
    """Everything that can be set as `--env.NAME` or under `env:` in YAML. Unknown names are an error there.

    Unknown names in code are ignored with a warning; Atropos' `BaseEnvConfig` ignores them silently. It has the fields
    of the removed stack and of Atropos' `BaseEnvConfig`, with their defaults, and new ones.
    """

    model_config = ConfigDict(extra="forbid")

    def __init__(self, **values: Any) -> None:
        unknown = [name for name in values if name not in _names(type(self))]
        if unknown and self.model_config.get("extra") == "forbid":
            text = f"{type(self).__name__} has no setting {', '.join(unknown)}: left out; declare a field to use it"
            warnings.warn(UnknownSetting(text), stacklevel=2)
            values = {name: value for name, value in values.items() if name not in unknown}
        super().__init__(**values)

    # What is run.
    total_steps: Annotated[int, HOW, COUNT] = Field(
        default=1000,
        description="Groups that `process` runs; if set, the trainer step at which `serve` ends (-1: no limit).",
    )
    group_size: Annotated[int, Facts(content="training")] = Field(
        default=4, ge=1, description="Rollouts of each item, which are scored against each other."
    )
    max_num_workers: Annotated[int, HOW, COUNT] = Field(
        default=-1,
        description="Groups run at once in `process` and `serve`; -1: max_num_workers_per_node for each server.",
    )
    max_num_workers_per_node: Annotated[int, HOW] = Field(
        default=8, ge=1, description="Groups run at once for each server, if max_num_workers is -1."
    )
    dataset_name: str | None = Field(default=None, description="Dataset, by a name that the environment supports.")
    dataset_split: str = Field(default="train", description="Split of the dataset to train on.")
    prompt_field: str = Field(default="prompt", description="Field of a row that contains the prompt.")

    # The agent.
    enabled_toolsets: list[str] | None = Field(
        default=None, description="Toolsets or tools that the agent gets; null: all."
    )
    disabled_toolsets: list[str] | None = Field(default=None, description="Toolsets or tools to leave out of these.")
    distribution: str | None = Field(
        default=None,
        description="Named distribution that draws the toolsets of each group; enabled_toolsets is then ignored.",
    )
    web: str | None = Field(default=None, description="Web pages: corpus:PATH, searxng:URL, firecrawl, replay:FILE.")
    vision: str | None = Field(default=None, description="Who looks at images: policy, or MODEL@URL.")
    mcp: dict[str, str] | None = Field(default=None, description="MCP servers: commands in each sandbox, by name.")
    web_record: Annotated[str | None, HOW] = Field(default=None, description="File that keeps live answers of web.")
    max_agent_turns: int = Field(default=30, ge=1, description="Completions per rollout, including the final answer.")
    max_token_length: int = Field(default=2048, ge=1, description="Tokens of one completion.")
    max_tool_calls: int | None = Field(default=None, ge=1, description="Tool calls per rollout.")
    rollout_token_budget: int | None = Field(default=None, ge=1, description="Completion tokens per rollout.")
    rollout_timeout: float | None = Field(
        default=1800.0,
        gt=0,
        description="Time limit in seconds for each rollout; counts the agent's own time: commands and answered "
        "completions.",
    )
    setup_timeout: Annotated[float, HOW] = Field(
        default=300.0,
        gt=0,
        description="Wall-clock seconds for copying files into a rollout's sandbox and setting it up.",
    )
    reward_timeout: float = Field(default=300.0, gt=0, description="Wall-clock seconds for the rewards of a rollout.")
    judge_server: Annotated[dict[str, Any] | None, Facts(secret=True)] = Field(
        default=None,
        description="Model server that `self.judge` calls, as '{base_url: URL, model_name: NAME}', with any setting "
        "of openai.*.",
    )
    score_of_timeout: Literal["reward", "leave_out"] | FiniteFloat = Field(
        default="reward",
        description="Score of a rollout that used up rollout_timeout: reward (computed on the sandbox as it is), a "
        "number, or leave_out.",
    )
    score_of_agent_fault: Literal["leave_out"] | FiniteFloat = Field(
        default=0.0,
        description="Score of a rollout whose agent broke its own sandbox so that the reward failed: a number, or "
        "leave_out.",
    )
    agent_temperature: Annotated[float, Facts(content="training")] = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="Sampling temperature of rollouts."
    )
    system_prompt: str | None = Field(default=None, description="System message of every rollout.")
    ephemeral_system_prompt: str | None = Field(
        default=None, description="Appended to the system message of requests, but not of trajectories."
    )
    prefill_messages: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Messages inserted after the system message of requests, but not of trajectories.",
    )
    extra_body: dict[str, Any] | None = Field(
        default=None, description="Extra fields for every request to the model server."
    )
    tool_call_parser: str = Field(
        default="hermes",
        description="Parser for completions whose tool calls the server left in the text; auto detects it.",
    )

    # A context that grows.
    compress_context_at: int | None = Field(
        default=None,
        ge=1,
        description="Prompt size in tokens from which on a summary replaces the middle of the conversation.",
    )
    compress_context_to: int | None = Field(
        default=None, ge=1, description="Target size in tokens after compression; default: half of compress_context_at."
    )
    compress_context_keep: int = Field(default=4, ge=1, description="Last messages that compression leaves unchanged.")
    compress_context_with: Annotated[Literal["policy", "extractive"] | dict[str, Any], Facts(secret=True)] = Field(
        default="policy",
        description="What writes the summary: policy (its tokens are trained), extractive (no model), or another "
        "server, as '{base_url: URL, model_name: NAME}'.",
    )

    # Tool results.
    default_result_size_chars: int = Field(
        default=DEFAULT_RESULT_SIZE_CHARS,
        ge=1,
        description="Characters of a tool result; a longer one is written to a file in the sandbox and shown as a "
        "preview.",
    )
    turn_budget_chars: int = Field(
        default=DEFAULT_TURN_BUDGET_CHARS,
        ge=1,
        description="Characters of all tool results of a turn; above this, the longest results are moved to files "
        "first.",
    )
    preview_size_chars: int = Field(
        default=DEFAULT_PREVIEW_SIZE_CHARS, ge=0, description="Characters of the preview of such a result."
    )
    tool_result_overrides: dict[str, NonNegativeInt] | None = Field(
        default=None,
        description="Limits per tool name that replace default_result_size_chars; results of read_file have no limit.",
    )
    tool_result_format: Literal["text", "json"] = Field(
        default="text", description="json: the model reads every tool result as a JSON object."
    )

    # Exact tokens (Phase 2: server_type vllm or sglang, openai.engine, and always in `serve`).
    tokenizer_name: str = Field(
        default="NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        description="Hugging Face tokenizer of the model, if openai.tokenizer_name does not name one.",
    )
    chat_template: str | None = Field(
        default=None,
        description="A file, or hermes, hermes_short or pythonic_short; default: the tokenizer's own chat template.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Extra variables for the chat template, for example '{enable_thinking: false}'."
    )
    when_unextendable: Literal["branch", "error"] = Field(
        default="branch",
        description="If the chat template cannot continue from the sampled tokens: branch (render the conversation "
        "again), or error.",
    )
    special_tokens_in_text: Literal["encode_as_text", "as_is", "error"] = Field(
        default="encode_as_text",
        description="Special tokens spelled out in messages or tools (Phase 2): encoded as text, as the token "
        "itself, or an error.",
    )

    # Sandboxes.
    terminal_backend: Annotated[str, Facts(choices=backend_names)] = Field(
        default="local", description="Backend of the sandboxes."
    )
    terminal_options: Annotated[dict[str, Any], HOW] = Field(
        default_factory=dict,
        description="Options of the backend, for example '{host: worker-1}' for ssh; `--help` after "
        "--env.terminal_backend lists them.",
    )
    sandbox: Literal["bubblewrap", "none"] = Field(
        default="bubblewrap",
        description="Isolation of the local backend. 'none' runs the model's commands as you: for trusted use only.",
    )
    sandbox_profile: Literal["standard", "hardened"] = Field(
        default="standard",
        description="'hardened' requires all protections and limits that the backend has; a missing one is an error.",
    )
    terminal_timeout: int = Field(
        default=120, ge=1, description="Time limit of a command in seconds, unless the call asks for more."
    )
    terminal_lifetime: int = Field(
        default=3600, ge=1, description="Seconds after which a sandbox ends itself; extended if a rollout needs longer."
    )
    terminal_warm: Annotated[int, HOW] = Field(default=0, ge=0, description="Sandboxes kept for later rollouts.")
    terminal_image: str | None = Field(
        default=None, description="Image of the sandboxes, in the backend's notation; null: the backend's default."
    )
    terminal_workdir: str | None = Field(default=None, description="Folder in the sandbox in which commands start.")
    terminal_carries_cd: bool = Field(
        default=True,
        description="Whether a cd by the agent carries over to its next commands; if not, each starts in the "
        "initial folder.",
    )
    terminal_env: Annotated[dict[str, str], Facts(secret=True)] = Field(
        default_factory=dict, description="Environment variables in the sandbox."
    )
    terminal_network: bool = Field(default=False, description="Whether commands may use the network.")
    terminal_cpus: float | None = Field(
        default=None, ge=0, description="CPUs for a whole sandbox; null: 2; 0: no limit."
    )
    terminal_memory: int | None = Field(
        default=None, ge=0, description="MiB of memory for a whole sandbox; null: 2048; 0: no limit."
    )
    terminal_pids: int | None = Field(
        default=None, ge=0, description="Processes and threads in a sandbox; null: 2048 or 1024; 0: no limit."
    )
    terminal_disk: int | None = Field(
        default=None, ge=0, description="MiB that can be written in a sandbox; null: usually 1024."
    )

    # Retries.
    max_resamples: int = Field(default=3, ge=0, description="How often an unusable completion is sampled again.")
    max_faulty_turns: int = Field(
        default=3, ge=1, description="Consecutive turns with calls that cannot be run before the rollout ends."
    )
    max_infra_retries: Annotated[int, HOW] = Field(
        default=2, ge=0, description="Retries of a rollout that broke; for a trainer, of any without a score."
    )
    max_failed_groups: Annotated[int, HOW] = Field(
        default=3,
        ge=1,
        description="Consecutive groups without a scored rollout before the run stops; `eval` stops after as "
        "many rollouts as these groups have.",
    )

    # Evaluation.
    eval_items: Annotated[int, HOW] = Field(default=50, ge=1, description="Problems that `eval` runs.")
    eval_samples: Annotated[int, HOW] = Field(
        default=1, ge=1, description="Samples of each problem, from which pass@k and pass^k are computed."
    )
    eval_category: Annotated[str, HOW] = Field(
        default="category",
        description="Field of an item, or of its metadata, by which `eval` breaks scores down.",
    )
    eval_temperature: Annotated[float, Facts(content="evaluation")] = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Sampling temperature of evaluation; if it is not set, several samples of a problem use "
        "agent_temperature.",
    )
    max_eval_workers: Annotated[int, HOW] = Field(default=16, ge=1, description="Rollouts that `eval` runs at once.")

    # Output.
    data_path_to_save_groups: Annotated[str | None, HOW] = Field(
        default=None, description="Where `process` writes (PATH.jsonl); default: data/NAME/groups.jsonl."
    )
    data_dir_to_save_evals: Annotated[str | None, HOW] = Field(
        default=None, description="Folder that `eval` writes into; default: data/NAME/eval."
    )
    when_code_changed: Annotated[Literal["ask", "new_folder", "continue"], HOW] = Field(
        default="ask",
        description="If the environment's code changed since an earlier start: ask (on a terminal; elsewhere a new "
        "folder), new_folder, or continue with the existing scores.",
    )
    trajectory_system_prompt: Literal["generated", "actual"] = Field(
        default="generated",
        description="System turn of ShareGPT trajectories: Hermes' tool prompt (generated), or the messages that "
        "the model received (actual).",
    )
    trajectory_min_reward: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Completed rollouts with a lower reward, or without one, go to failed_trajectories.jsonl too.",
    )
    save_trajectories: Annotated[bool, HOW] = Field(
        default=True,
        description="Write ShareGPT trajectories next to the groups; also --save-trajectories, and `agent:` in YAML.",
    )
    use_wandb: Annotated[bool, HOW] = Field(
        default=False, description="Log to Weights & Biases (needs a login, or WANDB_MODE=offline)."
    )
    wandb_name: Annotated[str | None, HOW] = Field(default=None, description="Name of the W&B run.")
    num_rollouts_to_keep: Annotated[int, HOW] = Field(default=32, ge=0, description="Rollouts in a W&B table.")

    @field_validator("prefill_messages")
    @classmethod
    def _check_prefill(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, message in enumerate(messages):
            as_message(message, number)
        return messages

    @field_validator("distribution")
    @classmethod
    def _check_distribution(cls, value: str | None) -> str | None:
        if value is not None:
            from lachesis_tools.distributions import distribution

            distribution(value)
        return value

    @model_validator(mode="after")
    def _check_isolation(self) -> HermesAgentEnvConfig:
        if self.sandbox == "none" and (backend := self.terminal_backend) != "local":
            raise ValueError(f"sandbox: none is a setting of the local backend; terminal_backend is {backend!r}")
        return self

    @model_validator(mode="after")
    def _check_compression(self) -> HermesAgentEnvConfig:
        at, to = self.compress_context_at, self.compress_context_to
        if at is None and to is not None:
            raise ValueError("compress_context_to has no effect without compress_context_at")
        if at is not None and not 0 < (at // 2 if to is None else to) < at:
            raise ValueError(f"compress_context_to must be between 0 and compress_context_at, {at}; it is {to}")
        return self

    def sandbox_spec(self, labels: Mapping[str, str]) -> SandboxSpec:
        """The sandbox of a rollout, as far as the settings define it."""
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

    def build_budget_config(self) -> ResultBudget:
        """The limits of tool results."""
        return ResultBudget(
            self.default_result_size_chars,
            self.turn_budget_chars,
            self.preview_size_chars,
            dict(self.tool_result_overrides or {}),
            self.tool_result_format == "json",
        )

    def backend_options(self) -> dict[str, Any]:
        """Options for `create_backend`."""
        own: dict[str, Any] = {"isolation": self.sandbox} if self.terminal_backend == "local" else self.of_pool_url()
        profile = {"profile": self.sandbox_profile} if self.sandbox_profile != "standard" else {}
        return {**own, **self.terminal_options, **profile}

    def about_content(self, *, evaluation: bool) -> dict[str, Any]:
        """The settings that decide what a run writes, as JSON: they must be the same in a second start."""
        deciding = {"always", "evaluation" if evaluation else "training"}
        others = {name for name, facts in all_facts(type(self)).items() if facts.content not in deciding}
        found = without_secrets(self.model_dump(mode="json", exclude=others | self.without_trees()))
        if self.judge_server is not None:  # its address says nothing about its answers
            found["judge_server"].pop("base_url", None)
        return found

    def public(self) -> dict[str, Any]:
        """The settings that others may read, as JSON."""
        removed = {name for name, facts in all_facts(type(self)).items() if facts.removed}
        secret = {"terminal_options", "rollout_server_token"}
        return without_secrets(self.model_dump(mode="json", exclude={*secret, *removed}))


def _names(model: type[BaseModel]) -> set[str]:
    """What code may call the fields."""
    names = set(model.model_fields)
    for field in model.model_fields.values():
        alias = field.validation_alias  # `alias`, where only that is set
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names |= {str(choice.path[0]) if isinstance(choice, AliasPath) else str(choice) for choice in choices if choice}
    return names
