"""Errors in a task's folder."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.errors import ExitCode, LachesisError


@dataclass(frozen=True)
class TaskProblem:
    """One reason why a task cannot run."""

    file: Path
    field: str
    """Path of the key in the file, as `environment.gpus` or `steps[0].name`; empty if it is the whole file."""
    reason: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.file}: {self.field + ': ' if self.field else ''}{self.reason}; {self.next_step}"


class TaskError(LachesisError):
    """A task's folder cannot be read, written or run as it is. `problems` has every reason that was found."""

    def __init__(self, problems: Sequence[TaskProblem]):
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class NoTask(TaskError):
    """No task is at the path."""

    exit_code = ExitCode.SETTINGS


def wrong(file: Path, reason: str, next_step: str, field: str = "") -> TaskError:
    """The error of one problem."""
    return TaskError([TaskProblem(file, field, reason, next_step)])


def read_text(file: Path) -> str:
    """The text of a file of a task.

    Raises:
        TaskError: there is none, or it is not UTF-8.
    """
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        raise wrong(file, "the file is missing", "a task needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise wrong(file, f"it cannot be read: {reason}", "make it a readable text file") from None


def problem_of(file: Path, error: Any) -> TaskProblem:
    """Of one of the errors that pydantic lists."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    value = "" if error["type"] in ("missing", "value_error") else f", not {reprlib.repr(error['input'])}"
    return TaskProblem(file, place.removeprefix("."), error["msg"].removeprefix("Value error, ") + value, "correct it")
