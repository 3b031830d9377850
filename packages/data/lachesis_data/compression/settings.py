"""Settings of compression, under the names of the removed implementation (`configs/trajectory_compression.yaml`)."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.errors import SettingsError
from lachesis.settings.flags import YamlLoader
from lachesis_client.urls import HTTP_URL


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TokenizerSettings(_Section):
    """The tokenizer of the model that is trained: its chat template and tokens measure an entry."""

    name: str = "embedded"
    """A folder, a GGUF file, a name of the hub, or `embedded` for that of the embedded model."""
    trust_remote_code: bool = False


class ProtectedTurns(_Section):
    """Turns that no summary replaces."""

    first_system: bool = True
    first_human: bool = True
    first_gpt: bool = True
    first_tool: bool = True
    last_n_turns: int = Field(default=4, ge=0)


class BudgetSettings(_Section):
    """Tokens."""

    target_max_tokens: int = Field(default=15250, gt=0)
    """Longest entry, as the chat template renders it with its tools."""
    summary_target_tokens: int = Field(default=750, gt=0)
    """What a summary should have. One of more than twice as many is refused."""


class CompressionSettings(_Section):
    """The sections `compression` and `protected_turns`."""

    compression: BudgetSettings = BudgetSettings()
    protected_turns: ProtectedTurns = ProtectedTurns()


class SummarizationSettings(_Section):
    """The model that writes summaries."""

    model: str = ""
    """The name that the server knows, `embedded`, or the path of a GGUF file, which is served here."""
    base_url: Annotated[str, HTTP_URL] = ""
    api_key_env: str = "OPENROUTER_API_KEY"
    """The environment variable that holds the key. Empty: no key."""
    temperature: float = Field(default=0.3, ge=0)
    max_retries: int = Field(default=3, ge=0)
    retry_delay: float = Field(default=2.0, ge=0)
    """Seconds before the first of them; each further wait is twice as long."""
    max_prompt_tokens: int | None = Field(default=None, gt=0)
    """Longest request for a summary: long turns are shortened further to fit. None: no limit."""


class OutputSettings(_Section):
    """What is written."""

    add_summary_notice: bool = True
    summary_notice_text: str = "\n\nSome of your previous tool responses may be summarized to preserve context."
    output_suffix: str = "_compressed"
    """Without `--output`, the output is named as the input with this at the end."""


class ProcessingSettings(_Section):
    """How it is done."""

    num_workers: int = Field(default=4, ge=1)
    max_concurrent_requests: int = Field(default=50, ge=1)
    skip_under_target: bool = True
    """Leave entries alone that are short enough. False: compress these too where it makes them shorter."""
    save_over_limit: bool = True
    """Write entries that are still too long. False: leave them out of the output."""
    per_trajectory_timeout: float = Field(default=300.0, gt=0)
    """Seconds for one entry, after which it stays as it was."""


class MetricsSettings(_Section):
    """The file of metrics."""

    enabled: bool = True
    per_trajectory: bool = True
    output_file: str = "compression_metrics.json"
    """Name of the file in the output folder, where the input is a folder. For a file, it is `<stem>_metrics.json`."""


class CompressionFileSettings(CompressionSettings):
    """All sections."""

    tokenizer: TokenizerSettings = TokenizerSettings()
    summarization: SummarizationSettings = SummarizationSettings()
    output: OutputSettings = OutputSettings()
    processing: ProcessingSettings = ProcessingSettings()
    metrics: MetricsSettings = MetricsSettings()


def read_settings(path: Path | None, changes: dict[str, dict[str, Any]]) -> CompressionFileSettings:
    """The settings of a YAML file, with some values changed (section -> name -> value).

    Raises:
        SettingsError: the file cannot be read, or holds an unknown name or a value that cannot be used.
    """
    given: Any = {}
    if path is not None:
        try:
            given = yaml.load(path.read_text(encoding="utf-8"), YamlLoader) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsError(f"{path} cannot be read: {error}; give a YAML file with --config") from error
    if not isinstance(given, dict) or not all(isinstance(section or {}, dict) for section in given.values()):
        raise SettingsError(f"{path}: settings are in sections, such as `compression:`; see docs/compression.md")
    merged = {name: {**(given.get(name) or {}), **changes.get(name, {})} for name in {**given, **changes}}
    try:
        return CompressionFileSettings.model_validate(merged)
    except ValidationError as error:
        problem = error.errors()[0]
        where, known = ".".join(map(str, problem["loc"])), _names(problem["loc"][:-1])
        near = get_close_matches(str(problem["loc"][-1]), known, 1) if problem["type"] == "extra_forbidden" else []
        hint = f"did you mean {near[0]!r}?" if near else "docs/compression.md lists the settings"
        said = "unknown setting" if problem["type"] == "extra_forbidden" else problem["msg"]
        raise SettingsError(f"{path or 'settings'}: {where}: {said}; {hint}") from None


def _names(section: tuple[Any, ...]) -> list[str]:
    model: Any = CompressionFileSettings
    for name in section:
        model = model.model_fields[name].annotation
    return list(model.model_fields)
