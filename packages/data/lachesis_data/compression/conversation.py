"""An entry's conversation, ShareGPT turns or OpenAI messages, with some of its turns replaced by a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lachesis_data.compression.region import Role, Turn
from lachesis_data.files.foreign import with_own_ids
from lachesis_messages.markup import dump_json
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.messages import REASONING_FIELDS, OpenAIMessage
from lachesis_messages.records.loading import from_sharegpt, tools_from_sharegpt
from lachesis_messages.records.sharegpt import conversation_tools

PREFIX: Final = "[CONTEXT SUMMARY]: "
"""How a summary begins, as in the removed implementation."""
_ROLES: Final[Mapping[str, Role]] = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


class UnknownEntry(ValueError):
    """An entry without a conversation in a known form."""


@dataclass(frozen=True)
class Conversation:
    """The conversation of an entry; `read` makes one of an entry, `entry` the entry again."""

    source: Mapping[str, Any]
    key: str
    """`conversations` (ShareGPT turns) or `messages` (OpenAI messages)."""
    items: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, entry: Any) -> Conversation:
        """Raises UnknownEntry, and MessageError for a conversation that is not valid."""
        if not isinstance(entry, Mapping):
            raise UnknownEntry(f"the line is {type(entry).__name__}, not an object")
        for key in ("conversations", "messages"):
            items = entry.get(key)
            if isinstance(items, list) and items and all(isinstance(item, Mapping) for item in items):
                found = cls(entry, key, items)
                found.validate()
                return found
        raise UnknownEntry("the entry has neither conversations nor messages that are a list of objects")

    @property
    def entry(self) -> dict[str, Any]:
        """The entry with this conversation, and all other fields as they were."""
        return {**self.source, self.key: list(self.items)}

    def validate(self) -> None:
        """Raises MessageError. Results of the last calls may be missing, as in conversations that were cut short."""
        validate_messages(with_own_ids(self.messages), complete=False, late_system=True)

    @property
    def messages(self) -> list[OpenAIMessage]:
        """The conversation as OpenAI messages. Raises MessageError."""
        return from_sharegpt(self.entry) if self.key == "conversations" else [dict(item) for item in self.items]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool definitions, from `tools` or the generated system turn. Raises UnknownEntry."""
        try:
            tools = self.source.get("tools")
            if tools is None or isinstance(tools, str):
                tools = tools_from_sharegpt({"conversations": (), **self.source})
            return [dict(tool) for tool in tools]
        except (ValueError, TypeError, KeyError) as error:
            raise UnknownEntry(f"its tools cannot be read ({error})") from None

    @property
    def roles(self) -> list[Role]:
        """ShareGPT's roles, for both forms."""
        if self.key == "conversations":
            return [item["from"] for item in self.items]
        return [_ROLES[item["role"]] for item in self.items]

    @property
    def texts(self) -> list[str]:
        """Everything that each turn says, reasoning and calls included."""
        return [item["value"] if self.key == "conversations" else _text(item) for item in self.items]

    @property
    def uncounted_parts(self) -> int:
        """Images and other parts that are not text."""
        return sum(part.get("type") != "text" for item in self.items for part in _parts(item))

    def turns(self, tokens: Sequence[int]) -> list[Turn]:
        """What `choose_region` takes, with the tokens of each turn.

        A generated system turn is protected, because it holds the tool definitions, and so are images.
        """
        roles = self.roles
        generated = self._generated_system
        return [
            Turn(
                role,
                tokens[index],
                opens_calls=role == "gpt" and bool(item.get("tool_calls") or "<tool_call>" in item.get("value", "")),
                protected=(index == 0 and generated) or any(part.get("type") != "text" for part in _parts(item)),
            )
            for index, (role, item) in enumerate(zip(roles, self.items, strict=True))
        ]

    def with_summary(self, region: range, summary: str, notice: str = "") -> Conversation:
        """The conversation with one human turn instead of `region`.

        `notice` goes to the end of the system turn. A generated system turn stays as it is, because readers find its
        tools by its exact text: then, or without a system turn, the notice begins the summary's turn.
        """
        before, after = list(self.items[: region.start]), list(self.items[region.stop :])
        text = PREFIX + summary
        if notice and before and self.roles[0] == "system" and not self._generated_system:
            before[0] = self._with_notice(before[0], notice)
        elif notice:
            text = f"{notice.strip()}\n\n{text}"
        human = {"from": "human", "value": text} if self.key == "conversations" else {"role": "user", "content": text}
        return Conversation(self.source, self.key, [*before, human, *after])

    @property
    def _generated_system(self) -> bool:
        return self.key == "conversations" and conversation_tools(self.items) is not None

    def _with_notice(self, system: Mapping[str, Any], notice: str) -> Mapping[str, Any]:
        name = "value" if self.key == "conversations" else "content"
        given = system[name]
        if isinstance(given, str):
            return system if given.endswith(notice) else {**system, name: given + notice}
        part = {"type": "text", "text": notice}
        return system if part in given else {**system, name: [*given, part]}


def without_media(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a short text instead of each part that is not text."""
    if not _parts(message):
        return dict(message)
    parts = [
        part if part.get("type") == "text" else {"type": "text", "text": f"[{part.get('type')}]"}
        for part in _parts(message)
    ]
    return {**message, "content": parts}


def _parts(item: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = item.get("content")
    return content if isinstance(content, list) else ()


def _text(message: Mapping[str, Any]) -> str:
    content = without_media(message).get("content") or ""
    reasoning = next((message[name] for name in REASONING_FIELDS[:2] if message.get(name)), "")
    calls = [
        dump_json({"name": call["function"]["name"], "arguments": call["function"].get("arguments")})
        for call in message.get("tool_calls") or ()
    ]
    said = content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
    return "\n".join(filter(None, [reasoning, said, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]))
