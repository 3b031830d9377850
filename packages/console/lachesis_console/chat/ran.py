"""What ran in the sandbox of a chat or of a rollout, in that order: more than its conversation shows, once a summary
has replaced a part of that, or messages were taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from backends.errors import SettingsError
from lachesis_messages.records.groups import stored_messages

Lost: TypeAlias = Mapping[int, Sequence[Mapping[str, Any]]]
"""By place in a conversation: turns with calls, and their results, that ran before what is in that place."""

GONE_BACK = "gone back to a checkpoint"
"""Why messages were taken back whose calls the sandbox does not show any more."""


class Ran:
    """Turns with calls, and results of calls, in the order of time."""

    def __init__(self) -> None:
        self._all: list[Mapping[str, Any]] = []

    def __len__(self) -> int:
        return len(self._all)

    def add(self, message: Mapping[str, Any]) -> int | None:
        """The message's place; None if it is neither."""
        if message["role"] != "tool" and not message.get("tool_calls"):
            return None
        self._all.append(message)
        return len(self._all) - 1

    def cut(self, length: int) -> None:
        """The sandbox is as it was after the first `length`."""
        del self._all[length:]

    def lost(self, places: Sequence[int | None]) -> Lost:
        """What is not in a conversation whose messages have these places."""
        kept, found, after, done = {*places}, dict[int, list[Mapping[str, Any]]](), 0, 0
        for at, place in enumerate([*places, len(self)]):
            if place is None:
                continue
            if left := _executed([each for n, each in enumerate(self._all[done:place], done) if n not in kept]):
                found[after] = left
            after, done = at + 1, max(done, place + 1)
        return found


class RolloutRan:
    """What ran in a recorded rollout."""

    def __init__(self, group: Mapping[str, Any], rollout: Mapping[str, Any]) -> None:
        self._rollout = rollout
        self._discarded = rollout.get("discarded") or []
        self._branches = [stored_messages(group, rollout), *(each["messages"] for each in self._discarded)]

    def _up_to(self, number: int, stop: int) -> list[Mapping[str, Any]]:
        """The conversation up to a place in a branch; 0 is the one that the rollout ended with."""
        after = self._discarded[number - 1].get("after") if number else None
        before = self._up_to(after[0] + 1, after[1] + 1) if after else []
        return [*before, *self._branches[number][:stop]]

    def lost(self) -> Lost:
        """What is not in the conversation, by the place there.

        Raises:
            SettingsError: the record does not have all that ran.
        """
        self._check()
        ran, places = Ran(), dict[str, int | None]()
        # All that ran before a branch was left is in it, in what it continues, or in one that was left earlier.
        left = [
            self._up_to(number, len(each["messages"]))
            for number, each in enumerate(self._discarded, 1)
            if each["reason"] != GONE_BACK and not each.get("attempt")
        ]
        for message in chain(*left, self._branches[0]):
            if (name := _name(message)) and name not in places:  # a copy has the id of what ran
                places[name] = ran.add(message)
        return ran.lost([places.get(_name(message)) for message in self._branches[0]])

    def _check(self) -> None:
        places = Counter(edit["at"] for edit in self._rollout.get("context_edits") or () if edit["error"] is None)
        if places - Counter(each["at"] for each in self._discarded if not each.get("attempt")):
            raise SettingsError(
                f"the rollout {self._rollout['rollout_id']} cannot be played again: a summary replaced messages of "
                "its conversation, and its record does not have them (that of the rollout from which it branched off "
                "may); replay another one"
            )

    @property
    def changed_the_prompt(self) -> bool:
        """Whether a summary replaced a part of what came before the first turn."""
        edits = [each["at"] for each in self._discarded if each.get("edit")]
        if not edits:
            return False
        before = self._up_to(1, len(self._branches[1]))  # as it was when the first branch was left
        first = next((at for at, each in enumerate(before) if each["role"] == "assistant"), 0)
        return any(at < first for at in edits)


def _name(message: Mapping[str, Any]) -> str:
    """Of a turn with calls, or of a result; empty for other messages."""
    if message["role"] == "tool":
        return f"result {message['tool_call_id']}"
    return " ".join(call["id"] for call in message.get("tool_calls") or ())


def _executed(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without the turns of which no call has a result: they were not acted on."""
    answered = {each["tool_call_id"] for each in messages if each["role"] == "tool"}
    acted_on = [
        each
        for each in messages
        if each["role"] == "tool" or answered.intersection(call["id"] for call in each["tool_calls"])
    ]
    return acted_on if any(each["role"] != "tool" for each in acted_on) else []
