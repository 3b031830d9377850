"""Brings a root folder to the machine of the backend `ssh`, once for each content."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from backends.base import Backend
from backends.errors import BackendError

from .errors import refused

if TYPE_CHECKING:
    from backends.ssh import SshBackend

# Only the user may enter it: see `store`.
_PROBE = """
umask 077
base="${XDG_CACHE_HOME:-$HOME/.cache}/lachesis/images/layers"
mkdir -p "$base" && chmod 700 "${base%/layers}"
find "$base" -maxdepth 1 -name 'incoming-*' -mmin +1440 -exec rm -rf {} + 2>/dev/null
uname -m
echo "$base/$1"
test -d "$base/$1/root" && touch "$base/$1" && echo there
exit 0
"""
_RECEIVE = """
umask 077
trap 'test -n "$done" || rm -rf "$1"' EXIT
trap 'exit 1' HUP INT TERM PIPE
mkdir -p "$1/root" && tar -x -p --no-same-owner -C "$1/root" -f - && done=1
"""
_KEEP = 'mv -T "$1" "$2" 2>/dev/null || { rm -rf "$1"; test -d "$2/root"; }'


async def brought(root: Path, backend: Backend, machine: str, tell: Callable[[str], None]) -> str:
    """The folder there. Raises `ImageError` if that machine has another architecture than `machine`."""
    ssh = cast("SshBackend", backend)
    lines = (await ssh.run(["sh", "-c", _PROBE, "sh", root.parent.name])).decode().splitlines()
    if len(lines) < 2:
        raise BackendError(f"{backend!r}: its cache folder cannot be made")
    if lines[0] != machine:
        raise refused(repr(backend), f"it is {lines[0]} and images are made for {machine}", "use a machine like this")
    target = lines[1]
    if lines[-1] != "there":
        tell(f"bringing the image to {backend!r}")
        new = f"{os.path.dirname(target)}/incoming-{uuid.uuid4().hex}"
        argv = ["tar", "-C", str(root), "-cf", "-", "."]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as tar:  # noqa: ASYNC220, starting it takes no time
            try:
                await ssh.run(["sh", "-c", _RECEIVE, "sh", new], stdin=tar.stdout)
                if await asyncio.to_thread(tar.wait) != 0:  # a file that cannot be read is left out of the archive
                    await ssh.run(["rm", "-rf", new])
                    raise BackendError(f"tar could not read all files of {root}")
                await ssh.run(["sh", "-c", _KEEP, "sh", new, target])
            finally:
                tar.kill()
    return f"{target}/root"
