"""Tasks to folders."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from .config import TaskConfig
from .errors import TaskError, read_text, wrong
from .reading import read_harbor_task, strip_canary
from .task import Files, Task


def write_task(task: Task, folder: Path | str) -> Task:
    """Write `task` into `folder`, which must not exist or be empty: its files, its settings, and the instructions of
    its steps. The task that is there now.

    Raises:
        TaskError: the folder cannot be written, or is in the task's; or TOML cannot express the settings.
    """
    if Path(os.path.realpath(Path(folder).expanduser())).is_relative_to(task.folder):
        raise wrong(Path(folder), f"is in the task that it would copy, {task.folder}", "name a folder outside of it")
    with _new_folder(Path(folder)) as made:
        shutil.copytree(task.folder, made, symlinks=True, dirs_exist_ok=True)
        (made / "task.toml").write_text(to_toml(task.config, made / "task.toml"), "utf-8")
        for step in task.steps:
            file = made.joinpath("steps", step.name, "instruction.md") if step.name else made / "instruction.md"
            if strip_canary(read_text(file)) != step.instruction:
                file.write_text(step.instruction, "utf-8")
    return read_harbor_task(folder, to_play=False)


def create_task(folder: Path | str, config: TaskConfig, files: Files) -> Task:
    """Make a task of its settings and its other files. Shell scripts become executable.

    Raises:
        TaskError: the folder cannot be written, a path leaves it, or it would be no task.
    """
    with _new_folder(Path(folder)) as made:
        (made / "task.toml").write_text(to_toml(config, made / "task.toml"), "utf-8")
        for name, content in files.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise wrong(made / name, "the path leaves the task's folder", "name a path inside")
            file = made / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copy2(content, file, follow_symlinks=False)
            else:
                file.write_bytes(content.encode() if isinstance(content, str) else content)
            if file.suffix == ".sh" and not file.is_symlink():
                file.chmod(0o755)
        read_harbor_task(made, to_play=False)
    return read_harbor_task(folder, to_play=False)


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when it is complete."""
    folder = folder.expanduser().absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name[:100]}.", dir=folder.parent))
        try:
            yield made
            made.chmod(0o755)
            made.rename(folder)  # over an empty folder, too
        except TaskError as error:
            raise TaskError([replace(p, file=folder / p.file.relative_to(made)) for p in error.problems]) from None
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except (OSError, ValueError) as error:  # of a name or a text that no file can have
        raise wrong(
            folder, f"cannot be written: {error}", "name a new or empty folder that you may write to"
        ) from error


def to_toml(config: TaskConfig, file: Path = Path("task.toml")) -> str:
    """The text of a task.toml with these settings; what has its default is left out, but for the version.

    Raises:
        TaskError: `metadata` or an unknown key holds something that TOML cannot express.
    """
    settings = {"schema_version": config.schema_version} | config.model_dump(exclude_defaults=True)
    try:
        return "\n".join(_table(settings, "")).strip() + "\n"
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        raise wrong(file, f"TOML cannot express it: {error}", "change it") from error


def _table(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """The lines of a table: its values first, for what follows a header belongs to that header."""
    tables = {}
    for key, value in table.items():
        is_table = isinstance(value, dict) or (
            isinstance(value, list) and value and all(isinstance(v, dict) for v in value)
        )
        if is_table:
            tables[key] = value
        elif value is not None:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tables.items():
        place = f"{path}.{_key(key)}".removeprefix(".")
        for one in value if isinstance(value, list) else [value]:
            yield f"\n[[{place}]]" if isinstance(value, list) else f"\n[{place}]"
            yield from _table(one, place)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {key!r} is not text")
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return text.encode().decode()  # raises for half of a surrogate pair
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    raise TypeError(f"{value!r} is of type {type(value).__name__}")
