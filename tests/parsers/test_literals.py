"""Literals: accepted, repaired and rejected texts, and that nothing else ever happens."""

from __future__ import annotations

import ast
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.run import some
from tool_call_parsers.literals.literal import MAX_DEPTH, Literal, LiteralError
from tool_call_parsers.literals.python_call import read_python_call
from tool_call_parsers.literals.strict import read_json
from tool_call_parsers.literals.tolerant import read_tolerant, repair_json

READERS = [read_json, read_tolerant, read_python_call]


def read_python(text: str) -> Literal:
    """The text as the only argument of a call."""
    call = read_python_call(f"f({text})")
    (value,) = call.positional
    return Literal(value, call.end - len("f()"), call.notes)


FRAGMENTS = r"""
\u|\ud83c|\x4|\N{|0|12|1e999|0x|e|True|nul|NaN|-Inf|f(|a=|r'|b'|é|import os|__import__('os')|/*|#|...
""".strip().split("|")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
python_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)
identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
fragments = st.lists(
    st.sampled_from([*"\"'\\{}[]()" * 2, *",:= \n-+._\0\ud83c\udf0d", '"""', "'''", "\\'", '\\"', *FRAGMENTS])
    | st.text(max_size=3)
    | st.characters(categories=["Cs"]),
    max_size=24,
).map("".join)


def as_json(value: Any) -> Any:
    """`value` with lists for tuples."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return {key: as_json(item) for key, item in value.items()} if isinstance(value, dict) else value


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return repr(left) == repr(right)


def refused(read: Any, text: str, *args: Any) -> LiteralError:
    with pytest.raises(LiteralError) as caught:
        read(text, *args)
    return caught.value


# --- well formed ------------------------------------------------------------------------------------------------------


@given(json_values, st.booleans(), st.sampled_from([None, 0, 1, "\t"]), st.sampled_from(["", " x", "}", '"', "\n[1"]))
@example({"a": "\x7f\u2028/😀", "b": [-0.0, 1e300, 10**400]}, True, None, "")
def test_valid_json_is_read_by_all_readers_without_a_note(value, ascii_only, indent, tail):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    if isinstance(value, int | float) or value == "":
        tail = tail.replace('"', "")  # the number would continue, and three quotes are Python's
    for read in (read_json, read_tolerant):
        literal = read("ab \n" + text + tail, 2)
        assert same(literal.value, value)
        assert (literal.end, literal.notes) == (4 + len(text), ())
    assert same(read_tolerant("[1" + text + "2]", 2, 2 + len(text)).value, value)
    repaired = repair_json(f" {text}\n")
    assert repaired is not None and same(repaired.value, value) and repaired.notes == ()


@given(python_values)
@example(("'\"\\\x00\x1b\xa0\u2028\\n\\\\'",))
@example("it's")
def test_the_repr_of_a_value_reads_as_the_value(value):
    literal = read_python(" " + repr(value))
    assert same(literal.value, as_json(value))
    assert (literal.end, literal.notes) == (1 + len(repr(value)), ())


@settings(deadline=None, max_examples=some(60))
@given(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,6}(\.[a-z]{1,3})?", fullmatch=True),
    st.lists(python_values, max_size=2),
    st.dictionaries(identifiers, python_values, max_size=4),
    st.sampled_from(["", ")", ", g(a=1)]", "<|python_end|>", "'"]),
)
def test_a_written_call_reads_as_it_was_meant_and_every_prefix_is_incomplete(name, positional, arguments, tail):
    inside = ", ".join([*map(repr, positional), *(f"{key}={value!r}" for key, value in arguments.items())])
    text = f"{name}({inside})"
    call = read_python_call("[ " + text + tail, 1)
    assert call.name == name
    assert same(call.positional, tuple(map(as_json, positional)))
    assert same(call.arguments, as_json(arguments))
    assert (call.end, call.notes) == (2 + len(text), ())
    for cut in range(len(text)):
        assert refused(read_python_call, text[:cut]).incomplete, text[:cut]
        assert refused(read_python_call, text + tail, 0, cut).incomplete, text[:cut]


@settings(deadline=None, max_examples=some(60))
@given(st.dictionaries(st.text(), json_values, min_size=1, max_size=4), st.booleans())
@example({"😀": [True, False, None, -1.5e-7, "😀\\u", 1e22, {"a": "\u001f"}]}, True)
@example({"😀": [True, False, None, -1.5e-7, "\\", 1e22]}, False)
def test_every_prefix_of_an_object_is_incomplete(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    for cut in range(len(text)):
        error = refused(read_json, text[:cut])
        assert error.incomplete, (text[:cut], error)
        assert 0 <= error.position <= cut


def test_the_grammar_of_python_literals():
    for text in [
        "''' it's\n''two'' '''",
        '"""a\\"""b"""',
        "('a' \"b\"\n'''c''' r'\\d')",
        "['a''b', \"x\"'y']",
        r"r'\n\'x'",
        r"u'\u00e9\x41\101\N{BULLET}\U0001F600\q\
z'",
        "[1_000, 0x_fF, 0o17, 0b1, 00, 1., .5, 1e5, 1_0.0_1E-1_0, - 3, +4, -0x10]",
        "((1), (1,), (), [()], (1, 2,), {}, {'a': (('b'))},)",
        "[\n 1 ,\n\t2\n]",
    ]:
        literal = read_python(text)
        assert same(literal.value, as_json(ast.literal_eval(text))), text
        assert (literal.end, literal.notes) == (len(text), ())
    assert read_python("[true, false, null, {1: 2, None: 3, True: 4, 1.5: 5}]").value == [
        *(True, False, None),
        {"1": 2, "null": 3, "true": 4, "1.5": 5},
    ]
    assert read_python(r"'\ud83d\ude00'") == ("😀", 14, ())
    assert read_python("'a\nb\tc'") == ("a\nb\tc", 7, ())


@pytest.mark.parametrize(
    "text",
    r"""
f'x'|b'x'|rb'x'|{1, 2}|{'a'}|foo|foo()|1j|007|1__0|--1|-True|[x for x in y]|[*a]|{**a}|...|lambda: 0|inf|nan
'\x4'|'\ud8'|'\N{no such}'|'\U99999999'|{[1]: 2}|{(1, 2): 3}|[1 2]|[,]|(,)|[1,,]|[1}|{'a': 1]|{'a' 1}|{'a':}|[1 # one
""".strip()
    .replace("\n", "|")
    .split("|"),
)
def test_text_that_is_not_a_python_literal_is_wrong_whatever_follows(text):
    assert not refused(read_python, text + " ").incomplete


@pytest.mark.parametrize(
    "text",
    r"""
'a' + 'b'|'a' + 'b', timeout=2**31|2**31|'%s' % 'x'|'a' * 3|'a'.join('b')|'a'[0]|'a' == 'b'|'a' if 1 else 'b'
'a' 'b' + 'c'|['a' + 'b']|{'k': 'a' + 'b'}|os.system('x')|x='a'|open('a')
""".strip()
    .replace("\n", "|")
    .split("|"),
)
def test_expressions_are_neither_evaluated_nor_taken_for_unescaped_quotes(text):
    assert not refused(read_python_call, f"f(a={text})").incomplete
    assert not refused(read_python, f"[{text}]").incomplete


# --- calls ------------------------------------------------------------------------------------------------------------


def test_names_parameters_and_places_of_calls():
    call = read_python_call("functions.get-weather( 'Oslo', from=1, max-days = 2 , class='x',)")
    assert (call.name, call.positional) == ("functions.get-weather", ("Oslo",))
    assert call.arguments == {"from": 1, "max-days": 2, "class": "x"}
    assert read_python_call("f(a=1, a=2)") == ("f", (), {"a": 2}, 11, ("duplicate argument a",))
    assert read_python_call("x f()", 1) == ("f", (), {}, 5, ())


@pytest.mark.parametrize(
    "text",
    r"""
this is prose|1(a=2)|f[a]|f(a==1)|f(a=1, 2)|f(a=1; b=2)|f(a: 1)|f(a=1]|f(*a)|f(,)
""".strip().split("|"),
)
def test_text_that_is_not_a_call_is_wrong_whatever_follows(text):
    assert not refused(read_python_call, text).incomplete


@pytest.mark.parametrize("tail", ["", "]", "]<|python_end|>", "</function_calls>", ", g(a=1)]", " ]\n"])
def test_unescaped_quotes_in_an_argument(tail):  # vllm#48171, vllm#32539
    call = read_python_call("bash(command='sed -n '1,9p' f.py', timeout=3, why=\"say \"hi\" now\")" + tail)
    assert call.arguments == {"command": "sed -n '1,9p' f.py", "timeout": 3, "why": 'say "hi" now'}
    assert call.notes == ("unescaped quotes",)
    call = read_python_call("f(a='it's', b=['x'y', 'z'], c={'k': 'v'v'})" + tail)
    assert call.arguments == {"a": "it's", "b": ["x'y", "z"], "c": {"k": "v'v"}}
    assert read_python_call("f(a='x('y'), z')" + tail).arguments == {"a": "x('y'), z"}


@pytest.mark.parametrize(
    "text",
    [
        "f(a='x' b='y')",
        "f(a='x'; b='y')",
        "f('x'; 'y')",
        "write(content='print('a')\nprint('b')\n') and more",
        "f(a='x['y'] z'",
        "f(a='" + "x'y" * 100 + "')",
    ],
)
def test_unescaped_quotes_are_left_alone_where_the_string_may_go_on(text):
    refused(read_python_call, text)


# --- repairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value", "notes"),
    [
        ("{'a': 'x', \"b\": True}", {"a": "x", "b": True}, ("single quotes", "Python literal True")),
        ("[False, None]", [False, None], ("Python literal False", "Python literal None")),
        ('{"a": [1, 2,],}', {"a": [1, 2]}, ("trailing comma",)),
        ('{"a": "x\ny"}', {"a": "x\ny"}, ("raw newline in a string",)),
        ('{"a": "x\ty\\n"}', {"a": "x\ty\n"}, ("raw control character in a string",)),
        ("[NaN, Infinity]", ["NaN", "Infinity"], ("NaN as text", "Infinity as text")),
        ("[-Infinity]", ["-Infinity"], ("-Infinity as text",)),
        ("[1e999, -1e999]", ["1e999", "-1e999"], ("number out of range as text",)),
        ("-" + "9" * 4301, "-" + "9" * 4301, ("number out of range as text",)),
        ('"x\\ud83cy"', "x\ufffdy", ("lone surrogate",)),
        ('{"\\udf0d": "\ud83c"}', {"\ufffd": "\ufffd"}, ("lone surrogate",)),
        ('{"a": {"b": [1', {"a": {"b": [1]}}, ("missing closing bracket (3 times)",)),
        ('{"a": {"b": "c"}\n', {"a": {"b": "c"}}, ("missing closing bracket",)),
        ('{"a": {"b": "c"}}}', {"a": {"b": "c"}}, ("surplus closing bracket",)),
        ("[1]} ]\n}", [1], ("3 surplus closing brackets",)),
        ("('a', 1)", ["a", 1], ("single quotes", "Python tuple")),
        ("{1: 'a'}", {"1": "a"}, ("a key that is not a string", "single quotes")),
        ("[0x10, 1_000, +1]", [16, 1000, 1], ("Python number",)),
        ('["it\\\'s"]', ["it's"], ("escaped apostrophe",)),
        ('{"a": """b "c" d"""}', {"a": 'b "c" d'}, ("triple quotes",)),
        ('{"a": "say "hi" now", "b": 1}', {"a": 'say "hi" now', "b": 1}, ("unescaped quotes",)),
        ('["a "b" \\n c", {"k": "5" x 3""}]', ['a "b" \n c', {"k": '5" x 3"'}], ("unescaped quotes",)),
        ('{\\"a\\": \\"x\\\\ny\\", \\"b\\": [1]}', {"a": "x\ny", "b": [1]}, ("escaped as a whole",)),
    ],
)
def test_clear_meaning_is_repaired_with_a_note(text, value, notes):
    repaired = repair_json(text)
    assert repaired is not None
    assert same(repaired.value, value)
    assert repaired.notes == notes
    refused(whole_json, text)


def whole_json(text: str) -> None:
    if len(text) != read_json(text).end:
        raise LiteralError("more text", 0)


@pytest.mark.parametrize(
    ("text", "incomplete"),
    [
        ("", True),
        ("  ", True),
        ("{", True),
        ('{"arguments": {', True),
        ('{"a": "x', True),
        ('{"a": "x\\', True),
        ('{"a', True),
        ('{"a"', True),
        ('{"a":', True),
        ('{"a": 1,', True),
        ('{"a": 1.', True),
        ('{"a": -', True),
        ('{"a": 1e', True),
        ('{"a": tru', True),
        ("[(1, 2", True),
        ('{"city": Oslo}', False),
        ("{a: 1}", False),
        ('{"a": [1, ...]}', False),
        ('{"a": [1}', False),
        ('[{"a": 1]', False),
        ('{"a" "b"}', False),
        ('["a" "b"]', False),
        ('["a" "b" "c"]', False),
        ('["a"; "b"]', False),
        ('["a", b"]', False),
        ('{"a": "x" "b": "y"}', False),
        ('{"a": "x", ,"b": "y"}', False),
        ('{"a": "x"(, "b": "y"}', False),
        ('{"a": "x", b": "y"}', False),
        ("{'a': 'x',\\ 'b': 'y'}", False),
        ('{"a "b" c": 1}', False),
        ('["a" + "b"]', False),
        ("]", False),
        (",", False),
    ],
)
def test_unclear_meaning_is_not_guessed(text, incomplete):
    assert refused(read_tolerant, text).incomplete is incomplete
    assert repair_json(text) is None


@pytest.mark.parametrize(
    "text",
    ['{"a": "print("}")"}', '{"a": 1} x', '{"a": 1}{"b": 2}', '{"a": "x"}, "y"}', '{\\"a\\": 1', '{\\"a\\": "b"}'],
)
def test_a_text_that_continues_is_not_repaired(text):
    assert repair_json(text) is None


texts = st.recursive(
    st.text(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


@settings(deadline=None, max_examples=some(60))
@given(st.dictionaries(st.text(min_size=1), texts, min_size=1, max_size=3))
def test_a_cut_is_closed_only_after_a_whole_value(value):
    text = json.dumps(value)
    for cut in range(1, len(text)):
        repaired = repair_json(text[:cut])
        if repaired is not None:
            assert text[:cut].rstrip()[-1] in '"}]'
            kept = json.dumps(repaired.value)
            assert text.startswith(kept.rstrip("]}")), (text[:cut], kept)


# --- strictness -------------------------------------------------------------------------------------------------------


NO_JSON = (
    r"""
NaN|[-Infinity]|[1e999]|"\ud83c"|["\udf0d\ud83c"]|'a'|[1,]|{"a": 1,}|[True]|[01]|[.5]|[+1]|["\x41"]|["\ud83cx|[1..
[1.5.|[1e5e|nan|["\ud83c\n|["\ud83c\ud83c
""".strip()
    .replace("\n", "|")
    .split("|")
)


@pytest.mark.parametrize("text", ["9" * 4301, '["\ud83c"]', '"a\nb"', *NO_JSON])
def test_strict_json_rejects_text_that_is_wrong_whatever_follows(text):
    assert not refused(read_json, text).incomplete


def test_strict_json_takes_the_last_of_equal_keys_and_big_integers():
    assert read_json('{"a": 1, "a": 2}') == ({"a": 2}, 16, ("a repeated key",))
    assert read_json('{"a": [{"b": 1, "c": 2, "b": 3}]}').notes == ("a repeated key",)
    assert read_json('{"a": {"b": 1}, "b": {"a": 1}}').notes == ()
    assert read_json("-" + "9" * 4300).value == -int("9" * 4300)
    assert read_json('"\\\\ud83c \\uD83C\\uDF0D"').value == "\\ud83c 🌍"


# --- any text ---------------------------------------------------------------------------------------------------------


@given(fragments, st.integers(0, 5))
@example('f(a="\ud83c\udf0d", \udf0d=1)', 0)
@example("{'a': 0x" + "f" * 5000 + "}", 0)
@example("[" + "1_" * 5000 + "1]", 0)
def test_no_text_raises_anything_else_and_every_value_can_be_written(text, start):
    values: list[Any] = []
    for source, read in itertools.product((text, f"f({text})"), READERS):
        try:
            result = read(source, start)
        except LiteralError as error:
            assert 0 <= error.position <= max(len(source), start)
            assert error.reason and str(error)
        else:
            assert start < result.end <= len(source)
            assert len(set(result.notes)) == len(result.notes)
            values.append(result)
    values.append(repair_json(text))
    json.dumps(values, allow_nan=False, ensure_ascii=False).encode()


@given(fragments)
def test_a_python_literal_is_never_read_as_something_else(text):
    """If both succeed they agree, except for JSON's words, keys, surrogates and line breaks."""
    try:
        expected = ast.literal_eval(text.strip(" "))
        literal = read_python(text)
    except (LiteralError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return
    if literal.end == len(text.rstrip()) and not literal.notes and text.isascii() and "\r" not in text:
        assert same(literal.value, as_json(expected)) or isinstance(expected, (dict, bool))


@pytest.mark.parametrize("opening", ["[", '{"a":', "(", "[[{'a':", '{"a": [', "f(a=["])
@pytest.mark.parametrize("read", [*READERS, read_python])
def test_depth_bombs_are_rejected(read, opening):
    text = opening * 20000
    error = refused(read, text)
    if not opening.startswith("f("):
        assert not refused(read if read is not read_python_call else read_python, "[" * 201).incomplete
    assert error.reason


@pytest.mark.parametrize("read", [read_json, read_tolerant, read_python])
def test_depth_is_bounded_exactly(read):
    value = read("[" * MAX_DEPTH + '"[[{{"' + "]" * MAX_DEPTH).value
    for _ in range(MAX_DEPTH):
        (value,) = value
    assert value == "[[{{"
    for text in ["[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "[" * 20000, "[" * 500, '{"a":' * 500]:
        assert not refused(read, text).incomplete
    flat = json.dumps([[{"[": "["}]] * 300)
    assert read(flat).value == json.loads(flat)


def test_the_end_of_the_text_is_the_given_end():
    assert read_tolerant('{"a": "b"}', 0, 9) == ({"a": "b"}, 9, ("missing closing bracket",))
    assert refused(read_tolerant, '{"a": "b"}', 0, 8).incomplete
    assert read_tolerant("123456", 0, 3) == (123, 3, ())
    assert read_python_call("f(a='')')", 0, 7) == ("f", (), {"a": ""}, 7, ())
    assert refused(read_python_call, "f('''''')", 0, 4).incomplete
    assert read_tolerant("[-Infinity]", 1, 10).value == "-Infinity"
    assert refused(read_tolerant, "[-Infinity]", 1, 9).incomplete
    assert math.isclose(read_tolerant("1.55", 0, 3).value, 1.5)
