"""tau2-bench: an agent serves a customer, who is another model, or a script.

A target is a domain: `mock`, `airline`, `retail`, `telecom`. `user` is the URL of the customer's model (`user_model`;
its key, if it needs one, in OPENAI_API_KEY), or `scripted`: a customer who tells all of the task at once, makes a call
of the customer's own tools if the agent's message is one, and ends the conversation at any other message.
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
from tau2.gym.gym_agent import AgentGymEnv, GymAgent
from tau2.registry import registry
from tau2.user.base import STOP
from tau2.user.user_simulator import UserSimulator
from tau2.utils.tools import parse_action_string

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
        # Agents and customers read its tools and rules. Each conversation is in one of its own.
        self.environment = registry.get_env_constructor(target)()
        self.tools = [described(tool.openai_schema["function"]) for tool in self.environment.get_tools()]
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
        episode = Episode(self, self.tasks[item["number"]])
        await episode.begin()
        return episode


def described(function):
    return {key: function[key] for key in ("name", "description", "parameters")}


def as_message(said):
    """A message of tau2, as OpenAI's API has it: a conversation may begin with those that were said before."""
    message = {"role": said.role, "content": said.content}
    if isinstance(said, ToolMessage):
        message["tool_call_id"] = said.id
    if calls := getattr(said, "tool_calls", None):
        named = [(each.id, {"name": each.name, "arguments": json.dumps(each.arguments)}) for each in calls]
        message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in named]
    return message


class Script(UserSimulator):
    told = False

    def _generate_next_message(self, message, state):
        if not self.told:
            said, self.told = {"content": str(self.instructions)}, True
        elif isinstance(message, ToolMessage):
            said = {"content": message.content or "Done."}
        elif call := self.asked(message.content or ""):
            said = {"tool_calls": [call]}
        else:
            said = {"content": STOP}
        answer = UserMessage(role="user", **said)
        state.messages += [message, answer]
        return answer, state

    def asked(self, text):
        """The call of the customer's tools that the agent wrote as `NAME(ARGUMENT=VALUE)`, or as JSON."""
        try:
            calls = parse_action_string(text, requestor="user").tool_calls or ()
        except ValueError:
            return None
        known = [tool.name for tool in self.tools or ()]
        return next((call.model_copy(update={"requestor": "user"}) for call in calls if call.name in known), None)


class Simulation(AgentGymEnv):
    """tau2's own, which keeps why it failed."""

    failure = None

    def __init__(self, task, guest):
        super().__init__(task_id=task.id, **guest.settings)
        self.task, self.guest = task, guest

    def _get_task(self):
        return self.task

    def _get_agent(self):
        return GymAgent(tools=self.guest.environment.get_tools(), domain_policy=self.guest.environment.get_policy())

    def _get_user(self):
        tools = self.guest.environment.get_user_tools() if self.guest.environment.user_tools else None
        given = {"tools": tools, "instructions": self.task.user_scenario}
        if self.guest.scripted:
            return Script(**given)
        return UserSimulator(**given, llm=self.user_llm, llm_args=self.user_llm_args)

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


class Episode:
    def __init__(self, guest, task):
        self.guest, self.task = guest, task
        self.simulation = Simulation(task, guest)
        self.turn = asyncio.Lock()
        self.calls = 0

    async def aside(self, call, *given):
        return await asyncio.get_running_loop().run_in_executor(self.guest.threads, call, *given)

    async def begin(self):
        await self.aside(self.simulation.reset)
        heard = await self.aside(self.simulation.heard)
        rules = SYSTEM_PROMPT.format(domain_policy=self.simulation._get_policy(), agent_instruction=AGENT_INSTRUCTION)
        self.prompt = [{"role": "system", "content": rules}, *map(as_message, heard)]

    @property
    def solution(self):
        wanted = self.task.evaluation_criteria
        turns = []
        for each in (wanted and wanted.actions) or ():
            call = {"name": each.name, "arguments": each.arguments}
            # The agent asks the customer for what the customer has to do.
            turns.append({"calls": [call]} if each.requestor == "assistant" else {"text": json.dumps(call)})
        return [*turns, {"text": " ".join((wanted and wanted.communicate_info) or ()) or "Done."}]

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
