"""Return values of the methods of `ToolContext`.

Each result is what new code expects, text or a dictionary, and answers what code for the removed Hermes stack asks of
it. It can be awaited and gives itself then: a call that ran at once may be used wherever a coroutine is expected, and
one type describes a call in an `async def` and in a plain `def`.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Generator
from typing import Any, NoReturn, Self

from backends import ExecResult
from lachesis.rewards.reward import RewardError
from lachesis.tool_context.pace import OwnTime
from lachesis_tools import ToolRegistry, ToolResult
from lachesis_tools.toolsets import PROVIDED_TOOLS, how_to_provide


class _Done(Coroutine[Any, Any, Any]):
    """A coroutine that has its result already."""

    __slots__ = ()

    def _awaited(self) -> Self:
        return self

    def __await__(self) -> Generator[Any, Any, Self]:
        yield from ()
        return self._awaited()

    def send(self, value: Any) -> NoReturn:
        raise StopIteration(self._awaited())

    def throw(self, kind: Any, value: Any = None, trace: Any = None) -> NoReturn:
        raise kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()

    def close(self) -> None:
        pass


class DictReply(_Done, dict[str, Any]):
    """A dictionary. Where it is about a file: `success`, and `bytes` or `error`."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # `asyncio.gather` keeps what it is given in a dictionary
    cause: OSError | None = None
    """What awaiting the call raises."""
    late: OwnTime | None = None
    """What a command took that its time limit has ended."""

    @classmethod
    def written(cls, size: int) -> DictReply:
        return cls(success=True, bytes=size, bytes_written=size, exit_code=0, output="")

    @classmethod
    def of_command(cls, done: ExecResult, timeout: float) -> DictReply:
        problems = [f"the command took longer than {timeout:g} s"] if done.timed_out else []
        for stream, elided in (("stdout", done.stdout_elided), ("stderr", done.stderr_elided)):
            problems += [f"{elided} bytes are missing in the middle of {stream}"] if elided else []
        output = (done.stdout + done.stderr).decode(errors="replace")
        reply = cls(output=output, exit_code=done.exit_code, error="; ".join(problems) or None)
        reply.late = OwnTime(done.duration, done.waited) if done.timed_out else None
        return reply

    @classmethod
    def of_tool(cls, result: ToolResult, name: str, registry: ToolRegistry) -> DictReply:
        """What a tool answers, which is JSON where it succeeded; without the tool, which setting provides it."""
        if name in PROVIDED_TOOLS and name not in registry:
            return cls(error=f"there is no tool {name!r} here: {how_to_provide(name)}")
        try:
            value = json.loads(result.content)
        except ValueError:
            value = result.content
        reply = cls(value) if isinstance(value, dict) else cls(output=value)
        if result.error is not None:
            reply.setdefault("error", result.error)
        return reply

    @classmethod
    def failed(cls, error: OSError) -> DictReply:
        reply = cls(success=False, error=str(error), exit_code=-1, output=str(error))
        reply.cause = error
        return reply

    def _awaited(self) -> Self:
        if self.cause is not None:
            raise self.cause
        return self


class Replies(_Done, list[DictReply]):
    """One reply for each file of a folder."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    @classmethod
    def failed(cls, error: OSError) -> Replies:
        return cls([DictReply.failed(error)])

    def _awaited(self) -> Self:
        for reply in self:
            reply._awaited()
        return self


class Data(_Done, bytes):
    """Bytes."""


class Text(_Done, str):
    """Text."""

    __slots__ = ()


class FileText(_Done, str):
    """The text of a file, which is also `text["content"]`; `text["error"]` where it could not be read."""

    error: str | None = None
    keys_only: bool = False
    """Whether `"error" in text` asks for the key, as in the removed Hermes stack, where this was a dictionary."""

    @classmethod
    def missing(cls, default: str, error: OSError) -> FileText:
        text = cls(default)
        text.error = str(error)
        return text

    def _answers(self) -> dict[str, Any]:
        if self.error is not None:
            return {"error": self.error}
        return {"content": str(self), "file_size": len(self.encode()), "total_lines": len(self.splitlines())}

    def __getitem__(self, key: Any) -> Any:
        return self._answers()[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self._answers().get(key, default)

    def __contains__(self, key: object) -> bool:
        if self.keys_only and key in ("content", "error"):
            return key in self._answers()
        return super().__contains__(key)  # type: ignore[operator]

    def _awaited(self) -> Self:
        if not self.keys_only:
            return self
        text = type(self)(self)
        text.error = self.error
        return text


def failed_command(command: str, reply: DictReply) -> RewardError:
    """The error of a command of the environment's own. The last line mostly says why, and is the headline; the others
    follow, without the one that is cut."""
    output = reply["output"]
    lines = output[-500:].strip().splitlines()[int(len(output) > 500) :] or [output[-500:]]
    said = "; ".join(filter(None, [reply["error"], *lines[-1:]]))
    ended = f"{command!r} ended with exit code {reply['exit_code']}: {said}"
    return RewardError("\n".join([ended, *(lines if len(lines) > 1 else [])]))
