"""Plays an environment of another standard as that standard's own programs do, without a model.

    python door_drivers.py SCHEME TARGET TURNS [MODEL]

Runs in the interpreter that has the standard's package, and prints `{"turns", "cpu"}`: steps, and the seconds of CPU
that `cpu` counts. A short run is subtracted from a long one, so that imports and loading are not in them. MODEL is the
URL of a chat route, for those whose driver asks a model over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path


class Clock:
    """Counts turns, up to a number of them."""

    def __init__(self, turns):
        self.asked = turns
        self.played = 0

    def turn(self, count=1):
        self.played += count
        return self.open

    @property
    def open(self):
        return self.played < self.asked


def textarena(target, model):
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


def gymnasium(target, model):
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


def skyrl(target, model):
    import skyrl_gym

    def episode(seed, clock):
        env = skyrl_gym.make(target, env_config={}, extras={"reward_spec": {"ground_truth": "42"}})
        env.init([{"role": "user", "content": "What is 6 * 7?"}])
        env.step("#### 42")
        clock.turn()
        env.close()

    return episode


def bfcl(target, model):
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


def openenv(target, model):
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


def ors(target, model):
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


def mcp(target, model):
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


def nemogym(target, model):
    """NeMo Gym's own agent, its model server and the resources server, over HTTP as always, but in one process."""
    import importlib

    import nemo_gym
    import uvicorn
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
    from omegaconf import OmegaConf
    from responses_api_agents.simple_agent.app import SimpleAgent
    from responses_api_models.vllm_model.app import VLLMModel

    os.chdir(Path(nemo_gym.__file__).parents[1])
    resources = importlib.import_module(f"resources_servers.{target}.app")
    base = resources.SimpleResourcesServer
    found = [each for each in vars(resources).values() if isinstance(each, type) and issubclass(each, base)]
    rows = [
        json.loads(line) for line in Path(f"resources_servers/{target}/data/example.jsonl").read_text().splitlines()
    ]
    refer = {
        "resources_server": {"type": "resources_servers", "name": "resources"},
        "model_server": {"type": "responses_api_models", "name": "model"},
    }
    flags = dict.fromkeys(("return_token_id_information", "uses_reasoning_parser"), False)
    server = {
        "resources": (found[-1], {"domain": "agent"}),
        "model": (VLLMModel, {"base_url": model, "api_key": "none", "model": "scripted", **flags}),
        "agent": (SimpleAgent, refer),
    }
    places = {}
    for name, (_, settings) in server.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            at = {"host": "127.0.0.1", "port": free.getsockname()[1]}
        places[name] = {**at, "entrypoint": "app.py", "name": name, **settings}
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({name: {"servers": {name: place}} for name, place in places.items()}),
    )
    loop = asyncio.new_event_loop()

    async def start():
        set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
        running = []
        for name, (cls, _) in server.items():
            made = cls(config=cls.model_fields["config"].annotation(**places[name]), server_client=client)
            at = {"host": "127.0.0.1", "port": places[name]["port"]}
            running.append(uvicorn.Server(uvicorn.Config(made.setup_webserver(), **at, log_level="error")))
        tasks = [loop.create_task(each.serve()) for each in running]
        while not all(each.started for each in running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return tasks  # they end with this process

    running = loop.run_until_complete(start())

    async def play(row):
        answer = await client.post(server_name="agent", url_path="/run", json=row)
        found = json.loads(await answer.read())
        assert answer.status == 200 and running, found
        return sum(item["type"] in ("message", "function_call") for item in found["response"]["output"])

    def episode(seed, clock):
        clock.turn(loop.run_until_complete(play(rows[seed % len(rows)])))

    return episode


def tau2(target, model):
    """Its environment of Gymnasium, with a customer who tells all and ends, as that of the door."""
    from loguru import logger
    from tau2.data_model.message import UserMessage
    from tau2.gym.gym_agent import AgentGymEnv
    from tau2.registry import registry
    from tau2.user.base import STOP
    from tau2.user.user_simulator import UserSimulator

    logger.remove()
    tasks = registry.get_tasks_loader(target)()

    class Script(UserSimulator):
        def _generate_next_message(self, message, state):
            said = UserMessage(role="user", content=STOP if state.messages else str(self.instructions))
            state.messages += [message, said]
            return said, state

    class Scripted(AgentGymEnv):
        def _get_user(self):
            user = super()._get_user()
            return Script(tools=user.tools, instructions=user.instructions)

    def episode(seed, clock):
        task = tasks[seed % len(tasks)]
        env = Scripted(domain=target, task_id=task.id)
        env.reset()
        for each in task.evaluation_criteria.actions or ():
            env.step(json.dumps({"name": each.name, "arguments": each.arguments}))
            clock.turn()
        *_, over, _, _ = env.step("Done.")
        assert over
        clock.turn()

    return episode


def verifiers(target, model):
    """An evaluation, with a process of the harness `null` for each rollout."""
    from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    sys.path.insert(0, str(Path(target).parent))
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    settings = {"taskset": {"id": Path(target).stem}, "agent": agent, "interception": {"type": "server"}}
    context = ModelContext("scripted", EvalClientConfig(base_url=model, api_key_var="NO_KEY"), SamplingConfig())

    async def evaluate(clock):
        env = load_environment(resolve_env_config(settings))
        async with env.serving():
            for task in env.taskset:
                episode = await env.run_slot(env.slots(task)[0], context)
                (trace,) = episode.traces
                assert episode.ok, (episode.errors, trace.errors)
                if not clock.turn(trace.num_turns):
                    return

    return lambda seed, clock: asyncio.run(evaluate(clock))


def inspect(target, model):
    """An evaluation with its own model of tests."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    def answer(messages, tools, choice, config):
        number = sum(message.role == "assistant" for message in messages)
        if number == 4:
            said = ModelOutput.from_content("mockllm/model", "7")
        else:
            said = ModelOutput.for_tool_call("mockllm/model", "compare", {"number": number})
        said.usage = ModelUsage(input_tokens=10, output_tokens=5, total_tokens=15)  # or it downloads a tokenizer
        return said

    def episode(seed, clock):
        mock = get_model("mockllm/model", custom_outputs=answer, memoize=False)
        count = (clock.asked + 4) // 5
        with tempfile.TemporaryDirectory() as logs:
            (log,) = evaluate(target, model=mock, task_args={"count": count}, display="none", log_dir=logs)
        assert log.status == "success", log.error
        clock.turn(5 * count)

    return episode


def cpu(scheme: str) -> float:
    """Seconds of this process, and of those that it started and that have ended. Those of MCP are its servers."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    apart = 0.0 if scheme == "mcp" else children.ru_utime + children.ru_stime
    return time.process_time() + apart


def main(scheme, target, turns, model=None):
    def spent(turns):
        clock, began = Clock(turns), cpu(scheme)
        while clock.open:
            episode(next(seeds), clock)
        return cpu(scheme) - began, clock.played

    with contextlib.redirect_stdout(sys.stderr):
        episode, seeds = globals()[scheme](target, model), itertools.count()
        spent(1)  # loads what is loaded at the first use
        (short, few), (long, many) = spent(1), spent(turns)
    print(json.dumps({"turns": many - few, "cpu": long - short}), flush=True)
    os._exit(0)  # what the standards do at the end of a process is not measured


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
