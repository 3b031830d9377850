"""A request to a machine, and the process that it starts for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

FIRST_FILE = 20
"""Number of the first descriptor that a started process finds besides its standard ones."""


def numbers(count: int) -> range:
    """The descriptors by which a started process knows the first `count` files that it is given."""
    return range(FIRST_FILE, FIRST_FILE + count)


def memory_file(name: str, content: bytes) -> int:
    """A descriptor of a file in memory, at its beginning."""
    fd = os.memfd_create(name)
    with open(os.dup(fd), "wb") as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def job(
    argv: Sequence[str],
    *,
    groups: int = 0,
    files: int = 0,
    disk: Disk | None = None,
    prepared: Prepared | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What `starting.become` takes, for so many groups and files.

    The spawner adds: `layers`, how many sealed disks lie below the new one; `users`, whether a user namespace is given,
    in which the disk is mounted; `keeps`, whether a socket is given, to which the mounted disk is sent; `moved`, that
    a sandbox gets the disk as its new root, in place of running a program (see `rooting.move_root`).
    """
    described = {"disk": disk and vars(disk), "prepared": prepared and vars(prepared), "env": dict(env or {})}
    given = {"layers": 0, "users": False, "keeps": False, "moved": 0}
    return {"argv": list(argv), "groups": groups, "files": list(numbers(files)), **described, **given}


@dataclass(frozen=True)
class Request:
    """The fields of a `SandboxSpec` that the machine enforces, as they travel to far machines."""

    walled: bool = True
    """Whether bubblewrap isolates it. Otherwise commands run as the user who makes it."""
    disk_bytes: int = 1 << 30
    """Size of each of its file systems in memory."""
    image: str | None = None
    workdir: str | None = None
    root: bool = False
    """Whether its user is 0 inside, without a capability, and not 1000."""
    network: bool = False
    cpus: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    mounts: Sequence[str] = ()
    """Files and folders of the machine that can be read inside under the same path."""


@dataclass(frozen=True)
class Disk:
    """A tmpfs of bounded size that only the started process and its descendants see."""

    mount: str
    """An existing folder of the machine."""
    size: int
    """Bytes of everything in it together."""
    folders: Sequence[tuple[str, int]] = ()
    """Folders to make in it, with their modes; parents first."""
    overlays: Sequence[tuple[str, str]] = ()
    """`(folder of the machine, folder of the disk)`: the former appears at the latter; changes are kept on the disk."""
    copied: Sequence[tuple[str, str]] = ()
    """`(file or folder of the machine, place on the disk)`: what there is of the former can be read at the latter, with
    inodes of its own."""


@dataclass(frozen=True)
class Prepared:
    """A program that the helper has loaded already. A fork of it enters the sandbox that the command makes, whose own
    program writes a line, and then waits for the end of its input."""

    code: str
    """Path of the program's .pyc; empty: only try whether a process can enter."""
    arguments: Sequence[str] = ()
    """Its `sys.argv`."""
    processes: int | None = None
    """RLIMIT_NPROC."""
    root: bool = False
    """`Request.root`."""
    kept: int = 0
    """How many of the files that the process gets are for the program. The command gets all."""


@dataclass(frozen=True)
class Plan:
    """A process to start, and the settings of its executor."""

    command: Sequence[str]
    workdir: str
    env: Mapping[str, str]
    """Variables of commands. The process itself starts with `own_env`."""
    own_env: Mapping[str, str] = field(default_factory=dict)
    contents: Sequence[bytes] = ()
    """Files in memory that the process gets as the descriptors `numbers`, after those that the caller passes first."""
    disk: Disk | None = None
    prepared: Prepared | None = None
    written: Mapping[str, bytes] = field(default_factory=dict)
    """Files to write inside once it runs; failures do not matter."""
