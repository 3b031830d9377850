"""The W&B run of a training run. Nothing of W&B is imported without one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.errors import LachesisError

log = logging.getLogger(__name__)

TEARDOWN_LIMIT = 10.0
"""Seconds that W&B may take to detach from its process."""


class TrackingError(LachesisError, RuntimeError):
    """W&B is asked for and cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSettings:
    """Where the metrics go."""

    project: str
    name: str | None = None
    group: str | None = None
    """Environments that ask `/wandb_info` join the same group."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings without secrets."""


def start_run(settings: WandbSettings, run_dir: Path) -> Any:
    """The W&B run. Its id is kept in the folder: a resumed run continues it.

    Raises:
        TrackingError: W&B is not installed, or there is no login; says what to do.
    """
    try:
        import wandb
    except ImportError as error:
        raise TrackingError("use_wandb is set, but wandb is not installed: pip install wandb") from error
    known = run_dir / "wandb_run_id"
    run_id = known.read_text().strip() if known.exists() else None
    try:
        # Checked here: wandb.init would ask a person at the terminal, and wait.
        if wandb.setup().settings.mode in ("online", "run", "shared") and not wandb.api.api_key:
            raise TrackingError(_no_login("there is no API key"))
        with waiting_is_said():
            run = wandb.init(
                project=settings.project,
                name=settings.name,
                group=settings.group,
                id=run_id,
                resume="allow" if run_id else None,
                job_type="trainer",
                config=dict(settings.config),
            )
    except (wandb.errors.Error, OSError) as error:
        raise TrackingError(_no_login(str(error))) from error
    known.write_text(f"{run.id}\n")
    return run


@contextmanager
def waiting_is_said(after: float = 10.0) -> Iterator[None]:
    """Says that W&B is waited for, where it takes longer than `after` seconds: by itself it says nothing."""
    said = "W&B has not answered for %.0f s; it is waited for up to WANDB_INIT_TIMEOUT (90 s)"
    timer = threading.Timer(after, log.warning, (said, after))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def kill_service() -> None:
    """End W&B's process, which is a child of this one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"wandb" in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def say_gone(error: BaseException) -> None:
    """Report that the run continues without W&B, and detach from its process."""

    def detach() -> None:
        with suppress(Exception):  # or it prints its traceback when the interpreter ends
            import wandb

            wandb.teardown()

    thread = threading.Thread(target=detach, name="wandb-detach", daemon=True)
    thread.start()
    thread.join(TEARDOWN_LIMIT)
    log.warning(
        "W&B is gone (%s: %s): the run goes on without it. Its data so far is in wandb/; everything is in the "
        "run's own files",
        type(error).__name__,
        error,
    )


def _no_login(reason: str) -> str:
    return (
        f"use_wandb is set, but W&B cannot start: {reason}; run `wandb login`, set WANDB_MODE=offline, "
        "or leave use_wandb out"
    )
