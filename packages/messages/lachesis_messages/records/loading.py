"""From ShareGPT entries back to API messages.

Reading is the inverse of writing for everything that the format holds. It loses trailing white space of the assistant's
text, the field of the reasoning (reading returns `reasoning`), the spacing of arguments and JSON results (reading
returns Python's default), and the ids of calls without a structured result (reading returns `call_<n>`).
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from lachesis_messages.errors import MalformedMessage, UnexpectedToolResult, UnknownRole
from lachesis_messages.markup import NotJson, inside, load_arguments, load_json, unescape_text, write_json
from lachesis_messages.messages import OpenAIMessage
from lachesis_messages.records.sharegpt import conversation_tools, is_structured_result

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>\n?", re.DOTALL)
_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_THINK = re.compile(r"<think>(.*?)</think>\n?", re.DOTALL)


def from_sharegpt(entry: Mapping[str, Any]) -> list[OpenAIMessage]:
    """The API messages of an entry of any variant, with reasoning under `reasoning`.

    A generated system turn belongs to the format and is left out; `tools_from_sharegpt` reads its tools. Raises
    MessageError, which names the turn, for a turn that is not in the format.
    """
    turns: Sequence[Mapping[str, str]] = entry["conversations"]
    reader = _Reader(_known_ids(turns))
    generated = conversation_tools(turns) is not None
    for index, turn in enumerate(turns):
        role, value = turn.get("from"), turn.get("value")
        if not isinstance(value, str):
            raise MalformedMessage("a turn without a text value", index=index)
        if role == "system":
            if index or not generated:
                reader.messages.append({"role": "system", "content": value})
        elif role == "human":
            reader.messages.append({"role": "user", "content": value})
        elif role == "gpt":
            reader.gpt(index, value)
        elif role == "tool":
            reader.tool(index, value)
        else:
            raise UnknownRole(f"unknown turn {role!r}, expected one of system, human, gpt, tool", index=index)
    return reader.messages


def tools_from_sharegpt(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The OpenAI tool definitions of an entry: from its `tools`, else from its generated system turn."""
    if isinstance(entry.get("tools"), str):
        return list(json.loads(entry["tools"]))
    signatures = conversation_tools(entry["conversations"]) or []
    keys = ("name", "description", "parameters")
    return [{"type": "function", "function": {key: signature[key] for key in keys}} for signature in signatures]


class _Reader:
    """Collects the messages of one entry, and pairs calls with results."""

    def __init__(self, known_ids: set[str]) -> None:
        self.messages: list[OpenAIMessage] = []
        self._known_ids = known_ids
        self._number = 0
        self._open: deque[dict[str, Any]] = deque()  # calls of the latest gpt turn that have no result yet
        self._names: Counter[str] = Counter()  # theirs

    def gpt(self, index: int, value: str) -> None:
        message: OpenAIMessage = {"role": "assistant", "content": None}
        thought = _THINK.match(value)
        if thought:
            value = value[thought.end() :]
        closed = _end(value, "</tool_call>")
        blocks = list(_CALL.finditer(value, 0, closed))
        calls = [self._call(index, block[1]) for block in blocks]
        content = _CALL.sub("", value[:closed]) + value[closed:]
        if blocks:
            first = blocks[0].start()
            if not content[first:].strip():
                # The newline between the text and the calls belongs to the format. Text elsewhere, which only other
                # writers produce, is kept unchanged.
                content = content[:first].removesuffix("\n")
            message["tool_calls"] = calls
        if content or not calls:
            message["content"] = unescape_text(content)
        if thought and thought[1].strip():
            message["reasoning"] = unescape_text(inside(thought[1]), think=True)
        self._open, self._names = deque(calls), Counter(call["function"]["name"] for call in calls)
        self.messages.append(message)

    def tool(self, index: int, value: str) -> None:
        closed = _end(value, "</tool_response>")
        payloads = [inside(payload) for payload in _RESULT.findall(value, 0, closed)]
        if not payloads or _RESULT.sub("", value[:closed]).strip() or value[closed:].strip():
            raise MalformedMessage("a tool turn with text outside of <tool_response>", index=index)
        for payload in payloads:
            result = _structured(payload)
            if result is None:
                call = self._answered(index, None)
                self.messages.append(_result(call["id"], unescape_text(payload)))
                continue
            call = self._answered(index, result["name"])
            if result["tool_call_id"]:
                call["id"] = str(result["tool_call_id"])
            content = result["content"]
            text = content if isinstance(content, str) else write_json(content)
            self.messages.append(_result(call["id"], text))

    def _call(self, index: int, payload: str) -> dict[str, Any]:
        try:
            call = load_json(payload)
        except NotJson as error:
            raise MalformedMessage(f"a <tool_call> that is not JSON: {error}", index=index) from None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise MalformedMessage("a <tool_call> without a name", index=index)
        try:
            arguments = load_arguments(write_json(call.get("arguments", {})))
        except NotJson as error:
            raise MalformedMessage(f"the arguments of {call['name']} are not an object: {error}", index=index) from None
        function = {"name": call["name"], "arguments": write_json(arguments)}
        return {"id": self._id(), "type": "function", "function": function}

    def _id(self) -> str:
        while (new := f"call_{self._number}") in self._known_ids:
            self._number += 1
        self._number += 1
        return new

    def _answered(self, index: int, name: str | None) -> dict[str, Any]:
        """The call that the next result answers. Results come in the order of the calls; some may be missing."""
        if not self._open:
            raise UnexpectedToolResult("a result for a call that no gpt turn before it made", index=index)
        known = name is not None and self._names[name] > 0
        while True:
            call = self._open.popleft()
            of = call["function"]["name"]
            self._names[of] -= 1
            if not known or of == name:
                return call


def _end(text: str, closing: str) -> int:
    """Where the last block ends, with a newline: each tag that opens one after it would be sought an end in vain."""
    place = text.rfind(closing)
    return 0 if place < 0 else min(len(text), place + len(closing) + 1)


def _structured(payload: str) -> dict[str, Any] | None:
    """The result in a payload of the JSON form; None where the payload is bare text."""
    if not payload.startswith("{"):
        return None
    try:
        result = load_json(payload, unique_keys=True)
    except NotJson:
        return None
    return result if is_structured_result(result) else None


def _known_ids(turns: Sequence[Mapping[str, str]]) -> set[str]:
    """Ids of the entry that look like generated ones and must not be generated again."""
    return {known for turn in turns if turn.get("from") == "tool" for known in _MADE_UP.findall(str(turn.get("value")))}


_MADE_UP = re.compile(r'"tool_call_id": ?"(call_\d+)"')


def _result(call_id: str, content: str) -> OpenAIMessage:
    return {"role": "tool", "tool_call_id": call_id, "content": content}
