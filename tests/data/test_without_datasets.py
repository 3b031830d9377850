"""Without the package datasets only what needs it is refused, with the command that installs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lachesis.runs.dataset_rows import DatasetError, load_rows
from lachesis_data.batch.rows import _dataset_rows
from lachesis_data.exports.parquet import ParquetWriter, raw_rows
from lachesis_data.files.formats import dataset_features
from lachesis_data.optional import DatasetsMissing

INSTALL = r"pip install 'lachesis-rl\[datasets\]'"


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, module, None)


def test_what_needs_it_names_the_extra(tmp_path: Path) -> None:
    for use in (
        lambda: list(_dataset_rows("openai/gsm8k:main", "train")),
        lambda: dataset_features("hermes"),
        lambda: list(raw_rows(tmp_path / "rows.parquet")),
        lambda: ParquetWriter(tmp_path / "rows.parquet"),
    ):
        with pytest.raises(DatasetsMissing, match=INSTALL):
            use()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DatasetError, match=INSTALL):
        load_rows("openai/gsm8k", "train")


def test_local_files_need_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n')
    assert load_rows(str(tmp_path / "rows.jsonl"), "train") == [{"question": "?"}]
