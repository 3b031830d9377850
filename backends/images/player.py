"""Plays a Dockerfile into a root folder, one layer an instruction, without an engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from backends.errors import BackendError, BackendUnavailable
from backends.host import package_settings
from backends.host.folders import inside

from . import bases, store, walls
from .context import Context, digest, write
from .dockerfile import Dockerfile, Instruction, expand, pairs, parse, split
from .errors import ImageError
from .trees import apply, clear, clone, make_folders, resolve

_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_PLATFORM = f"linux/{_ARCHITECTURE}"
_BASE = 1800.0
"""Seconds for a base that is made for the first time."""
_REMOTE = re.compile(r"(?:https?|ftp|git|ssh)://|git@|.*\.git(?:#|$)")


@dataclass
class State:
    """The settings of the instructions so far."""

    key: str = ""
    """Of the newest layer."""
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])

    @property
    def variables(self) -> dict[str, str]:
        return {**self.arguments, **self.env}


class Player:
    """Plays one Dockerfile once."""

    def __init__(
        self,
        context: Context | None,
        name: str,
        text: str,
        given: Mapping[str, str],
        table: Mapping[str, str],
        tell: walls.Tell,
    ) -> None:
        self._context, self._given, self._table, self._tell = context, given, table, tell
        self._file: Dockerfile = parse(text, name)
        self._state = State()
        self._said = ""
        """How the base differs from what FROM names."""
        self._early = {
            **{f"{kind}PLATFORM": _PLATFORM for kind in ("TARGET", "BUILD")},
            **{f"{kind}OS": "linux" for kind in ("TARGET", "BUILD")},
            **{f"{kind}ARCH": _ARCHITECTURE for kind in ("TARGET", "BUILD")},
        }
        """Arguments before FROM, which an ARG after it can take over."""
        self.at: Instruction | None = None
        """The instruction being played."""

    async def play(self, timeout: float) -> State:
        """Raises `ImageError`, `BackendError` or `TimeoutError`, the last after `timeout` seconds."""
        arguments = [each for each in self._file.instructions if each.name == "ARG"]
        declared = {word.partition("=")[0] for each in arguments for word in each.words()}
        for name in sorted(self._given.keys() - declared):
            self._tell(f"the argument {name} is not used: no ARG declares it")
        first = next(index for index, each in enumerate(self._file.instructions) if each.name == "FROM") + 1
        for instructions, seconds in (
            (self._file.instructions[:first], _BASE),
            (self._file.instructions[first:], timeout),
        ):
            end = asyncio.get_running_loop().time() + seconds
            async with asyncio.timeout(seconds):
                for at in instructions:
                    self.at = at
                    await self._play(at, end - asyncio.get_running_loop().time())
        return self._state

    async def _play(self, at: Instruction, left: float) -> None:
        state = self._state
        try:
            match at.name:
                case "FROM":
                    await self._from(at, left)
                case "ARG":
                    self._arg(at)
                case "ENV":
                    state.env.update(pairs(at, self._expanded, self._file.escape))
                case "USER":
                    state.user = self._expanded(at.rest)
                    self._account(at)
                case "SHELL":
                    words = at.listed()
                    if not words:
                        raise at.refused("SHELL takes the JSON form", 'write it as SHELL ["/bin/bash", "-c"]')
                    state.shell = words
                case "WORKDIR":
                    path = self._expanded(at.rest)
                    state.workdir = os.path.normpath(os.path.join(state.workdir or "/", path)).replace("//", "/")
                    await self._folders(at, [state.workdir])
                case "VOLUME":
                    self._tell(f"{at.where}: it is a folder of the image here, new in every sandbox")
                    paths = at.listed() or split(at.rest, self._file.escape)
                    await self._folders(at, [os.path.join("/", self._expanded(path)) for path in paths])
                case "COPY" | "ADD":
                    await self._copy(at)
                case "RUN":
                    await self._run(at, left)
                case "ENTRYPOINT" | "HEALTHCHECK":
                    self._tell(f"{at.where}: it is not run: a sandbox starts no program of its image")
                case "ONBUILD":
                    self._tell(f"{at.where}: it has no effect on this image")
                case _:
                    pass  # without effect in a sandbox
        except (ValueError, OSError, OverflowError, RecursionError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise at.refused(str(error), "correct it") from error
        except ImageError as error:
            if at.where in str(error):
                raise
            raise ImageError(f"{at.where}: {error}") from error

    def _expanded(self, text: str) -> str:
        return expand(text, self._state.variables, self._file.escape)

    async def _from(self, at: Instruction, left: float) -> None:
        words = expand(at.rest, self._early, self._file.escape).split()
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise at.refused("it is not a FROM IMAGE [AS NAME]", "correct it")
        wanted = expand(at.flags.get("platform", _PLATFORM), self._early, self._file.escape)
        if wanted != _PLATFORM:
            raise at.refused(f"this machine is {_PLATFORM}", "use a backend on a machine of that platform")
        if words[0] == "scratch":
            self._state.key = hashlib.sha256(b"scratch").hexdigest()[:32]
            await store.layer(self._state.key, {"parent": "", "instruction": "FROM scratch"}, _empty)
            return
        base = bases.base_of(words[0], at, self._table)
        self._said = base.said
        if base.said:
            self._tell(f"{at.where}: {base.said}")
        self._state.key = await bases.have(base, at, self._tell, left)
        self._state.env["PATH"] = walls.PATH

    def _arg(self, at: Instruction) -> None:
        early = not self._state.key
        for word in split(at.rest, self._file.escape):
            name, equals, default = word.partition("=")
            known = self._early if early else self._state.variables
            if name in self._given:
                value: str | None = self._given[name]
            elif equals:
                value = expand(default, known, self._file.escape)
            else:
                value = None if early else self._early.get(name)
            if value is not None:
                (self._early if early else self._state.arguments)[name] = value

    async def _layer(self, at: Instruction, inputs: Any, make: Any) -> None:
        parent = self._state.key
        text = json.dumps([parent, at.name, inputs], sort_keys=True)
        key = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]
        shown = at.where.split(": ", 1)[1]

        async def played(folder: Path) -> None:
            self._tell(at.where)
            await make(folder)

        if not await store.layer(key, {"parent": parent, "instruction": shown}, played):
            self._tell(f"{at.where} (cached)")
        self._state.key = key

    async def _folders(self, at: Instruction, paths: list[str]) -> None:
        parent = store.root_of(self._state.key)
        if all(resolve(parent, path).is_dir() for path in paths):
            return

        async def make(folder: Path) -> None:
            await asyncio.to_thread(clone, parent, folder / "root")
            for path in paths:
                make_folders(folder / "root", path)

        await self._layer(at, paths, make)

    async def _copy(self, at: Instruction) -> None:
        words = [self._expanded(word) for word in at.words()]
        if len(words) < 2:
            raise at.refused("it needs a source and a destination", "complete it")
        *patterns, target = words
        if at.name == "ADD" and any(_REMOTE.match(each) for each in patterns):
            step = "put the file into the context, or fetch it with RUN"
            raise at.refused("ADD takes no remote source here", step)
        if "chown" in at.flags:
            self._tell(f"{at.where}: --chown has no effect: every file belongs to the sandbox's user")
        mode = self._expanded(at.flags.get("chmod", ""))
        if mode and not re.fullmatch(r"[0-7]{3,4}", mode):
            raise at.refused(f"--chmod={mode} is not an octal mode", "write it as --chmod=755")
        parent = store.root_of(self._state.key)
        workdir = self._state.workdir or "/"
        assert self._context is not None  # a base has no COPY
        find = partial(self._context.sources, patterns, target, parent, workdir, unpack=at.name == "ADD")
        sources = await asyncio.to_thread(find)
        permissions = int(mode, 8) if mode else None
        inputs = await asyncio.to_thread(digest, sources)

        def copied(root: Path) -> None:
            clone(parent, root)
            write(sources, root, permissions)
            if digest(sources) != inputs:  # else later builds would find the wrong files under this hash
                raise ValueError("the context changed while it was copied")

        async def make(folder: Path) -> None:
            await asyncio.to_thread(copied, folder / "root")

        await self._layer(at, [inputs, mode], make)

    def _account(self, at: Instruction) -> tuple[int, int, str]:
        """Number of user and group, and the home folder."""
        name, _, group = (self._state.user or "0").partition(":")
        users, groups = self._entries("etc/passwd"), self._entries("etc/group")
        found = next((row for row in users if name in (row[0], row[2])), None)
        if found is None and not name.isdecimal():
            raise at.refused(f"the image has no user {name!r}", "make it with RUN useradd before")
        row = next((row for row in groups if group and group in (row[0], row[2])), None)
        if group and row is None and not group.isdecimal():
            raise at.refused(f"the image has no group {group!r}", "make it with RUN groupadd before")
        gid = int(row[2] if row else group or (found[3] if found else "0"))
        home = found[5] if found is not None and len(found) > 5 else "/"
        return int(found[2] if found else name), gid, "/root" if name in ("0", "root") else home or "/"

    def _entries(self, path: str) -> list[list[str]]:
        place = resolve(store.root_of(self._state.key), path)
        if not place.is_file():
            return []
        with place.open(errors="replace") as file:
            rows = [line.split(":") for line in file.read(1 << 20).splitlines()]
        return [row for row in rows if len(row) > 3 - ("group" in path) and row[2].isdecimal()]

    async def _run(self, at: Instruction, left: float) -> None:
        state, parent = self._state, store.root_of(self._state.key)
        command = at.listed() or [*state.shell, at.rest]
        uid, gid, home = self._account(at)
        inputs = [command, state.variables, state.workdir, uid, gid]
        mounts = [inside(str(parent), place) for place in walls.MOUNTS]
        before = {place: os.path.lexists(f"{parent}{place}") for place in mounts}

        async def make(folder: Path) -> None:
            settings = (await asyncio.to_thread(package_settings.settings))[0]
            upper, work = folder / "upper", folder / "work"
            upper.mkdir(mode=0o755)
            upper.chmod(stat.S_IMODE(parent.stat().st_mode))
            work.mkdir()
            disk = ["--overlay-src", str(parent), "--overlay", str(upper), str(work), "/"]
            env = {"PATH": walls.PATH, "HOME": home, **settings, **state.variables}
            tell = lambda line: self._tell(f"  {line}")  # noqa: E731
            workdir = state.workdir or "/"
            code, last = await walls.run(
                disk, command, env=env, tell=tell, timeout=left, user=(uid, gid), workdir=workdir, root=parent
            )
            if code != 0:
                said = "\n".join(last)
                base = f" ({self._said}, with other versions of packages)" if self._said else ""
                raise ImageError(
                    f"{at.where}: exit code {code}{base}. Next step: fix the command or its requirements; its last "
                    f"lines:\n{said}"
                )
            await asyncio.to_thread(_commit, parent, upper, folder / "root", before)

        await self._layer(at, inputs, make)


async def _empty(folder: Path) -> None:
    (folder / "root").mkdir(mode=0o755)


def _commit(parent: Path, upper: Path, root: Path, before: Mapping[str, bool]) -> None:
    """The layer of a RUN: the places that its mounts made are no part of it."""
    for place, existed in before.items():
        mounted = resolve(upper, place, last=False)
        if not existed and os.path.lexists(mounted):
            if mounted.is_dir() and not mounted.is_symlink():
                if not any(mounted.iterdir()):
                    mounted.rmdir()
            elif mounted.is_file() and mounted.stat().st_size == 0:
                clear(mounted)
    clone(parent, root)
    apply(upper, root)


async def named(image: str, table: Mapping[str, str], tell: walls.Tell) -> tuple[Path, State]:
    """The root folder of a base."""
    return await _played(Player(None, image, f"FROM {image}", {}, table, tell), image, _BASE)


async def play(
    context: Context, name: str, given: Mapping[str, str], table: Mapping[str, str], tell: walls.Tell, timeout: float
) -> tuple[Path, State]:
    """The root folder of a Dockerfile and its settings."""
    return await _played(Player(context, name, context.text, given, table, tell), name, timeout)


async def _played(player: Player, name: str, timeout: float) -> tuple[Path, State]:
    try:
        state = await player.play(timeout)
    except TimeoutError as error:
        where = player.at.where if player.at else name
        reason = f"the build did not end within {timeout:g} s"
        raise ImageError(f"{where}: {reason}. Next step: raise its timeout, or make the step faster") from error
    except BackendUnavailable:
        raise
    except BackendError as error:
        where = player.at.where if player.at else name
        raise (error if where in str(error) else BackendError(f"{where}: {error}")) from error
    return store.root_of(state.key), state
