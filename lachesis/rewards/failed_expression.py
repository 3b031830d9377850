"""Where an exception of a reward comes from: the expression of the author's code that failed, and its dependencies."""

from __future__ import annotations

import ast
import builtins
import errno
import re
import ssl
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

from lachesis.ours import PACKAGES
from lachesis.rewards.agent_fault import AgentFault
from lachesis.rewards.data_flow import DataFlow, Function, flow_of_reward, flows_of_reward, parameters_given
from lachesis.rewards.overtime import RewardTooSlow
from lachesis.rewards.reward import RewardError
from lachesis.rewards.statements import COMPREHENSIONS, Span, Statement, enclosing, is_own, source_of, spanned
from lachesis.rewards.watching import SERVICES
from lachesis_client.server_words import is_refusal

_FRAMES = 40
"""Of a call within a call: further ones repeat themselves."""

_OF_LOOP = (0, -2)
"""Stands for a loop as a whole. No part of a statement ends there."""
_NEVER = (ConnectionError, TimeoutError, ssl.SSLError, BrokenExecutor, KeyboardInterrupt, GeneratorExit)
_OF_CODE = (ImportError, NotImplementedError, NameError)
"""The author's, unless code that an agent left, or a library for its file, raises them."""
_OF_THE_MACHINE = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO, errno.EAGAIN, errno.EROFS),
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL),
)
_OTHERS = SERVICES | {*PACKAGES}
"""Packages whose exceptions tell of others."""


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from causes_of(each)
    elif isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration | StopAsyncIteration):
        yield error.__cause__  # which Python replaces where it leaves a coroutine
    else:
        yield error


def is_of_others(error: BaseException | None) -> bool:
    """Whether a service, this machine, the installation or the author's code alone is what failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        package = type(error).__module__.partition(".")[0]
        ours = isinstance(error, RewardError | AgentFault)
        if is_refusal(error):  # by an author's own client, of what the agent wrote or of something else
            return False
        if isinstance(error, _NEVER) and not isinstance(error, UnicodeError):
            return True
        if isinstance(error, _OF_CODE) and _is_of_code(error):
            return True
        if package in _OTHERS and not ours:
            return True
        if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE and not ours:
            return True
        error = error.__cause__ or (error.__context__ if isinstance(_last(error), ast.Raise) else None)
    return False


def _is_of_code(error: BaseException) -> bool:
    """Whether the author's code raised it, or lacks a requirement."""
    if isinstance(error, UnboundLocalError):
        return False
    frames = frames_of(error)
    file = frames[-1][0].f_code.co_filename if frames else ""
    if isinstance(error, NotImplementedError):
        return is_own(file) and _last(error) is not None
    if isinstance(error, NameError):
        return _last(error) is not None or not file.startswith("<")
    return isinstance(_last(error), ast.Import | ast.ImportFrom) or not (is_own(file) or "/importlib/" in file)


def _last(error: BaseException) -> ast.AST | None:
    """Where the author's code itself raised it: the statement."""
    frames = frames_of(error)
    if not frames or not is_own(frames[-1][0].f_code.co_filename):
        return None
    frame, at = frames[-1]
    source = source_of(frame.f_code.co_filename, frame.f_globals)
    node: Any = source.at(_span(frame, at)) if source is not None else None
    while node is not None and not isinstance(node, ast.stmt):
        node = getattr(node, "parent", None)
    return node


def _span(frame: FrameType, at: int) -> Span:
    return spanned(*list(frame.f_code.co_positions())[at // 2])


def frames_of(error: BaseException) -> list[tuple[FrameType, int]]:
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    return found


@dataclass(frozen=True, slots=True)
class ExpressionPlace:
    statement: Statement
    head: Statement | None
    mixed: bool
    direct: bool
    """As of `Doubt`."""


def place_of_value(reward: Callable[..., Any] | None, place: Statement) -> ExpressionPlace | None:
    """The same for a reward that returned something other than a score. None if none of its value is the agent's."""
    code = getattr(reward, "__code__", None)
    parsed = source_of(code.co_filename, getattr(reward, "__globals__", {})) if code is not None else None
    if code is None or parsed is None:
        return None
    for node in parsed.nodes:
        first = min((each.lineno for each in getattr(node, "decorator_list", ())), default=node.lineno)
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == code.co_name
            and first == code.co_firstlineno
        ):
            flow = flow_of_reward(node)
            returned = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            if any(flow.depends(each.value) or flow.is_reached_by_choice(each) for each in returned):
                return ExpressionPlace(place, None, mixed=True, direct=True)
    return None


_Flows = tuple[DataFlow, DataFlow, DataFlow]
"""Of what the agent left, of what services answered, and of the item."""


def place_of(
    error: BaseException, rewards: Collection[str], services: Collection[tuple[str, Span]]
) -> ExpressionPlace | None:
    """The statement that raised, in the innermost function of the environment. None where nothing of the agent's is in
    the expression, or what a service answered is, and where there is no source."""
    own = [(frame, at) for frame, at in frames_of(error) if is_own(frame.f_code.co_filename) and _has_source(frame)]
    codes = [frame.f_code for frame, _ in own]
    if isinstance(error, RecursionError):  # where it comes to its end is chance
        again = (at for at, code in enumerate(codes) if code in codes[at + 1 :])
        own = own[: next(again, len(own)) + 1]
    elif len(own) > _FRAMES:
        own = [*own[: _FRAMES - 1], own[-1]]
    flows: dict[Function, _Flows] = {}
    last: _Flows | None = None
    calls: list[ast.Call] = []
    found: list[tuple[Any, Statement, ast.AST, FrameType, _Flows]] = []
    for frame, at in own:
        code = frame.f_code
        source = source_of(code.co_filename, frame.f_globals)
        span = _span(frame, at)
        part = source.at(span) if source is not None and span[0] else None
        function = _function(part)
        if part is None or function is None:
            return None
        answers = {each for file, each in services if file == code.co_filename}
        if function in flows:
            last = flows[function]
        elif last is None or getattr(function, "name", None) in rewards:
            last = flows_of_reward(function, answers)
        else:
            outer = flows.get(_function(getattr(function, "parent", None)))  # type: ignore[arg-type]
            given = [parameters_given(each, calls, function) | each.shared for each in last]
            if outer is not None:
                given = [one | each.names for one, each in zip(given, outer, strict=True)]
            last = DataFlow(function, given[0]), DataFlow(function, given[1], answers), DataFlow(function, given[2], ())
        flows[function] = last
        node = _expression(part, span)
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        found.append((part, Statement.of(code.co_filename, part), node, frame, last))
    if isinstance(error, RewardTooSlow):
        for part, _, _, frame, (flow, answered, of_item) in found:
            loop = next(reversed([each for each in (part, *enclosing(part)) if _goes_by(each, flow)]), None)
            if loop is not None and not answered.depends(_decider(loop)):
                return _place_of_loop(loop, frame, flow, of_item)
        # A comprehension may be anywhere in what it makes: the code around it stands where it stood.
        while len(found) > 1 and found[-1][3].f_code.co_name in COMPREHENSIONS:
            found.pop()
    raises = False
    while found:
        part, place, node, frame, (flow, answered, of_item) = found.pop()
        raises = raises or isinstance(part, ast.Raise) or _always_fails(part) or isinstance(error, SystemExit)
        around = _head(part) if raises else None
        if raises and around is None and found:
            continue  # it does nothing else: the call of it is what others pass
        if around is not None:
            decides = _decider(around)
            if answered.depends(part) or answered.is_reached_by_choice(part) or answered.depends(decides):
                return None
            if not (flow.depends(part) or flow.is_reached_by_choice(part) or flow.depends(decides)):
                return None
            direct = decides is not None and _is_mixed(decides, flow, frame)
            return ExpressionPlace(place, Statement.of(place.file, around), direct or of_item.depends(decides), direct)
        failed = _failing(node, error, frame)
        depends = flow.is_made if _is_of_place(error) else flow.depends
        # A service that refuses what the agent wrote answered it; what else it says is about itself.
        if (answered.depends(failed) and not is_refusal(error)) or not depends(failed):
            return None
        if isinstance(error, RecursionError | MemoryError):
            return ExpressionPlace(place, None, mixed=False, direct=False)
        direct = _is_mixed(failed, flow, frame)
        return ExpressionPlace(place, None, direct or of_item.depends(failed), direct)
    return None


def _goes_by(node: ast.AST, flow: DataFlow) -> bool:
    """Whether it is a loop whose number of rounds depends on the agent's work."""
    return isinstance(node, ast.For | ast.AsyncFor | ast.While) and flow.depends(_decider(node))


def _place_of_loop(loop: Any, frame: FrameType, flow: DataFlow, of_item: DataFlow) -> ExpressionPlace:
    """It is passed by a call that came to its end: in which line of the loop the time was over is chance."""
    head = Statement.of(frame.f_code.co_filename, loop)
    direct = _is_mixed(_decider(loop), flow, frame)  # type: ignore[arg-type]
    return ExpressionPlace(head._replace(end=_OF_LOOP), head, direct or of_item.depends(loop), direct)


def _has_source(frame: FrameType) -> bool:
    """Generated code has none: the `__init__` of a dataclass, and what `exec` runs."""
    source = source_of(frame.f_code.co_filename, frame.f_globals)
    return source is not None and bool(source.nodes)


def _function(node: Any) -> Function | None:
    """The function around a part of the code."""
    while node is not None and not isinstance(node, Function):
        node = getattr(node, "parent", None)
    return node


def _expression(part: ast.AST, span: Span) -> ast.AST:
    """The smallest part that has these places; the whole where none has."""
    best = part
    for node in ast.walk(part):
        if not isinstance(node, ast.expr) or node.end_lineno is None or node.end_col_offset is None:
            continue
        if (node.lineno, node.col_offset) <= span[:2] and span[2:] <= (node.end_lineno, node.end_col_offset):
            best = node  # a walk comes to the parts after the whole
    return best


def _always_fails(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant)


_HEADS = ast.If | ast.While | ast.For | ast.AsyncFor | ast.Try | ast.TryStar | ast.Match


def _head(statement: ast.AST) -> Any:
    """What decides whether a statement is reached: around it, or before it with a `return` inside."""
    for node in (statement, *enclosing(statement)):
        if isinstance(node, _HEADS) and node is not statement:
            return node
        around: Any = getattr(node, "parent", None)
        for body in (getattr(around, name, None) for name in ("body", "orelse")):
            before = body[: body.index(node)] if isinstance(body, list) and node in body else []
            for each in reversed(before):
                if isinstance(each, _HEADS) and any(isinstance(inner, ast.Return) for inner in ast.walk(each)):
                    return each
    return None


def _decider(head: Any) -> ast.AST | None:
    for name in ("test", "iter", "subject"):
        if hasattr(head, name):
            return getattr(head, name)  # type: ignore[no-any-return]
    return None


def _failing(node: ast.AST, error: BaseException, frame: FrameType) -> ast.AST:
    """The part of an expression that an error of this kind is about."""
    if isinstance(error, ZeroDivisionError) and isinstance(node, ast.BinOp | ast.AugAssign):
        return node.right if isinstance(node, ast.BinOp) else node.value
    if isinstance(error, re.error) and isinstance(node, ast.Call) and node.args:
        return node.args[0]
    if isinstance(error, AttributeError) and isinstance(node, ast.Attribute):
        return node.value
    if not isinstance(node, ast.Call):
        return node
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
    if isinstance(error, AttributeError) and receiver is not None and error.name == node.func.attr:  # type: ignore[attr-defined]
        return receiver if frames_of(error)[-1][0] is frame else node
    if _is_of_place(error):
        if receiver is not None and not (
            isinstance(receiver, ast.Name) and isinstance(_value(receiver, frame), ModuleType)
        ):
            return receiver
        return node.args[0] if node.args else node
    return node


def _is_of_place(error: BaseException) -> bool:
    """Whether it is about a local file or database, not about what is written there."""
    local = isinstance(error, OSError) and not isinstance(error, AgentFault) and error.filename is not None
    return local or type(error).__module__ == "sqlite3"


def _value(name: ast.Name, frame: FrameType) -> Any:
    return frame.f_locals.get(name.id, frame.f_globals.get(name.id))


def _is_mixed(node: ast.AST, flow: DataFlow, frame: FrameType) -> bool:
    """Whether a variable that the agent has no part in is in it, or a function of the author's."""
    for each in ast.walk(node):
        if not isinstance(each, ast.Name) or each.id in flow.names or hasattr(builtins, each.id):
            continue
        value = _value(each, frame)
        if isinstance(value, FunctionType) and not is_own(value.__code__.co_filename):
            continue
        if not isinstance(value, ModuleType | type):
            return True
    return False
