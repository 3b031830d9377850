"""The fixtures of test files, and what takes the parameters of tests besides these, as far as the text tells."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

BUILT_IN = {
    *("self", "tmp_path", "tmpdir", "tmp_path_factory", "tmpdir_factory", "monkeypatch", "capsys", "capfd", "caplog"),
    *("capsysbinary", "capfdbinary", "recwarn", "pytestconfig", "record_property", "cache"),
}
"""Arguments that are not made from a test's parameters."""
_DYNAMIC = {"getfixturevalue", "callspec", "funcargs", "fixturenames"}
"""What reaches the parameters of a test without their names as arguments."""


@dataclass(frozen=True, slots=True)
class Fixtures:
    """What may take the parameters of tests besides these."""

    known: frozenset[str] = frozenset()
    """Names of functions whose arguments are in `taken`."""
    taken: frozenset[str] = frozenset()
    dynamic: bool = False
    """Whether parameters may be taken by names that are not seen."""

    @classmethod
    def of(cls, trees: Iterable[ast.Module], *, unread: bool = False) -> Fixtures:
        """Those of these files. What is a fixture is known by its decorators, or where it is handed to `fixture()`.

        Args:
            unread: whether there are more files, which cannot be read.
        """
        known, taken, names = set(), set(), set()
        for tree in trees:
            nodes = list(ast.walk(tree))
            names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            calls = [node for node in nodes if isinstance(node, ast.Call) and "fixture" in called(node.func)]
            wrapped = {ast.unparse(argument) for call in calls for argument in call.args}
            for node in nodes:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                marks = list(map(ast.unparse, node.decorator_list))
                is_test = node.name.startswith("test") and not any("fixture" in mark for mark in marks)
                if node.name in wrapped or (marks and not is_test):
                    known.add(node.name)
                    taken |= arguments_of(node)
        return cls(frozenset(known), frozenset(taken), unread or not names.isdisjoint(_DYNAMIC))


def called(node: ast.expr) -> str:
    """The last name of what is called."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
