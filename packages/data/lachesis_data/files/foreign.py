"""Undoes changes that other writers make to conversations: the nulls of columnar files, and ids that several turns
share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from lachesis_messages.messages import ARGUMENTS, call_function, is_call_part

LISTS = ("messages", "prompt", "completion", "chosen", "rejected")
NULLS_REMOVED = "null_arguments_removed"
"""Arguments that are null, and no arguments of the tool, in a row of a columnar file."""


def unpadded(entry: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """A row without the nulls that Arrow adds, and whether arguments were among them.

    A column of Arrow gives each of its objects the keys of all of them. Such a row is known by its messages, which all
    have the key `tool_calls`, users' too. Its arguments lose each null that their own tool has no place for: no
    parameter of that name, or an optional one that takes no null. A null that may be meant stays.
    """
    lists: dict[str, Any] = {name: entry[name] for name in LISTS if _is_padded(entry.get(name))}
    if not lists:
        return entry, False
    tools = _without_nulls(entry["tools"]) if isinstance(entry.get("tools"), list) else entry.get("tools")
    reader = _Reader(_parameters(tools))
    plain = {name: [reader.message(message) for message in messages] for name, messages in lists.items()}
    return {**entry, **plain, **({"tools": tools} if "tools" in entry else {})}, reader.removed


def _is_padded(messages: Any) -> bool:
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return False
    keys = {frozenset(message) for message in messages}
    return len(keys) == 1 and "tool_calls" in next(iter(keys)) and {m.get("role") for m in messages} != {"assistant"}


def _parameters(tools: Any) -> dict[str, Any]:
    """Name of a tool -> the schema of its arguments."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return {}
    found = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping):
            found[str(function.get("name"))] = function.get("parameters")
    return found


class _Reader:
    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = parameters
        self.removed = False

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        plain = {name: value for name, value in message.items() if value is not None or name == "content"}
        if plain.get("role") != "tool" and plain.get("tool_call_id") == "":
            del plain["tool_call_id"]
        if isinstance(content := plain.get("content"), list):
            plain["content"] = [_without_nulls(part) for part in content]
        if isinstance(calls := plain.get("tool_calls"), list):
            plain["tool_calls"] = [self.call(call) if isinstance(call, Mapping) else call for call in calls]
        return plain

    def call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        plain = {name: value for name, value in call.items() if value is not None}
        if isinstance(function := plain.get("function"), Mapping):
            given = function.get("arguments")
            if isinstance(given, Mapping):
                given = self.arguments(given, self.parameters.get(str(function.get("name"))))
            plain["function"] = {**function, "arguments": given}
        return plain

    def arguments(self, value: Any, schema: Any) -> Any:
        schema = schema if isinstance(schema, Mapping) else {}
        if isinstance(value, list):
            return [self.arguments(each, schema.get("items")) for each in value]
        if not isinstance(value, Mapping):
            return value
        given = schema.get("properties")
        properties: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        kept = {
            name: self.arguments(inner, properties.get(name))
            for name, inner in value.items()
            if inner is not None
            or (name in properties and (name in (schema.get("required") or ()) or _takes_null(properties[name])))
        }
        self.removed |= len(kept) < len(value)
        return kept


def _takes_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    if kinds := schema.get("type"):
        return kinds == "null" or (isinstance(kinds, list) and "null" in kinds) or schema.get("nullable") is True
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return any(map(_takes_null, choices))
    return "$ref" not in schema and None in schema.get("enum", (None,))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def without_blocks(messages: Iterable[Any]) -> list[Any]:
    """The messages with calls and results that are content parts (Anthropic's form) as OpenAI has them, and a refusal
    as what was said. What is not a message stays as it is."""
    found: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(message, Mapping) and not content and isinstance(message.get("refusal"), str):
            message = {**message, "content": message["refusal"]}
        if not isinstance(content, list):
            found.append(message)
            continue
        calls = [part for part in content if is_call_part(part)]
        results = [part for part in content if isinstance(part, Mapping) and part.get("type") == "tool_result"]
        if message.get("role") == "assistant" and calls:
            rest = [part for part in content if not is_call_part(part)]
            own = message.get("tool_calls") or [_openai_call(part) for part in calls]
            found.append({**message, "content": _as_text(rest) or None, "tool_calls": own})
        elif message.get("role") == "user" and results:
            found += map(_result, results)
            if rest := [part for part in content if part not in results]:
                found.append({**message, "content": _as_text(rest)})
        else:
            found.append(message)
    return found


def _openai_call(part: Mapping[str, Any]) -> dict[str, Any]:
    function = call_function(part) or {}
    given = next((function[key] for key in ARGUMENTS if function.get(key) is not None), None)
    written = {"name": function.get("name"), "arguments": given}
    return {"id": part.get("id") or part.get("call_id"), "type": "function", "function": written}


def _result(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": _as_text(part.get("content")) or ""}


def _as_text(parts: Any) -> Any:
    """The text of parts that are nothing else; other parts as they are."""
    if isinstance(parts, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return parts


def with_own_ids(messages: Iterable[Mapping[str, Any]], *, by_place: bool = True) -> list[dict[str, Any]]:
    """The messages with an id for each call that no earlier message has, and results that name it.

    Some models and writers count their calls from zero in every turn. With `by_place`, results without ids are those of
    the calls before them that have none either, in their order.
    """
    taken: set[str] = set()
    new_ids: dict[str, str] = {}
    nameless: list[str] = []
    found: list[dict[str, Any]] = []
    for message in messages:
        calls, given = message.get("tool_calls"), str(message.get("tool_call_id") or "")
        if isinstance(calls, list) and calls and all(isinstance(call, Mapping) for call in calls):
            own = [str(call["id"]) for call in calls if call.get("id")]
            if own:
                new_ids = {each: _free(each, taken.union(own)) if each in taken else each for each in own}
                calls = [{**call, "id": new_ids[str(call["id"])]} if call.get("id") else call for call in calls]
                nameless = []
            elif by_place:
                new_ids, nameless = {}, []
                for _ in calls:
                    nameless.append(_free("call", taken.union(nameless)))
                calls = [{**call, "id": each} for call, each in zip(calls, nameless, strict=True)]
            taken.update(new_ids.values(), nameless)
            found.append({**message, "tool_calls": calls})
        elif message.get("role") == "tool" and (new_ids.get(given, given) != given or (not given and nameless)):
            found.append({**message, "tool_call_id": new_ids[given] if given else nameless.pop(0)})
        else:
            found.append(dict(message))
    return found


def _free(given: str, taken: set[str]) -> str:
    number = 2
    while (new := f"{given}_{number}") in taken:
        number += 1
    return new
