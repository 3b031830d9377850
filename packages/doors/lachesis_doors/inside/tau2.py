"""tau2-bench: an agent serves a customer, who is another model, or a script.

A target is a domain: `mock`, `airline`, `retail`, `telecom`. `user` is the URL of the customer's model (`user_model`;
its key, if it needs one, in OPENAI_API_KEY), or `scripted`: a customer who tells all of the task at once, and ends the
conversation at the agent's first message.
"""

import asyncio
import concurrent.futures
import json
import os
import sys
import traceback

from loguru import logger
from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
from tau2.gym.gym_agent import AgentGymEnv
from tau2.registry import registry
from tau2.user.base import STOP
from tau2.user.user_simulator import UserSimulator

logger.remove()
logger.add(sys.stderr, level="ERROR")
NOT_THE_AGENT = ("user_error", "infrastructure_error")
"""Reasons of an end that say nothing about the agent."""
SESSIONS = 512
"""Threads: each conversation waits in one for its customer."""


class Guest:
    def __init__(self, target, user=None, user_model=None, temperature=0.0, max_steps=100):
        domains = registry.get_task_sets()
        if target not in domains:
            raise ValueError("tau2 has no domain %r; there are %s" % (target, ", ".join(sorted(domains))))
        if user != "scripted" and not (user and user_model):
            raise ValueError(
                "tau2 needs a customer. Next step: add ?user=http://HOST:PORT/v1&user_model=NAME, or ?user=scripted"
            )
        self.domain = target
        self.tasks = registry.get_tasks_loader(target)()
        self.size = len(self.tasks)
        environment = registry.get_env_constructor(target)()
        self.tools = [described(tool.openai_schema["function"]) for tool in environment.get_tools()]
        self.settings = {"domain": target, "max_steps": max_steps}
        self.scripted = user == "scripted"
        if not self.scripted:
            key = os.environ.get("OPENAI_API_KEY") or "none"
            self.settings["user_llm"] = "openai/%s" % user_model
            self.settings["user_llm_args"] = {"api_base": user, "api_key": key, "temperature": temperature}
        self.threads = concurrent.futures.ThreadPoolExecutor(SESSIONS)

    def item(self, number):
        return {"item": {"number": number, "task": self.tasks[number].id}, "tools": self.tools}

    async def open(self, item):
        conversation = Conversation(self, self.tasks[item["number"]])
        await conversation.begin()
        return conversation


def described(function):
    return {key: function[key] for key in ("name", "description", "parameters")}


class Script(UserSimulator):
    def _generate_next_message(self, message, state):
        said = STOP if state.messages else str(self.instructions)
        answer = UserMessage(role="user", content=said)
        state.messages += [message, answer]
        return answer, state


class Simulation(AgentGymEnv):
    """tau2's own, which keeps why it failed."""

    failure = None

    def __init__(self, task, scripted, **settings):
        super().__init__(task_id=task.id, **settings)
        self.task, self.scripted = task, scripted

    def _get_task(self):
        return self.task

    def _get_user(self):
        user = super()._get_user()
        return Script(tools=user.tools, instructions=user.instructions) if self.scripted else user

    def _run_orchestrator(self):
        try:
            self._simulation_run = self._orchestrator.run()
        except Exception as error:
            self.failure = error
        finally:
            self._simulation_done.set()

    def say(self, message):
        """What the agent hears after its message: the messages since, and whether that was all."""
        if not self.over:
            self._agent.set_action(message)
        return self.heard()

    @property
    def over(self):
        return self._simulation_done.is_set()

    def heard(self):
        while not self.over and not self._agent.is_agent_turn:
            self._simulation_done.wait(0.01)
        if self.failure is not None:
            if type(self.failure).__module__.split(".")[0] in ("litellm", "openai", "httpx"):
                raise CustomerLost("the customer's model gave no answer: %s" % self.failure) from self.failure
            raise self.failure
        return self._agent.observation


class CustomerLost(Exception):
    lost = True


class Conversation:
    def __init__(self, guest, task):
        self.guest, self.task = guest, task
        self.simulation = Simulation(task, guest.scripted, **guest.settings)
        self.turn = asyncio.Lock()
        self.calls = 0

    async def aside(self, call, *given):
        return await asyncio.get_running_loop().run_in_executor(self.guest.threads, call, *given)

    async def begin(self):
        await self.aside(self.simulation.reset)
        heard = await self.aside(self.simulation.heard)
        rules = SYSTEM_PROMPT.format(domain_policy=self.simulation._get_policy(), agent_instruction=AGENT_INSTRUCTION)
        said = [{"role": message.role, "content": message.content} for message in heard]
        self.prompt = [{"role": "system", "content": rules}, *said]

    @property
    def solution(self):
        wanted = self.task.evaluation_criteria
        actions = [each for each in wanted.actions or () if each.requestor == "assistant"] if wanted else []
        calls = [{"calls": [{"name": each.name, "arguments": each.arguments}]} for each in actions]
        return [*calls, {"text": " ".join((wanted and wanted.communicate_info) or ()) or "Done."}]

    async def act(self, text):
        return await self.heard(AssistantMessage(role="assistant", content=text))

    async def call(self, name, arguments):
        self.calls += 1
        call = ToolCall(id="call_%d" % self.calls, name=name, arguments=arguments)
        return await self.heard(AssistantMessage(role="assistant", tool_calls=[call]))

    async def heard(self, message):
        async with self.turn:  # calls of one message are made one by one
            heard = await self.aside(self.simulation.say, message)
        if self.simulation.over:
            return {"text": "", "done": True}
        last = heard[-1]
        error = "the tool failed" if isinstance(last, ToolMessage) and last.error else None
        return {"text": last.content or "", "error": error, "done": False}

    async def score(self, messages):
        run = self.simulation._simulation_run
        if run is None:
            return {"reward": 0.0}  # the agent ended before the conversation did
        if run.termination_reason.value in NOT_THE_AGENT:
            return {"invalid": "the conversation ended as %s" % run.termination_reason.value}
        try:
            reward, info = await self.aside(self.simulation._get_reward)
        except ValueError as error:
            # Some assertions raise where what they are about is not there: the agent did not make it.
            if "run_env_assertion" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]:
                return {"reward": 0.0}
            raise
        parts = json.loads(info).get("reward_breakdown") or {}
        return {"reward": float(reward), "components": {str(key): float(value) for key, value in parts.items()}}

    async def close(self):
        if not self.simulation.over and self.simulation._agent is not None and self.simulation._agent.is_agent_turn:
            # The thread of the simulation waits for the agent.
            self.simulation._agent.set_action(
                AssistantMessage(role="assistant", content=self.simulation._agent.STOP_TOKEN)
            )
