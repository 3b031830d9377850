"""Chats on the disk: one file a chat, to which each message is appended before anything else happens."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from backends.errors import SettingsError
from lachesis_messages.messages import Message

SCHEMA = "lachesis.chat/1"


def chats_folder() -> Path:
    """Where named chats are kept."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "lachesis/chats"


@dataclass(slots=True)
class Journal:
    """A chat's file, which is this process's alone until `close`. Its messages are those after the prompt."""

    path: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    """`environment`, `flags`, `item`."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    _file: IO[bytes] | None = None

    @classmethod
    def named(cls, name: str, folder: Path | None = None) -> Journal:
        """The chat of this name, with what it holds so far.

        Raises:
            SettingsError: the name cannot be one of a file, the file is of something else, or a chat goes on there.
        """
        if not re.fullmatch(r"[\w.-]{1,100}", name) or name.startswith("."):
            raise SettingsError(f"{name!r} cannot be the name of a chat; take letters, digits, '-' and '_'")
        journal = cls((folder or chats_folder()) / f"{name}.jsonl")
        if journal.path.exists():
            journal._open()
        return journal

    def _open(self) -> None:
        try:
            self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b")
            os.fchmod(self._file.fileno(), 0o600)  # also one that is there already
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            why = "another chat goes on in it; end that one" if isinstance(error, BlockingIOError) else error.strerror
            raise SettingsError(f"{self.path} cannot be used: {why}, or take another name") from None
        self._file.seek(0)
        *lines, cut_off = self._file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                self._take(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise SettingsError(
                    f"{self.path}, line {number} is none of a chat ({error}); move the file away, or take another name"
                ) from None
        if cut_off:
            self._file.truncate(self._file.tell() - len(cut_off))

    def _take(self, entry: Any) -> None:
        match entry:
            case {"schema": str(schema), "environment": str(), "flags": [*flags], "item": _} if (
                not self.about and {str} >= {*map(type, flags)} and schema == SCHEMA
            ):
                self.about = entry
            case {"keep": int(keep)} if self.about and 0 <= keep <= len(self.messages):
                del self.messages[keep:]
            case _ if self.about:
                Message.from_openai(entry)  # raises MessageError
                self.messages.append(entry)
            case _:
                raise ValueError(f"a chat begins with {SCHEMA}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Start the file of a new chat. Raises SettingsError where another process has."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        if self.about:
            raise SettingsError(f"there is a chat in {self.path} by now; take another name")
        self.about = {"schema": SCHEMA, **about}
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
        self.close()
        return other

    def _append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") for entry in entries]
        assert self._file is not None
        self._file.write(b"".join(line + b"\n" for line in lines))  # half a character is an escape
        self._file.flush()
        os.fsync(self._file.fileno())
