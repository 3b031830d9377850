"""Sandboxes on another machine, reached by ssh.

Nothing is installed there. The far machine needs Linux, Python 3.8 or later, bash, and bubblewrap for walls; a sandbox
is made of its own programs. All sandboxes of a backend share one connection. When it breaks, a new one is made and
every sandbox goes on where it was; when nobody comes back within `grace` seconds, a sandbox ends itself and leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from backends import bubblewrap
from backends.base import (
    Availability,
    BackendError,
    BackendUnavailable,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    disk_in_memory,
)
from backends.connection import Connection
from backends.owner import is_gone, new_id, this_owner
from backends.sandbox import ExecutorSandbox, initialise
from backends.tasks import finish

from .link import Link, LinkLost, Target
from .walls import HOME, WORKDIR

_MARK = "LACHESIS_SANDBOX"
_OVERTIME = 30.0  # seconds beyond lifetime and grace after which the far machine ends even an executor that hangs
_CLOSE_PATIENCE = 20.0  # seconds for which an unreachable machine is asked to end what ends itself after `grace` anyway


@dataclass(frozen=True, slots=True)
class _Facts:
    """What was found on the far machine."""

    availability: Availability
    python: str = ""
    bwrap: str = ""
    disable_userns: bool = False


class SshBackend:
    """Sandboxes on the machine `host`.

    With `isolation="bubblewrap"` (the default) a sandbox has its own file system, processes, users and, unless the spec
    says otherwise, no network. With `isolation="none"` commands run as the user who logs in, in a folder of their own,
    with the network and the disk of the machine: `SandboxSpec.network` is then not enforced, and `disk_bytes` refused.
    One never turns into the other. Limits of processors, memory and processes are enforced by cgroups, where the user
    may make them, processes also without; they are refused elsewhere. Without `disk_bytes`, a walled sandbox may write
    1 GiB to each of its folders, which live in memory.

    The connection is shared by all sandboxes of one event loop and closed when there are none. Where the far machine
    ends whatever its users leave behind at logout (logind's KillUserProcesses=yes), nothing survives a broken one.
    """

    def __init__(
        self,
        host: str = "",
        port: int | None = None,
        username: str | None = None,
        *,
        client_keys: Sequence[str | os.PathLike[str]] | None = None,
        known_hosts: str | os.PathLike[str] | None = None,
        config: Sequence[str | os.PathLike[str]] | None = None,
        isolation: Literal["bubblewrap", "none"] = "bubblewrap",
        bwrap: str = "",
        python: str = "",
        folder: str = "",
        grace: float = 60.0,
    ) -> None:
        """What is None comes from ~/.ssh/config, or is what the ssh command would take.

        Args:
            client_keys: files of private keys; None also asks the ssh agent.
            known_hosts: file with the host's public key. There is no way to do without.
            config: ssh configuration files in place of ~/.ssh/config.
            bwrap, python: far paths; empty: whichever is installed.
            folder: far folder for the state of sandboxes, this user's alone; empty: /tmp/lachesis-ssh-UID.
            grace: seconds for which a sandbox outlives its connection.
        """
        if not host:
            raise ValueError("backend 'ssh' needs its option host, for example terminal_options: {host: worker-1}")
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation is 'bubblewrap' or 'none', not {isolation!r}")
        if grace <= 0:
            raise ValueError(f"grace has to be positive, not {grace!r}")
        self.isolation = isolation
        self.grace = grace
        self._bwrap = bwrap
        self._target = Target(
            host=host,
            port=port,
            username=username,
            client_keys=None if client_keys is None else tuple(os.fspath(path) for path in client_keys),
            known_hosts=None if known_hosts is None else os.path.expanduser(known_hosts),  # noqa: PTH111
            config=None if config is None else tuple(os.fspath(path) for path in config),
            python=python,
            folder=folder,
        )
        self._facts: _Facts | None = None
        self._links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Link] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # of the links: several threads may have event loops

    def __repr__(self) -> str:
        return f"SshBackend({self._target.name!r}, isolation={self.isolation!r})"

    @property
    def name(self) -> str:
        return "ssh"

    async def check(self) -> Availability:
        try:
            link = self._link()
            with link.used():
                return (await self._examine(link)).availability
        except BackendError as error:
            reason, _, fix = str(error).partition(". Next step: ")
            return Availability(False, reason, fix or f"try: {self._target.command} true")

    async def create(self, spec: SandboxSpec) -> SshSandbox:
        self._refuse(spec)
        link = self._link()
        with link.used():
            facts = self._facts or await self._examine(link)
            if not facts.availability.ok:
                raise BackendUnavailable(
                    f"backend 'ssh' cannot make sandboxes: {facts.availability.detail}. "
                    f"Next step: {facts.availability.fix}"
                )
            return await self._create(link, facts, spec)

    async def sandboxes(self) -> list[SandboxInfo]:
        link = self._link()
        with link.used():
            return await self._list(link)

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        link = self._link()
        with link.used():
            doomed = [
                info
                for info in await self._list(link)
                if (everyone or info.orphan) and (run_id is None or info.run_id == run_id)
            ]
            if doomed:
                await link.end([info.id for info in doomed], _CLOSE_PATIENCE)
            return doomed

    def _link(self) -> Link:
        loop = asyncio.get_running_loop()
        with self._lock:
            link = self._links.get(loop)
            if link is None:
                link = self._links[loop] = Link(self._target)
            return link

    async def _examine(self, link: Link) -> _Facts:
        """Raises `BackendUnavailable` when nothing can be found out."""
        hub = await link.hub()
        found = await hub.request("facts", isolation=self.isolation, bwrap=self._bwrap)
        host = self._target.name
        trusted = "for trusted code only: isolation 'none'"
        problem: tuple[str, str] | None = None
        if found["system"] != "Linux":
            problem = f"{host} runs {found['system']}", "use a machine with Linux"
        elif not found["bash"]:
            problem = f"bash is not installed on {host}", "apt-get install bash there"
        elif self.isolation == "bubblewrap" and not found["bwrap"]:
            what = f"there is no {self._bwrap}" if self._bwrap else "bubblewrap is not installed"
            problem = f"{what} on {host}", f"apt-get install bubblewrap there; {trusted}"
        elif self.isolation == "bubblewrap" and found["bwrap_failure"]:
            fix = f"let this user make user namespaces there: {_namespaces(found)}; {trusted}"
            problem = f"bubblewrap does not work on {host}: {found['bwrap_failure']}", fix
        if problem is not None:
            return _Facts(Availability(False, *problem))
        notes = [f"Python {found['version']} on {host}"]
        notes += [found["bwrap_version"]] if self.isolation == "bubblewrap" else ["unsandboxed"]
        missing = [name for name, reason in found["limits"].items() if reason]
        notes += [f"cannot enforce {', '.join(missing)}"] if missing else []
        notes += ["it forwards no sockets: every sandbox takes one of its MaxSessions"] if link.relayed else []
        self._facts = _Facts(
            Availability(True, ", ".join(notes)), found["python"], found["bwrap"], found.get("disable_userns", False)
        )
        return self._facts

    def _refuse(self, spec: SandboxSpec) -> None:
        if spec.image is not None:
            raise BackendUnavailable(
                f"backend 'ssh' has no images (image is {spec.image!r}): a sandbox is made of the far machine's own "
                "programs. Next step: leave image out, or use the backend docker or singularity"
            )
        if spec.disk_bytes is not None and self.isolation == "none":
            raise BackendUnavailable(
                "backend 'ssh' cannot enforce disk_bytes with isolation 'none'. Next step: leave it out, or use "
                "isolation 'bubblewrap'"
            )

    async def _list(self, link: Link) -> list[SandboxInfo]:
        try:
            found = (await (await link.hub()).request("list"))["sandboxes"]
        except LinkLost as error:
            raise BackendUnavailable(f"{error}. Next step: try again") from None
        return [
            SandboxInfo(
                backend=self.name,
                id=entry["id"],
                run_id=entry["meta"].get("run_id", ""),
                task_id=entry["meta"].get("task_id", ""),
                owner=entry["meta"].get("owner", ""),
                orphan=not entry["alive"] or is_gone(entry["meta"].get("owner", "")),
                created=entry["meta"].get("created", 0.0),
                detail=f"{self._target.name}: {entry['state']}",
            )
            for entry in found
        ]

    async def _create(self, link: Link, facts: _Facts, spec: SandboxSpec) -> SshSandbox:
        id = new_id()
        labels = ", ".join(f"{key}={value}" for key, value in spec.labels.items())
        name = f"sandbox {id}" + (f" ({labels})" if labels else "")
        death = _Death()
        link.on_ended[id] = death.heard
        try:
            made = await self._start(link, facts, spec, id)
            workdir, env = self._inside(facts, spec, id, made["folder"])

            async def dial() -> Any:
                try:
                    return await link.open(made["socket"])
                except ConnectionRefusedError:
                    if await death.known(0.5) or not await _alive(link, id):
                        raise SandboxLost(death.reason) from None
                    raise

            try:
                connection = await Connection.resumable(dial, name=name, grace=self.grace)
                inside = await initialise(connection, spec, workdir=workdir, env=env, grace=self.grace)
            except SandboxLost as error:
                raise BackendError(f"{name} could not be started: {error}") from None
            return SshSandbox(connection, link, id=id, name=name, workdir=workdir, python=inside.python)
        except BaseException:
            link.on_ended.pop(id, None)
            with contextlib.suppress(Exception):  # what could not be ended now ends itself
                await finish(link.end([id], _CLOSE_PATIENCE))
            raise

    async def _start(self, link: Link, facts: _Facts, spec: SandboxSpec, id: str) -> dict[str, Any]:
        request = {
            "id": id,
            "meta": {
                "id": id,
                "run_id": spec.labels.get("run_id", ""),
                "task_id": spec.labels.get("task_id", ""),
                "owner": this_owner(),
                "created": time.time(),
            },
            "isolation": self.isolation,
            "cpus": spec.cpus,
            "memory_bytes": spec.memory_bytes,
            "pids": spec.pids,
            "lifetime": spec.lifetime + self.grace + _OVERTIME,
            "network": spec.network,
            "disk_bytes": disk_in_memory(spec, file_systems=4),
            "workdir": spec.workdir or WORKDIR,
            "bwrap": facts.bwrap,
            "disable_userns": facts.disable_userns,
            "files": {path: content.decode() for path, content in bubblewrap.etc_files().items()},
        }
        for attempt in (1, 2):
            try:
                hub = await link.hub()
                await hub.ready_for_create()
                return await hub.request("create", **request)
            except LinkLost:
                if attempt == 2:
                    raise
                await link.end([id], _CLOSE_PATIENCE)  # whether it was made is not known
        raise AssertionError

    def _inside(self, facts: _Facts, spec: SandboxSpec, id: str, folder: str) -> tuple[str, dict[str, str]]:
        """The working directory, and every variable that is set inside before `SandboxSpec.env`."""
        folders = [os.path.dirname(facts.python), "/usr/local/bin", "/usr/bin", "/bin"]  # noqa: PTH120
        folders += ["/usr/local/sbin", "/usr/sbin", "/sbin"]
        env = {"PATH": ":".join(dict.fromkeys(folders)), "SHELL": "/bin/bash", "LANG": "C.UTF-8", "TERM": "dumb"}
        if self.isolation == "bubblewrap":
            return spec.workdir or WORKDIR, {**env, "HOME": HOME, "USER": "agent", "LOGNAME": "agent"}
        env.update(HOME=f"{folder}/home", TMPDIR=f"{folder}/tmp", **{_MARK: id})
        return spec.workdir or f"{folder}/workspace", env


def _namespaces(found: dict[str, Any]) -> str:
    if found.get("apparmor_restrict_unprivileged_userns") == "1":
        return "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    if found.get("unprivileged_userns_clone") == "0":
        return "sudo sysctl kernel.unprivileged_userns_clone=1"
    return "see the message above"


async def _alive(link: Link, id: str) -> bool:
    """Raises `BackendError` when that cannot be found out now."""
    return bool((await (await link.hub()).request("alive", id=id))["alive"])


class _Death:
    """What the far machine has said about the end of a sandbox."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = "its executor has ended"

    def heard(self, code: int | None, log: str) -> None:
        if code is not None and os.WIFSIGNALED(code):
            number = os.WTERMSIG(code)  # real-time signals have no name
            named = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            self.reason = f"its executor died ({named})"
        elif code:
            self.reason = f"its executor died (exit code {os.WEXITSTATUS(code)})"
        self.reason += f": {log}" if log else ""
        self._event.set()

    async def known(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return self._event.is_set()


class SshSandbox(ExecutorSandbox):
    """A sandbox on the far machine."""

    def __init__(
        self, connection: Connection, link: Link, *, id: str, name: str, workdir: str, python: str | None
    ) -> None:
        super().__init__(connection, id=id, workdir=workdir, python=python)
        self._link, self._name = link, name
        self._closing: asyncio.Task[None] | None = None
        link.hold()

    async def close(self) -> None:
        """Waits until nothing is left on the far machine.

        Where that cannot be reached, returns after some time: what is left there ends itself within `grace` seconds.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await finish(self._closing)

    async def _close(self) -> None:
        self._connection.fail(f"{self._name} was closed")
        try:
            with contextlib.suppress(LinkLost, BackendUnavailable):
                await self._link.end([self._id], _CLOSE_PATIENCE)
        finally:
            self._link.on_ended.pop(self._id, None)
            self._link.release()
