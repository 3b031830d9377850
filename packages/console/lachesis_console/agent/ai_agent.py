"""`AIAgent`: the agent of the Hermes stack, for programs that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Never, NoReturn, Self, Unpack

from lachesis import BUILTIN_TOOLS, LachesisError, Outcome
from lachesis_console.agent.callbacks import AgentCallbacks, OnText
from lachesis_console.agent.parameters import AgentParameters, AgentSettings, other_model, read_parameters
from lachesis_console.agent.recording import record_trajectory, write_session_log
from lachesis_console.agent.resources import AgentResources, LoopThread
from lachesis_console.agent.session import AgentAnswer, AgentSession, guarded
from lachesis_tools.on_request import ON_REQUEST

_INSTEAD: Final = {
    "_convert_to_trajectory_format": "use agent.trajectory._convert_to_trajectory_format(messages, ...)",
    "_save_trajectory": "AIAgent(save_trajectories=True) saves each conversation, agent.trajectory.save_trajectory any",
    "reset_session_state": "each conversation begins anew; a new AIAgent has its iteration_budget again",
}
"""Methods of the removed stack's class."""


class AIAgent:
    """A model with tools in a sandbox. Every method may be called on any thread; one conversation runs at a time.

    `docs/agent.md` describes the parameters. `close`, or a `with` block, removes the sandboxes; so does the end of the
    process.
    """

    def __init__(self, *by_position: Never, **given: Unpack[AgentParameters]) -> None:
        """
        Raises:
            TypeError: a parameter does not exist, or is not given by name.
            SettingsError, ToolsetError: a setting cannot be used.
        """
        if by_position:
            raise TypeError("AIAgent() takes its parameters by name: AIAgent(base_url=..., model=...)")
        self._settings: AgentSettings = read_parameters(given)
        self._given = self._settings.given
        self.session_id = self._given.get("session_id") or f"{datetime.now():%Y%m%d_%H%M%S}_{uuid.uuid4().hex[:6]}"
        self._server, self._fallback = self._settings.server, self._settings.fallback
        self._began = datetime.now()
        self._iterations_left = self._given.get("iteration_budget")
        clarify = self._given.get("clarify_callback")
        registry = BUILTIN_TOOLS if clarify is None else BUILTIN_TOOLS.extended(ON_REQUEST["clarify"])
        environment = self._settings.environment
        if clarify is not None and environment.enabled_toolsets is not None:
            environment = environment.model_copy(
                update={"enabled_toolsets": [*environment.enabled_toolsets, "clarify"]}
            )
        self._resources = AgentResources(environment, registry)
        self._callbacks = AgentCallbacks(self._given, verbose=self._settings.verbose)
        self._thread = LoopThread()
        self._connected = False
        self._turn = threading.Lock()
        self._session: AgentSession | None = None
        self._steered: list[str] = []
        self._running = self._interrupted = False
        self._interrupted_by: str | None = None
        self._end = weakref.finalize(self, _close, self._thread, self._resources)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"AIAgent has no attribute {name!r}{instead}", name=name, obj=self)

    @property
    def model(self) -> str:
        return self._server.model_name

    @property
    def base_url(self) -> str | None:
        return self._server.base_url

    @property
    def tools(self) -> list[dict[str, Any]]:
        """OpenAI definitions of the tools that the model has."""
        return list(self._resources.definitions)

    @property
    def valid_tool_names(self) -> set[str]:
        return {definition["function"]["name"] for definition in self._resources.definitions}

    def chat(self, message: str, stream_callback: OnText | None = None) -> str:
        """The answer to one message, in a conversation of its own; empty if the model gave none.

        Raises:
            InferenceError, BackendError, ToolCrashed: the infrastructure failed.
        """
        answer, _ = self._converse([{"role": "user", "content": message}], None, stream_callback)
        if answer.result.error is not None and not answer.interrupted:
            raise answer.result.error
        return answer.text

    def run_conversation(
        self,
        user_message: str,
        system_message: str | None = None,
        conversation_history: Sequence[Mapping[str, Any]] | None = None,
        task_id: str | None = None,
        stream_callback: OnText | None = None,
    ) -> dict[str, Any]:
        """Continue a conversation with a message of the user.

        Args:
            system_message: put first, unless the history has a system message.
            task_id: whose sandbox the tools use; None is the agent's own.

        Returns:
            `final_response` (None without one), `messages`, `api_calls`, `completed` (the model has answered),
            `partial` (it wrote nothing usable, and the conversation is at its last valid state), `interrupted`,
            `interrupt_message`, and `error` (None, or why it did not complete).
        """
        messages = [dict(message) for message in conversation_history or ()]
        messages.append({"role": "user", "content": user_message})
        answer, said = self._converse(messages, task_id, stream_callback, system_message)
        result = answer.result
        return {
            "final_response": answer.text or None,
            "messages": result.messages,
            "api_calls": result.api_calls,
            "completed": answer.completed,
            "partial": result.outcome in (Outcome.MODEL_ERROR, Outcome.CONTEXT_EXHAUSTED),
            "interrupted": answer.interrupted,
            "interrupt_message": said,
            "error": None if answer.completed or answer.interrupted else result.reason,
        }

    def interrupt(self, message: str | None = None) -> None:
        """Stop the conversation that runs now; its result has `message` as `interrupt_message`."""
        if self._end.alive:
            self._thread.soon(self._interrupt, message)

    def _interrupt(self, message: str | None) -> None:
        if self._running:
            self._interrupted, self._interrupted_by = True, message
            if self._session is not None:
                self._session.interrupt()

    def clear_interrupt(self) -> None:
        """Forget an interrupt that has not taken effect. The next conversation is never stopped by an earlier one."""
        self._interrupted, self._interrupted_by = False, None

    def steer(self, text: str) -> bool:
        """Add a text after the next tool results, now or in the next conversation. False if empty, or after `close`."""
        if not text.strip() or not self._end.alive:
            return False
        self._thread.soon(self._steer, text)
        return True

    def _steer(self, text: str) -> None:
        if self._session is not None:
            self._session.steer(text)
        else:
            self._steered.append(text)

    def switch_model(self, model: str, base_url: str | None = None, api_key: str | None = None) -> None:
        """Use another model from the next conversation on; of the same server, or of the one at `base_url`."""
        with self._alone():
            self._server = other_model(self._server, {"model": model, "base_url": base_url, "api_key": api_key})
            self._connected = False

    def close(self) -> None:
        """Interrupt it, remove the sandboxes and close the connections. The agent cannot be used afterwards."""
        self._thread.check_elsewhere()
        self.interrupt()
        with self._alone():
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _converse(
        self, messages: list[dict[str, Any]], task_id: str | None, on_text: OnText | None, system: str | None = None
    ) -> tuple[AgentAnswer, str | None]:
        system = system or self._settings.system_prompt
        if system and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system})
        with self._alone():
            if not self._end.alive:
                raise LachesisError("the agent is closed; create a new one")
            self.clear_interrupt()
            self._running = True
            try:
                answer = self._thread.result(self._play(messages, task_id or self.session_id, on_text))
            finally:
                self._running, self._session = False, None
            return answer, self._interrupted_by

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing else happens to the agent. Raises RuntimeError in a callback, which would wait for itself."""
        self._thread.check_elsewhere()
        with self._turn:
            yield

    async def _play(self, messages: list[dict[str, Any]], task_id: str, on_text: OnText | None) -> AgentAnswer:
        if not self._connected:
            await self._resources.connect([self._server, *([self._fallback] if self._fallback else [])])
            self._connected = True
        given, resources = self._given, self._resources
        calls = await resources.calls(task_id)
        server, *others = resources.servers
        turns = self._settings.max_iterations
        if self._iterations_left is not None:
            turns = min(turns, self._iterations_left)
        if turns < 1:
            raise LachesisError("the agent's iteration_budget is used up; make another agent, or give a larger one")
        session = AgentSession(
            server,
            resources.definitions,
            calls,
            events=self._callbacks.events(on_text),
            fallback=others[0] if others else None,
            max_turns=turns,
            max_tokens=given.get("max_tokens"),
            ephemeral_system_prompt=given.get("ephemeral_system_prompt"),
            prefill_messages=given.get("prefill_messages") or (),
            compression=resources.compression,
            tool_delay=given.get("tool_delay") or 0.0,
            clarify=given.get("clarify_callback"),
        )
        session.steered, self._session = self._steered, session
        if self._interrupted:  # before it began
            asyncio.get_running_loop().call_soon(session.interrupt)
        try:
            answer = await session.run(messages)
        except asyncio.CancelledError:  # Ctrl-C on the thread that waits
            self._write(session, list(session.history), "interrupted", completed=False)
            raise
        finally:
            self._steered, self._session = session.steered, None
        self._write(session, answer.result.messages, answer.result.reason, completed=answer.completed)
        if self._iterations_left is not None:
            self._iterations_left -= answer.result.turns_used
        return answer

    def _write(
        self, session: AgentSession, messages: Sequence[Mapping[str, Any]], reason: str, *, completed: bool
    ) -> None:
        server = self._fallback if session.fell_back and self._fallback is not None else self._server
        if self._settings.save_trajectories:
            guarded(record_trajectory, messages, self.tools, model=server.model_name, completed=completed)
        about: dict[str, Any] = {"model": server.model_name, "base_url": server.base_url, "tools": self.tools}
        about |= {"started": self._began, "completed": completed, "reason": reason}
        guarded(write_session_log, self.session_id, messages, **about)  # the answer may have cost much


def _close(thread: LoopThread, resources: AgentResources) -> None:
    if thread.here:  # the garbage collector runs on any thread
        threading.Thread(target=_close, args=(thread, resources), name="close an agent").start()
        return
    try:
        thread.result(resources.close())
    finally:
        thread.close()
