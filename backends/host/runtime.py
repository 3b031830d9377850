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
import json
import os
import pkgutil
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from backends import executor_code
from backends.base import BackendUnavailable
from backends.first_use import in_turn

from . import elf
from .folders import SHORTAGES, cached

RUNTIME = "/run/lachesis"
"""The folder's place inside. Its programs work nowhere else."""
_PYTHON, _BASH, _EXECUTOR = "bin/python3", "bin/bash", "executor.pyc"
_SHELL = "shell/bash"
"""A link to bash, alone in its folder: that may be in PATH, where the Python must not be found."""
_LIBRARIES, _BASH_LIBRARIES = "lib", "lib/bash"

# Lists the files of all modules and libraries that the executor needs. The C library loads libgcc_s when a thread ends.
_PROBE = """
import importlib, json, os, sys, types
for name in sys.argv[1:]:
    importlib.import_module(name)
try:
    import ctypes
    ctypes.CDLL("libgcc_s.so.1")
except OSError:
    pass
modules = {}
for key, module in list(sys.modules.items()):
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    if isinstance(module, types.ModuleType) and spec is not None and file:
        for name in {key, spec.name, module.__name__}:  # collections.abc is _collections_abc in some versions
            parent = sys.modules.get(name.rpartition(".")[0])
            if parent is None or hasattr(parent, "__path__"):
                modules[name] = [os.path.abspath(file), hasattr(module, "__path__")]
with open("/proc/self/maps") as maps:
    mapped = maps.read()
library = os.path.join(getattr(sys, "platlibdir", "lib"), os.path.basename(os.path.dirname(os.__file__)))
print(json.dumps({"modules": modules, "maps": mapped, "library": library}))
"""
_ALWAYS = ("__future__", "encodings.utf_8", "encodings.ascii", "encodings.latin_1")
"""Modules that Python loads although the executor does not import them."""
_BASH_PROBE = 'while read -r line; do echo "$line"; done </proc/$$/maps'
# Files of the image from which the loader, the C library and bash would take code, or data that leads to code: a list
# of libraries to load; locales, which name a character set; modules that convert character sets; translations, which
# are formats of printf; libraries that find users. The replacements have the same length. The folder has the locale
# C.UTF-8, which not every C library has built in; of the other files there are none.
_NOWHERE = "/run/lachesis/none"
_LOCALES, _OWN_LOCALES = "/usr/lib/locale", "/run/lachesis/l"
_OUTSIDE = re.compile(rb"/etc/ld\.so\.preload|/etc/nsswitch\.conf|/usr/share/locale|/usr/lib[a-z0-9_/-]*/gconv")


def runtime_command(*arguments: str) -> list[str]:
    """The command line that starts the executor inside; `arguments` are those of the executor.

    The environment must not have `LD_PRELOAD`. The executor uses the image's bash if there is one, but not for
    commands that must not depend on what the agent can write (`fresh`).
    """
    python = [f"{RUNTIME}/{_PYTHON}", "-I", "-S", "-B", "-X", "utf8"]
    return [*python, f"{RUNTIME}/{_EXECUTOR}", "--bash", f"{RUNTIME}/{_SHELL}", *arguments]


def portable_runtime() -> Path:
    """The folder on this machine, to be bound to `RUNTIME`; every user can read it.

    The first call for a version takes about a second. Any number of processes may call it at once.

    Raises:
        BackendUnavailable: this machine's Python or bash cannot be copied.
    """
    python, bash = _interpreter(), _bash()
    return cached("runtime-" + _digest(python, bash), lambda folder: _make(folder, python, bash))


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
    own_code = [pkgutil.get_data(__package__, name) or b"" for name in ("runtime.py", "elf.py")]
    return hashlib.sha256(b"".join([sys.version.encode(), *own_code, executor_code.source()]))


def _make(folder: Path, python: Path, bash: Path) -> None:
    _fill(folder, python, bash)
    _try(folder)
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" or ".so" in path.name else 0o644)


def _modules() -> list[str]:
    return [*_ALWAYS, *executor_code.modules()]


def _run(command: list[str], what: str | Path) -> str:
    # The environment is empty: this process may have a PYTHONHOME or an LD_LIBRARY_PATH.
    try:
        done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise  # it says nothing about the program
        raise _not_portable(what, error) from error
    if done.returncode != 0:
        reason = done.stderr.strip().replace("\n", "; ") or f"exit code {done.returncode}"
        raise _not_portable(what, reason)
    return done.stdout


def _mapped(maps: str) -> list[Path]:
    """The files in the text of a /proc/PID/maps, by address."""
    paths = (line.split(None, 5)[5:] for line in maps.splitlines())
    return [Path(path) for path in dict.fromkeys(found[0] for found in paths if found) if path.startswith("/")]


def _fill(folder: Path, python: Path, bash: Path) -> None:
    probe = [str(python), "-I", "-S", "-B", "-X", "utf8", "-c", _PROBE, *_modules()]
    found: dict[str, Any] = json.loads(_run(probe, python))
    library = folder / found["library"]
    dynamic = library / "lib-dynload"  # Python expects it, even if it is empty
    for name in ("bin", _LIBRARIES, _BASH_LIBRARIES):
        (folder / name).mkdir(parents=True, exist_ok=True)
    dynamic.mkdir(parents=True)
    extensions = set()
    for name, (file, is_package) in found["modules"].items():
        path = Path(file)
        if path.suffix == ".py" and path.is_file():
            place = library.joinpath(*name.split("."))
            place = place / "__init__.pyc" if is_package else place.with_name(place.name + ".pyc")
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(file, str(place), f"{name}.py", doraise=True, invalidation_mode=mode)
        elif ".so" in path.suffixes and "." not in name:
            extensions.add(path.resolve())
            (dynamic / path.name).write_bytes(_read(path).library())
        else:
            raise _not_portable(python, f"its module {name} is {file}, which is not a file of a standard installation")
    mapped = [path for path in _mapped(found["maps"]) if path.resolve() not in extensions]
    placed: dict[str, Path] = {}
    _place(folder, python, _PYTHON, mapped, [_LIBRARIES], placed)
    maps = _run([str(bash), "--norc", "--noprofile", "-c", _BASH_PROBE], bash)
    _place(folder, bash, _BASH, _mapped(maps), [_BASH_LIBRARIES, _LIBRARIES], placed)
    (folder / _EXECUTOR).write_bytes(executor_code.bytecode())
    for name in ("C.utf8", "C.UTF-8"):
        if Path(_LOCALES, name).is_dir():
            shutil.copytree(Path(_LOCALES, name), folder / os.path.relpath(_OWN_LOCALES, RUNTIME) / name)
    shell = folder / _SHELL
    shell.parent.mkdir()
    shell.symlink_to(os.path.relpath(folder / _BASH, shell.parent))


def _place(
    folder: Path, program: Path, name: str, mapped: list[Path], libraries: list[str], placed: dict[str, Path]
) -> None:
    """Copy a program as `name`, with its loader and libraries.

    They are in the last of `libraries`, which programs share; the first is for what has the name of another file there.
    `placed` has the files of the last, by name. The loader searches a folder with 20 system calls at each start.
    """
    linked = _read(program)
    asked = Path(linked.interpreter or "")
    loader = asked.resolve()
    if loader.name.startswith(("ld-musl", "libc.musl")):
        raise _not_portable(program, "it is made for the C library musl")
    places = {asked.name: loader}
    for path in mapped:
        if path not in (program, loader) and _is_elf(path):
            places[_read(path).soname or path.name] = path
    for soname, path in places.items():
        if placed.get(soname) == path:
            continue
        data = path.read_bytes() if path == loader else _read(path).library()
        place = libraries[0] if soname in placed else libraries[-1]
        (folder / place / soname).write_bytes(_inward(data))
        placed.setdefault(soname, path)
    libraries = [library for library in libraries if any((folder / library).glob("*.so*"))]
    home = libraries[0] if (folder / libraries[0] / asked.name).exists() else libraries[-1]
    try:
        data = linked.program(
            interpreter=f"{RUNTIME}/{home}/{asked.name}",
            library_path=":".join(f"{RUNTIME}/{library}" for library in libraries),
        )
    except elf.NotPortable as error:
        raise _not_portable(program, error) from error
    (folder / name).write_bytes(_inward(data))


def _inward(data: bytes) -> bytes:
    """A program or library that looks for no code outside the folder."""
    data = data.replace(_LOCALES.encode(), _OWN_LOCALES.encode())
    return _OUTSIDE.sub(lambda found: _NOWHERE.encode()[: len(found[0])].ljust(len(found[0]), b"-"), data)


def _read(path: Path) -> elf.Elf:
    try:
        return elf.Elf(path.read_bytes())
    except elf.NotPortable as error:
        raise _not_portable(path, error) from error


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"  # the C library also maps its locales


def _not_portable(what: str | Path, reason: object) -> BackendUnavailable:
    return BackendUnavailable(
        f"{what} cannot be copied into sandboxes: {reason}. Next step: use a Python that is linked dynamically "
        "against glibc (Debian's, pyenv's), or a backend that runs the image's Python"
    )


def _try(folder: Path) -> None:
    """Run both programs from the folder by their loaders, and check that they load nothing from outside."""
    for name, libraries, arguments in (
        (_PYTHON, [_LIBRARIES], ["-I", "-S", "-B", "-c", _PROBE, *_modules()]),
        (_BASH, [_BASH_LIBRARIES, _LIBRARIES], ["--norc", "--noprofile", "-c", _BASH_PROBE]),
    ):
        program = folder / name
        interpreter = elf.Elf(program.read_bytes()).interpreter or ""
        loader = folder / os.path.relpath(interpreter, RUNTIME)
        loader.chmod(0o755)
        program.chmod(0o755)
        path = ":".join(str(folder / library) for library in libraries)
        output = _run(
            [str(loader), "--library-path", path, str(program), *arguments], f"{name} of the portable runtime"
        )
        maps = json.loads(output)["maps"] if name == _PYTHON else output
        outside = [file for file in _mapped(maps) if folder.resolve() not in file.parents]
        outside = [file for file in outside if _is_elf(file)]
        if outside:
            raise BackendUnavailable(f"{name} of the portable runtime needs {outside[0]} of this machine")
