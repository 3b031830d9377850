"""Settings as class attributes of an environment.

    class Fix(HermesAgentBaseEnv):
        toolsets = ["terminal", "file"]
        max_turns = 8
        group_size = 2

An attribute with the name of a setting (or `toolsets`, `max_turns`, `image`) becomes the default of that setting in the
environment's settings class, so that `--help`, YAML and flags know it. Read from the class it is the default, read from
an environment it is the value in force.

An attribute with a plain value whose name is nearly that of a setting, or that of a setting elsewhere, is an error. Any
other name is the environment's own.
"""

from __future__ import annotations

from copy import copy
from difflib import get_close_matches
from functools import cached_property
from inspect import get_annotations
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    create_model,
)

from backends.errors import SettingsError
from lachesis.settings.setting_facts import OTHER_NAMES, SHORT, all_facts
from lachesis.settings.settings import HermesAgentEnvConfig

SCALARS = (bool, int, float, str)
PLAIN = (str, int, float, bool, list, tuple, dict, type(None))
"""Types of attributes that may be misspelt settings."""
_BASE_MODULES = ("lachesis.base_env", "lachesis.runs.atropos_base")


class ClassSetting:
    """A class attribute that shows a setting."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __get__(self, env: Any, env_cls: Any) -> Any:
        if env is not None:
            return getattr(env.config, self.field)
        return env_cls.env_config_cls.model_fields[self.field].get_default(call_default_factory=True)


def apply_class_settings(env_cls: Any) -> None:
    """Move the settings among the attributes of a new class into its `env_config_cls`.

    Raises:
        SettingsError: a value that the setting cannot have, a setting given twice, or nearly the name of one.
    """
    model: type[HermesAgentEnvConfig] = env_cls.env_config_cls
    if not (isinstance(model, type) and issubclass(model, HermesAgentEnvConfig)):
        raise SettingsError(
            f"{env_cls.__name__}.env_config_cls must be a subclass of HermesAgentEnvConfig, not {model}"
        )
    given: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in _settings(model):
        found = _setting(env_cls, name)
        field = name if name in model.model_fields else SHORT[name]
        if found and field in given:
            raise SettingsError(f"{env_cls.__name__}: {given[field]} and {name} are the same setting; keep one of them")
        if found:
            given[field], values[name] = name, found[0]
    for name, value in vars(env_cls).items():
        if isinstance(value, PLAIN) and not name.startswith("_") and name not in values:
            _check_name(env_cls, name)
    if "env_config_cls" in vars(env_cls):
        _check_model(env_cls, model, given)
    if not given:
        return
    definitions: dict[str, Any] = {}
    for field, name in given.items():
        definitions[field] = _with_default(env_cls, model, field, name, values[name])
        setattr(env_cls, name, ClassSetting(field))
    env_cls.env_config_cls = create_model(
        f"{env_cls.__name__}Config", __base__=model, __module__=env_cls.__module__, __doc__=model.__doc__, **definitions
    )
    env_cls.env_config_cls.__qualname__ = f"{env_cls.__qualname__}.env_config_cls"  # where pickle finds it


def _settings(model: type[HermesAgentEnvConfig]) -> list[str]:
    """Names that an attribute of a class can set. `driver` and the like are the environment's own attributes."""
    own = [name for name, facts in all_facts(model).items() if not facts.removed]
    return list(dict.fromkeys((*SHORT, *own)))


def _setting(env_cls: Any, name: str) -> tuple[Any] | None:
    """The value of an attribute that `env_cls.env_config_cls` does not know yet: of the class itself or of a mixin."""
    holder = next((cls for cls in env_cls.__mro__ if name in vars(cls)), None)
    if holder is None or any(name in vars(cls) for cls in env_cls.__mro__ if cls.__module__ in _BASE_MODULES):
        return None  # `name` and the like are the environment's, also where a settings class has such a field
    value = vars(holder)[name]
    if isinstance(value, ClassSetting):  # of a second base class that is an environment
        known = issubclass(env_cls.env_config_cls, holder.env_config_cls) or "env_config_cls" in vars(env_cls)
        return None if known else (getattr(holder, name),)
    return None if hasattr(type(value), "__get__") else (value,)


def _with_default(
    env_cls: type, model: type[HermesAgentEnvConfig], field: str, name: str, value: Any
) -> tuple[Any, Any]:
    """The definition of a field with another default: (annotation, field)."""
    info = model.model_fields[field]
    try:
        try:
            value = _valid(value, [info.annotation, "", *info.metadata, *_validators(model, field)])
        except ValidationError:
            raise
        except Exception:  # a validator that needs other settings, which only a command knows
            value = _valid(value, [info.annotation, "", *info.metadata])
    except ValidationError as error:
        problem = error.errors()[0]
        place = "".join(f"[{part!r}]" for part in problem["loc"])
        raise SettingsError(
            f"{env_cls.__name__}.{name}{place}: {problem['msg']} (got {problem['input']!r}); it sets the default of "
            f"env.{field}"
        ) from None
    changed = copy(info)
    changed.default, changed.default_factory = value, None
    return info.annotation, changed


def _valid(value: Any, annotation: list[Any]) -> Any:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[tuple(annotation)])  # type: ignore[arg-type]
    valid = adapter.validate_python(value)
    if type(value) in SCALARS and type(valid) in SCALARS and (type(value), type(valid)) != (int, float):
        adapter.validate_python(value, strict=type(value) is not type(valid))
    return valid


_MODES: dict[str, Any] = {
    "before": BeforeValidator,
    "after": AfterValidator,
    "wrap": WrapValidator,
    "plain": PlainValidator,
}


def _validators(model: type[HermesAgentEnvConfig], field: str) -> list[Any]:
    """The `field_validator`s of a field, as annotations."""
    found = model.__pydantic_decorators__.field_validators.values()
    return [
        _MODES[each.info.mode](getattr(model, each.cls_var_name))
        for each in found
        if field in each.info.fields or "*" in each.info.fields
    ]


def _check_model(env_cls: Any, model: type[HermesAgentEnvConfig], given: dict[str, str]) -> None:
    """A settings class together with class attributes: it must know those of the bases, and not set them again."""
    base_env = next(base for base in env_cls.__mro__[1:] if hasattr(base, "env_config_cls"))
    inherited = base_env.env_config_cls
    bases = {name for base in env_cls.__mro__[1:] for name, value in vars(base).items() if type(value) is ClassSetting}
    if bases and not issubclass(model, inherited):
        raise SettingsError(
            f"{env_cls.__name__}: its settings class {model.__name__} does not know the attributes "
            f"{', '.join(sorted(bases))} of {base_env.__name__}; let it inherit from {base_env.__name__}.env_config_cls"
        )
    added = [cls for cls in model.__mro__ if cls not in inherited.__mro__]
    for field, name in given.items():
        if any(field in get_annotations(cls) for cls in added):
            raise SettingsError(
                f"{env_cls.__name__}.{name} and {model.__name__}.{field} are the same setting; keep one of them"
            )


def _check_name(env_cls: Any, name: str) -> None:
    if any(hasattr(base, name) for base in env_cls.__mro__[1:]):
        return
    known = {_squashed(known): known for known in (*OTHER_NAMES, *_settings(env_cls.env_config_cls))}
    near = [] if name.isupper() else get_close_matches(_squashed(name), known, n=1, cutoff=0.85)
    if not near:
        return
    meant = known[near[0]]
    if meant in (*OTHER_NAMES, "image") and _squashed(name) == near[0] + "s":
        return  # `temperatures` of cities, for example
    hint = f"the setting is {OTHER_NAMES[meant]}" if meant in OTHER_NAMES else f"did you mean {meant}?"
    raise SettingsError(
        f"{env_cls.__name__}.{name} is not a setting; {hint}{'' if hint.endswith('?') else '.'} An "
        "attribute of your own needs a less similar name"
    )


def _squashed(name: str) -> str:
    return name.lower().replace("_", "")


def without_effect(env: Any) -> list[str]:
    """Messages about attributes that look like settings and that no run reads: assigned to `self`, or properties."""
    messages = []
    for name in _settings(HermesAgentEnvConfig):
        field = SHORT.get(name, name)
        defined = next((vars(cls)[name] for cls in type(env).__mro__ if name in vars(cls)), None)
        computed = name == "max_num_workers"  # by the base class, as in Atropos
        value = getattr(env.config, field)
        if isinstance(defined, property | cached_property):
            problem = "is a property"
        elif isinstance(assigned := vars(env).get(name, value), PLAIN) and not computed and assigned != value:
            problem = "was assigned"
        else:
            continue
        messages.append(
            f"{type(env).__name__}.{name} {problem}, and no run reads it; assign to self.config.{field}, or give the "
            "class an attribute with a plain value"
        )
    return messages


def source_of(env: Any, field: str) -> str:
    """Where the value in force of a setting comes from, for messages: `Greeting.toolsets` or `env.enabled_toolsets`."""
    for cls in type(env).__mro__:
        for name, value in vars(cls).items():
            if type(value) is ClassSetting and value.field == field:
                return f"{cls.__name__}.{name}" if getattr(env, name) == getattr(cls, name) else f"env.{field}"
    return f"env.{field}"
