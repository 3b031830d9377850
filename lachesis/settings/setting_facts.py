"""Facts about a setting in addition to its pydantic type, default and description.

The facts are part of the annotation: `spool_path: Annotated[str | None, SERVE] = Field(None, description="...")`. The
command line (flags, help, notes) and the check of a second start read them from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from pydantic import AfterValidator, BaseModel

from lachesis_client.errors import LOGIN


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a setting that the command line and a second start need."""

    content: Literal["always", "never", "training", "evaluation"] = "always"
    """When the setting decides what a run writes: a second start of that run must then have the same value."""
    only_serve: bool = False
    """Whether `process` and `eval` do not read it."""
    ignored: bool = False
    """A setting of Atropos that is accepted, so that old settings files work, and that changes nothing."""
    removed: bool = False
    """Of the removed Hermes stack's pools; see `removed_settings`."""
    use_instead: str = ""
    """A setting of Atropos that is rejected because it would change what the model does: what to use instead."""
    secret: bool = False
    """Whether its value must not be shown."""
    choices: Callable[[], list[str]] | None = None
    """The names of a registry of plug-ins; `package.module:Class` is possible as well."""


SHORT = {"toolsets": "enabled_toolsets", "max_turns": "max_agent_turns", "image": "terminal_image"}
"""Class attribute of an environment -> the setting that it is short for."""
_OF_SERVER = "openai.{}, of the model server"
OTHER_NAMES = {
    "temperature": "agent_temperature",
    "max_tokens": "max_token_length",
    "max_new_tokens": "max_token_length",
    "top_p": "extra_body",
    "backend": "terminal_backend",
    "timeout": "rollout_timeout, reward_timeout or terminal_timeout",
    **{name: _OF_SERVER.format(name) for name in ("model_name", "base_url", "api_key", "server_type")},
}
"""Names that other libraries use, or that are settings elsewhere -> the setting here."""

LIMITS = {
    "memory_bytes": "env.terminal_memory, in MiB",
    "disk_bytes": "env.terminal_disk, in MiB",
    "pids": "env.terminal_pids",
}
"""Field of a sandbox's spec -> the setting that makes it."""

NO_FACTS = Facts()


def _at_least_one(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("must be at least 1, or -1")
    return value


COUNT = AfterValidator(_at_least_one)
"""In the annotation of a number that is at least 1, or -1: its description says what that means."""

HOW = Facts(content="never")
"""Decides how a run runs, not what it writes."""
SERVE = Facts(content="never", only_serve=True)
IGNORED = Facts(content="never", ignored=True)
REMOVED = Facts(content="never", ignored=True, removed=True)


def facts_of(model: type[BaseModel], name: str) -> Facts:
    """The facts of a field, inherited from the base class where a subclass defines the field again without them.

    A field of the removed stack that an environment defines again is a setting of that environment.
    """
    for cls in model.__mro__:
        field = getattr(cls, "model_fields", {}).get(name)
        for entry in field.metadata if field is not None else ():
            if isinstance(entry, Facts):
                return NO_FACTS if entry.removed and entry not in model.model_fields[name].metadata else entry
    return NO_FACTS


def all_facts(model: type[BaseModel]) -> dict[str, Facts]:
    """By field, see `facts_of`."""
    return {name: facts_of(model, name) for name in model.model_fields}


def description_of(model: type[BaseModel], name: str) -> str:
    """The description of a field, inherited in the same way."""
    for cls in model.__mro__:
        field = getattr(cls, "model_fields", {}).get(name)
        if field is not None and field.description:
            return str(field.description)
    return ""


def with_settings(text: str) -> str:
    """A message about a sandbox's limits, with the settings that make them."""
    named = [f"{field} is {setting}" for field, setting in LIMITS.items() if re.search(rf"\b{field}\b", text)]
    return f"{text} ({'; '.join(named)})" if named else text


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
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
            shown = {name: value for name, value in server.items() if name not in ("api_key", "headers")}
            digested[field] = {name: _without_login(value) for name, value in shown.items()}
    return {**{name: _without_login(value) for name, value in settings.items()}, **digested}


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def _without_login(value: Any) -> Any:
    return LOGIN.sub(r"\g<scheme>", value) if isinstance(value, str) else value
