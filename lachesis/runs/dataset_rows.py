"""Rows to train on: a local JSON Lines file, or a dataset from the Hugging Face hub."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from backends.errors import ExitCode, LachesisError, cannot_read, refuse_empty
from backends.hugging_face import dataset_problem
from lachesis_messages.records.json_arrays import array_items
from lachesis_messages.records.jsonl import JsonlError, at_column, is_array


class DatasetError(LachesisError):
    """A dataset cannot be used; the message names the place and the next step."""


class WrongDataset(DatasetError):
    """The settings name one that does not exist, or whose rows are wrong."""

    exit_code = ExitCode.SETTINGS


def is_local(name: str) -> bool:
    """Whether a dataset name is a path on this machine."""
    return name.endswith((".jsonl", ".json")) or name.startswith(("/", "./", "../", "~")) or Path(name).exists()


def read_jsonl(path: Path, required: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file, one object a line, or of one JSON array, each with the `required` fields.

    Raises:
        DatasetError: names the file and the line.
        SettingsError: the file is empty.
    """
    refuse_empty(path)
    rows = []
    try:
        with path.open("rb") as file:
            for number, row in array_items(path, file) if is_array(file) else _rows(path, file):
                if not isinstance(row, dict):
                    raise WrongDataset(f"{path}, line {number}: expected an object, found {type(row).__name__}")
                missing = [field for field in required if field not in row]
                if missing:
                    listed, there = (", ".join(map(repr, names)) for names in (missing, row))
                    raise WrongDataset(f"{path}, line {number}: it lacks {listed}; it has {there or 'no field'}")
                rows.append(row)
    except JsonlError as error:
        raise WrongDataset(str(error)) from error
    except OSError as error:
        kind = WrongDataset if isinstance(error, FileNotFoundError) else DatasetError
        raise kind(f"{cannot_read(path, error)}; see --env.dataset_name") from error
    if not rows:
        raise WrongDataset(f"{path} contains no rows")
    return rows


def _rows(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line.strip():
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise WrongDataset(
                    f"{path}, line {number}: not JSON ({at_column(error)}); correct or delete it"
                ) from error


def load_rows(
    name: str, split: str = "train", *, config: str | None = None, required: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Rows of a dataset: a JSON Lines file, a folder with `SPLIT.jsonl`, or a name on the hub.

    Raises:
        DatasetError: the dataset does not exist, cannot be read, or lacks a required field.
    """
    if is_local(name):
        path = Path(name).expanduser()
        if path.is_file() and path.suffix not in (".jsonl", ".json"):
            raise WrongDataset(f"{name} is a local file, but not .jsonl; name one, or a dataset of the hub")
        return read_jsonl(path / f"{split}.jsonl" if path.is_dir() else path, required)
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DatasetError(
            f"the dataset {name!r} is on the hub, and the package datasets is not installed. Next step: pip install "
            "'lachesis-rl[datasets]', or name a local .jsonl file"
        ) from error
    try:
        if problem := dataset_problem(name):
            raise ConnectionError(problem)
        rows = [dict(row) for row in datasets.load_dataset(name, config, split=split)]
    except Exception as error:  # the library raises whatever its transport raises
        raise DatasetError(
            f"cannot load the dataset {name!r} (split {split!r}): {error}; "
            "name a local .jsonl file instead, or a dataset that needs no network"
        ) from error
    missing = [field for field in required if rows and field not in rows[0]]
    if missing:
        raise WrongDataset(f"dataset {name!r} has no field {', '.join(map(repr, missing))}")
    return rows
