"""One run of `process_lag.py`, in a separate process, with the packages of the checkout that PYTHONPATH names."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from typing import Any, cast

from lachesis.base_env import HermesAgentBaseEnv
from lachesis.runs import command_line
from lachesis_tools import BUILTIN_TOOLS, ToolSession, tool

TICK, PROBE = 0.001, 0.005
"""Seconds of sleep between two measurements of the task and of the thread."""
CLOCKS = ("loop CPU", "CPU", "wall")

Times = tuple[float, float, float]


class Waits:
    """What the loop of this thread makes others wait for, from `start` on."""

    def __init__(self) -> None:
        self.task_waits: list[tuple[float, Times]] = []
        """When, and the seconds by each clock of `CLOCKS`."""
        self.thread_waits: list[tuple[float, Times]] = []
        self.collections: list[tuple[float, int, float]] = []
        """When, the generation, and the seconds."""
        self._thread_clock = time.pthread_getcpuclockid(threading.get_ident())

    def now(self) -> Times:
        return time.clock_gettime(self._thread_clock), time.process_time(), time.perf_counter()

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(self._tick())
        threading.Thread(target=self._probe, daemon=True).start()
        gc.callbacks.append(self._collected)

    async def _tick(self) -> None:
        while True:
            before = self.now()
            await asyncio.sleep(TICK)
            self.task_waits.append((time.perf_counter(), self._since(before, TICK)))

    def _probe(self) -> None:
        called = threading.Event()
        found: list[Times] = []

        def call() -> None:
            found.append(self._since(before))
            called.set()

        while True:
            time.sleep(PROBE)
            before = self.now()
            try:
                self.loop.call_soon_threadsafe(call)
            except RuntimeError:  # the loop is closed
                return
            if not called.wait(60.0):
                return
            called.clear()
            self.thread_waits.append((time.perf_counter(), found.pop()))

    def _since(self, before: Times, slept: float = 0.0) -> Times:
        own, process, wall = (now - then for now, then in zip(self.now(), before, strict=True))
        return own, process, wall - slept

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.collections.append((time.perf_counter(), info["generation"], time.thread_time() - self._began))


def work(given: dict[str, Any]) -> None:
    """One run, in this process. Prints a line of JSON with its figures."""

    @tool(toolset="noop", concurrency_safe=True)
    async def noop(session: ToolSession, text: str = "", query: str = "", limit: int = 0) -> str:
        """Does nothing."""
        if given["sandbox"]:
            await session.sandbox()
        return str(given["observation"])

    waits = Waits()
    marks: dict[str, Times] = {}
    scored = 0
    started = waits.now()

    class Noop(HermesAgentBaseEnv):
        """A tool and a reward that cost nothing."""

        name = "noop"
        tools = BUILTIN_TOOLS.extended(noop)
        toolsets = ("noop",)

        async def setup(self) -> None:
            waits.start()
            self.drawn = 0

        async def get_next_item(self) -> Any:
            marks.setdefault("play", waits.now())
            self.drawn += 1
            return {"question": f"What is the answer to question {self.drawn}?"}

        def format_prompt(self, item: Any) -> str:
            return str(item["question"])

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            nonlocal scored
            if result.turns_used != given["turns"] + 1:
                raise RuntimeError(f"{result.turns_used} turns: {result.reason}")
            scored += 1
            marks["scored"] = waits.now()
            return scored % 2

        async def teardown(self) -> None:
            marks["end"] = waits.now()
            waits.task.cancel()

    code = command_line.main(cast(Any, Noop), given["arguments"])
    if code:
        raise SystemExit(code)
    play, end = marks["play"], marks["end"]
    turns = scored * (given["turns"] + 1)
    phases = {"start": (started, play), "play": (play, marks["scored"]), "end": (marks["scored"], end)}
    found: dict[str, Any] = {
        "turns": turns,
        "CPU": 1e3 * (end[1] - play[1]) / turns,
        "loop CPU": 1e3 * (end[0] - play[0]) / turns,
        "seconds": end[2] - play[2],
        "objects": len(gc.get_objects()),
        "full collections": sum(generation == 2 for at, generation, _ in waits.collections if at > play[2]),
        "collections": 1e3 * sum(took for at, _, took in waits.collections if at > play[2]) / turns,
        "longest collection": 1e3 * max((took for at, _, took in waits.collections if at > play[2]), default=0.0),
    }
    for measured, by in ((waits.task_waits, "task"), (waits.thread_waits, "thread")):
        for phase, (after, until) in phases.items():
            of_phase = [wait for at, wait in measured if after[2] <= at <= until[2] + 0.01] or [(0.0, 0.0, 0.0)]
            for place, clock in enumerate(CLOCKS):
                ordered = sorted(1e3 * wait[place] for wait in of_phase)
                quantiles = (ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1])
                found[f"{by}, {phase}, {clock}"] = quantiles
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
