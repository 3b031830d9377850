"""The rows of a batch run: one at a time from JSON Lines, CSV, Parquet or the Hugging Face hub.

A row has `prompt` (text, or OpenAI's content parts) or `messages`, and may have `image`, `cwd` and `metadata`;
everything else in it is metadata too. The formats are those of `batch_runner.py` in NousResearch/hermes-agent.
"""

from __future__ import annotations

import codecs
import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from backends.errors import cannot_read, refuse_empty
from backends.hugging_face import dataset_problem
from lachesis.figures.item_keys import item_digest
from lachesis.runs.dataset_rows import DatasetError, WrongDataset
from lachesis_data.files.foreign import unpadded
from lachesis_data.files.validation import validate_messages
from lachesis_data.optional import need_datasets
from lachesis_messages.errors import MessageError
from lachesis_messages.markup import READ_UNIQUE
from lachesis_messages.records.json_arrays import array_items
from lachesis_messages.records.jsonl import JsonlError, at_column, is_array
from lachesis_messages.responses import as_message

IMAGE_FIELDS = ("image", "docker_image")
_LONGEST_FIELD = 1 << 30
_SHOWN = 5
"""Bad rows that an error names."""


def in_shard(digest: str, shard: tuple[int, int]) -> bool:
    """Whether an item with this digest is in part i of n."""
    return int(digest, 16) % shard[1] == shard[0] - 1


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of the input."""

    index: int
    """Its place in the input, from 0, blank lines not counted; the same in every shard."""
    content: Mapping[str, Any]
    digest: str
    """Of the content: see `item_digest`."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The input of a run, which is read again each time it is iterated.

    Args:
        source: a file, by its ending `.jsonl`, `.json`, `.csv` or `.parquet`; anything else is a name on the hub, with
            its configuration after a colon: `openai/gsm8k:main`. None for the items of the environment's own dataset.
        split: of a dataset on the hub.
        prompt_field: the field of the prompt; None where an environment makes it from the row.
        images: what a row's image is: a name, the absolute path of a folder with a root file system, or nothing at all.
        limit: rows that are read at most; None for all.
        shard: (i, n) takes the i-th of n parts, from 1, by the digest of the row.
    """

    source: str | None
    split: str = "train"
    prompt_field: str | None = "prompt"
    images: Literal["name", "folder", "none"] = "name"
    limit: int | None = None
    shard: tuple[int, int] = (1, 1)

    def __iter__(self) -> Iterator[InputRow]:
        """Raises DatasetError at a row that cannot be played, with its file and line."""
        for index, (place, content) in enumerate(islice(self._read(), self.limit)):
            if (problem := self._problem(content)) or isinstance(content, str):
                raise WrongDataset(f"{place}: {problem}")
            digest = item_digest(content)
            if in_shard(digest, self.shard):
                yield InputRow(index, content, digest)

    def check(self) -> tuple[int, str]:
        """The number of rows of this shard, after a look at all of them; and what they are, in whatever order.

        Raises:
            DatasetError: names the first few rows that cannot be played; nothing was played yet.
        """
        count, total, digests = 0, 0, 0
        problems: list[str] = []
        for place, content in islice(self._read(), self.limit):
            total += 1
            if problem := self._problem(content):
                problems.append(f"{place}: {problem}")
                if len(problems) == _SHOWN:
                    break
            elif self.shard[1] > 1:
                digest = item_digest(content)
                digests += int(digest, 16)
                count += in_shard(digest, self.shard)
        if problems:
            raise WrongDataset("\n".join([*problems, "correct or delete these rows, and start again"]))
        if not total:
            refuse_empty(Path(self.source or ""))
            raise WrongDataset(f"{self.source} contains no rows")
        return (count, f"{total} rows, {digests:x}") if self.shard[1] > 1 else (total, "")

    def places(self, wanted: Set[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Where the rows are now that have these digests, each with which of several equal rows it is, from 1. Reads no
        further than to the last of them, and looks at all rows: other starts may have had other limits and shards."""
        found, seen = dict[tuple[str, int], int](), Counter[str]()
        digests = {digest for digest, _ in wanted}
        for index, (_, content) in enumerate(self._read() if wanted else ()):
            if isinstance(content, str) or (digest := item_digest(content)) not in digests:
                continue
            seen[digest] += 1
            if (row := (digest, seen[digest])) in wanted:
                found[row] = index
                if len(found) == len(wanted):
                    break
        return found

    def _problem(self, row: Mapping[str, Any] | str) -> str:
        """The problem with a row; empty if there is none."""
        if isinstance(row, str):
            return row
        for field in (*IMAGE_FIELDS, "cwd"):
            if not isinstance(row.get(field), str | None):
                return f"{field} must be text, not {_kind(row[field])}"
        apart = (self.prompt_field, "messages", "cwd", *IMAGE_FIELDS)
        own: Mapping[str, Any] = given if isinstance(given := row.get("metadata"), Mapping) else {}
        for name, value in own.items():
            if name not in apart and row.get(name, value) != value:
                return f"{name!r} is in the row and in its metadata, with two values; rename or remove one"
        named = next((field for field in IMAGE_FIELDS if row.get(field)), None)
        if named and self.images != "name" and (self.images == "none" or not row[named].startswith("/")):
            takes = {"none": "no image with --env.sandbox none", "folder": "the absolute path of a root file system"}
            return (
                f"{named} is {row[named]!r}, and the backend takes {takes[self.images]}; choose one that takes names "
                "with --env.terminal_backend (docker, singularity, modal), or remove the field"
            )
        if self.prompt_field is None:
            return ""
        if (messages := row.get("messages")) is not None:
            return _problem_of_messages(messages)
        prompt = row.get(self.prompt_field)
        if prompt is None:
            filled = ", ".join(name for name, value in row.items() if value is not None)
            return (
                f"the row has neither {self.prompt_field!r} nor 'messages', only {filled or 'nothing'}; "
                "--env.prompt_field names the field of the prompt"
            )
        if isinstance(prompt, list):
            return _problem_of_messages([{"role": "user", "content": prompt}])
        if not isinstance(prompt, str):
            return f"{self.prompt_field} must be text or a list of content parts, not {_kind(prompt)}"
        return "" if prompt.strip() else f"{self.prompt_field} is empty"

    def _read(self) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
        """Each row with its position; a text instead of a row describes its problem."""
        source = self.source or ""
        path = Path(source).expanduser()
        if path.exists() and path.suffix not in (".jsonl", ".json", ".csv", ".parquet"):
            local = "folder" if path.is_dir() else "file"
            raise WrongDataset(f"{source} is a local {local}, but not .jsonl, .csv or .parquet; name such a file")
        try:
            if path.suffix in (".jsonl", ".json", ".csv"):
                yield from (_csv_rows if path.suffix == ".csv" else _json_rows)(path)
            else:
                for number, row in enumerate(_dataset_rows(source, self.split), 1):
                    yield f"{source}, row {number}", unpadded(row)[0]
        except OSError as error:
            kind = WrongDataset if isinstance(error, FileNotFoundError) else DatasetError
            raise kind(f"{cannot_read(path, error)}; name the file of prompts") from error


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    with path.open("rb") as lines:
        if is_array(lines):
            try:
                for number, row in array_items(path, lines):
                    wrong = f"expected an object, found {_kind(row)}"
                    yield f"{path}, item {number}", row if isinstance(row, dict) else wrong
            except JsonlError as error:
                raise WrongDataset(str(error)) from error
            return
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:  # not orjson: it rejects lone surrogates, and turns integers over 64 bits into floats
                row = READ_UNIQUE(line.decode())
            except (ValueError, RecursionError) as error:
                yield place, f"not JSON ({at_column(error)})"
            else:
                yield place, row if isinstance(row, dict) else f"expected an object, found {_kind(row)}"


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | str]]:
    csv.field_size_limit(_LONGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            if twice := [name for name, times in Counter(reader.fieldnames or ()).items() if times > 1]:
                raise WrongDataset(f"{path}, line 1: the column {twice[0]!r} is there twice")
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                if None in row:
                    yield place, "more cells than the first line has columns"
                else:  # as `datasets` reads an empty cell
                    yield place, {name: value or None for name, value in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise WrongDataset(f"{path}, line {reader.line_num + 1}: not CSV in UTF-8 ({error})") from error


def _dataset_rows(source: str, split: str) -> Iterator[Mapping[str, Any]]:
    need_datasets(source)
    import datasets

    name, _, config = source.partition(":")
    files: dict[str, Any] = {}
    if source.endswith(".parquet"):
        name, config, split = "parquet", "", "train"
        files = {"data_files": str(Path(source).expanduser().resolve(strict=True)), "streaming": True}
    try:
        if not files and (problem := dataset_problem(name)):
            raise ConnectionError(problem)
        yield from datasets.load_dataset(name, config or None, split=split, **files)
    except Exception as error:  # the library raises whatever its transport raises
        raise DatasetError(
            f"cannot load the dataset {source!r}: {error}; name a .jsonl, .csv or .parquet file, or a dataset of the "
            "hub (NAME or NAME:CONFIG, and --dataset-split)"
        ) from error


def _problem_of_messages(messages: Any) -> str:
    if not isinstance(messages, list):
        return f"messages must be a list of messages, not {_kind(messages)}"
    if not messages:
        return "messages is empty"
    try:
        read = [as_message(message, index) for index, message in enumerate(messages)]
        validate_messages(read)
    except (MessageError, TypeError, ValueError) as error:
        return str(error)
    if read[-1].role not in ("user", "tool"):
        return f"the last message is of role {read[-1].role!r}: there is nothing to answer"
    return ""


def _kind(value: Any) -> str:
    return {"NoneType": "null", "dict": "an object", "list": "a list"}.get(type(value).__name__, type(value).__name__)
