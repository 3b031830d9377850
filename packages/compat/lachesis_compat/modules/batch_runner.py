"""`lachesis batch` under its old name: `python -m batch_runner`, with the same flags."""

from __future__ import annotations

import sys

from lachesis.cli import main as lachesis


def main(argv: list[str] | None = None) -> int:
    """Play a file of prompts, or merge shards; the exit code."""
    return lachesis(["batch", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
