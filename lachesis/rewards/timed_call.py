"""One call of an environment's own code: within its time, in a scope, and whose failure it met."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from backends import BackendError
from backends.errors import SettingsError
from backends.tasks import cancel_requests, in_own_thread, name_if_it_goes_on
from lachesis.loop.clock import standstill
from lachesis.rewards.agent_fault import AgentFault, agent_faults
from lachesis.rewards.call_scope import CallScope
from lachesis.rewards.overtime import OutOfTime, Overtime
from lachesis.rewards.reward import RewardError
from lachesis.tool_context.pace import OwnTime, waited_for_cpu
from lachesis.tool_context.tool_context import ToolContext
from lachesis.tracebacks import explained

if TYPE_CHECKING:
    from lachesis.rewards.doubt import Doubt

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Scored(Generic[T_co]):
    """The outcome of a reward function: a value, or the reason why there is none."""

    value: T_co | None = None
    error: BaseException | None = None
    """The environment's."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """By the place of the context: what the agent did that kept the function from its value."""
    raised: bool = False
    """Whether the function, or the check of its value, raised the error."""
    doubt: Doubt | None = None
    """What tells whether the agent caused the error; None where it did not."""

    @property
    def traceback(self) -> str | None:
        return None if self.error is None else explained(self.error)

    @property
    def wrong_setting(self) -> SettingsError | None:
        """The error that the environment's code found in the settings of the run."""
        return self.error if isinstance(self.error, SettingsError) else None


@dataclass(slots=True)
class TimeLimit:
    """The time of one or more calls."""

    what: str
    setting: str
    seconds: float
    contexts: Sequence[ToolContext | None]
    agents: bool = True
    """Whether agents have been in these sandboxes."""
    ends: float = field(init=False)
    """On the clock of the event loop."""
    inside_before: Sequence[float] = field(init=False)
    stood: float = field(init=False)

    def __post_init__(self) -> None:
        standstill.watch()
        self.stood = standstill.seconds()
        self.ends = asyncio.get_running_loop().time() + self.seconds
        self.inside_before = [context.seconds_inside if context is not None else 0.0 for context in self.contexts]

    async def is_used_by(self, context: ToolContext) -> bool:
        """Whether commands slept, or had processors, for so long that no busy machine has made them late."""
        begun = self.inside_before[self.contexts.index(context)]
        took = OwnTime(context.seconds_inside - begun, await waited_for_cpu(context.shared.sessions))
        return took.is_enough(self.seconds)

    def used_up_by(self, kept_loop: float) -> dict[int, str]:
        """By the places of the contexts, whose commands used it up; empty where it was the reward's own work.

        What runs inside is the agent's code, which else could keep a reward from its end by sleeping.

        Args:
            kept_loop: seconds for which the reward itself kept the event loop. No call of it took these.
        """
        rest = asyncio.get_running_loop().time() - (self.ends - self.seconds) - kept_loop
        taken = {
            at: min(rest, context.seconds_inside - begun)
            for at, (context, begun) in enumerate(zip(self.contexts, self.inside_before, strict=True))
            if context is not None
        }
        if sum(taken.values()) < self.seconds / 2:
            return {}
        return {
            at: f"calls of the reward took {seconds:.1f} s inside, of reward_timeout = {self.seconds:g} s"
            for at, seconds in taken.items()
            if seconds >= self.seconds / (2 * len(taken))
        }


class RewardThreads:
    """Runs plain functions on daemon threads. At most `limit` calls are awaited at once.

    An executor of the standard library waits for its threads, at its own end and at the interpreter's: a reward that
    hangs would block the event loop that it itself waits for, and the end of the program.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, or its exception. When this is cancelled, the thread is left to itself."""

        def attempt() -> tuple[Any, BaseException | None]:
            try:
                return function(*args), None
            except BaseException as error:  # a future would change some: StopIteration, a TimeoutError's traceback
                return None, error

        context = contextvars.copy_context()
        async with self._free:
            value, error = await in_own_thread(lambda: context.run(attempt), name="reward")
        if error is not None:
            raise error
        return value


async def timed_call(call: Callable[[], Coroutine[Any, Any, T]], limit: TimeLimit, scope: CallScope) -> Scored[T]:
    """What `call` gives, or who kept it from that.

    Raises:
        BackendError: the infrastructure failed, even if the call caught that.
    """
    before, contexts = cancel_requests(), limit.contexts
    for context in contexts:
        if context is not None:
            context.enter(scope)
    # A task, since a TaskGroup in a reward may leave a request to cancel with the task that it runs in.
    running = asyncio.ensure_future(_attempt(call, scope))
    too_late = f"{limit.what} took longer than {limit.setting} = {limit.seconds:g} s"
    overtime = Overtime(scope.work, running, limit.ends, limit.seconds, too_late)
    late = name_if_it_goes_on(running, limit.what, limit.ends)
    try:
        with overtime.watched():
            async with asyncio.timeout_at(limit.ends) as time:
                given, error = await running
    except OutOfTime:  # it came when the code had just stopped
        given, error = None, None
    except TimeoutError:  # it ran out when the reward had ended, and nobody had taken its value
        given, error = running.result()
    finally:
        late.cancel()
    # A bare `except:` in a reward also catches the cancellation and the time limit: neither may become a score.
    if cancel_requests() > before:
        raise error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
    if isinstance(error, BackendError):
        raise error
    faults: dict[int, str] = {}
    slow = overtime.found
    raised = slow is not None or (error is not None and not time.expired())
    is_over = time.expired() and (error is None or isinstance(error, (TimeoutError, asyncio.CancelledError)))
    if slow is not None or is_over:
        if (stood := standstill.seconds() - limit.stood) > 0:
            stopped = f"the process of this run was stopped for {stood:.0f} s (a suspended job, a paused container)"
            raise BackendError(f"{too_late}: {stopped}")
        error = slow or RewardError(too_late)
        faults = limit.used_up_by(scope.work.kept_loop) if limit.agents else {}
        for at in faults:
            context = contexts[at]
            if context is None or await limit.is_used_by(context):
                continue
            found = await context.pace_without_agent()
            if found is not None:
                found.require_usable(str(error))
    elif error is not None:
        found_faults = agent_faults(error)
        faults = _at_fault(found_faults, contexts) if not any(each.of_image for each in found_faults) else {}
    if error is None or scope.stuck is not None:
        error = scope.problem()
        faults, raised = {}, False
    if error is None and scope.faults:
        faults = _at_fault(scope.faults, contexts)
    for failure in (scope.failure, *(context.failure for context in contexts if context is not None)):
        if failure is not None:
            raise failure
    if faults:
        return Scored(faults=faults)
    return Scored(error=error, raised=raised) if error is not None else Scored(given)


def _at_fault(faults: Sequence[AgentFault], contexts: Sequence[ToolContext | None]) -> dict[int, str]:
    """The faults by the places of their contexts. Empty where one belongs to none of these."""
    found: dict[int, str] = {}
    for fault in faults:
        places = [at for at, context in enumerate(contexts) if context is not None and context.at_fault(fault)]
        if not places:
            return {}
        found.setdefault(places[0], str(fault))
    return found


async def _attempt(
    call: Callable[[], Coroutine[Any, Any, T]], scope: CallScope
) -> tuple[T | None, BaseException | None]:
    """The value, or the error. (A task that ends with SystemExit would end the event loop.)"""
    try:
        with scope.entered():
            return await scope.wrapped(call()), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error
