"""Chats on the disk: one file a chat, to which each message is appended before anything else happens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.errors import SettingsError

SCHEMA = "lachesis.chat/1"


def chats_folder() -> Path:
    """Where named chats are kept."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "lachesis/chats"


@dataclass(slots=True)
class Journal:
    """A chat's file. Its messages are those after the prompt."""

    path: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    """`environment`, `flags`, `item`."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def named(cls, name: str, folder: Path | None = None) -> Journal:
        """The chat of this name, with what it holds so far.

        Raises:
            SettingsError: the name cannot be one of a file, or the file is of something else.
        """
        if not re.fullmatch(r"[\w.-]{1,100}", name) or name.startswith("."):
            raise SettingsError(f"{name!r} cannot be the name of a chat; take letters, digits, '-' and '_'")
        journal = cls((folder or chats_folder()) / f"{name}.jsonl")
        if journal.path.exists():
            journal._read()
        return journal

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1]):  # the last one, if it is not empty, was cut off
            try:
                entry = json.loads(line)
            except ValueError:
                raise SettingsError(f"{self.path}, line {number + 1} is not JSON; move the file away") from None
            if number == 0:
                if entry.get("schema") != SCHEMA:
                    raise SettingsError(f"{self.path} is no chat of `lachesis chat`; take another name")
                self.about = entry
            elif "keep" in entry:
                del self.messages[entry["keep"] :]
            else:
                self.messages.append(entry)
        if lines[-1]:
            os.truncate(self.path, self.path.stat().st_size - len(lines[-1]))

    def begin(self, about: Mapping[str, Any]) -> None:
        """Start the file of a new chat."""
        self.about = {"schema": SCHEMA, **about}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append([self.about])

    def follow(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Note what is new in the conversation, or that its end was taken back."""
        same = 0
        for ours, theirs in zip(self.messages, messages, strict=False):
            if ours != theirs:
                break
            same += 1
        entries: list[Mapping[str, Any]] = [{"keep": same}] if same < len(self.messages) else []
        new = list(messages[same:])
        if entries or new:
            self._append([*entries, *new])
        self.messages[same:] = new

    def branched(self, name: str) -> Journal:
        """A copy under another name, which goes on from here.

        Raises:
            SettingsError: there is such a chat.
        """
        other = Journal.named(name, self.path.parent)
        if other.path.exists():
            raise SettingsError(f"there is a chat {name!r}; take another name")
        other.begin({key: value for key, value in self.about.items() if key != "schema"})
        other.follow(self.messages)
        return other

    def _append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        data = b"".join(json.dumps(entry, ensure_ascii=False).encode() + b"\n" for entry in entries)
        with self.path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
