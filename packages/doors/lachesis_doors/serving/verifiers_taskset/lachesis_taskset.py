"""The tasks of `lachesis serve ENV --as prime --rows FILE`, as a taskset of verifiers 0.4, which runs nothing here."""

import json
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["LachesisTaskset"]


class LachesisData(vf.TaskData):
    split: str
    index: int


class LachesisTask(vf.Task[LachesisData]):
    """Played and scored by the server of Lachesis."""


class LachesisConfig(vf.TasksetConfig):
    rows: str = ""
    """The file."""


class LachesisTaskset(vf.Taskset[LachesisTask, LachesisConfig]):
    def load(self):
        lines = Path(self.config.rows).read_text().splitlines()
        return [LachesisTask(LachesisData(**json.loads(line)), self.config.task) for line in lines]
