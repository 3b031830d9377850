"""Sandboxes on another machine, reached by ssh.

Nothing is installed there. The far machine needs Linux, Python 3.8 or later, bash, and bubblewrap for walls; it makes
sandboxes by the same code as this one (`backends/host`). All sandboxes of a backend share one connection. When that
breaks, a new one is made and every sandbox goes on. A sandbox that nobody reconnects to within `grace` seconds ends
itself and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, cast

import asyncssh

from backends.base import Availability
from backends.connection import Connection
from backends.errors import BackendError, BackendUnavailable, SandboxLost
from backends.failures import typed_failures
from backends.host import cgroups, hardened
from backends.host.requests import executor_death, explained, request_of, write_inside
from backends.limits import MissingDefaults, with_defaults
from backends.owner import new_id, this_owner
from backends.sandbox import ExecutorSandbox, initialise
from backends.spec import Profile, SandboxInfo, SandboxSpec, check_profile, hardened_spec, sandbox_title
from backends.tasks import finish

from .link import Link, LinkLost
from .login import Target

_OVERTIME = 30.0
"""Seconds beyond lifetime and grace after which the far machine ends even an executor that hangs."""
_CLOSE_PATIENCE = 20.0
"""Seconds for which an unreachable machine is tried before the sandbox is left to end itself after `grace`."""


class SshBackend:
    """Sandboxes on the machine `host`.

    With `isolation="bubblewrap"` (the default) a sandbox has its own file system, processes, users and, unless the spec
    says otherwise, no network; `SandboxSpec.image` is a folder of the far machine with a root file system. With
    `isolation="none"` commands run as the user who logs in, in a folder of their own, with the network and the disk of
    the machine: `SandboxSpec.network` is then not enforced, `image` and `disk_bytes` are rejected. One never turns into
    the other. Disk and limits are those of `LocalBackend`.

    All sandboxes of one event loop share one connection, which is closed when there are none. If the far machine ends
    the processes of users who log out (logind's KillUserProcesses=yes), no sandbox survives a broken connection.
    """

    name = "ssh"

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
        mounts: list[str] | None = None,
        grace: float = 60.0,
        profile: Profile = "standard",
        root: bool = False,
    ) -> None:
        """Options that are None come from ~/.ssh/config, or have the ssh command's defaults.

        Args:
            client_keys: files of private keys; None also asks the ssh agent.
            known_hosts: file with the host's public key, which is always checked.
            config: ssh configuration files instead of ~/.ssh/config.
            bwrap, python: paths on the far machine; empty: searched for.
            folder: far folder for the state of sandboxes, which only this user may enter; empty: /tmp/lachesis-ssh-UID.
            mounts: absolute paths of files and folders of the far machine, to be read inside under the same path.
            grace: seconds for which a sandbox outlives its connection.
            profile: "hardened" needs an ordinary user there, a bubblewrap that forbids user namespaces, and cgroups for
                limits, and is an error where one is missing.
            root: `SandboxSpec.root` for all sandboxes.
        """
        if not host:
            raise ValueError("backend 'ssh' needs its option host, for example terminal_options: {host: worker-1}")
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation is 'bubblewrap' or 'none', not {isolation!r}")
        if grace <= 0:
            raise ValueError(f"grace must be positive, not {grace!r}")
        if check_profile(profile) and isolation == "none":
            raise ValueError("profile='hardened' needs isolation='bubblewrap'; leave one of the two out")
        self._root = root
        self._hardened = profile == "hardened"
        self.isolation = isolation
        self._walled = isolation == "bubblewrap"
        self.grace = grace
        self._bwrap = bwrap
        self._mounts = [str(path) for path in mounts or ()]
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
        self._facts: dict[str, Any] | None = None
        """The answer to the hub's request `facts`, of a machine that can make sandboxes."""
        self._links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Link] = weakref.WeakKeyDictionary()
        self._missing = MissingDefaults(f"ssh, {host}")
        self._lock = threading.Lock()  # for the links: several threads may have event loops

    def __repr__(self) -> str:
        return f"SshBackend({self._target.name!r}, isolation={self.isolation!r})"

    async def check(self) -> Availability:
        try:
            with self._link().used() as link:
                return (await self._examine(link))[0]
        except BackendError as error:
            return Availability.lacking(error, f"try: {self._target.command} true")

    @typed_failures
    async def create(self, spec: SandboxSpec) -> SshSandbox:
        spec = replace(spec, root=spec.root or self._root)
        if self._hardened:
            spec = hardened_spec(spec)
        request_of(spec, walled=self._walled)
        with self._link().used() as link:
            facts = self._facts
            if facts is None:
                found, facts = await self._examine(link)
                if not found.ok:
                    raise BackendUnavailable(
                        f"backend 'ssh' cannot make sandboxes: {found.detail}. Next step: {found.fix}"
                    )
            missing = [field for field in cgroups.FIELDS if field not in facts["enforced"]]
            self._missing.warn(spec, missing, facts["why_not"], facts["next_step"])
            spec = with_defaults(
                spec,
                facts["enforced"],
                processors=facts["processors"],
                pids=cgroups.PIDS,
                file_systems=facts["file_systems"],
            )
            with explained(spec):
                return await self._create(link, facts, spec)

    async def sandboxes(self) -> list[SandboxInfo]:
        with self._link().used() as link:
            return await self._list(link)

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        with self._link().used() as link:
            found = [info for info in await self._list(link) if everyone or info.orphan]
            removed = [info for info in found if run_id is None or info.run_id == run_id]
            if removed:
                await link.end([info.id for info in removed], _CLOSE_PATIENCE)
            return removed

    async def run(self, command: Sequence[str], *, stdin: Any = None) -> bytes:
        """The output of a command that the user who logs in runs there, outside of any sandbox.

        Args:
            stdin: an open file or pipe of bytes.

        Raises:
            BackendError: it failed, with its last words; or the machine cannot be reached.
        """
        with self._link().used() as link:
            connection = await link.connection()
            try:
                done = await connection.run(
                    shlex.join(command), stdin=subprocess.DEVNULL if stdin is None else stdin, encoding=None
                )
            except (asyncssh.Error, OSError) as error:
                raise BackendError(f"{self._target.name}: {command[0]} could not be run: {error}") from error
        if done.exit_status != 0:
            said = cast(bytes, done.stderr or b"").decode(errors="replace").strip()[-1000:]
            raise BackendError(f"{self._target.name}: {command[0]} failed: {said or done.exit_status}")
        return cast(bytes, done.stdout or b"")

    def _link(self) -> Link:
        loop = asyncio.get_running_loop()
        with self._lock:
            link = self._links.get(loop)
            if link is None:
                link = self._links[loop] = Link(self._target)
            return link

    async def _examine(self, link: Link) -> tuple[Availability, dict[str, Any]]:
        """Raises `BackendUnavailable` when the machine cannot be asked."""
        hub = await link.hub()
        facts = await hub.request("facts", walled=self._walled, bwrap=self._bwrap)
        host = self._target.name
        if facts["system"] != "Linux":
            return Availability(False, f"{host} runs {facts['system']}", "use a machine with Linux"), facts
        if not facts["bash"]:
            return Availability(False, f"bash is not installed on {host}", "apt-get install bash there"), facts
        if facts["fix"]:
            return Availability(False, f"{host}: {facts['detail']}", f"on {host}: {facts['fix']}"), facts
        detail = f"{host}: {facts['detail']}" + ("" if self._walled else ", unsandboxed")
        detail += ", it forwards no sockets: every sandbox takes one of its MaxSessions" if link.relayed else ""
        if self._hardened:
            try:
                hardened.require_nothing(host, facts["lacks"])
            except BackendUnavailable as error:
                return Availability.lacking(error), facts
        self._facts = facts
        better = hardened.advice(facts["lacks"])
        return Availability(True, detail, "", facts["isolation"], facts["limits"], better), facts

    async def _list(self, link: Link) -> list[SandboxInfo]:
        try:
            found = (await (await link.hub()).request("list"))["sandboxes"]
        except LinkLost as error:
            raise BackendUnavailable(f"{error}. Next step: try again") from None
        listed = []
        for entry in found:
            info = SandboxInfo.of(self.name, entry["id"], entry["meta"], f"{self._target.name}: {entry['state']}")
            listed.append(replace(info, orphan=info.orphan or not entry["alive"]))
        return listed

    async def _create(self, link: Link, facts: dict[str, Any], spec: SandboxSpec) -> SshSandbox:
        id = new_id()
        name = sandbox_title(id, spec.labels)
        death: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        link.deaths[id] = death
        try:
            made = await self._start(link, facts, spec, id)

            async def dial() -> Any:
                try:
                    return await link.open(made["socket"])
                except ConnectionRefusedError:
                    await asyncio.wait([death], timeout=0.5)
                    if death.done() or not (await (await link.hub()).request("alive", id=id))["alive"]:
                        raise _cause(death) from None
                    raise

            try:
                connection = await Connection.resumable(dial, name=name, grace=self.grace)
                workdir, env = made["workdir"], made["env"]
                inside = await initialise(connection, spec, workdir=workdir, env=env, grace=self.grace)
            except SandboxLost as error:
                raise BackendError(f"{name} could not be started: {error}") from None
            fields = {"id": id, "workdir": workdir, "python": inside.python}
            written = {path: text.encode("latin-1") for path, text in made["written"].items()}
            await write_inside(ExecutorSandbox(connection, **fields), written)
            sandbox = SshSandbox(connection, link, name=name, **fields)
            if spec.network or not self._walled:
                sandbox.shared_network = "another machine"
            return sandbox
        except BaseException:
            link.deaths.pop(id, None)
            with contextlib.suppress(Exception):  # a sandbox that cannot be ended now ends itself
                await finish(link.end([id], _CLOSE_PATIENCE))
            raise

    async def _start(self, link: Link, facts: dict[str, Any], spec: SandboxSpec, id: str) -> dict[str, Any]:
        request = {
            "id": id,
            "meta": {
                "run_id": spec.labels.get("run_id", ""),
                "task_id": spec.labels.get("task_id", ""),
                "owner": this_owner(),
                "created": time.time(),
            },
            "request": asdict(
                request_of(spec, walled=self._walled, file_systems=facts["file_systems"], mounts=self._mounts)
            ),
            "bwrap": facts.get("bwrap"),
            "lifetime": spec.lifetime + self.grace + _OVERTIME,
        }
        try:
            return await (await link.hub()).request("create", **request)
        except LinkLost:
            await link.end([id], _CLOSE_PATIENCE)  # it may have been made
            return await (await link.hub()).request("create", **request)


def _cause(death: asyncio.Future[dict[str, Any]]) -> SandboxLost:
    """Why a sandbox has ended, as its supervisor reports it."""
    event: dict[str, Any] = death.result() if death.done() else {"code": 0, "log": ""}
    if event["code"]:
        return executor_death(event["code"], event["log"], event["starved"])
    return SandboxLost("its executor has ended" + (f": {event['log']}" if event["log"] else ""))


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

        If that cannot be reached, it returns after some time, and the sandbox ends itself within `grace` seconds.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await finish(self._closing)

    async def _close(self) -> None:
        self._connection.fail(f"{self._name} was closed")
        try:
            with contextlib.suppress(LinkLost, BackendUnavailable):
                await self._link.end([self.id], _CLOSE_PATIENCE)
        finally:
            self._link.deaths.pop(self.id, None)
            self._link.release()
