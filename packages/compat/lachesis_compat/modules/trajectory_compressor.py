"""`lachesis compress` under its old name: `python -m trajectory_compressor`, with the same flags."""

from __future__ import annotations

import sys

from lachesis.cli import main as lachesis


def main(argv: list[str] | None = None) -> int:
    """Fit trajectories into a budget of tokens; the exit code."""
    return lachesis(["compress", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
