"""Plays an environment of another standard as that standard's own programs do, without a model.

    python door_drivers.py SCHEME TARGET TURNS

Runs in the interpreter that has the standard's package, and prints `{"turns", "cpu"}`: steps, and seconds of CPU of
this process for resets and steps. Imports and loading are not in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time


class Clock:
    """Counts turns, up to a number of them."""

    def __init__(self, turns):
        self.left = self.asked = turns
        self.began = time.process_time()

    def turn(self):
        self.left -= 1
        return self.left > 0

    @property
    def open(self):
        return self.left > 0


def textarena(target, turns):
    import textarena as ta

    def episode(seed, clock):
        random.seed(seed)
        env = ta.make(env_id=target)
        env.reset(num_players=1, seed=seed)
        done = False
        while not done:
            env.get_observation()
            done, _ = env.step("[7]")
            if not clock.turn():
                return

    return episode


def gymnasium(target, turns):
    import gymnasium as gym

    def episode(seed, clock):
        env = gym.make(target, render_mode="ansi")
        env.reset(seed=seed)
        draw, over = random.Random(seed), False
        while not over:
            _, _, ended, cut, _ = env.step(draw.randrange(env.action_space.n))
            env.render()
            over = ended or cut
            if not clock.turn():
                return

    return episode


def skyrl(target, turns):
    import skyrl_gym

    def episode(seed, clock):
        env = skyrl_gym.make(target, env_config={}, extras={"reward_spec": {"ground_truth": "42"}})
        env.init([{"role": "user", "content": "What is 6 * 7?"}])
        env.step("#### 42")
        clock.turn()
        env.close()

    return episode


def bfcl(target, turns):
    from pathlib import Path

    import bfcl_eval
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

    data = Path(bfcl_eval.__file__).parent / "data"
    rows = [json.loads(line) for line in (data / f"BFCL_v4_{target}.json").read_text().splitlines()]
    answers = [json.loads(line) for line in (data / f"possible_answer/BFCL_v4_{target}.json").read_text().splitlines()]

    def episode(seed, clock):
        row, answer = rows[seed % len(rows)], answers[seed % len(rows)]["ground_truth"]
        for calls in answer:
            for call in calls:
                multi_turn_utils.execute_multi_turn_func_call(
                    [call], row["initial_config"], row["involved_classes"], f"driver{seed}", row["id"]
                )
                if not clock.turn():
                    return

    return episode


def openenv(target, turns):
    from openenv.core.generic_client import GenericEnvClient

    client = GenericEnvClient(base_url=target.replace("ws://", "http://")).sync()
    client.connect()

    def episode(seed, clock):
        client.reset(seed=seed)
        for said in ("what", "hello", "ahoy"):
            result = client.step({"message": said})
            if not clock.turn() or result.done:
                return

    return episode


def ors(target, turns):
    from ors.client import ORS

    address, _, name = target.rpartition("/")

    def episode(seed, clock):
        with ORS(base_url=address) as client:  # it closes its loop when it is forgotten
            env = client.environment(name)
            tasks = env.list_tasks(split="train")
            with env.session(task=tasks[seed % len(tasks)]) as session:
                session.get_prompt()
                for number in (1, 2, 3, 7):
                    result = session.call_tool("guess", {"number": number})
                    if not clock.turn() or result.finished:
                        return

    return episode


def mcp(target, turns):
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def play(clock):
        server = StdioServerParameters(command=target, args=[])
        async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            await session.list_tools()
            for _ in range(4):
                await session.call_tool("get_current_time", {"timezone": "UTC"})
                if not clock.turn():
                    return

    def episode(seed, clock):
        asyncio.run(play(clock))

    return episode


def main(scheme, target, turns):
    episode = globals()[scheme](target, turns)
    seed = 0
    with contextlib.redirect_stdout(sys.stderr):
        episode(seed, Clock(1))  # loads what is loaded at the first use
        clock = Clock(turns)
        while clock.open:
            seed += 1
            episode(seed, clock)
        spent = time.process_time() - clock.began
    print(json.dumps({"turns": clock.asked, "cpu": spent}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
