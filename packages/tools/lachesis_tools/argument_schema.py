"""From the signature and docstring of a function to the JSON schema for the model and to the validation."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from lachesis_tools.text import did_you_mean, shortened, to_json, valid_utf8

Parameters: TypeAlias = Mapping[str, tuple[Any, FieldInfo]]
"""The parameters of a tool that a model may set: type, and default and description, by name."""

_PREFIX = "argument_"
"""Prefix of field names, not of aliases: a parameter may be called `copy` or `json`, as methods of BaseModel are."""

_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=False)
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list[Any], "object": dict[str, Any]}

NOT_SENT: Any = type("NotSent", (), {"__repr__": lambda self: "NOT_SENT"})()
"""The value of an argument of a schema that the model did not send."""


class BadArguments(ValueError):
    """The arguments do not fit the schema of the tool. The message for the model names the field and the reason."""


def parse_docstring(label: str, docstring: str | None) -> tuple[str, dict[str, str]]:
    """The first paragraph and the entries of the `Args:` section, each as one line.

    Raises:
        TypeError: there is no docstring.
    """
    if not docstring:
        raise TypeError(f"tool {label!r} needs a docstring: its first paragraph describes the tool to the model")
    description = " ".join(docstring.split("\n\n")[0].split())
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", docstring, re.MULTILINE)
    entries: dict[str, str] = {}
    if section:
        lines = inspect.cleandoc(section.group(1)).splitlines()
        current = None
        for line in lines:
            entry = re.match(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
            if entry:
                current = entry.group(1)
                entries[current] = entry.group(2)
            elif current is not None:
                entries[current] = f"{entries[current]} {line.strip()}".strip()
    return description, entries


def read_parameters(
    label: str,
    function: Callable[..., Any],
    hints: Mapping[str, Any],
    documented: Mapping[str, str],
    *,
    skip: str | None,
) -> Parameters:
    """The parameters of a function by name, without `skip`.

    Raises:
        TypeError: a parameter cannot be part of a schema.
    """
    found: dict[str, tuple[Any, FieldInfo]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == skip:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {label!r}: parameter {name!r} must be passable by name (no *args, **kwargs or /)")
        if name not in hints:
            raise TypeError(f"tool {label!r}: parameter {name!r} needs a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        found[name] = hints[name], Field(default, alias=name, description=documented.get(name))
    if strangers := [name for name in documented if name not in found and name != skip]:
        raise TypeError(f"tool {label!r}: its docstring describes {strangers}, which are not parameters")
    return found


def read_schema(label: str, schema: Mapping[str, Any]) -> Parameters:
    """The parameters of a JSON schema, with their types as far as they are one plain type each.

    Raises:
        TypeError: it is not the schema of an object.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
        raise TypeError(f"tool {label!r}: the schema of its arguments must be that of an object, not {schema!r}")
    found: dict[str, tuple[Any, FieldInfo]] = {}
    for name in dict.fromkeys((*properties, *required)):
        kind = properties.get(name)
        named = kind.get("type") if isinstance(kind, Mapping) else None
        plain = _TYPES.get(named, Any) if isinstance(named, str) else Any
        found[name] = plain, Field(... if name in required else NOT_SENT, alias=name)
    return found


def arguments_model(label: str, parameters: Parameters, *, more: bool = False) -> type[BaseModel]:
    """The pydantic model of a tool's arguments. `more`: a call may have others too."""
    fields: dict[str, Any] = {_PREFIX + name: field for name, field in parameters.items()}
    config = ConfigDict(**{**_CONFIG, "extra": "allow"}) if more else _CONFIG
    return create_model(f"{label}_arguments", __config__=config, **fields)


def arguments_schema(label: str, parameters: Parameters) -> tuple[type[BaseModel], dict[str, Any]]:
    """The pydantic model and the JSON schema of a tool's arguments.

    Raises:
        TypeError: a type has no JSON schema.
    """
    try:
        model = arguments_model(label, parameters)
        schema = model.model_json_schema(by_alias=True)
        schema = _clean(schema, schema.get("$defs", {}))
    except Exception as error:
        said = str(error).partition(". Set `")[0].splitlines()[0]  # not pydantic's advice, which is for its models
        said = re.sub("Unable to generate pydantic-core schema for (.*)", r"\1 is no type of JSON", said)
        raise TypeError(f"tool {label!r}: no JSON schema for its parameters: {said}") from error
    ordered = {"type": "object", "properties": schema.get("properties", {}), "required": schema.get("required", [])}
    return model, {**ordered, "additionalProperties": False}


def _clean(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """Drop pydantic's titles, resolve references, and write `X | None = None` as an optional X."""
    if isinstance(schema, list):
        return [_clean(item, definitions, inside) for item in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str):
        name = reference.rsplit("/", 1)[-1]
        if name in inside:
            raise TypeError(f"the type {name} contains itself, which tool schemas cannot express")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _clean({**definitions[name], **rest}, definitions, (*inside, name))
    options = schema.get("anyOf")
    if isinstance(options, list) and schema.get("default", ...) is None:
        real = [option for option in options if option != {"type": "null"}]
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
        schema = {**real[0], **rest} if len(real) == 1 else {**rest, "anyOf": real}
        return _clean(schema, definitions, inside)
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":  # names of parameters, which may be "title"
            cleaned[key] = {name: _clean(item, definitions, inside) for name, item in value.items()}
        elif key in ("default", "enum", "const", "examples"):
            cleaned[key] = value
        elif key not in ("title", "$defs"):
            cleaned[key] = _clean(value, definitions, inside)
    first = {key: cleaned[key] for key in ("type", "description") if key in cleaned}
    return {**first, **cleaned}


def validate(name: str, model: type[BaseModel], arguments: Any) -> dict[str, Any]:
    """The keyword arguments for the tool `name` from a mapping, or from the JSON text of an object.

    Harmless mistakes are corrected: "5" for 5, 5 for "5", null for a parameter with a default, and JSON text for a list
    or an object.

    Raises:
        BadArguments: any other mistake.
    """
    given = _as_object(name, arguments)
    announced = {field.alias or key: field for key, field in model.model_fields.items()}
    for key in given:
        if key not in announced and model.model_config.get("extra") == "forbid":
            hint = did_you_mean(str(key), announced)
            known = ", ".join(announced) or "none"
            raise BadArguments(f"{name} has no argument {shortened(key)!r}{hint or '.'} Its arguments are: {known}")
    try:
        checked = _checked(model, given)
    except ValidationError as error:
        raise BadArguments(f"bad arguments for {name}: " + "; ".join(_explain(error))) from None
    keywords = {field.alias or key: getattr(checked, key) for key, field in type(checked).model_fields.items()}
    keywords |= checked.model_extra or {}
    for key, value in keywords.items():
        if _has_half_pair(value):
            raise BadArguments(
                f"bad arguments for {name}: {key!r} contains half of a surrogate pair, which is not a character"
            )
    return keywords


def _has_half_pair(value: Any) -> bool:
    """Whether a text in it contains half of a surrogate pair."""
    if isinstance(value, str):
        return valid_utf8(value) != value
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return isinstance(value, list | tuple | set | frozenset) and any(map(_has_half_pair, value))


def _checked(model: type[BaseModel], sent: dict[Any, Any]) -> BaseModel:
    try:
        return model.model_validate(sent)
    except ValidationError as error:
        # Only failed arguments are corrected, so that valid text that looks like JSON and valid nulls stay as sent.
        structures = ("list_type", "dict_type", "model_type", "model_attributes_type", "tuple_type", "set_type")
        optional = {field.alias for field in model.model_fields.values() if not field.is_required()}
        corrected = dict(sent)
        for problem in error.errors(include_url=False, include_context=False):
            key = problem["loc"][0] if problem["loc"] else None
            if key not in sent:
                continue
            if sent[key] is None and key in optional:
                corrected.pop(key, None)
            elif problem["type"] in structures and isinstance(sent[key], str):
                with contextlib.suppress(ValueError, RecursionError):
                    corrected[key] = json.loads(sent[key])
        if corrected == sent:
            raise
        return model.model_validate(corrected)


def _as_object(name: str, arguments: Any) -> dict[Any, Any]:
    if isinstance(arguments, (str, bytes)):
        if not arguments.strip():
            return {}  # some servers send this for a call without arguments
        try:
            arguments = json.loads(arguments)
        except RecursionError:
            raise BadArguments(f"the arguments of {name} are nested too deeply") from None
        except ValueError as error:
            raise BadArguments(f"the arguments of {name} are not valid JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        kinds = {type(None): "null", list: "an array", str: "a string", bool: "a boolean", int: "a number"}
        kind = kinds.get(type(arguments), type(arguments).__name__)
        raise BadArguments(f"the arguments of {name} must be a JSON object such as {{}}, not {kind}")
    return dict(arguments)


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        place = ".".join(str(part) for part in problem["loc"]) or "arguments"
        if problem["type"] == "missing":
            lines.append(f"{place!r} is required")
            continue
        try:
            value = to_json(problem["input"])
        except Exception:
            value = repr(problem["input"])
        shown = value if len(value) <= 80 else value[:80] + "..."
        lines.append(f"{place!r}: {problem['msg']} (got {shown})")
    return lines
