"""The formats of trajectory files: which one an entry has, whether it keeps its rules, and another form of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.errors import ExitCode, LachesisError
from lachesis_data.exports.builtin_exports import dataset_line
from lachesis_data.exports.chat_exports import openai_line, trl_line
from lachesis_data.exports.exports import checked_options
from lachesis_data.exports.parquet import TEXTS, parquet_row
from lachesis_data.files.foreign import with_own_ids, without_blocks
from lachesis_data.optional import need_datasets
from lachesis_messages.errors import MessageError
from lachesis_messages.markup import load_arguments, write_json
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.messages import REASONING_KEYS, joined_reasoning, thought, without_reasoning_parts
from lachesis_messages.records.export_lines import Chat, Unsuitable, trajectory_line
from lachesis_messages.records.loading import from_sharegpt, tools_from_sharegpt
from lachesis_messages.records.sharegpt import PARTS_OMITTED, tool_function

if TYPE_CHECKING:
    from datasets import Features

FACTS: dict[str, Any] = {**dict.fromkeys(TEXTS, str), "evaluation": bool, "completed": bool, "reward": int | float}
SHAPE_ERRORS = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What reading an entry raises if a part of it is of another type than the format says."""
SYSTEM_REPLACED = "system_replaced"
"""The system message gave way to the generated prompt of the format."""


class UnknownFormat(LachesisError):
    """No format has this name, or an entry has the form of none."""

    exit_code = ExitCode.SETTINGS


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
    plain = {name: value for name, value in message.items() if name not in REASONING_KEYS}
    reasoning = next(filter(None, (thought(message.get(name)) for name in REASONING_KEYS)), None)
    if message.get("role") == "assistant" and isinstance(message.get("content"), list):
        plain["content"], own = without_reasoning_parts(message["content"])
        reasoning = joined_reasoning(reasoning, own)
    if reasoning:
        plain["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, at, text) for call in calls]
    return plain


def _call(call: Any, at: str, text: bool | None) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise Unsuitable(f"{at} has a tool call without a function")
    arguments = function.get("arguments")
    try:
        if isinstance(arguments, str):
            given = json.loads(arguments) if text is not None else load_arguments(arguments)
            changed = text is None and not arguments.lstrip().startswith("{")
        else:
            given, changed = {} if arguments is None and text is None else arguments, True
            if text:
                raise ValueError("no text")
        if not isinstance(given, Mapping):
            raise ValueError("no object")
    except (ValueError, RecursionError):
        if isinstance(arguments, str) and text is None:  # what a model wrote
            return call
        raise Unsuitable(f"{at}: the arguments of {function.get('name')} are not the text of a JSON object") from None
    return {**call, "function": {**function, "arguments": write_json(given)}} if changed else call


def read_chat(entry: Any) -> Chat:
    """The conversation of an entry. Raises Unsuitable or MessageError."""
    form = format_of(entry)
    if form in ("hermes", "batch", "sharegpt-tools"):
        metadata = entry["metadata"] if isinstance(entry.get("metadata"), Mapping) else {}
        if not all(isinstance(turn, Mapping) for turn in entry["conversations"]):
            raise Unsuitable("its conversations are not a list of turns")
        if not (messages := with_own_ids(from_sharegpt(entry))):
            raise Unsuitable("it has no messages")
        omitted = entry.get(PARTS_OMITTED)
        return Chat(
            messages,
            _tools(tools_from_sharegpt, entry),
            _facts(metadata) | _facts(entry),
            of_program=True,
            parts_omitted=omitted if isinstance(omitted, int) else 0,
        )
    if form in ("openai", "trl", "parquet"):
        given = entry["messages"] if "messages" in entry else [*(entry.get("prompt") or ()), *entry["completion"]]
        messages = [plain_message(message, f"messages[{index}]") for index, message in enumerate(without_blocks(given))]
        copied = frozenset(index for index, message in enumerate(messages) if message.pop("weight", 1) == 0)
        for message in messages:
            if message.get("role") == "tool":
                message.pop("name", None)
        messages = with_own_ids(messages)
        validate_messages(messages, complete=False, late_system=True)
        return Chat(messages, _tools(_tools_of_messages, entry), _facts(entry), copied, of_program=True)
    if form:
        raise Unsuitable(f"{form} cannot be converted: `lachesis export` writes every format from the run's groups")
    if isinstance(entry, Mapping) and "rollouts" in entry:
        raise Unsuitable("it is a group of a run, which `lachesis export` converts")
    raise Unsuitable(f"it matches no known format: {keys_of(entry)}")


def _facts(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: entry[name] for name, kind in FACTS.items() if entry.get(name) != "" and isinstance(entry.get(name), kind)
    }


def _tools(read: Callable[[Mapping[str, Any]], Any], entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        return [
            {"type": "function", **({"function": tool} if tool_function(tool) is tool else tool)}
            for tool in read(entry)
        ]
    except SHAPE_ERRORS as error:
        raise Unsuitable(f"its tools cannot be read ({error})") from None


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
            chat = read_chat(entry)
            line = _LINES[self.to](chat, **self.options)
        except (Unsuitable, MessageError):
            raise
        except SHAPE_ERRORS as error:
            raise Unsuitable(f"it cannot be read as {format_of(entry)} ({type(error).__name__}: {error})") from error
        warnings |= chat.warnings
        if self.to == "hermes" and self.options.get("system") != "actual" and chat.messages[0]["role"] == "system":
            warnings.add(SYSTEM_REPLACED)
        return line


def converter(to: str, options: Mapping[str, Any] | None = None) -> Converter:
    """The converter to the format `to`. Raises UnknownFormat or ExportOptionsError."""
    if to not in _LINES:
        raise UnknownFormat(
            f"conversations convert to {', '.join(_LINES)}, not to {to!r}; "
            "`lachesis export` writes the other formats from the groups of a run"
        )
    given = checked_options(f"the format {to!r}", _LINES[to], options, 1)
    return Converter(to, {"completed_only": False, **given} if to in ("sharegpt-tools", "openai", "trl") else given)


_LINES: dict[str, Callable[..., dict[str, Any]]] = {
    "hermes": trajectory_line,
    "sharegpt-tools": dataset_line,
    "openai": openai_line,
    "trl": trl_line,
    "parquet": parquet_row,
}
CONVERTIBLE = tuple(_LINES)
"""The formats that a conversation can be written in."""


def dataset_features(format: str) -> Features:
    """The columns of a format, for `load_dataset("json", data_files=[...], features=dataset_features(NAME))`.

    Without them, `datasets` takes the types from the first file: a column that is null throughout, or has an object
    with other keys, does not fit the next one. Needs datasets 4.7. Raises UnknownFormat or
    DatasetsMissing.
    """
    need_datasets("the columns of a format")
    from datasets import Features, Json, List, Value

    text, flag, number, whole, any_json = *map(Value, ("string", "bool", "float64", "int64")), Json()
    turns, messages = List({"from": text, "value": text}), List(any_json)

    def texts(names: str) -> dict[str, Any]:
        return dict.fromkeys(names.split(), text)

    hermes = {**texts("timestamp model"), "completed": flag, **texts("run environment item_key rollout_id outcome")}
    batch = {"prompt_index": whole, "metadata": any_json, "completed": flag, "partial": flag, "api_calls": whole}
    pairs = dict.fromkeys(("prompt", "chosen", "rejected"), messages)
    sharegpt = {"conversations": turns, PARTS_OMITTED: whole}
    columns: dict[str, dict[str, Any]] = {
        "hermes": {**sharegpt, **hermes, "evaluation": flag, "reward": number},
        "sharegpt-tools": {**sharegpt, **texts("tools source")},
        "batch": {
            **sharegpt,
            **batch,
            "reward": number,  # of a batch with an environment
            "toolsets_used": List(text),
            **dict.fromkeys(("tool_stats", "tool_error_counts"), any_json),
        },
        "openai": {"messages": messages, "tools": messages},
        "trl": {"messages": messages, **texts("tools environment item_key rollout_id")},
        "dpo": {
            **pairs,
            **dict.fromkeys(("score_chosen", "score_rejected"), number),
            **texts("tools rule environment item_key chosen_id rejected_id"),
        },
    }
    if format not in columns:
        raise UnknownFormat(f"the format {format!r} has no columns; choose from {', '.join(columns)}")
    return Features(columns[format])


def keys_of(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return f"it is {type(entry).__name__}, not an object"
    return f"its keys are {', '.join(map(str, list(entry)[:8])) or 'none'}"
