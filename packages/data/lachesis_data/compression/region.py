"""Which turns of a conversation a summary replaces. Plain numbers: entries and running rollouts share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lachesis_data.compression.settings import CompressionSettings, ProtectedTurns

Role: TypeAlias = Literal["system", "human", "gpt", "tool"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the choice needs to know about a turn, or about a message."""

    role: Role
    tokens: int
    """How many leave the context with it; an estimate will do."""
    opens_calls: bool = False
    """It is a gpt turn with tool calls. The tool turns that directly follow it are their results."""
    protected: bool = False
    """No summary may replace it, whatever the settings say."""


def choose_region(turns: Sequence[Turn], settings: CompressionSettings, target: int) -> range | None:
    """The indices of the turns that one summary replaces, so that about `target` tokens are left with the summary.

    It starts after the first protected turns and is as short as possible. A gpt turn and the results of its calls are
    in it together or not at all, and calls without results at the end of the conversation are not. Where nothing is
    enough, it is the stretch with the most tokens. None where no summary would make the conversation shorter.
    """
    summary = settings.compression.summary_target_tokens
    excess = sum(turn.tokens for turn in turns) - target + summary
    best: range | None = None
    most = summary
    for stretch in _stretches(turns, settings.protected_turns):
        saved = 0
        for block in stretch:
            saved += sum(turns[index].tokens for index in block)
            if saved >= excess and saved > summary:
                return range(stretch[0].start, block.stop)
        if saved > most:
            best, most = range(stretch[0].start, stretch[-1].stop), saved
    return best


def _stretches(turns: Sequence[Turn], settings: ProtectedTurns) -> Iterator[list[range]]:
    """The longest runs of blocks without a protected turn."""
    kept = protected(turns, settings)
    run: list[range] = []
    for block in _blocks(turns):
        open_calls = block.stop == len(turns) and turns[block.stop - 1].opens_calls
        if open_calls or not kept.isdisjoint(block):
            if run:
                yield run
            run = []
        else:
            run.append(block)
    if run:
        yield run


def _blocks(turns: Sequence[Turn]) -> Iterator[range]:
    """Each turn that is no result, with the results that follow it."""
    start = 0
    for index in range(1, len(turns) + 1):
        if index == len(turns) or turns[index].role != "tool":
            yield range(start, index)
            start = index


def protected(turns: Sequence[Turn], settings: ProtectedTurns) -> set[int]:
    """The indices of the turns that no summary replaces."""
    firsts: dict[str, int] = {}
    for index, turn in enumerate(turns):
        firsts.setdefault(turn.role, index)
    kept = {index for role, index in firsts.items() if getattr(settings, f"first_{role}")}
    kept.update(index for index, turn in enumerate(turns) if turn.protected)
    kept.update(range(max(0, len(turns) - settings.last_n_turns), len(turns)))
    return kept
