"""What an agent tells: its callbacks, and the lines that it prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from lachesis import ToolCall, ToolResult
from lachesis_client.streaming import Delta
from lachesis_console.agent.parameters import AgentParameters
from lachesis_console.agent.session import AgentEvents, guarded
from lachesis_messages.markup import load_arguments

OnText: TypeAlias = Callable[[str], object]


class AgentCallbacks:
    """The callbacks among the parameters of `AIAgent`, as events of its conversations."""

    def __init__(self, given: AgentParameters, *, verbose: bool) -> None:
        self._given, self._verbose = given, verbose

    def events(self, on_text: OnText | None) -> AgentEvents:
        """Those of one conversation; `on_text` gets the pieces of its answers too."""
        given = self._given
        listeners = [each for each in (on_text, given.get("stream_delta_callback")) if each is not None]
        others = ("reasoning_callback", "tool_gen_callback", "thinking_callback")
        streams = bool(listeners) or any(name in given for name in others)

        thinking = False

        def delta(piece: Delta) -> None:
            nonlocal thinking
            if thinking and piece.kind in ("text", "call"):
                thinking = False
                guarded(given.get("thinking_callback"), "")
            if piece.kind == "text":
                for listener in listeners:
                    guarded(listener, piece.text)
            elif piece.kind == "reasoning":
                guarded(given.get("reasoning_callback"), piece.text)
            elif piece.kind == "call":
                guarded(given.get("tool_gen_callback"), piece.text)
            else:
                status("the answer broke off and is asked for again; its beginning is void")

        def step(number: int) -> None:
            nonlocal thinking
            thinking = True
            guarded(given.get("step_callback"), number)
            guarded(given.get("thinking_callback"), "thinking")

        def started(call: ToolCall) -> None:
            self._print(f"{call.name} {call.arguments}")
            arguments = _arguments(call)
            guarded(given.get("tool_progress_callback"), call.name, self._short(call.arguments), arguments)
            guarded(given.get("tool_start_callback"), call.id, call.name, arguments)

        def complete(call: ToolCall, result: ToolResult) -> None:
            self._print(f"{call.name} took {result.duration:.1f} s: {result.content}")
            guarded(given.get("tool_complete_callback"), call.id, call.name, _arguments(call), result.content)

        def status(text: str) -> None:
            self._print(text)
            guarded(given.get("status_callback"), text)

        return AgentEvents(
            delta=delta if streams else None, tool_start=started, tool_complete=complete, step=step, status=status
        )

    def _print(self, text: str) -> None:
        if not self._given.get("quiet_mode"):
            print(f"{self._given.get('log_prefix', '')}{text if self._verbose else self._short(text)}")

    def _short(self, text: str) -> str:
        limit = self._given.get("log_prefix_chars", 100)
        line = " ".join(text.split())
        return line if len(line) <= limit else f"{line[:limit]}…"


def _arguments(call: ToolCall) -> dict[str, Any]:
    return load_arguments(call.arguments.strip() or "{}")
