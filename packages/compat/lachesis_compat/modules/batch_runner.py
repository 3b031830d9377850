"""`lachesis batch` under its old name: `python -m batch_runner`, with the same flags."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points


def main(argv: list[str] | None = None) -> int:
    """Play a file of prompts, or merge shards; the exit code."""
    (lachesis,) = entry_points(group="console_scripts", name="lachesis")
    return int(lachesis.load()(["batch", *(sys.argv[1:] if argv is None else argv)]))


if __name__ == "__main__":
    sys.exit(main())
