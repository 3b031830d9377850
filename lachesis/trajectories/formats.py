"""The formats of trajectory files: which one an entry has, whether it keeps its rules, and another form of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lachesis.errors import LachesisError
from lachesis.trajectories.chat_exports import Chat, Unsuitable, openai_line, trl_line
from lachesis.trajectories.entries import to_dataset_entry, to_trajectory_entry
from lachesis.trajectories.errors import MessageError
from lachesis.trajectories.exports import NOT_SAMPLED, checked_options
from lachesis.trajectories.loading import from_sharegpt, tools_from_sharegpt
from lachesis.trajectories.message_rules import validate_messages
from lachesis.trajectories.parquet import TEXTS, parquet_row
from lachesis.trajectories.sharegpt import ConversionWarning, SystemTurn, tool_function

if TYPE_CHECKING:
    from datasets import Features

FACTS: dict[str, Any] = {**dict.fromkeys(TEXTS, str), "evaluation": bool, "completed": bool, "reward": int | float}
SHAPE_ERRORS = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What reading an entry raises if a part of it is of another type than the format says."""
REASONING = ("reasoning", "reasoning_content", "thinking")
SYSTEM_REPLACED = "system_replaced"
"""The system message gave way to the generated prompt of the format."""


class UnknownFormat(LachesisError):
    """No format has this name, or an entry has the form of none."""

    exit_code = 2


def format_of(entry: Any) -> str:
    """The format of an entry, by its keys; empty where it has the form of none."""
    if not isinstance(entry, Mapping):
        return ""
    if isinstance(entry.get("conversations"), list):
        if "prompt_index" in entry:
            return "batch"
        return "hermes" if "timestamp" in entry else "sharegpt-tools"
    if str(entry.get("schema_version", "")).startswith("ATIF"):
        return "atif"
    if "tokens" in entry and "spans" in entry:
        return "samples"
    if "chosen" in entry and "rejected" in entry:
        return "dpo"
    if isinstance(entry.get("completion"), list):
        return "trl"
    if isinstance(entry.get("messages"), list) and "rollouts" not in entry:
        if not isinstance(entry.get("tools"), str):
            return "openai"
        return "parquet" if "outcome" in entry else "trl"
    return ""


def plain_message(message: Any, at: str, text: bool | None = None) -> dict[str, Any]:
    """A message with arguments as text and reasoning under `reasoning`. With `text`, the other form is Unsuitable."""
    if not isinstance(message, Mapping):
        raise Unsuitable(f"{at} is {type(message).__name__}, not an object")
    plain = {name: value for name, value in message.items() if name not in REASONING}
    if thoughts := [message[name] for name in REASONING if message.get(name)]:
        plain["reasoning"] = thoughts[0]
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, at, text) for call in calls]
    return plain


def _call(call: Any, at: str, text: bool | None) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unsuitable(f"{at} has a tool call without a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            valid = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            valid = False
        if not valid and text is not None:
            raise Unsuitable(f"{at}: the arguments of {function.get('name')} are not the text of a JSON object")
        return call
    if text or not isinstance(arguments, Mapping):
        raise Unsuitable(f"{at}: the arguments of {function.get('name')} are not the text of a JSON object")
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def read_chat(entry: Any) -> Chat:
    """The conversation of an entry. Raises Unsuitable or MessageError."""
    form = format_of(entry)
    if form in ("hermes", "batch", "sharegpt-tools"):
        metadata = entry["metadata"] if isinstance(entry.get("metadata"), Mapping) else {}
        facts = _facts(metadata) | _facts(entry)
        if not all(isinstance(turn, Mapping) for turn in entry["conversations"]):
            raise Unsuitable("its conversations are not a list of turns")
        if not (messages := from_sharegpt(entry)):
            raise Unsuitable("it has no messages")
        return Chat(messages, _tools(entry, tools_from_sharegpt), facts)
    if form in ("openai", "trl", "parquet"):
        given = entry["messages"] if "messages" in entry else [*(entry.get("prompt") or ()), *entry["completion"]]
        messages = [plain_message(message, f"messages[{index}]") for index, message in enumerate(given)]
        copied = {index for index, message in enumerate(messages) if message.get("weight") == 0}
        for message in messages:
            message.pop("weight", None)
            if message.get("role") == "tool":
                message.pop("name", None)
        validate_messages(messages, complete=False, late_system=True)
        return Chat(messages, _tools(entry, _tools_of_messages), _facts(entry), frozenset(copied))
    if form:
        raise Unsuitable(f"{form} cannot be converted: `lachesis export` writes every format from the run's groups")
    if isinstance(entry, Mapping) and "rollouts" in entry:
        raise Unsuitable("it is a group of a run, which `lachesis export` converts")
    raise Unsuitable(f"it has the form of no format: {keys_of(entry)}")


def _facts(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: entry[name] for name, kind in FACTS.items() if entry.get(name) != "" and isinstance(entry.get(name), kind)
    }


def _tools(entry: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Any]) -> list[dict[str, Any]]:
    try:
        tools = list(read(entry))
        for tool in tools:
            tool_function(tool)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Unsuitable(f"its tools cannot be read ({error})") from None
    return tools


def _tools_of_messages(entry: Mapping[str, Any]) -> Any:
    tools = entry.get("tools") or []
    return json.loads(tools) if isinstance(tools, str) else tools


@dataclass(frozen=True)
class Converter:
    """Writes conversations in one format."""

    to: str
    options: Mapping[str, Any]

    def convert(self, entry: Any, warnings: set[str]) -> dict[str, Any]:
        """The entry in the other format; `warnings` gets kinds of changes. Raises Unsuitable or MessageError."""
        try:
            return _CONVERTERS[self.to](read_chat(entry), warnings, **self.options)
        except (Unsuitable, MessageError):
            raise
        except SHAPE_ERRORS as error:
            raise Unsuitable(f"it cannot be read as {format_of(entry)} ({type(error).__name__}: {error})") from error


def converter(to: str, options: Mapping[str, Any] | None = None) -> Converter:
    """What converts to the format `to`. Raises UnknownFormat or ExportOptionsError."""
    if to not in _CONVERTERS:
        raise UnknownFormat(
            f"conversations convert to {', '.join(_CONVERTERS)}, not to {to!r}; "
            "`lachesis export` writes the other formats from the groups of a run"
        )
    return Converter(to, checked_options(f"the format {to!r}", _CONVERTERS[to], options, 2))


def _to_hermes(
    chat: Chat, warnings: set[str], *, model: str = "unknown", timestamp: str = "", system: SystemTurn = "generated"
) -> dict[str, Any]:
    facts = dict(chat.facts)
    entry, found = to_trajectory_entry(
        chat.messages,
        chat.tools,
        model=str(facts.pop("model", None) or model),
        completed=facts.pop("completed", True) is not False,
        timestamp=facts.pop("timestamp", None) or timestamp or None,
        system=system,
        of_program=True,
        **facts,
    )
    _check_sharegpt(chat, found, warnings)
    if system != "actual" and chat.messages[0]["role"] == "system":
        warnings.add(SYSTEM_REPLACED)
    return entry


def _to_sharegpt_tools(chat: Chat, warnings: set[str], *, source: str = "hermes-agent") -> dict[str, Any]:
    entry, found = to_dataset_entry(chat.messages, chat.tools, source=source, of_program=True)
    _check_sharegpt(chat, found, warnings)
    return entry


def _check_sharegpt(chat: Chat, found: Sequence[ConversionWarning], warnings: set[str]) -> None:
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise Unsuitable("no answer by the model")
    warnings.update(str(warning.kind) for warning in found)
    if chat.not_sampled:
        warnings.add(NOT_SAMPLED)


_CONVERTERS: dict[str, Callable[..., dict[str, Any]]] = {
    "hermes": _to_hermes,
    "sharegpt-tools": _to_sharegpt_tools,
    "openai": openai_line,
    "trl": trl_line,
    "parquet": parquet_row,
}
CONVERTIBLE: Sequence[str] = tuple(_CONVERTERS)
"""The formats that a conversation can be written in."""


def dataset_features(format: str) -> Features:
    """The columns of a format, for `load_dataset("json", data_files=[...], features=dataset_features(NAME))`.

    Without them, `datasets` takes the types from the first file: a column that is null throughout, or has an object
    with other keys, does not fit the next one. Needs datasets 4.7. Raises UnknownFormat.
    """
    from datasets import Features, Json, List, Value

    text, flag, number, any_json = Value("string"), Value("bool"), Value("float64"), Json()
    turns = List({"from": text, "value": text})
    texts = dict.fromkeys(("run", "environment", "item_key", "rollout_id", "outcome"), text)
    own = dict.fromkeys(("environment", "item_key"), text)
    columns: dict[str, dict[str, Any]] = {
        "hermes": {
            "conversations": turns,
            "timestamp": text,
            "model": text,
            "completed": flag,
            **texts,
            "evaluation": flag,
            "reward": number,
        },
        "sharegpt-tools": {"conversations": turns, "tools": text, "source": text},
        "batch": {
            "prompt_index": Value("int64"),
            "conversations": turns,
            "metadata": any_json,
            "completed": flag,
            "partial": flag,
            "api_calls": Value("int64"),
            "toolsets_used": List(text),
            "tool_stats": any_json,
            "tool_error_counts": any_json,
        },
        "openai": {"messages": List(any_json), "tools": List(any_json)},
        "trl": {"messages": List(any_json), "tools": text, **own, "rollout_id": text},
        "dpo": {
            **dict.fromkeys(("prompt", "chosen", "rejected"), List(any_json)),
            "tools": text,
            "score_chosen": number,
            "score_rejected": number,
            "rule": text,
            **own,
            "chosen_id": text,
            "rejected_id": text,
        },
    }
    if format not in columns:
        raise UnknownFormat(f"no columns are known for {format!r}; one of {', '.join(columns)}")
    return Features(columns[format])


def keys_of(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return f"it is {type(entry).__name__}, not an object"
    return f"its keys are {', '.join(map(str, list(entry)[:8])) or 'none'}"
