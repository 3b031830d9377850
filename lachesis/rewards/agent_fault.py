"""The error of a reward's call that failed because of what the agent did to its own sandbox."""

from __future__ import annotations

import errno
import os
from typing import Any, Self


class AgentFault(OSError):
    """The agent broke the place that a method of a `ToolContext` works on: a score, and no failure of anybody else.

    A reward may catch it. Where it does not, the rollout gets `score_of_agent_fault`. It is also the builtin exception
    of its errno: a `FileNotFoundError` for ENOENT, an `IsADirectoryError` for EISDIR and so on.
    """

    method = ""
    """The method that met it."""
    of_image = False
    """A file is missing where agents leave none: the image may lack it."""
    place: object = None
    """Identifies the rollout whose sandbox it is."""

    def __new__(cls, *args: Any) -> Self:
        if cls is AgentFault and len(args) > 1:
            return super().__new__(_kinds.get(args[0], cls), *args)  # type: ignore[return-value]
        return super().__new__(cls, *args)

    def __reduce__(self) -> Any:
        return AgentFault, super().__reduce__()[1]

    def __str__(self) -> str:
        return f"{self.method}: {super().__str__()}" if self.method else super().__str__()

    @classmethod
    def of(cls, error: OSError) -> AgentFault:
        """The same error as the agent's doing."""
        number = error.errno or errno.EIO
        return cls(number, error.strerror or str(error) or os.strerror(number), error.filename)


def _both(builtin: type[Exception]) -> type[AgentFault]:
    names = {"__module__": __name__, "__doc__": AgentFault.__doc__, "__qualname__": "AgentFault"}
    return type("AgentFault", (AgentFault, builtin), names)


_kinds: dict[int, type[AgentFault]] = {}
for _number in errno.errorcode:
    if (_builtin := type(OSError(_number, ""))) not in (OSError, TimeoutError):
        _kinds[_number] = _both(_builtin)
_kinds[errno.EINVAL] = _both(ValueError)  # also what a path that cannot be one raises


def agent_faults(error: BaseException | None) -> list[AgentFault]:
    """The faults that `error` is, was raised from, or is a group of. Empty where it has any other cause as well."""
    if error is None or isinstance(error, AgentFault):
        return [] if error is None else [error]
    if isinstance(error, BaseExceptionGroup):
        found = [agent_faults(each) for each in error.exceptions]
        return [fault for faults in found for fault in faults] if all(found) else []
    return agent_faults(error.__cause__)


def acceptable(text: str, what: str) -> str:
    """A command or a path (`what`). Raises `AgentFault` for what a model can write, and no system call takes."""
    if "\0" in text and what == "path":
        raise AgentFault(errno.EINVAL, "a path cannot contain a NUL character", text)
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise AgentFault(errno.EILSEQ, f"half of a surrogate pair in a {what} is not a character") from None
    return text
