"""Which folder a run has: where its earlier start was, or one of its own."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lachesis.runs.ledger import CONTINUE, Ledger, OldCode, own_path
from lachesis.runs.own_code import OwnCode
from lachesis.runs.prose import print_prose
from lachesis.runs.results import RunFiles
from lachesis_messages.records.jsonl import read_lines

Choice = Literal["ask", "new_folder", "continue"]


async def own_place(
    files: RunFiles,
    settings: Mapping[str, Any],
    items: Sequence[str],
    code: OwnCode | None,
    named: bool,
    choice: Choice,
    console: Console,
) -> tuple[RunFiles, bool]:
    """The files of a run, and whether it continues what other code of the environment has begun there.

    Args:
        named: somebody chose the folder. Otherwise a run with other settings, items or code than the one there gets
            the next free one.
        choice: what becomes of a run that other code has begun.
    """
    asks = choice == "ask" and _is_terminal(console)
    old = await asyncio.to_thread(Ledger(files.groups, settings, items, code).old_code) if named else None
    if named and (old is None or (choice == "ask" and not asks)):
        return files, False  # not left for another folder without a word: where it does not fit, the ledger refuses
    path, differs, of_any = await asyncio.to_thread(own_path, files.groups, settings, items, code)
    old = old or of_any
    if old is not None:
        if asks:
            choice = await _answer(console, old, path.parent)
        if choice == "continue":
            return RunFiles(old.path), True
        differs = old.change
    if differs:
        note = f"note: {differs}, so this run writes to {path.parent}"
        if old is not None:
            note += f"; {CONTINUE}"
        note += await asyncio.to_thread(_regraded, files.groups if old is None else old.path)
        print_prose(console, note, style="yellow")
    return RunFiles(path), False


def _is_terminal(console: Console) -> bool:
    return console.is_terminal and sys.stdin is not None and sys.stdin.isatty()


async def _answer(console: Console, old: OldCode, new: Path) -> Choice:
    """What somebody at the terminal wants. Enter, and the end of the input, are a new folder."""
    said = (
        f"{old.change}, and finished groups keep the scores of the old code{_regraded(old.path)}\n"
        f"Begin another run in {new}, or continue {old.path.parent}? [N/c] "
    )
    console.print(said, style="yellow", markup=False, highlight=False, soft_wrap=True, end="")
    loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def read() -> None:
        if not answer.done():
            answer.set_result(os.read(sys.stdin.fileno(), 4096).decode(errors="replace"))

    loop.add_reader(sys.stdin.fileno(), read)  # a thread that waits for input could not be stopped
    try:
        text = await answer
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return "continue" if text.strip().lower() in ("c", "continue") else "new_folder"


def _regraded(groups: Path) -> str:
    """How to grade finished rollouts again without playing them, if their artifacts were kept."""
    for group in read_lines(groups, torn_tail=True) if groups.exists() else ():
        kept = [(rollout.get("verifier") or {}).get("artifacts") for rollout in group["rollouts"]]
        return f"; `lachesis eval regrade {shlex.quote(str(groups.parent))}` grades it again" if any(kept) else ""
    return ""
