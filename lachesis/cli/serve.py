"""`lachesis serve ENV`: play groups for a trainer."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.cli import play_environment


def main(argv: Sequence[str] | None = None) -> int:
    return play_environment.main("serve", argv)
