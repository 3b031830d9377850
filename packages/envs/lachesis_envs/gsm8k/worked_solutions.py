"""A policy that follows worked solutions of maths word problems as `python` tool calls.

It tests an environment with its tools and its reward without a model. GSM8K's solutions contain their arithmetic as
`<<48/2=24>>`. In other prose, only equations that hold are used.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from backends.first_use import parse
from lachesis_envs.gsm8k.math_answer import without_separators
from lachesis_messages.messages import Message, ToolCall

UNKNOWN_PROBLEM = "I do not know this problem."


@dataclass(frozen=True, slots=True)
class WorkedSolution:
    """Python programs to run in order, and the final answer."""

    steps: Sequence[str]
    answer: str


class WorkedSolutionPolicy:
    """Plays the solution of the problem in the first user message. The number of tool results selects the step.

    `solutions` maps question texts to solutions. Step k is a call of `tool` with the argument `code`. After the last
    step, or without `tool` at once, it answers with a short text that ends in `\\boxed{answer}`. For an unknown problem
    it answers `UNKNOWN_PROBLEM`.
    """

    def __init__(self, solutions: Mapping[str, WorkedSolution], *, tool: str = "python") -> None:
        self.tool = tool
        self._solutions = {question.strip(): solution for question, solution in solutions.items() if question.strip()}
        self._key_length = min((len(question) for question in self._solutions), default=1)
        self._key_length = min(self._key_length, 32)
        self._by_start: dict[str, list[str]] = {}
        for question in self._solutions:
            self._by_start.setdefault(question[: self._key_length], []).append(question)

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
        asked = next((_text(message) for message in messages if message.get("role") == "user"), "")
        solution = self._find(asked)
        if solution is None:
            return Message("assistant", content=UNKNOWN_PROBLEM)
        done = sum(message.get("role") == "tool" for message in messages)
        offered = any((tool.get("function") or {}).get("name") == self.tool for tool in tools or ())
        if offered and done < len(solution.steps):
            arguments = json.dumps({"code": solution.steps[done]}, ensure_ascii=False)
            return Message("assistant", tool_calls=(ToolCall(f"call_{done:024x}", self.tool, arguments),))
        return Message("assistant", content=f"The result is \\boxed{{{solution.answer}}}")

    def _find(self, text: str) -> WorkedSolution | None:
        """The solution of the longest known question in the text."""
        found = ""
        for position in range(len(text) - self._key_length + 1):
            for question in self._by_start.get(text[position : position + self._key_length], ()):
                if len(question) > len(found) and text.startswith(question, position):
                    found = question
        return self._solutions.get(found)


def gsm8k_steps(answer_text: str) -> WorkedSolution:
    """GSM8K's `answer` field: every `<<48/2=24>>` becomes `print(48/2)`, the final answer follows `####`."""
    expressions = (match[1].strip() for match in re.finditer(r"<<([^<>=]+)=[^<>]*>>", answer_text))
    return _solution((text for text in expressions if evaluate(text) is not None), answer_text)


def arithmetic_steps(text: str) -> WorkedSolution:
    """A worked solution in prose: `David spent 6 x €9.5 = €57 for the notebooks` becomes `print(6 * 9.5)`."""
    return _solution(_equations(text.split("####")[0]), text)


def evaluate(expression: str) -> Fraction | None:
    """The exact value of `+ - * /`, brackets and decimal numbers; None for anything else."""
    if len(expression) > 400:
        return None
    try:
        return _value(parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(repr(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return Fraction(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError("not arithmetic")


_TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?P<percent>%?)|(?P<word>[^\W\d_]+)|(?P<sign>[-+*/×÷−–=()])"
    r"|(?P<unit>[$€£¥°])|(?P<stop>[^\s'’\"])"
)
_SIGNS = {"×": "*", "÷": "/", "−": "-", "–": "-", "x": "*", "X": "*", "of": "*"}
_LONGEST_EXPRESSION = 60
_ROUNDING = Fraction(1, 10**12)  # solutions computed in floats say 14.500000000000002


def _equations(text: str) -> Iterable[str]:
    """The left side of every equation in the text that holds, as Python, without units and words."""
    for line in text.splitlines():
        tokens = list(_tokens(line))
        for index, token in enumerate(tokens):
            if token == "=" and index + 1 < len(tokens):
                yield from _left_side(tokens[:index], tokens[index + 1])


def _left_side(before: list[str], stated: str) -> Iterable[str]:
    """The longest run of tokens before the `=` that evaluates to the number after it."""
    right = evaluate(stated)
    start = len(before)
    while start and before[start - 1] not in ("=", ";") and len(before) - start < _LONGEST_EXPRESSION:
        start -= 1
    for first in range(start, len(before) - 2):
        expression = " ".join(before[first:]).replace("( ", "(").replace(" )", ")")
        left = evaluate(expression)
        if left is not None and right is not None and abs(left - right) <= _ROUNDING * (1 + abs(right)):
            return [expression]
    return []


def _tokens(line: str) -> Iterable[str]:
    """Numbers, operators, brackets and `=`; `;` where an expression ends. Units (`/minute`) are left out."""
    matches = [match for match in _TOKEN.finditer(line) if not match["unit"]]
    last_was_number = False
    for match, following in zip_longest(matches, matches[1:]):
        sign = match["sign"] or (match["word"] if match["word"] in ("x", "X", "of") else None)
        if match["number"]:
            number = match["number"].replace(",", "")
            yield f"({number} / 100)" if match["percent"] else f"0{number}" if number.startswith(".") else number
        elif sign in ("=", "(", ")"):
            if sign == "(" and last_was_number:
                yield "*"  # 2(16)
            yield sign
        elif sign:  # an operator needs an operand; "meters/minute" and "half of the day" have words
            if following and (following["number"] or following["sign"] in ("(", "-")):
                yield _SIGNS.get(sign, sign)
        elif match["stop"]:
            yield ";"
        last_was_number = bool(match["number"])


def _solution(expressions: Iterable[str], text: str) -> WorkedSolution:
    answer = without_separators(text.rsplit("####", 1)[-1].strip()).removesuffix(".0")
    steps = list(dict.fromkeys(f"print({expression})" for expression in expressions))
    return WorkedSolution(steps or [f"print({answer!r})" if evaluate(answer) is None else f"print({answer})"], answer)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))
