"""The runs that are open in this process, for code that knows a task id and nothing else.

Environments of the removed Hermes stack make a `ToolContext(task_id)` or an agent loop by hand, also on threads. A
context variable names the run of a task. A thread that has none finds the run by the task's session, or takes the only
run that is open.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from backends import BackendUnavailable, SandboxSpec
from backends.errors import LachesisError
from lachesis_client.failed_requests import note_failed
from lachesis_tools import ToolRegistry, ToolSession, ToolSessions

log = logging.getLogger(__name__)


class NoOpenRun(LachesisError, RuntimeError):
    """There is no run, or more than one, in which a task could have its sandbox."""


@dataclass(eq=False, slots=True)
class OpenRun:
    """The objects that a task's tools need."""

    sessions: ToolSessions
    registry: ToolRegistry
    loop: asyncio.AbstractEventLoop
    """The event loop that sandboxes belong to."""
    backend: str = ""
    """The name of the technology of the sandboxes."""
    takes_images: bool = True
    """Whether a sandbox may have another image than the run's."""
    walls: bool = True
    """Whether commands see nothing of this process. Old environments pass values to commands by `os.environ`: without
    walls, sandboxes of tasks made by hand get what the environment's code set there during the run."""
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Of this process, at the start of the run."""
    after_setup: Mapping[str, str] | None = None
    """The same when `setup` had ended. What is set later is meant for commands."""
    overrides: dict[str, dict[str, object]] = field(default_factory=dict)
    """By task id: fields of `SandboxSpec` that differ from those of the run."""
    failures: dict[str, Exception] = field(default_factory=dict)
    """By task id: what broke the infrastructure under a loop or a context that the environment made by hand."""

    by_hand: set[str] = field(default_factory=set)
    """Tasks whose session was opened here and is open: no rollout of the run."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Ends of such sessions that nobody waits for."""
    notes: set[str] = field(default_factory=set)

    def session(self, task_id: str) -> ToolSession:
        """The session of a task, opened if there is none. It is closed at the end of the run at the latest.

        Raises:
            BackendUnavailable: the environment passes variables to commands that they cannot see.
        """
        try:
            return self.sessions.get(task_id)
        except KeyError:
            self._check_variables(task_id)
            self.by_hand.intersection_update(self.sessions)
            self.by_hand.add(task_id)
            return self.sessions.open(task_id, spec=self.spec(task_id))

    def note_once(self, note: str) -> None:
        """Warn, once in a run."""
        if note not in self.notes:
            self.notes.add(note)
            log.warning(note)

    def spec(self, task_id: str) -> SandboxSpec:
        """The sandbox of a task: the run's, with the overrides of the task."""
        changed = dict(self.overrides.get(task_id, ()))
        if not self.walls and (set_since := _changed(self.variables)):
            self.note_once(f"unsandboxed commands see these variables set in os.environ: {', '.join(set_since)}")
            changed["env"] = {**set_since, **self.sessions.spec.env}
        return replace(self.sessions.spec, **changed) if changed else self.sessions.spec  # type: ignore[arg-type]

    def _check_variables(self, task_id: str) -> None:
        if not self.walls or self.after_setup is None:
            return
        hidden = [name for name in _changed(self.after_setup) if name not in self.sessions.spec.env]
        if hidden:
            error = BackendUnavailable(
                f"the environment sets {', '.join(hidden)} in os.environ for its commands, which do not see it in a "
                "sandbox. Next step: pass values with --env.terminal_env"
            )
            self.failures.setdefault(task_id, error)
            raise error


_OF_LIBRARIES = (
    "CUDA_",
    "GRPC_",
    "HF_",
    "KMP_",
    "OMP_",
    "PYTEST_",
    "TERMINAL_",
    "TF_",
    "TOKENIZERS_",
    "TORCH",
    "WANDB_",
)
"""Beginnings of variables that libraries set for themselves, and the removed stack for its terminal."""


def _changed(before: Mapping[str, str]) -> dict[str, str]:
    """The variables that this process has set since."""
    return {
        name: value
        for name, value in os.environ.items()
        if before.get(name) != value and not name.startswith(_OF_LIBRARIES)
    }


_open: list[OpenRun] = []
_current: ContextVar[OpenRun | None] = ContextVar("open_run", default=None)


@contextmanager
def opened(run: OpenRun) -> Iterator[None]:
    """Let `open_run` find the run, from tasks and threads that begin inside."""
    _open.append(run)
    _current.set(run)  # never reset: the exit may be in another context, and a run that is not open is not found
    try:
        yield
    finally:
        _open.remove(run)


def note_failure(task_id: str, error: Exception) -> None:
    """Keep the first failure of the infrastructure that a task met, where a run is open: code that made the task by
    hand may catch the error and make a score of it."""
    note_failed(task_id, error)
    with suppress(NoOpenRun):
        open_run(task_id).failures.setdefault(task_id, error)
        log.error("the infrastructure broke %s, which is not a score: %s", task_id, error)


def open_run(task_id: str = "") -> OpenRun:
    """The run that a task belongs to.

    Raises:
        NoOpenRun: no run is open, or several are and none knows the task.
    """
    run = _current.get()
    if run is not None and run in _open:
        return run
    known = [run for run in _open if task_id in run.sessions or task_id in run.overrides]
    found = known or _open
    if len(found) == 1:
        return found[0]
    raise NoOpenRun(
        f"task {task_id!r} has no sandbox: "
        + ("several runs are open; use it in a task of its run" if found else "use it inside a run (`env.running()`)")
    )
