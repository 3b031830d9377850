"""Which settings somebody chose, and settings made of those."""

from __future__ import annotations

from inspect import get_annotations
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from backends.errors import SettingsError
from lachesis.settings.settings import HermesAgentEnvConfig


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
