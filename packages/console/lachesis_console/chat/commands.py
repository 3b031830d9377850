"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from backends import BackendError
from backends.errors import SettingsError
from lachesis_client import InferenceError, Router
from lachesis_console.chat.actions import Action
from lachesis_console.chat.ran import GONE_BACK
from lachesis_console.chat.screen import PERSONALITIES
from lachesis_console.chat.seat import Seat
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse
from lachesis_tools.text import did_you_mean

KEPT: Final = 4
"""Messages at the end that `/compress` leaves as they are."""
_SUMMARY: Final = (
    "Summarise the conversation so far for yourself: what was asked, what you found out, which files and facts matter, "
    "and what is left to do. Write only the summary."
)


async def run_command(seat: Seat, history: MessageHistory, response: ChatResponse | None, line: str) -> Action:
    """Run a line that begins with a slash. `response` is the answer that is not in `history` yet."""
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or "; /help lists them"
        seat.screen.error(f"there is no command /{name}{hint}")
        return Action.STAY
    try:
        return await COMMANDS[name][1](seat, history, response, rest.strip())
    except (SettingsError, OSError, ValueError) as error:
        seat.screen.error(str(error))
        return Action.STAY


async def _help(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    for name, (text, _) in COMMANDS.items():
        seat.screen.note(f"/{name:<12} {text}")
    if seat.as_agent:
        seat.screen.note("/TOOL {json}   call a tool; also /TOOL key=value, /TOOL text, or /TOOL alone, which asks")
    return Action.STAY


async def _tools(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    for tool in seat.loop.tool_schemas:
        function = tool["function"]
        parameters = ", ".join((function.get("parameters") or {}).get("properties") or ())
        first = (function.get("description") or "").strip().partition("\n")[0].partition(". ")[0]
        seat.screen.note(f"{function['name']}({parameters})  {first}")
    return Action.STAY


async def _toolsets(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    from lachesis_tools import TOOLSETS

    names = set(seat.tool_names)
    for name, toolset in TOOLSETS.items():
        mark = "*" if toolset.tools and names.issuperset(toolset.tools) else " "
        seat.screen.note(f"{mark} {name:<12} {toolset.description}")
    return Action.STAY


async def _model(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    if seat.as_agent or seat.exact:
        raise SettingsError("the model of a chat without exact tokens can be changed, and of no other")
    name, *where = rest.split() or [""]
    if not name:
        raise SettingsError("write /model NAME [URL [KEY]]")
    from lachesis.runs.model_servers import server_of

    url, key, *_ = (*where, "", "")
    given = {"base_url": url, "api_key": key} if url else {}  # a key is for the server that it was given for
    config = seat.model.model_copy(update={"model_name": name, **given})
    seat.use(Router([server_of(config, tool_call_parser=seat.tool_call_parser)]))
    seat.screen.note(f"the next answer is of {name}")
    return Action.STAY


def _editable(seat: Seat) -> None:
    if not seat.can_edit:
        raise SettingsError(
            "this environment adds messages that are not kept (ephemeral_system_prompt, prefill): "
            "its conversation cannot be changed"
        )


async def _undo(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    _editable(seat)
    count = int(rest or 1)
    users = [at for at, node in enumerate(history.nodes()) if at >= seat.first and node.message.role == "user"]
    if seat.as_agent:  # turns of the agent, as there may be no messages of a user
        users = [at for at, node in enumerate(history.nodes()) if node.message.role == "assistant"]
    if count < 1:
        raise SettingsError("write /undo N, with N at least 1")
    keep = users[-count] if count <= len(users) else seat.first
    return _cut(seat, history, response, keep, "the sandbox is as it was")


def _cut(
    seat: Seat,
    history: MessageHistory,
    response: ChatResponse | None,
    keep: int,
    sandbox: str,
    *,
    reason: str = "taken back",
    ran: int | None = None,
) -> Action:
    """Take back what follows the first `keep` messages. `ran` is what had run where the sandbox is back there too."""
    if response is not None:
        history.branch(response, reason)
    seat.conversation.rewind(keep, reason)
    seat.follow(sandbox=ran)
    seat.screen.note(f"{keep - seat.first} messages are left after the prompt; {sandbox}")
    return Action.CUT


async def _checkpoint(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    name = rest or str(len(seat.places.kept) + 1)
    await seat.places.keep(name, seat.session, history, response, seat.journal.ran)
    seat.screen.note(f"/back {name} comes back to here, with the files as they are now")
    return Action.STAY


async def _back(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    _editable(seat)
    keep, ran = await seat.places.go_back(rest or next(reversed(seat.places.kept), ""), seat.session, history)
    if keep > len(history) or (keep == len(history) and response is None):
        seat.follow(response, sandbox=ran)
        seat.screen.note("no message was taken back; the sandbox is as it was there")
        return Action.STAY
    return _cut(seat, history, response, keep, "the sandbox is as it was there", reason=GONE_BACK, ran=ran)


async def _retry(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    if response is not None:
        history.branch(response, "asked again")
    return Action.AGAIN


async def _branch(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    seat.journal = seat.journal.branched(rest)
    seat.screen.note(f"this is the chat {rest} from here on; the other one is as it was")
    return Action.STAY


async def _history(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    messages = [node.message for node in history.nodes()] + ([response.message] if response is not None else [])
    for number, message in enumerate(messages):
        calls = "".join(f"\n→ {call.name} {call.arguments}" for call in message.tool_calls)
        seat.screen.said(f"{number} {message.role}", f"{message.text}{calls}")
    return Action.STAY


async def _save(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    if not rest:
        raise SettingsError("write /save FILE")
    messages = [*history.to_openai("reasoning"), *([response.message.to_openai("reasoning")] if response else [])]
    Path(rest).write_text(json.dumps(messages, indent=1, ensure_ascii=False) + "\n")
    seat.screen.note(f"{len(messages)} messages are in {rest}")
    return Action.STAY


async def _image(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    kind = mimetypes.guess_type(rest)[0] or ""
    if not kind.startswith("image/"):
        raise SettingsError(f"{rest or 'a file'} is no image by its name; write /image FILE.png")
    seat.images.append(f"data:{kind};base64,{base64.b64encode(Path(rest).read_bytes()).decode()}")
    seat.screen.note("it goes with your next message")
    return Action.STAY


async def _compress(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    _editable(seat)
    if seat.exact:
        raise SettingsError("beside exact tokens, --env.compress_context_at compresses, which keeps what it samples")
    nodes = history.nodes()
    # A call and its results stay together: the part ends where a user speaks.
    ends = [at for at in range(seat.first + 1, len(nodes) - KEPT + 1) if nodes[at].message.role == "user"]
    if not ends:
        raise SettingsError("the conversation is too short to be compressed")
    asked = [*history.to_openai("reasoning")[: ends[-1]], {"role": "user", "content": _SUMMARY}]
    try:
        answer = await seat.server.chat(asked)
    except InferenceError as error:
        raise SettingsError(f"the model did not write a summary: {error}") from None
    seat.tokens.add(answer.usage)
    summary = answer.message.text
    seat.conversation.replace(seat.first, ends[-1], Message("user", f"[CONTEXT SUMMARY]: {summary}"))
    seat.follow(response)
    seat.screen.note(f"{ends[-1] - seat.first} messages became a summary of {len(summary)} characters")
    return Action.STAY


async def _reward(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    try:
        reward = await seat.reward(history, response)
    except (RuntimeError, BackendError) as error:
        raise SettingsError(f"no reward: {error}") from None
    if reward is None:
        seat.screen.note("no reward: compute_reward returned None")
        return Action.STAY
    parts = ", ".join(f"{name} {value:g}" for name, value in reward.components.items())
    seat.screen.note(f"reward {reward.value:g}{f' ({parts})' if parts else ''}")
    return Action.STAY


async def _usage(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    tokens = seat.tokens
    seat.screen.note(
        f"{tokens.prompt_tokens} prompt tokens, {tokens.completion_tokens} completion tokens, "
        f"{tokens.uncounted_requests} answers without a count, {seat.seconds:.1f} s of the model"
    )
    return Action.STAY


async def _personality(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    if rest not in PERSONALITIES:
        raise SettingsError(f"personalities are {', '.join(PERSONALITIES)}")
    seat.screen.personality = rest
    return Action.STAY


async def _quit(seat: Seat, history: MessageHistory, response: ChatResponse | None, rest: str) -> Action:
    return Action.END


Command = Callable[[Seat, MessageHistory, ChatResponse | None, str], Awaitable[Action]]
COMMANDS: Final[Mapping[str, tuple[str, Command]]] = {
    "help": ("list the commands", _help),
    "tools": ("list the agent's tools", _tools),
    "toolsets": ("list toolsets; * marks those that the agent has", _toolsets),
    "model": ("NAME [URL [KEY]]: ask another model from here on", _model),
    "undo": ("[N]: take back the last N messages of yours and what followed; commands that ran are not undone", _undo),
    "checkpoint": ("[NAME]: keep the conversation and the sandbox as they are now", _checkpoint),
    "back": ("[NAME]: go back to a checkpoint, or to the last one; files too", _back),
    "retry": ("ask for another answer", _retry),
    "branch": ("NAME: go on under another name, and keep the chat as it is", _branch),
    "history": ("show all messages", _history),
    "save": ("FILE: write the messages as JSON", _save),
    "image": ("FILE: add an image to your next message", _image),
    "compress": ("let the model summarise the older messages", _compress),
    "reward": ("compute the environment's reward, as things stand", _reward),
    "usage": ("show tokens and time", _usage),
    "personality": ("NAME: what is shown while the model answers", _personality),
    "quit": ("end the chat; the rollout gets its reward", _quit),
}
