"""Solutions of the problems that reasoning-gym hands out without an answer. `child` imports it."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

_SIDE = 6  # of the board of Rush Hour


def solution(generator: str, metadata: Mapping[str, Any]) -> str | None:
    """An answer that is right; None for an unknown generator."""
    if generator == "graph_color":
        return json.dumps(metadata["possible_answer"])
    if generator == "boxnet":
        return json.dumps(list(_carry(metadata["initial_state"])))
    if generator == "rush_hour":
        return _drive(metadata["board_config"])
    found = metadata.get("example_answer") or metadata.get("example_correct_answer")
    return None if found is None else str(found)


def _carry(state: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    """Carries each box to a target of its colour, square by square; one move a step."""
    places = {(float(x), float(y)): list(things) for (x, y), things in ((key.split("_"), state[key]) for key in state)}
    for start, things in places.items():
        for box in [thing for thing in things if thing.startswith("box_")]:
            target = box.replace("box_", "target_")
            x, y = start
            end_x, end_y = next(place for place, there in places.items() if target in there)
            places[end_x, end_y].remove(target)
            while (x, y) != (end_x, end_y):
                step = (x + (1 if end_x > x else -1), y) if x != end_x else (x, y + (1 if end_y > y else -1))
                yield {f"Agent[{x}, {y}]": f"move({box}, square[{step[0]}, {step[1]}])"}
                x, y = step
            yield {f"Agent[{x}, {y}]": f"move({box}, {target})"}


def _drive(board: str) -> str:
    """A shortest solution of Rush Hour, by breadth-first search. The first car leaves by the right."""
    labels = sorted(set(re.sub("[ox]", "", board)))
    cells = [[at for at, label in enumerate(board) if label == car] for car in labels]
    across = [found[1] - found[0] == 1 for found in cells]
    walls = frozenset(at for at, label in enumerate(board) if label == "x")

    def covered(car: int, start: int) -> range:
        stride = 1 if across[car] else _SIDE
        return range(start, start + stride * len(cells[car]), stride)

    first = tuple(found[0] for found in cells)
    before: dict[tuple[int, ...], tuple[tuple[int, ...], str] | None] = {first: None}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        if covered(0, state[0])[-1] % _SIDE == _SIDE - 1:
            moves = []
            at = state
            while (came := before[at]) is not None:
                at, move = came
                moves.append(move)
            return " ".join(reversed(moves))
        taken = walls.union(*(covered(car, start) for car, start in enumerate(state)))
        for car, start in enumerate(state):
            for sign in (1, -1):
                for steps in range(1, _SIDE):
                    there = covered(car, start + sign * steps * (1 if across[car] else _SIDE))
                    new = there[-1] if sign > 0 else there[0]
                    inside = new // _SIDE == start // _SIDE if across[car] else 0 <= new < _SIDE * _SIDE
                    if not inside or new in taken - set(covered(car, start)):
                        break
                    after = (*state[:car], there[0], *state[car + 1 :])
                    if after not in before:
                        before[after] = (state, f"{chr(ord('A') + car)}{sign * steps:+d}")
                        queue.append(after)
    raise ValueError(f"the board {board} has no solution")
