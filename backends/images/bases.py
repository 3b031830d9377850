"""What FROM becomes: a table of names, each with a Debian root that debootstrap makes once, or a folder of the user's.

The table of the user is `$LACHESIS_BASES`, or `~/.config/lachesis/bases.toml`: a pattern of names on the left, on the
right a root folder, a tar file of one, or another name.

    "python:3.12*" = "/srv/roots/python3.12"
    "registry.example/base:*" = "debian:12"
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.errors import BackendError
from backends.host import package_settings
from backends.host.bubblewrap import system_folders

from . import store, walls
from .context import unpacked, write
from .dockerfile import Instruction
from .errors import refused
from .trees import clear

_SUITES = {
    "bullseye": ("11", "3.9"),
    "bookworm": ("12", "3.11"),
    "trixie": ("13", "3.13"),
}
"""Suite of Debian -> its number, and the version of its Python."""
_UBUNTU = {"20.04": "bullseye", "focal": "bullseye", "22.04": "bookworm", "jammy": "bookworm"}
"""Releases of Ubuntu -> the suite of Debian of about the same age; others, and none, have the newest."""
_NEWEST = "trixie"
_TERMINAL_BENCH = re.compile(r"ghcr\.io/laude-institute/t-bench/(ubuntu|python)-(\d+)-(\d+)(:[\w.-]+)?")
"""Its own bases are these, with tmux and asciinema, which no task asks for; the latter brings Ubuntu a Python."""
_PYTHON = ("python3", "python3-pip", "python3-venv", "python3-dev")
_CURL = ("curl", "gnupg", "netbase", "tzdata", "wget")
_SCM = (*_CURL, "git", "mercurial", "openssh-client", "procps", "subversion")
_BUILDPACK = {
    "curl": _CURL,
    "scm": _SCM,
    "": (
        *_SCM,
        *("autoconf", "automake", "bzip2", "default-libmysqlclient-dev", "dpkg-dev", "file", "g++", "gcc"),
        *("libbz2-dev", "libc6-dev", "libcurl4-openssl-dev", "libdb-dev", "libevent-dev", "libffi-dev"),
        *("libgdbm-dev", "libglib2.0-dev", "libgmp-dev", "libjpeg-dev", "libkrb5-dev", "liblzma-dev"),
        *("libmaxminddb-dev", "libncurses-dev", "libpng-dev", "libpq-dev"),
        *("libreadline-dev", "libsqlite3-dev", "libssl-dev", "libtool", "libwebp-dev", "libxml2-dev", "libxslt1-dev"),
        *("libyaml-dev", "make", "patch", "unzip", "xz-utils", "zlib1g-dev"),
    ),
}
"""By the end of its tag, what buildpack-deps puts on Debian, but ImageMagick: debootstrap cannot order its packages."""
_VERSION = "1"
"""To be raised when a root is made otherwise: it is part of the key."""
_MIRROR = "http://deb.debian.org/debian"
_FINISH = """
set -e
cd /target
rm -rf etc/resolv.conf etc/hostname var/lib/apt/lists/* var/cache/apt/archives/*.deb var/log/*.log var/log/apt/*
printf '#!/bin/sh\\nexit 101\\n' >usr/sbin/policy-rc.d
chmod 755 usr/sbin/policy-rc.d
echo force-unsafe-io >etc/dpkg/dpkg.cfg.d/docker-apt-speedup
echo 'Acquire::Languages "none";' >etc/apt/apt.conf.d/docker-no-languages
rm -f usr/lib/python3*/EXTERNALLY-MANAGED
if test -e usr/bin/python3; then
  mkdir -p usr/local/bin
  ln -sf /usr/bin/python3 usr/local/bin/python
  ln -sf /usr/bin/python3 usr/local/bin/python3
fi
"""


@dataclass(frozen=True)
class Base:
    suite: str = ""
    """Of Debian."""
    packages: tuple[str, ...] = ()
    folder: Path | None = None
    """A root folder or a tar file, instead of a suite."""
    said: str = ""
    """How it differs from what its name promises."""

    @property
    def key(self) -> str:
        if self.folder is not None:
            return _hashed(*_state(self.folder.resolve()))
        return _hashed(_VERSION, mirror(), self.suite, *self.packages)


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def _state(place: Path) -> Iterator[str]:
    """What changes when somebody changes a file or folder."""
    found = [str(place)]
    for folder, folders, files in os.walk(place):
        folders.sort()
        found += [os.path.join(folder, name) for name in sorted((*folders, *files))]
    for path in found:
        facts = os.lstat(path)
        yield f"{path} {facts.st_mode} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"


def table() -> Mapping[str, str]:
    """The user's table. Raises `ImageError` if it cannot be read."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = Path(os.environ.get("LACHESIS_BASES") or config / "lachesis" / "bases.toml")
    if not path.exists() and "LACHESIS_BASES" not in os.environ:
        return {}
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise refused(str(path), f"the table of bases cannot be read: {error}", "correct it") from error
    wrong = [name for name, value in found.items() if not isinstance(value, str)]
    if wrong:
        raise refused(str(path), f"{wrong[0]!r} is not text", 'write "PATTERN" = "FOLDER, TAR FILE OR NAME"')
    return found


def base_of(name: str, at: Instruction, bases: Mapping[str, str]) -> Base:
    """The base that `name` stands for. Raises `ImageError` for one that the table does not have."""
    step = "name a root folder or another base for it in ~/.config/lachesis/bases.toml, or use a backend with an engine"
    for _ in range(10):
        plain = re.sub(r"^(?:docker\.io/)?(?:library/)?", "", name)
        pattern = next((each for each in bases if fnmatch.fnmatchcase(plain, each)), None)
        value = bases[pattern] if pattern is not None else ""
        if pattern is None:
            break
        if value.startswith(("/", "~")):
            folder = Path(value).expanduser()
            if not folder.exists():
                raise at.refused(f"its base {value} of the table does not exist", "correct the table of bases")
            return Base(folder=folder)
        name = value
    else:
        raise at.refused(f"the table of bases has {name!r} in a circle", "correct it")
    wanted, (plain, _, digest) = plain, plain.partition("@")
    plain = _TERMINAL_BENCH.sub(r"\1:\2.\3", plain)
    if digest and ":" not in plain:
        raise at.refused("a base by digest cannot be made from packages", step)
    image, _, tag = plain.partition(":")
    suites = [suite for suite in _SUITES if suite in tag]
    if image == "debian":
        number = re.match(r"\d+", tag)
        suites += [suite for suite, (each, _) in _SUITES.items() if number and number[0] == each]
        if tag in ("", "latest", "stable", "stable-slim"):
            suites = [_NEWEST]
        if suites and re.fullmatch(r"[a-z]*|\d+(\.\d+)?|[\w.]+-slim|[\w]+-\d{8}(-slim)?", tag):
            said = f"Debian {_SUITES[suites[0]][0]} as its mirror has it now stands in for {wanted}" if digest else ""
            return Base(suites[0], said=said)
    elif image == "ubuntu":
        suite = _UBUNTU.get(tag.partition("-")[0], _NEWEST)
        packages = ("python3",) if _TERMINAL_BENCH.match(wanted) else ()
        return Base(suite, packages, said=f"Debian {_SUITES[suite][0]} ({suite}) stands in for {wanted}")
    elif image == "buildpack-deps":
        kind = next(each for each in _BUILDPACK if tag.endswith(each))
        named = tag.removesuffix(kind).rstrip("-")
        release = {**_UBUNTU, **dict.fromkeys(("", "latest", "stable", "24.04", "noble"), _NEWEST)}.get(named, named)
        if release in _SUITES:
            without = "" if kind else " but ImageMagick"
            made = f"Debian {_SUITES[release][0]} ({release}) with the packages of {image}{without}"
            said = f"{made} stands in for {wanted}"
            return Base(release, _BUILDPACK[kind], said=said)
    elif image == "python":
        match = re.fullmatch(r"(3(?:\.\d+)?)?(?:\.\d+)?(?:latest)?(?:-?slim)?(?:-?(bullseye|bookworm|trixie))?", tag)
        version = (match[1] if match else None) or ("3" if match else tag)
        fitting = [suite for suite, (_, own) in _SUITES.items() if match is not None and version in ("3", own)]
        if fitting:  # the version of Python counts, also where the name has another Debian
            suite = match[2] if match is not None and match[2] in fitting else fitting[-1]
            said = f"Python {_SUITES[suite][1]} of Debian {_SUITES[suite][0]} ({suite}) stands in for {wanted}"
            return Base(suite, _PYTHON, said=said)
        have = ", ".join(python for _, python in _SUITES.values())
        other = f'if another version will do, write "{wanted}" = "python:3.13" into ~/.config/lachesis/bases.toml'
        raise at.refused(f"Debian has no Python for {plain} (its own are {have})", f"{other}; or {step}")
    raise at.refused(f"{name!r} is not in the table of bases", step)


async def have(base: Base, at: Instruction, tell: walls.Tell, timeout: float) -> str:
    """The key of the base's layer, which is made if it is new."""

    async def make(folder: Path) -> None:
        root = folder / "root"
        root.mkdir(mode=0o755)
        if base.folder is None:
            await _bootstrap(base, root, folder, at, tell, timeout)
        elif base.folder.is_dir():
            await asyncio.to_thread(_copied, base.folder, root)
        else:
            await asyncio.to_thread(write, unpacked(base.folder, "/"), root, None)

    key = await asyncio.to_thread(lambda: base.key)
    await store.layer(key, {"parent": "", "instruction": f"FROM {base.folder or base.suite}"}, make)
    return key


def _copied(source: Path, root: Path) -> None:
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", "--no-preserve=ownership", f"{source}/.", str(root)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise OSError(done.stderr.strip()[-500:])


def mirror() -> str:
    """The mirror of Debian that this machine uses."""
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt").glob("sources.list.d/*"))]
    for place in places:
        if place.suffix in (".list", ".sources") and place.is_file():
            text = re.sub(r"(?m)^\s*#.*$", "", place.read_text(errors="replace"))
            match = re.search(r"https?://[^\s@]+/debian(?=/?\s)", text)
            if match:
                return match[0]
    return _MIRROR


def _debootstrap(folder: Path) -> Path:
    """debootstrap's folder: installed on this machine, or a copy that apt fetches."""
    if Path("/usr/sbin/debootstrap").exists():
        return Path("/")
    if shutil.which("apt-get") and shutil.which("dpkg-deb"):
        place = folder / "debootstrap"
        place.mkdir()
        for argv in (["apt-get", "download", "debootstrap"], ["sh", "-c", "dpkg-deb -x debootstrap_*.deb ."]):
            subprocess.run(argv, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)
        if (place / "usr/sbin/debootstrap").exists():
            return place
    raise refused("debootstrap", "it is not installed", "apt-get install debootstrap (or dnf, pacman)")


async def _bootstrap(base: Base, root: Path, folder: Path, at: Instruction, tell: walls.Tell, timeout: float) -> None:
    place = await asyncio.to_thread(_debootstrap, folder)
    settings = (await asyncio.to_thread(package_settings.settings))[0]
    tools = "/run/debootstrap"
    disk = ["--tmpfs", "/", "--bind", str(root), "/target"]
    for each in system_folders():
        disk += ["--ro-bind", each, each]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            disk += ["--symlink", os.readlink(name), name]
    for name in ("/etc/alternatives", "/etc/ssl/certs", "/etc/ld.so.cache", "/etc/dpkg", "/etc/nsswitch.conf"):
        disk += ["--ro-bind-try", name, name]
    disk += ["--ro-bind", str(place / "usr/share/debootstrap"), tools, "--tmpfs", "/tmp", "--dir", "/root"]
    more = ["--proc", "/target/proc", "--tmpfs", "/target/dev"]
    for device in ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx"):
        exists = device not in ("tty", "console", "ptmx")
        more += ["--dev-bind", f"/dev/{device if exists else 'null'}", f"/target/dev/{device}"]
    if place != Path("/"):
        disk += ["--ro-bind", str(place / "usr/sbin"), "/run/sbin"]
    program = "/usr/sbin/debootstrap" if place == Path("/") else "/run/sbin/debootstrap"
    packages = ",".join(("ca-certificates", *base.packages))
    argv = [program, "--variant=minbase", f"--include={packages}", base.suite, "/target", mirror()]
    security = mirror() + "-security"
    lines = f"deb {mirror()} {base.suite} main\ndeb {mirror()} {base.suite}-updates main\n"
    lines += f"deb {security} {base.suite}-security main\n"
    script = f"{shlex.join(argv)} && {{ {_FINISH} printf %s {shlex.quote(lines)} >etc/apt/sources.list; }}"
    tell(f"{at.where}: making the root of Debian {base.suite} once, from {mirror()}")
    env = {
        "PATH": walls.PATH,
        "HOME": "/root",
        "DEBOOTSTRAP_DIR": tools,
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
    }
    proxies = {name: value for name, value in settings.items() if name.lower().endswith("_proxy")}
    code, last = await walls.run(
        disk, ["/bin/sh", "-c", script], env={**env, **proxies}, tell=tell, timeout=timeout, more=more
    )
    if code != 0:
        log = root / "debootstrap/debootstrap.log"
        last += log.read_text(errors="replace").splitlines()[-10:] if log.is_file() else []
        raise BackendError(f"{at.where}: debootstrap failed (exit code {code}): " + "; ".join(last[-12:]))
    for each in ("dev", "proc"):
        for left in (root / each).iterdir():
            clear(left)
