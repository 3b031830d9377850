"""`lachesis serve ENV`: play groups for a trainer. With `--as STANDARD`, be a server of another standard."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.cli import command, play_environment


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(argv or ())
    if any(text.partition("=")[0] == "--as" for text in arguments):
        return command("serve as")(arguments)
    return play_environment.main("serve", arguments)
