"""Whether an exception of a reward is the doing of the agent, by what the rewards of other rollouts came to.

A reward reads what the agent left, and an agent may leave anything. Where the statement that raised was passed by the
reward of another rollout, the agent is at fault, unless nothing of the agent's is in the expression that failed. Where
nobody has passed it yet, nothing is decided: that all rollouts of an item, or of a run, fail alike shows nothing.
"""

from __future__ import annotations

import ast
import builtins
import errno
import hashlib
import inspect
import math
import re
import ssl
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from lachesis.agent.broken_items import item_of
from lachesis.agent.data_flow import DataFlow, Function, flow_of_reward, parameters_given
from lachesis.agent.reward import JudgeRefused, RewardError
from lachesis.agent.statements import Statement, Watch, add_home, is_own, source_of
from lachesis.inference.server_words import is_refusal
from lachesis.tracebacks import explained, in_one_line

LIGHT = 0.005
"""Seconds of processor time in a call of a reward up to which all of them are watched."""
WATCHED_FIRST = 64
"""Calls of longer rewards that are watched, before only some are."""
WATCHED_LATER = 8
"""Then one of so many."""
_ITEMS = 4096
"""Latest items of which is known what their rollouts passed."""
_SHAPES = 256
_FRAMES = 40
"""Of a call within a call: further ones repeat themselves."""

_NEVER = (
    *(ConnectionError, TimeoutError, ssl.SSLError, ImportError, NotImplementedError),
    *(KeyboardInterrupt, GeneratorExit),
)
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO, errno.EAGAIN)
_OF_SERVICES = (
    *("aiohttp", "anthropic", "asyncssh", "backends", "botocore", "grpc", "httpcore", "httpx", "lachesis", "openai"),
    *("requests", "socket", "urllib", "urllib3", "websockets"),
)
"""Packages whose exceptions tell of a service that the reward asks."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """An exception of a reward that the agent may have caused."""

    statement: Statement
    """That raised."""
    head: Statement | None
    """Where the statement only raises: that of the `if`, the loop or the `try` around it."""
    item: str
    rollout: str
    strange: frozenset[str]
    """What the item would have to be like, where its kind of content may be the cause; empty where it may not."""
    what: str
    """The error and the line, for a person."""
    trace: str

    def raises_as(self, other: Doubt) -> bool:
        """Whether the same statement raised the same kind of exception."""
        of_value = not self.statement.line
        kinds = {each.what if of_value else each.what.partition(":")[0] for each in (self, other)}
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
    shapes: set[str] = field(default_factory=set)
    """Of their items."""


class Evidence:
    """What the rewards of one environment passed in a run."""

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        self._rewards = {each.__name__: each for each in map(inspect.unwrap, filter(None, functions))}
        for function in self._rewards.values():
            add_home(function)
        self._calls = 0
        self._passed: dict[tuple[Statement, bool], _Passed] = {}
        self._of_items: OrderedDict[str, dict[tuple[Statement, bool], set[str]]] = OrderedDict()
        self._wanted_until = WATCHED_FIRST
        self._are_light = True
        self.asked: set[Statement] = set()
        """Those that were looked at more closely already."""
        self.shown: set[str] = set()
        """Lines of which a first exception was printed."""

    def watch(self) -> Watch | None:
        """For the next call of a reward."""
        self._calls += 1
        wanted = self._are_light or self._calls <= self._wanted_until or not self._calls % WATCHED_LATER
        return Watch() if wanted else None

    def want(self) -> None:
        """A doubt waits: the next calls are all watched."""
        self._wanted_until = self._calls + WATCHED_FIRST

    def learn(self, watch: Watch | None, item: Any, item_key: str, rollout: str, source: str = "") -> None:
        """What the call of a rollout's reward passed. `source`: the reward that returned a score."""
        if not rollout:
            return
        if watch is not None:
            self._are_light = watch.seconds <= LIGHT
        found = {(each, False) for each in watch.passed} if watch is not None else set()
        found |= {(each, True) for each in watch.returned} if watch is not None else set()
        if source:
            found.add((_value_of(source), False))
        if not found:
            return
        shape = _shape(item)
        of_item = self._of_items.setdefault(item_of(item_key), {})
        self._of_items.move_to_end(item_of(item_key))
        if len(self._of_items) > _ITEMS:
            self._of_items.popitem(last=False)
        for each in found:
            passed = self._passed.setdefault(each, _Passed())
            for rollouts in (passed.rollouts, of_item.setdefault(each, set())):
                if len(rollouts) < 2:
                    rollouts.add(rollout)
            if len(passed.shapes) < _SHAPES:
                passed.shapes.add(shape)

    def is_agents(self, doubt: Doubt) -> bool:
        """Whether the agent is at fault; False while nothing shows it."""
        places = [(doubt.statement, False), *([(doubt.head, True)] if doubt.head is not None else [])]
        of_item = self._of_items.get(item_of(doubt.item), {})
        for place in places:
            if of_item.get(place, set()) - {doubt.rollout}:
                return True
            passed = self._passed.get(place)
            if passed is not None and passed.rollouts - {doubt.rollout}:
                return not doubt.strange or bool(doubt.strange & passed.shapes)
        return False

    def doubt(self, error: BaseException, item: Any, item_key: str, rollout: str, source: str) -> Doubt | None:
        """None where the exception is none of the agent's doing, whatever others pass.

        Args:
            source: the environment and the reward, for one that returned something that is no score.
        """
        causes = list(_causes(error))
        if not causes or any(map(_is_of_others, causes)):
            return None
        error = causes[0]
        frames = [frame.f_code for frame, _ in _frames(error)]
        of_value = isinstance(error, RewardError) and not any(is_own(code.co_filename) for code in frames)
        if of_value:
            found = _place_of_value(self._rewards.get(source.rpartition(": ")[2]), source)
        else:
            found = _place(error, self._rewards.keys())
        if found is None:
            return None
        strange = frozenset[str]()
        of_ours = isinstance(error, RewardError) and not isinstance(error, JudgeRefused)
        if of_ours and not of_value and not is_own(frames[-1].co_filename):
            if frames[-1].co_name != "terminal":  # the others tell of the environment's own mistakes
                return None
            strange = frozenset(["that of the same item"])
        elif found.mixed and isinstance(error, TypeError | AttributeError | RewardError):
            strange = frozenset([_shape(item)])
        trace = explained(error)
        return Doubt(found.statement, found.head, item_key, rollout, strange, in_one_line(trace), trace)


def _value_of(source: str) -> Statement:
    """Stands for the value that a reward returns."""
    return Statement(source, 0, 0)


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
    """Whether a service, this machine or the installation is what failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        package = type(error).__module__.partition(".")[0]
        if is_refusal(error):  # by an author's own client, of what the agent wrote or of something else
            return False
        if isinstance(error, _NEVER) and not isinstance(error, UnicodeError):
            return True
        if type(error) is NameError or (package in _OF_SERVICES and not isinstance(error, RewardError)):
            return True
        if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
            return True
        error = error.__cause__
    return False


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
    """Whether something besides what the agent left is in the expression."""


def _place_of_value(reward: Callable[..., Any] | None, source: str) -> _Place | None:
    """The same for a reward that returned what is no score. None where nothing of the agent's is in what it returns."""
    code = getattr(reward, "__code__", None)
    parsed = source_of(code.co_filename, getattr(reward, "__globals__", {})) if code is not None else None
    if code is None or parsed is None:
        return None
    for node in parsed.nodes:
        first = min((each.lineno for each in getattr(node, "decorator_list", ())), default=node.lineno)
        if isinstance(node, Function) and node.name == code.co_name and first == code.co_firstlineno:
            flow = flow_of_reward(node)
            returned = [each for each in ast.walk(node) if isinstance(each, ast.Return)]
            if any(flow.depends(each.value) or flow.is_reached_by_choice(each) for each in returned):
                return _Place(_value_of(source), None, mixed=True)
    return None


def _place(error: BaseException, rewards: Collection[str]) -> _Place | None:
    """The statement that raised, in the innermost function of the environment. None where nothing of the agent's is in
    the expression, and where there is no source."""
    own = [(frame, at) for frame, at in _frames(error) if is_own(frame.f_code.co_filename) and _has_source(frame)]
    if len(own) > _FRAMES:
        own = [*own[: _FRAMES - 1], own[-1]]
    flow: DataFlow | None = None
    flows: dict[Function, DataFlow] = {}
    calls: list[ast.Call] = []
    found: list[tuple[ast.stmt, Statement, ast.AST, DataFlow]] = []
    for frame, at in own:
        code = frame.f_code
        source = source_of(code.co_filename, frame.f_globals)
        line, end_line, column, end_column = list(code.co_positions())[at // 2]
        if source is None or line is None or column is None:
            return None
        statement = source.at(line, column)
        function = _function(statement)
        if statement is None or function is None:
            return None
        if flow is None or function.name in rewards:
            flow = flow_of_reward(function)
        elif function in flows:
            flow = flows[function]
        else:
            outer = flows.get(_function(getattr(function, "parent", None)))  # type: ignore[arg-type]
            shared = outer.names if outer is not None else set()
            flow = DataFlow(function, parameters_given(flow, calls, function) | shared)
        flows[function] = flow
        node = _expression(statement, (line, column), (end_line or line, end_column or column))
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        place = Statement(code.co_filename, statement.lineno, statement.col_offset)
        found.append((statement, place, node, flow))
    head = None
    raises = False
    while found:
        statement, place, node, flow = found.pop()
        raises = raises or isinstance(statement, ast.Raise) or _always_fails(statement)
        around = _head(statement) if raises else None
        if raises and around is None and found:
            continue  # it does nothing else: the call of it is what others pass
        if around is not None:
            head = Statement(place.file, around.lineno, around.col_offset)
            if not (flow.depends(statement) or flow.is_reached_by_choice(statement)):
                return None
            return _Place(place, head, mixed=False)
        failed = _failing(node, error)
        if not flow.depends(failed):
            return None
        return _Place(place, None, mixed=_is_mixed(failed, flow))
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


def _expression(statement: ast.stmt, start: tuple[int, int], end: tuple[int, int]) -> ast.AST:
    """The smallest part of the statement that has these places; the statement where none has."""
    best: ast.AST = statement
    for node in ast.walk(statement):
        if not isinstance(node, ast.expr) or node.end_lineno is None or node.end_col_offset is None:
            continue
        if (node.lineno, node.col_offset) <= start and end <= (node.end_lineno, node.end_col_offset):
            best = node  # a walk comes to the parts after the whole
    return best


def _always_fails(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant)


def _head(statement: ast.stmt) -> ast.stmt | None:
    node: Any = getattr(statement, "parent", None)
    while node is not None and not isinstance(node, Function):
        if isinstance(node, ast.If | ast.While | ast.For | ast.AsyncFor | ast.Try | ast.TryStar | ast.Match):
            return node
        node = getattr(node, "parent", None)
    return None


def _failing(node: ast.AST, error: BaseException) -> ast.AST:
    """The part of an expression that an error of this kind is about."""
    if isinstance(error, ZeroDivisionError) and isinstance(node, ast.BinOp | ast.AugAssign):
        return node.right if isinstance(node, ast.BinOp) else node.value
    if isinstance(error, re.error) and isinstance(node, ast.Call) and node.args:
        return node.args[0]
    if isinstance(error, AttributeError) and isinstance(node, ast.Attribute):
        return node.value
    if isinstance(error, AttributeError) and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if not _frames(error)[-1][0].f_code.co_name.startswith("__") else node
    return node


def _is_mixed(node: ast.AST, flow: DataFlow) -> bool:
    """Whether a variable that the agent has no part in is in it."""
    own = (each for each in ast.walk(node) if isinstance(each, ast.Name) and not hasattr(builtins, each.id))
    return any(each.id not in flow.names for each in own)


def _shape(value: Any) -> str:
    """What kinds of values are where in an item: two of the same shape differ in texts and numbers only."""
    return hashlib.blake2b(repr(_kinds(value, 0)).encode(errors="replace"), digest_size=8).hexdigest()


def _kinds(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, str | bytes):
        return type(value).__name__ if value is None or value else "empty"
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    if isinstance(value, int | float):
        return "number"
    if depth > 5:
        return "deep"
    if isinstance(value, Mapping):
        return sorted((str(key), repr(_kinds(each, depth + 1))) for key, each in list(value.items())[:64])
    if isinstance(value, list | tuple | set):
        return "list", sorted({repr(_kinds(each, depth + 1)) for each in list(value)[:64]})
    return type(value).__qualname__, _kinds(getattr(value, "__dict__", {}), depth + 1)
