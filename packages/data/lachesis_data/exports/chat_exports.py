"""Conversations as trainers take them: OpenAI's fine-tuning files, TRL's conversational columns, preference pairs.

`weight` says whether an assistant message is trained, as in OpenAI's files: 0 where the model did not sample it in its
place, such as an example in the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from backends.text import without_lone_surrogates
from lachesis_messages.errors import MessageError
from lachesis_messages.markup import NotJson, load_arguments, think_block, write_json
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.records.export_lines import (
    BRANCHES_OMITTED,
    NO_ANSWER,
    NOT_SAMPLED,
    Chat,
    ExportLine,
    LeftOutRollout,
    Unsuitable,
    chat_of,
    check_wanted,
    of_rollouts,
    reason_of,
)
from lachesis_messages.records.groups import (
    GroupRecord,
    RolloutRecord,
)
from lachesis_messages.records.sharegpt import WarningKind

Arguments: TypeAlias = Literal["object", "text"]
Columns: TypeAlias = Literal["messages", "prompt-completion"]
OpenAIReasoning: TypeAlias = Literal["drop", "think"]

OPENAI_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""The tools that OpenAI's API takes. Chat templates and trainers that read ShareGPT or TRL's columns take any name."""
REASONING_DROPPED = "reasoning_dropped"
RULE = "highest and lowest reward of the group; of equal ones the first"


def openai_line(
    chat: Chat,
    *,
    min_reward: float | None = None,
    completed_only: bool = True,
    reasoning: OpenAIReasoning = "drop",
) -> dict[str, Any]:
    """`{messages, tools}` by the rules of OpenAI's fine-tuning API, which knows no reasoning.

    Source: OpenAI's guide to supervised fine-tuning, and the request types of its Python package 3.54.
    """
    check_wanted(chat, min_reward, completed_only)
    messages = _messages(chat, arguments="text", reasoning=reasoning, parts=True)
    if chat.facts.get("outcome") == "completed":  # a tool may have ended the task; OpenAI's files end with the calls
        while messages[-1]["role"] == "tool":
            messages.pop()
    if messages[-1]["role"] != "assistant":
        raise Unsuitable("it does not end with an answer by the model")
    called = [call for message in messages for call in message.get("tool_calls", ())]
    if not all(OPENAI_NAME.fullmatch(each["function"]["name"]) for each in (*chat.tools, *called)):
        raise Unsuitable("OpenAI takes names of tools of 1 to 64 letters, digits, _ and - only")
    return {"messages": messages, **({"tools": list(chat.tools)} if chat.tools else {})}


def trl_line(
    chat: Chat,
    *,
    min_reward: float | None = None,
    completed_only: bool = True,
    columns: Columns = "messages",
    arguments: Arguments = "object",
    reasoning: str = "reasoning_content",
) -> dict[str, Any]:
    """TRL's columns `messages`, or `prompt` and `completion`, with `tools` as JSON text, which TRL and Axolotl read.

    Every assistant message has a `weight`. TRL does not read it (`warnings` says so where one is 0). It makes the keys
    of messages differ, and `datasets` then keeps messages as they are instead of giving each of them the keys of all.
    """
    check_wanted(chat, min_reward, completed_only)
    messages = _messages(chat, arguments=arguments, reasoning=reasoning, parts=False)
    start = _start(messages)
    parted = {"prompt": messages[:start], "completion": messages[start:]}
    if _has_untrained(messages if columns == "messages" else messages[start:]):
        chat.warnings.add(NOT_SAMPLED)
    return {
        **({"messages": messages} if columns == "messages" else parted),
        "tools": tools_text(chat.tools),
        **{name: str(chat.facts.get(name) or "") for name in ("environment", "item_key", "rollout_id")},
    }


openai = of_rollouts(openai_line)
trl = of_rollouts(trl_line)


class Preferences:
    """A preference pair for each group whose best rollout has more than `margin` over its worst, in TRL's columns.

    Both answer the same prompt: the messages before the first answer.
    """

    of_items = True
    """Its groups are those of `read_items`."""

    def __init__(
        self, margin: float = 0.0, arguments: Arguments = "object", reasoning: str = "reasoning_content"
    ) -> None:
        self.margin = margin
        self._messages = partial(_messages, arguments=arguments, reasoning=reasoning, parts=False)

    def __call__(self, group: GroupRecord) -> Iterator[ExportLine | LeftOutRollout]:
        found: list[tuple[RolloutRecord, list[dict[str, Any]], set[str]]] = []
        for rollout in group["rollouts"]:
            chat = chat_of(group, rollout)
            try:
                if rollout["reward"] is None:
                    raise Unsuitable("not scored")
                found.append((rollout, self._messages(chat), chat.warnings))
            except (Unsuitable, MessageError) as error:
                yield LeftOutRollout(rollout["rollout_id"], reason_of(error))
        if not found:
            return
        best, chosen, changed = max(found, key=lambda each: each[0]["reward"])
        worst, rejected, changed_too = min(found, key=lambda each: each[0]["reward"])
        start = _start(chosen)
        reason = "neither the best nor the worst"
        used: tuple[str, ...] = ()
        if best["reward"] - worst["reward"] <= self.margin:
            reason = "no difference in reward" if len(found) > 1 else "the only one of its group"
        elif chosen[:start] != rejected[:start] or _start(rejected) != start:
            reason = "the best and the worst have different prompts"
        elif chosen == rejected:
            reason = "the best and the worst are the same"
        else:
            used = (best["rollout_id"], worst["rollout_id"])
            untrained = {NOT_SAMPLED} if _has_untrained([*chosen[start:], *rejected[start:]]) else set()
            content = {
                "prompt": chosen[:start],
                "chosen": chosen[start:],
                "rejected": rejected[start:],
                "tools": tools_text(group["tools"]),
                "score_chosen": float(best["reward"]),
                "score_rejected": float(worst["reward"]),
                "rule": RULE,
                **{name: str(group.get(name) or "") for name in ("environment", "item_key")},
                "chosen_id": used[0],
                "rejected_id": used[1],
            }
            yield ExportLine(content, used, tuple(sorted(changed | changed_too | untrained)))
        for rollout, _, _ in found:
            if rollout["rollout_id"] not in used:
                yield LeftOutRollout(rollout["rollout_id"], reason)


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tool definitions as JSON text."""
    return valid_text(json.dumps(list(tools), ensure_ascii=False))


def valid_text(text: str, warnings: set[str] | None = None) -> str:
    """`text` without halves of surrogate pairs, which no UTF-8 file can hold."""
    if text.isascii():
        return text
    valid = without_lone_surrogates(text)
    if valid != text and warnings is not None:
        warnings.add(WarningKind.CHARACTER_REPLACED)
    return valid


def valid_json(value: Any, warnings: set[str]) -> Any:
    """A copy of a JSON value with such text."""
    return json.loads(valid_text(json.dumps(value, ensure_ascii=False), warnings))


def plain_text(content: Any, warnings: set[str]) -> str:
    """The text of a content; a part that is not text becomes its type in brackets."""
    if content is None or isinstance(content, str):
        return valid_text(content or "", warnings)
    texts = []
    for part in content:
        is_text = part.get("type") == "text"
        texts.append(part["text"] if is_text else f"[{part.get('type')}]")
        if not is_text:
            warnings.add(WarningKind.PART_OMITTED)
    return valid_text("".join(texts), warnings)


def _messages(chat: Chat, *, arguments: Arguments, reasoning: str, parts: bool) -> list[dict[str, Any]]:
    """New messages with the keys of the format. `parts`: content may be a list of parts, and null next to calls.

    Raises MessageError where the messages break the rules of a conversation.
    """
    validate_messages(chat.messages, late_system=chat.of_program)
    warnings = chat.warnings
    if chat.branches_omitted:
        warnings.add(BRANCHES_OMITTED)
    names: dict[str, str] = {}
    written = []
    for place, message in enumerate(chat.messages):
        role, content = message["role"], message.get("content")
        new: dict[str, Any] = {"role": role}
        if role == "tool":
            new["tool_call_id"] = message["tool_call_id"]
            if not parts:  # chat templates read it
                new["name"] = names[message["tool_call_id"]]
        elif message.get("name"):
            new["name"] = message["name"]
        if parts and role == "user" and isinstance(content, list):
            new["content"] = valid_json(content, warnings)
        else:
            new["content"] = plain_text(content, warnings)
        if role == "assistant":
            if calls := message.get("tool_calls"):
                names |= {call["id"]: call["function"]["name"] for call in calls}
                new["tool_calls"] = [_call(call, warnings, arguments) for call in calls]
                if parts and content is None:
                    new["content"] = None
            if (thought := message.get("reasoning") or "").strip():
                thought = valid_text(thought, warnings)
                if reasoning == "drop":
                    warnings.add(REASONING_DROPPED)
                elif reasoning == "think":
                    new["content"] = think_block(thought) + (new["content"] or "")
                else:
                    new[reasoning] = thought
            if not parts or place in chat.not_sampled:
                new["weight"] = int(place not in chat.not_sampled)
        written.append(new)
    if all(message["role"] != "assistant" or message.get("weight") == 0 for message in written):
        raise Unsuitable(NO_ANSWER)
    return written


def _call(call: Mapping[str, Any], warnings: set[str], form: Arguments) -> dict[str, Any]:
    function = call["function"]
    text = valid_text(function["arguments"], warnings)
    try:
        arguments = load_arguments(text)
    except NotJson:
        raise Unsuitable("arguments that are not a JSON object") from None
    if form == "text":
        given: Any = text if text.lstrip().startswith("{") else write_json(arguments)
    elif "\\u" in text:  # an escape may be half of a surrogate pair
        given = valid_json(arguments, warnings)
    else:
        given = arguments
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": given}}


def _start(messages: Sequence[Mapping[str, Any]]) -> int:
    """The index of the first answer that is trained."""
    return next(index for index, message in enumerate(messages) if message.get("weight"))


def _has_untrained(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("weight") == 0 for message in messages)
