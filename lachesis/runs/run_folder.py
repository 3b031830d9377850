"""A folder that a second start continues: it needs the settings that its files were made with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any

from backends.errors import ExitCode, LachesisError, SettingsError, cannot_read
from lachesis_messages.records.entries import COMPLETED_FILE, FAILED_FILE


class RunFolderError(LachesisError):
    """The run's folder cannot be used; the message says why and what to do."""


class WrongFolder(RunFolderError):
    """A different folder or name must be chosen."""

    exit_code = ExitCode.SETTINGS


class OtherSettings(WrongFolder):
    """The folder is of a run with other settings."""


_OF_RUNS = (
    *(COMPLETED_FILE, FAILED_FILE, ".failed.jsonl", ".discarded.jsonl", "judge.jsonl", ".run.json"),
    *(".web.jsonl", "notes.ndjson"),
)
_OF_BATCHES = re.compile(r"batch_\d+_output\.jsonl")


def has_groups(path: Path) -> bool:
    """Whether a run has written it, as groups or beside them, without trajectories."""
    ends = (".failed.jsonl", ".discarded.jsonl", ".judge.jsonl", "/judge.jsonl")
    beside = f"/{path.name}".endswith(ends) and any(path.parent.glob("*.run.json"))
    return beside or path.with_suffix(".run.json").exists()


def refuse_files_of_runs(output: Path) -> None:
    """Raises WrongFolder if a run has written the file, which another command is about to replace."""
    file = output.resolve()  # what would be replaced
    beside = file.name.endswith(_OF_RUNS) and any(file.parent.glob("*.run.json"))
    of_run = file.exists() and (beside or _OF_BATCHES.fullmatch(file.name))
    if of_run or (file.parent / f"{file.stem}.run.json").exists():
        raise WrongFolder(f"{output} is a file of a run, which would be lost; choose another name")


def name_problem(name: object) -> str:
    """The problem with a name for a subfolder; empty if there is none."""
    if not isinstance(name, str):
        return "is not text"
    path = PurePath(name)
    if not name.strip() or name != name.strip():
        return "is empty, or begins or ends with a space"
    if path.is_absolute() or {"..", "~"} & {*path.parts} or not path.parts:
        return "would be a folder outside the data folder"
    if not name.isprintable() or len(name.encode("utf-8", "replace")) > 200:
        return "is not a valid folder name: use letters, digits, - and _, at most 200"
    return ""


def data_folder(name: str) -> Path:
    """Where the runs of an environment are: `data/NAME`.

    Raises:
        WrongFolder: the name would lead elsewhere.
    """
    if problem := name_problem(name):
        raise WrongFolder(f"the name {name!r} {problem}; the runs of an environment are in data/NAME")
    return Path("data") / name


def require_run(path: Path, *, ends: tuple[str, ...] = ("groups.jsonl", "samples.jsonl")) -> None:
    """Raises SettingsError where nothing is at `path`, with the runs that are here, or what makes one."""
    if path.exists():
        return
    found = {file.parent for end in ends for file in (*Path("data").glob(f"*/{end}"), *Path("data").glob(f"*/*/{end}"))}
    newest = sorted(map(str, sorted(found, key=lambda folder: folder.stat().st_mtime)[-5:]))
    near = get_close_matches(str(path), [str(folder) for folder in found], n=1)
    here = f"did you mean {near[0]}?" if near else f"runs here are {', '.join(newest)}"
    step = here if found else "no run is below data/: `lachesis eval ENV` and `lachesis process ENV` write them there"
    raise SettingsError(f"{cannot_read(path)}; {step}")


def settings_of(groups: Path) -> dict[str, Any]:
    """The settings in the manifest next to a groups file; empty if there is no manifest.

    Raises:
        RunFolderError: it cannot be read.
    """
    manifest = groups.with_suffix(".run.json")
    try:
        return dict(json.loads(manifest.read_bytes())["settings"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{manifest}: no manifest of a run ({error!r}); bring it back, or move it away to do without its settings"
        ) from error


def unused(folder: Path) -> Path:
    """`folder`, or `folder-2` and so on where it exists."""
    at, number = folder, 1
    while at.exists():
        number += 1
        at = folder.with_name(f"{folder.name}-{number}")
    return at


_OF_THE_MODEL = {"model_file", "template_report", "tokenizer"}
_LONGEST = 300
"""Characters of a difference that is written out."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, words: tuple[str, str] = ("then", "now")) -> str:
    """The differences between two sets of settings, in words; empty if there are none. `words` follow the values.

    Older versions did not write some of them: special tokens in texts stayed as they are, a `cd` carried over, tool
    results were texts, no context was compressed, and the ids of the tokenizer, the content of the model's file and the
    environment's code are unknown.
    """
    unknown = ("tokenizer", "model_file", "compress_context_keep", "compress_context_with", "code")
    older = {
        "special_tokens_in_text": "as_is",
        "terminal_carries_cd": True,
        "tool_result_format": "text",
        **{name: now.get(name) for name in unknown},
    }
    before = {**{name: value for name, value in older.items() if name in now}, **before}
    names = {name for name in before.keys() | now.keys() if not _same(before.get(name), now.get(name))}
    names -= _OF_THE_MODEL if "model" in names else set()  # these follow from it
    return "; ".join(_told(name, before.get(name), now.get(name), words) for name in sorted(names))


def _told(name: str, before: Any, now: Any, words: tuple[str, str]) -> str:
    told = f"{name}: {before!r} {words[0]}, {now!r} {words[1]}"
    return told if len(told) <= _LONGEST else f"{name} differs"


def _same(before: Any, now: Any) -> bool:
    """Whether two values of a setting are one: what has the digest of its content may have been moved."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before.get("digest"):
        return bool(before["digest"] == now.get("digest"))
    return bool(before == now)
