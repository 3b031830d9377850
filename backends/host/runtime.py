"""The portable runtime: what the executor needs to run, in one folder that works inside any root file system.

An image needs neither Python nor bash. The folder has this machine's: the running interpreter, its dynamic loader and
libraries, the modules that the executor imports, bash, and the executor. It is bound read-only to `RUNTIME`. Its
programs start without a wrapper, load nothing from outside, and set no variable that a command would inherit. It takes
about 20 MB and is made once for each version of its contents, in the user's cache folder.

The C library's own way (`ld.so --library-path FOLDER PROGRAM`) does not do for bash: each command's shell would be
called `ld-linux-x86-64` in `ps`, would show these arguments, and could not start itself again (`"$BASH" -c ...`).
"""

from __future__ import annotations

import functools
import hashlib
import io
import pkgutil
import shutil
import sys
import tarfile
from pathlib import Path

from backends import executor_code
from backends.errors import BackendUnavailable
from backends.first_use import in_turn

from .folders import cached
from .layout import EXECUTOR, PYTHON, RUNTIME, SHELL


def runtime_command(*arguments: str) -> list[str]:
    """The command line that starts the executor inside; `arguments` are those of the executor.

    The environment must not have `LD_PRELOAD`. The executor uses the image's bash if there is one, but not for
    commands that must not depend on what the agent can write (`fresh`).
    """
    python = [f"{RUNTIME}/{PYTHON}", "-I", "-S", "-B", "-X", "utf8"]
    return [*python, f"{RUNTIME}/{EXECUTOR}", "--bash", f"{RUNTIME}/{SHELL}", *arguments]


def portable_runtime() -> Path:
    """The folder on this machine, to be bound to `RUNTIME`; every user can read it.

    The first call for a version takes about a second. Any number of processes may call it at once.

    Raises:
        BackendUnavailable: this machine's Python or bash cannot be copied.
    """
    python, bash = _interpreter(), _bash()

    def make(folder: Path) -> None:
        from . import copying  # late: it is needed once for each version

        copying.make(folder, python, bash)

    return cached("runtime-" + _digest(python, bash), make)


def archive() -> bytes:
    """The portable runtime as a tar file, to be unpacked at the root of a file system."""
    folder = portable_runtime()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, RUNTIME.lstrip("/"), filter=_impersonal)
    return buffer.getvalue()


def _impersonal(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


def _interpreter() -> Path:
    """The running interpreter; in a virtual environment, its base interpreter."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def _bash() -> Path:
    found = shutil.which("bash") or shutil.which("bash", path="/bin:/usr/bin:/usr/local/bin")
    if found is None:
        raise BackendUnavailable(
            "the portable runtime needs bash on this machine. Next step: install it (package bash)"
        )
    return Path(found).resolve()


def _digest(python: Path, bash: Path) -> str:
    """Identifies a version by facts about its sources that are cheap to read."""
    digest = _sources().copy()
    for path in (python, bash, Path(sys.base_prefix)):
        facts = path.stat()
        size = facts.st_size if path.is_file() else 0
        changed = facts.st_mtime_ns if path.is_file() else 0
        digest.update(f"{path} {size} {changed}\n".encode())
    return digest.hexdigest()[:20]


@in_turn
@functools.lru_cache(maxsize=None)
def _sources() -> hashlib._Hash:
    own_code = [
        pkgutil.get_data(__package__, name) or b"" for name in ("copying.py", "elf.py", "layout.py", "runtime.py")
    ]
    return hashlib.sha256(b"".join([sys.version.encode(), *own_code, executor_code.executor_source()]))
