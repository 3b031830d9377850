"""Conversations as a Parquet file with a fixed schema: files of any toolsets are read together.

`messages` are OpenAI messages with arguments as text; `tools` are JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lachesis_data.exports.chat_exports import plain_text, tools_text, valid_text
from lachesis_data.files.foreign import unpadded
from lachesis_data.optional import need_datasets
from lachesis_messages.records.export_lines import BRANCHES_OMITTED, Chat, Unsuitable, of_rollouts
from lachesis_messages.records.jsonl import JsonlError, WrongContent

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = ("run", "environment", "item_key", "rollout_id", "model", "timestamp", "outcome")
_ROWS, _BYTES = 1000, 32 << 20
"""A row group is written at this many rows, or at about this many bytes of text."""


def schema() -> pa.Schema:
    """The columns of the file. Raises DatasetsMissing."""
    need_datasets("Parquet files", "pyarrow")
    import pyarrow as pa

    text = pa.string()
    call = pa.struct({"id": text, "type": text, "function": pa.struct({"name": text, "arguments": text})})
    texts = dict.fromkeys(("role", "content", "reasoning"), text)
    message = pa.struct({**texts, "tool_calls": pa.list_(call), "tool_call_id": text, "weight": pa.int8()})
    facts = {"evaluation": pa.bool_(), "completed": pa.bool_(), "reward": pa.float64()}
    return pa.schema({"messages": pa.list_(message), "tools": text, **dict.fromkeys(TEXTS, text), **facts})


def parquet_row(chat: Chat) -> dict[str, Any]:
    """A row of the schema, of a failed rollout too. Absent keys are null there."""
    if not chat.messages:
        raise Unsuitable("no messages")
    if chat.branches_omitted:
        chat.warnings.add(BRANCHES_OMITTED)
    texts = {name: chat.facts.get(name) for name in TEXTS}
    return {
        "messages": [
            _message(message, chat.warnings) | ({"weight": 0} if place in chat.not_sampled else {})
            for place, message in enumerate(chat.messages)
        ],
        "tools": tools_text(chat.tools),
        **{name: None if value is None else str(value) for name, value in texts.items()},
        **{name: chat.facts.get(name) for name in ("evaluation", "completed", "reward")},
    }


def _message(message: Mapping[str, Any], warnings: set[str]) -> dict[str, Any]:
    content = message.get("content")
    row = {"role": message["role"], "content": None if content is None else plain_text(content, warnings)}
    if message.get("reasoning"):
        row["reasoning"] = valid_text(message["reasoning"], warnings)
    if calls := message.get("tool_calls"):
        row["tool_calls"] = [_call(call["id"], call["function"], warnings) for call in calls]
    if message.get("tool_call_id"):
        row["tool_call_id"] = message["tool_call_id"]
    return row


def _call(call_id: str, function: Mapping[str, Any], warnings: set[str]) -> dict[str, Any]:
    written = {"name": function["name"], "arguments": valid_text(function["arguments"], warnings)}
    return {"id": call_id, "type": "function", "function": written}


class ParquetWriter:
    """Writes rows in row groups, so that memory does not grow with the file. Raises OSError, JsonlError or
    DatasetsMissing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._schema = schema()
        import pyarrow.parquet

        self._file = path.open("wb")
        self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._size = 0

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._size += sum(len(message["content"] or "") for message in row["messages"])
        if len(self._rows) >= _ROWS or self._size >= _BYTES:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            # A writer that is not closed closes itself later, with a traceback on stderr.
            with suppress(OSError) if kind is not None else nullcontext():
                self._writer.close()
            self._file.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            try:
                self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            except pa.ArrowInvalid as error:
                raise JsonlError(self.path, f"a row does not fit the schema: {error}") from error
            self._rows, self._size = [], 0


parquet = of_rollouts(parquet_row)
parquet.open = ParquetWriter  # type: ignore[attr-defined]


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a file without the nulls that Arrow adds to messages: see `unpadded`. Raises JsonlError."""
    return (unpadded(row)[0] for row in raw_rows(path))


def raw_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file as they are, some hundred read at a time. Raises JsonlError or DatasetsMissing."""
    need_datasets(str(path), "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=200):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise WrongContent(path, f"cannot be read as Parquet ({error})") from error
