"""Settings of an environment. Each is described once, on its field; see `setting_facts` for what else a field says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from enum import StrEnum
from hashlib import sha256
from inspect import get_annotations
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from backends import SandboxSpec, backend_names
from backends.errors import SettingsError
from lachesis.settings.removed_settings import RemovedSettings
from lachesis.settings.setting_facts import HOW, IGNORED, SERVE, Facts, all_facts
from lachesis_client.errors import LOGIN
from lachesis_client.urls import HTTP_URL
from lachesis_messages.records.split_rollouts import SplitRollouts, check_split
from lachesis_tools.budget import (
    DEFAULT_PREVIEW_SIZE_CHARS,
    DEFAULT_RESULT_SIZE_CHARS,
    DEFAULT_TURN_BUDGET_CHARS,
    ResultBudget,
)


class EvalHandlingEnum(StrEnum):
    """What `serve` does with rollouts while it evaluates."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class UnknownSetting(UserWarning):
    """Code gives a settings class a value for a name that it does not have."""


class HermesAgentEnvConfig(RemovedSettings):
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

    # What is played.
    total_steps: Annotated[int, HOW] = Field(
        default=1000,
        ge=-1,
        description="Groups that `process` plays; if set, the trainer step at which `serve` ends (-1: no limit).",
    )
    group_size: Annotated[int, Facts(content="training")] = Field(
        default=4, ge=1, description="Rollouts of each item, which are scored against each other."
    )
    max_num_workers: Annotated[int, HOW] = Field(
        default=-1,
        description="Groups played at once in `process` and `serve`; -1: max_num_workers_per_node for each server.",
    )
    max_num_workers_per_node: Annotated[int, HOW] = Field(
        default=8, description="Groups played at once for each server, if max_num_workers is -1."
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
        description="Named distribution from which the toolsets of each group are drawn; enabled_toolsets is then "
        "ignored.",
    )
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
        default=1.0, ge=0, description="Sampling temperature of rollouts."
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
    tool_result_overrides: dict[str, int] | None = Field(
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
        description="File of the chat template, or hermes or hermes_short; default: the tokenizer's own template.",
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
        description="'hardened' requires every isolation feature and limit that the backend supports; a missing one "
        "is an error.",
    )
    terminal_timeout: int = Field(
        default=120, ge=1, description="Time limit of a command in seconds, unless the call asks for more."
    )
    terminal_lifetime: int = Field(
        default=3600, ge=1, description="Seconds after which a sandbox ends itself; extended if a rollout needs longer."
    )
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
        default=None, ge=0, description="Megabytes of memory for a whole sandbox; null: 2048; 0: no limit."
    )
    terminal_pids: int | None = Field(
        default=None, ge=0, description="Processes and threads in a sandbox; null: 2048 or 1024; 0: no limit."
    )
    terminal_disk: int | None = Field(
        default=None, ge=0, description="Megabytes that can be written in a sandbox; null: usually 1024."
    )

    # Retries.
    max_resamples: int = Field(default=3, ge=0, description="How often an unusable completion is sampled again.")
    max_faulty_turns: int = Field(
        default=3, ge=1, description="Consecutive turns with calls that cannot be run before the rollout ends."
    )
    max_infra_retries: Annotated[int, HOW] = Field(
        default=2, ge=0, description="Retries of a rollout that the infrastructure broke."
    )
    max_failed_groups: Annotated[int, HOW] = Field(
        default=3,
        ge=1,
        description="Consecutive groups without a scored rollout before the run stops; `evaluate` stops after as "
        "many rollouts as these groups have.",
    )

    # Evaluation.
    eval_items: Annotated[int, HOW] = Field(default=50, ge=1, description="Problems that `evaluate` plays.")
    eval_samples: Annotated[int, HOW] = Field(
        default=1, ge=1, description="Samples of each problem, from which pass@k and pass^k are computed."
    )
    eval_category: Annotated[str, HOW] = Field(
        default="category",
        description="Field of an item, or of its metadata, by which `evaluate` breaks scores down.",
    )
    eval_temperature: Annotated[float, Facts(content="evaluation")] = Field(
        default=0.0,
        ge=0,
        description="Sampling temperature of evaluation; if it is not set, several samples of a problem use "
        "agent_temperature.",
    )
    max_eval_workers: Annotated[int, HOW] = Field(default=16, description="Rollouts that `evaluate` plays at once.")

    # Output.
    data_path_to_save_groups: Annotated[str | None, HOW] = Field(
        default=None, description="Where `process` writes (PATH.jsonl); default: data/NAME/groups.jsonl."
    )
    data_dir_to_save_evals: Annotated[str | None, HOW] = Field(
        default=None, description="Folder that `evaluate` writes into; default: data/NAME/eval."
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
        description="Rollouts with a lower reward, or without one, go to failed_trajectories.jsonl, even completed "
        "ones.",
    )
    save_trajectories: Annotated[bool, HOW] = Field(
        default=True,
        description="Write ShareGPT trajectories next to the groups; also --save-trajectories, and `agent:` in YAML.",
    )
    use_wandb: Annotated[bool, HOW] = Field(
        default=False, description="Log to Weights & Biases (needs a login, or WANDB_MODE=offline)."
    )
    wandb_name: Annotated[str | None, HOW] = Field(default=None, description="Name of the W&B run.")
    num_rollouts_to_keep: Annotated[int, HOW] = Field(default=32, description="Rollouts in a W&B table.")

    # `serve`.
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
    include_messages: Annotated[bool, Facts(only_serve=True)] = Field(
        default=False, description="`serve` sends the messages along with the tokens."
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

    # Settings of Atropos without effect, and those that are rejected.
    batch_size: Annotated[int, IGNORED] = -1
    min_items_sent_before_logging: Annotated[int, IGNORED] = 2
    num_rollouts_per_group_for_logging: Annotated[int, IGNORED] = 1
    thinking_mode: Annotated[bool, Facts(use_instead="--openai.extra_body")] = False
    reasoning_effort: Annotated[
        str | None, Facts(use_instead="--openai.extra_body, for example '{reasoning_effort: high}'")
    ] = None
    max_reasoning_tokens: Annotated[int | None, Facts(use_instead="--openai.extra_body")] = Field(
        default=None, ge=1024, le=32000
    )
    custom_thinking_prompt: Annotated[str | None, Facts(use_instead="--env.ephemeral_system_prompt")] = None

    @field_validator("distribution")
    @classmethod
    def _check_distribution(cls, value: str | None) -> str | None:
        if value is not None:
            from lachesis_tools.distributions import distribution

            distribution(value)
        return value

    @model_validator(mode="after")
    def _check_isolation(self) -> HermesAgentEnvConfig:
        if self.sandbox == "none" and self.terminal_backend != "local":
            raise ValueError(
                f"sandbox: none is a setting of the local backend; terminal_backend is {self.terminal_backend!r}"
            )
        return self

    @model_validator(mode="after")
    def _check_compression(self) -> HermesAgentEnvConfig:
        at, to = self.compress_context_at, self.compress_context_to
        if at is None and to is not None:
            raise ValueError("compress_context_to has no effect without compress_context_at")
        if at is not None and not 0 < (at // 2 if to is None else to) < at:
            raise ValueError(f"compress_context_to must be between 0 and compress_context_at, {at}; it is {to}")
        return self

    @field_validator("split_rollouts", mode="before")
    @classmethod
    def _rename_split(cls, value: Any) -> Any:
        return "all" if value == "advantages" else value

    @model_validator(mode="after")
    def _check_split(self) -> HermesAgentEnvConfig:
        check_split(SplitRollouts(self.split_rollouts), self.discarded_attempts)
        return self

    @field_validator("total_steps")
    @classmethod
    def _check_total_steps(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be at least 1, or -1 for as many as the trainer makes")
        return value

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
        own = {"isolation": self.sandbox} if self.terminal_backend == "local" else {}
        profile = {"profile": self.sandbox_profile} if self.sandbox_profile != "standard" else {}
        return {**own, **self.terminal_options, **profile}

    def about_content(self, *, evaluation: bool) -> dict[str, Any]:
        """The settings that decide what a run writes, as JSON: they must be the same in a second start."""
        deciding = {"always", "evaluation" if evaluation else "training"}
        others = {name for name, facts in all_facts(type(self)).items() if facts.content not in deciding}
        found = _without_values(self.model_dump(mode="json", exclude=others))
        if self.judge_server is not None:  # its address says nothing about its answers
            found["judge_server"].pop("base_url", None)
        return found

    def public(self) -> dict[str, Any]:
        """The settings that others may read, as JSON."""
        removed = {name for name, facts in all_facts(type(self)).items() if facts.removed}
        secret = {"terminal_options", "rollout_server_token"}
        return _without_values(self.model_dump(mode="json", exclude={*secret, *removed}))


def _names(model: type[BaseModel]) -> set[str]:
    """What code may call the fields."""
    names = set(model.model_fields)
    for field in model.model_fields.values():
        alias = field.validation_alias  # `alias`, where only that is set
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        names |= {str(choice.path[0]) if isinstance(choice, AliasPath) else str(choice) for choice in choices if choice}
    return names


def chosen_values(config: BaseModel, defaults: type[BaseModel] | None = None) -> dict[str, Any]:
    """The values that were set, and those that differ from the defaults of the class `defaults`, or of their own class.

    Settings made from them know which of theirs were chosen: `model_fields_set` is what was set.
    """
    fields = (defaults or type(config)).model_fields
    values = config.model_dump(mode="python" if defaults is None else "json")
    return {
        name: value
        for name, value in values.items()
        if name in config.model_fields_set or name not in fields or not _is_default(fields[name], value)
    }


def _is_default(field: FieldInfo, value: Any) -> bool:
    if getattr(field, "default_factory_takes_validated_data", False):
        return False
    return bool(value == field.get_default(call_default_factory=True))


def is_chosen(config: HermesAgentEnvConfig, name: str) -> bool:
    """Whether a setting has a value that somebody chose: it was set, or a subclass or class attribute defaults it."""
    own = type(config).__mro__[: type(config).__mro__.index(HermesAgentEnvConfig)]
    return name in config.model_fields_set or any(name in get_annotations(cls) for cls in own)


def as_env_config(config: BaseModel, env_config_cls: type[HermesAgentEnvConfig]) -> HermesAgentEnvConfig:
    """A copy of the settings as the environment's class, if they are of a base class of it or Atropos' `BaseEnvConfig`.

    Of a base class, only the values that were chosen are taken: the others have the environment's defaults.
    """
    if isinstance(config, env_config_cls) or (
        isinstance(config, HermesAgentEnvConfig) and not issubclass(env_config_cls, type(config))
    ):
        return config.model_copy(deep=True)  # two environments may be made from one object
    try:
        if isinstance(config, HermesAgentEnvConfig):
            return env_config_cls(**chosen_values(config))
        return env_config_cls(**chosen_values(config, env_config_cls))
    except ValidationError as error:
        raise SettingsError(f"{type(config).__name__} cannot be used as settings of an environment: {error}") from error


def _without_values(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without what may be a secret.

    Of a sandbox's variables, of `extra_body` and of what is ephemeral, digests are written, which still show a change.
    URLs lose their login.
    """
    digested: dict[str, Any] = {
        field: {name: _digest(value) for name, value in settings[field].items()}
        for field in ("terminal_env", "extra_body")
        if settings.get(field)
    }
    ephemeral = ("ephemeral_system_prompt", "prefill_messages")
    digested |= {field: _digest(settings[field]) for field in ephemeral if settings.get(field)}
    for field in ("compress_context_with", "judge_server"):
        if isinstance(server := settings.get(field), dict):
            digested[field] = {name: _without_login(value) for name, value in server.items() if name != "api_key"}
    return {**{name: _without_login(value) for name, value in settings.items()}, **digested}


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def _without_login(value: Any) -> Any:
    return LOGIN.sub(r"\g<scheme>", value) if isinstance(value, str) else value
