"""The folder of a run belongs to one process."""

from __future__ import annotations

import errno

import pytest

from lachesis.run_folder import RunFolderError
from lachesis.runs.ledger import Ledger


def test_a_file_system_without_locks_is_not_taken_for_another_run(tmp_path, monkeypatch):
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    message = r"lock cannot be locked \(No locks available\); choose a folder on a file system that has flock"
    with pytest.raises(RunFolderError, match=message):
        Ledger(tmp_path / "groups.jsonl", {}).open()
