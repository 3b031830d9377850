"""An exception of a reward that the agent may have caused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from lachesis.rewards.failed_expression import causes_of, frames_of, is_of_others, place_of, place_of_value
from lachesis.rewards.reward import JudgeRefused, RewardError
from lachesis.rewards.statements import Span, Statement, is_own
from lachesis.rewards.watching import OF_VALUE, Watch, value_places
from lachesis.tracebacks import explained, in_one_line


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
    """Whether something other than the agent's work is involved: the item may be the cause."""
    direct: bool
    """Whether that is in the expression itself."""
    what: str
    """The error and the line, for a person."""
    trace: str
    of_item: bool | None = None
    """Whether the item, or what else is in the expression, is the cause; None where that was not found out."""

    @property
    def of_value(self) -> bool:
        return self.statement.end == OF_VALUE

    @property
    def places(self) -> list[tuple[Statement, bool]]:
        """The statement that another rollout would have to pass, and whether to the end."""
        return [(self.statement, False), *([(self.head, True)] if self.head is not None else [])]

    def raises_as(self, other: Doubt) -> bool:
        """Whether the same statement raised the same kind of exception."""
        return self.kind == other.kind

    @property
    def kind(self) -> tuple[Statement, str]:
        return self.statement, self.what if self.of_value else self.what.partition(":")[0]

    @property
    def fault(self) -> str:
        """The agent's fault in one line."""
        return f"the reward failed on this agent's work, at a line that other rollouts passed: {self.what}"


def doubt_of(
    error: BaseException,
    about: tuple[str, str, Any],
    source: str,
    watch: Watch | None,
    reward: Callable[..., Any] | None,
    names: Collection[str],
    services: Collection[tuple[str, Span]],
) -> Doubt | None:
    """None where the exception is none of the agent's doing, whatever others pass.

    Args:
        about: the key of the item, the id of the rollout, and the item.
        source: the environment and the reward, for one that returned something that is not a score.
        names: of all rewards.
        services: the expressions in which a service was asked, by file.
    """
    causes = list(causes_of(error))
    if not causes or any(map(is_of_others, causes)):
        return None
    error = causes[0]
    frames = [frame.f_code for frame, _ in frames_of(error)]
    ours = isinstance(error, RewardError) and not isinstance(error, JudgeRefused)
    ours = ours and not is_own(frames[-1].co_filename)
    of_value = ours and not any(is_own(code.co_filename) for code in frames)
    if ours and not of_value and frames[-1].co_name != "terminal":
        return None  # the others tell of the environment's own mistakes
    if of_value:
        place = value_places(source, watch)[-1]
        found = place_of_value(reward, place)
    else:
        found = place_of(error, names, services)
    if found is None:
        return None
    trace = explained(error)
    involved = found.mixed or ours, found.direct or ours
    return Doubt(found.statement, found.head, *about, *involved, in_one_line(trace), trace)
