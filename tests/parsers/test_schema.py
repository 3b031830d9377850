"""The offered tools' schemas, and the values of argument texts under them."""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_call_parsers.literals.literal import MAX_DIGITS
from tool_call_parsers.schema.kinds import MAX_DEPTH
from tool_call_parsers.schema.tools import ToolIndex
from tool_call_parsers.schema.values import coerce


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def typed(properties: Any, required: Any = (), **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def same(value: Any, expected: Any) -> bool:
    """Equality that distinguishes True from 1, 5 from 5.0 and 0.0 from -0.0."""
    return type(value) is type(expected) and repr(value) == repr(expected)


def union(*kinds: str) -> dict[str, Any]:
    return {"type": list(kinds)}


INTEGER, NUMBER, BOOLEAN, STRING = ({"type": kind} for kind in ("integer", "number", "boolean", "string"))
OBJECT, ARRAY, NULL = ({"type": kind} for kind in ("object", "array", "null"))
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}

LOOKS_TYPED = [
    "", " ", "5", " 5 ", "5.0", "123_456", "1e5", "02134", "true", "True", "null", "None", "NaN", "-1", '"quoted"',
    "[1, 2]", '{"a": 1}', "\n  x\n", "a &amp; b", "9" * 5000, "['a']", "\ud800", "\\ud800",
]  # fmt: skip


class TestStrings:
    @pytest.mark.sample(80)
    @pytest.mark.parametrize("text", LOOKS_TYPED)
    @pytest.mark.parametrize(
        "schema",
        [
            STRING,
            {"type": ["string"]},
            {"type": "STRING"},
            {"type": "str"},
            {"enum": ["5", "a"]},
            {"const": "a"},
            {"type": "string", "enum": ["a", "null"]},
            {"anyOf": [{"type": "string", "format": "date"}, {"const": "today"}]},
            {"type": "string", "enum": ["a", None, 5]},
            {"allOf": [{"type": ["string", "integer"]}, STRING]},
            {"type": "string", "anyOf": [{"minLength": 3}, {"type": "integer"}]},
        ],
    )
    def test_a_string_stays_verbatim(self, schema: Any, text: str) -> None:
        assert coerce(text, schema) == text
        assert ToolIndex([tool("f", typed({"x": schema}))]).is_string("f", "x")

    @pytest.mark.sample(100)
    @pytest.mark.parametrize("text", LOOKS_TYPED)
    @pytest.mark.parametrize(
        "schema",
        [
            None, {}, True, False, "integer", 5, ["integer"], {"type": "any"}, {"type": 5}, {"type": []}, {"type": {}},
            {"type": [["integer"]]}, {"description": "a number"}, {"enum": []}, {"enum": "5"}, {"anyOf": []},
            {"anyOf": 7}, {"anyOf": [{}, {"title": "x"}]}, {"$ref": "#/$defs/missing"}, {"$ref": 5},
            {"$ref": "https://example.org/schema"}, {"nullable": True}, {"enum": [object()]}, {"not": {"type": "null"}},
        ],
    )  # fmt: skip
    def test_a_schema_that_says_nothing_leaves_the_text(self, schema: Any, text: str) -> None:
        assert coerce(text, schema) == text
        assert ToolIndex([tool("f", typed({"x": schema}))]).is_string("f", "x")

    @pytest.mark.parametrize("schema", [INTEGER, NUMBER, BOOLEAN, OBJECT, ARRAY, NULL, OPTIONAL])
    @pytest.mark.parametrize("text", ["", "  ", "three", "yes", " half open [", '{"a": ', "<x>", "\x00"])
    def test_a_value_that_does_not_fit_stays_verbatim(self, schema: Any, text: str) -> None:
        assert coerce(text, schema) == text


class TestNumbers:
    @pytest.mark.parametrize(
        ("schema", "text", "value"),
        [
            (INTEGER, "5", 5),
            (INTEGER, "\n-5\t", -5),
            (INTEGER, "9007199254740993", 9007199254740993),
            (INTEGER, "9007199254740993.0", 9007199254740993),
            (INTEGER, "-0", 0),
            (INTEGER, "+7", 7),
            (INTEGER, "007", 7),
            (INTEGER, "5.", 5),
            (INTEGER, "5.5", "5.5"),
            (INTEGER, ".0", ".0"),
            (INTEGER, "1e5", "1e5"),
            (INTEGER, "true", "true"),
            (INTEGER, '"5"', '"5"'),
            (union("integer", "null"), "5.00", 5),
            (union("integer", "string"), "5.0", "5.0"),
            (union("integer", "number"), "5.0", 5.0),
            (NUMBER, "5", 5),
            (NUMBER, "9007199254740993", 9007199254740993),
            (NUMBER, "5.0", 5.0),
            (NUMBER, "-0.0001", -0.0001),
            (NUMBER, "-0.0", -0.0),
            (NUMBER, "1E+2", 100.0),
            (NUMBER, ".5", 0.5),
            (NUMBER, "+.5e1", 5.0),
            (union("number", "string"), ".5", ".5"),
            (union("integer", "string"), "007", "007"),
            (union("integer", "string"), "+7", "+7"),
            (union("integer", "string"), " 7 ", " 7 "),
            (union("number", "string"), "1e2", 100.0),
            ({"anyOf": [INTEGER, {"const": "all"}]}, "+7", 7),
        ],
    )
    def test_reading(self, schema: Any, text: str, value: Any) -> None:
        assert same(coerce(text, schema), value)

    @pytest.mark.parametrize("schema", [INTEGER, NUMBER, union("integer", "string"), union("null", "number")])
    @pytest.mark.parametrize(
        "text",
        [
            "123_456",
            "0x10",
            "１２",
            "٣",
            "1,000",
            "1 2",
            "--1",
            "+-1",
            "1-",
            "+",
            "-",
            ".",
            "e5",
            "1e",
            "1.2.3",
            "1\x002",
        ],
    )
    def test_text_that_is_not_a_decimal_stays_text(self, schema: Any, text: str) -> None:
        assert coerce(text, schema) == text

    @pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-Infinity", "1e999", "-1e999", "9" * 400 + ".5"])
    def test_a_number_that_is_not_finite_stays_text(self, text: str) -> None:
        assert coerce(text, NUMBER) == text
        assert coerce(text, union("integer", "number", "boolean", "null")) == text

    def test_integers_are_exact_up_to_the_limit_of_digits_and_text_beyond(self) -> None:
        longest = "9" * MAX_DIGITS
        assert coerce(longest, INTEGER) == 10**MAX_DIGITS - 1
        assert coerce("-" + longest, NUMBER) == 1 - 10**MAX_DIGITS
        for schema in (INTEGER, NUMBER):
            assert coerce(longest + "99", schema) == longest + "99"

    def test_a_process_with_a_lower_limit(self) -> None:
        before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(640)
        try:
            assert coerce("1" * 700, INTEGER) == "1" * 700
        finally:
            sys.set_int_max_str_digits(before)

    @given(st.integers())
    def test_integers_round_trip(self, value: int) -> None:
        assert same(coerce(json.dumps(value), INTEGER), value)
        assert same(coerce(json.dumps(value), NUMBER), value)

    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_floats_round_trip(self, value: float) -> None:
        assert same(coerce(json.dumps(value), NUMBER), value)


class TestBooleansAndNull:
    @pytest.mark.parametrize(
        ("schema", "text", "value"),
        [
            (BOOLEAN, "true", True),
            (BOOLEAN, "False", False),
            (BOOLEAN, "TRUE", True),
            (BOOLEAN, "\nfalse\n", False),
            (BOOLEAN, "1", True),
            (BOOLEAN, "0", False),
            (BOOLEAN, "2", "2"),
            (BOOLEAN, "yes", "yes"),
            (BOOLEAN, "null", "null"),
            (BOOLEAN, "ｔrue", "ｔrue"),
            (union("boolean", "null"), "1", True),
            (union("boolean", "integer"), "1", 1),
            (union("boolean", "string"), "1", "1"),
            (union("boolean", "string"), "True", True),
            (NULL, "null", None),
            (NULL, " None ", None),
            (NULL, "NULL", "NULL"),
            (OPTIONAL, "null", None),
            (OPTIONAL, "None", None),
            (OPTIONAL, "nil", "nil"),
            (OPTIONAL, " x ", " x "),
            (OPTIONAL, "5", "5"),
            (INTEGER, "null", "null"),
        ],
    )
    def test_reading(self, schema: Any, text: str, value: Any) -> None:
        assert same(coerce(text, schema), value)


class TestObjectsAndArrays:
    @pytest.mark.parametrize(
        ("schema", "text", "value"),
        [
            (OBJECT, '{"a": [1, 2.50, "3", null, true]}', {"a": [1, 2.5, "3", None, True]}),
            (OBJECT, ' \n{"a": 1}\n', {"a": 1}),
            (OBJECT, '{"id": 9007199254740993}', {"id": 9007199254740993}),
            (OBJECT, '{"a": 1, "a": 2}', {"a": 2}),
            (OBJECT, '{"a": "x\ny\t"}', {"a": "x\ny\t"}),
            (OBJECT, "[1]", "[1]"),
            (OBJECT, '"text"', '"text"'),
            (ARRAY, '["x", "y]", "}z"]', ["x", "y]", "}z"]),
            (ARRAY, "[]", []),
            (ARRAY, "['a', 'b']", ["a", "b"]),
            (ARRAY, '{"a": 1}', '{"a": 1}'),
            (ARRAY, "red", "red"),
            (union("array", "object"), '{"a": 1}', {"a": 1}),
            (union("array", "string"), "[1]", [1]),
            (union("array", "string"), "['a']", "['a']"),
            ({"anyOf": [ARRAY, {"enum": ["all"]}]}, "['a']", ["a"]),
            ({"type": "object", "properties": {"n": INTEGER}}, '{"n": "5"}', {"n": "5"}),
        ],
    )
    def test_reading(self, schema: Any, text: str, value: Any) -> None:
        assert same(coerce(text, schema), value)

    def test_depth_is_bounded(self) -> None:
        def nested(depth: int) -> str:
            return "[" * depth + "]" * depth

        assert json.dumps(coerce(nested(MAX_DEPTH), ARRAY)) == nested(MAX_DEPTH)
        for depth in (MAX_DEPTH + 1, 900, 5_000, 100_000):
            assert coerce(nested(depth), ARRAY) == nested(depth)
        assert coerce('{"a":' * 201 + "1" + "}" * 201, OBJECT) == '{"a":' * 201 + "1" + "}" * 201
        wide = "[" + ",".join(["[]"] * 1000) + "]"
        assert coerce(wide, ARRAY) == [[]] * 1000

    def test_brackets_in_strings_are_no_depth(self) -> None:
        assert coerce(json.dumps(["[" * 1000]), ARRAY) == ["[" * 1000]

    @pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": [1e999]}', '{"a": -Infinity}', '{"a": ' + "9" * 5000 + "}"])
    def test_numbers_that_json_cannot_hold(self, text: str) -> None:
        json.dumps(coerce(text, OBJECT), allow_nan=False)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ('["\\ud800"]', ["\ufffd"]),
            ('["x\\uDC00y", {"\\udfff": "\\ud83d\\ude00"}]', ["x\ufffdy", {"\ufffd": "😀"}]),
            ('["\\\\ud800", "\\u00e9", 1.0]', ["\\ud800", "é", 1.0]),
        ],
    )
    def test_lone_surrogates_are_replaced(self, text: str, value: Any) -> None:
        assert same(coerce(text, ARRAY), value)

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=8,
    )

    @given(st.lists(json_values), st.sampled_from([None, 1]), st.booleans())
    def test_arrays_round_trip(self, value: list[Any], indent: int | None, ascii_only: bool) -> None:
        assert same(coerce(json.dumps(value, indent=indent, ensure_ascii=ascii_only), ARRAY), value)

    @given(st.dictionaries(st.text(), json_values), st.sampled_from([None, 1]), st.booleans())
    def test_objects_round_trip(self, value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
        assert same(coerce(json.dumps(value, indent=indent, ensure_ascii=ascii_only), union("object", "string")), value)


class TestSchemas:
    @pytest.mark.parametrize(
        ("schema", "text", "value"),
        [
            # enum and const
            ({"enum": ["1", 2, None]}, "1", "1"),
            ({"enum": ["1", 2, None]}, "2", 2),
            ({"enum": ["null", None]}, "null", "null"),
            ({"enum": [1, 2.5]}, "2.5", 2.5),
            ({"enum": [True, "auto"]}, "true", True),
            ({"enum": [[1, 2]]}, "[1,2]", [1, 2]),
            ({"const": {"a": 1}}, '{"a":1}', {"a": 1}),
            ({"const": 5.0}, "5", 5),
            ({"type": "integer", "enum": [1.0, 2.0]}, "2", 2),
            ({"anyOf": [{"const": "5"}, INTEGER]}, "5", "5"),
            ({"anyOf": [{"const": "5"}, INTEGER]}, "6", 6),
            # statements that exclude each other
            ({"type": "integer", "enum": ["1"]}, "1", 1),
            ({"type": "string", "enum": [1]}, "1", "1"),
            # composition
            ({"oneOf": [INTEGER, ARRAY]}, "[1]", [1]),
            ({"allOf": [union("integer", "string"), union("integer", "boolean")]}, "1", 1),
            ({"allOf": [union("integer", "string"), union("integer", "boolean")]}, "true", "true"),
            ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": 1}', {"a": 1}),
            ({"anyOf": [{"type": "null"}, {"anyOf": [{"oneOf": [INTEGER]}]}]}, "5", 5),
            ({"anyOf": [INTEGER, {}]}, "5", 5),
            ({"anyOf": [INTEGER, {}]}, "05", "05"),
            ({"anyOf": [{}, NULL]}, "null", None),
            ({"type": "object", "anyOf": [{}, INTEGER]}, "5", "5"),
            ({"type": "string", "nullable": True}, "null", None),
            ({"type": "integer", "nullable": True}, "null", None),
            ({"type": "integer", "nullable": "true"}, "null", "null"),
            ({"type": "string", "default": None}, "null", "null"),
            # shape without a type, other spellings of types
            ({"properties": {"a": INTEGER}}, '{"a": 1}', {"a": 1}),
            ({"items": INTEGER}, "[1]", [1]),
            ({"type": "INTEGER"}, "5", 5),
            ({"type": "int"}, "5", 5),
            ({"type": "float"}, "5.5", 5.5),
            ({"type": "dict"}, '{"a": 1}', {"a": 1}),
            ({"type": ["Integer", "nonsense", 7]}, "5", 5),
        ],
    )
    def test_reading(self, schema: Any, text: str, value: Any) -> None:
        assert same(coerce(text, schema), value)

    @pytest.mark.parametrize(
        "reference",
        [
            "#/$defs/count",
            "#/definitions/count",
            "#/$defs/a~1b~0c",
            "#/$defs/100%25",
            "#/$defs/%C3%A9",
            "#/$defs/chain",
            "#/$defs/list/anyOf/1",
            "#/properties/n",
            "#/$defs/",
        ],
    )
    def test_local_references(self, reference: str) -> None:
        count = {"type": "integer"}
        defs = {
            "count": count,
            "a/b~c": count,
            "100%": count,
            "é": count,
            "": count,
            "chain": {"$ref": "#/$defs/count"},
            "list": {"anyOf": [{"type": "null"}, count]},
        }
        properties = {"x": {"$ref": reference}, "n": count}
        root = {"properties": properties, "$defs": defs, "definitions": defs}
        assert coerce("5", {"$ref": reference}, root) == 5
        assert coerce("5", {"allOf": [{"$ref": reference}], "description": "how many"}, root) == 5
        assert ToolIndex([tool("f", root)]).coerce("f", "x", "5") == 5

    def test_a_reference_to_the_whole(self) -> None:
        assert coerce('{"a": 1}', {"$ref": "#"}, {"type": "object"}) == {"a": 1}
        assert coerce('{"a": 1}', {"$ref": "#"}) == '{"a": 1}'

    def test_references_into_the_parameters_own_schema(self) -> None:
        schema = {"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}
        assert coerce("5", schema) == 5
        assert coerce("5", schema, {"type": "object"}) == 5

    @pytest.mark.parametrize(
        "reference", ["#/$defs/9", "#/l/2", "#/l/-1", "#/l/x", "#/l/²", "#x", "count", "", "#/n/a"]
    )
    def test_references_that_lead_nowhere(self, reference: str) -> None:
        assert coerce("5", {"$ref": reference}, {"l": [INTEGER, INTEGER], "n": 5, "$defs": {}}) == "5"

    def test_cycles_end(self) -> None:
        root = {
            "$defs": {
                "self": {"$ref": "#/$defs/self"},
                "a": {"anyOf": [INTEGER, {"$ref": "#/$defs/b"}]},
                "b": {"anyOf": [NULL, {"$ref": "#/$defs/a"}]},
                "json": {"anyOf": [STRING, NULL, {"type": "array", "items": {"$ref": "#/$defs/json"}}]},
                "all": {"allOf": [{"$ref": "#/$defs/all"}, BOOLEAN]},
            }
        }

        def read(name: str, text: str) -> Any:
            return coerce(text, {"$ref": f"#/$defs/{name}"}, root)

        assert read("self", "5") == "5"
        assert read("a", "5") == 5
        assert read("a", "null") is None
        assert read("b", "5") == 5
        assert read("json", "[[]]") == [[]]
        assert read("json", "null") is None
        assert read("json", "true") == "true"
        assert read("all", "true") is True
        loop: dict[str, Any] = {"anyOf": [INTEGER]}
        loop["anyOf"].append(loop)
        assert coerce("5", loop) == 5

    def test_shared_branches_are_reduced_once(self) -> None:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(150):  # 2**150 paths
            schema = {"anyOf": [schema, schema]}
        assert coerce("5", schema) == 5

    def test_schemas_beyond_the_depth_say_nothing(self) -> None:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(5000):
            schema = {"allOf": [schema]}
        assert coerce("5", schema) == "5"

    def test_a_nearly_exhausted_stack(self) -> None:
        schema: dict[str, Any] = {"type": "array"}
        for _ in range(100):
            schema = {"allOf": [schema]}
        text = "[" * 100 + "]" * 100
        values: list[Any] = []

        def descend() -> None:
            with suppress(RecursionError):
                descend()
            values.append(len(values) > 20 and coerce(text, schema))

        descend()
        assert json.dumps(values[-1]) == text
        assert text in values  # some frames deeper there was no room to decode it


TOOLS = [
    tool(
        "lookup",
        typed(
            {
                "zip": STRING,
                "id": INTEGER,
                "amount": NUMBER,
                "active": BOOLEAN,
                "note": OPTIONAL,
                "unit": {"enum": ["m"]},
            },
            ["zip"],
        ),
    ),
    {"name": "search", "input_schema": typed({"query": STRING, "tags": ARRAY, "id": INTEGER}, ["query"])},
    {"type": "function", "name": "list_all", "parameters": typed({})},
    {"name": "remote", "inputSchema": typed({"n": INTEGER}, ["n"])},
    {"type": "function", "function": {"name": "opaque"}},
]


class TestToolIndex:
    def test_names_and_offers(self) -> None:
        index = ToolIndex(TOOLS)
        assert list(index.names()) == ["lookup", "search", "list_all", "remote", "opaque"]
        assert "lookup" in index.names() and len(index.names()) == 5
        assert index.offered("opaque") and index.offered("search")
        assert not index.offered("lookup\n") and not index.offered("")

    @pytest.mark.parametrize("tools", [None, [], (), [{}], [{"type": "function", "function": {"description": "x"}}]])
    def test_nothing_to_compare_with(self, tools: Any) -> None:
        index = ToolIndex(tools)
        assert index.offered("anything") and not index.names()
        assert index.declares("f", "x") is None and index.order("f") == () and index.required("f") == frozenset()
        assert index.is_string("f", "x") and index.coerce("f", "x", "5") == "5" and index.infer(["x"]) is None

    @pytest.mark.parametrize(
        "tools", ["", "lookup", b"", 5, {"name": "f"}, {}, [None], ["lookup"], [[]], [TOOLS[0], 3], iter(TOOLS), {1}]
    )
    def test_values_that_are_not_tools(self, tools: Any) -> None:
        with pytest.raises(TypeError, match="tools"):
            ToolIndex(tools)

    def test_any_mapping_and_sequence(self) -> None:
        frozen = MappingProxyType({"name": "f", "parameters": MappingProxyType(OrderedDict(properties={"x": INTEGER}))})
        for tools in ([frozen], (frozen,), [MappingProxyType({"function": frozen})]):
            assert ToolIndex(tools).coerce("f", "x", "5") == 5

    def test_order_and_required(self) -> None:
        index = ToolIndex(TOOLS)
        assert index.order("lookup") == ("zip", "id", "amount", "active", "note", "unit")
        assert index.required("lookup") == {"zip"}
        assert index.order("search") == ("query", "tags", "id")
        for name in ("opaque", "list_all", "nowhere"):
            assert index.order(name) == () and index.required(name) == frozenset()

    def test_declares(self) -> None:
        index = ToolIndex(TOOLS)
        assert index.declares("lookup", "zip") is True
        assert index.declares("lookup", "zap") is False
        assert index.declares("list_all", "zip") is False
        assert index.declares("opaque", "zip") is None
        assert index.declares("nowhere", "zip") is None

    def test_is_string(self) -> None:
        index = ToolIndex(TOOLS)
        strings = {name for name in index.order("lookup") if index.is_string("lookup", name)}
        assert strings == {"zip", "unit"}
        assert index.is_string("lookup", "extra") and index.is_string("nowhere", "id")

    def test_coerce(self) -> None:
        index = ToolIndex(TOOLS)
        for _ in range(2):  # read, then cached
            assert index.coerce("lookup", "id", "9007199254740993") == 9007199254740993
            assert index.coerce("lookup", "zip", "123_456") == "123_456"
            assert index.coerce("lookup", "note", "null") is None
            assert index.coerce("lookup", "extra", "5") == "5"
            assert index.coerce("opaque", "id", "5") == "5"
            assert index.coerce("nowhere", "id", "5") == "5"
            assert index.coerce("search", "tags", '["a"]') == ["a"]
            assert index.coerce("remote", "n", "5") == 5

    def test_infer(self) -> None:
        index = ToolIndex(TOOLS)
        assert index.infer(["zip", "id"]) == "lookup"
        assert index.infer(("query", "id")) == "search"
        assert index.infer({"n"}) == "remote"
        assert index.infer(["id"]) is None  # a required parameter is missing everywhere
        assert index.infer(["zip", "query"]) is None
        assert index.infer([]) is None  # list_all and opaque
        assert ToolIndex(TOOLS[:3]).infer([]) == "list_all"
        twins = [tool("a", typed({"x": STRING})), tool("b", typed({"x": STRING}))]
        assert ToolIndex(twins).infer(["x"]) is None

    def test_parameters_by_reference_and_composition(self) -> None:
        parameters = {
            "$ref": "#/$defs/base",
            "$defs": {"base": typed({"a": INTEGER}, ["a"]), "loop": {"allOf": [{"$ref": "#/$defs/loop"}]}},
            "properties": {"own": BOOLEAN},
            "allOf": [typed({"b": ARRAY, "own": STRING}, ["b"]), typed({"c": STRING}), {"$ref": "#/$defs/loop"}],
        }
        index = ToolIndex([tool("f", parameters)])
        assert index.order("f") == ("own", "a", "b", "c")
        assert index.required("f") == {"a", "b"}
        assert index.coerce("f", "a", "5") == 5 and index.coerce("f", "own", "true") is True

    def test_of_equal_names_the_last(self) -> None:
        index = ToolIndex([tool("f", typed({"x": STRING})), tool("f", typed({"x": INTEGER}))])
        assert list(index.names()) == ["f"] and index.coerce("f", "x", "5") == 5

    @pytest.mark.parametrize(
        "parameters",
        [
            None, 5, "object", [], {}, {"type": "object"}, {"properties": None}, {"properties": ["x"]},
            {"required": ["x"]}, {"$ref": "#"}, {"allOf": [5, None, {"$ref": "#/nowhere"}]}, {"allOf": {}},
        ],
    )  # fmt: skip
    def test_parameters_that_are_no_schema(self, parameters: Any) -> None:
        index = ToolIndex([tool("f", parameters)])
        assert index.offered("f") and index.declares("f", "x") is None
        assert index.order("f") == () and index.is_string("f", "x") and index.coerce("f", "x", "5") == "5"

    def test_odd_keys_and_names(self) -> None:
        index = ToolIndex(
            [tool("f", {"properties": {1: INTEGER, None: {}, "x": INTEGER}, "required": [1, "x", ["y"]]})]
        )
        assert index.order("f") == ("x",) and index.required("f") == {"x"}
        assert not ToolIndex([{"name": 5}, {"function": {"name": None}}]).names()


KEYWORDS = [
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable", "properties", "required", "items", "$defs",
]  # fmt: skip
WORDS = [
    "string", "integer", "number", "boolean", "object", "array", "null", "INT", "any", "#", "#/$defs/type", "#/anyOf/0",
    "#/properties", "5", "x", "",
]  # fmt: skip
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(WORDS) | st.binary(max_size=1),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYWORDS, *WORDS]), inner, max_size=4)
        | st.dictionaries(st.none() | st.integers(), inner, max_size=1)
    ),
    max_leaves=20,
)
schemas: st.SearchStrategy[Any] = junk | st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(WORDS[:8]) | st.lists(st.sampled_from(WORDS[:8]), max_size=3)})
    | st.fixed_dictionaries(
        {"enum": st.lists(st.sampled_from(["5", "null", "true", 5, 5.0, None, True, [], {}, "x"]))}
    ),
    lambda inner: st.dictionaries(
        st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner | junk, max_size=3), min_size=1, max_size=2
    ),
    max_leaves=6,
)
texts = (
    st.text(max_size=20)
    | st.sampled_from(LOOKS_TYPED[:-2])
    | st.text(alphabet="+-.0123456789eE_ \n", max_size=12)
    | st.text(alphabet="{}[]()\",:'\\ud8c0 1e9NaNnulltrueTrue", max_size=30)
    | st.builds(json.dumps, TestObjectsAndArrays.json_values)
    | st.builds(str, TestObjectsAndArrays.json_values)
)


def assert_sound(value: Any) -> None:
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@given(texts, schemas, junk)
def test_any_text_under_anything_gives_json(text: str, schema: Any, root: Any) -> None:
    for value in (coerce(text, schema), coerce(text, schema, root)):
        assert_sound(value)
        assert not isinstance(value, float) or math.isfinite(value)
        assert not isinstance(value, str) or value == text


@given(texts, st.dictionaries(st.sampled_from(["x", "y"]), schemas), junk)
def test_a_parameter_that_is_a_string_is_its_text(text: str, properties: Any, defs: Any) -> None:
    index = ToolIndex([tool("f", {"properties": properties, "$defs": defs})])
    for parameter in ("x", "y", "z"):
        value = index.coerce("f", parameter, text)
        assert_sound(value)
        assert same(value, coerce(text, properties.get(parameter), {"properties": properties, "$defs": defs}))
        if index.is_string("f", parameter):
            assert same(value, text)


@given(schemas)
def test_a_parameter_is_a_string_or_some_text_is_another_value(schema: Any) -> None:
    # 1.5 is the only kind of number that a list of integers rejects, 6 an integer that is not text of an enum,
    # "[]" and "{}" are the containers.
    readable = ["null", "5", "6", "1.5", "true", "{}", "[]", "None", "True", " 5", " true", " {}", " []", " null"]
    index = ToolIndex([tool("f", typed({"x": schema}))])
    stays = all(same(index.coerce("f", "x", text), text) for text in readable)
    assert index.is_string("f", "x") == stays


@given(st.lists(st.dictionaries(st.sampled_from(["name", "function", "parameters", "input_schema"]), junk)), st.text())
def test_any_tools_are_tolerated(tools: Any, text: str) -> None:
    index = ToolIndex(tools)
    for name in [*index.names(), "nowhere"]:
        order = index.order(name)
        assert all(index.declares(name, parameter) for parameter in order)
        assert index.infer(order) in {None, *index.names()}
        for parameter in [*order, *index.required(name)]:
            assert_sound(index.coerce(name, parameter, text))
