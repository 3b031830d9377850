"""Attacks, their results, and the sandboxes that they get."""

from __future__ import annotations

import contextlib
import inspect
import json
import shlex
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import ModuleType

from backends import Backend, BackendError, BackendUnavailable, ExecResult, Sandbox, SandboxSpec

from .inside import harness


@dataclass(frozen=True, slots=True)
class Held:
    """The wall held."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Fell:
    """The wall fell."""

    detail: str


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """There is nothing to attack, or the attack cannot run here."""

    detail: str


Verdict = Held | Fell | NotApplicable


class Skipped(Exception):
    """Raised in an attack that turns out not to be applicable. The message says why."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. An exception of `run` is a failure of the attack itself, or of the backend: no verdict."""

    name: str
    """`family/name`"""
    tries: str
    """What it tries, in a few words."""
    run: Callable[[AttackTarget], Awaitable[Verdict]]
    is_executors: bool = False
    """Whether its wall is the executor's own, and so the same code with every backend."""
    is_heavy: bool = False
    """Whether it puts a load on the machine: gigabytes of output, hundreds of thousands of files."""


class Family:
    """The attacks of one module, in their order."""

    def __init__(self, name: str, *, is_executors: bool = False) -> None:
        self.name = name
        self.is_executors = is_executors
        self.attacks: list[Attack] = []

    def attack(
        self, name: str, tries: str, *, is_executors: bool | None = None, is_heavy: bool = False
    ) -> Callable[[Run], Run]:
        """A decorator: the function is an attack."""
        executors = self.is_executors if is_executors is None else is_executors

        def add(run: Run) -> Run:
            self.attacks.append(Attack(f"{self.name}/{name}", tries, run, executors, is_heavy))
            return run

        return add

    def programs(self, module: ModuleType, *, needs_own_processes: bool = False) -> None:
        """Every public function of a module of `inside` is an attack."""
        for name in _functions(module):

            async def run(target: AttackTarget, name: str = name) -> Verdict:
                if needs_own_processes:
                    await target.needs_own_processes()
                return verdict(*(await target.found(module))[name])

            tries = (getattr(module, name).__doc__ or "").partition("\n")[0]
            self.attacks.append(Attack(f"{self.name}/{name.replace('_', ' ')}", tries, run))


Run = Callable[["AttackTarget"], Awaitable[Verdict]]


@dataclass
class AttackTarget:
    """A backend under attack. Attacks that leave a sandbox usable share `sandbox`."""

    backend: Backend
    sandbox: Sandbox
    _found: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    _own_processes: bool | None = None
    _neighbour: Sandbox | None = None

    async def neighbour(self) -> Sandbox:
        """A second sandbox, which attacks share as well."""
        if self._neighbour is None:
            self._neighbour = await self.backend.create(SandboxSpec())
        return self._neighbour

    async def close(self) -> None:
        """Close what was made here."""
        if self._neighbour is not None:
            await self._neighbour.close()

    @contextlib.asynccontextmanager
    async def another(self, **limits: float) -> AsyncIterator[Sandbox]:
        """One more sandbox, which may be broken. Not applicable where the backend cannot enforce the limits."""
        try:
            sandbox = await self.backend.create(SandboxSpec(**limits))  # type: ignore[arg-type]
        except BackendUnavailable as error:
            raise Skipped(str(error)) from None
        try:
            yield sandbox
        finally:
            with contextlib.suppress(BackendError):
                await sandbox.close()

    async def needs_own_processes(self) -> None:
        """Skip where commands share the machine's processes: the attack would hit those."""
        if self._own_processes is None:
            self._own_processes = (await self.sandbox.exec("echo $PPID", timeout=30)).stdout.strip() == b"1"
        if not self._own_processes:
            raise Skipped("commands run among the processes of the machine, and the attack would hit those")

    async def found(self, module: ModuleType) -> dict[str, list[str]]:
        """The findings of all functions of a module of `inside`. They run once."""
        if module.__name__ not in self._found:
            names = _functions(module)
            ran = await run_inside(self.sandbox, module, f"main({{n: globals()[n] for n in {names}}}, {names})")
            if ran.exit_code:
                raise RuntimeError(f"the attacks could not run inside: {ran}")
            self._found[module.__name__] = json.loads(ran.stdout)
        return self._found[module.__name__]


async def run_inside(sandbox: Sandbox, module: ModuleType, code: str, timeout: float = 120) -> ExecResult:
    """Run `code` in a module of `inside`, by the Python of the sandbox."""
    return await sandbox.exec(python(sandbox), stdin=program(module, code).encode(), timeout=timeout)


def python(sandbox: Sandbox) -> str:
    """The command of the sandbox' Python that reads a program from its standard input."""
    if sandbox.python is None:
        raise Skipped("there is no Python inside")
    return f"{shlex.quote(sandbox.python)} -I -S -"


def program(module: ModuleType, code: str) -> str:
    """The source of a module of `inside` with its harness, followed by `code`."""
    loader = (
        "from __future__ import annotations\nimport sys, types\n"
        "module = sys.modules[{0!r}] = types.ModuleType({0!r})\n"
        "exec({1!r}, module.__dict__)\n"
        "main = module.main\n"
    )
    source = inspect.getsource(module).replace("from __future__ import annotations\n", "")
    return loader.format(harness.__name__, inspect.getsource(harness)) + f"{source}\n{code}\n"


async def attacked(attack: Attack, target: AttackTarget) -> Verdict:
    """The verdict on one attack."""
    try:
        return await attack.run(target)
    except Skipped as reason:
        return NotApplicable(str(reason))


def mark() -> str:
    """A number that nothing else on the machine has."""
    return str(uuid.uuid4().int)[:9]


def _functions(module: ModuleType) -> list[str]:
    own = inspect.getmembers(module, inspect.isfunction)
    names = [name for name, one in own if one.__module__ == module.__name__ and not name.startswith("_")]
    return sorted(names, key=lambda name: getattr(module, name).__code__.co_firstlineno)


def verdict(kind: str, detail: str) -> Verdict:
    """The answer of a program inside."""
    verdicts: dict[str, type[Held] | type[Fell] | type[NotApplicable]]
    verdicts = {"held": Held, "fell": Fell, "not applicable": NotApplicable}
    if kind not in verdicts:
        raise RuntimeError(f"the attack failed inside: {detail}")
    return verdicts[kind](detail)
