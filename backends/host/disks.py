"""The disks of sandboxes as the owner holds them: by descriptors of mounts that are attached nowhere.

A sandbox writes on its own disk, over layers that nobody writes to any more. A checkpoint makes the own disk a layer.
Whoever holds a layer keeps it in memory; with the last descriptor, or with this process, it is gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from backends.base import SandboxCheckpoint
from backends.errors import BackendError, SandboxLost
from backends.spec import SandboxSpec

Change = Callable[[Sequence["DiskLayer"], Sequence[int]], "DiskLayer"]
Another = Callable[[SandboxSpec, tuple["DiskLayer", ...]], Coroutine[Any, Any, Any]]
_DEEPEST = 100
"""Layers below a disk: the kernel takes their names in one page."""


class Descriptor:
    """A descriptor that is closed with its last holder."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_inheritable(fd, False)

    def __del__(self) -> None:
        os.close(self.fd)


class DiskLayer(Descriptor):
    """A disk that has been mounted."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._new = self._facts()

    def _facts(self) -> list[tuple[str, int, list[str]]]:
        facts = []
        for name in sorted(os.listdir(f"/proc/self/fd/{self.fd}")):
            if name.startswith(("root", "shm", "upper")):
                folder = f"/proc/self/fd/{self.fd}/{name}"
                facts.append((name, os.stat(folder).st_ctime_ns, os.listdir(folder)))
        return facts

    @property
    def untouched(self) -> bool:
        """Whether nothing was written since it was mounted over layers: a change makes an entry in its folders."""
        return not any(entries for _, _, entries in self._new) and self._facts() == self._new


class SandboxDisk:
    """The disk of a running sandbox."""

    def __init__(
        self,
        own: DiskLayer,
        namespaces: Sequence[Descriptor],
        below: tuple[DiskLayer, ...],
        change: Change,
        another: Another,
    ) -> None:
        """
        Args:
            namespaces: the sandbox' mount and IPC namespaces.
            change: makes a new disk over layers for some of these; without any, a copy of the first layer.
            another: makes another sandbox, over layers.
        """
        self.below = below
        self._held: tuple[DiskLayer, Sequence[Descriptor], Change, Another] | None = (own, namespaces, change, another)

    @property
    def own(self) -> DiskLayer:
        """What it writes on. Raises `SandboxLost` when it has ended."""
        return self._require()[0]

    @property
    def untouched(self) -> bool:
        """Whether nothing was written since there are layers below."""
        return bool(self.below) and self.own.untouched

    @property
    def another(self) -> Another:
        return self._require()[3]

    def copied(self) -> DiskLayer:
        """A copy of what it writes on, as a layer. Blocks."""
        return self._require()[2]((self.own,), [])

    def move(self, layers: tuple[DiskLayer, ...], *, back: bool = False) -> None:
        """Go on over `layers`; with `back` also without the message queues, which are in no checkpoint. Blocks."""
        _, namespaces, change, another = self._require()
        entered = [each.fd for each in (namespaces if back else namespaces[:1])]
        self._held, self.below = (change(layers, entered), namespaces, change, another), layers

    def end(self) -> None:
        """Let go of all: a descriptor would keep the files in memory."""
        self._held, self.below = None, ()

    def _require(self) -> tuple[DiskLayer, Sequence[Descriptor], Change, Another]:
        if self._held is None:
            raise SandboxLost("the sandbox has ended")
        return self._held


@dataclass(frozen=True, slots=True, eq=False)
class HostCheckpoint(SandboxCheckpoint):
    layers: tuple[DiskLayer, ...] = ()
    state: bytes = b""
    """The folder and the variables of the shell, as the executor has given them."""


def receive(keeper: socket.socket) -> tuple[DiskLayer, list[Descriptor]]:
    """What `starting.send_disk` has sent: the disk, its user namespace, and those of the sandbox.

    Raises:
        BackendError: nothing came.
    """
    keeper.setblocking(False)
    try:
        _, fds, _, _ = socket.recv_fds(keeper, 16, 4)
    except BlockingIOError:
        fds = []
    if len(fds) < 2:
        for fd in fds:
            os.close(fd)
        raise BackendError("the disk of a sandbox did not arrive: this process has too many open files")
    return DiskLayer(fds[0]), [*map(Descriptor, fds[1:])]


def require_room(layers: Sequence[DiskLayer]) -> None:
    """
    Raises:
        BackendError: there are too many layers.
    """
    if len(layers) > _DEEPEST:
        raise BackendError(
            f"{len(layers)} checkpoints lie over each other, and {_DEEPEST} can. Next step: make fewer, or fork "
            "from an earlier one"
        )
