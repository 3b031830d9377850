"""The tools that the model was offered."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tool_call_parsers.schema.kinds import ValueRule, is_mapping, items_of, related, value_rule
from tool_call_parsers.schema.values import value_of
from tool_call_parsers.types import ToolSchemas


class ToolIndex:
    """The offered tools by name. Of tools that share a name, the last counts.

    A tool is OpenAI's `{"type": "function", "function": {...}}` or flat. Its parameters are under `parameters`,
    `input_schema` or `inputSchema`. Accepts any schema. Raises `TypeError` if `tools` is neither
    None nor a sequence of mappings.
    """

    __slots__ = ("_signatures", "_tools")

    def __init__(self, tools: ToolSchemas | None) -> None:
        self._tools: dict[str, Mapping[Any, Any]] = {}
        self._signatures: dict[str, _Signature] = {}
        if tools is None:
            return
        given: object = tools
        if isinstance(given, (str, bytes, bytearray)) or not isinstance(given, Sequence):
            raise TypeError(f"tools must be a sequence of mappings, not {type(given).__name__}")
        for tool in given:
            if type(tool) is not dict and not is_mapping(tool):
                raise TypeError(f"tools must be a sequence of mappings, and one of its items is {type(tool).__name__}")
            function = tool.get("function")
            if type(function) is not dict and not is_mapping(function):
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
        return text if rule is None else value_of(text, *rule)

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

    def _signature(self, name: str) -> _Signature:
        signature = self._signatures.get(name)
        if signature is None:
            tool = self._tools.get(name)
            if tool is None:
                return _UNKNOWN  # not cached: models can make up any number of names
            root = tool.get("parameters")
            if root is None:
                root = tool.get("input_schema", tool.get("inputSchema"))
            signature = self._signatures[name] = _Signature(root)
        return signature


class _Signature:
    """The parameters of one tool, with those of its schema's `$ref` and `allOf`."""

    __slots__ = ("_rules", "known", "properties", "required", "root")

    def __init__(self, root: object) -> None:
        self.root = root
        self._rules: dict[str, ValueRule | None] = {}
        self.known = False
        self.properties: dict[str, object] = {}
        self.required: frozenset[str] = frozenset()
        schemas: Iterable[Mapping[Any, Any]]
        if type(root) is dict and "$ref" not in root and "allOf" not in root:
            schemas = (root,)
        else:
            schemas = related(root, root, ("allOf",))
        for schema in schemas:
            properties = schema.get("properties")
            if is_mapping(properties):
                self.known = True
                for name, value in properties.items():
                    if isinstance(name, str) and name not in self.properties:
                        self.properties[name] = value
            required = items_of(schema.get("required"))
            if required:
                self.required |= {name for name in required if isinstance(name, str)}

    def rule(self, parameter: str) -> ValueRule | None:
        """The rule for a parameter's texts; None if every text is its own value."""
        try:
            return self._rules[parameter]
        except KeyError:
            if parameter not in self.properties:
                return None  # not cached, as above
        rule = self._rules[parameter] = value_rule(self.properties[parameter], self.root)
        return rule


_UNKNOWN = _Signature(None)
