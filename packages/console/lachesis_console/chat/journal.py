"""Chats on the disk: one file a chat, to which each message is appended before anything else happens.

After the line of the chat, each line is a message, or changes the messages before it:

* `{"keep": 2, "sandbox": 7}`: those after the first 2 were taken back. The sandbox is as the first 7 turns with calls
  and results, of all that the file has, have made it: a checkpoint that was gone back to has fewer than ran.
* `{"replace": [2, 8], "by": [...]}`: a summary is in the place of those from 2 to before 8. What they did stays done.
* `{"prompt": [...]}`: a summary is in the place of a part of the prompt too, which is this one now.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from backends.errors import SettingsError
from lachesis_console.chat.ran import Lost, Ran
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
    prompt: Sequence[Mapping[str, Any]] | None = None
    """The prompt, where it is not that of the item any more."""
    _ran: Ran = field(default_factory=Ran)
    _places: list[int | None] = field(default_factory=list)
    """Of each message in what ran."""
    _moved: dict[str, int | None] = field(default_factory=dict)
    """What an older version took back and wrote again, behind a summary: it ran once."""
    _file: IO[bytes] | None = None

    @property
    def ran(self) -> int:
        """Turns with calls, and results, that have made the sandbox what it is."""
        return len(self._ran)

    @property
    def lost(self) -> Lost:
        """What ran and is in the conversation no more."""
        return self._ran.lost(self._places)

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
                if "sandbox" in entry:
                    self._ran.cut(int(entry["sandbox"]))
                else:
                    dropped = zip(self.messages[keep:], self._places[keep:], strict=True)
                    self._moved = {json.dumps(message): place for message, place in dropped}
                del self.messages[keep:], self._places[keep:]
            case {"replace": [int(start), int(stop)], "by": [*messages]} if self.about and 0 <= start <= stop <= len(
                self.messages
            ):
                self.messages[start:stop] = map(_checked, messages)
                self._places[start:stop] = [None] * len(messages)
            case {"prompt": [*messages]} if self.about:
                self.prompt = [*map(_checked, messages)]
            case _ if self.about:
                self.messages.append(_checked(entry))
                known = self._moved.pop(json.dumps(entry), None)
                self._places.append(self._ran.add(entry) if known is None else known)
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

    def follow(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: Sequence[Mapping[str, Any]] | None = None,
        sandbox: int | None = None,
    ) -> None:
        """Note what is new in the conversation, that its end was taken back, or that a part of it was replaced.

        Args:
            prompt: the messages before, where they are not the prompt of the item any more.
            sandbox: what `ran` was when the sandbox was as it is now again; None where nothing was gone back to.
        """
        same = alike(self.messages, messages)
        dropped, new = self.messages[same:], messages[same:]
        entries: list[Mapping[str, Any]] = []
        if prompt is not None and prompt != self.prompt:
            entries.append({"prompt": [*prompt]})
        if dropped and (moved := alike(dropped[::-1], new[::-1])):
            stop = len(self.messages) - moved
            entries.append({"replace": [same, stop], "by": [*new[: len(new) - moved]]})
            new = ()
        elif dropped or sandbox is not None:
            entries.append({"keep": same, "sandbox": self.ran if sandbox is None else sandbox})
        if entries := [*entries, *new]:
            self._append(entries)
        for entry in entries:
            self._take(entry)

    def branched(self, name: str) -> Journal:
        """A copy under another name, which goes on from here.

        Raises:
            SettingsError: there is such a chat.
        """
        other = Journal.named(name, self.path.parent)
        if other.path.exists():
            raise SettingsError(f"there is a chat {name!r}; take another name")
        other.begin({key: value for key, value in self.about.items() if key != "schema"})
        entries = [json.loads(line) for line in self.path.read_bytes().splitlines()[1:]]
        other._append(entries)  # with what was taken back: the sandbox of both is what all that ran has made it
        for entry in entries:
            other._take(entry)
        self.close()
        return other

    def _append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") for entry in entries]
        assert self._file is not None
        self._file.write(b"".join(line + b"\n" for line in lines))  # half a character is an escape
        self._file.flush()
        os.fsync(self._file.fileno())


def _checked(message: Any) -> Mapping[str, Any]:
    """Raises MessageError."""
    Message.from_openai(message)
    checked: Mapping[str, Any] = message
    return checked


def alike(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """How many are the same at the beginning of both."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))])
