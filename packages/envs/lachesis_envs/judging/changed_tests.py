"""Tests changed so that a right solution fails them: canaries that nothing in the interpreter tells from the tests.

A change is made in the text of the test, at a place that the test must reach in order to pass. Where the test compares
with a literal, or expects an exception by name, that is replaced by another one of its kind (`VALUE`): code that reads
the changed test cannot know which of the two is right without solving the task. Otherwise the comparison is turned
around (`INVERTED`), and where there is nothing to turn around the test fails once it has ended (`ENDED`): by its text
where it cannot end elsewhere. Both catch code that makes every test pass; code that knows of them can recognise them.
"""

from __future__ import annotations

import ast
import builtins
import posixpath
import random
import re
import string
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from backends.first_use import parse
from lachesis_envs.judging.fixtures import BUILT_IN, Fixtures, arguments_of, called

VALUE, INVERTED, ENDED = "value", "inverted", "ended"
Found: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | None

_OPPOSITE = {
    "assertEqual": "assertNotEqual",
    "assertTrue": "assertFalse",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIn": "assertNotIn",
    "assertIsInstance": "assertNotIsInstance",
    "assertAlmostEqual": "assertNotAlmostEqual",
    "assertGreater": "assertLessEqual",
    "assertLess": "assertGreaterEqual",
}
_OPPOSITE.update({opposite: name for name, opposite in _OPPOSITE.items()})
_EQUAL = {
    "assertEqual",
    "assertListEqual",
    "assertTupleEqual",
    "assertDictEqual",
    "assertSetEqual",
    "assertSequenceEqual",
}
_EQUAL |= {"assertMultiLineEqual", "assertCountEqual", "assert_equal", "assert_array_equal"}
_EQUAL |= {"assert_called_with", "assert_called_once_with"}
_NEAR = {"assertAlmostEqual", "assert_allclose", "assert_almost_equal", "assert_array_almost_equal"}
_RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
_COMMON = ("ValueError", "TypeError", "RuntimeError")
"""Exceptions that tests often expect, and that replace each other. Exceptions of programs rarely inherit from two."""
_ENDS_EARLY = re.compile("(?i)rais|expect|error|exc|fail|ignor|suppress|test|warn|skip")
_RARE = ("ZeroDivisionError", "EOFError", "OverflowError", "RecursionError")
"""What replaces all others: exceptions of programs do not inherit from these, and tests do not expect them."""
_VALUES = {"date", "datetime", "timedelta", "Decimal"}
"""Types whose objects differ if a literal that they are made from does."""
_FAILS = b"assert 0 == 1"
_CHANGEABLE = string.ascii_letters + string.digits
_TOLERANCE = 1e-5
"""More than comparisons of floats allow by themselves."""


@dataclass(frozen=True, slots=True)
class Edit:
    begin: int
    end: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Change:
    """How one test function is changed."""

    kind: str
    edits: tuple[Edit, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The ids that change with it, of parameters: from before to after."""
    shown: str = ""
    """For people."""


class TestFile:
    """A file of tests, in which tests are found by their ids."""

    __test__ = False

    def __init__(self, path: str, source: bytes) -> None:
        """Raises `SyntaxError`, also for what this Python does not know yet."""
        self.path, self.source = path, source
        self.tree = parse(source)
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._plain = _is_utf8(source)
        nodes = list(ast.walk(self.tree))
        self._used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        self._used |= {node.id for node in nodes if isinstance(node, ast.Name)}

    def function(self, id: str) -> Found:
        """The function of a test; None where it is not written in this file."""
        names = id[len(self.path) + 2 :].partition("[")[0].split("::")
        return _method(self.tree, self.tree, names)

    def uses(self, name: str) -> bool:
        """Whether the text names a test otherwise than by defining it."""
        return name in self._used

    def change(
        self,
        function: ast.AST | None,
        ids: Sequence[str],
        choose: random.Random,
        *,
        shared: bool = False,
        fixtures: Callable[[], Fixtures] | None = None,
    ) -> Change:
        """A change that makes the tests `ids` of one function fail if they would pass.

        Args:
            shared: whether tests that are not in `ids` may run the function.
            fixtures: those that tests of the file may have; None means those in it.
        """
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return Change(ENDED)
        if self._plain and not shared and not self.uses(function.name):
            found = list(_Changes(self, function, ids, choose, fixtures or (lambda: Fixtures.of([self.tree]))))
            for kind in (VALUE, INVERTED):
                of_kind = [change for change in found if change.kind == kind]
                choose.shuffle(of_kind)
                for change in of_kind:
                    if self._parses(function, change):
                        return change
            change = Change(ENDED, self._ending(function), shown="fails after its last statement")
            if change.edits and self._parses(function, change):
                return change
        return Change(ENDED)

    def _ending(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[Edit, ...]:
        """A failure wherever the function would return; nothing where it yields, or a failure could be caught."""
        inside = [node for statement in function.body for node in _own(statement)]
        returns = [node for node in inside if isinstance(node, ast.Return)]
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in inside):
            return ()
        if returns and any(isinstance(node, ast.Try | ast.TryStar | ast.With | ast.AsyncWith) for node in inside):
            return ()
        edits = [Edit(*self.span(node), _FAILS) for node in returns]
        if not isinstance(function.body[-1], ast.Return):
            (begin, _), (_, end) = self.span(function.body[0]), self.span(function.body[-1])
            before = self.source[self._lines[function.body[0].lineno - 1] : begin]
            edits.append(Edit(end, end, (b"; " if before.strip() else b"\n" + before) + _FAILS))
        return tuple(edits)

    def changed(self, changes: Iterable[Change]) -> bytes:
        return _with(self.source, [edit for change in changes for edit in change.edits])

    def _parses(self, function: ast.FunctionDef | ast.AsyncFunctionDef, change: Change) -> bool:
        """Whether the changed function does: the whole file, for each of its tests, would take minutes."""
        first = min([function.lineno, *(mark.lineno for mark in function.decorator_list)])
        begin, (_, end) = self._lines[first - 1], self.span(function)
        if not all(begin <= edit.begin and edit.end <= end for edit in change.edits):
            return False
        text = _with(self.source[:end], change.edits)[begin:]
        try:
            parse(b"if 1:\n" + text if text[:1].isspace() else text)
        except SyntaxError:
            return False
        return True

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> bytes:
        begin, end = self.span(node)
        return self.source[begin:end]


class _Changes:
    """The changes that are possible in one function."""

    def __init__(
        self,
        file: TestFile,
        function: ast.AST,
        ids: Sequence[str],
        choose: random.Random,
        fixtures: Callable[[], Fixtures],
    ) -> None:
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        self.file, self.function, self.ids, self.choose, self.fixtures = file, function, ids, choose, fixtures

    def __iter__(self) -> Iterator[Change]:
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(self.function)):
            return
        for statement in _reached(self.function.body):
            if isinstance(statement, ast.Assert):
                yield from self.condition(statement.test)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                yield from self.call(statement.value)
            elif isinstance(statement, ast.With | ast.AsyncWith):
                for item in statement.items:
                    if isinstance(item.context_expr, ast.Call):
                        yield from self.exception(item.context_expr)

    def condition(self, test: ast.expr) -> Iterator[Change]:
        """Changes that make a true condition false."""
        if isinstance(test, ast.BoolOp):
            for value in test.values if isinstance(test.op, ast.And) else ():
                yield from self.condition(value)
        elif isinstance(test, ast.Compare):
            if len(test.ops) == 1:
                yield from self.comparison(test, test.left, test.ops[0], test.comparators[0])
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            begin, _ = self.file.span(test)
            if self.file.source[begin : begin + 4] == b"not ":
                yield self.made(INVERTED, test, [Edit(begin, begin + 4, b"")])
        elif isinstance(test, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Await):
            begin, _ = self.file.span(test)
            yield self.made(INVERTED, test, [Edit(begin, begin, b"not ")])

    def comparison(self, test: ast.expr, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Iterator[Change]:
        if isinstance(operator, ast.Eq):
            for side in (right, left):
                edit = self.other(side)
                if edit is not None:
                    yield self.made(VALUE, test, [edit])
                    break
                if isinstance(side, ast.Name):
                    yield from self.parameter(side)
                    yield from self.variable(side)
        for side in (right, left) if isinstance(operator, ast.Eq | ast.Is) else ():
            if (edit := self.opposite(side)) is not None:
                yield self.made(VALUE, test, [edit])
                return
        begin, end = self.file.span(test)  # not by the opposite operator: a class may define `==` without `!=`
        yield self.made(INVERTED, test, [Edit(begin, end, b"not (" + self.file.source[begin:end] + b")")])

    def call(self, call: ast.Call) -> Iterator[Change]:
        name = called(call)
        if name in _EQUAL | _NEAR and not (name in _NEAR and (call.keywords or len(call.args) > 2)):
            arguments = [*call.args[1:2], *call.args[:1]]  # a third is the message
            if name.startswith("assert_called"):
                arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            for argument in arguments:
                edit = self.other(argument, leading=name in _NEAR)
                if edit is not None:
                    yield self.made(VALUE, call, [edit])
                    break
        for argument in call.args[:2] if name in ("assertEqual", "assertIs") else ():
            if (edit := self.opposite(argument)) is not None:
                yield self.made(VALUE, call, [edit])
                return
        if name in _OPPOSITE and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            _, end = self.file.span(call.func)
            yield self.made(INVERTED, call, [Edit(end - len(name), end, _OPPOSITE[name].encode())])
        yield from self.exception(call)

    def exception(self, call: ast.Call) -> Iterator[Change]:
        """Another exception than the one that has to be raised."""
        if called(call) not in _RAISES or not call.args or not isinstance(call.args[0], ast.Name):
            return
        name = call.args[0].id
        known = getattr(builtins, name, None)
        others = []
        for other in _COMMON if name in _COMMON else _RARE:
            kind = getattr(builtins, other)
            related = isinstance(known, type) and (issubclass(known, kind) or issubclass(kind, known))
            if not related and other not in name:
                others.append(other)
        if others:
            edit = Edit(*self.file.span(call.args[0]), self.choose.choice(others).encode())
            yield self.made(VALUE if name in _COMMON else INVERTED, call, [edit])

    def opposite(self, node: ast.expr) -> Edit | None:
        """Replace `True` by `False`, or the other way."""
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return Edit(*self.file.span(node), str(not node.value).encode())
        return None

    def variable(self, name: ast.Name) -> Iterator[Change]:
        """Another literal in the variable `name`, which the test sets once, and uses for nothing else."""
        uses = [node for node in ast.walk(self.function) if isinstance(node, ast.Name) and node.id == name.id]
        for statement in _reached(self.function.body):
            if isinstance(statement, ast.Assign) and len(uses) == 2 and statement.targets[0] in uses:
                edit = self.other(statement.value) if len(statement.targets) == 1 else None
                if edit is not None:
                    yield self.made(VALUE, statement, [edit])

    def parameter(self, name: ast.Name) -> Iterator[Change]:
        """Other values of the parameter `name`, which the test uses for nothing else, and no fixture takes."""
        uses = [node for node in ast.walk(self.function) if isinstance(node, ast.Name) and node.id == name.id]
        marks = [mark for mark in self.function.decorator_list if isinstance(mark, ast.Call)]
        marks = [mark for mark in marks if called(mark) == "parametrize"]
        if len(uses) != 1 or len(marks) != 1 or len(marks[0].args) != 2 or not isinstance(marks[0].args[1], ast.List):
            return
        names = _names(marks[0].args[0])
        others = [mark for mark in self.function.decorator_list if mark is not marks[0]]
        options = {keyword.arg: keyword.value for keyword in marks[0].keywords}
        if name.id not in names or name.id in (fixtures := self.fixtures()).taken or fixtures.dynamic:
            return
        if not arguments_of(self.function) <= {*names, *BUILT_IN, *fixtures.known}:
            return  # one that comes from elsewhere may take it
        if not options.keys() <= {"ids", "scope"} or not all("mark." in ast.unparse(mark) for mark in others):
            return
        if not isinstance(options.get("ids", marks[0].args[1]), ast.List | ast.Tuple):
            return  # a function makes them from the values
        place, edits, renamed = names.index(name.id), [], {}
        keeps_ids = "ids" in options
        for number, row in enumerate(marks[0].args[1].elts):
            values = row.elts if isinstance(row, ast.Tuple | ast.List) and len(names) > 1 else [row]
            edit = self.other(values[place]) if len(values) == len(names) else None
            if edit is None:
                return
            edits.append(edit)
            if not keeps_ids:
                after = parse(edit_text(self.file, values[place], edit).strip(), mode="eval").body
                ids = [
                    _id(names, [*values[:place], value, *values[place + 1 :]], number)
                    for value in (values[place], after)
                ]
                if ids[0] is None or ids[1] is None:
                    return
                renamed[ids[0]] = ids[1]
        if not keeps_ids and len(set(renamed.values())) < len(edits):
            return
        full = {}
        for id in self.ids:
            base, _, rest = id.partition("[")
            if not keeps_ids and rest[:-1] not in renamed:
                return
            full[id] = id if keeps_ids else f"{base}[{renamed[rest[:-1]]}]"
        yield self.made(VALUE, marks[0], edits, full)

    def made(self, kind: str, node: ast.AST, edits: list[Edit], renamed: Mapping[str, str] | None = None) -> Change:
        edit = edits[0]
        begin, end = self.file.span(node)
        if edit.begin < begin or edit.end > end:
            begin, end = edit.begin, edit.end
        before = self.file.source[begin:end]
        after = self.file.source[begin : edit.begin] + edit.text + self.file.source[edit.end : end]
        shown = " -> ".join(text.decode(errors="replace") for text in (before, after))
        return Change(kind, tuple(edits), dict(renamed or {}), shown)

    def other(self, node: ast.expr, *, leading: bool = False) -> Edit | None:
        """Replace one value in a literal by another of its type, so that the two literals are not equal."""
        if isinstance(node, ast.Call) and called(node) == "approx" and len(node.args) == 1 and not node.keywords:
            return self.other(node.args[0], leading=True)
        leaves = list(_leaves(node))
        self.choose.shuffle(leaves)
        for leaf in leaves:
            text = self.file.text(leaf).decode()
            places = [at for at, letter in enumerate(text) if letter in _CHANGEABLE and text[at - 1] != "\\"]
            if leading:
                places = [at for at in places if text[at] in "123456789"][:1]
            places = [at for at in places if text[at] in string.digits] or places  # no dictionary knows numbers
            for _ in range(30 if places else 0):
                at = self.choose.choice(places)
                made = text[:at] + _similar(text[at], self.choose) + text[at + 1 :]
                if (not leading or made[at] != "0") and _differ(text, made, _TOLERANCE if leading else 0):
                    return Edit(*self.file.span(leaf), made.encode())
        return None


def found_test(files: MutableMapping[str, TestFile | bytes], id: str) -> tuple[TestFile, Found]:
    """The function of a test and the file that it is written in, which is another one if a class inherits it.

    Args:
        files: by path, files of tests, and others as bytes, of which those that are read become files of tests.
    """
    path, _, names = id.partition("[")[0].partition("::")
    file = files[path]
    assert isinstance(file, TestFile)
    kind, _, rest = names.partition("::")
    return _inherited(files, file, kind, rest.split("::"), set()) or (file, file.function(id))


def _inherited(
    files: MutableMapping[str, TestFile | bytes],
    file: TestFile,
    kind: str,
    names: Sequence[str],
    seen: set[tuple[str, str]],
) -> tuple[TestFile, Found] | None:
    """A test of the class `kind`, by the names below it: its own, or of a class that it inherits from."""
    if not names[0] or (file.path, kind) in seen:
        return None
    seen.add((file.path, kind))
    if (found := _method(file.tree, file.tree, [kind, *names])) is not None:
        return file, found
    for node in file.tree.body:
        for base in node.bases if isinstance(node, ast.ClassDef) and node.name == kind else ():
            for path, name in _defined(file, base):
                if path not in files:
                    continue
                source = files[path]
                try:
                    files[path] = origin = TestFile(path, source) if isinstance(source, bytes) else source
                except (SyntaxError, ValueError):  # it may be for another Python: the test ends with a failure then
                    continue
                if inherited := _inherited(files, origin, name, names, seen):
                    return inherited
    return None


def _defined(file: TestFile, base: ast.expr) -> Iterator[tuple[str, str]]:
    """Where a base class may be defined: paths, and its name there."""
    if isinstance(base, ast.Name):
        yield file.path, base.id
    module, _, name = ast.unparse(base).rpartition(".")
    for node in file.tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == (module or name):
                    parts = [node.module or "", alias.name if module else ""]
                    for path in _modules(file.path, node.level, ".".join(filter(None, parts))):
                        yield path, name if module else alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if module and (alias.asname or alias.name) == module:
                    for path in _modules(file.path, 0, alias.name):
                        yield path, name


def _modules(path: str, level: int, module: str) -> Iterator[str]:
    """The paths that a module may have that the file at `path` imports."""
    folder = posixpath.dirname(path)
    for _ in range(level - 1):
        folder = posixpath.dirname(folder)
    for root in (folder,) if level else ("", "src", folder):
        place = posixpath.join(root, *module.split(".")) if module else root
        yield from (f"{place}.py", posixpath.join(place, "__init__.py"))


def _with(text: bytes, edits: Iterable[Edit]) -> bytes:
    for edit in sorted(edits, key=lambda edit: -edit.begin):
        text = text[: edit.begin] + edit.text + text[edit.end :]
    return text


def edit_text(file: TestFile, node: ast.expr, edit: Edit) -> str:
    """The text of `node` after `edit`."""
    begin, end = file.span(node)
    return (file.source[begin : edit.begin] + edit.text + file.source[edit.end : end]).decode()


def _is_utf8(source: bytes) -> bool:
    try:
        source.decode()
    except UnicodeDecodeError:
        return False
    named = re.match(rb"(?:.*\n)?[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", source)
    return named is None or named[1].lower().replace(b"_", b"-") in (b"utf-8", b"utf8")


def _method(tree: ast.Module, scope: ast.Module | ast.ClassDef, names: Sequence[str]) -> Found:
    """The function of this name; the last one counts, and that of a class before those of the classes it names."""
    found: Found = None
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(names) == 1 and node.name == names[0]:
            found = node
        elif isinstance(node, ast.ClassDef) and len(names) > 1 and node.name == names[0]:
            found = _method(tree, node, names[1:])
    if found is None and isinstance(scope, ast.ClassDef):
        bases = [base.id for base in scope.bases if isinstance(base, ast.Name) and base.id != scope.name]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in bases and found is None and node is not scope:
                found = _method(tree, node, names)
    return found


def _reached(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that a test has carried out if it has passed."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.With | ast.AsyncWith):
            # What ends a block early, or passes over its failures, has such a name, or comes from elsewhere.
            names = [called(item.context_expr) for item in statement.items if isinstance(item.context_expr, ast.Call)]
            if len(names) == len(statement.items) and not any(map(_ENDS_EARLY.search, names)):
                yield from _reached(statement.body)
        if any(isinstance(node, ast.Return) for node in _own(statement)):
            return


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is in it, without the functions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own(child)


def _leaves(node: ast.expr) -> Iterator[ast.expr]:
    """The numbers and texts whose change makes a display another value."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        # One of two equal elements of a set is nothing: the other may be what it is changed to.
        same = isinstance(node, ast.Set) and len(set(map(ast.dump, node.elts))) < len(node.elts)
        for element in () if same else node.elts:
            yield from _leaves(element)
    elif isinstance(node, ast.Dict):
        for value in _live(node):
            yield from _leaves(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        yield from _leaves(node.operand)
    elif isinstance(node, ast.Call) and called(node) in _VALUES:
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from _leaves(argument)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, complex, str, bytes):
        yield node


def _live(node: ast.Dict) -> Iterable[ast.expr]:
    """The values that no later entry replaces, as far as the text tells: a key that is no literal may be any."""
    live: dict[object, ast.expr] = {}
    unknown = False
    for key, value in zip(node.keys, node.values, strict=True):
        if unknown or not isinstance(key, ast.Constant):
            live.clear()
        unknown = key is not None and not isinstance(key, ast.Constant)
        if key is not None:  # else `**value`
            live[key.value if isinstance(key, ast.Constant) else None] = value
    return live.values()


def _similar(letter: str, choose: random.Random) -> str:
    kinds = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
    kind = next(kind for kind in kinds if letter in kind)
    return choose.choice([other for other in kind if other != letter])


def _differ(text: str, made: str, tolerance: float) -> bool:
    """Whether both are literals of one type and not equal, by any measure that a test is likely to use."""
    try:
        before, after = ast.literal_eval(text), ast.literal_eval(made)
    except (ValueError, SyntaxError):
        return False
    if type(before) is not type(after) or before == after:
        return False
    if tolerance and not (isinstance(before, int | float | complex) and abs(before - after) > tolerance):
        return False
    return not isinstance(before, str) or before.lower().split() != after.lower().split()


def _names(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [name.strip() for name in node.value.split(",")]
    elements: Collection[ast.expr] = node.elts if isinstance(node, ast.Tuple | ast.List) else ()
    return [str(element.value) for element in elements if isinstance(element, ast.Constant)]


def _id(names: Sequence[str], values: Sequence[ast.expr], number: int) -> str | None:
    """pytest's id of a row of parameters, None where that is not known from the text."""
    parts = []
    for name, node in zip(names, values, strict=True):
        try:
            value = ast.literal_eval(node)
        except (ValueError, SyntaxError):
            return None
        if isinstance(value, str):
            if not value.isascii() or not value.isprintable() or not value or "[" in value:
                return None
            parts.append(value)
        else:
            parts.append(str(value) if isinstance(value, int | float | types.NoneType) else f"{name}{number}")
    return "-".join(parts)
