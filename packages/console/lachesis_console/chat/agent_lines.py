"""What a person types in the agent's place: an answer, or a call of a tool."""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from lachesis_tools.text import did_you_mean


class NotACall(ValueError):
    """A line begins like a call and is none. Says what to type."""


async def read_line(
    line: str, tools: Sequence[Mapping[str, Any]], ask: Callable[[str], Awaitable[str | None]]
) -> tuple[str, str] | None:
    """The name of a tool and its arguments as JSON; None where the line is no call.

    `/name {...}` gives the arguments as JSON, `/name key=value ...` one by one, `/name text` the only one that the tool
    requires. `/name` asks for each argument that is required.

    Raises:
        NotACall: there is no such tool, or its arguments cannot be read.
    """
    if not line.startswith("/"):
        return None
    name, _, rest = line[1:].partition(" ")
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name not in functions:
        hint = did_you_mean(name, functions) or f"; tools are {', '.join(functions) or 'none'}"
        raise NotACall(f"an answer begins without a slash, and there is no command and no tool {name!r}{hint}")
    schema = functions[name].get("parameters") or {}
    properties, required = schema.get("properties") or {}, list(schema.get("required") or ())
    rest = rest.strip()
    if rest.startswith("{"):
        try:
            arguments = json.loads(rest, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise NotACall(f"these arguments are not JSON: {error}") from None
    elif not rest:
        arguments = {}
        for key in required:
            typed = await ask(f"  {key} ({(properties.get(key) or {}).get('type', 'any')})> ")
            if typed is None:
                raise NotACall("the call was given up")
            arguments[key] = _value(typed, properties.get(key) or {})
    elif pairs := _pairs(rest, properties):
        arguments = {key: _value(text, properties[key]) for key, text in pairs.items()}
    elif len(required) == 1:
        arguments = {required[0]: _value(rest, properties.get(required[0]) or {})}
    else:
        raise NotACall(f"give the arguments of {name} as JSON or as key=value; it has {', '.join(properties)}")
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise NotACall(f"these arguments are not JSON: {error}") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _pairs(text: str, properties: Mapping[str, Any]) -> dict[str, str]:
    try:
        parts = [part.partition("=") for part in shlex.split(text)]
    except ValueError:
        return {}
    return {key: value for key, _, value in parts} if all(sep and key in properties for key, sep, _ in parts) else {}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type", "string") == "string":
        return text
    try:
        return json.loads(text, parse_constant=_no_number)
    except ValueError:
        return text  # the tool says what is wrong with it
