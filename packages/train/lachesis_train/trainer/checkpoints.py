"""`checkpoint.json`: the weights that a run continues from, and the last batch that they contain."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import orjson

from lachesis.runs.run_folder import OtherSettings, RunFolderError, WrongFolder, changes
from lachesis_train.trainer.settings import TrainingSettings
from lachesis_train.whole_files import write_atomically

FILE = "checkpoint.json"
ADAPTER = (
    "base_model",
    *(f"training.engine_{name}" for name in ("full_finetuning", "lora_layers")),
    *(f"training.{name}" for name in ("lora_rank", "train_attn", "train_mlp", "train_unembed")),
)
"""Settings that decide the shape of the weights."""
REMEMBERED = 4096
"""Ids of groups that a checkpoint keeps, the latest ones: second copies come soon after the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a run continues."""

    run_id: str
    """What names of its versions begin with."""
    step: int
    """Steps that the weights contain."""
    batch_id: int
    """The last batch that they contain; 0: none."""
    instance: str | None
    """The database of the rollout API whose batch id that is; None: a stock API."""
    state: str
    """The engine's path of the weights and the state of the optimizer."""
    sampler: str | None
    """The engine's path of the weights alone, for sampling; None before the first step."""
    settings: dict[str, Any]
    """Those that decide what is trained."""
    group_ids: list[str] = field(default_factory=list)
    """The latest groups that were trained, oldest first."""
    earlier: list[list[str]] = field(default_factory=list)
    """The engine's paths of earlier checkpoints that it still has, those of each, oldest first."""

    @property
    def paths(self) -> list[str]:
        """What the engine keeps of it."""
        return [path for path in (self.state, self.sampler) if path is not None]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint | None:
        """The checkpoint of a run's folder; None where it has none.

        Raises:
            RunFolderError: it cannot be read.
        """
        path = folder / FILE
        try:
            record = orjson.loads(path.read_bytes())
            record.setdefault("earlier", [])  # of a checkpoint of an older version
            return cls(**{each.name: record[each.name] for each in fields(cls)})
        except FileNotFoundError:
            return None
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"cannot read {path}: {error!r}; remove the folder, or choose another --training.name"
            ) from error

    @classmethod
    def of_folder(cls, folder: Path) -> Checkpoint:
        """The checkpoint of a run's folder. Raises WrongFolder where there is none."""
        if (found := cls.read(folder)) is None:
            raise WrongFolder(f"{folder} has no {FILE}: it is not the folder of a training run")
        return found

    def write(self, folder: Path) -> None:
        """Replace the checkpoint of a run's folder, in one step."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2))

    @classmethod
    def of_run(cls, folder: Path, settings: Mapping[str, Any], *, resume: bool) -> Checkpoint | None:
        """The checkpoint that a run continues from; None where it begins.

        Raises:
            OtherSettings: the folder's run was begun with others; names the differences.
            RunFolderError: it cannot be read, or there is none, and `resume` wants one.
        """
        found = cls.read(folder)
        if found is not None:
            found = replace(found, settings=_completed(found.settings, settings))
        if found is None and resume:
            raise WrongFolder(f"{folder} has no checkpoint to resume from; leave --resume out to begin a run there")
        if found is not None and (differences := changes(found.settings, settings)):
            raise OtherSettings(
                f"{folder} is a run with other settings: {differences}. Take those, or begin another run with "
                "--training.name"
            )
        return found


def _completed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run, with the defaults of those that an older version did not have."""
    fields = {f"training.{name}": field for name, field in TrainingSettings.model_fields.items()}
    new = [name for name in fields.keys() & now.keys() if name not in before]
    return {**before, **{name: fields[name].default for name in new}}


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other trainer uses the run's folder while the context lasts; a process that ends leaves it free.

    Raises:
        RunFolderError: another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFolderError(
                f"another process trains in {folder}; wait for its end, or choose another --training.name"
            ) from error
        yield


def first_weights(folder: Path | None, settings: Mapping[str, Any]) -> str | None:
    """The engine's path of the last state of another run, that of `training.init_from` or of the warm start.

    Raises:
        OtherSettings: the adapters of the runs differ.
        RunFolderError: there is no checkpoint.
    """
    if folder is None:
        return None
    try:
        found = Checkpoint.of_folder(folder)
    except WrongFolder as error:
        raise WrongFolder(f"training.init_from: {error}") from None
    before = _completed(found.settings, settings)
    theirs, ours = ({name: each.get(name) for name in ADAPTER} for each in (before, settings))
    if differences := changes(theirs, ours):
        raise OtherSettings(
            f"training.init_from: {folder} is a run with another adapter: {differences}. Set these as there"
        )
    return found.state
