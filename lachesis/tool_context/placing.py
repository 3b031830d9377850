"""Writing into a verifier, where an artifact of the agent may stand in the way."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterable

from backends import Sandbox
from backends.errors import INSIDE

_IN_THE_WAY = frozenset((errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENOENT, errno.ENOTEMPTY))
_CLEAR = """set -f; IFS=/
while builtin read -r -d '' kind && builtin read -r -d '' path; do
  at=
  for part in ${path%/*}; do
    [ -z "$part" ] || { at="$at/$part"; [ -d "$at" ] || rm -f -- "$at"; }
  done
  if [ "$kind" = f ]; then [ ! -d "$path" ] || rm -rf -- "$path"; [ -e "$path" ] || rm -f -- "$path"
  else [ -d "$path" ] || rm -f -- "$path"; fi
done"""
"""Removes what is in the place where a folder (d) or a file (f) is to be written; reads pairs of a kind and a path."""


async def placed(
    sandbox: Sandbox, write: Callable[[], Awaitable[None]], wanted: Callable[[], Iterable[tuple[str, str]]]
) -> None:
    """`write` into a verifier. What is in the way is replaced.

    Args:
        wanted: the folders (d) and files (f) that are written, as absolute paths inside.
    """
    try:
        await write()
    except OSError as error:
        if error.errno not in _IN_THE_WAY or INSIDE not in getattr(error, "__notes__", ()):
            raise
        listed = "".join(f"{kind}\0{path}\0" for kind, path in wanted())
        await sandbox.exec(_CLEAR, timeout=60, stdin=listed.encode(errors="surrogateescape"), fresh=True)
        await write()
