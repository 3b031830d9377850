"""Workers as actors of Ray: in a cluster of its own, or in that of a trainer.

An actor only starts the worker's process, and holds its standard input: a worker ends with its actor. Ray restarts
none: the pool replaces what is gone, and both of them would make more than are wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from backends.errors import BackendError, BackendUnavailable
from lachesis_pools.engines.engine import WorkerCommand


class _Holder:
    """The actor."""

    def __init__(self, command: Sequence[str], token: str) -> None:
        self._said = tempfile.TemporaryFile()  # a pipe that nobody reads would stop it  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{token}\n".encode())
        self._process.stdin.flush()

    def ended(self) -> str | None:
        """Why the worker has ended; None while it runs."""
        if self._process.poll() is None:
            return None
        self._said.seek(max(0, self._said.seek(0, 2) - 4096))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else f"exit code {self._process.returncode}"

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


class RayEngine:
    """Workers that Ray places."""

    name = "ray"

    def __init__(
        self, worker: WorkerCommand, *, address: str = "", cpus: float = 0.0, namespace: str = "lachesis"
    ) -> None:
        """
        Args:
            address: of the cluster, such as `auto` or `ray://head:10001`. Default: RAY_ADDRESS, or a new one.
            cpus: processors that Ray reserves for each worker.
        """
        self._worker, self._cpus, self._namespace, self._address = worker, cpus, namespace, address
        self._actors: dict[str, Any] = {}
        self._ray: Any = None

    async def _connected(self) -> Any:
        if self._ray is None:
            try:
                import ray
            except ImportError as error:
                raise BackendUnavailable(f"engine 'ray' needs Ray ({error}): pip install 'lachesis-rl[ray]'") from None
            if not ray.is_initialized():
                options = {"address": self._address} if self._address else {}
                await asyncio.to_thread(
                    ray.init, namespace=self._namespace, log_to_driver=False, logging_level="ERROR", **options
                )
            self._ray = ray
        return self._ray

    async def start(self, base: str, count: int) -> str:
        """See `WorkerEngine.start`."""
        ray = await self._connected()
        holder = ray.remote(num_cpus=self._cpus, max_restarts=0)(_Holder)
        for number in range(1, count + 1):
            name = f"{base}.{number}"
            command = [*self._worker.arguments(name), "--end-with-input"]
            make = holder.options(name=name, namespace=self._namespace, lifetime="detached").remote
            try:
                self._actors[name] = await asyncio.to_thread(make, command, self._worker.token)
            except (ray.exceptions.RayError, ValueError, ConnectionError) as error:
                raise BackendError(f"Ray made no actor for worker {name}: {error}") from error
        return str(count)

    async def ended(self, names: Collection[str]) -> Mapping[str, str]:
        """See `WorkerEngine.ended`."""
        ray = await self._connected()
        found = {}
        for name in names:
            if name not in self._actors:
                continue
            try:
                reason = await asyncio.wait_for(self._actors[name].ended.remote(), 5.0)
            except TimeoutError:
                continue
            except ray.exceptions.ActorUnavailableError:  # its node does not answer, for now
                continue
            except ray.exceptions.RayActorError as error:
                reason = str(error).strip().splitlines()[0][:500]
            if reason is not None:
                found[name] = reason
        return found

    async def stop(self, names: Collection[str]) -> None:
        """See `WorkerEngine.stop`."""
        await asyncio.gather(*(self._stop(self._actors.pop(name)) for name in names if name in self._actors))

    async def _stop(self, actor: Any) -> None:
        ray = await self._connected()
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
            await asyncio.wait_for(actor.end.remote(), 40.0)
        await asyncio.to_thread(ray.kill, actor)

    async def reap(self, base: str, note: str) -> None:
        """See `WorkerEngine.reap`."""
        ray = await self._connected()
        for number in range(1, int(note or 0) + 1):
            name = f"{base}.{number}"
            try:
                actor = await asyncio.to_thread(ray.get_actor, name, self._namespace)
            except ValueError:  # there is none
                continue
            self._actors.pop(name, None)
            await self._stop(actor)

    async def close(self) -> None:
        """End all, and leave the cluster."""
        if self._ray is None:
            return
        await self.stop([*self._actors])
        await asyncio.to_thread(self._ray.shutdown)
