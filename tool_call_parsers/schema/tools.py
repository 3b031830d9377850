"""The tools that the model was offered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tool_call_parsers.types import ToolSchemas

if TYPE_CHECKING:
    from tool_call_parsers.schema.signature import Signature


class ToolIndex:
    """The offered tools by name. Of tools that share a name, the last counts.

    A tool is OpenAI's `{"type": "function", "function": {...}}` or flat. Its parameters are under `parameters`,
    `input_schema` or `inputSchema`. Accepts any schema. Raises `TypeError` if `tools` is neither
    None nor a sequence of mappings.
    """

    __slots__ = ("_signatures", "_tools")

    def __init__(self, tools: ToolSchemas | None) -> None:
        self._tools: dict[str, Mapping[Any, Any]] = {}
        self._signatures: dict[str, Signature] = {}
        if tools is None:
            return
        given: object = tools
        if isinstance(given, (str, bytes, bytearray)) or not isinstance(given, Sequence):
            raise TypeError(f"tools must be a sequence of mappings, not {type(given).__name__}")
        for tool in given:
            if type(tool) is not dict and not isinstance(tool, Mapping):
                raise TypeError(f"tools must be a sequence of mappings, and one of its items is {type(tool).__name__}")
            function = tool.get("function")
            if type(function) is not dict and not isinstance(function, Mapping):
                function = tool
            name = function.get("name")
            if isinstance(name, str):
                self._tools[name] = function

    def offered(self, name: str) -> bool:
        """Whether a tool of that name was offered; True if no tools are known."""
        return name in self._tools or not self._tools

    def names(self) -> Collection[str]:
        """The names of the offered tools, in order."""
        return self._tools.keys()

    def order(self, name: str) -> tuple[str, ...]:
        """The parameters in the order of the schema; () if it is unknown."""
        return tuple(self._signature(name).properties)

    def required(self, name: str) -> frozenset[str]:
        """The parameters that a call must have."""
        return self._signature(name).required

    def declares(self, name: str, parameter: str) -> bool | None:
        """Whether the tool has that parameter; None if the tool or its parameters are unknown."""
        signature = self._signature(name)
        return parameter in signature.properties if signature.known else None

    def is_string(self, name: str, parameter: str) -> bool:
        """Whether every text of this parameter is its own value, so that a stream may send it before it is complete."""
        return self._signature(name).rule(parameter) is None

    def coerce(self, name: str, parameter: str, text: str) -> Any:
        """The value of `text` as this argument; the text itself if nothing is known of it."""
        signature = self._signatures.get(name) or self._signature(name)
        rule = signature.rule(parameter)
        return text if rule is None else signature.value_of(text, *rule)

    def schema(self, name: str, parameter: str) -> tuple[object, object]:
        """A parameter's schema, None if unknown, and the root of its `$ref`s."""
        signature = self._signature(name)
        return signature.properties.get(parameter), signature.root

    def infer(self, parameters: Collection[str]) -> str | None:
        """The only tool that can be called with exactly these parameters; None if none or several can."""
        given = frozenset(parameters)
        found = None
        for name in self._tools:
            signature = self._signature(name)
            if signature.required <= given <= signature.properties.keys():
                if found is not None:
                    return None
                found = name
        return found

    def _signature(self, name: str) -> Signature:
        signature = self._signatures.get(name)
        if signature is None:
            # Imported here because most formats of JSON need no more than names.
            from tool_call_parsers.schema.signature import UNKNOWN, Signature

            tool = self._tools.get(name)
            if tool is None:
                return UNKNOWN  # not cached: models can make up any number of names
            root = tool.get("parameters")
            if root is None:
                root = tool.get("input_schema", tool.get("inputSchema"))
            signature = self._signatures[name] = Signature(root)
        return signature
