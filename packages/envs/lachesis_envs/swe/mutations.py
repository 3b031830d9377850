"""More tasks of a tree whose tests pass: one hunk of its fix taken back, or one operator changed.

A mutation is a task where at least one test fails with it, by the judge that will judge the agent, and all others pass
as before. The solution is the tree without it. The agent does not get the tests that fail: code that knows the text of
a test can tell it from the changed one.
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence

from lachesis.loop.judgement import Judgement
from lachesis_envs.judging.changed_tests import VALUE, TestFile, found_test
from lachesis_envs.swe.building import Files, SweTask, hunks, with_hunks, within

Judge = Callable[[Files], Awaitable[Judgement]]
"""What the tests of a task say about its solution with these files changed."""

_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
}
"""The text of an operator, and what it becomes."""
_MOST = 0.25
"""Part of the tests that a mutation may break: one that breaks more is found at once."""


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change of one file."""

    path: str
    data: bytes
    shown: str


async def mutated(task: SweTask, judge: Judge, count: int, seed: int = 0, tries: int = 10) -> list[SweTask]:
    """Up to `count` tasks, of at most `tries` candidates for each of them, in an order that `seed` decides.

    Raises:
        ValueError: the tests do not pass with the solution of `task`.
    """
    right = {**task.tree, **task.solution}
    plain = await judge({})
    if not plain.passed:
        raise ValueError(f"{task.name}: its own solution is worth {plain.fraction:g}")
    candidates = [*reverted(task)]
    operators = [*changed_operators(right, [path for path in right if _is_source(task, path)])]
    random.Random(seed).shuffle(operators)
    candidates += operators
    made: list[SweTask] = []
    for candidate in candidates[: tries * count]:
        if len(made) == count:
            break
        found = await judge({candidate.path: candidate.data})
        failed = [id for id, test in found.tests.items() if not test.passed]
        started = any(test.outcome == "passed" for test in found.tests.values())
        if not failed or not started or found.forged or len(failed) > max(1, _MOST * len(task.expected)):
            continue
        if not any(found.tests[id].kind == VALUE for id in failed):  # the judge's change could be recognised
            continue
        tree = {**right, candidate.path: candidate.data, **task.tests}
        seen = without_tests(tree, failed)
        made.append(
            dataclasses.replace(
                task,
                name=f"{task.name}-m{len(made)}",
                instruction=_INSTRUCTION.format(tests="\n".join(f"* `{id}`" for id in failed[:20])),
                tree={**tree, **seen},
                tests={path: tree[path] for path in seen},
                solution={candidate.path: right[candidate.path]},
                fail_to_pass=failed,
                origin={**task.origin, "kind": "mutation", "of": task.name, "change": candidate.shown},
            )
        )
    return made


def reverted(task: SweTask) -> Iterator[Mutation]:
    """The tree with all hunks of the solution but one, where there are several."""
    for path, new in task.solution.items():
        old = task.tree.get(path, b"")
        begins = [begin + 1 for begin, _, _ in hunks(old, new)]
        for left_out in begins if len(begins) + len(task.solution) > 2 else ():
            data = with_hunks(old, new, [begin for begin in begins if begin != left_out])
            yield Mutation(path, data, f"{path}:{left_out}: a hunk taken back")


def changed_operators(tree: Files, paths: Sequence[str]) -> Iterator[Mutation]:
    """The tree with one operator changed: comparisons, `and` and `or`, arithmetic."""
    for path in paths:
        data = tree[path]
        try:
            nodes = list(ast.walk(ast.parse(data)))
        except (SyntaxError, ValueError):
            continue
        lines = data.splitlines(keepends=True)
        starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
        for node in nodes:
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                operator: ast.AST = node.ops[0]
                sides = node.left, node.comparators[0]
            elif isinstance(node, ast.BoolOp):
                operator, sides = node.op, (node.values[0], node.values[1])
            elif isinstance(node, ast.BinOp):
                operator, sides = node.op, (node.left, node.right)
            else:
                continue
            text, other = _OPERATORS.get(type(operator), ("", ""))
            left, right = sides
            if not text or left.end_lineno is None or left.end_col_offset is None:
                continue
            begin, end = starts[left.end_lineno - 1] + left.end_col_offset, starts[right.lineno - 1] + right.col_offset
            if data[begin:end].strip() != text.encode():  # there are parentheses or comments
                continue
            made = data[:begin] + f" {other} ".encode() + data[end:]
            yield Mutation(path, made, f"{path}:{node.lineno}: {text} -> {other}")


def without_tests(tree: Files, ids: Sequence[str]) -> Files:
    """The files of `tree` that have the tests `ids`, without these."""
    files: dict[str, TestFile | bytes] = {id.partition("::")[0]: b"" for id in ids}
    files = {path: TestFile(path, tree[path]) for path in files} | {
        path: data for path, data in tree.items() if path.endswith(".py") and path not in files
    }
    removed: dict[str, dict[tuple[int, int], bytes]] = {}
    for id in ids:
        file, function = found_test(files, id)
        if function is not None:
            begin = min([function.lineno, *(mark.lineno for mark in function.decorator_list)]) - 1
            removed.setdefault(file.path, {})[begin, function.end_lineno or begin] = b" " * function.col_offset
    made = {}
    for path, places in removed.items():
        lines = tree[path].splitlines(keepends=True)
        for (begin, end), indent in sorted(places.items(), reverse=True):
            lines[begin:end] = [indent + b"pass\n"]  # a class may have no other
        made[path] = b"".join(lines)
    return made


def _is_source(task: SweTask, path: str) -> bool:
    return path.endswith(".py") and within(path, task.sources) and not within(path, [task.test_folder])


_INSTRUCTION = """\
A recent change broke something in this package. These tests, which you do not have, passed before it and fail now:

{tests}

Find the cause in the code and correct it."""
