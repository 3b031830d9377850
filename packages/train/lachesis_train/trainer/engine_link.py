"""Where the engine of a run is: a service that the Tinker SDK knows, or the embedded engine as a subprocess."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from backends.errors import LachesisError
from lachesis_train.tinker_sdk import LOCAL_KEY, Service, Training, TrainingEngineError
from lachesis_train.trainer.settings import Settings

_LOOK: Final = 1.0
"""Seconds between two looks whether the embedded engine still listens."""
_LONGEST_PAUSE: Final = 60.0
"""Seconds before another try, at most."""

T = TypeVar("T")


class EngineLink(contextlib.AsyncExitStack):
    """Where the engine is. This one is a service of which the SDK knows URL and key: the Tinker cloud, SkyRL, a
    `lachesis engine` of its own."""

    keeps = 0
    """Checkpoints whose states it keeps, where no setting says so; 0: all."""

    async def connect(self) -> Service:
        """The engine, started again if it has died.

        Raises:
            EngineError: it cannot be reached.
        """
        return await asyncio.to_thread(Service)

    async def ended(self) -> str:
        """Returns when the engine has died, with a sentence about it; never, if that cannot be known: the SDK tries
        again, and says when it gives up."""
        await asyncio.Event().wait()
        return ""

    async def take(self, state: str, run_dir: Path) -> None:
        """Make a state of another run, whose folder is `run_dir`, one that the engine can load. A service has those of
        all runs.

        Raises:
            EngineError: the state is not there.
        """


async def while_alive(link: EngineLink, call: Coroutine[Any, Any, T]) -> T:
    """The result of a call of the engine, which ends with the engine: the SDK would try for minutes."""
    working = asyncio.ensure_future(call)
    died = asyncio.ensure_future(link.ended())
    try:
        await asyncio.wait([working, died], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise TrainingEngineError("go on", RuntimeError(died.result()))
    finally:
        working.cancel()
        died.cancel()


async def begin(link: EngineLink, service: Service, settings: Settings, first: str | None) -> Training:
    """The adapter of a run that begins: a new one, or one with the state `first` of another run."""
    if first is None or settings.first_run is None:
        return await while_alive(link, service.train(settings.base_model, settings.lora))
    await link.take(first, settings.first_run)
    return await while_alive(link, service.resume(first, settings.base_model, settings.lora, optimizer=False))


def pause_after(failures: int) -> float:
    """Seconds before another try, after so many failures in a row."""
    return min(_LONGEST_PAUSE, 2.0 ** (failures - 1))


class EmbeddedEngine(EngineLink):
    """The embedded engine of this run, started at the first `connect` and again when it has died."""

    keeps = 5

    def __init__(self, model: str, folder: Path, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._model = model
        self._folder = folder
        self._options = options
        self._address: tuple[str, int] | None = None

    async def connect(self) -> Service:
        """See `EngineLink.connect`."""
        if self._address is None or not await self._listens(self._address):
            from lachesis_train.engine import start_engine

            port = 0 if self._address is None else self._address[1]
            await self.aclose()
            try:
                url = await self.enter_async_context(
                    start_engine(
                        self._model,
                        state_dir=self._folder / "engine",
                        log=self._folder / "engine.log",
                        port=port,  # the same as before: samplers of the old one then fail at once, not after minutes
                        **self._options,
                    )
                )
            except LachesisError as error:
                raise TrainingEngineError("start", error, final=self._address is None) from error
            parts = urlsplit(url)
            self._address = (str(parts.hostname), int(parts.port or 0))
        return await asyncio.to_thread(Service, "http://{}:{}".format(*self._address), LOCAL_KEY)

    async def ended(self) -> str:
        """See `EngineLink.ended`."""
        while self._address is not None and await self._listens(self._address):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(_LOOK)
        return f"the embedded engine has ended; its output is in {self._folder / 'engine.log'}"

    async def take(self, state: str, run_dir: Path) -> None:
        """See `EngineLink.take`: the file is copied, so that the other run may be removed. That of this run's own warm
        start is here already, and that of another one's has the engine of its run."""
        file = f"{state.removeprefix('tinker://')}.safetensors"
        to = self._folder / "engine" / file
        if to.exists():
            return
        of_run = next((each for each in (run_dir, run_dir.parent) if (each / "engine" / file).exists()), run_dir)
        try:
            await asyncio.to_thread(_copy, of_run / "engine" / file, to)
        except OSError as error:
            raise TrainingEngineError(f"take the weights of {run_dir}", error, final=True) from error

    @staticmethod
    async def _listens(address: tuple[str, int]) -> bool:
        try:
            _, writer = await asyncio.open_connection(*address)
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True


def _copy(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    shutil.copyfile(file, part)
    part.replace(to)
