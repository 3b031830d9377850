"""Whether an exception of a reward is the doing of the agent, by what the rewards of other rollouts came to.

A reward reads what the agent left, and an agent may leave anything. Where the statement that raised was passed by the
reward of another rollout, the agent is at fault, unless nothing of the agent's is in the expression that failed, or what
a service answered is. Where something else is in it besides, and only rollouts of other items passed it, the reward is
called with the item of one and what the agent of the other left: that tells the two apart. Where nobody has passed the
statement yet, nothing is decided: that all rollouts of an item, or of a run, fail alike shows nothing.
"""

from __future__ import annotations

import ast
import builtins
import errno
import inspect
import re
import ssl
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import Any

from lachesis.agent.agent_fault import AgentFault
from lachesis.agent.broken_items import item_of
from lachesis.agent.data_flow import DataFlow, Function, flow_of_reward, flows_of_reward, parameters_given
from lachesis.agent.reward import RewardError
from lachesis.agent.statements import SERVICES, Span, Statement, Watch, add_home, enclosing, is_own, source_of, spanned
from lachesis.tracebacks import explained, in_one_line

LIGHT = 0.005
"""Seconds of processor time in a call of a reward up to which all of them are watched."""
WATCHED_FIRST = 64
"""Calls of longer rewards that are watched, before only some are."""
WATCHED_LATER = 8
"""Then one of so many."""
_ITEMS = 4096
"""Latest items of which is known what their rollouts passed."""
_OPEN = 64
"""Doubts that ask for evidence at once."""
_OF_VALUE = (0, -1)
_FRAMES = 40
"""Of a call within a call: further ones repeat themselves."""

_NEVER = (ConnectionError, TimeoutError, ssl.SSLError, BrokenExecutor, KeyboardInterrupt, GeneratorExit)
_OF_CODE = (ImportError, NotImplementedError, NameError)
"""The author's, unless code that an agent left, or a library for its file, raises them."""
_OF_THE_MACHINE = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO, errno.EAGAIN, errno.EROFS),
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL),
)
_OTHERS = SERVICES | {"backends", "lachesis"}
"""Packages whose exceptions tell of others."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """An exception of a reward that the agent may have caused."""

    statement: Statement
    """That raised."""
    head: Statement | None
    """Where the statement only raises: that of the `if`, the loop or the `try` around it."""
    item: str
    rollout: str
    row: Any = field(repr=False, compare=False)
    """The item itself."""
    mixed: bool
    """Whether something besides what the agent left had a part in it: the item may be the cause."""
    direct: bool
    """Whether that is in the expression itself."""
    what: str
    """The error and the line, for a person."""
    trace: str
    of_item: bool | None = None
    """Whether the item, or what else is in the expression, is the cause; None where that was not found out."""

    @property
    def of_value(self) -> bool:
        return self.statement.end == _OF_VALUE

    @property
    def places(self) -> list[tuple[Statement, bool]]:
        """What another rollout would have to pass, and whether to the end."""
        return [(self.statement, False), *([(self.head, True)] if self.head is not None else [])]

    def raises_as(self, other: Doubt) -> bool:
        """Whether the same statement raised the same kind of exception."""
        kinds = {each.what if each.of_value else each.what.partition(":")[0] for each in (self, other)}
        return self.statement == other.statement and len(kinds) == 1

    @property
    def fault(self) -> str:
        """What the agent did, in one line."""
        return f"the reward failed on what the agent left, at a line that other rollouts passed: {self.what}"


@dataclass(slots=True)
class _Passed:
    """The rollouts that passed one statement."""

    rollouts: set[str] = field(default_factory=set)
    """The first two."""
    row: Any = None
    """The item of the last one."""


class Evidence:
    """What the rewards of one environment passed in a run."""

    def __init__(self, rewards: Mapping[str, Callable[..., Any] | None]) -> None:
        self._rewards = {name: inspect.unwrap(each) for name, each in rewards.items() if each is not None}
        self._names = {getattr(each, "__name__", name) for name, each in self._rewards.items()}
        for function in self._rewards.values():
            add_home(function)
        self._calls = 0
        self._passed: dict[tuple[Statement, bool], _Passed] = {}
        self._of_items: OrderedDict[str, dict[tuple[Statement, bool], set[str]]] = OrderedDict()
        self._wanted_until = WATCHED_FIRST
        self._are_light = True
        self._services: set[tuple[str, Span]] = set()
        self._open: OrderedDict[tuple[Statement, str], Doubt] = OrderedDict()
        self._causes: dict[tuple[Statement, str], bool] = {}
        """Whether an item is the cause of what is raised at a statement."""
        self.asked: set[Statement] = set()
        """Those that were looked at more closely already."""
        self.shown: set[str] = set()
        """Lines of which a first exception was printed."""

    def watch(self) -> Watch | None:
        """For the next call of a reward."""
        self._calls += 1
        wanted = self._are_light or self._calls <= self._wanted_until or not self._calls % WATCHED_LATER
        return Watch() if wanted else None

    def want(self, doubt: Doubt) -> None:
        """A doubt waits: the next calls are all watched."""
        self._wanted_until = self._calls + WATCHED_FIRST
        self._open[doubt.statement, item_of(doubt.item)] = doubt
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)

    def learn(
        self,
        watch: Watch | None,
        item: Any,
        item_key: str,
        rollout: str,
        source: str = "",
        doubt: Doubt | None = None,
    ) -> None:
        """What the call of a rollout's reward passed.

        Args:
            source: the reward that returned a score.
            doubt: about what it raised. A statement that was passed before it raised, in a loop, is not passed.
        """
        if watch is not None:
            self._services |= watch.asked
        if not rollout:
            return
        if watch is not None:
            self._are_light = watch.seconds <= LIGHT
        found = passed_by(watch, source)
        if doubt is not None:
            found -= {*doubt.places, (doubt.statement, True)}
        if not found:
            return
        of_item = self._of_items.setdefault(item_of(item_key), {})
        self._of_items.move_to_end(item_of(item_key))
        if len(self._of_items) > _ITEMS:
            self._of_items.popitem(last=False)
        for each in found:
            passed = self._passed.setdefault(each, _Passed())
            passed.row = item
            for rollouts in (passed.rollouts, of_item.setdefault(each, set())):
                if len(rollouts) < 2:
                    rollouts.add(rollout)

    def is_agents(self, doubt: Doubt) -> bool:
        """Whether the agent is at fault; False while nothing shows it."""
        if self._passed_for_item(doubt):
            return True
        if not any(map(partial(self._passed_by_others, doubt), doubt.places)):
            return False
        of_item = doubt.of_item
        if of_item is None:
            of_item = self._causes.get((doubt.statement, item_of(doubt.item)), True)
        return not (doubt.mixed and of_item)

    def _passed_for_item(self, doubt: Doubt) -> bool:
        of_item = self._of_items.get(item_of(doubt.item), {})
        return any(of_item.get(place, set()) - {doubt.rollout} for place in doubt.places)

    def _passed_by_others(self, doubt: Doubt, place: tuple[Statement, bool]) -> bool:
        passed = self._passed.get(place)
        return passed is not None and bool(passed.rollouts - {doubt.rollout})

    def item_to_try(self, doubt: Doubt | None) -> tuple[Any] | None:
        """An item with which the reward passed what it raises for this one, where that would tell whose fault it is."""
        if doubt is None or not doubt.mixed or self._passed_for_item(doubt):
            return None
        found = (place for place in doubt.places if self._passed_by_others(doubt, place))
        place = next(found, None)
        return None if place is None else (self._passed[place].row,)

    def doubts_to_try(self, passed: Collection[tuple[Statement, bool]], item_key: str) -> list[Doubt]:
        """Those that wait, of other items, of which what was passed now may tell."""
        return [
            doubt
            for (_, item), doubt in self._open.items()
            if doubt.mixed
            and item != item_of(item_key)
            and (doubt.statement, item) not in self._causes
            and any(place in passed for place in doubt.places)
        ]

    def found_out(self, doubt: Doubt, *, of_item: bool) -> None:
        self._causes[doubt.statement, item_of(doubt.item)] = of_item

    def doubt(
        self, error: BaseException, item: Any, item_key: str, rollout: str, source: str, watch: Watch | None
    ) -> Doubt | None:
        """None where the exception is none of the agent's doing, whatever others pass.

        Args:
            source: the environment and the reward, for one that returned something that is no score.
        """
        causes = list(_causes(error))
        if not causes or any(map(_is_of_others, causes)):
            return None
        error = causes[0]
        frames = [frame.f_code for frame, _ in _frames(error)]
        ours = isinstance(error, RewardError) and not is_own(frames[-1].co_filename)
        of_value = ours and not any(is_own(code.co_filename) for code in frames)
        if ours and not of_value and frames[-1].co_name != "terminal":
            return None  # the others tell of the environment's own mistakes
        if of_value:
            place = value_places(source, watch)[-1]
            found = _place_of_value(self._rewards.get(source.rpartition(": ")[2]), place)
        else:
            found = _place(error, self._names, self._services)
        if found is None:
            return None
        trace = explained(error)
        about = item_key, rollout, item, found.mixed or ours, found.direct or ours
        return Doubt(found.statement, found.head, *about, in_one_line(trace), trace)


def passed_by(watch: Watch | None, source: str) -> set[tuple[Statement, bool]]:
    """The places that a call passed: a statement, and whether it went on to its end."""
    found = {(each, False) for each in watch.passed} if watch is not None else set()
    found |= {(each, True) for each in watch.returned} if watch is not None else set()
    return found | ({(each, False) for each in value_places(source, watch)} if source else set())


def value_places(source: str, watch: Watch | None) -> list[Statement]:
    """They stand for the value that a reward returns: of all its values, and of those from the same statement."""
    at = watch.given_by if watch is not None else None
    given = [at._replace(end=_OF_VALUE)] if at is not None else []
    return [Statement(source, 0, 0, _OF_VALUE), *given]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _causes(each)
    elif isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration | StopAsyncIteration):
        yield error.__cause__  # which Python replaces where it leaves a coroutine
    else:
        yield error


def _is_of_others(error: BaseException | None) -> bool:
    """Whether a service, this machine, the installation or the author's code alone is what failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        package = type(error).__module__.partition(".")[0]
        ours = isinstance(error, RewardError | AgentFault)
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
    """Whether the author's code raised it, or lacks what it needs."""
    if isinstance(error, UnboundLocalError):
        return False
    frames = _frames(error)
    file = frames[-1][0].f_code.co_filename if frames else ""
    if isinstance(error, NotImplementedError):
        return is_own(file) and _last(error) is not None
    if isinstance(error, NameError):
        return _last(error) is not None or not file.startswith("<")
    return isinstance(_last(error), ast.Import | ast.ImportFrom) or not (is_own(file) or "/importlib/" in file)


def _last(error: BaseException) -> ast.AST | None:
    """Where the author's code itself raised it: the statement."""
    frames = _frames(error)
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


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    statement: Statement
    head: Statement | None
    mixed: bool
    direct: bool
    """As of `Doubt`."""


def _place_of_value(reward: Callable[..., Any] | None, place: Statement) -> _Place | None:
    """The same for a reward that returned what is no score. None where nothing of the agent's is in what it returns."""
    code = getattr(reward, "__code__", None)
    parsed = source_of(code.co_filename, getattr(reward, "__globals__", {})) if code is not None else None
    if code is None or parsed is None:
        return None
    for node in parsed.nodes:
        first = min((each.lineno for each in getattr(node, "decorator_list", ())), default=node.lineno)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name and first == code.co_firstlineno:
            flow = flow_of_reward(node)
            returned = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            if any(flow.depends(each.value) or flow.is_reached_by_choice(each) for each in returned):
                return _Place(place, None, mixed=True, direct=True)
    return None


_Flows = tuple[DataFlow, DataFlow, DataFlow]
"""Of what the agent left, of what services answered, and of the item."""


def _place(
    error: BaseException, rewards: Collection[str], services: Collection[tuple[str, Span]]
) -> _Place | None:
    """The statement that raised, in the innermost function of the environment. None where nothing of the agent's is in
    the expression, or what a service answered is, and where there is no source."""
    own = [(frame, at) for frame, at in _frames(error) if is_own(frame.f_code.co_filename) and _has_source(frame)]
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
            return _Place(place, Statement.of(place.file, around), direct or of_item.depends(decides), direct)
        failed = _failing(node, error, frame)
        depends = flow.is_made if _is_of_place(error) else flow.depends
        if answered.depends(failed) or not depends(failed):
            return None
        if isinstance(error, RecursionError | MemoryError):
            return _Place(place, None, mixed=False, direct=False)
        direct = _is_mixed(failed, flow, frame)
        return _Place(place, None, direct or of_item.depends(failed), direct)
    return None


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
        return receiver if _frames(error)[-1][0] is frame else node
    if _is_of_place(error):
        if receiver is not None and not (isinstance(receiver, ast.Name) and isinstance(_value(receiver, frame), ModuleType)):
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
