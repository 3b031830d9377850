"""Records what the guests of doors say of one item: `python -m tests.doors.real.record_frames`.

`tests/doors/test_recorded.py` plays the recordings without the packages. `test_real.py`, for which `make test-doors`
installs them, compares the recordings with what they say. The texts are BFCL's (Apache 2.0) and TextArena's (MIT).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis_doors.guest_process import INSIDE, GuestProcess
from lachesis_doors.processes import PACKAGES, interpreter

FRAMES = Path(__file__).parents[1] / "frames"


def guesses(said: Sequence[str]) -> str:
    """The next number of a binary search from 1 to 20, after the game's answers."""
    low, high = 1, 20
    for answer in said:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in answer.lower() else (low, middle - 1)
    return f"[{(low + high) // 2}]"


RECORDED: Mapping[str, tuple[str, Callable[[Sequence[str]], str] | None]] = {
    "bfcl": ("multi_turn_base", None),
    "textarena": ("GuessTheNumber-v0", guesses),
}
"""By scheme: the target, and what the agent says after the answers so far; None for the turns of the solution."""


async def frames_of(scheme: str) -> list[dict[str, Any]]:
    """Every call into the guest while its first item is played to the end, with its answer."""
    target, says = RECORDED[scheme]
    guest = GuestProcess(interpreter(scheme, PACKAGES[scheme]), INSIDE / f"{scheme}.py", target, {})
    frames: list[dict[str, Any]] = []

    async def ask(call: str, session: str | None = None, sent: Mapping[str, Any] | None = None, **given: Any) -> Any:
        value = await guest.call(call, session, **{**given, **(sent or {})})
        frames.append({"call": call, "with": given, "value": value})
        return value

    try:
        await guest.start()
        frames.append({"call": "load", "with": {}, "value": dict(guest.about)})
        item = await ask("item", number=0)
        solution = (await ask("open", "one", item=item["item"]))["solution"]
        heard: list[str] = []
        for turn in solution or iter(dict, None):
            if "calls" in turn:
                for call in turn["calls"]:
                    await ask("call", "one", **call)
                continue
            answer = await ask("act", "one", text=turn["text"] if says is None else says(heard))
            if answer is None or answer.get("done"):
                break
            heard.append(answer["text"])
        await ask("score", "one", {"messages": []})
    finally:
        await guest.close()
    return frames


def main() -> None:
    FRAMES.mkdir(exist_ok=True)
    for scheme in RECORDED:
        lines = [json.dumps(frame, ensure_ascii=False) + "\n" for frame in asyncio.run(frames_of(scheme))]
        (FRAMES / f"{scheme}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
