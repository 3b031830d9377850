"""The build context: what .dockerignore leaves of it, and what COPY and ADD take. Both are untrusted: no link leads
out of the context or out of the root, and nothing is read that is not a file, folder or link."""

from __future__ import annotations

import errno
import hashlib
import lzma
import os
import re
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .errors import ImageError, NoSuchContext, refused
from .trees import clear, make_folders, resolve

SPARE = 1 << 29
"""Bytes that a build leaves free on the disk."""

_FOLDERS = "(?:.*?/)??"


def translate(pattern: str) -> re.Pattern[str]:
    """A pattern of Go's `filepath.Match`, with `**` for any number of folders, as a regular expression.

    What is between two stars is an atomic group, so that no pattern takes longer than a square of the path's length:
    an earlier match for it is never worse.
    """
    out, at = "", 0
    star, deep = -1, -1  # positions in `out` of the last `*` in this part of the path, and of the last `**`
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*" and pattern[at : at + 1] == "*":
            at += 1
            slash = pattern[at : at + 1] == "/"
            at += slash
            out = out.removesuffix(_FOLDERS)
            if deep >= 0 and out.endswith("/"):
                out = f"{out[:deep]}(?>{out[deep:]})"
            elif len(out) > deep >= 0 and pattern.count("**") > 2:
                raise ValueError(f"{pattern!r}: with more than two **, each must be a whole part of the path")
            star, deep = -1, len(out)
            out += ".*" if at == len(pattern) else _FOLDERS
        elif char == "*":
            out = out if star < 0 else f"{out[:star]}(?>{out[star:]})"
            star = len(out)
            out += "[^/]*?"
        elif char == "/":
            star = -1
            out += char
        elif char == "?":
            out += "[^/]"
        elif char == "[":
            end = pattern.find("]", at + 1 + (pattern[at : at + 1] == "^"))
            if end < 0:
                raise ValueError(f"{pattern!r}: a bracket is not closed")
            inner = pattern[at:end]
            negated = inner.startswith("^")
            inner = re.sub(r"\\(.)", r"\1", inner[negated:])
            inner = "".join("\\" + each if each in "\\[]^&~|" else each for each in inner)
            out += f"[{'^/' if negated else ''}{inner}]"
            at = end + 1
        elif char == "\\" and at < len(pattern):
            out += re.escape(pattern[at])
            at += 1
        else:
            out += re.escape(char)
    try:
        return re.compile(out + r"\Z", re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r}: {error}") from None


@dataclass(frozen=True)
class Ignore:
    """The rules of a .dockerignore; the last one that matches a path, or a folder above it, decides."""

    rules: tuple[tuple[bool, re.Pattern[str]], ...] = ()

    @classmethod
    def read(cls, text: str) -> Ignore:
        rules = []
        for line in text.removeprefix("\ufeff").split("\n"):
            if line.startswith("#") or not line.strip():
                continue
            pattern = line.strip()
            keep = pattern.startswith("!")
            pattern = os.path.normpath(pattern[keep:].strip()).lstrip("/")
            if pattern not in ("", "."):
                rules.append((keep, translate(pattern)))
        return cls(tuple(rules))

    def excludes(self, path: str) -> bool:
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        excluded = False
        for keep, pattern in self.rules:
            if keep == excluded and any(pattern.match(each) for each in above):
                excluded = not keep
        return excluded


@dataclass(frozen=True)
class Source:
    """A file, folder or link to be copied."""

    place: Path | None
    """In the context; None: the member of an archive, or a folder that it implies."""
    target: str
    """Path in the root, absolute."""
    mode: int
    """With its type, as `os.stat` gives it."""
    content: bytes = b""
    """The target of a link."""
    mtime: float = 0.0
    hard: str = ""
    """For a hard link of an archive: path in the root of the other name."""
    archive: bool = False
    """Whether `place` is a tar file whose members are to be copied."""
    member: IO[bytes] | None = None
    """The content of an archive's file, to be read before the next member."""


class Context:
    """A folder, less what .dockerignore excludes. Raises `ImageError` if it is none."""

    def __init__(self, folder: Path, dockerfile: str) -> None:
        if not folder.is_dir():
            step = "name the folder of the Dockerfile's context"
            raise refused(str(folder), "there is no such folder", step, NoSuchContext)
        self.folder = folder.resolve()
        try:
            self.dockerfile = resolve(self.folder, dockerfile)
            self.text = self._text(self.dockerfile)
            special = resolve(self.folder, f"{dockerfile}.dockerignore")
            place = special if special.is_file() else resolve(self.folder, ".dockerignore")
            self._ignore = Ignore.read(self._text(place)) if place.is_file() else Ignore()
            self.members = dict(self._walk())
            """Path -> what `os.lstat` gives, in order; folders before what is in them."""
        except (OSError, ValueError) as error:
            kind = NoSuchContext if isinstance(error, FileNotFoundError) else ImageError
            raise refused(str(self.folder / dockerfile), f"it cannot be read: {error}", "correct it", kind) from error

    @staticmethod
    def _text(path: Path) -> str:
        if not path.is_file():
            raise FileNotFoundError("there is no such file")
        return path.read_text(encoding="utf-8", errors="surrogateescape")

    def _walk(self) -> Iterator[tuple[str, os.stat_result]]:
        pending = [""]
        while pending:
            below = pending.pop()
            with os.scandir(self.folder / below) as entries:
                found = sorted(entries, key=lambda entry: entry.name, reverse=True)
            for entry in found:
                path = f"{below}/{entry.name}".lstrip("/")
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder:
                    pending.append(path)  # a later rule may keep something below
                if not self._ignore.excludes(path):
                    yield path, entry.stat(follow_symlinks=False)

    def archive(self, file: IO[bytes]) -> None:
        """Write the context with its Dockerfile as a tar file, for an engine."""
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            wanted = {*self.members, self.dockerfile.relative_to(self.folder).as_posix()}
            for path in sorted(wanted):
                tar.add(self.folder / path, path, recursive=False)

    def matches(self, pattern: str) -> list[str]:
        """Members that the source of a COPY names, `""` for the context itself; links are followed inside it."""
        wild = any(char in pattern for char in "*?[")
        if wild:
            compiled = translate(os.path.normpath("/" + pattern).lstrip("/"))
            return sorted(path for path in self.members if compiled.match(path))
        place = resolve(self.folder, pattern)
        path = place.relative_to(self.folder).as_posix()
        if path == ".":
            return [""]
        below = place.is_dir() and any(each.startswith(path + "/") for each in self.members)
        return [path] if path in self.members or below else []

    def sources(self, patterns: Sequence[str], target: str, root: Path, workdir: str, *, unpack: bool) -> list[Source]:
        """What a COPY writes, or an ADD with `unpack`. Raises `ValueError` with the reason why it cannot."""
        found = []
        for pattern in patterns:
            matched = self.matches(pattern)
            if not matched:
                raise ValueError(f"there is no {pattern!r} in the context, or .dockerignore excludes it")
            found += matched
        slash = target.endswith(("/", "/.")) or target in (".", "..")
        target = os.path.normpath(os.path.join(workdir, target)).replace("//", "/")
        if len(found) > 1 and not slash:
            raise ValueError(f"several sources need a folder as the destination: {target}/")
        slash = slash or target == "/" or resolve(root, target).is_dir()
        base = target.rstrip("/")
        result: list[Source] = []
        for path in found:
            place = resolve(self.folder, path)
            if place.is_dir():
                inner = place.relative_to(self.folder).as_posix()
                prefix = "" if inner == "." else inner + "/"
                result.append(Source(place, target, stat.S_IFDIR | 0o755))
                for each, facts in self.members.items():
                    if each.startswith(prefix):
                        result.append(self._source(each, f"{base}/{each[len(prefix) :]}", facts))
                continue
            if unpack and place.is_file() and tarfile.is_tarfile(place):
                result.append(Source(place, target, stat.S_IFDIR | 0o755, archive=True))
                continue
            inner = place.relative_to(self.folder).as_posix()
            if inner not in self.members:
                raise ValueError(f"{path!r} is a broken link, or .dockerignore excludes its target")
            name = f"{base}/{os.path.basename(path)}" if slash else target
            name = "/" + resolve(root, name).relative_to(root).as_posix()
            result.append(self._source(inner, name, self.members[inner]))
        return result

    def _source(self, path: str, target: str, facts: os.stat_result) -> Source:
        place = self.folder / path
        if stat.S_ISLNK(facts.st_mode):
            return Source(place, target, facts.st_mode, os.fsencode(place.readlink()), facts.st_mtime)
        if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
            raise ValueError(f"{path} is not a file, folder or link")
        return Source(place, target, facts.st_mode, b"", facts.st_mtime)


def unpacked(archive: Path, target: str) -> Iterator[Source]:
    """The members of a tar file, plain or compressed."""
    base = target.rstrip("/")
    yield Source(None, target, stat.S_IFDIR | 0o755)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = os.path.normpath("/" + member.name).replace("//", "/")
                place, time = (base + name).rstrip("/") or "/", float(member.mtime)
                if member.isdir():
                    yield Source(None, place, stat.S_IFDIR | member.mode & 0o7777, mtime=time)
                elif member.issym():
                    yield Source(None, place, stat.S_IFLNK | 0o777, os.fsencode(member.linkname), time)
                elif member.islnk():
                    other = base + os.path.normpath("/" + member.linkname).replace("//", "/")
                    yield Source(None, place, stat.S_IFREG | member.mode & 0o7777, hard=other)
                elif member.isreg():
                    data = tar.extractfile(member)
                    yield Source(None, place, stat.S_IFREG | member.mode & 0o7777, mtime=time, member=data)
                else:
                    raise ValueError(f"{archive.name}: {member.name} is not a file, folder or link")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{archive.name} cannot be unpacked: {error}") from error


def digest(sources: Sequence[Source]) -> str:
    """Identifies what `write` would write; times do not count."""
    found = hashlib.sha256()
    for each in sources:
        head = f"{each.target}\0{each.mode:o}\0{each.archive}\0".encode(errors="surrogateescape")
        found.update(head + hashlib.sha256(each.content).digest())
        if each.place is not None and (each.archive or stat.S_ISREG(each.mode)):
            with each.place.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _copy(source: IO[bytes], place: Path) -> None:
    with source, place.open("xb") as copy:
        while block := source.read(1 << 20):
            if shutil.disk_usage(place.parent).free < SPARE:  # an archive can hold more than any disk
                raise OSError(errno.ENOSPC, "fewer than 512 MiB are left on the disk")
            copy.write(block)


def write(sources: Iterable[Source], root: Path, mode: int | None) -> None:
    """Write into a root that no process uses. `mode`: permissions of files and folders, instead of their own.

    Raises:
        OSError: it cannot be written; a folder and a file have the same name.
    """
    for each in sources:
        if each.archive and each.place is not None:
            write(unpacked(each.place, each.target), root, mode)
            continue
        permissions = stat.S_IMODE(each.mode) if mode is None else mode
        if stat.S_ISDIR(each.mode):
            new = not resolve(root, each.target).is_dir()
            place = make_folders(root, each.target)
            if new or each.mtime:
                place.chmod(permissions)
            continue
        folder = make_folders(root, os.path.dirname(each.target))
        place = folder / os.path.basename(each.target)
        if place.is_dir() and not place.is_symlink():
            raise IsADirectoryError(f"{each.target} is a folder already")
        clear(place)
        if stat.S_ISLNK(each.mode):
            os.symlink(each.content, os.fsencode(place))
            continue
        if each.hard:
            os.link(resolve(root, each.hard, last=False), place, follow_symlinks=False)
            continue
        if each.place is not None:
            descriptor = os.open(each.place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            _copy(os.fdopen(descriptor, "rb"), place)
        elif each.member is not None:
            _copy(each.member, place)
        place.chmod(permissions)
        os.utime(place, (each.mtime, each.mtime))
