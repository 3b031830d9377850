"""The ids that a model can sample: those of its tokenizer, and the rows with which its embedding is padded.

Models have more rows than their tokenizer has entries (Qwen 2.5: 151,936 rows for 151,665 entries), and servers may
sample the others. Such a token was sampled like any other: it stays in its completion, and no text shows what it means.
An id beyond the rows was sampled by no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lachesis_client.errors import BadResponse

ANY_ROW: Final = 1 << 32
"""The rows of a model that is sampled in this process, where ids are the numbers of its rows."""


class Vocabulary:
    """Checks the ids that servers of one model report.

    Args:
        described: the tokenizer, for messages.
        rows: rows of the model's embedding. Default: `vocab_size` of the `config.json` next to the tokenizer, in its
            folder or in the hub's cache.
    """

    def __init__(self, tokenizer: Any, described: str, rows: int | None = None) -> None:
        self.described = described
        self.entries = max(len(tokenizer), *(number + 1 for number in tokenizer.added_tokens_decoder), 0)
        """One more than the largest id of the tokenizer."""
        known = rows if rows is not None else _rows_beside(getattr(tokenizer, "name_or_path", ""))
        self.rows = max(self.entries, known or 0)

    def check(self, server: str, ids: Sequence[int]) -> None:
        """Raises `BadResponse` for an id that the model cannot have sampled."""
        if ids and (largest := max(ids)) >= self.rows:
            padding = f", and the model {self.rows} rows" if self.rows > self.entries else ""
            raise BadResponse(
                server,
                f"it sampled the id {largest}, and the tokenizer {self.described} has {self.entries} ids{padding}",
                "set --openai.tokenizer_name to the folder or name of the model that the server runs; with its "
                "config.json beside the tokenizer, ids of a padded vocabulary are accepted",
            )

    def count_padding(self, ids: Iterable[int]) -> int:
        """How many of the ids are beyond the tokenizer."""
        return sum(number >= self.entries for number in ids)


def _rows_beside(name: str) -> int | None:
    """`vocab_size` of the model with this tokenizer. Asks no network."""
    path: Path | str | object | None = Path(name) / "config.json" if name and Path(name).is_dir() else None
    if name and path is None:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(name, "config.json")
        except HFValidationError:
            return None
    if not isinstance(path, str | Path):
        return None
    try:
        config = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    parts = [config, *(config.get(part) for part in ("text_config", "llm_config"))] if isinstance(config, dict) else []
    sizes = [part.get("vocab_size") for part in parts if isinstance(part, Mapping)]
    return max((size for size in sizes if type(size) is int), default=None)
