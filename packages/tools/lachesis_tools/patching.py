"""The work of the tool `patch`: edits of files, all or nothing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from backends.base import Sandbox
from backends.tasks import in_own_thread
from lachesis_tools.edits import EditError, apply_hunks, parse_patch, replace_text, unified_diff
from lachesis_tools.files import file_error
from lachesis_tools.tool_registry import ToolFailure
from lachesis_tools.tool_session import ToolSession

MAX_FILE_BYTES = 5_000_000
"""The size of the largest file that is patched."""

_BOM = "\ufeff"


@dataclass(slots=True)
class _File:
    """A text file with `\\n` line ends, and the properties to restore when it is written."""

    text: str
    crlf: bool = False
    bom: bool = False

    @classmethod
    def decode(cls, data: bytes) -> _File:
        # Bytes that are not UTF-8 survive the edit of other lines.
        text = data.decode("utf-8", errors="surrogateescape")
        crlf = "\r\n" in text and text.count("\n") == text.count("\r\n")
        return cls(
            text.removeprefix(_BOM).replace("\r\n", "\n") if crlf else text.removeprefix(_BOM),
            crlf,
            text.startswith(_BOM),
        )

    def encode(self) -> bytes:
        text = self.text.replace("\n", "\r\n") if self.crlf else self.text
        return ((_BOM if self.bom else "") + text).encode("utf-8", errors="surrogateescape")


class _Plan:
    """The planned content of the files. Nothing is written until every edit fits."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.before: dict[str, bytes | None] = {}
        self.after: dict[str, _File | None] = {}
        self.moved: dict[str, str] = {}
        """New path -> old path. A moved file keeps its mode."""

    async def load(self, path: str) -> _File | None:
        if path not in self.before:
            try:
                data = await self._sandbox.read_bytes(path, limit=MAX_FILE_BYTES + 1)
            except (FileNotFoundError, NotADirectoryError):
                self.before[path] = self.after[path] = None
                return None
            except OSError as error:
                raise await file_error(self._sandbox, path, error) from None
            if len(data) > MAX_FILE_BYTES:
                raise ToolFailure(f"{path} is larger than {MAX_FILE_BYTES} bytes; edit it with the terminal")
            if b"\0" in data:
                raise ToolFailure(f"{path} is a binary file and cannot be patched")
            self.before[path] = data
            self.after[path] = _File.decode(data)
        return self.after[path]

    async def existing(self, path: str) -> _File:
        if (found := await self.load(path)) is None:
            raise await file_error(self._sandbox, path, FileNotFoundError(path))
        return found

    async def absent(self, path: str, instead: str) -> None:
        if await self.load(path) is not None:
            raise ToolFailure(f"{path} exists already; {instead}")

    def changes(self) -> list[tuple[str, bytes | None]]:
        """Paths whose bytes change, writes before deletions: a move that fails halfway loses nothing."""
        encoded = {path: None if file is None else file.encode() for path, file in self.after.items()}
        changed = [(path, data) for path, data in encoded.items() if data != self.before[path]]
        return sorted(changed, key=lambda change: change[1] is None)

    async def check_aliases(self) -> None:
        """Raises `ToolFailure` for two names of one file: each would be written without the change of the other."""
        paths = [path for path, _ in self.changes()]
        if len(paths) < 2:
            return
        resolved = await self._sandbox.exec(f"realpath -mz -- {shlex.join(paths)}", timeout=30, cwd="/", fresh=True)
        names: dict[bytes, str] = {}
        for path, real in zip(paths, resolved.stdout.split(b"\0"), strict=False):
            if (other := names.setdefault(real, path)) != path:
                raise ToolFailure(f"{path} and {other} are the same file; change it under one name")

    async def write(self) -> None:
        """Write all changes; where one fails, restore those that were written."""
        written: list[str] = []
        try:
            for path, data in self.changes():
                written.append(path)
                await self._write(path, data)
                if path in self.moved and data is not None:
                    modes = f"chmod --reference={shlex.quote(self.moved[path])} -- {shlex.quote(path)}"
                    await self._sandbox.exec(modes, timeout=30, cwd="/", fresh=True)
        except OSError as error:
            for done in reversed(written):
                try:
                    await self._write(done, self.before[done])
                except OSError as second:
                    raise ToolFailure(f"{path}: {error}; and {done} could not be put back: {second}") from None
            raise ToolFailure(f"{path}: {error.strerror or error}; no file was changed") from None

    async def _write(self, path: str, data: bytes | None) -> None:
        if data is not None:
            await self._sandbox.write_bytes(path, data)
            return
        removed = await self._sandbox.exec(f"rm -f -- {shlex.quote(path)}", timeout=30, cwd="/", fresh=True)
        if removed.exit_code != 0:
            raise OSError(removed.stderr.decode(errors="replace").strip())


async def patched(
    session: ToolSession,
    mode: str,
    path: str | None,
    old_string: str | None,
    new_string: str | None,
    replace_all: bool,
    patch: str | None,
) -> str:
    """What the tool `patch` returns. Raises `ToolFailure`."""
    sandbox = await session.sandbox()
    plan = _Plan(sandbox)
    note = ""
    try:
        if mode == "replace":
            if path is None or old_string is None or new_string is None:
                raise ToolFailure("mode 'replace' needs path, old_string and new_string")
            note = await _plan_replace(plan, await session.path(path), old_string, new_string, replace_all)
        else:
            if patch is None:
                raise ToolFailure("mode 'patch' needs patch")
            await _plan_patch(plan, session, patch)
    except EditError as error:
        raise ToolFailure(f"{error}\nNo file was changed.") from None
    changes = plan.changes()
    if not changes:
        raise ToolFailure("the edit leaves every file as it is")
    await plan.check_aliases()
    await plan.write()
    diffs = [await in_own_thread(_diff, path, plan.before[path], data) for path, data in changes]
    return "\n".join(([note] if note else []) + diffs)


async def _plan_replace(plan: _Plan, path: str, old: str, new: str, replace_all: bool) -> str:
    file = await plan.existing(path)
    if file.crlf:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    file.text, count = await in_own_thread(replace_text, file.text, old, new, replace_all=replace_all, path=path)
    return f"{count} replacements" if count > 1 else ""


async def _plan_patch(plan: _Plan, session: ToolSession, text: str) -> None:
    for operation in parse_patch(text.replace("\r\n", "\n")):
        path = await session.path(operation.path)
        if operation.kind == "add":
            await plan.absent(path, "use '*** Update File', or write_file to replace it")
            plan.after[path] = _File(operation.content)
            continue
        file = await plan.existing(path)
        if operation.kind == "delete":
            plan.after[path] = None
            continue
        file.text = await in_own_thread(apply_hunks, file.text, operation.hunks, path)
        if operation.move_to is not None and (target := await session.path(operation.move_to)) != path:
            await plan.absent(target, "delete it first, or move to another path")
            plan.after[target], plan.after[path] = file, None
            plan.moved[target] = path


def _diff(path: str, before: bytes | None, after: bytes | None) -> str:
    crlf = all(data is None or _File.decode(data).crlf for data in (before, after))
    old, new = (None if data is None else data.decode("utf-8", errors="replace") for data in (before, after))
    if crlf:  # else the diff shows the line ends
        old, new = (None if text is None else text.replace("\r\n", "\n") for text in (old, new))
    return unified_diff(old, new, path)
