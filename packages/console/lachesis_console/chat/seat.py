"""The policy's place in one rollout: a recording first, then a model that a person talks to, or the person."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

from lachesis.loop.conversation import AgentConversation
from lachesis.loop.loop import HermesAgentLoop, PlayedRollout
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult, TokenCount
from lachesis.loop.rollout_player import RolloutPlayer
from lachesis.loop.tool_calls import SessionCalls
from lachesis.loop.turn_check import check_turn
from lachesis.rewards.reward import Reward
from lachesis.settings.server_settings import ServerConfig
from lachesis_client import InferenceError, RequestRejected, Router
from lachesis_client.model_server import tracks_tokens
from lachesis_client.streaming import AnswerStream
from lachesis_console.agent.session import in_turn
from lachesis_console.chat.actions import Action
from lachesis_console.chat.agent_lines import NotACall, read_line
from lachesis_console.chat.context import ChatCompression
from lachesis_console.chat.journal import Journal
from lachesis_console.chat.places import ChatPlaces
from lachesis_console.chat.recordings import RecordedRollout
from lachesis_console.chat.replay import Replay, results_of
from lachesis_console.chat.screen import Screen, interruptible
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message, Purpose, ToolCall
from lachesis_messages.responses import ChatResponse, Node
from lachesis_tools import ToolResult, ToolSession

RunCommand: TypeAlias = "Callable[[Seat, MessageHistory, ChatResponse | None, str], Awaitable[Action]]"

INTERRUPTED = "The user interrupted this call."


class Seat:
    """Answers in the place of a model server.

    Args:
        commands: names of commands.
        run_command: runs a line that begins with a slash; see `commands.run_command`.
        as_agent: the person is the policy.
        recorded: what is played first.
        turns: turns of it; None means all.
    """

    def __init__(
        self,
        screen: Screen,
        journal: Journal,
        commands: Collection[str],
        run_command: RunCommand,
        *,
        as_agent: bool = False,
        recorded: RecordedRollout | None = None,
        turns: int | None = None,
    ) -> None:
        self.screen, self.journal, self.as_agent = screen, journal, as_agent
        self._commands, self._run_command = commands, run_command
        self._replay = Replay(screen, recorded, turns)
        self._resumes = bool(journal.messages or journal.ran)  # what is played is in the journal
        self.places = ChatPlaces()
        self._said: ToolResult | None = None
        """The user's next message."""
        self._paused = False
        """The person interrupted a tool, and speaks before the model does."""
        self.first = 0
        """Messages of the prompt."""
        self._prompt: tuple[Node, ...] = ()
        self._compresses = False
        self._shown = 0
        self._typed = ""
        """The user's last message, which the person sees already."""
        self._streams = True
        """The server has refused no stream yet."""
        self.images: list[str] = []
        """Data URLs for the user's next message."""
        self.tokens, self.seconds = TokenCount(), 0.0
        self.stopped = False
        self.stop: Callable[[], object] = lambda: None
        """Cancels the run."""
        self.model, self.tool_call_parser = ServerConfig(), ""
        """Of the settings, for another model."""
        self.opened: list[Router] = []
        """Servers of other models, which the end of the chat closes."""
        screen.words = lambda: [f"/{name}" for name in (*commands, *self.tool_names)]

    def attach(self, loop: HermesAgentLoop, server: Any, player: RolloutPlayer, item: Any) -> HermesAgentLoop:
        """Take the place of the server in `loop`, and run its calls so that they are shown and can be interrupted."""
        self.loop, self.server, self.player, self.item = loop, server, player, item
        self._sub_agents = loop.sub_agents = copy.copy(loop)  # whose turns are not shown
        loop.compression = ChatCompression(self, loop.compression)
        loop.clarify = self.clarify
        assert isinstance(loop.execute, SessionCalls)
        self._execute = loop.execute
        loop.server = self
        loop.execute = self._run_calls
        # A person has no limit of time.
        loop.limits = replace(loop.limits, max_seconds=None, max_waiting=None)
        self._own_user = loop.follow_up
        """The environment plays the user."""
        loop.follow_up = self.user_message
        return loop

    def use(self, server: Router) -> None:
        """Ask another model from now on. The end of the chat closes its server."""
        self.server = self._sub_agents.server = server
        self.opened.append(server)

    def play(self, rollout: PlayedRollout) -> None:
        """The rollout begins."""
        self.rollout = rollout
        self._prompt, self.first = rollout.conversation.history.nodes(), len(rollout.conversation.request)

    @property
    def conversation(self) -> AgentConversation:
        """Each change of it is made here, so that what the model sees, what is kept and its size agree."""
        return self.rollout.conversation

    def may_compress(self) -> bool:
        """Not while a recording is played: its own compressions are in it."""
        return self._replay.over

    async def compress(self, run: Callable[[], Awaitable[None]]) -> None:
        """Compress the context. A summary is an answer to nobody."""
        self.follow()  # or what it moves could not be told from what is new
        self._compresses, before = True, len(self.conversation.history)
        try:
            await run()
        except InferenceError as error:
            self.screen.error(f"{error}. The context was not compressed; it is tried again at the next turn")
        finally:
            self._compresses = False
        self.follow()
        if self._shown > (now := len(self.conversation.request)) or before != len(self.conversation.history):
            self._shown = now
            self.screen.note("a summary has taken the place of older messages; /history shows it")

    def begin(self, prompt: str) -> None:
        """The person has typed the prompt."""
        self._typed = prompt

    @property
    def session(self) -> ToolSession:
        return self._execute.session

    @property
    def tool_names(self) -> list[str]:
        return [each["function"]["name"] for each in self.loop.tool_schemas] if hasattr(self, "loop") else []

    @property
    def can_edit(self) -> bool:
        """Whether what the model is sent is the conversation that is kept."""
        return not (self.loop.ephemeral_system_prompt or self.loop.prefill_messages)

    @property
    def exact(self) -> bool:
        """Whether the model's tokens are tracked (Phase 2)."""
        return tracks_tokens(self.player.server)

    # The policy.

    async def chat(self, messages: Any, **options: Any) -> ChatResponse:
        """The next turn of the agent."""
        history: MessageHistory = messages
        if self._compresses and not self.as_agent:
            summary: ChatResponse = await self.server.chat(history, **options)
            self.tokens.add(summary.usage)
            self.seconds += summary.latency
            return summary
        self._show_new(history)
        message = await self._replay.turn(self.conversation, self._play_lost)
        self._shown = len(history)
        if message is not None:
            recorded = self._given(message, "recording")
            self._show_turn(recorded)
            return await self._settle(history, recorded, options)
        self.follow()
        if self.as_agent:
            return await self._ask_person(history)
        paused, self._paused = self._paused, False
        action = await self.talk(history, None) if paused else Action.AGAIN
        while True:
            if action is Action.STOP:
                await self._stop()
            response = await self._ask_model(history, options)
            if response is None:
                action = await self.talk(history, None)
                continue
            self._show_turn(response)
            if response.message.tool_calls or self._own_user is not None:
                return response
            action = await self.talk(history, response)
            if action in (Action.SAY, Action.END):
                return response

    async def _stop(self) -> NoReturn:
        """End the run without an end of the rollout."""
        self.stopped = True
        self.stop()
        await asyncio.Future()  # until it is cancelled
        raise AssertionError("the run was not cancelled")

    async def _settle(
        self, history: MessageHistory, response: ChatResponse, options: Mapping[str, Any]
    ) -> ChatResponse:
        """After a recorded turn: what the user says to it, if the recording has no more."""
        if response.message.tool_calls:
            return response
        said = self._replay.user()
        if self._own_user is not None:  # it speaks itself
            return response
        if said is not None:
            self._said = said
        elif not self.as_agent:
            action = await self.talk(history, response)
            if action is Action.STOP:
                await self._stop()
            if action is Action.AGAIN:
                return await self.chat(history, **options)
        return response

    async def user_message(self, history: MessageHistory) -> str | ToolResult | None:
        """What the user says to the answer at the end of `history`."""
        self.follow()
        if self._own_user is not None:
            return await self._own_user(history)
        said, self._said = self._said, None
        return said

    async def _ask_model(self, history: MessageHistory, options: Mapping[str, Any]) -> ChatResponse | None:
        streams = not self.screen.plain and self._streams
        if streams and "stream" in inspect.signature(type(self.server).chat).parameters:
            options = {**options, "stream": AnswerStream(self.screen.stream)}
        try:
            with self.screen.thinking():
                response: ChatResponse = await interruptible(self.server.chat(history, **options))
        except RequestRejected as error:
            if "stream" not in options:
                self.screen.error(f"{error}. /retry asks again, /model NAME [URL] asks another one")
                return None
            self._streams = False  # the server may have no streams
            return await self._ask_model(history, {k: v for k, v in options.items() if k != "stream"})
        except InferenceError as error:
            self.screen.error(f"{error}. /retry asks again, /model NAME [URL] asks another one")
            return None
        except KeyboardInterrupt:
            self.screen.note("interrupted; the conversation is as it was before this answer")
            return None
        self.tokens.add(response.usage)
        self.seconds += response.latency
        return response

    async def _ask_person(self, history: MessageHistory) -> ChatResponse:
        """A turn that the person writes."""
        while True:
            line = await self.line("agent> ")
            if line is None:
                await self._stop()
            if line.startswith("/") and line[1:].split(" ")[0] in self._commands:
                if await self._run_command(self, history, None, line) is Action.END:
                    await self._stop()
                continue
            try:
                call = await read_line(line, self.loop.tool_schemas, self.line)
            except NotACall as error:
                self.screen.error(str(error))
                continue
            if call is None and not line.strip():
                continue
            ids = (f"call_{number}" for number in itertools.count(len(history)))  # the loop would change a known one
            id = next(id for id in ids if id not in self.rollout.call_ids)
            calls = () if call is None else (ToolCall(id, *call),)
            said = self._given(Message("assistant", line if call is None else None, tool_calls=calls), "person")
            self.follow(said)  # before the tool runs: a kill loses nothing that the person wrote
            return said

    # The person.

    async def talk(self, history: MessageHistory, response: ChatResponse | None) -> Action:
        """Lines of the person until one says something, asks again or ends. `response` is not in `history` yet."""
        self.follow(response)
        while True:
            line = await self.line("you> ")
            action = Action.END if line is None else Action.STAY
            if line is not None and line.startswith("/"):
                action = await self._run_command(self, history, response, line)
            if action is Action.END and response is None:
                return Action.STOP
            if action is Action.CUT:
                response = None
            elif action is not Action.STAY:
                return action
            elif line is None or line.startswith("/"):
                continue
            elif line.strip() or self.images:
                said, self.images = ToolResult(line, images=tuple(self.images)), []
                if response is not None:
                    self._said, self._typed = said, line
                    return Action.SAY
                self.conversation.append(Message("user", said.parts))
                self._shown = len(history)
                self.follow()
                return Action.AGAIN
            elif response is None:
                return Action.AGAIN

    async def clarify(self, question: str, choices: Sequence[str]) -> str | None:
        """The person's answer to a question of the model: a text, or the number of a choice."""
        numbered = (f"{number}. {choice}" for number, choice in enumerate(choices, 1))
        self.screen.said("agent", "\n".join([question, *numbered]))
        line = (await self.line("you> ") or "").strip()
        chosen = line.isdecimal() and 0 < int(line) <= len(choices)
        return choices[int(line) - 1] if chosen else line or None

    async def line(self, prompt: str) -> str | None:
        for second in (False, True):
            try:
                return await self.screen.ask(prompt)
            except KeyboardInterrupt:
                if not second:
                    self.screen.note("Ctrl-C again, Ctrl-D or /quit ends the chat")
        return None

    def follow(self, response: ChatResponse | None = None, *, sandbox: int | None = None) -> None:
        """Write down the conversation after the prompt, with an answer that is not in it yet.

        `sandbox` is what had run (`Journal.ran`) when the sandbox was as it is now again.
        """
        if self._resumes and not self._replay.over:  # what is still to be played would be cut off in its file
            return
        nodes = self.conversation.history.nodes()
        end, prompt = len(self._prompt), None
        if nodes[:end] != self._prompt:  # a summary is in the place of a part of it
            end = max((at for at, node in enumerate(nodes, 1) if _first_form(node) in self._prompt), default=0)
            prompt = [node.message.to_openai("reasoning") for node in nodes[:end]]
        self.first = end + self.conversation.offset
        more = [response.message.to_openai("reasoning")] if response is not None else []
        said = [*(node.message.to_openai("reasoning") for node in nodes[end:]), *more]
        self.journal.follow([dict(each) for each in said], prompt=prompt, sandbox=sandbox)

    async def _play_lost(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
        """Run turns that do not stay in the conversation, and leave them behind as a branch of it."""
        conversation, length = self.conversation, len(self.conversation.history)
        for said in (Message.from_openai(each) for each in messages if each["role"] == "assistant"):
            recorded = self._given(said, "recording")
            self._show_turn(recorded)
            conversation.append(recorded)
            self.rollout.call_ids.update(call.id for call in said.tool_calls)
            await self.rollout.run_tools(said, check_turn(recorded, self.loop.required_arguments))
            self.rollout.clock.ask()  # the loop waits for an answer all the while
            self.follow()
        now = results_of(conversation.history)
        conversation.rewind(length, "not in the conversation of the recording any more")
        self.follow()
        return now

    async def reward(self, history: MessageHistory, response: ChatResponse | None) -> Reward | None:
        """The environment's reward, as the conversation and the sandbox stand.

        Raises:
            RuntimeError: the reward raised.
            BackendError: the sandbox failed.
        """
        now = history.fork()
        if response is not None:
            now.append(response)
        result = AgentResult(len(now) - self.first, True, [], [], Outcome.COMPLETED, "asked by the user", now)
        session, player = self.session, self.player
        verifier = f"{self.loop.task_id}-reward"
        context = player.scorer.context_class(
            session, player.registry, open_verifier=functools.partial(player.sessions.open, verifier)
        )
        try:
            scored = await player.scorer.score(self.item, result, context)
        finally:
            if verifier in player.sessions:
                await player.sessions.close(verifier)
        if scored.error is not None or scored.faults:
            raise RuntimeError(str(scored.error or next(iter(scored.faults.values()))))
        return scored.value

    # The tools.

    async def _run_calls(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        own, done = self._execute, dict[str, ToolResult]()

        async def run(call: ToolCall) -> ToolResult:
            return done.setdefault(call.id, await own.one(call))

        try:
            results = await interruptible(in_turn(calls, own.registry, run))
        except KeyboardInterrupt:
            self._paused = True
            results = [done.get(call.id) or ToolResult(INTERRUPTED, error=INTERRUPTED) for call in calls]
        within = await own.bounded(calls, results)
        for call, result in zip(calls, within, strict=True):
            self.screen.result(call.name, result)
        return within

    def _given(self, message: Message, source: str) -> ChatResponse:
        """A turn that no model sampled. Beside exact tokens it is context, of which nothing is trained."""
        reason = FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP
        purpose: Purpose = "given" if self.exact else "turn"
        return ChatResponse(message, reason, reason.value, model=source, server=source, purpose=purpose)

    # What is shown.

    def _show_new(self, history: MessageHistory) -> None:
        nodes = history.nodes()
        for node in nodes[self._shown :]:
            if node.message.role in ("user", "system") and node.message.text != self._typed:
                self.screen.said(node.message.role, node.message.text)
        self._typed = ""

    def _show_turn(self, response: ChatResponse) -> None:
        self.follow(response)  # what a person has seen is on the disk
        message = response.message
        if message.text and message.text.strip() != self.screen.streamed.strip():
            self.screen.said("agent", message.text)
        self.screen.streamed = ""
        for call in message.tool_calls:
            self.screen.call(call.name, call.arguments)


def _first_form(node: Node) -> Node:
    """What a node is a copy of, or stands for."""
    while node.source is not None:
        node = node.source
    return node
