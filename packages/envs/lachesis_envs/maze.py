"""A small maze of files: a task of at least five turns, whose place is kept in the sandbox.

    lachesis process maze -n 2 -m reference
    lachesis train --env maze --config configs/train_maze.yaml

A room is a file that lists its doors, each with a colour. Those of the colour that the task names lead to the end; one
of another colour leads to a dead end or back. Where the agent stands is a file too, so a copy of the sandbox goes on
from the same room.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lachesis_envs.tool_call import DrawnItems, arguments
from lachesis_messages.messages import Message, ToolCall
from lachesis_tools import ToolFailure, ToolRegistry, ToolResult, ToolSession, tool

if TYPE_CHECKING:
    from lachesis import AgentResult, Policy

STEPS = 5
"""Doors between the hall and the end, on the shortest way."""
HERE = "here"
"""The file with the name of the room in which the agent stands."""
HALL = "hall"
END = "This is the end."

COLOURS = ("red", "blue", "green", "white", "black")
NAMES = (
    *("ash", "bell", "bone", "clay", "coal", "crow", "fig", "fire", "fox", "glass", "iron", "lake", "leaf", "lime"),
    *("lion", "mist", "moon", "owl", "pine", "rain", "reed", "river", "rose", "rust", "salt", "sand", "sea", "sky"),
    *("snow", "star", "stone", "storm", "tin", "vine", "wind", "wolf", "wood"),
)


def maze(number: int) -> dict[str, Any]:
    """The maze of a number: the `colour` to follow, the text of each of its `rooms`, and the room at the `end`.

    A room on the way has a door to the next one, one to a dead end and, but for the hall, one back.
    """
    rng = random.Random(f"maze {number}")
    colour, *others = rng.sample(COLOURS, len(COLOURS))
    names = rng.sample(NAMES, 2 * STEPS)
    way, dead_ends = [HALL, *names[:STEPS]], names[STEPS:]
    rooms = {}
    for at, dead_end in enumerate(dead_ends):
        wrong = [dead_end, way[at - 1]] if at else [dead_end]
        doors = [(colour, way[at + 1]), *zip(rng.sample(others, len(wrong)), wrong, strict=True)]
        rng.shuffle(doors)
        rooms[way[at]] = "doors: " + ", ".join(map(" ".join, doors))
        rooms[dead_end] = f"doors: {colour} {way[at]}"
    return {"colour": colour, "rooms": {**rooms, way[-1]: END}, "end": way[-1]}


def doors_of(text: str) -> dict[str, str]:
    """The colours of the doors that a text lists, by the rooms to which they lead."""
    return {room: colour for colour, room in re.findall(r"(\w+) (\w+)", text.partition("doors: ")[2])}


def room_after(calls: Iterable[ToolCall], rooms: Mapping[str, str]) -> str:
    """Where these calls lead from the hall; one that names no door of its room leads nowhere."""
    here = HALL
    for call in calls:
        given = arguments(call)
        if call.name == go.name and given.keys() == {"door"} and given["door"] in doors_of(rooms[here]):
            here = given["door"]
    return here


def calls_of(result: AgentResult) -> list[ToolCall]:
    """All calls of the conversation, repaired or not."""
    return [call for answer in result.history.responses() for call in answer.message.tool_calls]


@tool(toolset="maze", errors=[OSError])
async def go(door: str, session: ToolSession) -> ToolResult:
    """Go through a door of the room.

    Args:
        door: The name that follows its colour.
    """
    sandbox = await session.sandbox()
    here = (await sandbox.read_bytes(HERE)).decode()
    if door not in doors_of((await sandbox.read_bytes(f"rooms/{here}")).decode()):
        raise ToolFailure("there is no such door here")
    text = (await sandbox.read_bytes(f"rooms/{door}")).decode()
    await sandbox.write_bytes(HERE, door.encode())
    return ToolResult(text, done=text == END)


class MazeEnv(DrawnItems):
    """1.0 for coming to the end by well-formed calls; anything else earns nothing.

    A call that the parser had to repair is run, so that the model may go on, and earns nothing.
    """

    name = "maze"
    toolsets = ("maze",)
    tools = ToolRegistry([go])
    needs_sandboxes = True
    max_turns = STEPS + 2  # one dead end, and back
    highest = 99_999

    def draw(self, rng: random.Random, highest: int) -> Mapping[str, Any]:
        number = rng.randint(1, highest)
        drawn = maze(number)
        return {"question": f"Follow the {drawn['colour']} doors.\n{drawn['rooms'][HALL]}", "maze": number, **drawn}

    def sandbox_files(self, item: Mapping[str, Any]) -> Mapping[str, str]:
        return {HERE: HALL, **{f"rooms/{room}": text for room, text in item["rooms"].items()}}

    async def compute_reward(self, item: Mapping[str, Any], result: AgentResult, ctx: Any) -> float:
        calls = calls_of(result)
        came = all(call.ok for call in calls) and room_after(calls, item["rooms"]) == item["end"]
        return float(came and await ctx.read_file(HERE) == item["end"])

    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
        """With `right_as_read`: the share of rollouts that come to the end, by repaired calls or not."""
        right = room_after(calls_of(result), item["rooms"]) == item["end"]
        return {**super().rollout_metrics(item, result, reward), "right_as_read": float(right)}

    def reference_policy(self) -> Policy:
        """Takes the door of the colour that the task names."""

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            task = next(str(message["content"]) for message in messages if message["role"] == "user")
            colour = task.split()[2]
            doors = doors_of(str(messages[-1]["content"]))
            door = next(room for room, seen in doors.items() if seen == colour)
            return Message("assistant", tool_calls=(ToolCall("call_1", "go", json.dumps({"door": door})),))

        return policy
