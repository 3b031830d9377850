"""The parameters of a tool, as its schema declares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tool_call_parsers.schema.kinds import ValueRule, is_mapping, items_of, related, value_rule
from tool_call_parsers.schema.values import value_of


class Signature:
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

    value_of = staticmethod(value_of)

    def rule(self, parameter: str) -> ValueRule | None:
        """The rule for a parameter's texts; None if every text is its own value."""
        try:
            return self._rules[parameter]
        except KeyError:
            if parameter not in self.properties:
                return None  # not cached, as above
        rule = self._rules[parameter] = value_rule(self.properties[parameter], self.root)
        return rule


UNKNOWN = Signature(None)
