"""Images for Apptainer: every image becomes a root folder, once.

A folder starts in a tenth of a second for every user. A SIF file would have to be mounted by root or FUSE, or unpacked
for each sandbox.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from backends.errors import BackendError, ImageUnavailable
from backends.host.folders import cached

Progress = Callable[[str], None]
_LOG = logging.getLogger(__name__)
_REFERENCE = re.compile(r"(?:docker|docker-daemon|docker-archive|library|oci|oci-archive|oras|shub|https?):")
_LEVEL = re.compile(r"^(?:INFO|WARNING|ERROR|FATAL):\s+")
_REFUSED = re.compile(r"unknown|not.found|no such|unauthorized|denied|forbidden", re.IGNORECASE)
"""Errors of registries that come again at the next attempt."""
# When its owner ends, its standard input ends as well: then no process waits for the image any more.
_GUARDED = """
exec 3<&0 </dev/null
"$@" 3<&- &
build=$!
(read -r _ <&3; kill -s KILL 0) >/dev/null 2>&1 &
exec 3<&-
wait "$build"
"""


class Images:
    """Root folders by name. Folders that had to be made are in the user's cache (`folders.cached`)."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress or _LOG.info
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}

    def folder(self, command: Sequence[str], image: str) -> Path:
        """The root folder of `image`: a folder, a SIF file or a reference; pulled or unpacked when it is new.

        `command` runs Apptainer. A reference is pulled once, even if its tag is moved later. May block for minutes.

        Raises:
            ImageUnavailable: there is nothing of that name.
            BackendError: it could not be pulled or unpacked.
        """
        if _REFERENCE.match(image):
            return self._made(command, image, image)
        path = Path(image).absolute()
        if path.is_dir():
            return path
        if not path.is_file():
            raise ImageUnavailable(
                f"there is no image {image!r}: neither a folder nor a file. Next step: name one that exists, or a "
                "reference like docker://debian:12"
            )
        facts = path.stat()
        return self._made(command, str(path), f"{path} {facts.st_size} {facts.st_mtime_ns}")

    def _made(self, command: Sequence[str], source: str, version: str) -> Path:
        with self._lock:
            busy = self._busy.setdefault(version, threading.Lock())
        with busy:  # one of many sandboxes pulls, the others wait
            name = f"image-{hashlib.sha256(version.encode()).hexdigest()[:20]}"
            return cached(name, lambda folder: self._build(command, source, folder / "root")) / "root"

    def _build(self, command: Sequence[str], source: str, target: Path) -> None:
        # As a plain user, so that all files belong to this user: those of others could not be changed.
        argv = [*command, "--nocolor", "build", "--fix-perms", "--sandbox", str(target), source]
        said: collections.deque[str] = collections.deque(maxlen=5)
        try:
            with subprocess.Popen(
                ["/bin/sh", "-c", _GUARDED, "sh", *argv],
                env=_environment(),
                start_new_session=True,  # it ends by a signal to its group
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            ) as process:
                assert process.stderr is not None
                for line in process.stderr:
                    if line.startswith("FATAL"):
                        said.clear()
                    text = _LEVEL.sub("", line.strip())
                    if text:
                        said.append(text)
                        self._progress(f"{source}: {text}")
        except OSError as error:
            raise BackendError(f"the image {source!r} cannot be made: {error}") from error
        if process.returncode != 0:
            reason = "; ".join(said)[:1000].rstrip(": ") or f"exit code {process.returncode}"
            refused = _REFUSED.search(reason) and "no such host" not in reason
            raise (ImageUnavailable if refused else BackendError)(
                f"the image {source!r} cannot be made: {reason}. Next step: check its name, the network, and for a "
                "private registry `apptainer registry login`; or pull it elsewhere and name the file"
            )


def _environment() -> dict[str, str]:
    """The user's variables, with proxies and logins. As a plain user, Apptainer looks for settings in another home."""
    settings = {f"{name}_CONFIGDIR": str(Path.home() / f".{name.lower()}") for name in ("APPTAINER", "SINGULARITY")}
    return {**settings, **os.environ}
