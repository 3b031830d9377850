"""`lachesis process ENV`: play groups of rollouts, and write them down."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.cli import play_environment


def main(argv: Sequence[str] | None = None) -> int:
    return play_environment.main("process", argv)
