"""`lachesis compress` under its old name: `python -m trajectory_compressor`, with the same flags."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points


def main(argv: list[str] | None = None) -> int:
    """Fit trajectories into a budget of tokens; the exit code."""
    (lachesis,) = entry_points(group="console_scripts", name="lachesis")
    return int(lachesis.load()(["compress", *(sys.argv[1:] if argv is None else argv)]))


if __name__ == "__main__":
    sys.exit(main())
