"""Settings of one model server, and how it is reached."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from backends.errors import ExitCode, LachesisError, SettingsError
from lachesis.other_packages import ENGINES, load_engine
from lachesis.settings.setting_facts import IGNORED, Facts
from lachesis_client.urls import HTTP_URL

KEY_VARIABLES = {"openai.com": "OPENAI_API_KEY", "openrouter.ai": "OPENROUTER_API_KEY"}
"""Domain of a public service -> the environment variable that holds its key."""

CHAT = "chat"
"""In the place of an engine: the server is asked for chat completions, and reports no tokens."""
EMBEDDED = "embedded"
REFERENCE = "reference"
DEFAULT_URL = "http://localhost:9004/v1"
"""Where Atropos expects the first local inference server."""


class ServerConfig(BaseModel):
    """Everything that can be set as `--openai.NAME` or under `openai:` in YAML. Unknown names are an error.

    It has the fields of Atropos' `APIServerConfig`. `model_name` may be `embedded` (the small model that is installed
    with Lachesis), the path of a GGUF file, or `reference` (the environment's reference policy, if it has one); the
    run starts and stops such servers.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    base_url: Annotated[str | None, HTTP_URL] = Field(
        default="", description="URL of the server, which usually ends in /v1."
    )
    model_name: str = Field(
        default="default",
        description="Model name on the server; or embedded, reference, or the path of a GGUF file.",
    )
    api_key: Annotated[str | None, Facts(secret=True)] = Field(
        default="",
        repr=False,
        description="API key; if empty, OPENAI_API_KEY or OPENROUTER_API_KEY for these two services.",
    )
    server_type: Literal["openai", "trl", "sglang", "vllm"] = Field(
        default="openai",
        description="Kind of server: vllm and sglang report tokens (Phase 2); openai is a chat API (Phase 1).",
    )
    tokenizer_name: str = Field(
        default="none",
        description="Tokenizer of the model (folder or name); none: the one that model_name names.",
    )
    engine: Annotated[str, Facts(choices=ENGINES.names)] = Field(
        default="auto",
        description="API that reports tokens (Phase 2). auto: vllm or sglang by server_type, and llama.cpp for a "
        "model that runs here (embedded or a GGUF file); chat: none of them (Phase 1).",
    )
    logprobs_mode: Literal["raw", "temperature", "processed"] | None = Field(
        default=None,
        description="What the server computes logprobs from, if it was started with such an option (vLLM: "
        "--logprobs-mode processed_logprobs); null: the engine's default.",
    )
    reasoning_field: Literal["reasoning_content", "reasoning"] | None = Field(
        default="reasoning_content",
        description="Field in which the server accepts earlier reasoning; null: reasoning is not sent.",
    )
    echo_limit: int | None = Field(
        default=None,
        ge=0,
        description="Length in tokens of the longest prompt that the server repeats so that its ids can be "
        "compared. For longer prompts only the length is compared, and the samples record this; null: "
        "no limit.",
    )
    extra_body: dict[str, Any] | None = Field(default=None, description="Extra fields for every request.")
    harmless_fields: list[str] = Field(
        default_factory=list,
        description="Further fields of extra_body that do not affect what is sampled; `serve` rejects fields that "
        "it does not know.",
    )
    timeout: int = Field(default=1200, ge=1, description="Time limit of one request in seconds.")
    max_retries: int = Field(default=6, ge=0, description="Retries of a request that failed temporarily.")
    num_max_requests_at_once: int = Field(default=512, ge=1, description="Requests in flight.")
    num_requests_for_eval: int = Field(default=64, ge=1, description="Requests in flight for evaluation.")
    weight: float = Field(
        default=1.0, gt=0, description="Share of the requests, relative to the other servers' weights."
    )
    session_header: str | None = Field(
        default=None,
        description="Header that identifies the rollout to a router in front of the servers; null: "
        "X-SMG-Routing-Key for sglang, X-Session-ID for others; an empty text: none.",
    )
    headers: Annotated[dict[str, str], Facts(secret=True)] = Field(
        default_factory=dict, repr=False, description="Headers for every request, such as those of a gateway."
    )
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Data-parallel ranks behind the URL; with more than 1, each request names its rank.",
    )
    routed_experts: bool = Field(
        default=False,
        description="Request the experts of each token of a mixture-of-experts model and send them to the trainer "
        "(vLLM and SGLang with --enable-return-routed-experts).",
    )
    sampling_mask: bool = Field(
        default=False,
        description="Request the ids that top-k, top-p and min-p kept for each sampled token and send them to the "
        "trainer, which makes these parameters trainable (engine vllm-generate with "
        "--return-sampling-mask, or sglang).",
    )
    price_per_million_input: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Price of a million prompt tokens, in any currency; null: costs are not shown.",
    )
    price_per_million_output: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Price of a million sampled tokens; needs that of input too.",
    )
    price_per_million_cached_input: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Price of a million prompt tokens that the server had in its cache; null: that of input.",
    )
    threads: int = Field(default=1, ge=1, description="Threads of a model in this process (embedded or a GGUF file).")
    parallel: int = Field(default=4, ge=1, description="Concurrent completions of a model that this process runs.")
    context: int = Field(
        default=4096, ge=256, description="Context size in tokens per completion of a model that this process runs."
    )

    rolling_buffer_length: Annotated[int, IGNORED] = 1000
    n_kwarg_is_ignored: Annotated[bool, IGNORED] = False
    health_check: Annotated[bool, IGNORED] = True

    @field_validator("engine")
    @classmethod
    def _engine_exists(cls, name: str) -> str:
        if name not in ("auto", CHAT) and name not in ENGINES.names():
            load_engine(name)  # `module:Class`, or an error with near names
        return name

    @model_validator(mode="after")
    def _replay_needs_tokens(self) -> ServerConfig:
        for name in ("routed_experts", "sampling_mask"):
            if getattr(self, name) and token_engine(self) is None:
                raise ValueError(f"{name} comes with token ids (Phase 2); set server_type to vllm or sglang")
        return self


class ServerConfigError(SettingsError):
    """The settings of a model server cannot be used."""


class Phase1CannotTrain(LachesisError, RuntimeError):
    """`serve` needs token ids, which the server does not report."""

    exit_code = ExitCode.SETTINGS


def as_server_configs(given: BaseModel | Sequence[BaseModel]) -> list[ServerConfig]:
    """The servers of `config_init()` as a list. Atropos' own `APIServerConfig` and `ServerBaseline` are accepted.

    Atropos replaces anything but a list by four servers on localhost and drops `base_url` and `api_key`. Here a single
    configuration is used as it is.

    Raises:
        ServerConfigError: an object with a field that is not a setting, or a value that it cannot have.
    """
    return [_own(config) for config in (given if isinstance(given, Sequence) else [given])]


def _own(config: BaseModel) -> ServerConfig:
    if isinstance(config, ServerConfig):
        return config.model_copy(deep=True)  # two environments may be made from one object
    values: Mapping[str, Any] = config.model_dump(mode="json")
    try:
        return ServerConfig(**{"base_url": DEFAULT_URL, **values})
    except ValidationError as error:
        raise ServerConfigError(f"{type(config).__name__} cannot be used as settings of a server: {error}") from error


def is_local_model(config: ServerConfig) -> bool:
    """Whether the run starts the model in a child process."""
    return config.model_name == EMBEDDED or config.model_name.endswith(".gguf")


def needs_start(config: ServerConfig) -> bool:
    """Whether the run must start the server before it has a URL."""
    return is_local_model(config) or config.model_name == REFERENCE


def token_engine(config: ServerConfig) -> str | None:
    """The engine that reports this server's tokens (Phase 2); None where the server is used for chat (Phase 1)."""
    if config.engine != "auto":
        return None if config.engine == CHAT else config.engine
    if is_local_model(config):
        return "llama.cpp"  # whatever server a file of settings has for another model
    return config.server_type if config.server_type in ("vllm", "sglang") else None


def plays_reference(configs: Sequence[ServerConfig]) -> bool:
    """Whether the environment's reference policy answers, alone and without tokens."""
    return [config.model_name for config in configs] == [REFERENCE] and token_engine(configs[0]) is None


def describe(configs: Sequence[ServerConfig]) -> str:
    """Name of the model for records, without addresses or keys."""
    names = {EMBEDDED: "SmolLM2-135M-Instruct (embedded)", REFERENCE: "reference policy"}
    found = [
        Path(config.model_name).name if config.model_name.endswith(".gguf") else config.model_name for config in configs
    ]
    return ", ".join(dict.fromkeys(names.get(name, name) for name in found))


def key_for(url: str) -> str:
    """The key for a public service from the environment of this process; it is sent to that service only."""
    host = urlsplit(url).hostname or ""
    for domain, variable in KEY_VARIABLES.items():
        if host == domain or host.endswith(f".{domain}"):
            return os.environ.get(variable, "")
    return ""
