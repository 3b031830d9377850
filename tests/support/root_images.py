"""Root file systems for sandbox backends, made from this machine's files: no registry, no download.

Files are copied, never linked: a sandbox that can write to its root must not reach the host's programs through it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pluggy

_PROGRAMS = """
bash sh [ awk base64 basename cat chmod chown cmp comm cp cut date dd df diff dirname du echo env expr false find fold
getent grep gunzip gzip head hostname id install join kill less ln ls md5sum mkdir mkfifo mknod mktemp mount mv nice
nl nohup nproc od paste pgrep pkill printenv printf ps pwd readlink realpath rm rmdir sed seq setsid sha256sum shuf
sleep sort split stat stdbuf stty sync tac tail tar tee test timeout touch tr true truncate tty umount uname uniq
unshare wc which whoami xargs yes
"""
_PYTHON_LEFT_OUT = {
    *["test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "distutils", "site-packages"],
    *["dist-packages", "pydoc_data", "lib-dynload"],
}
_PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
)
_GROUP = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n"


def full_root(folder: Path) -> Path:
    """A small Debian-like root in `folder`: bash, coreutils and similar programs, and Python as /usr/bin/python3.

    Takes about a second and 80 MB. An existing folder is left as it is. Returns `folder`.

    Raises:
        RuntimeError: the machine lacks a program that the root needs.
    """
    return _once(folder, _make_full)


def pytest_root(folder: Path) -> Path:
    """`full_root` with the pytest that runs this in /opt/pytest."""

    def make(root: Path) -> None:
        _make_full(root)
        os.chown(root / "home/agent", os.geteuid(), os.getegid())
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:
                continue
            target = root / "opt/pytest" / name
            if found.submodule_search_locations is None:
                shutil.copy(found.origin, target.with_suffix(".py"))
            else:
                shutil.copytree(Path(found.origin).parent, target)  # with its bytecode: a start takes half as long
        for metadata in Path(pluggy.__file__).parent.parent.glob("pluggy-*.dist-info"):
            shutil.copytree(metadata, root / "opt/pytest" / metadata.name)

    return _once(folder, make)


def bare_root(folder: Path) -> Path:
    """A root in `folder` with only a static busybox: neither bash nor Python. Otherwise like `full_root`."""
    return _once(folder, _make_bare)


def root_archive(root: Path) -> bytes:
    """The root as a tar archive, for tools that import one. All but the agent's home belongs to root."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(root, arcname=".", filter=_owned)
        file.seek(0)
        return file.read()


def _owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 1000 if member.name == "./home/agent" else 0
    member.uname = member.gname = ""
    return member


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` fill a folder that becomes `folder` in one step, because several processes may need it at once."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        building.chmod(0o755)
        make(building)
        try:
            building.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _make_full(root: Path) -> None:
    _skeleton(root)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    binaries = []
    for name in _PROGRAMS.split():
        found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if found is None:
            if name in ("bash", "sh", "cat", "grep", "sed", "tar", "ps", "setsid", "stat"):
                raise RuntimeError(f"{name} is not installed here, and a test image without it is of no use")
            continue
        binaries.append(Path(found))
        shutil.copy(found, root / "usr/bin" / name)
    binaries += _copy_python(root)
    for library in _libraries(binaries):
        _copy_library(library, root)
    locale = Path("/usr/lib/locale/C.utf8")
    if locale.is_dir():
        shutil.copytree(locale, root / "usr/lib/locale/C.utf8")
    for name in ("d/dumb", "x/xterm", "x/xterm-256color"):
        for base in ("/usr/share/terminfo", "/usr/lib/terminfo", "/lib/terminfo"):
            source = Path(base) / name
            if source.is_file():
                target = root / "usr/share/terminfo" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
                break


def _make_bare(root: Path) -> None:
    found = next((path for path in ("/bin/busybox", "/usr/bin/busybox") if Path(path).exists()), None)
    if found is None:
        raise RuntimeError("busybox is not installed here (Debian: apt-get install busybox-static)")
    if _libraries([Path(found)]):
        raise RuntimeError(f"{found} is not static (Debian: apt-get install busybox-static)")
    _skeleton(root)
    (root / "bin").mkdir()
    shutil.copy(found, root / "bin/busybox")
    listed = subprocess.run([found, "--list-full"], capture_output=True, text=True, check=True).stdout.split()
    for path in listed:
        applet = root / path
        applet.parent.mkdir(parents=True, exist_ok=True)
        if applet.name != "busybox" and not applet.exists():
            applet.symlink_to("/bin/busybox")


def _skeleton(root: Path) -> None:
    for name in ("dev", "etc", "home/agent", "mnt", "opt", "proc", "root", "run", "sys", "usr/share", "var/lib"):
        (root / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (root / name).mkdir()
        (root / name).chmod(0o1777)
    (root / "root").chmod(0o700)
    if os.geteuid() == 0:
        os.chown(root / "home/agent", 1000, 1000)
    (root / "etc/passwd").write_text(_PASSWD)
    (root / "etc/group").write_text(_GROUP)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (root / "etc/resolv.conf").write_text("")
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")


def _copy_python(root: Path) -> list[Path]:
    """The running interpreter as /usr/bin/python3, which finds its modules by its path. Returns its binaries."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    binary = (Path(sys.base_prefix) / "bin" / version).resolve()
    shutil.copy(binary, root / "usr/bin" / version)
    (root / "usr/bin/python3").symlink_to(version)
    source, target = Path(sysconfig.get_path("stdlib")), root / "usr/lib" / version

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if name in _PYTHON_LEFT_OUT
            or name.startswith("config-")
            or name.endswith((".opt-1.pyc", ".opt-2.pyc"))
            or not os.access(Path(folder) / name, os.R_OK)  # links to nowhere
        }

    shutil.copytree(source, target, ignore=left_out)
    extensions = [path for path in (source / "lib-dynload").glob("*.so") if "test" not in path.name]
    (target / "lib-dynload").mkdir()
    for path in extensions:
        shutil.copy(path, target / "lib-dynload")
    return [binary, *extensions]


def _libraries(binaries: Iterable[Path]) -> list[Path]:
    """Shared libraries that these need, with the dynamic loader, as this machine's loader finds them."""
    listed = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    found = {word for line in listed.splitlines() for word in line.split() if word.startswith("/") and word[-1] != ":"}
    return sorted(map(Path, found))


def _copy_library(library: Path, root: Path) -> None:
    if library.parts[1] in ("lib", "lib64"):
        target = root / "usr" / library.relative_to("/")
    elif library.is_relative_to("/usr/lib") or library.is_relative_to("/usr/lib64"):
        target = root / library.relative_to("/")
    else:  # a Python that was built into a separate folder
        target = root / "usr/lib" / _multiarch() / library.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(library, target)


@cache
def _multiarch() -> str:
    return sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"
