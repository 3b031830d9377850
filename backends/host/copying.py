"""The contents of the portable runtime: copies of Python, bash and all that they load, which look nowhere else."""

from __future__ import annotations

import json
import os
import py_compile
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from backends import executor_code
from backends.errors import BackendUnavailable

from . import elf
from .folders import SHORTAGES
from .layout import BASH, EXECUTOR, PYTHON, RUNTIME, SHELL

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
_NOWHERE = "/.lachesis/none"
_LOCALES, _OWN_LOCALES = "/usr/lib/locale", "/.lachesis/loca"
_OUTSIDE = re.compile(rb"/etc/ld\.so\.preload|/etc/nsswitch\.conf|/usr/share/locale|/usr/lib[a-z0-9_/-]*/gconv")


def make(folder: Path, python: Path, bash: Path) -> None:
    """Fill a new folder. Raises `BackendUnavailable`: this Python or bash cannot be copied."""
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
    _place(folder, python, PYTHON, mapped, [_LIBRARIES], placed)
    maps = _run([str(bash), "--norc", "--noprofile", "-c", _BASH_PROBE], bash)
    _place(folder, bash, BASH, _mapped(maps), [_BASH_LIBRARIES, _LIBRARIES], placed)
    (folder / EXECUTOR).write_bytes(executor_code.executor_bytecode())
    for name in ("C.utf8", "C.UTF-8"):
        if Path(_LOCALES, name).is_dir():
            shutil.copytree(Path(_LOCALES, name), folder / os.path.relpath(_OWN_LOCALES, RUNTIME) / name)
    shell = folder / SHELL
    shell.parent.mkdir()
    shell.symlink_to(os.path.relpath(folder / BASH, shell.parent))


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
        (PYTHON, [_LIBRARIES], ["-I", "-S", "-B", "-c", _PROBE, *_modules()]),
        (BASH, [_BASH_LIBRARIES, _LIBRARIES], ["--norc", "--noprofile", "-c", _BASH_PROBE]),
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
        maps = json.loads(output)["maps"] if name == PYTHON else output
        outside = [file for file in _mapped(maps) if folder.resolve() not in file.parents]
        outside = [file for file in outside if _is_elf(file)]
        if outside:
            raise BackendUnavailable(f"{name} of the portable runtime needs {outside[0]} of this machine")
