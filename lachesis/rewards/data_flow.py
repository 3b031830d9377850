"""Whether an expression of a reward depends on the agent's work: on its `result`, on its sandbox, or on values derived
from them.

Read from the source of one function at a time, and on the safe side: in doubt, an expression does depend on it. One
that does not depends on the environment alone, so it would fail with any content.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Any

from lachesis.rewards.statements import Span

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FILLS = ("add", "append", "appendleft", "extend", "insert", "put", "put_nowait", "setdefault", "update", "write")
"""Methods that put something into what they belong to, wherever they are called."""


class DataFlow:
    """The variables of one function that depend on the agent's work, or on something else.

    Args:
        given: those of its parameters and of the variables around it that do.
        answers: further expressions that do; None for what the agent left, where what cannot be told does, too.
        item: the parameter that is the item, which stays what it is.
    """

    def __init__(
        self, function: Function, given: Collection[str], answers: Collection[Span] | None = None, item: str = ""
    ) -> None:
        self.function = function
        self.item = item
        self.names = set(given)
        """Variables, and attributes of `self` as `self.x`."""
        self._kept = ("self", item)
        self._filled: set[str] = set()
        """Of the names, those that were only given something of it."""
        self._answers = answers
        self._places: set[str] = set()
        """Local paths at which there is what the agent left."""
        nodes = [node for node in ast.walk(function) if node is not function]
        arguments = function.args
        self._own = {each.arg for each in _parameters(arguments)} | {
            node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in nodes if answers is None else ():
            if isinstance(node, Function):  # who calls it is not looked for
                self.names |= {each.arg for each in _parameters(node.args)}
            elif isinstance(node, ast.ExceptHandler) and node.name:
                self.names.add(node.name)
        before = -1
        while len(self.names) + len(self._places) > before:
            before = len(self.names) + len(self._places)
            for node in nodes:
                self._follow(node)

    @property
    def shared(self) -> set[str]:
        """Variables of the module."""
        return {name for name in self.names - self._own if "." not in name}

    def depends(self, node: ast.AST | None) -> bool:
        """Whether a part of the code does."""
        return node is not None and any(map(self._is_named, ast.walk(node)))

    def is_made(self, node: ast.AST) -> bool:
        """Whether a part of the code does otherwise than by what it was given later, as a database is."""
        names = self.names
        self.names = names - self._filled
        try:
            return self.depends(node)
        finally:
            self.names = names

    def is_reached_by_choice(self, node: ast.AST) -> bool:
        """Whether the agent's work decides whether the code gets there."""
        return any(self.depends(decider) for decider in self._deciders(node))

    def _is_named(self, node: ast.AST) -> bool:
        if self._answers and isinstance(node, ast.expr) and span_of(node) in self._answers:
            return True
        if self._places and isinstance(node, ast.expr) and ast.dump(node) in self._places:
            return True
        if isinstance(node, ast.Name):
            around = getattr(node, "parent", None)
            is_name_of_rollout = isinstance(around, ast.Attribute) and around.attr == "task_id"
            return node.id in self.names and not is_name_of_rollout
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            of_self = any(name.startswith("self.") for name in self.names)
            called = isinstance(getattr(node, "parent", None), ast.Call) and node.parent.func is node  # type: ignore[attr-defined]
            return f"self.{node.attr}" in self.names or (called and of_self)
        return False

    def _deciders(self, node: ast.AST) -> Iterator[ast.AST]:
        child, parent = node, getattr(node, "parent", None)
        while parent is not None and child is not self.function:
            if isinstance(parent, ast.If | ast.While | ast.IfExp) and child is not parent.test:
                yield parent.test
            elif isinstance(parent, ast.For | ast.AsyncFor) and child is not parent.iter:
                yield parent.iter
            elif isinstance(parent, ast.Match) and child is not parent.subject:
                yield parent.subject
            elif isinstance(parent, ast.Try | ast.TryStar) and child not in parent.body:
                yield from parent.body
            child, parent = parent, getattr(parent, "parent", None)

    def _follow(self, node: Any) -> None:
        match node:
            case ast.Assign(value=value, targets=targets):
                self._assign(targets, value, node)
            case ast.AnnAssign() | ast.NamedExpr() | ast.AugAssign():
                self._assign([node.target], node.value, node)
            case ast.For(iter=value, target=target) | ast.AsyncFor(iter=value, target=target):
                self._assign([target], value, node)
            case ast.comprehension(iter=value, target=target):
                self._assign([target], value, node)
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._assign([target], value, node)
            case ast.match_case(pattern=pattern) if self.depends(node.parent.subject):  # type: ignore[attr-defined]
                found = (getattr(each, "name", None) or getattr(each, "rest", None) for each in ast.walk(pattern))
                self.names |= {name for name in found if isinstance(name, str)}
            case ast.Call(func=ast.Attribute(value=base, attr=name)) if "download" in name and self.depends(base):
                # What is at these local paths then, the agent left.
                given = [*node.args, *(each.value for each in node.keywords)]
                self._add([each for argument in given for each in ast.walk(argument) if isinstance(each, ast.Name)])
                self._places |= {ast.dump(each) for each in given}
            case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
                # A call for its effect puts what it is given into the others: `lines.append(text)`, `fill(found, text)`
                self._fill(call)
            case ast.Call(func=ast.Attribute(attr=name)) if name in _FILLS:
                self._fill(node)

    def _fill(self, call: ast.Call) -> None:
        given = [*call.args, *(each.value for each in call.keywords)]
        if any(map(self.depends, given)):
            before = set(self.names)
            self._add([*([call.func.value] if isinstance(call.func, ast.Attribute) else []), *given])
            self._filled |= self.names - before

    def _assign(self, targets: list[Any], value: ast.AST | None, node: ast.AST) -> None:
        if self.depends(value) or (self._answers is None and self.is_reached_by_choice(node)):
            before, self.names = self.names, set()
            self._add(targets, of_module=True)
            self._filled -= self.names
            self.names |= before

    def _add(self, targets: list[Any], *, of_module: bool = False) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                self._add(target.elts, of_module=of_module)
                continue
            stored = isinstance(target, ast.Subscript | ast.Attribute)
            while isinstance(target, ast.Subscript | ast.Attribute | ast.Starred):
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                    self.names.add(f"self.{target.attr}")
                    break
                target = target.value
            is_own = isinstance(target, ast.Name) and (target.id in self._own or (of_module and stored))
            if is_own and target.id not in self._kept:
                self.names.add(target.id)


def parameters_given(flow: DataFlow, calls: list[ast.Call], function: Function) -> set[str]:
    """The parameters of `function` that depend on the agent's work if it is called in one of these ways in `flow`."""
    every = [each.arg for each in _parameters(function.args)]
    name = getattr(function, "name", None)
    named = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) == name]
    if len(named) != 1:  # through other code
        return set(every) if not calls or any(map(flow.depends, calls)) else set()
    (call,) = named
    given = [*call.args, *(each.value for each in call.keywords)]
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return set(every) if any(map(flow.depends, given)) else set()
    positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    found: set[str] = set()
    if positional[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute):
        positional = positional[1:]
        found |= {name for name in flow.names if name.startswith("self.")}
        if flow.depends(call.func.value):
            found.add("self")
    for at, argument in enumerate(call.args):
        if flow.depends(argument):
            rest = function.args.vararg.arg if function.args.vararg is not None else None
            given_to = positional[at] if at < len(positional) else rest
            found |= {given_to} if given_to is not None else set()
    for keyword in call.keywords:
        if flow.depends(keyword.value) and keyword.arg is not None:
            rest = function.args.kwarg.arg if function.args.kwarg is not None else keyword.arg
            found.add(keyword.arg if keyword.arg in every else rest)
    return found


def flows_of_reward(function: Function, answers: Collection[Span]) -> tuple[DataFlow, DataFlow, DataFlow]:
    """The flow of the agent's work, of the answers of services, and of the item."""
    left = flow_of_reward(function)
    return left, DataFlow(function, (), answers), DataFlow(function, {left.item} - {""}, ())


def flow_of_reward(function: Function) -> DataFlow:
    """The flow of the agent's work in a function `(item, result, ctx)`."""
    names = [each.arg for each in _parameters(function.args)]
    own = names[1:] if names[:1] in (["self"], ["cls"]) else names
    if function.args.vararg is not None or function.args.kwarg is not None or len(own) != 3:
        return DataFlow(function, set(names) - {"self", "cls"})
    return DataFlow(function, set(own[1:]), item=own[0])


def span_of(node: ast.expr) -> Span:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    others = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *others]
