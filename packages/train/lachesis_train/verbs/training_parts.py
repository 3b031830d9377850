"""What every training run consists of, on batches or on files: tokenizer, engine, recorder, policy server, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from backends.errors import ExitCode, SettingsError
from lachesis_tokens.prompts.model_folders import tokenizer_of
from lachesis_train.policy import CurrentPolicy
from lachesis_train.trainer.settings import Settings

if TYPE_CHECKING:
    from lachesis_train.curves.recorder import TrainingRecorder
    from lachesis_train.trainer.engine_link import EngineLink

TOKEN: Final = "LACHESIS_POLICY_TOKEN"
"""Environment variable with the bearer token of the policy server."""
AT_ONCE: Final = 10.0
"""Seconds after the second Ctrl-C after which the process ends, whatever it is at."""


class LazyTokenizer:
    """The tokenizer of the model, loaded at its first use: reading the settings alone needs none."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: Any = None

    def get(self) -> Any:
        """The tokenizer. Blocks."""
        if self._found is None:
            from transformers import AutoTokenizer

            name = tokenizer_of(self._settings.tokenizer or self._settings.base_model)
            try:
                self._found = AutoTokenizer.from_pretrained(name)
            except (OSError, ValueError) as error:
                raise SettingsError(
                    f"cannot load the tokenizer {name} ({error}); name a folder or another tokenizer with "
                    "--env.tokenizer_name"
                ) from error
        return self._found


def engine(settings: Settings) -> contextlib.AbstractAsyncContextManager[EngineLink]:
    """Where the engine of the run is."""
    from lachesis_train.tinker_sdk import is_configured
    from lachesis_train.trainer.engine_link import EmbeddedEngine, EngineLink

    return EngineLink() if is_configured() else EmbeddedEngine(settings.base_model, settings.run_dir, settings.engine)


def new_recorder(settings: Settings, first_step: int, tokenizer: LazyTokenizer, console: Console) -> TrainingRecorder:
    """The recorder of the run from `first_step` on."""
    from lachesis_train.curves.recorder import TrainingRecorder, WandbSettings

    training, wandb = settings.training, None
    if training.use_wandb:
        wandb = WandbSettings(
            project=training.wandb_project,
            group=settings.registration.wandb_group,
            name=training.wandb_run_name or training.name,
            config=settings.content(),
        )
    return TrainingRecorder(
        settings.run_dir,
        title=training.name,
        first_step=first_step,
        total_steps=settings.num_steps,
        decode=tokenizer.get().decode,
        wandb=wandb,
        console=console,
    )


@contextlib.asynccontextmanager
async def serving(settings: Settings, policy: CurrentPolicy, tokenizer: LazyTokenizer, say: Any) -> AsyncIterator[None]:
    """The policy server, while the context lasts."""
    from lachesis_train.policy_server import PolicyServer

    training = settings.training
    async with PolicyServer(
        policy,
        await asyncio.to_thread(tokenizer.get),
        model_name=settings.served_model,
        host=training.host,
        port=settings.port,
        token=os.environ.get(TOKEN),
        tool_call_parser=settings.env.tool_call_parser,
        wandb_info={"group": settings.registration.wandb_group, "project": training.wandb_project},
    ) as server:
        say(f"{settings.served_model} is served at {server.base_url}")
        yield


def stop_at_signals(stop: asyncio.Event, say: Any) -> None:
    """The first Ctrl-C or SIGTERM ends the run after the step under way, a second one at once, or where the step cannot
    be interrupted after `AT_ONCE` seconds."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def signalled() -> None:
        if stop.is_set():
            task.cancel()
            end = threading.Timer(AT_ONCE, os._exit, (ExitCode.STOPPED,))
            end.daemon = True
            end.start()
        else:
            say("stopping after this step, with a checkpoint; interrupt again to stop at once")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
