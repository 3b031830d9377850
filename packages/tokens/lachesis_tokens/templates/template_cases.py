"""Conversations that a chat template is tried on: plain turns in every context, odd turns in a plain context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeAlias

from lachesis_tokens.templates.chat_template import Tools

Messages: TypeAlias = tuple[Mapping[str, Any], ...]


class Pattern(NamedTuple):
    """A kind of continuation: the turn and the roles of the messages after it."""

    calls: int
    """0, 1, or 2 for several."""
    roles: tuple[str, ...]
    """`user`, `tool`, `system`, `assistant` and `calls` (an assistant message with calls). A "+" marks several messages
    of one role in a row, as in `tool+`."""

    @classmethod
    def of(cls, turn: Mapping[str, Any], following: Sequence[Mapping[str, Any]]) -> Pattern:
        """The pattern of messages that follow a turn."""
        runs = ((role, sum(1 for _ in run)) for role, run in groupby(map(role_of, following)))
        roles = tuple(role if length == 1 else f"{role}+" for role, length in runs)
        return cls(min(len(turn.get("tool_calls") or ()), 2), roles)

    def __str__(self) -> str:
        turn = ("text", "a call", "calls")[self.calls]
        return f"{', '.join(self.roles) or 'nothing'} after {turn}"


USUAL: Final = (
    Pattern(0, ("user",)),
    Pattern(1, ("tool",)),
    Pattern(2, ("tool+",)),
    Pattern(1, ("user",)),
    Pattern(1, ("tool", "user")),
)
"""The continuations of nearly every rollout. Others are validated when they occur."""


class TemplateCase(NamedTuple):
    """A conversation of OpenAI messages: some context, a turn of the model, and the messages after it."""

    context: tuple[Mapping[str, Any], ...]
    turn: Mapping[str, Any]
    following: tuple[Mapping[str, Any], ...]
    tools: Tools | None = None

    @property
    def system(self) -> Mapping[str, Any] | None:
        """The system message."""
        return self.context[0] if self.context[0]["role"] == "system" else None

    def without(self, key: str) -> TemplateCase:
        """The case without reasoning, or without content next to calls."""
        context = tuple(_stripped(message, key) for message in self.context)
        return TemplateCase(context, _stripped(self.turn, key), self.following, self.tools)


def describe_context(case: TemplateCase) -> str:
    system = "with" if case.system else "without"
    tools = "with" if case.tools else "without"
    return f"a conversation {system} a system prompt, {tools} tools, of {len(case.context)} messages before it"


def plain_turns(pattern: Pattern, spelled: str) -> Iterator[TemplateCase]:
    """Plain turns in every context. The messages contain the text of `spelled`, a special token."""
    turn, following = turn_of(pattern.calls), following_of(pattern, spelled)
    contexts: list[Messages] = [PLAIN, (SYSTEM, *PLAIN), _TWO_TURNS, _WITH_RESULTS]
    for context in (*contexts, (SYSTEM, *_WITH_RESULTS, *_NEXT)):
        yield TemplateCase(context, turn, following)
    for context in (PLAIN, (SYSTEM, *_TWO_TURNS)):
        yield TemplateCase(context, turn, following, TOOLS)


def odd_turns(pattern: Pattern, spelled: str) -> Iterator[TemplateCase]:
    """Turns of every kind in a plain context."""
    following = following_of(pattern, spelled)
    odd: list[dict[str, Any]] = [{"content": ""}, {"reasoning": "Think first.\n\nThen speak."}]
    if pattern.calls:
        odd += [{"content": "Let me look."}, {"content": "Let me look.", "reasoning": "Think."}]
    else:
        odd += [{"content": "Zürich 東京 🙂\n\n- naïve\n"}, {"content": f"Never say {spelled} aloud."}]
    for fields in odd:
        yield TemplateCase(PLAIN, {**turn_of(pattern.calls), **fields}, following)


def role_of(message: Mapping[str, Any]) -> str:
    return "calls" if message.get("tool_calls") else str(message["role"])


def mark(number: int) -> str:
    return f"probe-mark-{number}"


def call_of(number: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    name = TOOLS[number % len(TOOLS)]["function"]["name"]
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def turn_of(calls: int) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": "" if calls else "The tide is high."}
    if calls:
        turn["tool_calls"] = [call_of(number, {"query": f"tide {number}", "limit": 3}) for number in range(calls)]
    return turn


def following_of(pattern: Pattern, spelled: str) -> tuple[dict[str, Any], ...]:
    messages: list[dict[str, Any]] = []
    for role in pattern.roles:
        for number in range(2 if role.endswith("+") else 1):
            said = f"{mark(len(messages))} in Zürich 東京 🙂 <think> {spelled} \n x"
            kind = role.removesuffix("+")
            if kind == "tool":
                name = TOOLS[number % len(TOOLS)]["function"]["name"]
                messages.append({"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": said})
            elif kind == "calls":
                messages.append({"role": "assistant", "content": "", "tool_calls": [call_of(0, {"query": said})]})
            else:
                messages.append({"role": kind, "content": said})
    return tuple(messages)


def omitted(pattern: Pattern, spelled: str, wholes: Sequence[str]) -> str:
    """The messages of `following_of` that one of the texts leaves out, as a name for people; "" if it is none."""
    for number, role in enumerate(map(role_of, following_of(pattern, spelled))):
        if role not in ("assistant", "calls") and any(mark(number) not in whole for whole in wholes):
            return {"tool": "tool results", "user": "user messages", "system": "system messages"}[role]
    return ""


def _stripped(message: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    if key == "content":
        return {**message, "content": ""} if message.get("tool_calls") else message
    return {name: value for name, value in message.items() if name != key}


TOOLS: Final[Sequence[dict[str, Any]]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What."}, "limit": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }
    for name in ("probe_search", "probe_ping")
)
SYSTEM: Final = {"role": "system", "content": "You are a harbour master."}
PLAIN: Final[Messages] = ({"role": "user", "content": "When is the tide high?"},)
_TWO_TURNS: Final[Messages] = (
    *PLAIN,
    {"role": "assistant", "content": "At noon.", "reasoning": "It was low at six."},
    {"role": "user", "content": "And tomorrow?"},
)
_WITH_RESULTS: Final[Messages] = (
    *PLAIN,
    {"role": "assistant", "content": "", "reasoning": "Look it up.", "tool_calls": [call_of(0, {"query": "tide"})]},
    {"role": "tool", "tool_call_id": "call00000", "name": "probe_search", "content": "noon"},
)
_NEXT: Final[Messages] = ({"role": "assistant", "content": "At noon."}, {"role": "user", "content": "And tomorrow?"})
